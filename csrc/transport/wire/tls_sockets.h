// The TCP sockets of wire/tls: listening on a port of the range, connecting without waiting, and
// what others are told to dial. Knows addresses and socket options, nothing of TLS.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "base/options.h"
#include "transport/wire/device.h"

namespace geomesh::transport {

struct Listener {
  int fd = -1;
  IpEndpoint local;
};

// Errors name the device and the address, port or range that did not work.
absl::StatusOr<Listener> OpenListener(const Device& device, PortRange ports);

// A socket that is connecting to `to`, from the device's address where that can work.
absl::StatusOr<int> StartConnect(const Device& device, const IpEndpoint& to,
                                 absl::Duration unacknowledged_limit);

// Small segments at once; dead paths and peers that read nothing are noticed when nothing was
// acknowledged for that long.
void SetLaneOptions(int fd, absl::Duration unacknowledged_limit);

// Marks what is sent from now on (RFC 2474). Hosts and networks may refuse or ignore it.
void SetDscp(int fd, uint8_t value);

// What others dial: "host", "host:port", "[v6]:port". A name is looked up here and now, and of
// several addresses one of the device's family is taken.
absl::StatusOr<IpEndpoint> ResolveAdvertised(const std::string& text, const IpEndpoint& listening);

}  // namespace geomesh::transport
