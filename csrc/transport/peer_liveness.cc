// How a lane or a peer is lost: goodbyes, silence, broken lanes and what was on them.
#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "transport/peer.h"

namespace geomesh::transport {
namespace {

constexpr absl::Duration kLeftLinger = absl::Seconds(2);

// A lane of several is stalled when nothing on it is acknowledged for so long, nor for the time in
// which it should have delivered what is on it so many times, at the mean of all.
constexpr absl::Duration kStalled = absl::Seconds(2);
constexpr uint64_t kStalledShare = 4;

}  // namespace

void Peer::HandleBye(Lane* lane) {
  said_bye_ = true;
  lane->state = Lane::State::kLeft;
  lane->bare_on_wire = false;
  PostBare(lane, SegmentType::kAck);
  const bool all = std::all_of(lanes_.begin(), lanes_.end(),
                               [](const auto& l) { return l->state == Lane::State::kLeft; });
  if (all) {
    Lose(absl::UnavailableError(absl::StrCat(Description(), " left the job")), /*left=*/true);
  }
}

void Peer::OnLaneLost(LaneId id, const absl::Status& reason) {
  const auto it =
      std::find_if(lanes_.begin(), lanes_.end(), [id](const auto& lane) { return lane->id == id; });
  if (it == lanes_.end()) return;
  const std::unique_ptr<Lane> lane = std::move(*it);
  lanes_.erase(it);
  host_->ForgetLane(id);
  delivered_on_lost_lanes_ += lane->delivered_bytes;
  ++lanes_lost_;
  Record({.what = RecordedEvent::What::kLaneLost, .code = reason.code(), .lane = lane->name});

  if (state_ == State::kLost) {
    for (Outgoing* out : lane->in_flight) Settle(out);
    return;
  }
  for (Outgoing* out : lane->in_flight) {
    // Said at once and perhaps twice: it must not wait for what the peer says of this lane, which
    // may itself be on the lane that this one tells of.
    if (out->header.type == SegmentType::kLaneLost) control_.push_back({out->header, ""});
    if (out->message != nullptr && !out->message->finished && !out->in_doubt) {
      out->in_doubt = true;
      ++out->message->in_doubt;
    }
  }
  in_doubt_[lane->name] = std::move(lane->in_flight);

  if (lanes_.empty()) {
    if (said_bye_) {
      Lose(absl::UnavailableError(absl::StrCat(Description(), " left the job")), /*left=*/true);
    } else if (state_ == State::kConnected) {
      Lose(absl::UnavailableError(absl::StrCat("lost ", Description(), ": ", reason.message())));
    } else {
      // What the wire took was at most a welcome and early messages that nobody will acknowledge.
      ResolveLost(lane->name, 0).IgnoreError();
      KeepOnlyCloses();
      RetryDial(reason);
    }
    return;
  }
  const bool all_left = std::all_of(lanes_.begin(), lanes_.end(),
                                    [](const auto& l) { return l->state == Lane::State::kLeft; });
  if (all_left) {
    Lose(absl::UnavailableError(absl::StrCat(Description(), " left the job")), /*left=*/true);
    return;
  }
  if (lane->state != Lane::State::kLeft) {
    Log(LogLevel::kInfo, "transport",
        absl::StrCat("one of ", lanes_.size() + 1, " lanes to ", Description(), " is lost (",
                     reason.message(), "), going on with the others"));
  }
  SegmentHeader header;
  header.type = SegmentType::kLaneLost;
  header.key.id = lane->name;
  header.offset = lane->received_sequence;
  control_.push_front({header, ""});
  host_->MarkDirty(this);
}

absl::Status Peer::HandleLaneLost(const SegmentHeader& h) {
  if (h.key.id > UINT32_MAX) return absl::InvalidArgumentError("the loss of an impossible lane");
  const auto name = static_cast<uint32_t>(h.key.id);
  const auto it = std::find_if(lanes_.begin(), lanes_.end(),
                               [name](const auto& lane) { return lane->name == name; });
  if (it != lanes_.end()) {
    const LaneId id = (*it)->id;
    host_->wire().Close(id);
    OnLaneLost(id, absl::UnavailableError("the other side lost it"));
    if (state_ == State::kLost) return absl::OkStatus();
  } else if (!dials_ && name >> 8 > attempt_) {
    // It may be on its way here still, but nobody would tell what came of what is put on it.
    given_up_ = std::max(given_up_, name >> 8);
  }
  return ResolveLost(name, h.offset);
}

// The peer received the first `received` segments of the lane. The others are sent again: from the
// caller's memory, or from the copy that was made when the send was done (KeepUnacknowledged).
absl::Status Peer::ResolveLost(uint32_t name, uint64_t received) {
  const auto it = in_doubt_.find(name);
  if (it == in_doubt_.end()) return absl::OkStatus();
  const std::deque<Outgoing*> doubtful = std::move(it->second);
  in_doubt_.erase(it);
  if (!doubtful.empty() && received > doubtful.back()->header.sequence) {
    for (Outgoing* out : doubtful) Settle(out);
    return absl::InvalidArgumentError("the end of a lane beyond what was sent on it");
  }
  std::deque<Control> control_again;
  bool data_gone = false;
  for (Outgoing* out : doubtful) {
    if (out->header.sequence > received) {
      const OutMessagePtr& message = out->message;
      const bool charged = (out->header.flags & kSolicited) == 0;
      const bool kept = message != nullptr && message->finished && message->failure.ok() &&
                        out->owned_payload.size() == out->payload.size();
      if (message == nullptr || kept) {
        switch (out->header.type) {
          case SegmentType::kData:
          case SegmentType::kWanted:
          case SegmentType::kAnnounce:
          case SegmentType::kReject:
          case SegmentType::kClose:
          case SegmentType::kReads:
          case SegmentType::kInPlace:
          case SegmentType::kPulled:
          case SegmentType::kMoreLanes:
            control_again.push_back({out->header, out->owned_payload});
            break;
          default:
            break;
        }
      } else if (!message->finished && message->failure.ok()) {
        outbox_.PutBack(message, {out->header.offset, !charged});
      } else if (message->failure.ok()) {
        data_gone = true;
      } else if (charged) {
        outbox_.Uncharge(out->payload.size());  // it will never come, nor be released
      }
    }
    Settle(out);
  }
  control_.insert(control_.begin(), control_again.begin(), control_again.end());
  SendDueCloses();
  host_->MarkDirty(this);
  if (data_gone) {
    Lose(absl::UnavailableError(
        absl::StrCat("lost ", Description(),
                     ": a lane broke with messages on it whose sends were already done")));
  }
  return absl::OkStatus();
}

void Peer::Lose(const absl::Status& why, bool left) {
  if (state_ == State::kLost) return;
  state_ = State::kLost;
  Record({.what = RecordedEvent::What::kLost, .code = why.code()});
  const std::string record = left || leaving_ ? "" : host_->WriteRecord();
  const absl::Status reason =
      record.empty()
          ? why
          : absl::Status(why.code(), absl::StrCat(why.message(), " (last events: ", record, ")"));
  lost_reason_ = reason;
  Log(left || leaving_ ? LogLevel::kInfo : LogLevel::kError, "transport", reason.message());
  inbox_.OnPeerLost(reason);
  control_.clear();
  closing_.clear();
  wanted_.clear();
  pulled_.clear();
  // Who left in order has acknowledged what came; only the wire's word that it needs the memory no
  // longer may be missing still.
  absl::flat_hash_set<OutMessage*> unacknowledged;
  for (const auto& lane : lanes_) {
    for (const Outgoing* out : lane->in_flight) unacknowledged.insert(out->message.get());
  }
  for (const OutMessagePtr& message : outbox_.Messages()) {
    if (left && message->all_handed_out() && message->in_doubt == 0 &&
        !unacknowledged.contains(message.get())) {
      continue;
    }
    FailMessage(message, reason);
  }
  EndAllLent(reason);
  // Who left is still told what of its last words came, and should close the lanes itself.
  if (left) {
    host_->RunAt(std::chrono::steady_clock::now() + kLeftLinger, [this] { CloseLanes(); });
  } else {
    CloseLanes();
  }
  auto in_doubt = std::exchange(in_doubt_, {});
  for (auto& [name, doubtful] : in_doubt) {
    for (Outgoing* out : doubtful) Settle(out);
  }
  host_->OnPeerLost(this, reason);
}

void Peer::CloseLanes() {
  std::vector<std::unique_ptr<Lane>> lanes = std::exchange(lanes_, {});
  for (const auto& lane : lanes) {
    host_->ForgetLane(lane->id);
    host_->wire().Close(lane->id);
  }
  for (const auto& lane : lanes) {
    for (Outgoing* out : lane->in_flight) Settle(out);
  }
}

// Asked while it is waited for, a peer that lives is heard within the round trip; asked before it
// is suspected, since one that has nothing to say sends a heartbeat now and then only.
void Peer::AskIfSilent(Instant now, absl::Duration silent) {
  const EngineOptions& options = host_->options();
  const bool waited_for =
      inbox_.awaits() || !lent_.empty() ||
      std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) {
        return std::any_of(lane->in_flight.begin(), lane->in_flight.end(),
                           [](const Outgoing* out) { return out->message != nullptr; });
      });
  const absl::Duration quiet = waited_for ? options.suspect_after / 4 : options.heartbeat * 1.5;
  if (silent >= quiet) {
    // Each time on the lane on which least was said lately: one of several may be broken.
    Lane* lane = nullptr;
    for (const auto& other : lanes_) {
      if (other->state != Lane::State::kReady || other->broken || other->bare_on_wire) continue;
      if (lane == nullptr || other->sent_at < lane->sent_at) lane = other.get();
    }
    if (lane != nullptr) PostBare(lane, SegmentType::kHeartbeat, kAnswer);
    if (!asked_at_.has_value()) asked_at_ = now;
  }
  // A tick before it is due, so that it is said in time.
  const bool suspect = silent >= options.suspect_after * 0.875 && asked_at_.has_value() &&
                       Between(*asked_at_, now) >= options.suspect_after / 2;
  if (suspect != suspected_) {
    back_at_ = suspect ? std::nullopt : std::make_optional(heard_at_);
    for (const auto& lane : lanes_) lane->stalled = false;
    Record({.what = suspect ? RecordedEvent::What::kSuspected : RecordedEvent::What::kHeardAgain});
  }
  if (suspect && !suspected_) {
    Log(LogLevel::kWarning, "transport",
        absl::StrCat(Description(), " has been silent for ",
                     absl::FormatDuration(absl::Trunc(silent, absl::Milliseconds(100))),
                     "; it will be given up after ", absl::FormatDuration(options.dead_after)));
  } else if (!suspect && suspected_) {
    Log(LogLevel::kWarning, "transport", absl::StrCat(Description(), " is heard again"));
  }
  suspected_ = suspect;
}

void Peer::CloseStalled(Instant now) {
  uint64_t delivered = delivered_on_lost_lanes_;
  for (const auto& lane : lanes_) delivered += lane->delivered_bytes;
  std::vector<LaneId> stalled;
  for (const auto& lane : lanes_) {
    // What needs no acknowledgement of its own may go without one for as long as nothing else comes
    // on its lane.
    const bool awaits = std::any_of(lane->in_flight.begin(), lane->in_flight.end(),
                                    [](const Outgoing* out) { return !IsBare(out->header.type); });
    if (!lane->usable() || !awaits) {
      lane->awaits_since.reset();
    } else if (!lane->awaits_since.has_value() || lane->acked_at > *lane->awaits_since) {
      lane->awaits_since = now;
      lane->peer_delivered_before = delivered;
    } else if (Between(*lane->awaits_since, now) >= std::max(kStalled, 8 * lane->rtt) &&
               delivered - lane->peer_delivered_before >=
                   kStalledShare * ReadyLanes() * lane->in_flight_bytes) {
      stalled.push_back(lane->id);
    }
  }
  CloseLanesThat(
      [&stalled](const Lane& lane) {
        return std::find(stalled.begin(), stalled.end(), lane.id) != stalled.end();
      },
      "nothing gets through on it");
}

// A path was gone and has come back. TCP tries again the later the longer that took, on each
// connection at a time of its own; what is on them has another way by now.
void Peer::CloseLeftSilent(Instant now) {
  if (!back_at_.has_value()) return;
  const auto silent = [this](const Lane& lane) {
    return lane.state == Lane::State::kReady && lane.heard_at < *back_at_;
  };
  bool all_answer = true, any_answers = false;
  for (const auto& lane : lanes_) {
    if (!silent(*lane)) {
      lane->stalled = false;
      any_answers |= lane->usable();
      continue;
    }
    all_answer = false;
    lane->stalled = true;
    // Once: sent behind what is on the lane.
    if (lane->sent_at < *back_at_ && !lane->broken && !lane->bare_on_wire) {
      PostBare(lane.get(), SegmentType::kHeartbeat, kAnswer);
    }
  }
  if (all_answer) {
    back_at_.reset();
  } else if (dials_ && any_answers && host_->wire().DialsApart() &&
             Between(*back_at_, now) >= host_->options().suspect_after / 2) {
    // Only one side does: both at once could close all lanes.
    CloseLanesThat(silent, "it stays silent where others are heard again");
  }
}

void Peer::CloseLanesThat(absl::FunctionRef<bool(const Lane&)> which, absl::string_view why) {
  std::vector<LaneId> ids;
  for (const auto& lane : lanes_) {
    if (which(*lane)) ids.push_back(lane->id);
  }
  for (const LaneId id : ids) {
    host_->wire().Close(id);
    OnLaneLost(id, absl::UnavailableError(why));
    if (state_ == State::kLost) return;
  }
}

void Peer::Tick(Instant now, absl::Duration late, bool announce) {
  if (is_self_ || state_ == State::kLost || leaving_) return;
  const EngineOptions& options = host_->options();
  if (state_ == State::kConnecting) {
    connect_deadline_ += absl::ToChronoNanoseconds(late);
    if (now < connect_deadline_) return;
    Lose(absl::UnavailableError(
        absl::StrCat("no connection with ", Description(), " within ",
                     absl::FormatDuration(options.connect_timeout),
                     dials_ ? "" : " (it was to connect to this process)",
                     connect_trouble_.empty() ? "" : absl::StrCat(": ", connect_trouble_))));
    return;
  }
  // Time in which this process stood still is nobody's silence; something may have come since.
  const auto excuse = [&](Instant& heard) {
    heard = std::min(heard + absl::ToChronoNanoseconds(late), now);
  };
  excuse(heard_at_);
  for (const auto& lane : lanes_) excuse(lane->heard_at);
  const absl::Duration silent = Between(heard_at_, now);
  if (silent >= options.dead_after) {
    Lose(absl::UnavailableError(
        absl::StrCat("lost ", Description(), ": silent for ",
                     absl::FormatDuration(absl::Trunc(silent, absl::Milliseconds(100))))));
    return;
  }
  AskIfSilent(now, silent);
  if (!delay_probe_.has_value() && outbox_.has_ready() && DelayLooksInflated()) {
    delay_probe_ = DelayProbe{now};
  }
  if (delay_probe_.has_value()) host_->MarkDirty(this);
  CloseStalled(now);
  if (state_ == State::kLost) return;
  CloseLanesThat(
      [&](const Lane& lane) {
        if (lane.state == Lane::State::kLeft) return false;
        const bool is_ready = lane.state == Lane::State::kReady;
        return Between(lane.heard_at, now) >=
               (is_ready ? options.dead_after : options.connect_timeout);
      },
      "silent for too long");
  if (state_ == State::kLost) return;
  DialMore(now);
  DialWhileSilent(now);
  CloseLeftSilent(now);
  if (state_ == State::kLost) return;
  std::vector<Lane*> ready;
  for (const auto& lane : lanes_) {
    if (lane->state == Lane::State::kReady) ready.push_back(lane.get());
  }
  // One heartbeat a peer, on its lanes in turn: one on each would cost several times the bytes. But
  // a lane that is silent for long would be taken for broken.
  std::sort(ready.begin(), ready.end(),
            [](const Lane* a, const Lane* b) { return a->sent_at < b->sent_at; });
  const bool due =
      !ready.empty() && Between(ready.back()->sent_at, now) >= options.heartbeat * 0.75;
  for (size_t i = 0; i < ready.size(); ++i) {
    if ((i == 0 && due) || Between(ready[i]->sent_at, now) >= options.dead_after / 4) {
      PostBare(ready[i], SegmentType::kHeartbeat);
    }
  }
  if (announce) inbox_.AgeAnnouncements();
  if (announce && outbox_.waits_for_credit()) {
    const std::vector<MessageKey> keys = outbox_.TakeAnnouncements(true);
    for (size_t at = 0; at < keys.size(); at += kMaxKeysPerSegment) {
      SegmentHeader header;
      header.type = SegmentType::kAnnounce;
      QueueControl(header, EncodeKeys(absl::MakeConstSpan(keys).subspan(at, kMaxKeysPerSegment)));
    }
  }
}

}  // namespace geomesh::transport
