// The flight recorder: the last events of an engine, in a ring, for whoever has to find out what
// happened before a failure. Knows events and how they are written down, and no peer, lane or file.
//
// Engine thread only. An event costs some 20 ns.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "transport/engine.h"
#include "transport/loop.h"

namespace geomesh::transport {

struct RecordedEvent {
  enum class What : uint8_t {
    kSend,      // posted by the caller
    kSent,      // ended
    kRecv,      // posted by the caller
    kReceived,  // ended
    kConnected,
    kLaneUp,
    kLaneLost,
    kSuspected,
    kHeardAgain,
    kLost,
    kClosed,  // a channel, by the peer
  };
  Instant when = {};
  What what{};
  absl::StatusCode code = absl::StatusCode::kOk;  // of what ended
  PeerId peer{};
  uint32_t lane = 0;    // its name, of lanes' events
  MessageKey key = {};  // of messages; the channel alone of channels
  uint64_t bytes = 0;
};

class Recorder {
 public:
  void Add(const RecordedEvent& event) {
    events_[count_ % kKept] = event;
    ++count_;
  }

  // A line an event, oldest first: seconds before `now`, what, and with whom.
  std::string Text(Instant now, absl::FunctionRef<std::string(PeerId)> describe) const;

  static constexpr size_t kKept = 4096;

 private:
  std::array<RecordedEvent, kKept> events_;
  uint64_t count_ = 0;
};

}  // namespace geomesh::transport
