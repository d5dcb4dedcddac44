// From a topology file's links, and the regions that ranks report, to the plan's topology.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/topology.h"
#include "transport/engine.h"

namespace geomesh::group {

// The links of a topology file, read in Python. Empty `regions`: none was given.
struct TopologySpec {
  std::string name;  // for errors
  std::vector<std::string> regions;
  std::vector<double> bytes_per_s;  // [from * regions + to]
  std::vector<double> delay_s;      // one way, likewise

  std::string Fingerprint() const;
};

// The topology of the ranks with these records, in rank order. InvalidArgument for a rank whose
// region is not one of the file's. Without a file, regions are those that ranks report, with links
// as of a WAN.
absl::StatusOr<plan::Topology> MakeTopology(const TopologySpec& spec,
                                            absl::Span<const transport::PeerRecord> records);

}  // namespace geomesh::group
