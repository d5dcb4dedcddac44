// Which lane a segment takes (PIN), and how much may be in flight on one. Pure decisions over what
// is known of the lanes.
//
// PIN's idea: bulk is sprayed over all lanes, and each lane carries what its rate allows; a short
// message stays on one lane for its whole life, the one on which it arrives first now, and does
// not wait behind the bulk posted there. It wraps any balancer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "transport/engine.h"
#include "transport/scheduler.h"

namespace geomesh::transport {

// What is known of a lane.
struct LaneView {
  uint32_t name = 0;
  uint64_t in_flight_bytes = 0;  // posted, not acknowledged
  uint64_t window_bytes = 0;     // how much may be
  double bytes_per_s = 0;        // 0: not known
  double rtt_s = 0;              // without queueing; 0: not known
  bool urgent = false;           // for small messages alone; only ever the first of several
};

class LanePicker {
 public:
  // Messages of at most `pin_bytes` are pinned.
  LanePicker(Balancer balancer, uint64_t pin_bytes) : balancer_(balancer), pin_bytes_(pin_bytes) {}

  // An index, kNoLane or kItsLaneFull: for Outbox::Take. Small messages may go a little over the
  // window, so that they never wait for bulk.
  int Pick(absl::Span<const LaneView> lanes, OutMessage& message, Level level);

 private:
  int PickPinned(absl::Span<const LaneView> lanes, OutMessage& message, Level level) const;

  const Balancer balancer_;
  const uint64_t pin_bytes_;
  size_t last_ = 0;  // of kRoundRobin
};

// How many bytes one of `lanes` lanes may have in flight: `gain` times its bandwidth x delay, at
// least its share of four segments.
uint64_t WindowBytes(double gain, double bytes_per_s, double min_rtt_s, int lanes);

}  // namespace geomesh::transport
