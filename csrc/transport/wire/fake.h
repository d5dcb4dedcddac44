// wire/fake: lanes between engines of one process, with a set delay and rate, and faults on demand.
// For tests and simulation. Time is real, the order of events on a lane is not left to chance.
//
// A segment's memory is read when it departs, not when it is posted: who frees it early is seen by
// AddressSanitizer.
#pragma once

#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "transport/wire/wire.h"

namespace geomesh::transport {

// Any thread. Must outlive its wires.
class FakeNetwork {
 public:
  struct Link {
    absl::Duration delay = absl::ZeroDuration();  // one way
    double bytes_per_s = 0;                       // of each lane and direction; 0: no limit
  };

  FakeNetwork();
  explicit FakeNetwork(Link link);
  ~FakeNetwork();

  // A wire that listens under `name`, which must be new.
  std::unique_ptr<Wire> MakeWire(absl::string_view name);

  // ---- faults; wires are given by name; `index` -1 means every lane between the two ----

  // Breaks lanes: both sides see them lost at once.
  void Cut(absl::string_view a, absl::string_view b, int index = -1);
  // Drops, without a word, all that is sent from now on.
  void BlackHole(absl::string_view a, absl::string_view b, int index = -1);
  void SetLink(absl::string_view a, absl::string_view b, int index, Link link);
  // The next `count` Dial calls to it end in lost lanes.
  void RefuseDials(absl::string_view to, int count);
  // Dial calls to it get no answer at all.
  void IgnoreDials(absl::string_view to);
  // Adds `change` to one byte of the header of the next segment delivered to it.
  void CorruptNext(absl::string_view to, size_t header_byte, int change);
  // Stopped like by SIGSTOP: it neither sends nor receives, and its lanes stay.
  void Freeze(absl::string_view name);
  void Thaw(absl::string_view name);
  // Killed: every other side sees its lanes lost, and it never does anything again.
  void Kill(absl::string_view name);
  // Living lanes between the two.
  int Lanes(absl::string_view a, absl::string_view b) const;

  class State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace geomesh::transport
