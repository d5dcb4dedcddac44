// One peer's sending side: which segment goes next (STORM). Pure decisions: knows messages, sizes
// and credit, is told the time, and knows neither wire nor lanes, so that it can be tested and
// simulated alone.
//
// STORM's idea: short jobs first makes the mean completion small, and the sender knows all that it
// takes: each message's size and what is left of it. A few levels are enough. A message moves up
// as it progresses, is preempted between segments only, and what has waited for long goes first
// once, so that nothing starves. FIFO and fair sharing stay, to compare.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "transport/engine.h"
#include "transport/loop.h"
#include "transport/segment.h"

namespace geomesh::transport {

// Lower goes first. Control segments precede all of these. Under kFifo and kFair all messages are
// at the last one.
enum class Level : uint8_t {
  kOverdue = 0,  // has waited kMaxWait for its next segment
  kSmall = 1,    // at most kSmallBytes in all
  // The others, by what is left of them. Finer levels make the mean smaller still and the largest
  // messages wait longer (benchmarks/transport_sim).
  kLeft1M = 2,
  kLeft8M = 3,
  kLeft64M = 4,
  kMore = 5,
};
inline constexpr int kLevels = 6;

inline constexpr size_t kSmallBytes = 64 * 1024;

// A message for which there is credit and a lane waits no longer than this for its next segment, or
// than one segment of each message that has waited as long takes.
inline constexpr absl::Duration kMaxWait = absl::Seconds(1);

// A message on its way out. `bytes` must not be touched once `finished`.
struct OutMessage {
  Envelope envelope;
  absl::Span<const std::byte> bytes;
  Engine::SendDone done;
  int urgency = 0;

  uint64_t order = 0;        // of Send calls to this peer
  uint64_t turn = 0;         // the same under kFair, but renewed by each segment
  Instant waits_since;       // for its next segment
  uint32_t lane = 0;         // where it is pinned to one: its name
  uint64_t next_offset = 0;  // first byte never handed out
  bool first_handed_out = false;
  struct Piece {
    uint64_t offset = 0;
    bool solicited = false;
  };
  std::vector<Piece> again;  // of lost lanes, not delivered
  bool solicited = false;    // the receiver waits for it: needs no credit
  int unposted = 0;          // segments the wire still holds
  int in_doubt = 0;          // segments on lost lanes: the peer has not yet said if they came
  absl::Status failure;      // ends it early: nothing more of it is sent
  absl::Status reject;       // the receiver has no use for it; it is sent to its end all the same
  bool finished = false;     // done was called, or is about to be

  bool small() const { return bytes.size() <= kSmallBytes; }
  bool all_handed_out() const {
    return first_handed_out && next_offset >= bytes.size() && again.empty();
  }
  uint64_t bytes_left() const {
    return bytes.size() - std::min<uint64_t>(next_offset, bytes.size()) +
           again.size() * kMaxSegmentPayloadBytes;
  }
};

using OutMessagePtr = std::shared_ptr<OutMessage>;

// What an Outbox's user answers when asked for a lane (otherwise: its index, from 0).
inline constexpr int kNoLane = -1;       // there is none for this message, nor for any after it
inline constexpr int kItsLaneFull = -2;  // it is pinned to one; others may have better luck

class Outbox {
 public:
  struct Segment {
    OutMessagePtr message;
    uint64_t offset = 0;
    uint64_t size = 0;
    bool solicited = false;  // false: counts against the credit
    int lane = 0;            // what `place` said
    Instant waited_since;
  };
  using Place = absl::FunctionRef<int(OutMessage& message, Level level)>;

  explicit Outbox(SchedulePolicy policy = SchedulePolicy::kStorm) : policy_(policy) {}

  // What the receiver stores at most before its receives are posted.
  void SetBound(uint64_t bound_bytes) { bound_bytes_ = bound_bytes; }

  // False if a message with this key is on its way already.
  bool Add(OutMessagePtr message, Instant now);

  // Takes the next segment that may go and for which `place` has a lane. Messages for which there
  // is no credit are set aside.
  std::optional<Segment> Take(Instant now, Place place);

  // Puts a segment of a lost lane back.
  void PutBack(const OutMessagePtr& message, OutMessage::Piece piece);

  // A segment counted against the credit will never arrive.
  void Uncharge(uint64_t payload_bytes) { charged_ -= payload_bytes + kSegmentChargeBytes; }

  // The receiver freed `released` bytes in all. False if that is more than was sent.
  bool OnReleased(uint64_t released);
  // The receiver has a buffer for it.
  void OnWanted(const MessageKey& key);
  // Messages set aside that were not yet announced. All of them again if `all`.
  std::vector<MessageKey> TakeAnnouncements(bool all);

  OutMessagePtr Find(const MessageKey& key) const;
  // Forgets a message; its handed-out segments stay the caller's.
  void Remove(const OutMessagePtr& message);
  std::vector<OutMessagePtr> Messages() const;

  size_t size() const { return messages_.size(); }
  bool has_ready() const { return !waiting_.empty(); }
  bool waits_for_credit() const { return !blocked_.empty() || !blocked_small_.empty(); }

 private:
  // Among the messages of a level: the caller's hint, then whom the receiver waits for, then age.
  struct Rank {
    int urgency;
    bool unwanted;
    uint64_t order;
    OutMessage* message;
    bool operator<(const Rank& other) const {
      return std::tie(urgency, unwanted, order) <
             std::tie(other.urgency, other.unwanted, other.order);
    }
  };
  using Queue = absl::btree_set<Rank>;

  Level LevelOf(const OutMessage& message) const;
  Rank RankOf(OutMessage* message) const;
  // The size of the segment that would go next.
  static uint64_t NextSize(const OutMessage& message);
  bool HasCredit(const OutMessage& message) const;
  void Enqueue(OutMessage* message);
  void Dequeue(OutMessage* message);
  Queue& BlockedOf(const OutMessage& message) {
    return message.small() ? blocked_small_ : blocked_;
  }
  void Block(OutMessage* message);
  void Unblock(OutMessage* message);
  Segment Take(OutMessage* message, int lane, Instant now);

  const SchedulePolicy policy_;
  absl::flat_hash_map<MessageKey, OutMessagePtr> messages_;
  Queue ready_[kLevels];
  absl::btree_set<std::pair<Instant, OutMessage*>> waiting_;  // the ready ones, by waits_since
  // Without credit. Small ones apart: some credit is theirs alone.
  Queue blocked_small_, blocked_;
  std::vector<MessageKey> unannounced_;
  uint64_t next_order_ = 0;
  uint64_t bound_bytes_ = kMinUnexpectedBytes;
  uint64_t charged_ = 0;  // cumulative, as the receiver counts `released`
  uint64_t released_ = 0;
};

}  // namespace geomesh::transport
