// The engine's log: one line an event on stderr, each with time, level, rank, region and component.
// Knows nothing of who logs. (Debian's Abseil of 2022 ships no absl/log.)
//
// Levels: kError is for what ends a call or a peer, logged once, where it is decided; kWarning for
// what the user should act on; kInfo for a change of state (connected, left); kDebug for everything
// else. GEOMESH_LOG_LEVEL = error | warning (default) | info | debug. Thread-safe.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace geomesh {

enum class LogLevel : int { kError = 0, kWarning = 1, kInfo = 2, kDebug = 3 };

// Writes one line if `level` is enabled. `component` is the storey ("transport", "wire/ucx", ...).
void Log(LogLevel level, absl::string_view component, absl::string_view message);

// True if a line of this level would be written: guards the making of costly messages.
bool LogEnabled(LogLevel level);

// The level of this name ("error", ...), if it is one.
std::optional<LogLevel> ParseLogLevel(absl::string_view name);

void SetLogLevel(LogLevel level);

// Shown in every later line, for example "rank 2 (eastasia)". Empty: nothing is shown.
void SetLogIdentity(std::string identity);

// Replaces stderr as the destination (tests); nullptr restores it.
void SetLogSink(std::function<void(LogLevel, absl::string_view line)> sink);

}  // namespace geomesh
