// UCX's settings for the wire, and the checks of the library that was loaded. All values were
// measured (eager zero-copy segments of 256 KB over TCP, peer errors, quick connects); the same on
// all processes of a job. Users change what may be changed by GEOMESH_* options: UCX_* variables
// meant for other software do not reach the settings made here.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/wire/device.h"

namespace geomesh::transport {

// UCX sends frames up to its own receive size and the receiver does not check: both sizes must be
// equal on all processes, and a header and a segment must fit.
inline constexpr uint32_t kUcxTxSegmentBytes = 8 << 10;
inline constexpr uint32_t kUcxRxSegmentBytes = 264 << 10;

// A context for one device, listening (once it has a worker) on `port` (0: any).
absl::StatusOr<ucp_context_h> MakeUcxContext(const Device& device, uint16_t port,
                                             absl::Duration unacknowledged_limit);

// "Connection reset by remote peer" and the like, under our code for it.
absl::Status UcxStatus(ucs_status_t status, absl::string_view what);

// major << 16 | minor << 8 | patch of the loaded library.
uint32_t UcxRuntimeVersion();

// Refuses a library older than the headers this was built with.
absl::Status CheckUcxVersion();

// After a worker was made: refuses a UCX that ignored settings which memory safety or the ports
// depend on.
absl::Status CheckSettingsTaken();

// What cannot be set any more once the library is loaded: signal handlers of UCX's that are
// installed, memory hooks that will be. Empty when UCX_DEBUG_SIGNO=0, UCX_HANDLE_ERRORS=none and
// UCX_MEM_EVENTS=n were in the environment in time.
std::vector<std::string> UcxLoadTimeProblems();

}  // namespace geomesh::transport
