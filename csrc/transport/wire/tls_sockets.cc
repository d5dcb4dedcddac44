#include "transport/wire/tls_sockets.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace geomesh::transport {
namespace {

constexpr int kBacklog = 1024;

void Set(int fd, int level, int option, int value) {
  (void)setsockopt(fd, level, option, &value, sizeof(value));
}

std::string At(const Device& device, uint16_t port) {
  return absl::StrCat(device.address.AddressString(), " (", device.interface,
                      port == 0 ? ")" : absl::StrCat(", port ", port, ")"));
}

// The listening socket, or the errno that kept it from being one.
absl::StatusOr<Listener> ListenOn(const Device& device, uint16_t port, int* error) {
  Listener listener;
  listener.local = device.address;
  listener.local.set_port(port);
  const int fd =
      socket(device.address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP);
  if (fd >= 0) {
    // A process that is started again gets its port back at once.
    Set(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (device.address.family() == AF_INET6) Set(fd, IPPROTO_IPV6, IPV6_V6ONLY, 1);
    socklen_t size = sizeof(listener.local.storage);
    if (bind(fd, listener.local.sockaddr_ptr(), listener.local.size()) == 0 &&
        listen(fd, kBacklog) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&listener.local.storage), &size) == 0) {
      listener.fd = fd;
      return listener;
    }
  }
  *error = errno;
  if (fd >= 0) close(fd);
  return absl::FailedPreconditionError(
      absl::StrCat("listening on ", At(device, port), ": ", std::strerror(*error)));
}

struct HostPort {
  std::string host;
  uint16_t port = 0;  // 0: none given
};

std::optional<HostPort> SplitHostPort(const std::string& text) {
  HostPort result;
  if (IpEndpoint::Parse(text).has_value()) return HostPort{text, 0};  // fd00::1 has no port
  const size_t colon = text.rfind(':');
  result.host = text.substr(0, colon);
  if (colon != std::string::npos) {
    int port = 0;
    if (!absl::SimpleAtoi(text.substr(colon + 1), &port) || port < 1 || port > 65535) {
      return std::nullopt;
    }
    result.port = static_cast<uint16_t>(port);
  }
  // A colon left over is an IPv6 address without brackets around it.
  const bool bracketed = absl::StartsWith(result.host, "[");
  if (result.host.empty() || (absl::StrContains(result.host, ':') && !bracketed)) {
    return std::nullopt;
  }
  return result;
}

}  // namespace

absl::StatusOr<Listener> OpenListener(const Device& device, PortRange ports) {
  int error = 0;
  if (ports.any()) return ListenOn(device, 0, &error);
  const int count = ports.last - ports.first + 1;
  const int start = static_cast<int>(std::random_device()() % count);
  for (int i = 0; i < count; ++i) {
    auto listener =
        ListenOn(device, static_cast<uint16_t>(ports.first + (start + i) % count), &error);
    if (listener.ok() || error != EADDRINUSE) return listener;
  }
  return absl::ResourceExhaustedError(absl::StrCat("no free port in the range ", ports.ToString(),
                                                   " on ", At(device, 0),
                                                   ": each is in use; widen GEOMESH_PORTS"));
}

absl::StatusOr<int> StartConnect(const Device& device, const IpEndpoint& to,
                                 absl::Duration unacknowledged_limit) {
  const int fd = socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP);
  if (fd < 0) return absl::ResourceExhaustedError(absl::StrCat("a socket: ", std::strerror(errno)));
  SetLaneOptions(fd, unacknowledged_limit);
  // From loopback nothing but loopback can be reached.
  if (to.family() == device.address.family() && device.address.is_loopback() == to.is_loopback()) {
    Set(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
    (void)bind(fd, device.address.sockaddr_ptr(), device.address.size());
  }
  if (connect(fd, to.sockaddr_ptr(), to.size()) != 0 && errno != EINPROGRESS) {
    const int error = errno;
    close(fd);
    return absl::UnavailableError(std::strerror(error));
  }
  return fd;
}

void SetLaneOptions(int fd, absl::Duration unacknowledged_limit) {
  Set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  Set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  Set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 2);
  Set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  Set(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  Set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT,
      static_cast<int>(absl::ToInt64Milliseconds(unacknowledged_limit)));
}

void SetDscp(int fd, uint8_t value) {
  const int traffic_class = value << 2;  // the lower two bits are ECN's
  Set(fd, IPPROTO_IP, IP_TOS, traffic_class);
  Set(fd, IPPROTO_IPV6, IPV6_TCLASS, traffic_class);
}

absl::StatusOr<IpEndpoint> ResolveAdvertised(const std::string& text, const IpEndpoint& listening) {
  const auto split = SplitHostPort(text);
  if (!split.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "GEOMESH_ADVERTISE='", text,
        "' takes an address or a name, with a port or without: 203.0.113.7:23000, [2001:db8::7]:"
        "23000, gw.example.org"));
  }
  std::optional<IpEndpoint> found = IpEndpoint::Parse(split->host);
  if (!found.has_value()) {
    addrinfo hints = {};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* list = nullptr;
    if (const int error = getaddrinfo(split->host.c_str(), nullptr, &hints, &list); error != 0) {
      return absl::NotFoundError(absl::StrCat("GEOMESH_ADVERTISE='", text, "': looking up '",
                                              split->host, "': ", gai_strerror(error)));
    }
    std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, &freeaddrinfo);
    for (const addrinfo* a = list; a != nullptr; a = a->ai_next) {
      if (a->ai_family != AF_INET && a->ai_family != AF_INET6) continue;
      if (found.has_value() && a->ai_family != listening.family()) continue;
      if (found.has_value() && found->family() == listening.family()) continue;
      IpEndpoint endpoint;
      std::memcpy(&endpoint.storage, a->ai_addr, a->ai_addrlen);
      found = endpoint;
    }
    if (!found.has_value()) {
      return absl::NotFoundError(absl::StrCat("GEOMESH_ADVERTISE='", text, "': no IP address"));
    }
  }
  if (found->is_link_local()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "GEOMESH_ADVERTISE='", text, "' is link-local, which other networks cannot reach"));
  }
  found->set_port(split->port != 0 ? split->port : listening.port());
  return *found;
}

}  // namespace geomesh::transport
