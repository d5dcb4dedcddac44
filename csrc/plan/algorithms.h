// The algorithms: each makes one rank's program for a call on a topology. What they have in common
// is in builder.h; which of them is taken for a call is decided in compile.cc.
//
// All ranks end with identical bits: each element is reduced once, by one owner, in an order that
// the program fixes, and then copied; where several ranks reduce the same element (direct
// all-reduce, recursive doubling) they evaluate the same expression with the same operands on the
// same sides.
#pragma once

#include <vector>

#include "plan/builder.h"
#include "plan/compile.h"
#include "plan/program.h"
#include "plan/topology.h"

namespace geomesh::plan {

using Algorithm = Program (*)(const CallShape& shape, const Topology& topology, int rank);

// All algorithms for a call, in order of preference where costs are equal. The first serves where
// sizes are unknown. (compile.cc)
std::vector<Algorithm> Candidates(const CallShape& shape);

// Every rank's program by one algorithm; not for kSendRecv, whose shape differs by rank.
std::vector<Program> ForAllRanks(Algorithm algorithm, const CallShape& shape,
                                 const Topology& topology);

// direct.cc: every message goes straight from its source to its destination.
Program DirectAllReduce(const CallShape& shape, const Topology& topology, int rank);
Program DirectBroadcast(const CallShape& shape, const Topology& topology, int rank);
Program DirectReduce(const CallShape& shape, const Topology& topology, int rank);
Program DirectAllGather(const CallShape& shape, const Topology& topology, int rank);
Program DirectReduceScatter(const CallShape& shape, const Topology& topology, int rank);
Program DirectGather(const CallShape& shape, const Topology& topology, int rank);
Program DirectScatter(const CallShape& shape, const Topology& topology, int rank);
Program DirectAllToAll(const CallShape& shape, const Topology& topology, int rank);
Program DirectBarrier(const CallShape& shape, const Topology& topology, int rank);
Program DisseminationBarrier(const CallShape& shape, const Topology& topology, int rank);
Program SendRecv(const CallShape& shape, const Topology& topology, int rank);

// doubling.cc, tree.cc: few delays, all of the data in each.
Program RecursiveDoublingAllReduce(const CallShape& shape, const Topology& topology, int rank);
Program TreeBroadcast(const CallShape& shape, const Topology& topology, int rank);
Program TreeReduce(const CallShape& shape, const Topology& topology, int rank);
Program TreeAllReduce(const CallShape& shape, const Topology& topology, int rank);

// ring.cc: to the neighbour only.
Program RingAllReduce(const CallShape& shape, const Topology& topology, int rank);
Program RingAllGather(const CallShape& shape, const Topology& topology, int rank);
Program RingReduceScatter(const CallShape& shape, const Topology& topology, int rank);

// grouped.cc: slices over all links at once ("spread"), and once to each region.
Program SpreadAllReduce(const CallShape& shape, const Topology& topology, int rank);
Program SpreadAllReduceByRegion(const CallShape& shape, const Topology& topology, int rank);
Program SpreadReduce(const CallShape& shape, const Topology& topology, int rank);
Program SpreadReduceByRegion(const CallShape& shape, const Topology& topology, int rank);
Program SpreadBroadcast(const CallShape& shape, const Topology& topology, int rank);
Program SpreadBroadcastByRegion(const CallShape& shape, const Topology& topology, int rank);
Program BroadcastByRegion(const CallShape& shape, const Topology& topology, int rank);
Program AllGatherByRegion(const CallShape& shape, const Topology& topology, int rank);
Program BarrierByRegion(const CallShape& shape, const Topology& topology, int rank);
Program ReduceScatterByRegion(const CallShape& shape, const Topology& topology, int rank);

// sign.cc: all-reduce of sign codes.
Program SignExchange(const CallShape& shape, const Topology& topology, int rank);
Program SignExchangeByRegion(const CallShape& shape, const Topology& topology, int rank);
Program SignExchangeByTrees(const CallShape& shape, const Topology& topology, int rank);
Program SignReduceAndRecode(const CallShape& shape, const Topology& topology, int rank);

// Ranks that are close to each other: what goes from one group to another crosses once, to one
// rank of the other group, which passes it on.
class Groups {
 public:
  static Groups EachAlone(const Topology& topology);  // nothing is passed on
  static Groups ByRegion(const Topology& topology);   // regions without ranks left out

  size_t size() const { return members_.size(); }
  const std::vector<int>& members(size_t group) const { return members_[group]; }
  size_t group_of(int rank) const { return group_of_[rank]; }
  // The member of `group` that takes item `item` in and passes it on; spread over the members.
  int gate(size_t group, size_t item) const {
    return members_[group][item % members_[group].size()];
  }

 private:
  std::vector<std::vector<int>> members_;  // ascending
  std::vector<size_t> group_of_;
};

// The time of a message of 1 MB: by this, links are called slow or quick where no size is known.
double NominalSeconds(const Link& link);

// All ranks but `rank`, those behind the slowest links first: their messages are started first.
// Ties go round the ring from `rank`, so that not everybody sends to rank 0 at once.
std::vector<int> PeersSlowestFirst(const Topology& topology, int rank);

// All ranks in the order of the ring: those of a region together, regions in the order that is best
// for `bytes_in_ring` (all up to 8 regions tried; above that, exchanges and reversals).
std::vector<int> RingOrder(const Topology& topology, int64_t bytes_in_ring);

// Emits this rank's part of a binomial-tree broadcast of `chunk` among `members`, from
// members[root_index].
void TreeBroadcast(ProgramBuilder& builder, const Chunk& chunk, const std::vector<int>& members,
                   size_t root_index);

}  // namespace geomesh::plan
