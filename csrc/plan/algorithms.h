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

// All ranks but `rank`, those behind the slowest links first: their messages are started first.
// Ties go round the ring from `rank`, so that not everybody sends to rank 0 at once.
std::vector<int> PeersSlowestFirst(const Topology& topology, int rank);

// Emits own = c0 op c1 op ... in the given order, where own is contribution `own_index` and the
// others are `contributions` (scratch, which is used up; the entry at own_index is ignored). What
// comes before own is reduced first and then taken from the right: own op (c0 op c1 ...); an
// element has one owner, so no other rank evaluates it in another order.
void ReduceInOrder(ProgramBuilder& builder, const Chunk& own, size_t own_index,
                   const std::vector<Chunk>& contributions);

}  // namespace geomesh::plan
