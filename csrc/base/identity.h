// What tells processes, runs and places apart: random numbers, and names of where a process is.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace geomesh {

// FNV-1a, 64 bits: tells a damaged text from a whole one. Not for security.
uint64_t Fnv1a(absl::string_view bytes);

// From the kernel: no two processes draw the same.
uint64_t Random64();

// Names this host and the process's namespaces of these kinds ("net", "pid"): equal for two
// processes that share all of them.
uint64_t ThisPlace(absl::Span<const absl::string_view> namespaces);

}  // namespace geomesh
