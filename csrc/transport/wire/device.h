// Which local device and address a wire binds to. Knows the kernel's interfaces
// and routes, and nothing of UCX, lanes or peers.
//
// The choice, unless the user names a device: the one over which the kernel routes to the master.
// A loopback address is chosen only where all ranks share this host; bridges that containers and
// virtual machines make for themselves (docker0, virbr0) never by themselves, because each host has
// the same address there.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>
#include "absl/strings/string_view.h"

#include "absl/status/statusor.h"

namespace geomesh::transport {

// An IPv4 or IPv6 address with a port (0: none), as the kernel takes it.
struct IpEndpoint {
  sockaddr_storage storage = {};

  sa_family_t family() const { return storage.ss_family; }
  const sockaddr* sockaddr_ptr() const { return reinterpret_cast<const sockaddr*>(&storage); }
  socklen_t size() const;
  uint16_t port() const;
  void set_port(uint16_t port);
  bool is_loopback() const;
  bool is_link_local() const;
  // Reachable from the public internet, as far as the address tells.
  bool is_public() const;
  bool SameAddress(const IpEndpoint& other) const;  // ports are not compared
  std::string AddressString() const;                // "10.0.0.1", "fd00::1", "fe80::1%eth0"
  std::string ToString() const;                     // "10.0.0.1:5000", "[fd00::1]:5000"

  // A literal address, with or without brackets and scope; no name is looked up.
  static std::optional<IpEndpoint> Parse(absl::string_view text);
};

// One address of one interface, as getifaddrs lists it.
struct InterfaceAddress {
  std::string name;
  IpEndpoint address;
  int prefix_bits = 0;
  bool up = false;
  bool loopback = false;
};

std::vector<InterfaceAddress> ListInterfaceAddresses();

// "eth0 (10.0.0.1, fd00::1), lo (127.0.0.1)": for errors.
std::string DescribeInterfaces();

enum class HostScope {
  kUnknown,
  kSingleHost,    // all ranks share this host
  kSeveralHosts,  // at least one rank is elsewhere
};

struct DeviceOptions {
  // GEOMESH_INTERFACE: an interface ("eth0"), an address of one ("10.0.0.5", "fd00::5") or a subnet
  // that holds exactly one interface's address ("10.0.0.0/24"). Not set: by the route to the
  // master.
  std::optional<std::string> interface;
  std::string master;  // MASTER_ADDR: name or address; empty: the default route decides
  HostScope scope = HostScope::kUnknown;
};

struct Device {
  std::string interface;
  IpEndpoint address;  // port 0
};

// Errors name what was asked for and list the interfaces present.
absl::StatusOr<Device> ChooseDevice(const DeviceOptions& options);

}  // namespace geomesh::transport
