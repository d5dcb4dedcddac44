#include "transport/lane_tuner.h"

#include <algorithm>

namespace geomesh::transport {
namespace {

// New lanes are in their slow start for some round trips: an epoch is longer than that.
constexpr int kEpochRoundTrips = 3;
constexpr absl::Duration kShortestEpoch = absl::Milliseconds(100);
constexpr absl::Duration kLongestEpoch = absl::Seconds(2);
// Twice the lanes are worth keeping on if they bring so much more.
constexpr double kWorthwhile = 1.1;
// Where a round trip takes so long, each lane's slow start takes seconds: the first step is a large
// one, and at once.
constexpr absl::Duration kLongRoundTrip = absl::Milliseconds(50);
constexpr int kLongPathLanes = 8;
// Paths change: it is looked at again, and tried where throughput has.
constexpr absl::Duration kSettledFor = absl::Minutes(1);
constexpr double kFallen = 0.5;

}  // namespace

void LaneTuner::Begin(Instant now, uint64_t delivered_bytes) {
  measuring_ = true;
  begin_ = now;
  bytes_at_begin_ = delivered_bytes;
}

void LaneTuner::Settle(Instant now) {
  settled_ = true;
  settled_at_ = now;
}

int LaneTuner::Update(Instant now, uint64_t delivered_bytes, bool limited, absl::Duration rtt) {
  if (!limited) {
    measuring_ = false;
    return lanes_;
  }
  if (!measuring_) {
    Begin(now, delivered_bytes);
    if (rtt >= kLongRoundTrip && !settled_ && lanes_ < kLongPathLanes) {
      lanes_ = std::min(kLongPathLanes, most_);
      ramping_ = true;
    }
    return lanes_;
  }
  const absl::Duration epoch = std::clamp(kEpochRoundTrips * rtt, kShortestEpoch, kLongestEpoch);
  const absl::Duration passed = Between(begin_, now);
  if (passed < epoch) return lanes_;
  const double rate =
      static_cast<double>(delivered_bytes - bytes_at_begin_) / absl::ToDoubleSeconds(passed);
  Begin(now, delivered_bytes);
  const bool grows = rate > kWorthwhile * best_bytes_per_s_;
  if (ramping_) {
    // Still more lanes would be in the way of these, whose slow starts are under way: they are
    // tried when those are over.
    ramping_ = grows;
    best_bytes_per_s_ = rate;
    if (!grows) lanes_ = std::min(2 * lanes_, most_);
    return lanes_;
  }
  if (lanes_ >= most_ || (settled_ && Between(settled_at_, now) < kSettledFor)) return lanes_;
  if (grows) {
    settled_ = false;
    best_bytes_per_s_ = rate;
    lanes_ = std::min(2 * lanes_, most_);
  } else {
    if (rate < kFallen * best_bytes_per_s_) best_bytes_per_s_ = rate;
    Settle(now);
  }
  return lanes_;
}

void LaneTuner::AtLeast(int lanes) { lanes_ = std::clamp(lanes, lanes_, most_); }

}  // namespace geomesh::transport
