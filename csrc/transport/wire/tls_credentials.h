// What both kinds of credentials (a shared key, certificates) do for the wire: seal and check
// address blobs, make connections that accept only their like, and say who was there. Knows
// OpenSSL, no sockets and no lanes.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "transport/wire/tls.h"
#include "transport/wire/tls_address.h"
#include "transport/wire/tls_stream.h"

namespace geomesh::transport {

// One handshake, as OpenSSL's callbacks see it. Stays where it is while its SSL lives.
struct TlsHandshake {
  bool dialler = false;
  TlsId own_listener{};
  LaneIdentity identity;       // the dialler's; with a shared key, the acceptor's from TLS
  std::string identity_bytes;  // serialized, while OpenSSL holds a pointer to it
  std::string certificate;     // DER; of the dialler's address: what the acceptor must show
  std::string problem;         // what was found wrong here, in words
};

class TlsCredentials {
 public:
  virtual ~TlsCredentials() = default;

  virtual TlsMode mode() const = 0;
  // For TlsAddress and LaneIdentity.
  virtual std::string certificate() const { return ""; }
  virtual KeyId dial_key() const { return {}; }

  virtual absl::StatusOr<std::string> Seal(absl::string_view body) const = 0;
  // InvalidArgument unless somebody with our credentials made the address.
  virtual absl::Status CheckSeal(const TlsAddressParts& parts) const = 0;

  // A connection that completes its handshake only with a holder of our credentials.
  virtual absl::StatusOr<SslPtr> NewConnection(TlsHandshake* handshake) const = 0;
  // After the handshake: whether it is with the process that was meant, as far as TLS tells.
  virtual absl::Status CheckPeer(SSL* ssl, const TlsHandshake& handshake) const = 0;
};

// Reads the files. InvalidArgument names the file or variable, and what to do.
absl::StatusOr<std::unique_ptr<TlsCredentials>> LoadTlsCredentials(const TlsKeyFiles& files);
absl::StatusOr<std::unique_ptr<TlsCredentials>> LoadSharedKey(const std::string& path);
absl::StatusOr<std::unique_ptr<TlsCredentials>> LoadCertificate(const TlsKeyFiles& files);

}  // namespace geomesh::transport
