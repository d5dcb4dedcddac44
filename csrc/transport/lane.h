// One lane's bookkeeping: what is in flight on it, what its acks say about rate and delay, and what
// was received. Knows no wire and no peer.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "transport/balancer.h"
#include "transport/loop.h"
#include "transport/scheduler.h"
#include "transport/segment.h"
#include "transport/wire/wire.h"

namespace geomesh::transport {

// A segment from its Post until the wire has let go of it and the peer has acknowledged it (or it
// is known that it never will). Its address is its PostToken.
struct Outgoing {
  SegmentHeader header;
  HeaderBytes header_bytes;
  std::string owned_payload;  // of control segments
  absl::Span<const std::byte> payload;
  OutMessagePtr message;  // of kData
  LaneId lane{};
  bool on_wire = false;   // OnPosted is still to come
  bool settled = false;   // acknowledged or given up
  bool in_doubt = false;  // counted in message->in_doubt

  Instant posted_at;
  bool window_full = false;       // the lane was as busy as it may be
  uint64_t delivered_before = 0;  // of the lane, when this was posted
  Instant delivered_at_before;
  Instant acked_sent_at_before;

  uint64_t bytes() const { return kSegmentHeaderBytes + payload.size(); }
};

struct Lane {
  enum class State {
    kConnecting,  // dialled, not welcomed
    kReady,
    kLeft,  // the peer said bye on it
  };

  LaneId id{};
  uint32_t name = 0;  // the same on both sides: attempt << 8 | index
  State state = State::kConnecting;
  bool broken = false;            // a Post failed; its loss is on the way
  bool stalled = false;           // silent where others are heard: nothing more is put on it
  std::optional<Traffic> marked;  // what the wire was told last
  bool delay_known = true;  // min_rtt was, or can have been, measured without everybody's queues

  // ---- sending ----
  uint64_t sent_sequence = 0;
  std::deque<Outgoing*> in_flight;  // in order of sequence; not settled
  uint64_t in_flight_bytes = 0;
  uint64_t delivered_bytes = 0, sent_bytes = 0;
  Instant delivered_at;
  Instant acked_at;       // when anything was acknowledged last
  Instant acked_sent_at;  // when the newest acknowledged segment was sent
  Instant sent_at;
  // Since when something that is to be acknowledged has been in flight without any progress, as
  // ticks see it, and what all lanes to the peer had delivered then.
  std::optional<Instant> awaits_since;
  uint64_t peer_delivered_before = 0;
  bool bare_on_wire = false;  // one kAck or kHeartbeat at a time
  double bytes_per_s = 0;
  Instant rate_at;
  // The window holds four times what the path does while the rate grows (TCP's slow start has to
  // be kept busy), then twice, which covers what TCP sends again; and now and then the most once
  // more, to see whether there is more to be had.
  double grown_to = 0;  // bytes_per_s when it last grew
  Instant round_at;     // a round trip began
  int rounds = 0, flat_rounds = 0;
  absl::Duration min_rtt = absl::InfiniteDuration();
  // While delay is measured anew: the segment whose acknowledgement tells, and what was known.
  uint64_t delay_probe_sequence = 0;
  absl::Duration min_rtt_before = absl::InfiniteDuration();
  absl::Duration rtt = absl::ZeroDuration();  // smoothed

  // ---- receiving ----
  uint64_t received_sequence = 0;
  Instant heard_at;
  uint64_t unacked_bytes = 0;  // received since our last ack; 0: none is owed

  // May carry data.
  bool usable() const { return state == State::kReady && !broken && !stalled; }
  double WindowGain() const;
  LaneView View(int lanes) const;
  // Bulk on its way.
  bool carries_bulk() const;
  // Before a Post: fills in what rate and delay are measured from.
  void OnSend(Outgoing* out, Instant now, int lanes);
  // `out`, the newest one settled by an ack that was held back for `ack_delay`.
  void OnAck(const Outgoing& out, absl::Duration ack_delay, Instant now);
};

}  // namespace geomesh::transport
