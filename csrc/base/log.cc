#include "base/log.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace geomesh {
namespace {

LogLevel LevelFromEnvironment() {
  const char* text = std::getenv("GEOMESH_LOG_LEVEL");
  return ParseLogLevel(text == nullptr ? "" : text).value_or(LogLevel::kWarning);
}

struct State {
  std::atomic<LogLevel> level{LevelFromEnvironment()};
  const absl::TimeZone zone = absl::LocalTimeZone();
  std::mutex mutex;  // guards the two below and keeps lines whole
  std::string identity;
  std::function<void(LogLevel, absl::string_view)> sink;
};

// Never destroyed: threads may log while the process exits.
State& GetState() {
  static State* state = new State;
  return *state;
}

constexpr char kLetters[] = "EWID";

}  // namespace

std::optional<LogLevel> ParseLogLevel(absl::string_view name) {
  if (name == "error") return LogLevel::kError;
  if (name == "warning") return LogLevel::kWarning;
  if (name == "info") return LogLevel::kInfo;
  if (name == "debug") return LogLevel::kDebug;
  return std::nullopt;
}

bool LogEnabled(LogLevel level) {
  return static_cast<int>(level) <=
         static_cast<int>(GetState().level.load(std::memory_order_relaxed));
}

void SetLogLevel(LogLevel level) { GetState().level.store(level, std::memory_order_relaxed); }

void SetLogIdentity(std::string identity) {
  State& state = GetState();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.identity = std::move(identity);
}

void SetLogSink(std::function<void(LogLevel, absl::string_view)> sink) {
  State& state = GetState();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.sink = std::move(sink);
}

void Log(LogLevel level, absl::string_view component, absl::string_view message) {
  if (!LogEnabled(level)) return;
  State& state = GetState();
  const std::string time = absl::FormatTime("%H:%M:%E3S", absl::Now(), state.zone);
  std::lock_guard<std::mutex> lock(state.mutex);
  const std::string line =
      absl::StrCat("geomesh ", absl::string_view(&kLetters[static_cast<int>(level)], 1), " ", time,
                   " ", state.identity.empty() ? "" : absl::StrCat("[", state.identity, "] "),
                   component, ": ", message);
  if (state.sink) {
    state.sink(level, line);
  } else {
    absl::FPrintF(stderr, "%s\n", line);
  }
}

}  // namespace geomesh
