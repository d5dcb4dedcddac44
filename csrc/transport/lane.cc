#include "transport/lane.h"

#include <algorithm>

namespace geomesh::transport {
namespace {

constexpr absl::Duration kRateMemory = absl::Seconds(1);

constexpr double kGrowingGain = 4, kSteadyGain = 2;
constexpr double kGrowth = 1.1;
// Round trips at a full window without growth: then it is steady; a round of these is a probe.
constexpr int kFlatRounds = 4, kProbeRound = 8;

}  // namespace

double Lane::WindowGain() const {
  return flat_rounds < kFlatRounds || rounds % kProbeRound == 0 ? kGrowingGain : kSteadyGain;
}

LaneView Lane::View(int lanes) const {
  LaneView view;
  view.name = name;
  view.in_flight_bytes = in_flight_bytes;
  view.bytes_per_s = bytes_per_s;
  if (min_rtt != absl::InfiniteDuration()) view.rtt_s = absl::ToDoubleSeconds(min_rtt);
  view.window_bytes = WindowBytes(WindowGain(), view.bytes_per_s, view.rtt_s, lanes);
  return view;
}

bool Lane::carries_bulk() const {
  return std::any_of(in_flight.begin(), in_flight.end(), [](const Outgoing* out) {
    return out->message != nullptr && out->header.total_bytes > kSmallBytes;
  });
}

void Lane::OnSend(Outgoing* out, Instant now, int lanes) {
  if (in_flight.empty()) delivered_at = acked_sent_at = now;
  out->posted_at = now;
  out->delivered_before = delivered_bytes;
  out->delivered_at_before = delivered_at;
  out->acked_sent_at_before = acked_sent_at;
  in_flight.push_back(out);
  in_flight_bytes += out->bytes();
  sent_bytes += out->bytes();
  out->window_full = in_flight_bytes >= View(lanes).window_bytes;
  sent_at = now;
}

void Lane::OnAck(const Outgoing& out, absl::Duration ack_delay, Instant now) {
  const absl::Duration sample =
      std::max(Between(out.posted_at, now) - ack_delay, absl::Microseconds(1));
  min_rtt = std::min(min_rtt, sample);
  rtt = rtt == absl::ZeroDuration() ? sample : rtt + (sample - rtt) / 8;

  // Delivered over the time since the ack before this segment was posted, which is at least one
  // round trip. Bunched acks make that time look short, bunched sending the other: the longer
  // holds.
  delivered_at = acked_at = now;
  acked_sent_at = out.posted_at;
  const double seconds = absl::ToDoubleSeconds(std::max(
      Between(out.delivered_at_before, now), Between(out.acked_sent_at_before, out.posted_at)));
  if (seconds <= 0) return;
  const double rate = static_cast<double>(delivered_bytes - out.delivered_before) / seconds;
  // A lower rate is believed only when it was the lane, and not the caller, that set it.
  const bool stale = Between(rate_at, now) > std::max(kRateMemory, 10 * rtt);
  if (rate >= bytes_per_s || (stale && out.window_full)) {
    if (rate < bytes_per_s) grown_to = rate;
    bytes_per_s = rate;
    rate_at = now;
  }
  if (Between(round_at, now) >= rtt) {
    round_at = now;
    ++rounds;
    if (bytes_per_s >= kGrowth * grown_to) {
      grown_to = bytes_per_s;
      flat_rounds = 0;
    } else if (out.window_full) {
      ++flat_rounds;
    }
  }
}

}  // namespace geomesh::transport
