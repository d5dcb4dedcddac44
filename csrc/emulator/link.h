// One direction between two regions: paths with rate, delay, jitter, loss and a finite queue, as a
// virtual clock. Says when each piece of a packet comes out and counts what goes in and what drops.
// Knows packets and time as numbers; nothing of devices or clocks.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "emulator/packet.h"

namespace geomesh::emulator {

struct PathSettings {
  double bytes_per_s = 0;
  int64_t delay_ns = 0;     // one way
  int64_t jitter_ns = 0;    // adds 0..jitter to each piece; the order is kept
  double loss = 0;          // probability a segment is lost after it was sent
  int64_t queue_bytes = 0;  // bytes that may wait, the segment on the wire included
};

// Segments and their IP bytes.
struct Tally {
  uint64_t bytes = 0;
  uint64_t packets = 0;
  void Add(uint64_t more_bytes) {
    bytes += more_bytes;
    ++packets;
  }
};

struct PathCounters {
  Tally sent;     // went onto the wire, later lost ones included
  Tally lost;     // of these, lost by chance
  Tally dropped;  // did not fit the queue
};

class Path {
 public:
  Path(const PathSettings& settings, uint64_t seed);

  // From now on; what was admitted before keeps its time.
  void Configure(const PathSettings& settings, int64_t now_ns);

  // Puts the packet's segments onto the wire, as many as the queue takes.
  void Admit(const std::shared_ptr<const Packet>& packet, int64_t now_ns);

  bool empty() const { return pieces_.empty(); }
  int64_t next_due_ns() const { return pieces_.front().due_ns; }
  Piece Pop();
  // Names the present content: another after Clear(), unique among all paths. What a timetable
  // holds of an earlier ticket is void.
  uint64_t ticket() const { return ticket_; }

  // Forgets everything under way; returns how much that was.
  Tally Clear(int64_t now_ns);

  // Bytes admitted whose last bit has not left yet.
  int64_t BacklogBytes(int64_t now_ns) const;
  const PathSettings& settings() const { return settings_; }
  const PathCounters& counters() const { return counters_; }
  void ResetCounters() { counters_ = {}; }

 private:
  struct Scheduled {
    int64_t due_ns;
    Piece piece;
  };
  void Schedule(const std::shared_ptr<const Packet>& packet, uint32_t first, uint32_t count);

  PathSettings settings_;
  std::mt19937_64 random_;
  // When the last admitted bit will have left; fractions of a nanosecond are carried so that fast
  // links keep their rate.
  int64_t clear_at_ns_ = 0;
  double carry_ns_ = 0;
  int64_t last_due_ns_ = 0;
  std::deque<Scheduled> pieces_;
  PathCounters counters_;
  uint64_t ticket_;
};

class Link {
 public:
  // Keeps paths that exist, with their queues and counters; replaces all if their number changes.
  void Configure(const std::vector<PathSettings>& paths, uint64_t seed, int64_t now_ns);

  // A link without paths, or cut, takes nothing.
  bool up() const { return !cut_ && !paths_.empty(); }
  bool is_cut() const { return cut_; }
  // Cutting loses what is under way.
  void Cut(int64_t now_ns);
  void Restore() { cut_ = false; }

  // The index of the path for the packet's flow; -1, and the packet counts as dropped, if the link
  // is down.
  int Route(const Packet& packet);

  const std::vector<std::unique_ptr<Path>>& paths() const { return paths_; }
  PathCounters Counters() const;
  const Tally& cut_drops() const { return cut_drops_; }
  void ResetCounters();

 private:
  std::vector<std::unique_ptr<Path>> paths_;
  PathCounters retired_;  // of paths that Configure replaced
  Tally cut_drops_;
  bool cut_ = false;
};

}  // namespace geomesh::emulator
