// The fused outer step against PyTorch's formula written out, on every vector target; and what the
// codec and the step promise together.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

// Must name the same targets as the library's kernels.
#define HWY_COMPILE_ALL_ATTAINABLE
#include "codec/sign.h"
#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "train/outer_step.h"

namespace geomesh::train {
namespace {

class OuterStepTarget : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    hwy::GetChosenTarget().DeInit();
    hwy::SetSupportedTargetsForTest(GetParam());
  }
  void TearDown() override {
    EXPECT_TRUE(hwy::GetChosenTarget().IsInitialized()) << "no kernel was called";
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().DeInit();
  }
};

INSTANTIATE_TEST_SUITE_P(Targets, OuterStepTarget,
                         ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& info) { return hwy::TargetName(info.param); });

uint32_t Bits(float x) { return std::bit_cast<uint32_t>(x); }

// torch.optim.SGD(lr, momentum, nesterov) on one parameter, as its single-tensor form computes it:
// buf = mu * buf + grad; grad = grad + mu * buf or buf; param = param - lr * grad.
void ReferenceStep(float lr, float mu, bool nesterov, float g, float& m, float& x) {
  const float decayed = mu * m;
  m = decayed + g;
  float direction = m;
  if (nesterov) {
    const float ahead = mu * m;
    direction = g + ahead;
  }
  const float change = lr * direction;
  x = x - change;
}

TEST_P(OuterStepTarget, EqualsTorchSgdOverSeveralSteps) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int64_t n : {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 1000, 4097}) {
    for (bool nesterov : {true, false}) {
      std::vector<float> anchor(n), current(n, 9.0f), momentum(n), mean(n);
      for (float& x : anchor) x = normal(random);
      std::vector<float> x = anchor, m = momentum;
      for (int step = 0; step < 4; ++step) {
        for (float& g : mean) g = normal(random) * 0.01f;
        // Two pieces, the first of odd length.
        const int64_t first = n / 2 | (n > 0);
        const std::vector<OuterPiece> pieces = {
            {anchor.data(), current.data(), DType::kF32, first},
            {anchor.data() + first, current.data() + first, DType::kF32, n - first}};
        OuterStep(pieces, absl::MakeSpan(momentum), mean,
                  {.lr = 0.7f, .momentum = 0.9f, .nesterov = nesterov});
        for (int64_t i = 0; i < n; ++i) {
          ReferenceStep(0.7f, 0.9f, nesterov, mean[i], m[i], x[i]);
          ASSERT_EQ(Bits(anchor[i]), Bits(x[i])) << n << " " << i;
          ASSERT_EQ(Bits(current[i]), Bits(x[i])) << n << " " << i;
          ASSERT_EQ(Bits(momentum[i]), Bits(m[i])) << n << " " << i;
        }
      }
    }
  }
}

TEST_P(OuterStepTarget, KnownNumbers) {
  float anchor = 2.0f, current = 0.0f, momentum = 1.0f;
  const float mean = 0.5f;
  const OuterPiece piece{&anchor, &current, DType::kF32, 1};
  OuterStep({&piece, 1}, {&momentum, 1}, {&mean, 1}, {.lr = 0.5f, .momentum = 0.5f});
  EXPECT_EQ(momentum, 1.0f);  // 0.5 * 1 + 0.5
  EXPECT_EQ(anchor, 1.5f);    // 2 - 0.5 * (0.5 + 0.5 * 1)
  EXPECT_EQ(current, 1.5f);
}

TEST_P(OuterStepTarget, UntouchedParametersKeepTheirBits) {
  const std::vector<float> odd = {0.0f, -0.0f, 1e-40f, -1e-45f, 0.1f, 3e38f, -1.0f};
  for (bool nesterov : {true, false}) {
    std::vector<float> anchor = odd, current(odd.size()), momentum(odd.size()), mean(odd.size());
    const OuterPiece piece{anchor.data(), current.data(), DType::kF32,
                           static_cast<int64_t>(odd.size())};
    for (int step = 0; step < 3; ++step) {
      OuterStep({&piece, 1}, absl::MakeSpan(momentum), mean, {.nesterov = nesterov});
    }
    for (size_t i = 0; i < odd.size(); ++i) {
      EXPECT_EQ(Bits(anchor[i]), Bits(odd[i]));
      EXPECT_EQ(Bits(current[i]), Bits(odd[i]));
      EXPECT_EQ(Bits(momentum[i]), 0u);
    }
  }
}

// Rounding to nearest even by search over all finite values of the half type.
uint16_t NearestHalf(float x, const std::vector<float>& finite, float overflow) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float magnitude = std::fabs(x);
  const auto infinity = static_cast<uint16_t>(finite.size());
  if (magnitude >= overflow) return sign | infinity;
  const size_t above = std::lower_bound(finite.begin(), finite.end(), magnitude) - finite.begin();
  if (above == finite.size()) return sign | (infinity - 1);
  if (finite[above] == magnitude) return sign | static_cast<uint16_t>(above);
  const double up = static_cast<double>(finite[above]) - magnitude;
  const double down = magnitude - static_cast<double>(finite[above - 1]);
  const size_t chosen = up < down ? above : down < up ? above - 1 : above % 2 ? above - 1 : above;
  return sign | static_cast<uint16_t>(chosen);
}

TEST_P(OuterStepTarget, CurrentIsRoundedToNearestEven) {
  std::vector<float> f16, bf16;
  for (int i = 0; i < 31 << 10; ++i) {
    const int exponent = i >> 10, mantissa = i & 1023;
    f16.push_back(exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25));
  }
  for (uint32_t i = 0; i < 255u << 7; ++i) bf16.push_back(std::bit_cast<float>(i << 16));
  const float f16_overflow = 65520.0f;  // halfway from the largest to the next step
  const float bf16_overflow = std::bit_cast<float>(0x7F7F8000u);

  // Every value, each halfway point and its neighbours, both signs; and random bits.
  std::vector<float> anchor;
  for (const auto* values : {&f16, &bf16}) {
    for (size_t i = 0; i + 1 < values->size(); i += 7) {
      const float a = (*values)[i], b = (*values)[i + 1];
      const auto half = static_cast<float>((static_cast<double>(a) + b) / 2);
      for (float x : {a, half, std::nextafter(half, a), std::nextafter(half, b)}) {
        anchor.push_back(i % 2 ? x : -x);
      }
    }
  }
  for (float x : {65504.0f, 65519.996f, 65520.0f, 1e6f, 3.4e38f, 0x1.ff7p127f, 0x1.fefp127f,
                  0x1p-14f, 0x1.ffcp-15f, 0x1p-25f, 0x1.000002p-25f, 0x1p-149f}) {
    anchor.push_back(x);
  }
  std::mt19937 random(2);
  while (anchor.size() < 60001) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isfinite(x)) anchor.push_back(x);
  }
  const std::vector<float> expected = anchor;
  std::vector<float> momentum(anchor.size()), mean(anchor.size());
  std::vector<uint16_t> current(anchor.size());
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    const OuterPiece piece{anchor.data(), current.data(), dtype,
                           static_cast<int64_t>(anchor.size())};
    OuterStep({&piece, 1}, absl::MakeSpan(momentum), mean, {});
    for (size_t i = 0; i < anchor.size(); ++i) {
      ASSERT_EQ(Bits(anchor[i]), Bits(expected[i]));
      const uint16_t half = dtype == DType::kF16 ? NearestHalf(anchor[i], f16, f16_overflow)
                                                 : NearestHalf(anchor[i], bf16, bf16_overflow);
      ASSERT_EQ(current[i], half) << Name(dtype) << " " << anchor[i];
    }
  }
  float nan = std::numeric_limits<float>::quiet_NaN(), zero_momentum = 0;
  const float zero_mean = 0;
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    uint16_t half = 0;
    const OuterPiece piece{&nan, &half, dtype, 1};
    OuterStep({&piece, 1}, {&zero_momentum, 1}, {&zero_mean, 1}, {});
    EXPECT_GT(half & 0x7FFF, dtype == DType::kF16 ? 0x7C00 : 0x7F80);
  }
}

TEST_P(OuterStepTarget, RowsThatNoRankTouchedKeepTheirBitsOver100Rounds) {
  // Three ranks train an embedding of 60 rows of 70; rows 50 to 59 are touched by none, others by
  // some of the ranks in some rounds.
  constexpr int kRows = 60, kWidth = 70, kElements = kRows * kWidth;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> start(kElements);
  for (float& x : start) x = normal(random);
  start[55 * kWidth] = -0.0f;
  start[55 * kWidth + 1] = 1e-41f;
  std::vector<float> anchor = start, model = start, momentum(kElements), mean(kElements);
  const codec::Range range{0, kElements};
  for (uint64_t round = 0; round < 100; ++round) {
    std::vector<std::vector<std::byte>> codes;
    std::vector<codec::Piece> pieces;
    std::vector<float> trained;
    for (uint64_t rank = 0; rank < 3; ++rank) {
      trained = model;
      for (int row = 0; row < 50; ++row) {
        if ((static_cast<uint64_t>(row) + round + rank) % 4 == 0) continue;
        for (int i = 0; i < kWidth; ++i) trained[row * kWidth + i] -= 0.01f * normal(random);
      }
      pieces = {{anchor.data(), trained.data(), DType::kF32, kElements, kWidth, "embedding"}};
      std::vector<std::byte> code(static_cast<size_t>(codec::MaxEncodedBytes(pieces, range)));
      const auto used =
          codec::Encode(pieces, range, {.rotation_seed = round, .dither_seed = round * 3 + rank},
                        {.weight = rank + 1}, absl::MakeSpan(code));
      ASSERT_TRUE(used.ok()) << used.status();
      code.resize(*used);
      codes.push_back(code);
    }
    std::vector<float> sum(static_cast<size_t>(codec::SignAccumulator::SumElements(range)));
    codec::SignAccumulator accumulator(pieces, range, {.rotation_seed = round},
                                       absl::MakeSpan(sum));
    for (const auto& code : codes) ASSERT_TRUE(accumulator.Add(code).ok());
    accumulator.Finish(absl::MakeSpan(mean));
    const OuterPiece piece{anchor.data(), model.data(), DType::kF32, kElements};
    OuterStep({&piece, 1}, absl::MakeSpan(momentum), mean, {});
  }
  for (int i = 0; i < kElements; ++i) {
    if (i < 50 * kWidth) {
      ASSERT_NE(Bits(anchor[i]), Bits(start[i])) << i;
    } else {
      ASSERT_EQ(Bits(anchor[i]), Bits(start[i])) << i;
      ASSERT_EQ(Bits(model[i]), Bits(start[i])) << i;
    }
  }
}

}  // namespace
}  // namespace geomesh::train
