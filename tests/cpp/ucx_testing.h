// Shared by the tests of wire/ucx: its environment and its ends.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <utility>

#include "transport/wire/ucx.h"
#include "wire_testing.h"

namespace geomesh::transport {

// UCX reads these when it is loaded, so a test binary sets them and starts itself again.
inline void EnsureUcxEnvironment(char** argv) {
  if (getenv("UCX_MEM_EVENTS") != nullptr && getenv("UCX_HANDLE_ERRORS") != nullptr) return;
  setenv("UCX_HANDLE_ERRORS", "none", 1);
  setenv("UCX_MEM_EVENTS", "n", 1);
  setenv("UCX_DEBUG_SIGNO", "0", 1);
  execv("/proc/self/exe", argv);
  perror("execv");
  _exit(1);
}

struct End : WireEnd {
  explicit End(UcxWireOptions options) : WireEnd(MakeUcxWire(std::move(options))) {}
  const UcxWire& ucx() const { return static_cast<const UcxWire&>(*wire); }
};

inline UcxWireOptions OnLoopback() {
  UcxWireOptions options;
  options.device.interface = "lo";
  return options;
}

inline int RunAcceptor(const UcxWireOptions& options, const std::function<void()>& after_accept) {
  End end(options);
  return RunAcceptor(end, after_accept);
}

}  // namespace geomesh::transport
