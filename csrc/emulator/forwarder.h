// The loop that carries packets: reads each region's device, puts packets on the links, writes the
// pieces when they are due, and measures how late it was. One thread owns everything here.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <queue>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "emulator/link.h"
#include "emulator/region.h"

namespace geomesh::emulator {

// Nanoseconds of the monotonic clock.
int64_t NowNs();

// How late pieces were delivered: counts in steps of an eighth of a power of two.
class LatenessHistogram {
 public:
  void Add(int64_t ns);
  // The upper edge of the bucket that holds the quantile; 0 without entries.
  int64_t Quantile(double q) const;
  int64_t max_ns() const { return max_ns_; }
  uint64_t count() const { return count_; }

 private:
  std::array<uint64_t, 64 * 8> buckets_ = {};
  uint64_t count_ = 0;
  int64_t max_ns_ = 0;
};

class Forwarder {
 public:
  explicit Forwarder(std::vector<Region> regions);

  absl::Status Start();

  // Calls `callback` from Run() whenever `fd` is readable.
  absl::Status Watch(int fd, std::function<void()> callback);
  void Unwatch(int fd);

  // Returns after Stop().
  absl::Status Run();
  void Stop() { running_ = false; }

  const std::vector<Region>& regions() const { return regions_; }
  // The region's index, -1 if there is none of this name.
  int Find(const std::string& name) const;
  Link& link(int from, int to) { return links_[from * regions_.size() + to]; }

  const LatenessHistogram& lateness() const { return lateness_; }
  // Packets for nobody: another address, multicast, not IP, or for the region itself.
  uint64_t unroutable() const { return unroutable_; }
  // Pieces the receiving device did not take.
  uint64_t undelivered() const { return undelivered_; }
  uint64_t device_drops() const;
  // Links' counters, lateness, drops: all from zero.
  void ResetCounters();

 private:
  struct Due {
    int64_t due_ns;
    uint64_t ticket;
    int from, to, path;
    bool operator>(const Due& other) const { return due_ns > other.due_ns; }
  };
  void ReadDevice(int region);
  void Deliver(int64_t now_ns);
  void Write(int region, const Piece& piece);

  std::vector<Region> regions_;
  std::vector<Link> links_;  // [from * regions + to]
  // The head of each path that is not empty; entries with an old ticket are skipped.
  std::priority_queue<Due, std::vector<Due>, std::greater<Due>> due_;
  std::vector<uint8_t> read_buffer_;
  Fd epoll_;
  std::vector<std::pair<int, std::function<void()>>> watched_;
  LatenessHistogram lateness_;
  uint64_t unroutable_ = 0;
  uint64_t undelivered_ = 0;
  uint64_t device_drops_before_ = 0;
  bool running_ = true;
};

}  // namespace geomesh::emulator
