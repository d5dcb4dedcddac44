// What went wrong in TLS, in words that say what to do. Knows OpenSSL's error codes.
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "transport/wire/tls_address.h"
#include "transport/wire/tls_stream.h"

namespace geomesh::transport {

// OpenSSL's queue of errors of this thread, emptied: "reason; reason".
std::string OpenSslErrors();

// Why the stream failed (or, with `closed`, ended) before the lane was up. `problem`: what our own
// callbacks found, which is better than anything OpenSSL says.
std::string TlsFailureText(const TlsStream& stream, TlsMode mode, bool dialler, bool closed,
                           absl::string_view problem);

// The same for a lane that was up.
std::string TlsLossText(const TlsStream& stream, bool closed);

}  // namespace geomesh::transport
