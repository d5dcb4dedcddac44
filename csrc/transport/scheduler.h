// One peer's sending side: which segment goes next, and on which lane. Pure decisions: knows
// messages, sizes and credit, and neither the wire nor time, so that it can be tested and simulated
// alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "transport/engine.h"
#include "transport/segment.h"

namespace geomesh::transport {

// Lower goes first. Control segments precede all of these.
enum class Level : uint8_t {
  kSmall = 0,           // at most kPinBytes in all
  kNearlyComplete = 1,  // at most kNearBytes are left
  kBulk = 2,
};
inline constexpr int kLevels = 3;

// A message up to this size stays on one lane, chosen as the quickest; larger ones are spread.
inline constexpr size_t kPinBytes = 64 * 1024;
inline constexpr size_t kNearBytes = 4 * kMaxSegmentPayloadBytes;

// A message on its way out. `bytes` must not be touched once `finished`.
struct OutMessage {
  Envelope envelope;
  absl::Span<const std::byte> bytes;
  Engine::SendDone done;
  int urgency = 0;

  uint64_t order = 0;        // of Send calls to this peer
  uint64_t next_offset = 0;  // first byte never handed out
  bool first_handed_out = false;
  struct Piece {
    uint64_t offset = 0;
    bool solicited = false;
  };
  std::vector<Piece> again;  // of lost lanes, not delivered
  bool solicited = false;    // the receiver asked for it: needs no credit
  int unposted = 0;          // segments the wire still holds
  int in_doubt = 0;          // segments on lost lanes: the peer has not yet said if they came
  absl::Status failure;      // ends it early: nothing more of it is sent
  absl::Status reject;       // the receiver has no use for it; it is sent to its end all the same
  bool finished = false;     // done was called, or is about to be

  bool all_handed_out() const {
    return first_handed_out && next_offset >= bytes.size() && again.empty();
  }
  uint64_t bytes_left() const {
    return bytes.size() - std::min<uint64_t>(next_offset, bytes.size()) +
           again.size() * kMaxSegmentPayloadBytes;
  }
};

using OutMessagePtr = std::shared_ptr<OutMessage>;

class Outbox {
 public:
  struct Segment {
    OutMessagePtr message;
    uint64_t offset = 0;
    uint64_t size = 0;
    bool solicited = false;  // false: counts against the credit
    bool again = false;      // was on a lost lane, has been counted before
  };

  // What the receiver stores at most before its receives are posted.
  void SetBound(uint64_t bound_bytes) { bound_bytes_ = bound_bytes; }

  // False if a message with this key is on its way already.
  bool Add(OutMessagePtr message);

  // Level of the next segment that may go now, or kLevels if there is none. Messages for which
  // there is no credit are set aside.
  int NextLevel();
  // Takes that segment. Only after NextLevel said there is one.
  Segment Take();

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
  bool waits_for_credit() const { return !blocked_.empty() || !blocked_small_.empty(); }

 private:
  struct Place {
    int urgency;
    uint64_t order;
    OutMessage* message;
    bool operator<(const Place& other) const {
      return std::tie(urgency, order) < std::tie(other.urgency, other.order);
    }
  };
  static Level LevelOf(const OutMessage& message);
  static Place PlaceOf(OutMessage* message) { return {message->urgency, message->order, message}; }
  // The size of the segment that would go next.
  static uint64_t NextSize(const OutMessage& message);
  bool HasCredit(const OutMessage& message) const;
  void Enqueue(OutMessage* message);
  void Dequeue(OutMessage* message);
  absl::btree_set<Place>& BlockedOf(const OutMessage& message);
  void Unblock(OutMessage* message);

  absl::flat_hash_map<MessageKey, OutMessagePtr> messages_;
  absl::btree_set<Place> ready_[kLevels];
  // Without credit. Small ones apart: some credit is theirs alone.
  absl::btree_set<Place> blocked_small_, blocked_;
  std::vector<MessageKey> unannounced_;
  uint64_t next_order_ = 0;
  uint64_t bound_bytes_ = kMinUnexpectedBytes;
  uint64_t charged_ = 0;  // cumulative, as the receiver counts `released`
  uint64_t released_ = 0;
};

// What the balancer sees of a lane.
struct LaneView {
  uint64_t in_flight_bytes = 0;  // posted, not acknowledged
  uint64_t window_bytes = 0;     // how much may be
  double bytes_per_s = 0;        // 0: not known
  double rtt_s = 0;              // 0: not known
};

// The lane for a segment of this level, or -1 if all that may be posted now is posted. Small ones
// take the lane on which they arrive first, and may go a little over the window, so that they never
// wait for bulk; the others take the lane with the least backlog in time.
int PickLane(absl::Span<const LaneView> lanes, Level level);

// How many bytes one of `lanes` lanes may have in flight: twice its bandwidth x delay, at least its
// share of four segments.
uint64_t WindowBytes(double bytes_per_s, double min_rtt_s, int lanes);

}  // namespace geomesh::transport
