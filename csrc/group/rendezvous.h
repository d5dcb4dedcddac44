// How the ranks of a group find each other: each puts a record into the c10d store and reads the
// others'.
#pragma once

#include <cstdint>
#include <string>
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

// Which group meets.
struct Meeting {
  std::vector<int> members;  // the job's ranks, by rank in the group
  std::string job;           // of this run of the job, equal on its ranks; may be empty
  std::string name;          // never used before in this job, equal on all members; may be empty
};

// Blocks until all members have put their records or the deadline passes; the error names the ranks
// that are missing, and the groups that those wait for instead. Only ranks that say the same
// members meet. Without a name, the keys carry the count of such meetings on this store, so that a
// rank that comes back at once never reads its peers' old records; the last rank to have read
// everything removes them.
absl::StatusOr<Rendezvous> Meet(c10d::Store& store, const transport::PeerRecord& own,
                                const Meeting& meeting, absl::Time deadline);

}  // namespace geomesh::group
