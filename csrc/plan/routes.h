// Ways through the network for what every rank has to get: each piece travels along a tree of its
// own, from holder to holder, so that a slow link carries only as much as it can in the time that
// the quick ones take. Knows links, not steps.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/topology.h"

namespace geomesh::plan {

// A piece is slice `slice` of the data of rank `origin`.
struct Transfer {
  int from = 0;
  int to = 0;
  int origin = 0;
  uint32_t slice = 0;
  friend bool operator==(const Transfer&, const Transfer&) = default;
};

// Transfers that bring every piece to every rank once, each after the one that brought the piece to
// its sender. Pieces are of `piece_bytes`, and all origins hold theirs at the start.
//
// Trees grow together, the earliest arrival next, given what ports and links (as in cost_model.h)
// have carried so far. So a piece takes a relay where the direct link is slow or busy. Not the
// optimum, which is NP-hard, and the same on all ranks.
std::vector<Transfer> EarliestArrivals(const Topology& topology, uint32_t slices,
                                       int64_t piece_bytes);

}  // namespace geomesh::plan
