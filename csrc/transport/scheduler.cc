#include "transport/scheduler.h"

#include <algorithm>
#include <utility>

namespace geomesh::transport {
namespace {

// So many messages whose lanes are full are passed over at most: a bound on the work of one Take.
constexpr int kMaxPassed = 64;

}  // namespace

Level Outbox::LevelOf(const OutMessage& message) const {
  if (policy_ != SchedulePolicy::kStorm) return Level::kMore;
  if (message.small()) return Level::kSmall;
  int level = static_cast<int>(Level::kLeft1M);
  for (uint64_t most = 1 << 20; message.bytes_left() > most; most *= 8) ++level;
  return static_cast<Level>(std::min(level, static_cast<int>(Level::kMore)));
}

Outbox::Rank Outbox::RankOf(OutMessage* message) const {
  switch (policy_) {
    case SchedulePolicy::kStorm:
      return {message->urgency, !message->solicited, message->order, message};
    case SchedulePolicy::kFifo:
      return {0, false, message->order, message};
    case SchedulePolicy::kFair:
      break;
  }
  return {0, false, message->turn, message};
}

uint64_t Outbox::NextSize(const OutMessage& message) {
  const uint64_t offset = message.again.empty() ? message.next_offset : message.again.back().offset;
  return std::min<uint64_t>(kMaxSegmentPayloadBytes, message.bytes.size() - offset);
}

bool Outbox::HasCredit(const OutMessage& message) const {
  if (message.solicited || !message.again.empty()) return true;
  // Bulk leaves an eighth to the others.
  const uint64_t bound = message.small() ? bound_bytes_ : bound_bytes_ / 8 * 7;
  return charged_ - released_ + NextSize(message) + kSegmentChargeBytes <= bound;
}

void Outbox::Enqueue(OutMessage* message) {
  ready_[static_cast<int>(LevelOf(*message))].insert(RankOf(message));
  waiting_.emplace(message->waits_since, message);
}

void Outbox::Dequeue(OutMessage* message) {
  const Rank rank = RankOf(message);
  for (Queue& level : ready_) level.erase(rank);
  waiting_.erase({message->waits_since, message});
  BlockedOf(*message).erase(rank);
}

void Outbox::Block(OutMessage* message) {
  Dequeue(message);
  BlockedOf(*message).insert(RankOf(message));
  unannounced_.push_back(message->envelope.key);
}

void Outbox::Unblock(OutMessage* message) {
  if (BlockedOf(*message).erase(RankOf(message)) > 0) Enqueue(message);
}

bool Outbox::Add(OutMessagePtr message, Instant now) {
  const auto [it, inserted] = messages_.try_emplace(message->envelope.key, message);
  if (!inserted) return false;
  message->order = message->turn = next_order_++;
  message->waits_since = now;
  Enqueue(message.get());
  return true;
}

std::optional<Outbox::Segment> Outbox::Take(Instant now, Place place) {
  while (policy_ == SchedulePolicy::kStorm && !waiting_.empty()) {
    const auto [since, message] = *waiting_.begin();
    if (Between(since, now) < kMaxWait) break;
    if (!HasCredit(*message)) {
      Block(message);
      continue;
    }
    if (const int lane = place(*message, Level::kOverdue); lane >= 0) {
      return Take(message, lane, now);
    }
    break;
  }
  int passed = 0;
  for (int level = 0; level < kLevels; ++level) {
    Queue& ready = ready_[level];
    for (auto it = ready.begin(); it != ready.end();) {
      OutMessage* message = it->message;
      if (!HasCredit(*message)) {
        const Rank rank = *it;
        Block(message);
        it = ready.upper_bound(rank);
        continue;
      }
      const int lane = place(*message, static_cast<Level>(level));
      if (lane >= 0) return Take(message, lane, now);
      if (lane == kNoLane || ++passed == kMaxPassed) return std::nullopt;
      ++it;
    }
  }
  return std::nullopt;
}

Outbox::Segment Outbox::Take(OutMessage* message, int lane, Instant now) {
  Dequeue(message);
  Segment segment;
  segment.message = messages_.at(message->envelope.key);
  segment.size = NextSize(*message);
  segment.lane = lane;
  segment.waited_since = message->waits_since;
  if (!message->again.empty()) {
    segment.offset = message->again.back().offset;
    segment.solicited = message->again.back().solicited;
    message->again.pop_back();
  } else {
    segment.offset = message->next_offset;
    segment.solicited = message->solicited;
    message->next_offset += segment.size;
    message->first_handed_out = true;
    if (!segment.solicited) charged_ += segment.size + kSegmentChargeBytes;
  }
  message->turn = next_order_++;
  message->waits_since = now;
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
  OutMessage* message = it->second.get();
  const bool queued = !message->all_handed_out();
  Dequeue(message);
  message->solicited = true;
  if (queued) Enqueue(message);
}

std::vector<MessageKey> Outbox::TakeAnnouncements(bool all) {
  std::vector<MessageKey> keys;
  if (all) {
    for (const auto* blocked : {&blocked_small_, &blocked_}) {
      for (const Rank& rank : *blocked) keys.push_back(rank.message->envelope.key);
    }
  } else {
    for (const MessageKey& key : unannounced_) {
      const auto it = messages_.find(key);
      if (it != messages_.end() && BlockedOf(*it->second).contains(RankOf(it->second.get()))) {
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

}  // namespace geomesh::transport
