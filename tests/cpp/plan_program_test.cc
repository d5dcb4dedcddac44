// Slice bounds, topologies, the builder's dependencies, ring orders, printed programs.
#include "plan/program.h"

#include <limits>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "plan/algorithms.h"
#include "plan/builder.h"
#include "plan_topologies.h"

namespace geomesh::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

TEST(SliceBounds, ExactValues) {
  const auto bounds = [](int64_t elements, uint32_t slices, int64_t granule) {
    std::vector<int64_t> ends;
    for (uint32_t s = 0; s < slices; ++s) {
      ends.push_back(SliceBounds(elements, s, slices, granule).end);
    }
    return ends;
  };
  EXPECT_THAT(bounds(1000, 4, 64), ElementsAre(256, 512, 768, 1000));
  EXPECT_THAT(bounds(65, 4, 64), ElementsAre(64, 64, 65, 65));
  EXPECT_THAT(bounds(1, 3, 64), ElementsAre(1, 1, 1));  // late slices are empty
  EXPECT_THAT(bounds(0, 2, 64), ElementsAre(0, 0));
  EXPECT_THAT(bounds(10000, 2, 4096), ElementsAre(8192, 10000));
}

TEST(SliceBounds, CoverTheBlockInOrder) {
  for (const int64_t granule : {1, 64, 4096}) {
    for (const int64_t elements : {0, 1, 63, 64, 65, 4095, 4097, 100003}) {
      for (uint32_t slices = 1; slices < 40; ++slices) {
        int64_t at = 0, least = elements, most = 0;
        for (uint32_t s = 0; s < slices; ++s) {
          const SliceRange range = SliceBounds(elements, s, slices, granule);
          ASSERT_EQ(range.begin, at);
          ASSERT_GE(range.end, range.begin);
          ASSERT_TRUE(range.end % granule == 0 || range.end == elements);
          least = std::min(least, range.end - range.begin);
          most = std::max(most, range.end - range.begin);
          at = range.end;
        }
        ASSERT_EQ(at, elements);
        ASSERT_LE(most - least, 2 * granule);
      }
    }
  }
}

TEST(SliceBounds, HugeBlocksDoNotOverflow) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  const uint32_t slices = std::numeric_limits<uint32_t>::max();
  EXPECT_EQ(SliceBounds(most, slices - 1, slices, 1).end, most);
  EXPECT_EQ(SliceBounds(most, 1, 2, 64).begin, SliceBounds(most, 0, 2, 64).end);
  EXPECT_EQ(SliceBounds(most, 1, 2, 64).begin, int64_t{1} << 62);
}

// Slices whose fractions are apart never overlap, also of different cuts.
TEST(SliceBounds, OverlapIsAMatterOfFractions) {
  for (uint32_t n = 1; n < 9; ++n) {
    for (uint32_t m = 1; m < 9; ++m) {
      for (uint32_t i = 0; i < n; ++i) {
        for (uint32_t j = 0; j < m; ++j) {
          const Chunk a = Output(0, i, n), b = Output(0, j, m);
          EXPECT_EQ(SlicesOverlap(a, b), i * m < (j + 1) * n && j * n < (i + 1) * m);
          if (SlicesOverlap(a, b)) continue;
          for (const int64_t elements : {1, 100, 129, 5000}) {
            const SliceRange x = SliceBounds(elements, i, n, 64);
            const SliceRange y = SliceBounds(elements, j, m, 64);
            EXPECT_TRUE(x.end <= y.begin || y.end <= x.begin);
          }
        }
      }
    }
  }
}

TEST(Topology, WrongOnesAreRefusedByName) {
  const Link link;
  const auto message = [](const absl::StatusOr<Topology>& t) {
    return std::string(t.status().message());
  };
  EXPECT_THAT(message(Topology::Create({}, {0}, {})), HasSubstr("no region"));
  EXPECT_THAT(message(Topology::Create({"a"}, {}, {link})), HasSubstr("no rank"));
  EXPECT_THAT(message(Topology::Create({"a", "b"}, {0}, {link})), HasSubstr("4 are needed"));
  EXPECT_THAT(message(Topology::Create({"a", "a"}, {0}, {link, link, link, link})),
              HasSubstr("'a' twice"));
  EXPECT_THAT(message(Topology::Create({"a"}, {0, 1}, {link})), HasSubstr("rank 1 in region 1"));
  EXPECT_THAT(message(Topology::Create({"a"}, {0}, {{0, link.delay}})), HasSubstr("above 0"));
  EXPECT_THAT(message(Topology::Create({"a"}, {0}, {{1, absl::Seconds(-1)}})),
              HasSubstr("not negative"));
  EXPECT_TRUE(Topology::Create({"a"}, {0}, {link}).ok());
}

TEST(Topology, FingerprintTellsTopologiesApart) {
  std::set<std::string> seen;
  seen.insert(Azure4().Fingerprint());
  seen.insert(Azure4({0, 1, 3, 2}).Fingerprint());
  seen.insert(Azure4({0, 1, 2, 3, 3}).Fingerprint());
  seen.insert(Azure4({0, 1, 2, 3}, 2).Fingerprint());
  seen.insert(Topology::Flat(4).Fingerprint());
  seen.insert(Topology::Flat(5).Fingerprint());
  EXPECT_EQ(seen.size(), 6);
  EXPECT_EQ(Azure4().Fingerprint(), Azure4().Fingerprint());
  // Equal on every machine and in every release that speaks to this one.
  EXPECT_EQ(Topology::Flat(2).Fingerprint().size(), 16);
}

TEST(Topology, LinksAreByDirection) {
  const auto t = Topology::Create({"a", "b"}, {1, 0}, {{1, {}}, {2, {}}, {3, {}}, {4, {}}});
  ASSERT_TRUE(t.ok());
  EXPECT_EQ(t->link(0, 1).bytes_per_s, 3);  // from region b to region a
  EXPECT_EQ(t->link(1, 0).bytes_per_s, 2);
  EXPECT_EQ(t->link(0, 0).bytes_per_s, 4);
}

TEST(Builder, DependenciesFollowFromMemory) {
  ProgramBuilder builder({.collective = Collective::kAllReduce}, "test", 0, 2);
  const Chunk tmp = builder.Plain(Output());
  const uint32_t recv = builder.Recv(1, tmp);
  const uint32_t send = builder.Send(Output(), 1);
  const Chunk tmp_half{tmp.buffer, tmp.block, 0, 2};
  const uint32_t half = builder.Reduce(Output(0, 0, 2), {Output(0, 0, 2), tmp_half});
  const uint32_t other = builder.Send(Output(0, 1, 2), 1);
  const uint32_t all = builder.Reduce(Output(), {tmp, Output()});
  const Program program = std::move(builder).Build();
  EXPECT_THAT(program.steps[recv].after, ElementsAre());
  EXPECT_THAT(program.steps[send].after, ElementsAre());
  EXPECT_THAT(program.steps[half].after, UnorderedElementsAre(recv, send));
  EXPECT_THAT(program.steps[other].after, ElementsAre());  // reads, as `send` does
  EXPECT_THAT(program.steps[all].after, UnorderedElementsAre(half, other));
  EXPECT_EQ(program.steps[send].message, 0);
  EXPECT_EQ(program.steps[other].message, 1);
}

// Where the output may be the memory of the input, it is written after the input is read.
TEST(Builder, SharedMemoryIsMinded) {
  ProgramBuilder builder({.collective = Collective::kSignAllReduce}, "test", 0, 1, 4096);
  const uint32_t read = builder.Encode(builder.Code(Input(), false), Input());
  const Chunk sum = builder.Accumulator(Output(), false);
  const uint32_t write = builder.DecodeFinish(Output(), sum);
  EXPECT_THAT(std::move(builder).Build().steps[write].after, ElementsAre(read));
}

TEST(RingOrder, RegionsStayTogetherAndTheThinLinkIsAvoided) {
  // Four regions; 0-1 and 2-3 are thin, so the ring is 0 2 1 3.
  std::vector<Link> links(16, {1e9, absl::Milliseconds(10)});
  for (const auto& [a, b] : {std::pair{0, 1}, {2, 3}}) {
    links[a * 4 + b] = links[b * 4 + a] = {1e6, absl::Milliseconds(10)};
  }
  const auto t = Topology::Create({"a", "b", "c", "d"}, {0, 1, 2, 3, 0, 1, 2, 3}, links);
  ASSERT_TRUE(t.ok());
  EXPECT_THAT(RingOrder(*t, 1 << 24), ElementsAre(0, 4, 2, 6, 1, 5, 3, 7));
}

TEST(RingOrder, FollowsLinksByDirection) {
  // Only 0 -> 2 -> 1 -> 0 is quick.
  std::vector<Link> links(9, {1e6, absl::Milliseconds(100)});
  links[0 * 3 + 2] = links[2 * 3 + 1] = links[1 * 3 + 0] = {1e9, absl::Milliseconds(1)};
  const auto t = Topology::Create({"a", "b", "c"}, {0, 1, 2}, links);
  EXPECT_THAT(RingOrder(*t, 1 << 20), ElementsAre(0, 2, 1));
}

TEST(RingOrder, ManyRegions) {
  // Twelve regions on a circle: the delay grows with the distance, and the regions are shuffled.
  const std::vector<int> place = {0, 7, 3, 10, 5, 1, 8, 11, 2, 6, 9, 4};
  std::vector<Link> links;
  std::vector<std::string> names;
  std::vector<int> region_of;
  for (int a = 0; a < 12; ++a) {
    names.push_back(absl::StrCat("r", a));
    region_of.push_back(a);
    for (int b = 0; b < 12; ++b) {
      const int apart = std::abs(place[a] - place[b]);
      links.push_back({1e9, absl::Milliseconds(10 * std::min(apart, 12 - apart) + 1)});
    }
  }
  const std::vector<int> order = RingOrder(*Topology::Create(names, region_of, links), 1 << 20);
  for (int i = 0; i < 12; ++i) {
    const int apart = std::abs(place[order[i]] - place[order[(i + 1) % 12]]);
    EXPECT_TRUE(apart == 1 || apart == 11) << "between places " << i << " and " << i + 1;
  }
}

TEST(Peers, SlowestFirst) {
  EXPECT_THAT(PeersSlowestFirst(Azure4(), 0), ElementsAre(3, 1, 2));
  EXPECT_THAT(PeersSlowestFirst(Topology::Flat(4), 2), ElementsAre(3, 0, 1));
}

TEST(ToString, NamesEverything) {
  const Program program =
      DirectReduce({.collective = Collective::kReduce, .root = 1}, Topology::Flat(3), 1);
  EXPECT_EQ(ToString(program),
            "direct reduce, rank 1 of 3: 0 input and 1 output blocks, 2 scratch blocks\n"
            "  tmp[0]: plain like out[0]\n"
            "  tmp[1]: plain like out[0]\n"
            "   0  recv          tmp[0] <- rank 2 #0\n"
            "   1  recv          tmp[1] <- rank 0 #0\n"
            "   2  reduce        out[0] = tmp[1] op out[0] op tmp[0]  after 0,1\n");
}

}  // namespace
}  // namespace geomesh::plan
