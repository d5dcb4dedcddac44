// The default wire: UCX active messages over TCP, for every network that is private or tunnelled.
// Knows UCX (in the .cc) and sockets; the engine above sees none of either.
//
// One context, one worker, one endpoint a lane, all on the engine thread; UCX adds one thread of
// its own that accepts connections. UCX's TCP port has no authentication: whoever reaches it can
// write into this process, so it belongs on a private or VPN device or behind a firewall.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "base/options.h"
#include "transport/wire/device.h"
#include "transport/wire/wire.h"

namespace geomesh::transport {

struct UcxWireOptions {
  DeviceOptions device;
  PortRange ports;  // of the listening socket: the only port others need to reach
  absl::Duration unacknowledged_limit = kUnacknowledgedLimit;
};

struct UcxWireStats {
  uint64_t dropped_unknown_lane = 0;  // well-formed, for a lane that is closed or never was
  uint64_t dropped_malformed = 0;
  uint64_t dropped_greetings = 0;  // for another process, stale or in excess
  uint64_t endpoints = 0;          // open now
};

class UcxWire : public Wire {
 public:
  // After Listen.
  virtual const Device& device() const = 0;
  virtual uint16_t port() const = 0;
  virtual UcxWireStats stats() const = 0;
};

// Opens nothing yet: Listen does. UCX_DEBUG_SIGNO=0, UCX_HANDLE_ERRORS=none and UCX_MEM_EVENTS=n
// must be in the environment before the UCX library is loaded; Listen warns where they were not.
absl::StatusOr<std::unique_ptr<Wire>> MakeUcxWire(UcxWireOptions options);

}  // namespace geomesh::transport
