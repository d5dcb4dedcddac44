#include "transport/wire/ucx_log.h"

#include <ucs/debug/log_def.h>

#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <utility>

#include "base/log.h"

namespace geomesh::transport {
namespace {

std::mutex complaint_mutex;
std::string& Complaint() {
  static std::string* complaint = new std::string;
  return *complaint;
}

ucs_log_func_rc_t OnUcxLog(const char* /*file*/, unsigned /*line*/, const char* /*function*/,
                           ucs_log_level_t level, const ucs_log_component_config_t* /*component*/,
                           const char* format, va_list arguments) {
  // Debug and trace lines only exist when the user asked UCX for them.
  char text[512];
  va_list copy;
  va_copy(copy, arguments);
  std::vsnprintf(text, sizeof(text), format, copy);
  va_end(copy);
  if (level <= UCS_LOG_LEVEL_ERROR) {
    std::lock_guard<std::mutex> lock(complaint_mutex);
    Complaint() = text;
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
  std::lock_guard<std::mutex> lock(complaint_mutex);
  return std::exchange(Complaint(), std::string());
}

}  // namespace geomesh::transport
