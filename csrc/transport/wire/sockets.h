// The process's TCP sockets: finds those that UCX opens behind our back, marks them close-on-exec,
// and closes a wire's sockets in forked children. A child that holds a copy of a lane's socket
// keeps the lane alive after its owner was killed: peers would not notice.
//
// Knows file descriptors and addresses, and calls no wire's library; the fork handler neither.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "transport/wire/device.h"

namespace geomesh::transport {

// One open socket: the number alone may be reused, the inode tells.
struct SocketRef {
  int fd = -1;
  ino_t inode = 0;

  friend bool operator==(const SocketRef&, const SocketRef&) = default;
  bool valid() const { return fd >= 0; }
  // Still the socket it was.
  bool IsSame() const;
};

// What the kernel says about a TCP socket. `remote` is empty while it connects.
struct SocketInfo {
  SocketRef ref;
  bool listening = false;
  IpEndpoint local;
  std::optional<IpEndpoint> remote;
};

// Address and port.
bool SameEndpoint(const IpEndpoint& a, const IpEndpoint& b);

// Calls `visit` for each IP stream socket of this process.
void ForEachTcpSocket(absl::FunctionRef<void(const SocketInfo&)> visit);

// Describes one descriptor, if it is an IP stream socket.
std::optional<SocketInfo> DescribeTcpSocket(int fd);

void SetCloseOnExec(int fd);

// The number that the next descriptor opened by this thread will most likely get.
int LikelyNextFd();

// Ends the connection under its owner's feet, so that both sides see it at once.
void ShutDown(const SocketRef& socket);

// Says which sockets a forked child must close, while it lives. One per wire.
class ForkGuard {
 public:
  ForkGuard();
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  // The listening socket at `local` and every connection it accepted.
  void Listening(const IpEndpoint& local);
  // Sockets connected to `remote`.
  void Dialled(const IpEndpoint& remote);
  // One socket, also before it is connected.
  void Add(const SocketRef& socket);

 private:
  friend struct ForkGuards;
  std::vector<IpEndpoint> listening_;
  std::vector<IpEndpoint> dialled_;
  std::vector<SocketRef> sockets_;
};

}  // namespace geomesh::transport
