#include "transport/balancer.h"

#include <algorithm>

namespace geomesh::transport {
namespace {

constexpr uint64_t kMinPeerWindowBytes = 4 * kMaxSegmentPayloadBytes;
constexpr uint64_t kMaxWindowBytes = 64u << 20;
constexpr uint64_t kSmallExtraBytes = 1u << 20;
constexpr double kUnknownBytesPerSecond = 1e8;

double Rate(const LaneView& lane) {
  return lane.bytes_per_s > 0 ? lane.bytes_per_s : kUnknownBytesPerSecond;
}

bool HasRoom(const LaneView& lane, Level level) {
  const uint64_t extra = level == Level::kSmall ? kSmallExtraBytes : 0;
  return lane.in_flight_bytes < lane.window_bytes + extra;
}

// Until something posted now has arrived: behind what is more than the path holds.
double ArrivalSeconds(const LaneView& lane, uint64_t bytes) {
  const double queued = static_cast<double>(lane.in_flight_bytes) / Rate(lane) - lane.rtt_s;
  return std::max(queued, 0.0) + lane.rtt_s / 2 + static_cast<double>(bytes) / Rate(lane);
}

// Where small messages have a lane of their own, whether this one is for `message`.
bool IsFor(const OutMessage& message, absl::Span<const LaneView> lanes, const LaneView& lane) {
  return !lanes.front().urgent || lane.urgent == message.small();
}

}  // namespace

int LanePicker::PickPinned(absl::Span<const LaneView> lanes, OutMessage& message,
                           Level level) const {
  int best = kNoLane;
  double best_s = 0;
  for (size_t i = 0; i < lanes.size(); ++i) {
    const LaneView& lane = lanes[i];
    if (message.first_handed_out && lane.name == message.lane) {
      return HasRoom(lane, level) ? static_cast<int>(i) : kItsLaneFull;
    }
    if (!HasRoom(lane, level) || !IsFor(message, lanes, lane)) continue;
    const double seconds = ArrivalSeconds(lane, message.bytes.size());
    if (best < 0 || seconds < best_s) {
      best = static_cast<int>(i);
      best_s = seconds;
    }
  }
  if (best >= 0) message.lane = lanes[best].name;
  return best;
}

int LanePicker::Pick(absl::Span<const LaneView> lanes, OutMessage& message, Level level) {
  if (message.bytes.size() <= pin_bytes_) return PickPinned(lanes, message, level);
  int best = kNoLane;
  double best_cost = 0;
  for (size_t n = 0; n < lanes.size(); ++n) {
    const size_t i = balancer_ == Balancer::kRoundRobin ? (last_ + 1 + n) % lanes.size() : n;
    const LaneView& lane = lanes[i];
    if (!HasRoom(lane, level) || !IsFor(message, lanes, lane)) continue;
    if (balancer_ == Balancer::kRoundRobin) return static_cast<int>(last_ = i);
    const double bytes = static_cast<double>(lane.in_flight_bytes);
    const double cost = balancer_ == Balancer::kLeastBacklog ? bytes : bytes / Rate(lane);
    if (best < 0 || cost < best_cost) {
      best = static_cast<int>(i);
      best_cost = cost;
    }
  }
  return best;
}

uint64_t WindowBytes(double gain, double bytes_per_s, double min_rtt_s, int lanes) {
  const uint64_t least =
      std::max<uint64_t>(kMinPeerWindowBytes / std::max(lanes, 1), kMaxSegmentPayloadBytes);
  const double window = gain * bytes_per_s * min_rtt_s;
  if (window >= static_cast<double>(kMaxWindowBytes)) return kMaxWindowBytes;
  return std::max(static_cast<uint64_t>(window), least);
}

}  // namespace geomesh::transport
