// How many lanes a peer is worth: starts with few and adds while the measured throughput grows, at
// once where the path is long.
// Pure decisions: is told the time and what was delivered.
#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "transport/loop.h"

namespace geomesh::transport {

class LaneTuner {
 public:
  LaneTuner(int first, int most) : lanes_(first), most_(most) {}

  // Called often while something is sent. `delivered_bytes`: so far, over all lanes. `limited`: as
  // many lanes as there should be carry what they may, and more waits; only time spent so says
  // something. Returns how many lanes there should be: more than before at most once a few round
  // trips.
  int Update(Instant now, uint64_t delivered_bytes, bool limited, absl::Duration rtt);

  int lanes() const { return lanes_; }
  // The other side wants so many.
  void AtLeast(int lanes);

 private:
  void Begin(Instant now, uint64_t delivered_bytes);
  void Settle(Instant now);

  int lanes_;
  const int most_;
  bool ramping_ = false;  // several lanes were added at once
  bool settled_ = false;
  bool measuring_ = false;
  Instant begin_;
  uint64_t bytes_at_begin_ = 0;
  double best_bytes_per_s_ = 0;  // with fewer lanes
  Instant settled_at_;
};

}  // namespace geomesh::transport
