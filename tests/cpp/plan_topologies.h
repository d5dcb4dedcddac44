// Topologies that the plan's tests share.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "plan/topology.h"

namespace geomesh::plan {

inline Link Gbit(double gbit_per_s, double round_trip_ms) {
  return {gbit_per_s * 1e9 / 8, absl::Milliseconds(round_trip_ms / 2)};
}

// The reference WAN, rates divided by `scale`; rank r is in region `region_of[r]`: 0 eastus,
// 1 brazilsouth, 2 francecentral, 3 eastasia.
inline Topology Azure4(std::vector<int> region_of = {0, 1, 2, 3}, double scale = 1) {
  const double rate[4][4] = {{100, 0.537, 0.935, 0.202},
                             {0.537, 100, 0.386, 0.117},
                             {0.935, 0.386, 100, 0.127},
                             {0.202, 0.117, 0.127, 100}};
  const double rtt[4][4] = {
      {0.1, 118, 80, 199}, {118, 0.1, 186, 320}, {80, 186, 0.1, 184}, {199, 320, 184, 0.1}};
  std::vector<Link> links;
  for (int a = 0; a < 4; ++a) {
    for (int b = 0; b < 4; ++b) links.push_back(Gbit(rate[a][b] / (a == b ? 1 : scale), rtt[a][b]));
  }
  return *Topology::Create({"eastus", "brazilsouth", "francecentral", "eastasia"},
                           std::move(region_of), std::move(links));
}

// Regions of equal links: `gbit_per_s` and `round_trip_ms` between any two.
inline Topology EqualRegions(std::vector<int> region_of, int regions, double gbit_per_s,
                             double round_trip_ms) {
  std::vector<std::string> names;
  std::vector<Link> links;
  for (int a = 0; a < regions; ++a) {
    names.push_back(absl::StrCat("region", a));
    for (int b = 0; b < regions; ++b) {
      links.push_back(a == b ? Gbit(100, 0.1) : Gbit(gbit_per_s, round_trip_ms));
    }
  }
  return *Topology::Create(std::move(names), std::move(region_of), std::move(links));
}

// `world` ranks in the given form, by name for traces.
inline std::vector<std::pair<std::string, Topology>> Topologies(int world) {
  std::vector<int> dealt, halves, lonely, thirds;
  for (int r = 0; r < world; ++r) {
    dealt.push_back(r % 4);
    thirds.push_back(r % 3);
    halves.push_back(r < world / 2 ? 0 : 1);
    lonely.push_back(r == world - 1 ? 2 : 0);  // region 1 has no rank
  }
  return {{"flat", Topology::Flat(world)},
          {"azure-4, dealt", Azure4(dealt)},
          {"three equal", EqualRegions(thirds, 3, 1, 100)},
          {"slow inside", EqualRegions(thirds, 3, 400, 0.01)},
          {"two halves", EqualRegions(halves, 2, 1, 100)},
          {"one apart", EqualRegions(lonely, 3, 1, 100)}};
}

}  // namespace geomesh::plan
