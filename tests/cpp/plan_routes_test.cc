// Routes of pieces: every rank gets every piece once, from a rank that has it, and links carry no
// more than they can in the time that is best.
#include "plan/routes.h"

#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "plan_topologies.h"

namespace geomesh::plan {
namespace {

using ::testing::ElementsAre;

TEST(Routes, EveryRankGetsEveryPieceOnceFromAHolder) {
  for (const int world : {1, 2, 3, 5, 8, 16}) {
    for (const auto& [name, topology] : Topologies(world)) {
      for (const uint32_t slices : {1u, 3u, 8u}) {
        SCOPED_TRACE(absl::StrCat(name, ", ", world, " ranks, ", slices, " slices"));
        const auto transfers = EarliestArrivals(topology, slices, 40'000);
        std::set<std::tuple<int, uint32_t, int>> held;  // origin, slice, rank
        for (int r = 0; r < world; ++r) {
          for (uint32_t j = 0; j < slices; ++j) held.insert({r, j, r});
        }
        for (const Transfer& t : transfers) {
          EXPECT_TRUE(held.contains({t.origin, t.slice, t.from}));
          EXPECT_TRUE(held.insert({t.origin, t.slice, t.to}).second);
        }
        EXPECT_EQ(held.size(), static_cast<size_t>(world) * slices * world);
      }
    }
  }
}

TEST(Routes, ASlowLinkIsGoneAround) {
  // 0 and 2 are far apart, and 1 is near both: 100 ms direct, 2 x 10 ms over 1.
  const Link near = Gbit(1, 20), far = Gbit(1, 200), inside = Gbit(100, 0.1);
  const Topology topology = *Topology::Create(
      {"a", "b", "c"}, {0, 1, 2}, {inside, near, far, near, inside, near, far, near, inside});
  EXPECT_THAT(EarliestArrivals(topology, 1, 1000),
              ElementsAre(Transfer{0, 1, 0, 0}, Transfer{1, 0, 1, 0}, Transfer{2, 1, 2, 0},
                          Transfer{1, 2, 1, 0}, Transfer{1, 2, 0, 0}, Transfer{1, 0, 2, 0}));
}

TEST(Routes, EqualLinksAreTakenStraight) {
  const Topology topology = EqualRegions({0, 1, 2, 3, 4}, 5, 1, 100);
  for (const Transfer& t : EarliestArrivals(topology, 4, 1 << 20)) EXPECT_EQ(t.from, t.origin);
}

TEST(Routes, WithinARegionPiecesArePassedOn) {
  // Two ranks in each of two regions: what crosses between them crosses once.
  const Topology topology = EqualRegions({0, 0, 1, 1}, 2, 0.01, 100);
  std::map<std::pair<int, uint32_t>, int> crossings;
  for (const Transfer& t : EarliestArrivals(topology, 2, 1 << 20)) {
    if (topology.region_of(t.from) != topology.region_of(t.to)) ++crossings[{t.origin, t.slice}];
  }
  EXPECT_EQ(crossings.size(), 8u);
  for (const auto& [piece, times] : crossings) EXPECT_EQ(times, 1);
}

// All of what goes to the region with the slowest links, divided over those links as their rates
// and delays allow, and no link much longer busy than the others: within a piece of the optimum.
TEST(Routes, Azure4IsNearTheBoundOfItsLinks) {
  constexpr uint32_t kSlices = 16;
  constexpr int64_t kPiece = 137'000 / kSlices;
  const Topology topology = Azure4({0, 1, 2, 3}, 36);
  double capacity = 0, delayed = 0;  // sum of rates, and of rates x delays
  std::map<int, double> busy_s;
  for (int from = 0; from < 3; ++from) {
    const Link& link = topology.link(from, 3);
    capacity += link.bytes_per_s;
    delayed += link.bytes_per_s * absl::ToDoubleSeconds(link.delay);
    busy_s[from] = absl::ToDoubleSeconds(link.delay);
  }
  for (const Transfer& t : EarliestArrivals(topology, kSlices, kPiece)) {
    if (t.to == 3) busy_s[t.from] += kPiece / topology.link(t.from, 3).bytes_per_s;
  }
  const double bound_s = (3 * kSlices * kPiece + delayed) / capacity;
  for (const auto& [from, seconds] : busy_s) {
    EXPECT_LE(seconds, bound_s + kPiece / topology.link(from, 3).bytes_per_s) << "from " << from;
  }
}

}  // namespace
}  // namespace geomesh::plan
