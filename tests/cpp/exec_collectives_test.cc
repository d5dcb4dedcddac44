// Every algorithm of every collective, on real bytes: against a reduction with real numbers, with
// identical bits on all ranks, whatever order messages arrive in.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "exec_values.h"
#include "fake_world.h"
#include "plan/algorithms.h"
#include "plan/compile.h"

namespace geomesh {
namespace {

using exec::Block;
using exec::Call;
using exec::ReduceOp;
using plan::Collective;
using testing::CallResult;
using testing::FakeWorld;
using testing::Load;
using testing::PendingCall;
using testing::Store;

using Buffer = std::vector<std::byte>;

struct Setting {
  Collective collective = Collective::kAllReduce;
  int root = 0;
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;
  // Elements of the block that goes from `from` to `to` (equal for all where the collective says).
  std::function<int64_t(int from, int to)> elements = {};
  bool share = false;  // input and output memory, as program.h allows
};

bool Reduces(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduce ||
         collective == Collective::kReduceScatter;
}

bool IsUnsigned(DType dtype) {
  return dtype == DType::kU8 || dtype == DType::kU16 || dtype == DType::kU32 ||
         dtype == DType::kU64;
}

// Small integers, exact in every dtype; products of up to 8 of them too.
double Value(const Setting& s, uint64_t salt, int from, int to, int64_t i) {
  uint64_t x = salt * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(from) * 0xbf58476d1ce4e5b9u +
               static_cast<uint64_t>(to) * 0x94d049bb133111ebu + static_cast<uint64_t>(i);
  x = (x ^ (x >> 31)) * 0xd6e8feb86659fd93u;
  x ^= x >> 32;
  if (s.dtype == DType::kBool) return static_cast<double>(x % 2);
  if (s.op == ReduceOp::kProduct) return x % 16 == 0 ? 2 : 1;
  if (IsUnsigned(s.dtype)) return static_cast<double>(x % 16);
  return static_cast<double>(x % 13) - 6;
}

// One rank's memory for a call, and what it should hold afterwards.
struct RankMemory {
  std::vector<Buffer> input, output;
  std::vector<std::vector<double>> expected;  // one a block of output
  std::vector<Buffer> expected_bytes;
  std::vector<Buffer> input_before;
};

std::vector<double> BlockValues(const Setting& s, uint64_t salt, int from, int to) {
  std::vector<double> values(static_cast<size_t>(s.elements(from, to)));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = Value(s, salt, from, to, static_cast<int64_t>(i));
  }
  return values;
}

Buffer Pack(DType dtype, const std::vector<double>& values) {
  Buffer bytes(values.size() * SizeOf(dtype));
  for (size_t i = 0; i < values.size(); ++i) Store(dtype, values[i], &bytes[i * SizeOf(dtype)]);
  return bytes;
}

std::vector<double> Reduced(const Setting& s, uint64_t salt, int world, int to) {
  std::vector<double> result(static_cast<size_t>(s.elements(0, to)));
  for (size_t i = 0; i < result.size(); ++i) {
    std::vector<double> all;
    for (int from = 0; from < world; ++from) {
      all.push_back(Value(s, salt, from, to, static_cast<int64_t>(i)));
    }
    result[i] = testing::ReduceAll(s.op, s.dtype, all);
  }
  return result;
}

RankMemory MakeMemory(const Setting& s, uint64_t salt, int rank, int world) {
  RankMemory m;
  const auto values = [&](int from, int to) { return BlockValues(s, salt, from, to); };
  const auto in = [&](int from, int to) { m.input.push_back(Pack(s.dtype, values(from, to))); };
  const auto out = [&](std::vector<double> expected, const std::vector<double>* start = nullptr) {
    m.output.push_back(start == nullptr ? Buffer(expected.size() * SizeOf(s.dtype), std::byte{0x55})
                                        : Pack(s.dtype, *start));
    m.expected_bytes.push_back(Pack(s.dtype, expected));
    m.expected.push_back(std::move(expected));
  };
  const bool is_root = rank == s.root;
  const std::vector<double> own = values(rank, 0);
  switch (s.collective) {
    case Collective::kAllReduce:
      out(Reduced(s, salt, world, 0), &own);
      break;
    case Collective::kBroadcast:
      out(values(s.root, 0), &own);
      break;
    case Collective::kReduce:
      out(is_root ? Reduced(s, salt, world, 0) : own, &own);
      break;
    case Collective::kAllGather:
      in(rank, 0);
      for (int from = 0; from < world; ++from) out(values(from, 0));
      break;
    case Collective::kReduceScatter:
      for (int to = 0; to < world; ++to) in(rank, to);
      out(Reduced(s, salt, world, rank));
      break;
    case Collective::kGather:
      in(rank, 0);
      for (int from = 0; is_root && from < world; ++from) out(values(from, 0));
      break;
    case Collective::kScatter:
      for (int to = 0; is_root && to < world; ++to) in(rank, to);
      out(values(s.root, rank));
      break;
    case Collective::kAllToAll:
      for (int to = 0; to < world; ++to) in(rank, to);
      for (int from = 0; from < world; ++from) out(values(from, rank));
      break;
    default:
      break;
  }
  if (s.share) {  // the input's values, in the output's memory
    if (s.collective == Collective::kAllGather) m.output[rank] = m.input[0];
    if (s.collective == Collective::kReduceScatter) m.output[0] = m.input[rank];
  }
  m.input_before = m.input;
  return m;
}

Call MakeCall(const Setting& s, const plan::Program& program, RankMemory& m, int rank,
              uint64_t sequence) {
  Call call;
  call.program = std::make_shared<plan::Program>(program);
  call.dtype = s.dtype;
  call.op = Reduces(s.collective) ? s.op : ReduceOp::kSum;
  const auto blocks = [&](std::vector<Buffer>& buffers) {
    std::vector<Block> result;
    for (Buffer& b : buffers) {
      result.push_back({b.data(), static_cast<int64_t>(b.size() / SizeOf(s.dtype))});
    }
    return result;
  };
  call.input = blocks(m.input);
  call.output = blocks(m.output);
  if (s.share && s.collective == Collective::kAllGather) call.input[0] = call.output[rank];
  if (s.share && s.collective == Collective::kReduceScatter) call.input[rank] = call.output[0];
  call.sequence = sequence;
  call.operation = plan::Name(s.collective);
  return call;
}

void Check(const Setting& s, const RankMemory& m, int rank, int world) {
  ASSERT_EQ(m.output.size(), m.expected.size());
  const bool rounds = s.op == ReduceOp::kAvg && SizeOf(s.dtype) == 2;
  for (size_t b = 0; b < m.output.size(); ++b) {
    if (m.output[b] == m.expected_bytes[b]) continue;
    for (size_t i = 0; i < m.expected[b].size(); ++i) {
      const double expected = Load(s.dtype, &m.expected_bytes[b][i * SizeOf(s.dtype)]);
      // Half a unit in the last place for each of the sum's roundings.
      const double unit = s.dtype == DType::kF16 ? 0x1p-10 : 0x1p-7;
      ASSERT_NEAR(Load(s.dtype, &m.output[b][i * SizeOf(s.dtype)]), expected,
                  rounds ? 6 * world * unit / 2 : 0)
          << "rank " << rank << " of " << world << ", block " << b << ", element " << i;
    }
  }
  // Inputs are the caller's.
  for (size_t b = 0; b < m.input.size(); ++b) ASSERT_EQ(m.input[b], m.input_before[b]);
}

// Four ranks a region at most, links of different speeds, so that every algorithm has its case.
plan::Topology Regions(int world) {
  const int regions = world < 4 ? std::max(world, 1) : 3;
  std::vector<std::string> names;
  std::vector<int> region_of;
  std::vector<plan::Link> links;
  for (int r = 0; r < regions; ++r) names.push_back(absl::StrCat("region", r));
  for (int rank = 0; rank < world; ++rank) region_of.push_back(rank % regions);
  for (int a = 0; a < regions; ++a) {
    for (int b = 0; b < regions; ++b) {
      links.push_back({a == b ? 12.5e9 : 1e7 * (1 + a + b), absl::Milliseconds(a == b ? 0 : 20)});
    }
  }
  return *plan::Topology::Create(names, region_of, links);
}

constexpr int64_t kSizes[] = {0, 1, 7, 64, 65, 1000, 4097};
constexpr int64_t kLarge = 300001;

class CollectivesTest : public ::testing::TestWithParam<int> {
 protected:
  CollectivesTest() : world_(GetParam()), executors_(world_.MakeExecutors(77)) {}

  std::vector<RankMemory> MakeAllMemory(const Setting& s) {
    ++salt_;
    std::vector<RankMemory> memory;
    for (int rank = 0; rank < world_.world(); ++rank) {
      memory.push_back(MakeMemory(s, salt_, rank, world_.world()));
    }
    return memory;
  }

  // Runs the call on all ranks and checks what came of it.
  void Run(const Setting& s, const std::vector<plan::Program>& programs,
           std::vector<RankMemory> memory) {
    const int world = world_.world();
    const uint64_t sequence = ++sequence_;
    std::vector<PendingCall> calls;
    for (int rank = 0; rank < world; ++rank) {
      calls.push_back(testing::Start(*executors_[rank],
                                     MakeCall(s, programs[rank], memory[rank], rank, sequence)));
    }
    for (int rank = 0; rank < world; ++rank) {
      const CallResult& result = calls[rank].Wait();
      ASSERT_TRUE(result.status.ok()) << result.status;
      sent_ += result.outcome.bytes_sent;
      received_ += result.outcome.bytes_received;
    }
    for (int rank = 0; rank < world; ++rank) Check(s, memory[rank], rank, world);
    if (s.collective == Collective::kAllReduce) {
      for (int rank = 1; rank < world; ++rank) {
        ASSERT_EQ(memory[rank].output[0], memory[0].output[0]) << "rank " << rank;
      }
    }
    EXPECT_EQ(sent_, received_);
  }

  // By every algorithm that the collective has.
  void RunLarge(Setting s) {
    const bool one_block = s.collective == Collective::kAllReduce ||
                           s.collective == Collective::kReduce ||
                           s.collective == Collective::kBroadcast;
    RunAll(std::move(s), one_block ? kLarge : kLarge / world_.world());
  }

  void RunAll(Setting s, int64_t elements) {
    s.elements = [elements](int, int) { return elements; };
    plan::CallShape shape;
    shape.collective = s.collective;
    shape.root = s.root;
    shape.bytes = elements * static_cast<int64_t>(SizeOf(s.dtype));
    const std::vector<RankMemory> memory = MakeAllMemory(s);
    for (const plan::Algorithm algorithm : plan::Candidates(shape)) {
      const auto programs = plan::ForAllRanks(algorithm, shape, Regions(world_.world()));
      SCOPED_TRACE(absl::StrCat(programs[0].name, ", ", elements, " x ", Name(s.dtype).data(), ", ",
                                exec::Name(s.op).data(), ", root ", s.root));
      ASSERT_NO_FATAL_FAILURE(Run(s, programs, memory));
    }
  }

  void ShuffleLinks(std::mt19937& random) {
    for (int a = 0; a < world_.world(); ++a) {
      for (int b = a + 1; b < world_.world(); ++b) {
        for (int lane = 0; lane < 4; ++lane) {
          transport::FakeNetwork::Link link;
          link.delay = absl::Microseconds(random() % 4 == 0 ? random() % 4000 : 0);
          world_.network().SetLink(FakeWorld::WireName(a), FakeWorld::WireName(b), lane, link);
        }
      }
    }
  }

  FakeWorld world_;
  std::vector<std::unique_ptr<exec::Executor>> executors_;
  uint64_t sequence_ = 0, salt_ = 0;
  uint64_t sent_ = 0, received_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Worlds, CollectivesTest, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(CollectivesTest, ReductionsOfEverySize) {
  for (const Collective collective :
       {Collective::kAllReduce, Collective::kReduce, Collective::kReduceScatter}) {
    for (const auto& [dtype, op] :
         {std::pair(DType::kF32, ReduceOp::kSum), std::pair(DType::kF16, ReduceOp::kAvg)}) {
      Setting s{.collective = collective, .root = world_.world() - 1, .dtype = dtype, .op = op};
      for (const int64_t elements : kSizes) RunAll(s, elements);
      if (dtype == DType::kF32) RunLarge(s);
    }
  }
}

TEST_P(CollectivesTest, EveryDtypeAndOp) {
  for (const DType dtype :
       {DType::kF32, DType::kF64, DType::kF16, DType::kBF16, DType::kI8, DType::kI16, DType::kI32,
        DType::kI64, DType::kU8, DType::kBool, DType::kU16, DType::kU32, DType::kU64}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin,
                              ReduceOp::kMax, ReduceOp::kBand, ReduceOp::kBor, ReduceOp::kBxor}) {
      if (!exec::Supported(op, dtype).ok()) continue;
      for (const Collective collective :
           {Collective::kAllReduce, Collective::kReduce, Collective::kReduceScatter}) {
        RunAll({.collective = collective, .root = 0, .dtype = dtype, .op = op}, 203);
      }
    }
  }
}

TEST_P(CollectivesTest, Movements) {
  for (const Collective collective :
       {Collective::kBroadcast, Collective::kAllGather, Collective::kGather, Collective::kScatter,
        Collective::kAllToAll}) {
    for (const DType dtype : {DType::kF32, DType::kU8}) {
      for (const int root : {0, world_.world() - 1}) {
        Setting s{.collective = collective, .root = root, .dtype = dtype};
        for (const int64_t elements : kSizes) RunAll(s, elements);
      }
    }
    RunLarge({.collective = collective, .root = 0, .dtype = DType::kI64});
  }
}

TEST_P(CollectivesTest, BlocksOfDifferentSizes) {
  const int world = world_.world();
  for (const Collective collective :
       {Collective::kAllGather, Collective::kAllToAll, Collective::kGather, Collective::kScatter}) {
    plan::CallShape shape;
    shape.collective = collective;  // bytes 0: ranks may disagree
    std::vector<plan::Program> programs;
    for (int rank = 0; rank < world; ++rank) {
      programs.push_back(*plan::Compile(shape, Regions(world), rank));
    }
    Setting s{.collective = collective, .dtype = DType::kI16};
    s.elements = [collective](int from, int to) -> int64_t {
      const int both = collective == Collective::kAllToAll  ? from * 3 + to * 5
                       : collective == Collective::kScatter ? to * 5
                                                            : from * 3;
      return both % 4 == 0 ? 0 : both * 37 + 1;
    };
    SCOPED_TRACE(programs[0].name);
    Run(s, programs, MakeAllMemory(s));
  }
}

TEST_P(CollectivesTest, InputAndOutputMayShareMemory) {
  for (const Collective collective : {Collective::kAllGather, Collective::kReduceScatter}) {
    for (const auto& [dtype, op] :
         {std::pair(DType::kF32, ReduceOp::kSum), std::pair(DType::kF16, ReduceOp::kAvg)}) {
      for (const int64_t elements : {1, 65, 5000, 60000}) {
        Setting s{.collective = collective, .dtype = dtype, .op = op, .share = true};
        RunAll(s, elements);
      }
    }
  }
}

TEST_P(CollectivesTest, BarrierWaitsForTheLast) {
  const int world = world_.world();
  plan::CallShape shape;
  shape.collective = Collective::kBarrier;
  for (const plan::Algorithm algorithm : plan::Candidates(shape)) {
    const auto programs = plan::ForAllRanks(algorithm, shape, Regions(world));
    const uint64_t sequence = ++sequence_;
    RankMemory none;
    std::vector<PendingCall> calls;
    for (int rank = 0; rank + 1 < world; ++rank) {
      calls.push_back(testing::Start(
          *executors_[rank],
          MakeCall({.collective = shape.collective}, programs[rank], none, rank, sequence)));
    }
    // Time enough for all messages of those that have come (a barrier that does not wait is over).
    absl::SleepFor(absl::Milliseconds(20));
    for (const PendingCall& call : calls) EXPECT_FALSE(call.ended()) << programs[0].name;
    calls.push_back(testing::Start(*executors_[world - 1],
                                   MakeCall({.collective = shape.collective}, programs[world - 1],
                                            none, world - 1, sequence)));
    for (PendingCall& call : calls) EXPECT_TRUE(call.Wait().status.ok()) << call.Wait().status;
  }
}

// Real numbers, whose sum depends on the order: the bits must be those of the first run.
TEST_P(CollectivesTest, ArrivalOrderDoesNotChangeBits) {
  const int world = world_.world();
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  const int64_t elements = 3001;
  std::vector<std::vector<float>> contributions(world, std::vector<float>(elements));
  for (auto& c : contributions) {
    for (float& v : c) v = normal(random) * 1000;
  }
  plan::CallShape shape;
  shape.bytes = elements * 4;
  for (const plan::Algorithm algorithm : plan::Candidates(shape)) {
    const auto programs = plan::ForAllRanks(algorithm, shape, Regions(world));
    SCOPED_TRACE(programs[0].name);
    std::vector<float> first;
    for (int round = 0; round < 6; ++round) {
      if (round > 0) ShuffleLinks(random);
      const uint64_t sequence = ++sequence_;
      auto data = contributions;
      std::vector<PendingCall> calls(world);
      std::vector<int> order(world);
      for (int r = 0; r < world; ++r) order[r] = r;
      std::shuffle(order.begin(), order.end(), random);
      for (const int rank : order) {
        RankMemory none;
        Call call = MakeCall({}, programs[rank], none, rank, sequence);
        call.output = {{reinterpret_cast<std::byte*>(data[rank].data()), elements}};
        calls[rank] = testing::Start(*executors_[rank], std::move(call));
      }
      for (PendingCall& call : calls) ASSERT_TRUE(call.Wait().status.ok()) << call.Wait().status;
      if (round == 0) first = data[0];
      for (const auto& result : data) {
        ASSERT_EQ(std::memcmp(result.data(), first.data(), elements * sizeof(float)), 0);
      }
    }
    for (int64_t i = 0; i < elements; ++i) {
      double sum = 0;
      for (const auto& c : contributions) sum += c[i];
      ASSERT_NEAR(first[i], sum, 2e-3);
    }
  }
}

TEST_P(CollectivesTest, AverageDoesNotOverflow) {
  const int world = world_.world();
  for (const auto& [dtype, value] :
       {std::pair(DType::kF16, 30000.0), std::pair(DType::kBF16, std::ldexp(225, 120))}) {
    Setting s{.dtype = dtype, .op = ReduceOp::kAvg};
    plan::CallShape shape;
    shape.bytes = 2000;
    for (const plan::Algorithm algorithm : plan::Candidates(shape)) {
      const auto programs = plan::ForAllRanks(algorithm, shape, Regions(world));
      const uint64_t sequence = ++sequence_;
      std::vector<Buffer> data(world, Pack(dtype, std::vector<double>(1000, value)));
      std::vector<PendingCall> calls;
      for (int rank = 0; rank < world; ++rank) {
        RankMemory none;
        Call call = MakeCall(s, programs[rank], none, rank, sequence);
        call.output = {{data[rank].data(), 1000}};
        calls.push_back(testing::Start(*executors_[rank], std::move(call)));
      }
      for (PendingCall& call : calls) ASSERT_TRUE(call.Wait().status.ok()) << call.Wait().status;
      const double result = Load(dtype, data[0].data());
      if (world == 1 || world == 2 || world == 4) {
        EXPECT_EQ(result, value) << programs[0].name;
      } else {
        EXPECT_NEAR(result / value, 1, world * 0x1p-8) << programs[0].name;
      }
      for (const Buffer& other : data) EXPECT_EQ(other, data[0]);
    }
  }
}

}  // namespace
}  // namespace geomesh
