#include "transport/scheduler.h"

#include <algorithm>
#include <utility>

namespace geomesh::transport {
namespace {

constexpr uint64_t kMinPeerWindowBytes = 4 * kMaxSegmentPayloadBytes;
constexpr uint64_t kMaxWindowBytes = 64u << 20;
constexpr uint64_t kSmallExtraBytes = 1u << 20;
constexpr double kUnknownBytesPerSecond = 1e8;

}  // namespace

Level Outbox::LevelOf(const OutMessage& message) {
  if (message.bytes.size() <= kPinBytes) return Level::kSmall;
  return message.bytes_left() <= kNearBytes ? Level::kNearlyComplete : Level::kBulk;
}

uint64_t Outbox::NextSize(const OutMessage& message) {
  const uint64_t offset = message.again.empty() ? message.next_offset : message.again.back().offset;
  return std::min<uint64_t>(kMaxSegmentPayloadBytes, message.bytes.size() - offset);
}

bool Outbox::HasCredit(const OutMessage& message) const {
  if (message.solicited || !message.again.empty()) return true;
  // Bulk leaves an eighth to the others.
  const uint64_t bound = message.bytes.size() <= kPinBytes ? bound_bytes_ : bound_bytes_ / 8 * 7;
  return charged_ - released_ + NextSize(message) + kSegmentChargeBytes <= bound;
}

void Outbox::Enqueue(OutMessage* message) {
  ready_[static_cast<int>(LevelOf(*message))].insert(PlaceOf(message));
}

void Outbox::Dequeue(OutMessage* message) {
  for (auto& level : ready_) level.erase(PlaceOf(message));
  BlockedOf(*message).erase(PlaceOf(message));
}

absl::btree_set<Outbox::Place>& Outbox::BlockedOf(const OutMessage& message) {
  return message.bytes.size() <= kPinBytes ? blocked_small_ : blocked_;
}

void Outbox::Unblock(OutMessage* message) {
  if (BlockedOf(*message).erase(PlaceOf(message)) > 0) Enqueue(message);
}

bool Outbox::Add(OutMessagePtr message) {
  const auto [it, inserted] = messages_.try_emplace(message->envelope.key, message);
  if (!inserted) return false;
  message->order = next_order_++;
  Enqueue(message.get());
  return true;
}

int Outbox::NextLevel() {
  for (int level = 0; level < kLevels; ++level) {
    auto& ready = ready_[level];
    while (!ready.empty()) {
      OutMessage* message = ready.begin()->message;
      if (HasCredit(*message)) return level;
      BlockedOf(*message).insert(PlaceOf(message));
      ready.erase(ready.begin());
      unannounced_.push_back(message->envelope.key);
    }
  }
  return kLevels;
}

Outbox::Segment Outbox::Take() {
  const int level = NextLevel();
  OutMessage* message = ready_[level].begin()->message;
  ready_[level].erase(ready_[level].begin());

  Segment segment;
  segment.message = messages_.at(message->envelope.key);
  segment.size = NextSize(*message);
  if (!message->again.empty()) {
    segment.offset = message->again.back().offset;
    segment.solicited = message->again.back().solicited;
    segment.again = true;
    message->again.pop_back();
  } else {
    segment.offset = message->next_offset;
    segment.solicited = message->solicited;
    message->next_offset += segment.size;
    message->first_handed_out = true;
    if (!segment.solicited) charged_ += segment.size + kSegmentChargeBytes;
  }
  if (!message->all_handed_out()) Enqueue(message);
  return segment;
}

void Outbox::PutBack(const OutMessagePtr& message, OutMessage::Piece piece) {
  Dequeue(message.get());
  message->again.push_back(piece);
  Enqueue(message.get());
}

bool Outbox::OnReleased(uint64_t released) {
  if (released > charged_) return false;
  if (released <= released_) return true;  // lanes overtake each other
  released_ = released;
  // As many as the credit is enough for, in their order.
  uint64_t planned = 0;
  for (auto* blocked : {&blocked_small_, &blocked_}) {
    while (!blocked->empty()) {
      OutMessage* message = blocked->begin()->message;
      charged_ += planned;
      const bool fits = HasCredit(*message);
      charged_ -= planned;
      if (!fits) break;
      planned += NextSize(*message) + kSegmentChargeBytes;
      Unblock(message);
    }
  }
  return true;
}

void Outbox::OnWanted(const MessageKey& key) {
  const auto it = messages_.find(key);
  if (it == messages_.end()) return;  // it is on its way, or not sent yet: then it announces itself
  it->second->solicited = true;
  Unblock(it->second.get());
}

std::vector<MessageKey> Outbox::TakeAnnouncements(bool all) {
  std::vector<MessageKey> keys;
  if (all) {
    for (const auto* blocked : {&blocked_small_, &blocked_}) {
      for (const Place& place : *blocked) keys.push_back(place.message->envelope.key);
    }
  } else {
    for (const MessageKey& key : unannounced_) {
      const auto it = messages_.find(key);
      if (it != messages_.end() && BlockedOf(*it->second).contains(PlaceOf(it->second.get()))) {
        keys.push_back(key);
      }
    }
  }
  unannounced_.clear();
  return keys;
}

OutMessagePtr Outbox::Find(const MessageKey& key) const {
  const auto it = messages_.find(key);
  return it == messages_.end() ? nullptr : it->second;
}

void Outbox::Remove(const OutMessagePtr& message) {
  Dequeue(message.get());
  // Its key may have a new owner by now.
  const auto it = messages_.find(message->envelope.key);
  if (it != messages_.end() && it->second == message) messages_.erase(it);
}

std::vector<OutMessagePtr> Outbox::Messages() const {
  std::vector<OutMessagePtr> all;
  all.reserve(messages_.size());
  for (const auto& [key, message] : messages_) all.push_back(message);
  std::sort(all.begin(), all.end(),
            [](const OutMessagePtr& a, const OutMessagePtr& b) { return a->order < b->order; });
  return all;
}

int PickLane(absl::Span<const LaneView> lanes, Level level) {
  int best = -1;
  double best_cost = 0;
  for (size_t i = 0; i < lanes.size(); ++i) {
    const LaneView& lane = lanes[i];
    const uint64_t extra = level == Level::kSmall ? kSmallExtraBytes : 0;
    if (lane.in_flight_bytes >= lane.window_bytes + extra) continue;
    const double rate = lane.bytes_per_s > 0 ? lane.bytes_per_s : kUnknownBytesPerSecond;
    const double cost = static_cast<double>(lane.in_flight_bytes) / rate +
                        (level == Level::kSmall ? lane.rtt_s / 2 : 0);
    if (best < 0 || cost < best_cost) {
      best = static_cast<int>(i);
      best_cost = cost;
    }
  }
  return best;
}

uint64_t WindowBytes(double bytes_per_s, double min_rtt_s, int lanes) {
  const uint64_t least =
      std::max<uint64_t>(kMinPeerWindowBytes / std::max(lanes, 1), kMaxSegmentPayloadBytes);
  const double window = 2 * bytes_per_s * min_rtt_s;
  if (window >= static_cast<double>(kMaxWindowBytes)) return kMaxWindowBytes;
  return std::max(static_cast<uint64_t>(window), least);
}

}  // namespace geomesh::transport
