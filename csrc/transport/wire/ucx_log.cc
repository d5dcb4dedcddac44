#include "transport/wire/ucx_log.h"

#include <ucs/debug/log_def.h>

#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <utility>

#include "absl/strings/match.h"
#include "base/log.h"

namespace geomesh::transport {
namespace {

// Never destroyed: UCX's own thread may log until the process ends.
struct Heard {
  std::mutex mutex;
  std::string complaint;
  std::string unused_settings;

  static Heard& Get() {
    static Heard* heard = new Heard;
    return *heard;
  }
};

ucs_log_func_rc_t OnUcxLog(const char* /*file*/, unsigned /*line*/, const char* /*function*/,
                           ucs_log_level_t level, const ucs_log_component_config_t* /*component*/,
                           const char* format, va_list arguments) {
  // Debug and trace lines only exist when the user asked UCX for them.
  char text[1024];
  va_list copy;
  va_copy(copy, arguments);
  std::vsnprintf(text, sizeof(text), format, copy);
  va_end(copy);
  {
    Heard& heard = Heard::Get();
    std::lock_guard<std::mutex> lock(heard.mutex);
    if (level <= UCS_LOG_LEVEL_ERROR) heard.complaint = text;
    if (absl::StartsWith(text, "invalid configuration")) heard.unused_settings = text;
  }
  // A fatal line is UCX's last before it aborts the process.
  Log(level == UCS_LOG_LEVEL_FATAL ? LogLevel::kError : LogLevel::kDebug, "wire/ucx", text);
  return UCS_LOG_FUNC_RC_STOP;
}

}  // namespace

void RouteUcxLog() {
  static const bool routed = [] {
    ucs_log_push_handler(&OnUcxLog);
    return true;
  }();
  (void)routed;
}

std::string TakeLastUcxComplaint() {
  std::lock_guard<std::mutex> lock(Heard::Get().mutex);
  return std::exchange(Heard::Get().complaint, std::string());
}

std::string TakeUnusedUcxSettings() {
  std::lock_guard<std::mutex> lock(Heard::Get().mutex);
  return std::exchange(Heard::Get().unused_settings, std::string());
}

}  // namespace geomesh::transport
