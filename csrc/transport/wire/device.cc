#include "transport/wire/device.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/log.h"
#include "base/status_macros.h"

namespace geomesh::transport {
namespace {

const sockaddr_in& V4(const sockaddr_storage& s) { return reinterpret_cast<const sockaddr_in&>(s); }
const sockaddr_in6& V6(const sockaddr_storage& s) {
  return reinterpret_cast<const sockaddr_in6&>(s);
}

bool InV4(uint32_t address, uint32_t network, int bits) {
  return (address >> (32 - bits)) == (network >> (32 - bits));
}

// Bridges that container and virtual machine software makes on each host with the same address.
bool IsHostPrivateBridge(absl::string_view interface) {
  for (absl::string_view prefix : {"docker", "virbr", "br-", "podman", "cni", "lxcbr", "lxdbr"}) {
    if (absl::StartsWith(interface, prefix)) return true;
  }
  return false;
}

absl::Status NoDevice(absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat(why, "; interfaces present: ", DescribeInterfaces()));
}

// The address a wire uses on an interface: the first of the family that is up and not link-local.
// UCX's own rule (it takes interface names, not addresses).
std::optional<IpEndpoint> PrimaryAddress(const std::vector<InterfaceAddress>& all,
                                         absl::string_view interface, sa_family_t family) {
  for (const InterfaceAddress& a : all) {
    if (a.name == interface && a.up && a.address.family() == family && !a.address.is_link_local()) {
      return a.address;
    }
  }
  return std::nullopt;
}

absl::StatusOr<Device> DeviceByName(const std::vector<InterfaceAddress>& all,
                                    absl::string_view name, std::optional<sa_family_t> family) {
  bool known = false, up = false, link_local = false;
  for (const InterfaceAddress& a : all) {
    if (a.name != name) continue;
    known = true;
    up |= a.up;
    link_local |= a.address.is_link_local();
  }
  std::vector<sa_family_t> families = {AF_INET, AF_INET6};
  if (family.has_value()) families = {*family};
  for (sa_family_t f : families) {
    if (auto address = PrimaryAddress(all, name, f)) return Device{std::string(name), *address};
  }
  if (!known) return NoDevice(absl::StrCat("interface '", name, "' is not present"));
  if (!up) return NoDevice(absl::StrCat("interface '", name, "' is down"));
  absl::string_view wanted = !family.has_value() ? "" : *family == AF_INET ? "IPv4 " : "IPv6 ";
  if (link_local) {
    return NoDevice(absl::StrCat("interface '", name, "' has only link-local ", wanted,
                                 "addresses, and UCX cannot carry their scope: give it a global or "
                                 "a private (fd00::/8) address"));
  }
  return NoDevice(absl::StrCat("interface '", name, "' has no ", wanted, "address"));
}

absl::StatusOr<Device> DeviceByAddress(const std::vector<InterfaceAddress>& all,
                                       const IpEndpoint& address) {
  if (address.is_link_local()) {
    return NoDevice(absl::StrCat(address.AddressString(),
                                 " is link-local, and UCX cannot carry its scope: use a global or "
                                 "a private (fd00::/8) address"));
  }
  for (const InterfaceAddress& a : all) {
    if (!a.address.SameAddress(address)) continue;
    GM_ASSIGN_OR_RETURN(Device device, DeviceByName(all, a.name, address.family()));
    if (!device.address.SameAddress(address)) {
      return NoDevice(absl::StrCat("UCX can use only the first address of an interface: for ",
                                   a.name, " that is ", device.address.AddressString(), ", not ",
                                   address.AddressString()));
    }
    return device;
  }
  return NoDevice(absl::StrCat("no interface has the address ", address.AddressString()));
}

bool InSubnet(const IpEndpoint& address, const IpEndpoint& network, int bits) {
  if (address.family() != network.family()) return false;
  const uint8_t* a;
  const uint8_t* n;
  if (address.family() == AF_INET) {
    a = reinterpret_cast<const uint8_t*>(&V4(address.storage).sin_addr);
    n = reinterpret_cast<const uint8_t*>(&V4(network.storage).sin_addr);
  } else {
    a = V6(address.storage).sin6_addr.s6_addr;
    n = V6(network.storage).sin6_addr.s6_addr;
  }
  for (int bit = 0; bit < bits; ++bit) {
    if (((a[bit / 8] ^ n[bit / 8]) >> (7 - bit % 8)) & 1) return false;
  }
  return true;
}

absl::StatusOr<Device> DeviceBySubnet(const std::vector<InterfaceAddress>& all,
                                      absl::string_view text) {
  std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(text, '/');
  auto network = IpEndpoint::Parse(parts.first);
  int bits = -1;
  if (!network.has_value() || !absl::SimpleAtoi(parts.second, &bits) || bits < 0 ||
      bits > (network->family() == AF_INET ? 32 : 128)) {
    return NoDevice(absl::StrCat("'", text, "' is not a subnet such as 10.0.0.0/24"));
  }
  std::vector<Device> found;
  for (const InterfaceAddress& a : all) {
    if (a.up && InSubnet(a.address, *network, bits) && !a.address.is_link_local()) {
      GM_ASSIGN_OR_RETURN(Device device, DeviceByAddress(all, a.address));
      found.push_back(std::move(device));
    }
  }
  if (found.empty()) return NoDevice(absl::StrCat("no interface has an address in ", text));
  if (found.size() > 1) {
    return NoDevice(absl::StrCat("several interfaces have an address in ", text, " (",
                                 found[0].interface, ", ", found[1].interface, ")"));
  }
  return found[0];
}

absl::StatusOr<Device> NamedDevice(const std::vector<InterfaceAddress>& all,
                                   absl::string_view text) {
  if (text.empty()) {
    return NoDevice("the interface is set to an empty value: unset it, or name one interface");
  }
  if (text.find_first_of(",;^! \t*") != absl::string_view::npos) {
    return NoDevice(
        absl::StrCat("'", text,
                     "' is not one interface: lists and exclusions are not supported, name one "
                     "interface, one of its addresses, or a subnet"));
  }
  if (absl::StrContains(text, '/')) return DeviceBySubnet(all, text);
  for (const InterfaceAddress& a : all) {
    if (a.name == text) return DeviceByName(all, text, std::nullopt);
  }
  if (auto address = IpEndpoint::Parse(text)) return DeviceByAddress(all, *address);
  return DeviceByName(all, text, std::nullopt);
}

// The source address the kernel would use towards `destination`; nothing is sent.
std::optional<IpEndpoint> RouteSource(IpEndpoint destination) {
  destination.set_port(9);
  int fd = socket(destination.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return std::nullopt;
  std::optional<IpEndpoint> source;
  IpEndpoint local;
  socklen_t size = sizeof(local.storage);
  if (connect(fd, destination.sockaddr_ptr(), destination.size()) == 0 &&
      getsockname(fd, reinterpret_cast<sockaddr*>(&local.storage), &size) == 0) {
    local.set_port(0);
    source = local;
  }
  close(fd);
  return source;
}

// The device by the default route, else the only sensible one.
absl::StatusOr<Device> DefaultDevice(const std::vector<InterfaceAddress>& all) {
  // Documentation addresses: routed like any other, and nothing is sent to them.
  for (const char* far : {"192.0.2.1", "2001:db8::1"}) {
    auto source = RouteSource(*IpEndpoint::Parse(far));
    if (!source.has_value() || source->is_loopback() || source->is_link_local()) continue;
    auto device = DeviceByAddress(all, *source);
    if (device.ok() && !IsHostPrivateBridge(device->interface)) return device;
  }
  for (const InterfaceAddress& a : all) {
    if (!a.up || a.loopback || a.address.is_link_local() || IsHostPrivateBridge(a.name)) continue;
    auto device = DeviceByAddress(all, a.address);
    if (device.ok()) return device;
  }
  return NoDevice("no interface can reach another host");
}

// Forward lookup only; a literal address asks nobody.
absl::StatusOr<std::vector<IpEndpoint>> Resolve(const std::string& master) {
  if (auto literal = IpEndpoint::Parse(master)) return std::vector<IpEndpoint>{*literal};
  if (absl::StrContains(master, '%')) {
    return NoDevice(absl::StrCat("the master's address '", master,
                                 "' names a scope that is not an interface here"));
  }
  addrinfo hints = {};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* list = nullptr;
  if (int error = getaddrinfo(master.c_str(), nullptr, &hints, &list); error != 0) {
    return absl::NotFoundError(absl::StrCat("looking up the master's name '", master,
                                            "' to choose a device: ", gai_strerror(error),
                                            "; set GEOMESH_INTERFACE to choose it yourself"));
  }
  std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, &freeaddrinfo);
  std::vector<IpEndpoint> found;
  for (const addrinfo* a = list; a != nullptr; a = a->ai_next) {
    if (a->ai_family != AF_INET && a->ai_family != AF_INET6) continue;
    IpEndpoint endpoint;
    std::memcpy(&endpoint.storage, a->ai_addr, a->ai_addrlen);
    found.push_back(endpoint);
  }
  return found;
}

absl::StatusOr<Device> LoopbackDevice(const std::vector<InterfaceAddress>& all,
                                      sa_family_t preferred) {
  for (sa_family_t family : {preferred, sa_family_t{AF_INET}, sa_family_t{AF_INET6}}) {
    for (const InterfaceAddress& a : all) {
      if (a.loopback && a.up && a.address.family() == family && a.address.is_loopback()) {
        return Device{a.name, a.address};
      }
    }
  }
  return NoDevice("the loopback interface is down");
}

absl::StatusOr<Device> DeviceByMaster(const std::vector<InterfaceAddress>& all,
                                      const DeviceOptions& options) {
  GM_ASSIGN_OR_RETURN(std::vector<IpEndpoint> masters, Resolve(options.master));
  bool link_local = false;
  std::string tried;
  for (const IpEndpoint& master : masters) {
    if (master.is_link_local()) {
      link_local = true;
      continue;
    }
    auto source = RouteSource(master);
    if (!source.has_value()) {
      absl::StrAppend(&tried, tried.empty() ? "" : ", ", master.AddressString(), ": ",
                      std::strerror(errno));
      continue;
    }
    if (master.is_loopback() || source->is_loopback()) {
      // The name of this host often stands for 127.0.1.1 in /etc/hosts.
      if (options.scope == HostScope::kSeveralHosts) return DefaultDevice(all);
      return LoopbackDevice(all, master.family());
    }
    const bool own = source->SameAddress(master);
    if (own && options.scope == HostScope::kSingleHost) {
      return LoopbackDevice(all, master.family());
    }
    auto device = DeviceByAddress(all, *source);
    if (!device.ok()) {
      absl::StrAppend(&tried, tried.empty() ? "" : ", ", master.AddressString(), ": ",
                      device.status().message());
      continue;
    }
    if (own && IsHostPrivateBridge(device->interface)) return DefaultDevice(all);
    return device;
  }
  if (link_local && tried.empty()) {
    return NoDevice(absl::StrCat("the master's address '", options.master,
                                 "' is link-local, and UCX cannot carry its scope: use a global or "
                                 "a private (fd00::/8) address"));
  }
  return NoDevice(absl::StrCat("no route to the master '", options.master, "' (", tried, ")"));
}

}  // namespace

socklen_t IpEndpoint::size() const {
  return family() == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
}

uint16_t IpEndpoint::port() const {
  return ntohs(family() == AF_INET6 ? V6(storage).sin6_port : V4(storage).sin_port);
}

void IpEndpoint::set_port(uint16_t port) {
  if (family() == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(storage).sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in&>(storage).sin_port = htons(port);
  }
}

bool IpEndpoint::is_loopback() const {
  if (family() == AF_INET6) {
    const in6_addr& a = V6(storage).sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(&a) || (IN6_IS_ADDR_V4MAPPED(&a) && a.s6_addr[12] == 127);
  }
  return InV4(ntohl(V4(storage).sin_addr.s_addr), 0x7f000000, 8);
}

bool IpEndpoint::is_link_local() const {
  if (family() == AF_INET6) return IN6_IS_ADDR_LINKLOCAL(&V6(storage).sin6_addr);
  return InV4(ntohl(V4(storage).sin_addr.s_addr), 0xa9fe0000, 16);
}

bool IpEndpoint::is_public() const {
  if (family() == AF_INET6) {
    return (V6(storage).sin6_addr.s6_addr[0] & 0xe0) == 0x20 &&  // 2000::/3
           !InSubnet(*this, *Parse("2001:db8::"), 32);
  }
  const uint32_t a = ntohl(V4(storage).sin_addr.s_addr);
  struct Block {
    uint32_t network;
    int bits;
  };
  // RFC 6890: special-purpose blocks.
  for (Block b : std::initializer_list<Block>{{0x00000000, 8},
                                              {0x0a000000, 8},
                                              {0x64400000, 10},
                                              {0x7f000000, 8},
                                              {0xa9fe0000, 16},
                                              {0xac100000, 12},
                                              {0xc0000000, 24},
                                              {0xc0000200, 24},
                                              {0xc0a80000, 16},
                                              {0xc6120000, 15},
                                              {0xc6336400, 24},
                                              {0xcb007100, 24},
                                              {0xe0000000, 3}}) {
    if (InV4(a, b.network, b.bits)) return false;
  }
  return true;
}

bool IpEndpoint::SameAddress(const IpEndpoint& other) const {
  if (family() != other.family()) return false;
  if (family() == AF_INET6) {
    return std::memcmp(&V6(storage).sin6_addr, &V6(other.storage).sin6_addr, 16) == 0;
  }
  return V4(storage).sin_addr.s_addr == V4(other.storage).sin_addr.s_addr;
}

std::string IpEndpoint::AddressString() const {
  char text[INET6_ADDRSTRLEN] = "?";
  if (family() == AF_INET6) {
    inet_ntop(AF_INET6, &V6(storage).sin6_addr, text, sizeof(text));
    char name[IF_NAMESIZE];
    if (V6(storage).sin6_scope_id != 0 && is_link_local() &&
        if_indextoname(V6(storage).sin6_scope_id, name) != nullptr) {
      return absl::StrCat(text, "%", name);
    }
  } else {
    inet_ntop(AF_INET, &V4(storage).sin_addr, text, sizeof(text));
  }
  return text;
}

std::string IpEndpoint::ToString() const {
  return family() == AF_INET6 ? absl::StrCat("[", AddressString(), "]:", port())
                              : absl::StrCat(AddressString(), ":", port());
}

std::optional<IpEndpoint> IpEndpoint::Parse(absl::string_view text) {
  if (absl::StartsWith(text, "[") && absl::EndsWith(text, "]")) {
    text = text.substr(1, text.size() - 2);
  }
  IpEndpoint endpoint;
  absl::string_view scope;
  if (size_t percent = text.find('%'); percent != absl::string_view::npos) {
    scope = text.substr(percent + 1);
    text = text.substr(0, percent);
  }
  const std::string address(text);
  auto& v4 = reinterpret_cast<sockaddr_in&>(endpoint.storage);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(endpoint.storage);
  if (scope.empty() && inet_pton(AF_INET, address.c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    return endpoint;
  }
  if (inet_pton(AF_INET6, address.c_str(), &v6.sin6_addr) != 1) return std::nullopt;
  v6.sin6_family = AF_INET6;
  if (!scope.empty()) {
    v6.sin6_scope_id = if_nametoindex(std::string(scope).c_str());
    if (v6.sin6_scope_id == 0) return std::nullopt;
  }
  return endpoint;
}

std::vector<InterfaceAddress> ListInterfaceAddresses() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, &freeifaddrs);
  std::vector<InterfaceAddress> found;
  for (const ifaddrs* a = list; a != nullptr; a = a->ifa_next) {
    if (a->ifa_addr == nullptr) continue;
    const sa_family_t family = a->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    InterfaceAddress entry;
    entry.name = a->ifa_name;
    entry.up = (a->ifa_flags & IFF_UP) != 0 && (a->ifa_flags & IFF_RUNNING) != 0;
    entry.loopback = (a->ifa_flags & IFF_LOOPBACK) != 0;
    std::memcpy(&entry.address.storage, a->ifa_addr,
                family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    if (a->ifa_netmask != nullptr) {
      IpEndpoint mask;
      std::memcpy(&mask.storage, a->ifa_netmask,
                  family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
      const auto* bytes = family == AF_INET
                              ? reinterpret_cast<const uint8_t*>(&V4(mask.storage).sin_addr)
                              : V6(mask.storage).sin6_addr.s6_addr;
      for (int i = 0; i < (family == AF_INET ? 4 : 16); ++i) {
        entry.prefix_bits += __builtin_popcount(bytes[i]);
      }
    }
    found.push_back(std::move(entry));
  }
  return found;
}

std::string DescribeInterfaces() {
  std::vector<std::string> order;
  std::map<std::string, std::vector<std::string>> addresses;
  for (const InterfaceAddress& a : ListInterfaceAddresses()) {
    auto [it, fresh] = addresses.try_emplace(a.name);
    if (fresh) order.push_back(a.name);
    it->second.push_back(absl::StrCat(a.address.AddressString(), a.up ? "" : " down"));
  }
  if (order.empty()) return "none with an address";
  return absl::StrJoin(order, ", ", [&](std::string* out, const std::string& name) {
    absl::StrAppend(out, name, " (", absl::StrJoin(addresses[name], ", "), ")");
  });
}

absl::StatusOr<Device> ChooseDevice(const DeviceOptions& options) {
  const std::vector<InterfaceAddress> all = ListInterfaceAddresses();
  if (options.interface.has_value()) {
    auto device = NamedDevice(all, *options.interface);
    if (!device.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("GEOMESH_INTERFACE: ", device.status().message()));
    }
    if (device->address.is_loopback() && options.scope == HostScope::kSeveralHosts) {
      return NoDevice(absl::StrCat("GEOMESH_INTERFACE: '", *options.interface,
                                   "' is this host's loopback, which other hosts cannot reach"));
    }
    return device;
  }
  if (!options.master.empty()) return DeviceByMaster(all, options);
  if (options.scope == HostScope::kSingleHost) return LoopbackDevice(all, AF_INET);
  auto device = DefaultDevice(all);
  if (!device.ok() && options.scope == HostScope::kUnknown) return LoopbackDevice(all, AF_INET);
  return device;
}

}  // namespace geomesh::transport
