// Groups of ranks that are close to each other.
#include <utility>

#include "plan/algorithms.h"

namespace geomesh::plan {

Groups Groups::EachAlone(const Topology& topology) {
  Groups groups;
  for (int rank = 0; rank < topology.world(); ++rank) {
    groups.members_.push_back({rank});
    groups.group_of_.push_back(rank);
  }
  return groups;
}

Groups Groups::ByRegion(const Topology& topology) {
  std::vector<std::vector<int>> regions(topology.regions());
  for (int rank = 0; rank < topology.world(); ++rank) {
    regions[topology.region_of(rank)].push_back(rank);
  }
  Groups groups;
  groups.group_of_.resize(topology.world());
  for (std::vector<int>& members : regions) {
    if (members.empty()) continue;
    for (const int rank : members) groups.group_of_[rank] = groups.members_.size();
    groups.members_.push_back(std::move(members));
  }
  return groups;
}

}  // namespace geomesh::plan
