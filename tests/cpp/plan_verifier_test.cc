// Every algorithm passes the verifier, for many worlds, roots, topologies and sizes; and every kind
// of damage to a program is found.
#include "plan/verifier.h"

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "plan/algorithms.h"
#include "plan_topologies.h"

namespace geomesh::plan {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr Collective kCollectives[] = {
    Collective::kAllReduce,     Collective::kBroadcast,     Collective::kReduce,
    Collective::kAllGather,     Collective::kReduceScatter, Collective::kGather,
    Collective::kScatter,       Collective::kAllToAll,      Collective::kBarrier,
    Collective::kSignAllReduce,
};

bool BlocksMayDiffer(Collective c) {
  return c == Collective::kAllGather || c == Collective::kReduceScatter ||
         c == Collective::kGather || c == Collective::kScatter || c == Collective::kAllToAll;
}

// Sizes with remainders, empty slices, single elements, and none at all; fewer for large worlds.
std::vector<VerifySizes> SizesFor(Collective c, int world) {
  std::vector<VerifySizes> sizes = {{65}, {123457}};
  if (world < 9) sizes.insert(sizes.end(), {{0}, {1}, {1000}});
  if (BlocksMayDiffer(c)) {
    sizes.push_back({1000, true});
    if (world < 9) sizes.push_back({3, true});
  }
  return sizes;
}

// All of a small world; of a larger one the first, the last and two between.
std::vector<int> RootsFor(Collective c, int world) {
  if (!HasRoot(c)) return {0};
  if (world >= 9) return {0, 6, 7, world - 1};
  std::vector<int> roots;
  for (int r = 0; r < world; ++r) roots.push_back(r);
  return roots;
}

class EveryAlgorithm : public ::testing::TestWithParam<int> {};

TEST_P(EveryAlgorithm, IsRight) {
  const int world = GetParam();
  for (const auto& [topology_name, topology] : Topologies(world)) {
    for (const Collective collective : kCollectives) {
      for (const int root : RootsFor(collective, world)) {
        std::set<std::pair<std::string, size_t>> seen;  // most programs are the same for all sizes
        for (const int64_t bytes : {int64_t{0}, int64_t{1} << 20, int64_t{1} << 27}) {
          const CallShape shape{.collective = collective, .bytes = bytes, .root = root};
          for (const Algorithm algorithm : Candidates(shape)) {
            const std::vector<Program> programs = ForAllRanks(algorithm, shape, topology);
            if (!seen.emplace(programs[0].name, programs[0].steps.size()).second) continue;
            for (const VerifySizes& sizes : SizesFor(collective, world)) {
              const absl::Status status = Verify(shape, programs, sizes);
              ASSERT_TRUE(status.ok())
                  << programs[0].name << ", " << topology_name << ", root " << root << ", "
                  << sizes.elements << (sizes.uneven ? " uneven" : "") << " elements: " << status;
            }
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, EveryAlgorithm,
                         ::testing::Values(1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17));

TEST(SendRecv, IsRight) {
  const Topology topology = Topology::Flat(3);
  std::vector<Program> programs(3);
  for (int r = 0; r < 3; ++r) {
    programs[r].rank = r;
    programs[r].world = 3;
    programs[r].output_blocks = 0;
  }
  CallShape shape{.collective = Collective::kSendRecv, .root = 2, .sending = true};
  programs[0] = *Compile(shape, topology, 0);
  shape.sending = false;
  shape.root = 0;
  programs[2] = *Compile(shape, topology, 2);
  shape.root = 2;
  EXPECT_TRUE(Verify(shape, programs, {}).ok()) << Verify(shape, programs, {});
  programs[2].steps.clear();
  EXPECT_THAT(Verify(shape, programs, {}).message(), HasSubstr("nobody receives"));
}

TEST(EveryCall, OfRandomTopologiesIsRight) {
  std::mt19937 random(20240607);
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  for (int round = 0; round < 25; ++round) {
    const int world = 1 + below(12), regions = 1 + below(5);
    std::vector<std::string> names;
    std::vector<int> region_of;
    std::vector<Link> links;
    for (int a = 0; a < regions; ++a) names.push_back(absl::StrCat("r", a));
    for (int r = 0; r < world; ++r) region_of.push_back(below(regions));
    for (int l = 0; l < regions * regions; ++l) {
      links.push_back(Gbit(0.01 * (1 + below(10000)), below(300)));
    }
    const auto topology = Topology::Create(names, region_of, links);
    ASSERT_TRUE(topology.ok());
    for (const Collective collective : kCollectives) {
      const CallShape shape{
          .collective = collective, .bytes = int64_t{1} << below(31), .root = below(world)};
      std::vector<Program> programs;
      for (int r = 0; r < world; ++r) programs.push_back(*Compile(shape, *topology, r));
      const VerifySizes sizes{below(200000), BlocksMayDiffer(collective) && below(2) == 0};
      const absl::Status status = Verify(shape, programs, sizes);
      ASSERT_TRUE(status.ok()) << "round " << round << ", " << programs[0].name << ": " << status;
    }
  }
}

constexpr VerifySizes kSizes{50000};

// ---- What the errors say ----

Program Empty(Collective collective, int rank, int world) {
  return std::move(ProgramBuilder({.collective = collective}, "test", rank, world)).Build();
}

TEST(Errors, NameRankAndStep) {
  const CallShape shape{.collective = Collective::kAllReduce};
  std::vector<Program> programs = ForAllRanks(DirectAllReduce, shape, Topology::Flat(2));
  programs[1].steps[2].after = {1};
  EXPECT_EQ(
      Verify(shape, programs, {}).message(),
      "rank 1, step 2 (reduce        out[0] = tmp[0] op out[0]  after 1): may run at the same "
      "time as step 0 (recv          tmp[0] <- rank 0 #0), on the same elements");
}

TEST(Errors, AReductionOfOneOperand) {
  const CallShape shape{.collective = Collective::kAllReduce};
  std::vector<Program> programs = ForAllRanks(DirectAllReduce, shape, Topology::Flat(2));
  programs[1].steps[2].operands.resize(1);
  EXPECT_EQ(Verify(shape, programs, {}).message(),
            "rank 1, step 2 (reduce        out[0] = tmp[0]  after 0,1): reduces fewer than two "
            "operands");
}

// A program that says that a sum is rounded once must not round on the way.
TEST(Errors, SumsOfSumsWhereAllIsAddedAtOnce) {
  const CallShape shape{.collective = Collective::kAllReduce, .bytes = 1 << 20};
  for (const Algorithm algorithm : {RingAllReduce, TreeAllReduce, RecursiveDoublingAllReduce}) {
    std::vector<Program> programs = ForAllRanks(algorithm, shape, Topology::Flat(4));
    EXPECT_TRUE(Verify(shape, programs, kSizes).ok());
    for (Program& program : programs) program.sums_once = true;
    EXPECT_THAT(Verify(shape, programs, kSizes).message(),
                HasSubstr("adds up some contributions only"))
        << programs[0].name;
  }
}

// Both ranks add up the same two contributions, but each with its own on the left.
TEST(Errors, AnotherOrderOnAnotherRank) {
  const CallShape shape{.collective = Collective::kAllReduce};
  std::vector<Program> programs;
  for (int rank = 0; rank < 2; ++rank) {
    ProgramBuilder builder(shape, "careless all-reduce", rank, 2);
    const Chunk other = builder.Plain(Output());
    builder.Recv(1 - rank, other);
    builder.Send(Output(), 1 - rank);
    builder.Reduce(Output(), {Output(), other});
    programs.push_back(std::move(builder).Build());
  }
  EXPECT_EQ(Verify(shape, programs, {}).message(),
            "rank 1, output 0: elements from 0 are reduced in another order than on rank 0");
}

TEST(Errors, Deadlock) {
  const CallShape shape{.collective = Collective::kAllGather};
  std::vector<Program> programs;
  for (int rank = 0; rank < 2; ++rank) {
    ProgramBuilder builder(shape, "impatient all-gather", rank, 2);
    const uint32_t sent = builder.Send(Input(), 1 - rank);
    builder.Recv(1 - rank, Output(1 - rank), {sent});
    builder.Copy(Output(rank), Input());
    programs.push_back(std::move(builder).Build());
  }
  EXPECT_EQ(Verify(shape, programs, {}).message(),
            "rank 0, step 0 (send          in[0] -> rank 1 #0): deadlock: its counterpart on the "
            "peer never starts");
}

TEST(Errors, ReadBeforeWritten) {
  const CallShape shape{.collective = Collective::kAllGather};
  ProgramBuilder builder(shape, "test", 0, 1);
  builder.Copy(Output(0), builder.Plain(Input()));
  EXPECT_THAT(Verify(shape, {std::move(builder).Build()}, {}).message(),
              HasSubstr("reads tmp[0] before it was written"));
}

TEST(Errors, OutputMissingOrWrong) {
  const CallShape shape{.collective = Collective::kAllReduce};
  EXPECT_EQ(
      Verify(shape, {Empty(Collective::kAllReduce, 0, 2), Empty(Collective::kAllReduce, 1, 2)}, {})
          .message(),
      "rank 0, output 0: elements 0 to 1000 hold the contributions of ranks 0; expected 0,1");
  const CallShape gather{.collective = Collective::kAllGather};
  EXPECT_EQ(Verify(gather, {Empty(Collective::kAllGather, 0, 1)}, {}).message(),
            "rank 0, output 0: not all elements were written");
  const CallShape barrier{.collective = Collective::kBarrier};
  EXPECT_EQ(
      Verify(barrier, {Empty(Collective::kBarrier, 0, 2), Empty(Collective::kBarrier, 1, 2)}, {})
          .message(),
      "rank 0 leaves the barrier without rank 1");
}

// In place, the output is written while the codes are still made of the input.
TEST(Errors, SharedMemoryOverwritten) {
  const CallShape shape{.collective = Collective::kSignAllReduce};
  std::vector<Program> programs = ForAllRanks(SignReduceAndRecode, shape, Topology::Flat(2));
  bool damaged = false;
  for (Step& step : programs[0].steps) {
    if (step.kind != StepKind::kDecodeFinish || step.after.size() < 2) continue;
    step.after.erase(step.after.begin());  // the encoding of the slice
    damaged = true;
  }
  ASSERT_TRUE(damaged);
  EXPECT_THAT(Verify(shape, programs, {50000}).message(),
              AllOf(HasSubstr("decode-finish"), HasSubstr("may run at the same time"),
                    HasSubstr("(encode ")));
}

TEST(Errors, MalformedPrograms) {
  const CallShape shape{.collective = Collective::kAllReduce};
  const std::vector<Program> good = ForAllRanks(DirectAllReduce, shape, Topology::Flat(2));
  const auto error = [&](auto damage) {
    std::vector<Program> programs = good;
    damage(programs[0]);
    return std::string(Verify(shape, programs, {}).message());
  };
  EXPECT_THAT(error([](Program& p) { p.rank = 1; }), HasSubstr("its program is for rank 1 of 2"));
  EXPECT_THAT(error([](Program& p) { p.granule = 0; }), HasSubstr("granule"));
  EXPECT_THAT(error([](Program& p) { p.output_blocks = 2; }), HasSubstr("do not fit all-reduce"));
  EXPECT_THAT(error([](Program& p) { p.steps[0].dst.block = 9; }), HasSubstr("out of bounds"));
  EXPECT_THAT(error([](Program& p) { p.steps[0].dst.slices = 0; }), HasSubstr("is no slice"));
  EXPECT_THAT(error([](Program& p) { p.steps[0].peer = 0; }), HasSubstr("no such peer"));
  EXPECT_THAT(error([](Program& p) { p.steps[0].peer = 2; }), HasSubstr("no such peer"));
  EXPECT_THAT(error([](Program& p) { p.steps[1].after = {1}; }), HasSubstr("is not before it"));
  EXPECT_THAT(error([](Program& p) { p.scratch[0].like = p.steps[0].dst; }),
              HasSubstr("scratch can't be like scratch"));
  EXPECT_THAT(error([](Program& p) { p.scratch[0].kind = ScratchKind::kEncoded; }),
              HasSubstr("wrong kind"));
  EXPECT_THAT(error([](Program& p) { p.steps[1].src = Output(0, 0, 2); }),
              HasSubstr("sends 512 elements, but rank 1, step 0 expects 1000"));
  EXPECT_THAT(error([](Program& p) { p.steps.push_back(p.steps[1]); }),
              HasSubstr("this message exists twice"));
}

// ---- Damage ----

struct Call {
  CallShape shape;
  std::vector<Program> programs;
};

std::vector<Call> Calls(int world) {
  std::vector<Call> calls;
  for (const auto& [name, topology] : Topologies(world)) {
    for (const Collective collective : kCollectives) {
      const CallShape shape{.collective = collective, .bytes = 1 << 24, .root = world - 1};
      for (const Algorithm algorithm : Candidates(shape)) {
        calls.push_back({shape, ForAllRanks(algorithm, shape, topology)});
      }
    }
  }
  return calls;
}

// What a step reads and writes.
template <typename AnyStep>
auto ChunksOf(AnyStep& step) {
  std::vector<decltype(&step.dst)> chunks;
  if (WritesDestination(step.kind)) chunks.push_back(&step.dst);
  for (auto& operand : step.operands) chunks.push_back(&operand);
  if (step.kind != StepKind::kRecv && step.kind != StepKind::kReduce) chunks.push_back(&step.src);
  return chunks;
}

// Removes step `index`; those that waited for it wait for what it waited for, so that only the step
// itself is missing.
void Drop(Program& program, uint32_t index) {
  const auto inherited = program.steps[index].after;
  program.steps.erase(program.steps.begin() + index);
  for (uint32_t i = index; i < program.steps.size(); ++i) {
    std::set<uint32_t> after;
    for (const uint32_t a : program.steps[i].after) {
      if (a == index) {
        after.insert(inherited.begin(), inherited.end());
      } else {
        after.insert(a > index ? a - 1 : a);
      }
    }
    program.steps[i].after.assign(after.begin(), after.end());
  }
}

TEST(Damage, AnyMissingStepIsFound) {
  int tried = 0;
  for (const Call& call : Calls(4)) {
    for (size_t r = 0; r < call.programs.size(); ++r) {
      for (uint32_t i = 0; i < call.programs[r].steps.size(); ++i) {
        std::vector<Program> damaged = call.programs;
        Drop(damaged[r], i);
        EXPECT_FALSE(Verify(call.shape, damaged, kSizes).ok())
            << call.programs[r].name << ", rank " << r << " without step " << i;
        ++tried;
      }
    }
  }
  EXPECT_GT(tried, 1000);
}

TEST(Damage, AnyOtherPeerIsFound) {
  for (const Call& call : Calls(4)) {
    for (size_t r = 0; r < call.programs.size(); ++r) {
      for (uint32_t i = 0; i < call.programs[r].steps.size(); ++i) {
        if (call.programs[r].steps[i].peer < 0) continue;
        std::vector<Program> damaged = call.programs;
        int32_t& peer = damaged[r].steps[i].peer;
        peer = (peer + 1) % 4 == static_cast<int>(r) ? (peer + 2) % 4 : (peer + 1) % 4;
        EXPECT_FALSE(Verify(call.shape, damaged, kSizes).ok())
            << call.programs[r].name << ", rank " << r << ", step " << i;
      }
    }
  }
}

// The builder writes no dependency that follows from another, so each one is needed.
TEST(Damage, AnyMissingDependencyIsFound) {
  int tried = 0;
  for (const Call& call : Calls(5)) {
    // In a world of 5 the last round of the dissemination tells some things a second time.
    if (call.shape.collective == Collective::kBarrier) continue;
    for (size_t r = 0; r < call.programs.size(); ++r) {
      for (uint32_t i = 0; i < call.programs[r].steps.size(); ++i) {
        const auto& after = call.programs[r].steps[i].after;
        for (size_t k = 0; k < after.size(); ++k) {
          std::vector<Program> damaged = call.programs;
          auto& fewer = damaged[r].steps[i].after;
          fewer.erase(fewer.begin() + k);
          const absl::Status status = Verify(call.shape, damaged, kSizes);
          EXPECT_FALSE(status.ok()) << call.programs[r].name << ", rank " << r << ", step " << i
                                    << " without waiting for " << after[k];
          ++tried;
        }
      }
    }
  }
  EXPECT_GT(tried, 1000);
}

TEST(Damage, AnyReductionDoneTwiceIsFound) {
  int tried = 0;
  for (const Call& call : Calls(4)) {
    for (size_t r = 0; r < call.programs.size(); ++r) {
      for (uint32_t i = 0; i < call.programs[r].steps.size(); ++i) {
        Step again = call.programs[r].steps[i];
        if (again.kind != StepKind::kReduce && again.kind != StepKind::kDecodeAdd) continue;
        std::vector<Program> damaged = call.programs;
        auto& steps = damaged[r].steps;
        for (uint32_t j = i + 1; j < steps.size(); ++j) {
          for (uint32_t& a : steps[j].after) a += a >= i ? 1 : 0;
        }
        again.after = {i};
        if (again.kind == StepKind::kReduce) again.operands[0] = again.dst;
        steps.insert(steps.begin() + i + 1, again);
        EXPECT_THAT(Verify(call.shape, damaged, kSizes).message(),
                    AllOf(HasSubstr("counts a contribution twice"),
                          HasSubstr(absl::StrCat("rank ", r, ", step ", i + 1, " "))))
            << call.programs[r].name;
        ++tried;
      }
    }
  }
  EXPECT_GT(tried, 50);
}

TEST(Damage, AnyOtherSliceIsFound) {
  int tried = 0;
  for (const Call& call : Calls(4)) {
    for (size_t r = 0; r < call.programs.size(); ++r) {
      for (uint32_t i = 0; i < call.programs[r].steps.size(); ++i) {
        for (size_t c = 0; c < ChunksOf(call.programs[r].steps[i]).size(); ++c) {
          std::vector<Program> damaged = call.programs;
          Step& step = damaged[r].steps[i];
          Chunk& chunk = *ChunksOf(step)[c];
          if (chunk.slices == 1) continue;
          chunk.slice = (chunk.slice + 1) % chunk.slices;
          EXPECT_FALSE(Verify(call.shape, damaged, kSizes).ok())
              << call.programs[r].name << ", rank " << r << ", step " << i;
          ++tried;
        }
      }
    }
  }
  EXPECT_GT(tried, 100);
}

TEST(Damage, AnyOtherBlockIsFound) {
  int tried = 0;
  for (const Call& call : Calls(4)) {
    for (size_t r = 0; r < call.programs.size(); ++r) {
      const Program& program = call.programs[r];
      for (uint32_t i = 0; i < program.steps.size(); ++i) {
        for (size_t c = 0; c < ChunksOf(call.programs[r].steps[i]).size(); ++c) {
          std::vector<Program> damaged = call.programs;
          Step& step = damaged[r].steps[i];
          Chunk& chunk = *ChunksOf(step)[c];
          const uint32_t blocks = chunk.buffer == Buffer::kInput    ? program.input_blocks
                                  : chunk.buffer == Buffer::kOutput ? program.output_blocks
                                                                    : program.scratch.size();
          if (chunk.block == kNoBlock || blocks < 2) continue;
          chunk.block = (chunk.block + 1) % blocks;
          EXPECT_FALSE(Verify(call.shape, damaged, kSizes).ok())
              << program.name << ", rank " << r << ", step " << i;
          ++tried;
        }
      }
    }
  }
  EXPECT_GT(tried, 100);
}

}  // namespace
}  // namespace geomesh::plan
