#include "transport/wire/knock.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <string>

namespace geomesh::transport {
namespace {

class TcpKnock : public Knock {
 public:
  explicit TcpKnock(const IpEndpoint& endpoint)
      : where_(endpoint.ToString()),
        fd_(socket(endpoint.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
    if (fd_ >= 0 && connect(fd_, endpoint.sockaddr_ptr(), endpoint.size()) != 0) error_ = errno;
  }
  ~TcpKnock() override {
    if (fd_ >= 0) close(fd_);
  }
  TcpKnock(const TcpKnock&) = delete;

  bool made() const { return fd_ >= 0; }

  Answer answer() override {
    if (error_ == EINPROGRESS) {
      pollfd connecting = {fd_, POLLOUT, 0};
      if (poll(&connecting, 1, 0) == 0) return Answer::kNone;
      socklen_t size = sizeof(error_);
      if (getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error_, &size) != 0) error_ = errno;
    }
    if (error_ == 0) return Answer::kSomebody;
    return error_ == ECONNREFUSED ? Answer::kNobody : Answer::kNone;
  }
  const std::string& where() const override { return where_; }

 private:
  const std::string where_;
  const int fd_;
  int error_ = 0;
};

}  // namespace

std::unique_ptr<Knock> KnockByTcp(const IpEndpoint& endpoint) {
  if (endpoint.port() == 0) return nullptr;
  auto knock = std::make_unique<TcpKnock>(endpoint);
  if (!knock->made()) return nullptr;
  return knock;
}

}  // namespace geomesh::transport
