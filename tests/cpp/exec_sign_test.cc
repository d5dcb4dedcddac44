// The sign all-reduce: bit for bit what the codec gives in one process, close to the true weighted
// mean, and the same error on all ranks where one has a NaN.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "exec/operation.h"  // Mix
#include "fake_world.h"
#include "plan/algorithms.h"
#include "plan/compile.h"

namespace geomesh {
namespace {

using codec::Piece;
using codec::Range;
using exec::Call;
using exec::Mix;
using ::testing::AllOf;
using testing::FakeWorld;
using ::testing::HasSubstr;
using testing::PendingCall;

// Short rows, or as long as in real embeddings, where the size of the code is looked at.
int64_t RowElements(int64_t elements) { return elements < 1000000 ? 10 : 1000; }

// One rank's contribution: two tensors, one of them with rows.
struct Contribution {
  std::vector<float> anchor, current;
  uint64_t weight = 1;
  std::vector<float> residual;

  std::vector<Piece> Pieces() const {
    const int64_t elements = static_cast<int64_t>(current.size());
    const int64_t row = RowElements(elements);
    const int64_t first = elements / 3 / row * row;
    Piece a, b;
    a.anchor = anchor.data();
    a.current = current.data();
    a.elements = first;
    a.row_elements = row;
    a.name = "embedding.weight";
    b.anchor = anchor.data() + first;
    b.current = current.data() + first;
    b.elements = elements - first;
    b.name = "head.bias";
    return {a, b};
  }
};

std::vector<Contribution> Contributions(int world, int64_t elements, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<Contribution> result(world);
  std::vector<float> common(elements);
  for (float& v : common) v = normal(random);
  for (int r = 0; r < world; ++r) {
    result[r].weight = r == 1 ? 0 : 100 + 17 * r;  // rank 1 contributes nothing
    for (int64_t i = 0; i < elements; ++i) {
      const bool dead_row = i / RowElements(elements) % 7 == 3 && i < elements / 3;
      result[r].anchor.push_back(normal(random));
      const float change = dead_row ? 0.0f : common[i] + 0.3f * normal(random);
      result[r].current.push_back(result[r].anchor[i] - change);
    }
  }
  return result;
}

std::vector<double> TrueMean(const std::vector<Contribution>& all) {
  std::vector<double> mean(all[0].current.size());
  double total = 0;
  for (const Contribution& c : all) total += static_cast<double>(c.weight);
  for (const Contribution& c : all) {
    for (size_t i = 0; i < mean.size(); ++i) {
      mean[i] += static_cast<double>(c.weight) * (c.anchor[i] - c.current[i]) / total;
    }
  }
  return mean;
}

codec::SignParams Params(uint64_t seed, int rank) {
  codec::SignParams params;
  params.rotation_seed = seed;
  params.dither_seed = Mix(seed, static_cast<uint64_t>(rank));
  return params;
}

std::vector<std::byte> EncodeSlice(absl::Span<const Piece> pieces, Range range,
                                   const codec::SignParams& params, uint64_t weight,
                                   absl::Span<float> residual = {}) {
  std::vector<std::byte> code(codec::MaxEncodedBytes(pieces, range));
  codec::EncodeOptions options;
  options.weight = weight;
  options.residual = residual;
  options.residual_decay = 0.5f;
  code.resize(*codec::Encode(pieces, range, params, options, absl::MakeSpan(code)));
  return code;
}

uint64_t DecodeAll(absl::Span<const Piece> pieces, Range range, const codec::SignParams& params,
                   const std::vector<std::vector<std::byte>>& codes, absl::Span<float> mean) {
  std::vector<float> sum(codec::SignAccumulator::SumElements(range));
  codec::SignAccumulator accumulator(pieces, range, params, absl::MakeSpan(sum));
  for (const auto& code : codes) EXPECT_TRUE(accumulator.Add(code).ok());
  accumulator.Finish(mean);
  return accumulator.total_weight();
}

// What the program must give, computed here: `slices` slices; recoded by their owners or not.
std::vector<float> Expected(const std::vector<Contribution>& all, uint64_t seed, uint32_t slices,
                            bool recode) {
  const int world = static_cast<int>(all.size());
  const int64_t elements = static_cast<int64_t>(all[0].current.size());
  std::vector<float> mean(elements);
  for (uint32_t j = 0; j < slices; ++j) {
    const auto bounds = plan::SliceBounds(elements, j, slices, codec::kBlockElements);
    const Range range{bounds.begin, bounds.end - bounds.begin};
    if (range.elements == 0) continue;
    const auto out = absl::MakeSpan(mean).subspan(range.begin, range.elements);
    std::vector<std::vector<std::byte>> codes;
    for (int r = 0; r < world; ++r) {
      codes.push_back(EncodeSlice(all[r].Pieces(), range, Params(seed, r), all[r].weight));
    }
    const std::vector<Piece> rows = all[0].Pieces();
    const uint64_t total = DecodeAll(rows, range, Params(seed, 0), codes, out);
    if (!recode) continue;
    // The whole vector, so that no pointer is outside; only the range is read.
    std::vector<Piece> means = rows;
    for (size_t p = 0, at = 0; p < means.size(); ++p) {
      means[p].anchor = nullptr;
      means[p].current = mean.data() + at;
      at += means[p].elements;
    }
    const uint64_t second = Mix(seed, exec::kRecodeStream);
    const auto code = EncodeSlice(means, range, Params(second, static_cast<int>(j) % world), total);
    DecodeAll(rows, range, Params(second, 0), {code}, out);
  }
  return mean;
}

struct SignRun {
  std::vector<std::vector<float>> mean;
  std::vector<testing::CallResult> results;
};

class ExecSignTest : public ::testing::TestWithParam<int> {
 protected:
  ExecSignTest() : world_(GetParam()), executors_(world_.MakeExecutors(5)) {}

  Call MakeCall(const plan::Program& program, Contribution& c, std::vector<float>& mean,
                uint64_t seed) {
    auto sign = std::make_shared<exec::SignCall>();
    sign->pieces = c.Pieces();
    sign->weight = c.weight;
    sign->rotation_seed = seed;
    sign->residual = absl::MakeSpan(c.residual);
    sign->residual_decay = 0.5f;
    Call call;
    call.program = std::make_shared<plan::Program>(program);
    call.input = {{nullptr, static_cast<int64_t>(c.current.size())}};
    call.output = {{reinterpret_cast<std::byte*>(mean.data()), static_cast<int64_t>(mean.size())}};
    call.sign = std::move(sign);
    call.sequence = sequence_;
    call.operation = "sign_all_reduce";
    return call;
  }

  SignRun Run(const std::vector<plan::Program>& programs, std::vector<Contribution>& all,
              uint64_t seed) {
    ++sequence_;
    SignRun run;
    run.mean.assign(all.size(), std::vector<float>(all[0].current.size(), NAN));
    std::vector<PendingCall> calls;
    for (size_t r = 0; r < all.size(); ++r) {
      calls.push_back(
          testing::Start(*executors_[r], MakeCall(programs[r], all[r], run.mean[r], seed)));
    }
    for (PendingCall& call : calls) run.results.push_back(call.Wait());
    return run;
  }

  std::vector<std::vector<plan::Program>> AllPrograms(int64_t elements) {
    plan::CallShape shape;
    shape.collective = plan::Collective::kSignAllReduce;
    shape.bytes = elements * 4;
    std::vector<std::vector<plan::Program>> all;
    for (const plan::Algorithm algorithm : plan::Candidates(shape)) {
      all.push_back(plan::ForAllRanks(algorithm, shape, plan::Topology::Flat(world_.world())));
    }
    return all;
  }

  FakeWorld world_;
  std::vector<std::unique_ptr<exec::Executor>> executors_;
  uint64_t sequence_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Worlds, ExecSignTest, ::testing::Values(1, 2, 3, 4, 5));

bool Recodes(const plan::Program& program) {
  for (const plan::ScratchBlock& block : program.scratch) {
    if (block.recoded != 0) return true;
  }
  return false;
}

TEST_P(ExecSignTest, BitsAreTheCodecsOwn) {
  for (const int64_t elements : {0, 1, 7, 65, 1000, 4097, 60001, 2200001}) {
    if (elements > 1000000 && world_.world() > 3) continue;  // several slices: seen by three
    std::vector<Contribution> all =
        Contributions(world_.world(), elements, static_cast<uint32_t>(elements));
    uint64_t total = 0;
    for (const Contribution& c : all) total += elements == 0 ? 0 : c.weight;
    for (const auto& programs : AllPrograms(elements)) {
      SCOPED_TRACE(absl::StrCat(programs[0].name, ", ", elements, " elements"));
      const uint64_t seed = 1000 + sequence_;
      const SignRun run = Run(programs, all, seed);
      const std::vector<float> expected =
          Expected(all, seed, programs[0].scratch[0].like.slices, Recodes(programs[0]));
      for (int r = 0; r < world_.world(); ++r) {
        ASSERT_TRUE(run.results[r].status.ok()) << run.results[r].status;
        EXPECT_EQ(run.results[r].outcome.total_weight, total);
        ASSERT_EQ(std::memcmp(run.mean[r].data(), expected.data(), elements * sizeof(float)), 0)
            << "rank " << r;
      }
      if (!Recodes(programs[0]) && elements > 1000000) {
        // What a rank sends to each other is at most 1/31.9 of its fp32 bytes.
        EXPECT_LE(run.results[0].outcome.bytes_sent, (world_.world() - 1) * elements * 4 / 31.9);
      }
      const int64_t row = RowElements(elements);
      for (int64_t i = 3 * row; i < 4 * row && 4 * row <= elements / 3; ++i) {
        EXPECT_EQ(expected[i], 0.0f) << "a row that nobody touched, element " << i;
      }
    }
  }
}

// The mean over many rounds comes near the true mean: errors of rounds are independent.
TEST_P(ExecSignTest, IsUnbiased) {
  constexpr int64_t kElements = 8200;
  constexpr int kRounds = 60;
  std::vector<Contribution> all = Contributions(world_.world(), kElements, 11);
  const std::vector<double> truth = TrueMean(all);
  for (const auto& programs : AllPrograms(kElements)) {
    SCOPED_TRACE(programs[0].name);
    std::vector<double> sum(kElements);
    double norm = 0, single = 0, averaged = 0;
    for (int round = 0; round < kRounds; ++round) {
      const SignRun run = Run(programs, all, 77 * round + 5);
      ASSERT_TRUE(run.results[0].status.ok()) << run.results[0].status;
      for (int64_t i = 0; i < kElements; ++i) {
        sum[i] += run.mean[0][i];
        if (round == 0) single += (run.mean[0][i] - truth[i]) * (run.mean[0][i] - truth[i]);
      }
    }
    for (int64_t i = 0; i < kElements; ++i) {
      const double error = sum[i] / kRounds - truth[i];
      averaged += error * error;
      norm += truth[i] * truth[i];
    }
    // One bit an element: a squared error of about pi/2 - 1 (twice, where recoded) of a vector's
    // squared norm, less what averaging over ranks takes away.
    EXPECT_LT(single, (Recodes(programs[0]) ? 2.0 : 0.8) * norm);
    EXPECT_LT(averaged, 2.0 / kRounds * single);
  }
}

TEST_P(ExecSignTest, NobodyContributes) {
  std::vector<Contribution> all = Contributions(world_.world(), 5000, 3);
  for (Contribution& c : all) c.weight = 0;
  for (const auto& programs : AllPrograms(5000)) {
    const SignRun run = Run(programs, all, 9);
    for (int r = 0; r < world_.world(); ++r) {
      ASSERT_TRUE(run.results[r].status.ok()) << run.results[r].status;
      EXPECT_EQ(run.results[r].outcome.total_weight, 0u);
      EXPECT_THAT(run.mean[r], ::testing::Each(0.0f)) << programs[r].name;
    }
  }
}

TEST_P(ExecSignTest, ResidualIsWhatTheCodecLeaves) {
  constexpr int64_t kElements = 5000;
  for (const auto& programs : AllPrograms(kElements)) {
    std::vector<Contribution> all = Contributions(world_.world(), kElements, 4);
    std::vector<std::vector<float>> expected;
    const uint32_t slices = programs[0].scratch[0].like.slices;
    for (int r = 0; r < world_.world(); ++r) {
      all[r].weight = 5;
      all[r].residual.assign(kElements, 0.25f);
      expected.push_back(all[r].residual);
      for (uint32_t j = 0; j < slices; ++j) {
        const auto bounds = plan::SliceBounds(kElements, j, slices, codec::kBlockElements);
        const Range range{bounds.begin, bounds.end - bounds.begin};
        if (range.elements == 0) continue;
        EncodeSlice(all[r].Pieces(), range, Params(21, r), 5,
                    absl::MakeSpan(expected[r]).subspan(range.begin, range.elements));
      }
    }
    const SignRun run = Run(programs, all, 21);
    for (int r = 0; r < world_.world(); ++r) {
      ASSERT_TRUE(run.results[r].status.ok()) << run.results[r].status;
      EXPECT_EQ(all[r].residual, expected[r]) << programs[r].name << ", rank " << r;
    }
  }
}

TEST_P(ExecSignTest, NanEndsTheOperationOnAllRanksAndNamesTheParameter) {
  const int world = world_.world();
  constexpr int64_t kElements = 30000;
  const int culprit = world - 1;
  for (const auto& programs : AllPrograms(kElements)) {
    SCOPED_TRACE(programs[0].name);
    executors_.clear();
    executors_ = world_.MakeExecutors(100 + sequence_);  // a failed group is of no more use
    std::vector<Contribution> all = Contributions(world, kElements, 8);
    for (Contribution& c : all) c.residual.assign(kElements, 0.5f), c.weight = 3;
    all[culprit].current[kElements - 1] = NAN;  // in the last slice: others may be done already
    const SignRun run = Run(programs, all, 1);
    EXPECT_EQ(run.results[culprit].status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(run.results[culprit].status.message()),
                AllOf(HasSubstr("sign_all_reduce, sequence"), HasSubstr("head.bias")));
    for (int r = 0; r < world; ++r) {
      EXPECT_FALSE(run.results[r].status.ok()) << "rank " << r;
      EXPECT_THAT(all[r].residual, ::testing::Each(0.5f)) << "rank " << r;
      if (r == culprit) continue;
      EXPECT_EQ(run.results[r].status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(run.results[r].status.message()),
                  AllOf(HasSubstr(absl::StrCat("rank ", culprit, " on host host", culprit)),
                        HasSubstr("reported: "), HasSubstr("head.bias")));
    }
  }
}

TEST(ExecSignMix, StreamsDiffer) {
  EXPECT_NE(Mix(1, 0), Mix(1, 1));
  EXPECT_NE(Mix(1, 0), Mix(2, 0));
  EXPECT_NE(Mix(0, 0), 0u);
  EXPECT_NE(Mix(7, exec::kRecodeStream), Mix(7, 1));
}

}  // namespace
}  // namespace geomesh
