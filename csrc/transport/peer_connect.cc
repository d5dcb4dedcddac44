// How a peer is reached: dialling, accepting, welcoming, trying again.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "transport/bytes.h"
#include "transport/peer.h"

namespace geomesh::transport {
namespace {

constexpr int kRefusals = 3;
constexpr absl::Duration kMaxRetry = absl::Seconds(1);
constexpr absl::Duration kMaxDialMore = absl::Seconds(30);
constexpr int kMaxDialsWhileSilent = 4;
constexpr size_t kMaxPeerLanes = 64;  // a peer's, whatever it dials

}  // namespace

void Peer::Connect() {
  if (is_self_) {
    state_ = State::kConnected;
    return;
  }
  connect_deadline_ = std::chrono::steady_clock::now() + host_->options().connect_timeout;
  if (record_.wire != host_->wire().name()) {
    Lose(absl::UnavailableError(absl::StrCat(Description(), " uses wire \"", record_.wire,
                                             "\", this process \"", host_->wire().name(),
                                             "\": set the same on all ranks")));
    return;
  }
  if (dials_) return Dial(tuner_.lanes(), /*more=*/false);
  if (auto status = host_->wire().CheckAddress(record_.address, Description()); !status.ok()) {
    Lose(absl::UnavailableError(absl::StrCat("cannot be called by ", status.message())));
  }
}

// A peer's process listened when it was met here. Refused again and again, it has ended: nobody
// need wait until no attempt to connect has succeeded.
void Peer::OnKnock(Knock& knock) {
  if (state_ != State::kConnecting) return;
  refused_ = knock.answer() == Knock::Answer::kNobody ? refused_ + 1 : 0;
  if (refused_ < kRefusals) return;
  Lose(absl::UnavailableError(absl::StrCat("lost ", Description(), ": nobody listens at ",
                                           knock.where(), " any more: its process has ended")));
}

void Peer::Dial(int lanes, bool more) {
  const EngineOptions& options = host_->options();
  Hello hello;
  hello.more = more;
  hello.dialer = host_->self_uid();
  hello.target = record_.uid;
  hello.attempt = ++attempt_;
  hello.unexpected_bytes = static_cast<uint64_t>(options.unexpected_bytes);
  hello.description = host_->SelfDescription();
  const absl::StatusOr<LaneId> first =
      host_->wire().Dial(record_.address, Description(), lanes, AsBytes(hello.Serialize()));
  if (!first.ok() && more) {
    Log(LogLevel::kInfo, "transport",
        absl::StrCat("no further lanes to ", Description(), ": ", first.status().message()));
    return;
  }
  if (!first.ok()) {
    if (first.status().code() == absl::StatusCode::kInvalidArgument) {
      Lose(absl::UnavailableError(
          absl::StrCat("cannot connect to ", Description(), ": ", first.status().message())));
    } else {
      RetryDial(first.status());
    }
    return;
  }
  const Instant now = std::chrono::steady_clock::now();
  for (int i = 0; i < lanes; ++i) {
    auto lane = std::make_unique<Lane>();
    lane->id = static_cast<LaneId>(static_cast<uint32_t>(*first) + i);
    lane->name = attempt_ << 8 | static_cast<uint32_t>(i);
    lane->heard_at = lane->sent_at = now;
    lane->delay_known = !more;
    host_->AddLane(lane->id, this);
    lanes_.push_back(std::move(lane));
  }
}

void Peer::RetryDial(const absl::Status& reason) {
  connect_trouble_ = std::string(reason.message());
  if (!dials_ || retry_pending_) return;
  retry_pending_ = true;
  host_->RunAt(std::chrono::steady_clock::now() + retry_in_, [this] {
    retry_pending_ = false;
    if (state_ == State::kConnecting && lanes_.empty()) Dial(tuner_.lanes(), /*more=*/false);
  });
  retry_in_ = std::min(2 * retry_in_, kMaxRetry);
}

void Peer::DialMore(Instant now) {
  const int missing = tuner_.lanes() - static_cast<int>(lanes_.size());
  if (!dials_ || leaving_ || said_bye_ || state_ != State::kConnected || now < dial_more_at_)
    return;
  if (missing <= 0) {
    dial_more_in_ = absl::Seconds(1);
    // One that was dialled in vain, since the others came back by themselves.
    if (ReadyLanes() > tuner_.lanes() && !suspected_ && !back_at_.has_value()) {
      const auto newest = std::find_if(lanes_.rbegin(), lanes_.rend(),
                                       [](const auto& lane) { return lane->usable(); });
      const LaneId surplus = (*newest)->id;
      CloseLanesThat([surplus](const Lane& lane) { return lane.id == surplus; },
                     "it is one more than needed");
    }
    return;
  }
  dial_more_at_ = now + dial_more_in_;
  dial_more_in_ = std::min(2 * dial_more_in_, kMaxDialMore);
  Dial(missing, /*more=*/true);
}

// TCP tries again less and less often: after a path has come back, an open connection may stay
// silent for as long as the path was gone.
void Peer::DialWhileSilent(Instant now) {
  if (!dials_ || !suspected_ || leaving_ || said_bye_ || now < dial_silent_at_) return;
  if (!host_->wire().DialsApart()) return;
  dial_silent_at_ = now + absl::ToChronoNanoseconds(host_->options().suspect_after);
  const auto under_way = std::count_if(lanes_.begin(), lanes_.end(), [](const auto& lane) {
    return lane->state == Lane::State::kConnecting;
  });
  if (under_way < kMaxDialsWhileSilent) Dial(1, /*more=*/true);
}

void Peer::TuneLanes(Instant now, bool limited) {
  if (host_->options().lanes > 0) return;
  uint64_t delivered = delivered_on_lost_lanes_;
  absl::Duration rtt = absl::ZeroDuration();
  for (const auto& lane : lanes_) {
    delivered += lane->delivered_bytes;
    rtt = std::max(rtt, lane->rtt);
  }
  const int before = tuner_.lanes();
  // Those asked for last may be on their way still.
  if (tuner_.Update(now, delivered, limited && ReadyLanes() >= before, rtt) == before) return;
  if (dials_) {
    dial_more_at_ = now;
    DialMore(now);
  } else {
    SegmentHeader header;
    header.type = SegmentType::kMoreLanes;
    header.key.id = static_cast<uint64_t>(tuner_.lanes());
    QueueControl(header);
  }
}

bool Peer::Accept(LaneId id, int index, const Hello& hello) {
  if (state_ == State::kLost || is_self_ || dials_) return false;
  const Instant now = std::chrono::steady_clock::now();
  if (hello.attempt <= given_up_) return false;
  if (hello.attempt != attempt_) {
    if (hello.attempt < attempt_ || lanes_.size() >= kMaxPeerLanes) return false;
    if (!hello.more) {
      // A newer try of a dialer that gave the last one up. Once it had spoken, it would not try.
      if (state_ == State::kConnected) return false;
      CloseLanes();
      KeepOnlyCloses();
    }
    attempt_ = hello.attempt;
    next_index_ = 0;
  }
  if (index != next_index_) return false;
  ++next_index_;
  outbox_.SetBound(std::max<uint64_t>(hello.unexpected_bytes, kMinUnexpectedBytes));
  auto lane = std::make_unique<Lane>();
  lane->id = id;
  lane->name = attempt_ << 8 | static_cast<uint32_t>(index);
  heard_at_ = lane->heard_at = lane->sent_at = now;
  lane->state = Lane::State::kReady;
  lane->delay_known = !hello.more;
  host_->AddLane(id, this);
  lanes_.push_back(std::move(lane));
  // Not within the wire's callback: it may want to finish setting the lane up first.
  host_->Defer([this, id] {
    if (Lane* lane = FindLane(id); lane != nullptr) Welcome(lane);
  });
  return true;
}

void Peer::Welcome(Lane* lane) {
  Record({.what = RecordedEvent::What::kLaneUp, .lane = lane->name});
  SegmentHeader header;
  header.type = SegmentType::kWelcome;
  header.total_bytes = static_cast<uint64_t>(host_->options().unexpected_bytes);
  PostControl(lane, {header, ""});
  host_->MarkDirty(this);
}

void Peer::BecomeConnected() {
  if (state_ != State::kConnecting) return;
  state_ = State::kConnected;
  Record({.what = RecordedEvent::What::kConnected});
  OpenMemory();
  if (memory_.has_value()) {
    SegmentHeader header;
    header.type = SegmentType::kReads;
    QueueControl(header);
  }
  host_->MarkDirty(this);
  Log(LogLevel::kInfo, "transport", absl::StrCat("connected to ", Description()));
}

Lane* Peer::FindLane(LaneId id) {
  for (const auto& lane : lanes_) {
    if (lane->id == id) return lane.get();
  }
  return nullptr;
}

int Peer::ReadyLanes() const {
  return static_cast<int>(
      std::count_if(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->usable(); }));
}

void Peer::OnLaneUp(LaneId) {}  // usable for us only once the other side welcomed it

}  // namespace geomesh::transport
