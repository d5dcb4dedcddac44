// Which rank is in which region, and what the links between regions carry. Pure data: read from a
// file by Python (torch_geomesh/topology.py) or made from the regions that ranks report; equal on
// all ranks, as its fingerprint shows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace geomesh::plan {

// One direction of a pair of regions.
struct Link {
  double bytes_per_s = 12.5e9;
  absl::Duration delay = absl::Microseconds(50);  // one way
};

class Topology {
 public:
  // `region_of[r]` indexes `regions`; `links[a * regions.size() + b]` is from region a to region b
  // (a == b: inside).
  static absl::StatusOr<Topology> Create(std::vector<std::string> regions,
                                         std::vector<int> region_of, std::vector<Link> links);
  // Everything in one region with one link.
  static Topology Flat(int world, Link link = {});

  int world() const { return static_cast<int>(region_of_.size()); }
  int regions() const { return static_cast<int>(regions_.size()); }
  int region_of(int rank) const { return region_of_[rank]; }
  const std::string& region_name(int region) const { return regions_[region]; }
  const Link& link(int from_rank, int to_rank) const;
  bool flat() const { return regions_.size() == 1; }

  // The same regions and links with other ranks; every entry is a region's index.
  Topology WithRanks(std::vector<int> region_of) const;

  // Equal for equal topologies; for comparison across ranks, not for security.
  std::string Fingerprint() const;

 private:
  std::vector<std::string> regions_;
  std::vector<int> region_of_;
  std::vector<Link> links_;
};

}  // namespace geomesh::plan
