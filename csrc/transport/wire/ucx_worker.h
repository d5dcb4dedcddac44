// UCX's context and worker for one device: opening them on a port of the range, finding out where
// they listen, and what this process told others about it. Knows nothing of lanes.
#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/options.h"
#include "transport/wire/device.h"
#include "transport/wire/sockets.h"

namespace geomesh::transport {

class UcxWorker {
 public:
  // Listening on return. Errors name the device and the address, port or range that did not work.
  static absl::StatusOr<std::unique_ptr<UcxWorker>> Open(const Device& device, PortRange ports,
                                                         absl::Duration unacknowledged_limit);
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  ucp_worker_h get() const { return worker_; }
  int event_fd() const { return event_fd_; }
  const IpEndpoint& listening() const { return listening_; }
  // UCX's own, for ucp_ep_create elsewhere.
  absl::StatusOr<std::string> Address() const;

 private:
  UcxWorker() = default;
  static absl::StatusOr<std::unique_ptr<UcxWorker>> OpenPort(const Device& device, uint16_t port,
                                                             absl::Duration unacknowledged_limit);

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
  IpEndpoint listening_;
};

}  // namespace geomesh::transport
