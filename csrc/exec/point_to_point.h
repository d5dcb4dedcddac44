// Which message a send or receive of a group is: messages from one rank to another with one tag are
// counted on both sides, in the order of the calls.
//
// A receive from any rank takes the first message that comes. Until it has one, later receives with
// its tag wait behind it, so that receives take messages in the order in which they were posted.
// Engine thread only. Knows ranks, tags and counts, and no memory.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <utility>
#include <vector>

namespace geomesh::exec {

// Message ids with this bit are sends' and receives'.
inline constexpr uint64_t kPointToPointMessages = uint64_t{1} << 63;

inline constexpr int kAnyRank = -1;

class PointToPointCounts {
 public:
  // A receive has got its message.
  struct Matched {
    uint64_t receive = 0;  // the caller's number for it
    int rank = 0;
    uint64_t message_id = 0;
  };

  uint64_t NextSent(int to, uint32_t tag) { return Id(tag, sent_[{to, tag}]++); }

  // Takes a receive in its turn, and returns what is matched now: it or nothing.
  std::vector<Matched> Post(uint64_t receive, int from, uint32_t tag);

  // A message has begun to come, or waits to; messages of other kinds, and those that were told of
  // before, are ignored. Returns what is matched now.
  std::vector<Matched> OnUnexpected(int from, uint64_t message_id);

 private:
  struct Waiting {
    uint64_t receive = 0;
    int from = kAnyRank;
  };
  struct Tag {
    std::deque<Waiting> waiting;                // the first one is from any rank
    std::deque<std::pair<int, uint32_t>> come;  // rank and count, first come first
  };
  using Key = std::pair<int, uint32_t>;  // rank and tag

  static uint64_t Id(uint32_t tag, uint32_t count) {
    return kPointToPointMessages | (uint64_t{tag} << 32) | count;
  }
  std::vector<Matched> Match(uint32_t tag);

  std::map<Key, uint32_t> sent_, received_;
  std::map<uint32_t, Tag> tags_;
};

}  // namespace geomesh::exec
