#include "transport/wire/ucx_worker.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "transport/wire/ucx_config.h"
#include "transport/wire/ucx_log.h"

namespace geomesh::transport {
namespace {

// 0, or why nothing can listen on this address and port now.
int WhyNotFree(const IpEndpoint& endpoint) {
  const int probe = socket(endpoint.family(), SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (probe < 0) return errno;
  const bool free =
      bind(probe, endpoint.sockaddr_ptr(), endpoint.size()) == 0 && listen(probe, 1) == 0;
  const int error = free ? 0 : errno;
  close(probe);
  return error;
}

std::string At(const Device& device, uint16_t port) {
  return absl::StrCat(device.address.AddressString(), " (", device.interface,
                      port == 0 ? ")" : absl::StrCat(", port ", port, ")"));
}

}  // namespace

// UCX picks ports of a range at random until one is free, for ever if none is: so it is given one
// port at a time.
absl::StatusOr<std::unique_ptr<UcxWorker>> UcxWorker::Open(const Device& device, PortRange ports,
                                                           absl::Duration unacknowledged_limit) {
  if (ports.any()) return OpenPort(device, 0, unacknowledged_limit);
  const int count = ports.last - ports.first + 1;
  const int start = static_cast<int>(std::random_device()() % count);
  for (int i = 0; i < count; ++i) {
    IpEndpoint candidate = device.address;
    candidate.set_port(ports.first + (start + i) % count);
    int error = WhyNotFree(candidate);
    if (error == EADDRINUSE) continue;
    if (error != 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("listening on ", At(device, candidate.port()), " of the range ",
                       ports.ToString(), ": ", std::strerror(error)));
    }
    auto worker = OpenPort(device, candidate.port(), unacknowledged_limit);
    // Taken by another process since the probe?
    if (!worker.ok() && WhyNotFree(candidate) == EADDRINUSE) continue;
    return worker;
  }
  return absl::ResourceExhaustedError(absl::StrCat("no free port in the range ", ports.ToString(),
                                                   " on ", At(device, 0),
                                                   ": each is in use; widen GEOMESH_PORTS"));
}

absl::StatusOr<std::unique_ptr<UcxWorker>> UcxWorker::OpenPort(
    const Device& device, uint16_t port, absl::Duration unacknowledged_limit) {
  absl::flat_hash_set<ino_t> before;
  ForEachTcpSocket([&](const SocketInfo& s) { before.insert(s.ref.inode); });

  std::unique_ptr<UcxWorker> self(new UcxWorker);
  GM_ASSIGN_OR_RETURN(self->context_, MakeUcxContext(device, port, unacknowledged_limit));
  ucp_worker_params_t params = {};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // the engine's turn goes from thread to thread
  if (auto status = ucp_worker_create(self->context_, &params, &self->worker_); status != UCS_OK) {
    self->worker_ = nullptr;
    return UcxStatus(status,
                     absl::StrCat("listening on ", At(device, port), ": ", TakeLastUcxComplaint()));
  }
  GM_RETURN_IF_ERROR(CheckSettingsTaken());
  if (auto status = ucp_worker_get_efd(self->worker_, &self->event_fd_); status != UCS_OK) {
    return UcxStatus(status, "asking for the worker's event descriptor");
  }
  SetCloseOnExec(self->event_fd_);

  // UCX does not tell its port. The kernel lists the sockets, and UCX's address holds the port.
  GM_ASSIGN_OR_RETURN(const std::string address, self->Address());
  std::string elsewhere;
  ForEachTcpSocket([&](const SocketInfo& s) {
    if (!s.listening || before.contains(s.ref.inode)) return;
    const char big_endian[2] = {static_cast<char>(s.local.port() >> 8),
                                static_cast<char>(s.local.port())};
    if (!absl::StrContains(address, absl::string_view(big_endian, 2))) return;  // another thread's
    if (!s.local.SameAddress(device.address)) {
      elsewhere = s.local.ToString();
      return;
    }
    self->listening_ = s.local;
    SetCloseOnExec(s.ref.fd);
  });
  if (self->listening_.port() == 0) {
    return absl::FailedPreconditionError(absl::StrCat("UCX does not listen on ", At(device, port),
                                                      elsewhere.empty() ? "" : ", but on ",
                                                      elsewhere));
  }
  return self;
}

UcxWorker::~UcxWorker() {
  if (worker_ != nullptr) ucp_worker_destroy(worker_);
  if (context_ != nullptr) ucp_cleanup(context_);
}

absl::StatusOr<std::string> UcxWorker::Address() const {
  ucp_address_t* address = nullptr;
  size_t bytes = 0;
  if (auto status = ucp_worker_get_address(worker_, &address, &bytes); status != UCS_OK) {
    return UcxStatus(status, "asking for the worker's address");
  }
  std::string copy(reinterpret_cast<const char*>(address), bytes);
  ucp_worker_release_address(worker_, address);
  return copy;
}

}  // namespace geomesh::transport
