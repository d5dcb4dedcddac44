#include "transport/wire/ucx_config.h"

#include <dlfcn.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "transport/wire/ucx_log.h"

namespace geomesh::transport {
namespace {

constexpr uint32_t MakeVersion(uint32_t major, uint32_t minor) { return major << 16 | minor << 8; }

struct Setting {
  const char* name;
  std::string value;
  bool optional = false;  // not in every UCX from 1.13 on
};

std::vector<Setting> Settings(const Device& device, uint16_t port,
                              absl::Duration unacknowledged_limit) {
  const bool v6 = device.address.family() == AF_INET6;
  return {
      {"TLS", "tcp"},
      {"NET_DEVICES", device.interface},
      // Never a mixed list: an IPv6 listener with IPv4 preferred corrupts UCX's heap.
      {"TCP_AF_PRIO", v6 ? "inet6" : "inet"},
      {"TCP_PORT_RANGE", absl::StrCat(port, "-", port)},
      // One named device, so it may be the bridge that is a hypervisor's main interface.
      {"TCP_BRIDGE_ENABLE", "y", true},
      // Otherwise connect() blocks inside ucp_ep_create, and with it the engine thread.
      {"TCP_CONN_NB", "y"},
      {"TCP_SYN_CNT", "3"},
      {"TCP_TX_SEG_SIZE", absl::StrCat(kUcxTxSegmentBytes)},
      {"TCP_RX_SEG_SIZE", absl::StrCat(kUcxRxSegmentBytes)},
      {"TCP_KEEPIDLE", "2s"},
      {"TCP_KEEPINTVL", "1s"},
      {"TCP_KEEPCNT", "3"},
      {"TCP_USER_TIMEOUT", absl::StrCat(absl::ToInt64Milliseconds(unacknowledged_limit), "ms")},
      // Set, if only to the default, so that the environment cannot: fixed buffers stop the
      // kernel's autotuning, which long paths need.
      {"TCP_SNDBUF", "auto"},
      {"TCP_RCVBUF", "auto"},
      {"TCP_NODELAY", "y"},
      // The thresholds derived from a NIC's advertised speed differ between hosts.
      {"RNDV_THRESH", "inf"},
      // A lane that breaks inside a zero-copy segment completes that twice: harmless, but an
      // assertion ends the process in the builds that distributions make of older releases.
      {"ZCOPY_THRESH", UcxRuntimeVersion() < MakeVersion(1, 17) ? "inf" : "0"},
  };
}

// A value of UCX's own kind for "no".
bool IsNo(const char* value) {
  if (value == nullptr) return false;
  const std::string v = absl::AsciiStrToLower(value);
  return v == "n" || v == "no" || v == "0" || v == "off" || v == "none" || v.empty();
}

}  // namespace

absl::Status UcxStatus(ucs_status_t status, absl::string_view what) {
  std::string text = absl::StrCat(what, ": UCX: ", ucs_status_string(status));
  switch (status) {
    case UCS_OK:
      return absl::OkStatus();
    case UCS_ERR_INVALID_PARAM:
    case UCS_ERR_INVALID_ADDR:
      return absl::InvalidArgumentError(text);
    case UCS_ERR_NO_MEMORY:
    case UCS_ERR_NO_RESOURCE:
    case UCS_ERR_EXCEEDS_LIMIT:
      return absl::ResourceExhaustedError(text);
    case UCS_ERR_CANCELED:
      return absl::CancelledError(text);
    case UCS_ERR_NO_DEVICE:
    case UCS_ERR_BUSY:
    case UCS_ERR_UNSUPPORTED:
      return absl::FailedPreconditionError(text);
    default:
      return absl::UnavailableError(text);
  }
}

absl::StatusOr<ucp_context_h> MakeUcxContext(const Device& device, uint16_t port,
                                             absl::Duration unacknowledged_limit) {
  ucp_config_t* config = nullptr;
  if (ucs_status_t status = ucp_config_read(nullptr, nullptr, &config); status != UCS_OK) {
    return UcxStatus(status, absl::StrCat("reading UCX's configuration (a UCX_* variable or "
                                          "ucx.conf has a value that it refuses: ",
                                          TakeLastUcxComplaint(), ")"));
  }
  for (const Setting& setting : Settings(device, port, unacknowledged_limit)) {
    absl::string_view name = setting.name;
    // Before 1.17, UCX looks for a transport's settings without the transport's name, and its
    // setter of SYN_CNT writes over the setting behind it.
    if (UcxRuntimeVersion() < MakeVersion(1, 17) && absl::ConsumePrefix(&name, "TCP_") &&
        name == "SYN_CNT") {
      continue;
    }
    const ucs_status_t status =
        ucp_config_modify(config, std::string(name).c_str(), setting.value.c_str());
    if (status != UCS_OK && !setting.optional) {
      ucp_config_release(config);
      return UcxStatus(status, absl::StrCat("setting ", setting.name, "=", setting.value));
    }
  }
  ucp_params_t params = {};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED |
                      UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.mt_workers_shared = 0;
  params.estimated_num_eps = 64;
  ucp_context_h context = nullptr;
  const ucs_status_t status = ucp_init(&params, config, &context);
  ucp_config_release(config);
  if (status == UCS_OK) return context;
  const std::string entry = absl::StrCat("/sys/class/net/", device.interface);
  if (access(entry.c_str(), F_OK) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "UCX cannot find ", device.interface,
        ": it looks in /sys/class/net, and this network "
        "namespace has another one's /sys mounted (ip netns exec mounts the right one)"));
  }
  return UcxStatus(
      status, absl::StrCat("opening ", device.interface, " (", device.address.AddressString(), ") ",
                           TakeLastUcxComplaint()));
}

uint32_t UcxRuntimeVersion() {
  unsigned major = 0, minor = 0, patch = 0;
  ucp_get_version(&major, &minor, &patch);
  return major << 16 | minor << 8 | patch;
}

absl::Status CheckUcxVersion() {
  const uint32_t loaded = UcxRuntimeVersion();
  const uint32_t built = MakeVersion(UCP_API_MAJOR, UCP_API_MINOR);
  if (loaded >> 16 == built >> 16 && loaded >= built) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the UCX library that is loaded is ", ucp_get_version_string(), ", but this was built for ",
      UCP_API_MAJOR, ".", UCP_API_MINOR, " or later: another UCX comes first in the library path"));
}

absl::Status CheckSettingsTaken() {
  const std::string unused = TakeUnusedUcxSettings();
  for (const char* name : {"SEG_SIZE", "PORT_RANGE", "CONN_NB", "AF_PRIO"}) {
    if (absl::StrContains(unused, name)) {
      return absl::FailedPreconditionError(
          absl::StrCat("UCX ", ucp_get_version_string(),
                       " does not take settings that the wire depends on: ", unused));
    }
  }
  return absl::OkStatus();
}

std::vector<std::string> UcxLoadTimeProblems() {
  std::vector<std::string> problems;
  std::vector<std::string> signals;
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action;
    if (sigaction(signal, nullptr, &action) != 0) continue;
    void* handler = (action.sa_flags & SA_SIGINFO) != 0
                        ? reinterpret_cast<void*>(action.sa_sigaction)
                        : reinterpret_cast<void*>(action.sa_handler);
    Dl_info info;
    if (handler == nullptr || dladdr(handler, &info) == 0 || info.dli_fname == nullptr) continue;
    if (absl::StrContains(info.dli_fname, "libucs")) signals.push_back(strsignal(signal));
  }
  if (!signals.empty()) {
    problems.push_back(
        absl::StrCat("UCX handles signals of this process (", absl::StrJoin(signals, ", "),
                     "): set UCX_DEBUG_SIGNO=0 and UCX_HANDLE_ERRORS=none before it is loaded"));
  }
  if (!IsNo(std::getenv("UCX_MEM_EVENTS"))) {
    problems.push_back(
        "UCX replaces mmap and others in libc: set UCX_MEM_EVENTS=n before it is loaded");
  }
  return problems;
}

}  // namespace geomesh::transport
