// How a peer's segments get onto the wire: control first, then what the outbox and the picker say,
// and what becomes of each.
#include <algorithm>
#include <optional>
#include <utility>

#include "transport/bytes.h"
#include "transport/peer.h"

namespace geomesh::transport {
namespace {

constexpr uint64_t kAckNowBytes = kMaxSegmentPayloadBytes;

constexpr int kInflatedDelay = 3;
constexpr absl::Duration kLongestDelayProbe = absl::Seconds(1);

}  // namespace

void Peer::QueueControl(SegmentHeader header, std::string payload) {
  control_.push_back({header, std::move(payload)});
  host_->MarkDirty(this);
}

void Peer::KeepOnlyCloses() {
  std::erase_if(control_,
                [](const Control& control) { return control.header.type != SegmentType::kClose; });
}

void Peer::FlushKeyLists() {
  const auto queue = [this](SegmentType type, absl::Span<const MessageKey> keys) {
    for (size_t at = 0; at < keys.size(); at += kMaxKeysPerSegment) {
      SegmentHeader header;
      header.type = type;
      control_.push_back({header, EncodeKeys(keys.subspan(at, kMaxKeysPerSegment))});
    }
  };
  queue(SegmentType::kWanted, wanted_);
  wanted_.clear();
  queue(SegmentType::kPulled, pulled_);
  pulled_.clear();
  queue(SegmentType::kAnnounce, outbox_.TakeAnnouncements(false));
}

// A lane that is added under load may see no round trip without the queues that all lanes together
// keep. Its window would be made of that, the queues grow by it, and the next lanes see more. So
// where that shows, what is on its way is let out once, and all lanes are asked on the quiet path.
// (Lanes over paths of unlike delays look the same, until they were asked.)
bool Peer::DelayLooksInflated() const {
  absl::Duration least = absl::InfiniteDuration();
  for (const auto& lane : lanes_) least = std::min(least, lane->min_rtt);
  return std::any_of(lanes_.begin(), lanes_.end(), [least](const auto& lane) {
    return lane->usable() && !lane->delay_known && lane->min_rtt != absl::InfiniteDuration() &&
           lane->min_rtt > kInflatedDelay * least;
  });
}

bool Peer::MeasuresDelay(Instant now) {
  if (!delay_probe_.has_value()) return false;
  bool waits = false;
  if (!delay_probe_->asked) {
    waits = std::any_of(lanes_.begin(), lanes_.end(),
                        [](const auto& lane) { return lane->carries_bulk(); });
    if (!waits) {
      delay_probe_->asked = true;
      for (const auto& lane : lanes_) {
        if (!lane->usable() || lane->bare_on_wire) continue;
        lane->min_rtt_before = std::exchange(lane->min_rtt, absl::InfiniteDuration());
        PostBare(lane.get(), SegmentType::kHeartbeat, kAnswer);
        lane->delay_probe_sequence = lane->sent_sequence;
      }
    }
  }
  if (delay_probe_->asked) {
    waits = std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) {
      return lane->usable() && !lane->in_flight.empty() &&
             lane->in_flight.front()->header.sequence <= lane->delay_probe_sequence;
    });
  }
  if (waits && Between(delay_probe_->since, now) < kLongestDelayProbe) return true;
  for (const auto& lane : lanes_) {
    if (lane->min_rtt == absl::InfiniteDuration()) lane->min_rtt = lane->min_rtt_before;
    if (lane->usable()) lane->delay_known = true;  // not of those that are still to come up
  }
  delay_probe_.reset();
  return false;
}

void Peer::Pump() {
  // Before the other side was heard, nothing goes out that could be missed.
  if (state_ != State::kConnected || is_self_ || leaving_) return;
  const auto post_control = [this] {
    while (!control_.empty()) {
      // Always the first lane, so that control segments keep their order.
      const auto lane =
          std::find_if(lanes_.begin(), lanes_.end(), [](const auto& l) { return l->usable(); });
      if (lane == lanes_.end()) return;
      Control control = std::move(control_.front());
      control_.pop_front();
      PostControl(lane->get(), std::move(control));
    }
  };
  FlushKeyLists();
  post_control();

  const Instant now = std::chrono::steady_clock::now();
  const bool holds_bulk = MeasuresDelay(now);
  std::vector<LaneView> views;
  std::vector<Lane*> ready;
  for (const auto& lane : lanes_) {
    if (lane->usable()) ready.push_back(lane.get());
  }
  for (Lane* lane : ready) views.push_back(lane->View(static_cast<int>(ready.size())));
  if (host_->options().urgent_lane) {
    // The first, which control takes too.
    for (size_t i = 0; i < ready.size(); ++i) {
      views[i].urgent = i == 0 && ready.size() > 1;
      MarkLane(ready[i], views[i].urgent ? Traffic::kUrgent : Traffic::kBulk);
    }
  }
  const auto place = [&](OutMessage& message, Level level) {
    return holds_bulk && !message.small() ? kNoLane : picker_.Pick(views, message, level);
  };
  while (true) {
    std::optional<Outbox::Segment> taken = outbox_.Take(now, place);
    if (!taken.has_value()) break;
    Outbox::Segment& segment = *taken;
    const int pick = segment.lane;
    queue_wait_ += Between(segment.waited_since, now);
    segment.message->lane = ready[pick]->name;
    auto* out = new Outgoing;
    out->header.type = SegmentType::kData;
    out->header.flags = segment.solicited ? kSolicited : 0;
    out->header.key = segment.message->envelope.key;
    out->header.fingerprint = segment.message->envelope.fingerprint;
    out->header.total_bytes = segment.message->bytes.size();
    out->header.offset = segment.offset;
    out->payload = segment.message->bytes.subspan(segment.offset, segment.size);
    out->message = std::move(segment.message);
    ++out->message->unposted;
    unposted_bytes_ += static_cast<int64_t>(segment.size);
    bytes_sent_ += segment.size;
    ++segments_sent_;
    PostSegment(ready[pick], out);
    if (ready[pick]->broken) {
      views[pick].in_flight_bytes = UINT64_MAX;  // never picked again
    } else {
      views[pick].in_flight_bytes = ready[pick]->in_flight_bytes;
    }
  }
  FlushKeyLists();  // messages that met the end of the credit just now
  post_control();
  TuneLanes(now, outbox_.has_ready() && !holds_bulk);
}

void Peer::MarkLane(Lane* lane, Traffic traffic) {
  if (lane->marked == traffic) return;
  lane->marked = traffic;
  host_->wire().Mark(lane->id, traffic);
}

void Peer::PostControl(Lane* lane, Control control) {
  auto* out = new Outgoing;
  out->header = control.header;
  out->owned_payload = std::move(control.payload);
  out->payload = AsBytes(out->owned_payload);
  PostSegment(lane, out);
}

void Peer::PostBare(Lane* lane, SegmentType type, uint8_t flags) {
  if (lane->bare_on_wire || lane->broken) return;
  auto* out = new Outgoing;
  out->header.type = type;
  out->header.flags = flags;
  lane->bare_on_wire = true;
  PostSegment(lane, out);
}

void Peer::PostSegment(Lane* lane, Outgoing* out) {
  const Instant now = std::chrono::steady_clock::now();
  out->lane = lane->id;
  SegmentHeader& h = out->header;
  h.source_check = send_check_;
  h.sequence = ++lane->sent_sequence;
  h.ack = lane->received_sequence;
  h.ack_delay_us = static_cast<uint32_t>(
      std::clamp<int64_t>(absl::ToInt64Microseconds(Between(lane->heard_at, now)), 0, UINT32_MAX));
  h.released = inbox_.released();
  h.payload_bytes = static_cast<uint32_t>(out->payload.size());
  EncodeHeader(h, &out->header_bytes);
  lane->unacked_bytes = 0;
  lane->OnSend(out, now, ReadyLanes());
  out->on_wire = true;
  host_->Track(out, this);
  const absl::Status status = host_->wire().Post(lane->id, out->header_bytes, out->payload,
                                                 PostToken{reinterpret_cast<uint64_t>(out)});
  if (status.ok()) return;
  lane->broken = true;
  const LaneId id = lane->id;
  host_->Untrack(out);
  OnPosted(out, status);
  host_->Defer([this, id, status] {
    if (FindLane(id) == nullptr) return;
    host_->wire().Close(id);
    OnLaneLost(id, status);
  });
}

// Of `out`, which is not tracked any more.
void Peer::OnPosted(Outgoing* out, const absl::Status& status) {
  out->on_wire = false;
  const OutMessagePtr message = out->message;
  if (message != nullptr) {
    --message->unposted;
    unposted_bytes_ -= static_cast<int64_t>(out->payload.size());
    if (!status.ok() && !out->settled && !out->in_doubt && !message->finished) {
      out->in_doubt = true;
      ++message->in_doubt;
    }
  } else if (IsBare(out->header.type)) {
    if (Lane* lane = FindLane(out->lane); lane != nullptr) {
      lane->bare_on_wire = false;
      if (lane->unacked_bytes > 0) host_->AckSoon();
    }
  }
  if (out->settled) delete out;
  if (message != nullptr) MaybeFinish(message);
}

// `out` has left its lane's queue.
void Peer::Settle(Outgoing* out) {
  out->settled = true;
  if (out->in_doubt && out->message != nullptr) {
    out->in_doubt = false;
    --out->message->in_doubt;
    MaybeFinish(out->message);
  }
  if (!out->on_wire) delete out;
}

void Peer::FlushAcks(bool all) {
  if (state_ == State::kLost || is_self_ || leaving_) return;
  for (const auto& lane : lanes_) {
    if (lane->unacked_bytes == 0 || lane->state == Lane::State::kConnecting) continue;
    if (all || lane->unacked_bytes >= kAckNowBytes) PostBare(lane.get(), SegmentType::kAck);
  }
}

}  // namespace geomesh::transport
