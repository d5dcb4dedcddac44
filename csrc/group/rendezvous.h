// How the ranks of a group find each other: each puts a record into the c10d store and reads the
// others'.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "transport/engine.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace geomesh::group {

struct Rendezvous {
  std::vector<transport::PeerRecord> records;  // by rank
  uint64_t channel = 0;  // made of random numbers from all ranks: never used before
};

// Blocks until all `size` ranks have put their records or the deadline passes; the error names the
// ranks that are missing. The keys carry the count of rendezvous held on this store, so that a rank
// that comes back at once never reads its peers' old records; the last rank to have read everything
// removes them.
absl::StatusOr<Rendezvous> Meet(c10d::Store& store, const transport::PeerRecord& own, int size,
                                absl::Time deadline);

}  // namespace geomesh::group
