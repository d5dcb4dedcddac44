#include "transport/peer.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "transport/bytes.h"

namespace geomesh::transport {
namespace {

// From here on, reading a message in place is cheaper than what telling of it costs.
constexpr size_t kInPlaceBytes = 64 * 1024;
constexpr size_t kMaxLent = 1024;

constexpr int kRemoteLanes = 2, kMostLanes = 16;

// Inside a host, throughput is the processors' and not the lanes'.
LaneTuner TunerFor(const EngineOptions& options, const PeerRecord& record) {
  if (options.lanes > 0) return LaneTuner(options.lanes, options.lanes);
  const bool near = record.host == options.host && record.region == options.region;
  return near ? LaneTuner(1, 1) : LaneTuner(kRemoteLanes, kMostLanes);
}

bool Less(const ProcessUid& a, const ProcessUid& b) {
  return a.high != b.high ? a.high < b.high : a.low < b.low;
}

std::string Join(absl::string_view who, absl::string_view what) {
  return absl::StrCat(who, " ", what);
}

absl::Status StatusFromWire(uint32_t code, std::string text) {
  const bool known = code >= 1 && code <= 16;
  return absl::Status(known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
                      std::move(text));
}

}  // namespace

Peer::Peer(PeerHost* host, PeerId id, PeerRecord record)
    : host_(host),
      id_(id),
      record_(std::move(record)),
      is_self_(record_.uid == host->self_uid()),
      dials_(Less(host->self_uid(), record_.uid)),
      send_check_(SourceCheck(host->self_uid(), record_.uid)),
      receive_check_(SourceCheck(record_.uid, host->self_uid())),
      tuner_(TunerFor(host->options(), record_)),
      inbox_(this, static_cast<uint64_t>(host->options().unexpected_bytes)),
      outbox_(host->options().policy),
      picker_(host->options().balancer, host->options().pin_bytes) {}

Peer::~Peer() = default;

std::string Peer::Description() const {
  std::string text = record_.rank >= 0 ? absl::StrCat("rank ", record_.rank) : "a process";
  if (!record_.host.empty()) absl::StrAppend(&text, " on host ", record_.host);
  if (!record_.region.empty()) absl::StrAppend(&text, " (", record_.region, ")");
  return text;
}

void Peer::Record(RecordedEvent event) {
  event.when = std::chrono::steady_clock::now();
  event.peer = id_;
  host_->Record(event);
}

// ---- what the engine's users call ----

void Peer::Send(const Envelope& envelope, absl::Span<const std::byte> bytes, Engine::SendDone done,
                const SendOptions& options) {
  auto message = std::make_shared<OutMessage>();
  message->envelope = envelope;
  message->bytes = bytes;
  message->done = std::move(done);
  message->urgency = options.urgency;
  Record({.what = RecordedEvent::What::kSend, .key = envelope.key, .bytes = bytes.size()});
  if (state_ == State::kLost) {
    FailMessage(message, lost_reason_);
    return;
  }
  if (const absl::Status left = Left(envelope.key.channel); !left.ok()) {
    FailMessage(message, left);
    return;
  }
  if (is_self_) {
    if (!FeedSelf(message)) self_waiting_.push_back(std::move(message));
    return;
  }
  const MessageKey& key = envelope.key;
  const bool lends =
      options.in_place && peer_reads_ && bytes.size() >= kInPlaceBytes && lent_.size() < kMaxLent;
  if (lent_.contains(key) || (lends ? outbox_.Find(key) != nullptr
                                    : !outbox_.Add(message, std::chrono::steady_clock::now()))) {
    message->failure = absl::InvalidArgumentError(
        absl::StrFormat("message %d of channel %016x is already on its way to %s", envelope.key.id,
                        envelope.key.channel, Description()));
    Defer([message] { std::move(message->done)(message->failure); });
    return;
  }
  if (lends) return Lend(std::move(message));
  host_->MarkDirty(this);
}

void Peer::Recv(const Envelope& envelope, absl::Span<std::byte> buffer, Engine::RecvDone done,
                const RecvOptions& options) {
  Record({.what = RecordedEvent::What::kRecv, .key = envelope.key, .bytes = buffer.size()});
  inbox_.Recv(envelope, buffer, std::move(done), options.standing);
  const auto it = std::find_if(self_waiting_.begin(), self_waiting_.end(),
                               [&](const auto& m) { return m->envelope.key == envelope.key; });
  if (it != self_waiting_.end()) {
    const OutMessagePtr message = *it;
    self_waiting_.erase(it);
    FeedSelf(message);
  }
}

// A message to this process itself: through the same inbox, without a wire.
bool Peer::FeedSelf(const OutMessagePtr& message) {
  const uint64_t size = message->bytes.size();
  const uint64_t segments = SegmentCount(size);
  const MessageKey& key = message->envelope.key;
  if (!inbox_.Expects(key) &&
      inbox_.stored_bytes() + size + segments * kSegmentChargeBytes > inbox_.bound_bytes()) {
    return false;
  }
  self_reject_ = absl::OkStatus();
  absl::Status status;
  for (uint64_t i = 0; i < segments && status.ok(); ++i) {
    SegmentHeader header;
    header.type = SegmentType::kData;
    header.key = key;
    header.fingerprint = message->envelope.fingerprint;
    header.total_bytes = size;
    header.offset = i * kMaxSegmentPayloadBytes;
    header.flags = kSolicited;
    status = inbox_.OnData(header, message->bytes.subspan(header.offset, kMaxSegmentPayloadBytes));
  }
  status.Update(self_reject_);
  ++segments_sent_;
  ++segments_received_;
  bytes_sent_ += size;
  bytes_received_ += size;
  message->failure = status;
  Defer([message] { std::move(message->done)(message->failure); });
  return true;
}

void Peer::CloseChannel(uint64_t channel, const absl::Status& reason) {
  inbox_.CloseChannel(channel, reason);
  for (const OutMessagePtr& message : outbox_.Messages()) {
    if (message->envelope.key.channel == channel) FailMessage(message, reason);
  }
  EndAllLent(reason, channel);
  std::vector<OutMessagePtr> waiting = std::exchange(self_waiting_, {});
  for (OutMessagePtr& message : waiting) {
    if (message->envelope.key.channel == channel) {
      FailMessage(message, reason);
    } else {
      self_waiting_.push_back(std::move(message));
    }
  }
}

void Peer::TellClosed(uint64_t channel, const absl::Status& reason) {
  if (is_self_ || state_ == State::kLost) return;
  FlushKeyLists();  // what was read in place is known before
  if (reason.ok()) {
    Closing closing{channel, {}};
    for (const auto& lane : lanes_) closing.after[lane->name] = lane->sent_sequence;
    closing_.push_back(std::move(closing));
    SendDueCloses();
    return;
  }
  SegmentHeader header;
  header.type = SegmentType::kClose;
  header.key.channel = channel;
  header.fingerprint = static_cast<uint32_t>(reason.code());
  QueueControl(header, std::string(reason.message().substr(0, kMaxTextBytes)));
}

void Peer::SendDueCloses() {
  while (!closing_.empty() && in_doubt_.empty()) {
    const Closing& first = closing_.front();
    for (const auto& lane : lanes_) {
      const auto after = first.after.find(lane->name);
      if (after == first.after.end()) continue;  // opened since
      // Acknowledgements of acknowledgements are not waited for.
      for (const Outgoing* out : lane->in_flight) {
        if (out->header.sequence > after->second) break;
        if (!IsBare(out->header.type)) return;
      }
    }
    SegmentHeader header;
    header.type = SegmentType::kClose;
    header.key.channel = first.channel;
    closing_.pop_front();
    QueueControl(header);
  }
}

// Whatever it sent in the channel has come: it waits for that before it leaves. What it took of
// ours was handed out, so the rest is not wanted.
void Peer::OnLeft(uint64_t channel) {
  if (host_->ChannelClosed(channel)) return;
  const absl::Status reason =
      absl::UnavailableError(absl::StrCat(Description(), " has left the group"));
  inbox_.OnPeerLeft(channel, reason);
  for (const OutMessagePtr& message : outbox_.Messages()) {
    if (message->envelope.key.channel == channel && !message->all_handed_out()) {
      FailMessage(message, reason);
    }
  }
  EndAllLent(reason, channel);
  host_->OnPeerLeftChannel(this, channel, reason);
}

void Peer::FailMessage(const OutMessagePtr& message, const absl::Status& reason) {
  if (message->failure.ok()) message->failure = reason;
  if (!is_self_) outbox_.Remove(message);
  MaybeFinish(message);
}

void Peer::MaybeFinish(const OutMessagePtr& message) {
  if (message->finished || message->unposted > 0) return;
  if (message->failure.ok() && (!message->all_handed_out() || message->in_doubt > 0)) return;
  message->finished = true;
  if (message->failure.ok()) KeepUnacknowledged(message.get());
  Record({.what = RecordedEvent::What::kSent,
          .code = message->failure.ok() ? message->reject.code() : message->failure.code(),
          .key = message->envelope.key,
          .bytes = message->bytes.size()});
  if (!is_self_) outbox_.Remove(message);
  Defer([message] {
    std::move(message->done)(message->failure.ok() ? message->reject : message->failure);
  });
}

void Peer::KeepUnacknowledged(const OutMessage* message) {
  if (lanes_.size() < 2 && !host_->wire().DialsApart()) return;  // never replaced
  const uint64_t segments = SegmentCount(message->bytes.size());
  for (const auto& lane : lanes_) {
    // A short message is on one lane, and was posted lately.
    if (segments == 1 && lane->name != message->lane) continue;
    uint64_t found = 0;
    for (auto it = lane->in_flight.rbegin(); it != lane->in_flight.rend() && found < segments;
         ++it) {
      Outgoing* out = *it;
      if (out->message.get() != message) continue;
      ++found;
      out->owned_payload = std::string(AsText(out->payload));
      out->payload = AsBytes(out->owned_payload);
    }
  }
}

// ---- Inbox::Host ----

void Peer::Received(const MessageKey& key, const absl::StatusOr<size_t>& bytes) {
  Record({.what = RecordedEvent::What::kReceived,
          .code = bytes.status().code(),
          .key = key,
          .bytes = bytes.value_or(0)});
}

void Peer::Want(const MessageKey& key) {
  if (is_self_) return;
  wanted_.push_back(key);
  host_->MarkDirty(this);
}

void Peer::Reject(const MessageKey& key, const absl::Status& status) {
  Log(LogLevel::kWarning, "transport", status.message());
  if (is_self_) {
    self_reject_ = status;
    return;
  }
  SegmentHeader header;
  header.type = SegmentType::kReject;
  header.key = key;
  header.fingerprint = static_cast<uint32_t>(status.code());
  QueueControl(header, std::string(status.message().substr(0, kMaxTextBytes)));
}

// ---- messages that stay where they are ----

void Peer::OpenMemory() {
  if (is_self_ || record_.memory.empty() || record_.region != host_->options().region) return;
  const ProcessUid& uid = record_.uid;
  absl::StatusOr<LocalMemory> memory =
      LocalMemory::Open(record_.memory, {reinterpret_cast<const std::byte*>(&uid), sizeof(uid)});
  if (memory.ok()) {
    memory_ = *std::move(memory);
  } else {
    Log(LogLevel::kDebug, "transport",
        absl::StrCat(Description(), ": messages are not read in place, since ",
                     memory.status().message()));
  }
}

void Peer::Lend(OutMessagePtr message) {
  const MessageKey key = message->envelope.key;
  const InPlace place = leases_.Lend(message->bytes);
  SegmentHeader header;
  header.type = SegmentType::kInPlace;
  header.key = key;
  header.fingerprint = message->envelope.fingerprint;
  header.total_bytes = message->bytes.size();
  lent_.emplace(key, Lent{std::move(message), place});
  QueueControl(header, place.Serialize());
}

void Peer::EndLent(const MessageKey& key, const absl::Status& status) {
  auto node = lent_.extract(key);
  if (node.empty()) return;
  const Lent& lent = node.mapped();
  leases_.TakeBack(lent.place);
  if (status.ok()) bytes_sent_ += lent.message->bytes.size();
  lent.message->finished = true;
  Record({.what = RecordedEvent::What::kSent,
          .code = status.code(),
          .key = key,
          .bytes = lent.message->bytes.size()});
  Defer([message = lent.message, status] { std::move(message->done)(status); });
}

void Peer::EndAllLent(const absl::Status& reason, std::optional<uint64_t> channel) {
  std::vector<MessageKey> keys;
  for (const auto& [key, lent] : lent_) {
    if (!channel.has_value() || key.channel == *channel) keys.push_back(key);
  }
  for (const MessageKey& key : keys) EndLent(key, reason);
}

absl::Status Peer::ReadInPlace(const InPlace& place, uint64_t offset, absl::Span<std::byte> into) {
  bytes_received_ += into.size();
  return memory_->Read(place, offset, into);
}

void Peer::Pulled(const MessageKey& key) {
  pulled_.push_back(key);
  host_->MarkDirty(this);
}

// ---- receiving ----

void Peer::OnSegment(LaneId id, absl::Span<const std::byte> header_bytes,
                     absl::Span<const std::byte> payload) {
  Lane* lane = FindLane(id);
  if (lane == nullptr || state_ == State::kLost) return;
  absl::StatusOr<SegmentHeader> header = ParseHeader(header_bytes, payload.size());
  const absl::Status status = header.ok() ? HandleSegment(lane, *header, payload) : header.status();
  if (!status.ok() && state_ != State::kLost) {
    Lose(absl::UnavailableError(
        absl::StrCat("lost ", Description(), ", which broke the protocol: ", status.message())));
  }
}

absl::Status Peer::HandleSegment(Lane* lane, const SegmentHeader& h,
                                 absl::Span<const std::byte> payload) {
  if (h.source_check != receive_check_) {
    return absl::InvalidArgumentError("a segment of another process or another job");
  }
  if (h.sequence != lane->received_sequence + 1) {
    return absl::InvalidArgumentError(absl::StrCat("segment ", h.sequence, " follows segment ",
                                                   lane->received_sequence, " of a lane"));
  }
  if (lane->state == Lane::State::kLeft && h.type != SegmentType::kAck) {
    return absl::InvalidArgumentError("a segment after bye");
  }
  if (lane->state == Lane::State::kConnecting && h.type != SegmentType::kWelcome &&
      h.type != SegmentType::kRefused) {
    return absl::InvalidArgumentError("a lane that does not begin with a welcome");
  }
  ++lane->received_sequence;
  heard_at_ = lane->heard_at = std::chrono::steady_clock::now();
  asked_at_.reset();
  if (lane->state == Lane::State::kReady) BecomeConnected();
  GM_RETURN_IF_ERROR(HandleAck(lane, h));
  if (!IsBare(h.type)) {
    if (lane->unacked_bytes == 0) host_->AckSoon();
    lane->unacked_bytes += kSegmentHeaderBytes + payload.size();
    host_->MarkDirty(this);
  }
  if (leaving_ && h.type != SegmentType::kBye) return absl::OkStatus();
  switch (h.type) {
    case SegmentType::kData:
      ++segments_received_;
      bytes_received_ += payload.size();
      return inbox_.OnData(h, payload);
    case SegmentType::kReads:
      peer_reads_ = true;
      return absl::OkStatus();
    case SegmentType::kInPlace:
      if (!memory_.has_value()) {
        return absl::InvalidArgumentError("a message in place that this process can't read");
      }
      return inbox_.OnInPlace(h, InPlace::Parse(payload));
    case SegmentType::kMoreLanes:
      if (dials_) {
        tuner_.AtLeast(static_cast<int>(std::min<uint64_t>(h.key.id, kMostLanes)));
        const Instant now = std::chrono::steady_clock::now();
        dial_more_at_ = now;
        DialMore(now);
      }
      return absl::OkStatus();
    case SegmentType::kPulled:
      for (const MessageKey& key : DecodeKeys(payload)) EndLent(key, absl::OkStatus());
      return absl::OkStatus();
    case SegmentType::kAck:
      return absl::OkStatus();
    case SegmentType::kHeartbeat:
      if ((h.flags & kAnswer) != 0) PostBare(lane, SegmentType::kAck);
      return absl::OkStatus();
    case SegmentType::kWanted:
      for (const MessageKey& key : DecodeKeys(payload)) outbox_.OnWanted(key);
      host_->MarkDirty(this);
      return absl::OkStatus();
    case SegmentType::kAnnounce:
      inbox_.OnAnnounce(DecodeKeys(payload));
      return absl::OkStatus();
    case SegmentType::kReject:
      HandleReject(h, payload);
      return absl::OkStatus();
    case SegmentType::kClose:
      if (h.fingerprint == 0) {
        OnLeft(h.key.channel);
        return absl::OkStatus();
      }
      Record({.what = RecordedEvent::What::kClosed,
              .code = static_cast<absl::StatusCode>(std::min<uint32_t>(h.fingerprint, 16)),
              .key = h.key});
      host_->OnPeerClosedChannel(
          this, h.key.channel,
          StatusFromWire(h.fingerprint, Join(Description(), absl::StrCat("closed the channel: ",
                                                                         AsText(payload)))));
      return absl::OkStatus();
    case SegmentType::kBye:
      HandleBye(lane);
      return absl::OkStatus();
    case SegmentType::kLaneLost:
      return HandleLaneLost(h);
    case SegmentType::kWelcome:
      if (lane->state != Lane::State::kConnecting) {
        return absl::InvalidArgumentError("a welcome in the middle of a lane");
      }
      lane->state = Lane::State::kReady;
      Record({.what = RecordedEvent::What::kLaneUp, .lane = lane->name});
      outbox_.SetBound(std::max<uint64_t>(h.total_bytes, kMinUnexpectedBytes));
      BecomeConnected();
      // Tells the other side that the lane works, and finds its delay: data would take it several
      // round trips while TCP starts slowly.
      PostBare(lane, SegmentType::kHeartbeat, kAnswer);
      if (suspected_) back_at_ = lane->heard_at;
      return absl::OkStatus();
    case SegmentType::kRefused:
      Lose(absl::UnavailableError(
          absl::StrCat("cannot connect to ", Description(), ": it refused, ", AsText(payload))));
      return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::Status Peer::HandleAck(Lane* lane, const SegmentHeader& h) {
  if (h.ack > lane->sent_sequence) {
    return absl::InvalidArgumentError(absl::StrCat(
        "an acknowledgement of segment ", h.ack, ", the last one sent was ", lane->sent_sequence));
  }
  if (!outbox_.OnReleased(h.released)) {
    return absl::InvalidArgumentError("credit for more bytes than were sent");
  }
  if (outbox_.size() > 0 || !control_.empty()) host_->MarkDirty(this);
  Outgoing* newest = nullptr;
  std::vector<Outgoing*> acked;
  while (!lane->in_flight.empty() && lane->in_flight.front()->header.sequence <= h.ack) {
    newest = lane->in_flight.front();
    lane->in_flight.pop_front();
    lane->in_flight_bytes -= newest->bytes();
    lane->delivered_bytes += newest->bytes();
    acked.push_back(newest);
  }
  if (newest == nullptr) return absl::OkStatus();
  lane->OnAck(*newest, absl::Microseconds(h.ack_delay_us), std::chrono::steady_clock::now());
  for (Outgoing* out : acked) Settle(out);
  SendDueCloses();
  return absl::OkStatus();
}

void Peer::HandleReject(const SegmentHeader& h, absl::Span<const std::byte> payload) {
  const absl::Status why = StatusFromWire(
      h.fingerprint, Join(Description(), absl::StrCat("could not receive: ", AsText(payload))));
  EndLent(h.key, why);
  const OutMessagePtr message = outbox_.Find(h.key);
  if (message == nullptr) return;  // done already: the channel's owner learns it from the receiver
  // The rest is still sent, and thrown away there, so that both sides agree where it ends.
  message->reject = why;
}

// ---- the end ----

void Peer::Leave(const absl::Status& reason) {
  inbox_.CancelAll(reason);
  for (const OutMessagePtr& message : outbox_.Messages()) FailMessage(message, reason);
  EndAllLent(reason);
  for (const OutMessagePtr& message : std::exchange(self_waiting_, {})) {
    FailMessage(message, reason);
  }
  if (is_self_ || state_ == State::kLost) return;
  Pump();  // control that still waits: closed channels
  for (const auto& lane : lanes_) {
    if (lane->state != Lane::State::kReady || lane->broken) continue;
    SegmentHeader header;
    header.type = SegmentType::kBye;
    PostControl(lane.get(), {header, ""});
  }
  leaving_ = true;
}

bool Peer::delivered() const {
  return std::all_of(lanes_.begin(), lanes_.end(), [this](const auto& lane) {
    return state_ == State::kLost || lane->state == Lane::State::kConnecting || lane->broken ||
           lane->in_flight.empty();
  });
}

int64_t Peer::unsent_bytes() const {
  int64_t bytes = unposted_bytes_;
  for (const OutMessagePtr& message : outbox_.Messages()) {
    bytes += static_cast<int64_t>(message->bytes_left());
  }
  for (const OutMessagePtr& message : self_waiting_) {
    bytes += static_cast<int64_t>(message->bytes.size());
  }
  return bytes;
}

Peer::Undelivered Peer::undelivered() const {
  Undelivered sum;
  if (state_ == State::kLost) return sum;
  absl::flat_hash_set<const OutMessage*> seen;
  for (const OutMessagePtr& message : outbox_.Messages()) {
    sum.bytes += static_cast<int64_t>(message->bytes_left());
    seen.insert(message.get());
  }
  const auto add = [&](const std::deque<Outgoing*>& queue) {
    for (const Outgoing* out : queue) {
      if (out->message == nullptr && out->header.type != SegmentType::kData) continue;
      sum.bytes += static_cast<int64_t>(out->payload.size());
      if (out->message != nullptr) seen.insert(out->message.get());
    }
  };
  for (const auto& lane : lanes_) add(lane->in_flight);
  for (const auto& [name, queue] : in_doubt_) add(queue);
  for (const OutMessagePtr& message : self_waiting_) {
    sum.bytes += static_cast<int64_t>(message->bytes.size());
    seen.insert(message.get());
  }
  for (const auto& [key, lent] : lent_) {
    sum.bytes += static_cast<int64_t>(lent.message->bytes.size());
    seen.insert(lent.message.get());
  }
  sum.messages = static_cast<int64_t>(seen.size());
  sum.messages += static_cast<int64_t>(closing_.size());
  // The word that a channel is closed counts too: who fails and leaves before it is connected must
  // still be heard.
  for (const Control& control : control_) {
    if (control.header.type == SegmentType::kClose) ++sum.messages;
    if (control.header.type == SegmentType::kData) ++sum.messages;  // of a lost lane
  }
  return sum;
}

PeerStats Peer::Stats(Instant now) const {
  PeerStats stats;
  stats.description = Description();
  stats.lanes = ReadyLanes();
  stats.bytes_sent = bytes_sent_;
  stats.bytes_received = bytes_received_;
  stats.segments_sent = segments_sent_;
  stats.segments_received = segments_received_;
  stats.unexpected_bytes = inbox_.stored_bytes();
  absl::Duration rtt = absl::InfiniteDuration();
  for (const auto& lane : lanes_) {
    stats.delivery_bytes_per_s += lane->bytes_per_s;
    if (lane->rtt > absl::ZeroDuration()) rtt = std::min(rtt, lane->rtt);
    LaneStats& one = stats.lane_stats.emplace_back();
    const LaneView view = lane->View(ReadyLanes());
    one.name = lane->name;
    one.bytes_sent = lane->sent_bytes;
    one.segments_sent = lane->sent_sequence;
    one.in_flight_bytes = view.in_flight_bytes;
    one.window_bytes = view.window_bytes;
    one.delivery_bytes_per_s = lane->bytes_per_s;
    one.rtt = lane->rtt;
    if (lane->min_rtt != absl::InfiniteDuration()) one.min_rtt = lane->min_rtt;
  }
  stats.lanes_lost = lanes_lost_;
  stats.queue_wait = queue_wait_;
  if (rtt != absl::InfiniteDuration()) stats.rtt = rtt;
  if (state_ == State::kConnecting) {
    stats.trouble =
        absl::StrCat("not connected yet", connect_trouble_.empty() ? "" : ": ", connect_trouble_);
  } else if (state_ == State::kLost) {
    stats.trouble = "lost";
  } else if (!lanes_.empty()) {
    stats.silent = Between(heard_at_, now);
  }
  return stats;
}

}  // namespace geomesh::transport
