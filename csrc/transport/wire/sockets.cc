#include "transport/wire/sockets.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>

namespace geomesh::transport {
namespace {

// As the kernel fills it; glibc's readdir would allocate, which a forked child must not need.
struct LinuxDirent64 {
  ino64_t d_ino;
  off64_t d_off;
  unsigned short d_reclen;
  unsigned char d_type;
  char d_name[1];
};

// Calls `visit` for each open descriptor. Async-signal-safe if `visit` is.
void ForEachFd(absl::FunctionRef<void(int)> visit) {
  const int folder = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  alignas(LinuxDirent64) char buffer[4096];
  for (;;) {
    const long size = syscall(SYS_getdents64, folder, buffer, sizeof(buffer));
    if (size <= 0) break;
    for (long at = 0; at < size;) {
      const auto* entry = reinterpret_cast<const LinuxDirent64*>(buffer + at);
      at += entry->d_reclen;
      int fd = 0;
      const char* c = entry->d_name;
      for (; *c >= '0' && *c <= '9'; ++c) fd = fd * 10 + (*c - '0');
      if (c == entry->d_name || *c != '\0' || fd == folder) continue;
      visit(fd);
    }
  }
  close(folder);
}

bool Holds(const std::vector<IpEndpoint>& list, const IpEndpoint& endpoint) {
  return std::any_of(list.begin(), list.end(),
                     [&](const IpEndpoint& e) { return SameEndpoint(e, endpoint); });
}

}  // namespace

bool SameEndpoint(const IpEndpoint& a, const IpEndpoint& b) {
  return a.SameAddress(b) && a.port() == b.port();
}

bool SocketRef::IsSame() const {
  struct stat status;
  return valid() && fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode) && status.st_ino == inode;
}

std::optional<SocketInfo> DescribeTcpSocket(int fd) {
  struct stat status;
  if (fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode)) return std::nullopt;
  int type = 0;
  socklen_t size = sizeof(type);
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_STREAM) {
    return std::nullopt;
  }
  SocketInfo info;
  info.ref = {fd, status.st_ino};
  size = sizeof(info.local.storage);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&info.local.storage), &size) != 0 ||
      (info.local.family() != AF_INET && info.local.family() != AF_INET6)) {
    return std::nullopt;
  }
  int listening = 0;
  size = sizeof(listening);
  getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size);
  info.listening = listening != 0;
  IpEndpoint remote;
  size = sizeof(remote.storage);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&remote.storage), &size) == 0) {
    info.remote = remote;
  }
  return info;
}

void ForEachTcpSocket(absl::FunctionRef<void(const SocketInfo&)> visit) {
  ForEachFd([&](int fd) {
    if (auto info = DescribeTcpSocket(fd)) visit(*info);
  });
}

void SetCloseOnExec(int fd) {
  const int flags = fcntl(fd, F_GETFD);
  if (flags >= 0) fcntl(fd, F_SETFD, flags | FD_CLOEXEC);
}

int LikelyNextFd() {
  const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (fd >= 0) close(fd);
  return fd;
}

void ShutDown(const SocketRef& socket) {
  if (socket.IsSame()) shutdown(socket.fd, SHUT_RDWR);
}

// All guards of the process, for the fork handlers.
struct ForkGuards {
  std::mutex mutex;  // held over fork, so that a child finds the lists whole
  std::vector<ForkGuard*> all;

  static ForkGuards& Get() {
    static ForkGuards* guards = [] {
      auto* g = new ForkGuards;
      pthread_atfork([] { Get().mutex.lock(); }, [] { Get().mutex.unlock(); },
                     [] {
                       Get().CloseInherited();
                       Get().mutex.unlock();
                     });
      return g;
    }();
    return *guards;
  }

  // In the child, before fork returns there: close and nothing else.
  void CloseInherited() {
    if (all.empty()) return;
    ForEachFd([this](int fd) {
      auto info = DescribeTcpSocket(fd);
      if (!info.has_value()) return;
      for (const ForkGuard* guard : all) {
        const bool ours = Holds(guard->listening_, info->local) ||
                          (info->remote.has_value() && Holds(guard->dialled_, *info->remote)) ||
                          std::find(guard->sockets_.begin(), guard->sockets_.end(), info->ref) !=
                              guard->sockets_.end();
        if (ours) {
          close(fd);
          return;
        }
      }
    });
    for (ForkGuard* guard : all) {
      guard->listening_.clear();
      guard->dialled_.clear();
      guard->sockets_.clear();
    }
  }
};

ForkGuard::ForkGuard() {
  ForkGuards& guards = ForkGuards::Get();
  std::lock_guard<std::mutex> lock(guards.mutex);
  guards.all.push_back(this);
}

ForkGuard::~ForkGuard() {
  ForkGuards& guards = ForkGuards::Get();
  std::lock_guard<std::mutex> lock(guards.mutex);
  guards.all.erase(std::find(guards.all.begin(), guards.all.end(), this));
}

void ForkGuard::Listening(const IpEndpoint& local) {
  std::lock_guard<std::mutex> lock(ForkGuards::Get().mutex);
  if (!Holds(listening_, local)) listening_.push_back(local);
}

void ForkGuard::Dialled(const IpEndpoint& remote) {
  std::lock_guard<std::mutex> lock(ForkGuards::Get().mutex);
  if (!Holds(dialled_, remote)) dialled_.push_back(remote);
}

void ForkGuard::Add(const SocketRef& socket) {
  std::lock_guard<std::mutex> lock(ForkGuards::Get().mutex);
  // Sockets that were closed since: forgotten here, so that the list stays as short as the lanes.
  sockets_.erase(std::remove_if(sockets_.begin(), sockets_.end(),
                                [](const SocketRef& s) { return !s.IsSame(); }),
                 sockets_.end());
  sockets_.push_back(socket);
}

}  // namespace geomesh::transport
