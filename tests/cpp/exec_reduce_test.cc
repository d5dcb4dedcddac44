// Reductions against references that share nothing with them: arithmetic in double and a rounding
// done with ldexp and nearbyint; on every vector target of this machine.
#include "exec/reduce.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "hwy/highway.h"
#include "hwy/targets.h"

namespace geomesh::exec {
namespace {

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg,  ReduceOp::kProduct, ReduceOp::kMin,
                             ReduceOp::kMax, ReduceOp::kBand, ReduceOp::kBor,     ReduceOp::kBxor};
constexpr DType kIntegers[] = {DType::kI8, DType::kI16, DType::kI32, DType::kI64,
                               DType::kU8, DType::kU16, DType::kU32, DType::kU64};

// A 16-bit format: fraction bits and the exponent of its smallest normal number.
struct Format {
  DType dtype;
  int fraction_bits;
  int min_exponent;
  int bias;
  uint16_t quiet_nan;
};
constexpr Format kHalf{DType::kF16, 10, -14, 15, 0x7e00};
constexpr Format kBfloat{DType::kBF16, 7, -126, 127, 0x7fc0};

double Decode(const Format& f, uint16_t bits) {
  const double sign = bits >> 15 ? -1.0 : 1.0;
  const int exponent = (bits & 0x7fff) >> f.fraction_bits;
  const int fraction = bits & ((1 << f.fraction_bits) - 1);
  const int special = (0x7fff >> f.fraction_bits);
  if (exponent == special) return fraction == 0 ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * std::ldexp(fraction, f.min_exponent - f.fraction_bits);
  return sign * std::ldexp(fraction + (1 << f.fraction_bits), exponent - f.bias - f.fraction_bits);
}

// Nearest, ties to even. NaN becomes the quiet one with its sign unspecified (compared apart).
uint16_t Encode(const Format& f, double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return f.quiet_nan;
  const double magnitude = std::fabs(value);
  int exponent = magnitude == 0 ? f.min_exponent : std::max(std::ilogb(magnitude), f.min_exponent);
  if (!std::isinf(magnitude)) {
    const double units = std::nearbyint(std::ldexp(magnitude, f.fraction_bits - exponent));
    const double rounded = std::ldexp(units, exponent - f.fraction_bits);
    const int max_exponent = (0x7fff >> f.fraction_bits) - 1 - f.bias;
    if (rounded < std::ldexp(1.0, max_exponent + 1)) {
      if (rounded < std::ldexp(1.0, f.min_exponent)) {
        return sign | static_cast<uint16_t>(std::ldexp(rounded, f.fraction_bits - f.min_exponent));
      }
      exponent = std::ilogb(rounded);
      const uint16_t fraction = static_cast<uint16_t>(
          std::ldexp(rounded, f.fraction_bits - exponent) - (1 << f.fraction_bits));
      return sign | static_cast<uint16_t>((exponent + f.bias) << f.fraction_bits) | fraction;
    }
  }
  return sign | static_cast<uint16_t>((0x7fff >> f.fraction_bits) << f.fraction_bits);
}

template <typename T>
std::byte* Bytes(std::vector<T>& v) {
  return reinterpret_cast<std::byte*>(v.data());
}
template <typename T>
const std::byte* Bytes(const std::vector<T>& v) {
  return reinterpret_cast<const std::byte*>(v.data());
}

template <typename T>
std::vector<T> Reduced(ReduceOp op, DType dtype, std::vector<T> left, const std::vector<T>& right) {
  const std::byte* operands[] = {Bytes(left), Bytes(right)};
  Reduce(op, dtype, Bytes(left), operands, static_cast<int64_t>(left.size()));
  return left;
}

// Runs each test on every target.
class ReduceTest : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

std::vector<int64_t> Targets() {
  std::vector<int64_t> targets;
  for (int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    targets.push_back(left & -left);
  }
  return targets;
}

INSTANTIATE_TEST_SUITE_P(Targets, ReduceTest, testing::ValuesIn(Targets()),
                         [](const auto& info) { return std::string(hwy::TargetName(info.param)); });

TEST_P(ReduceTest, HalvesRoundOnceOverAllValues) {
  std::mt19937 random(1);
  for (const Format& f : {kHalf, kBfloat}) {
    // Every value on the left, four partners each: itself, a neighbour in size, anything, a small.
    std::vector<uint16_t> left, right;
    for (int pass = 0; pass < 4; ++pass) {
      for (uint32_t bits = 0; bits < 65536; ++bits) {
        left.push_back(static_cast<uint16_t>(bits));
        right.push_back(static_cast<uint16_t>(pass == 0   ? bits
                                              : pass == 1 ? bits ^ (random() & 0x83ff)
                                              : pass == 2 ? random()
                                                          : random() & 0x83ff));
      }
    }
    left.push_back(0x3c00);  // an odd number, so that every vector width leaves a remainder
    right.push_back(0x3c01);
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct}) {
      const std::vector<uint16_t> result = Reduced(op, f.dtype, left, right);
      for (size_t i = 0; i < left.size(); ++i) {
        const float a = static_cast<float>(Decode(f, left[i]));
        const float b = static_cast<float>(Decode(f, right[i]));
        const float exact = op == ReduceOp::kProduct ? a * b : a + b;
        const uint16_t expected = Encode(f, exact);
        const bool same =
            std::isnan(exact) ? (result[i] & 0x7fff) == f.quiet_nan : result[i] == expected;
        ASSERT_TRUE(same) << Name(op) << " " << geomesh::Name(f.dtype) << " " << left[i] << " "
                          << right[i] << ": " << result[i] << " instead of " << expected;
      }
    }
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      const std::vector<uint16_t> result = Reduced(op, f.dtype, left, right);
      for (size_t i = 0; i < left.size(); ++i) {
        const double a = Decode(f, left[i]), b = Decode(f, right[i]);
        uint16_t expected =
            op == ReduceOp::kMin ? (a < b ? left[i] : right[i]) : (a > b ? left[i] : right[i]);
        if (a == b || std::isnan(a)) expected = left[i];
        if (!std::isnan(a) && std::isnan(b)) expected = right[i];
        ASSERT_EQ(result[i], expected) << Name(op) << " " << left[i] << " " << right[i];
      }
    }
  }
}

// Seven operands, the third of which is overwritten: float's own sum, rounded once.
TEST_P(ReduceTest, ManyHalvesRoundOnce) {
  std::mt19937 random(7);
  for (const Format& f : {kHalf, kBfloat}) {
    for (const int64_t elements : {1, 7, 1023, 1024, 1025, 5000}) {
      std::vector<std::vector<uint16_t>> operands(7, std::vector<uint16_t>(elements));
      for (auto& operand : operands) {
        for (uint16_t& bits : operand) bits = random() & 0xbfff;  // below 2
      }
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct}) {
        std::vector<std::vector<uint16_t>> given = operands;
        std::vector<const std::byte*> from;
        for (const auto& operand : given) from.push_back(Bytes(operand));
        Reduce(op, f.dtype, Bytes(given[2]), from, elements);
        for (int64_t i = 0; i < elements; ++i) {
          float exact = static_cast<float>(Decode(f, operands[0][i]));
          for (size_t r = 1; r < operands.size(); ++r) {
            const float next = static_cast<float>(Decode(f, operands[r][i]));
            exact = op == ReduceOp::kSum ? exact + next : exact * next;
          }
          ASSERT_EQ(given[2][i], Encode(f, exact)) << Name(op) << " " << geomesh::Name(f.dtype);
        }
        for (const size_t r : {0, 1, 3, 4, 5, 6}) ASSERT_EQ(given[r], operands[r]);
      }
    }
  }
}

// The mean of all operands is rounded once too: what it would lose, scaled or added up in 16 bits,
// is kept.
TEST_P(ReduceTest, MeanOfManyHalves) {
  std::mt19937 random(8);
  for (const Format& f : {kHalf, kBfloat}) {
    for (const int world : {2, 3, 5, 8, 17}) {
      std::vector<std::vector<uint16_t>> operands(world, std::vector<uint16_t>(1030));
      std::vector<const std::byte*> from;
      for (auto& operand : operands) {
        for (uint16_t& bits : operand) bits = random() & 0x83ff;  // below float16's normal numbers
        operand[0] = f.dtype == DType::kF16 ? 0x7bff : 0x7f7f;    // the largest
        operand[1] = 1;                                           // the smallest
        from.push_back(Bytes(operand));
      }
      if (f.dtype == DType::kBF16) {
        for (auto& operand : operands) {
          for (size_t i = 1; i < operand.size(); ++i) operand[i] += 0x3f00;  // about 1
        }
      }
      std::vector<uint16_t> mean(1030);
      Reduce(ReduceOp::kAvg, f.dtype, Bytes(mean), from, 1030, world);
      for (size_t i = 0; i < mean.size(); ++i) {
        double sum = 0;
        for (const auto& operand : operands) sum += Decode(f, operand[i]);
        ASSERT_NEAR(Decode(f, mean[i]), Decode(f, Encode(f, sum / world)),
                    std::ldexp(std::fabs(sum / world), -20))
            << geomesh::Name(f.dtype) << " of " << world << " at " << i;
      }
    }
  }
}

TEST_P(ReduceTest, ManyOperandsOfEachType) {
  std::mt19937_64 random(9);
  constexpr int64_t kElements = 2049;
  const auto check = [&]<typename T>(T, DType dtype) {
    std::vector<std::vector<T>> operands(5, std::vector<T>(kElements));
    for (auto& operand : operands) {
      for (T& value : operand) value = static_cast<T>(random() % 7);
    }
    for (const ReduceOp op : kOps) {
      if (!Supported(op, dtype).ok()) continue;
      std::vector<T> expected = operands[0];
      for (int r = 1; r < 5; ++r) expected = Reduced(op, dtype, expected, operands[r]);
      std::vector<const std::byte*> from;
      for (const auto& operand : operands) from.push_back(Bytes(operand));
      std::vector<T> result(kElements);
      Reduce(op, dtype, Bytes(result), from, kElements);
      EXPECT_EQ(result, expected) << Name(op) << " " << geomesh::Name(dtype);
      if (op != ReduceOp::kAvg) continue;
      for (T& value : expected) value = value / T{5};
      Reduce(op, dtype, Bytes(result), from, kElements, 5);
      EXPECT_EQ(result, expected) << "mean of " << geomesh::Name(dtype);
    }
  };
  check(float{}, DType::kF32);
  check(double{}, DType::kF64);
  check(int8_t{}, DType::kI8);
  check(int16_t{}, DType::kI16);
  check(int32_t{}, DType::kI32);
  check(int64_t{}, DType::kI64);
  check(uint8_t{}, DType::kU8);
  check(uint16_t{}, DType::kU16);
  check(uint32_t{}, DType::kU32);
  check(uint64_t{}, DType::kU64);
}

template <typename T>
void CheckFloating(DType dtype) {
  const T inf = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
  const T denormal = std::numeric_limits<T>::denorm_min();
  const std::vector<T> left = {1, -2, 0, -T{0}, inf, nan, 3, nan, T(1e30), denormal, 5};
  const std::vector<T> right = {4, -3, -T{0}, 0, 1, 2, nan, nan, T(1e30), denormal, -5};
  const auto check = [&](ReduceOp op, const std::vector<T>& expected) {
    const std::vector<T> result = Reduced(op, dtype, left, right);
    for (size_t i = 0; i < left.size(); ++i) {
      if (std::isnan(expected[i])) {
        EXPECT_TRUE(std::isnan(result[i])) << Name(op) << " at " << i;
      } else {
        EXPECT_EQ(result[i], expected[i]) << Name(op) << " at " << i;
        EXPECT_EQ(std::signbit(result[i]), std::signbit(expected[i])) << Name(op) << " at " << i;
      }
    }
  };
  const T big = T(1e30) * T(1e30);
  check(ReduceOp::kSum, {5, -5, 0, 0, inf, nan, nan, nan, T(1e30) + T(1e30), 2 * denormal, 0});
  check(ReduceOp::kAvg, {5, -5, 0, 0, inf, nan, nan, nan, T(1e30) + T(1e30), 2 * denormal, 0});
  check(ReduceOp::kProduct, {4, 6, -T{0}, -T{0}, inf, nan, nan, nan, big, 0, -25});
  check(ReduceOp::kMin, {1, -3, 0, -T{0}, 1, nan, nan, nan, T(1e30), denormal, -5});
  check(ReduceOp::kMax, {4, -2, 0, -T{0}, inf, nan, nan, nan, T(1e30), denormal, 5});
}

TEST_P(ReduceTest, Float32) { CheckFloating<float>(DType::kF32); }
TEST_P(ReduceTest, Float64) { CheckFloating<double>(DType::kF64); }

template <typename T>
void CheckInteger(DType dtype) {
  std::mt19937_64 random(2);
  std::vector<T> left, right;
  for (int i = 0; i < 1003; ++i) {
    left.push_back(static_cast<T>(random()));
    right.push_back(static_cast<T>(random()));
  }
  left[0] = std::numeric_limits<T>::max(), right[0] = 1;
  left[1] = std::numeric_limits<T>::min(), right[1] = static_cast<T>(-1);
  for (const ReduceOp op : kOps) {
    if (!Supported(op, dtype).ok()) continue;
    const std::vector<T> result = Reduced(op, dtype, left, right);
    for (size_t i = 0; i < left.size(); ++i) {
      const auto a = static_cast<unsigned __int128>(static_cast<__int128>(left[i]));
      const auto b = static_cast<unsigned __int128>(static_cast<__int128>(right[i]));
      T expected = 0;
      switch (op) {
        case ReduceOp::kSum:
          expected = static_cast<T>(a + b);
          break;
        case ReduceOp::kProduct:
          expected = static_cast<T>(a * b);
          break;
        case ReduceOp::kMin:
          expected = std::min(left[i], right[i]);
          break;
        case ReduceOp::kMax:
          expected = std::max(left[i], right[i]);
          break;
        case ReduceOp::kBand:
          expected = static_cast<T>(a & b);
          break;
        case ReduceOp::kBor:
          expected = static_cast<T>(a | b);
          break;
        case ReduceOp::kBxor:
          expected = static_cast<T>(a ^ b);
          break;
        case ReduceOp::kAvg:
          FAIL();
      }
      ASSERT_EQ(result[i], expected) << Name(op) << " " << geomesh::Name(dtype) << " at " << i;
    }
  }
}

TEST_P(ReduceTest, Integers) {
  CheckInteger<int8_t>(DType::kI8);
  CheckInteger<int16_t>(DType::kI16);
  CheckInteger<int32_t>(DType::kI32);
  CheckInteger<int64_t>(DType::kI64);
  CheckInteger<uint8_t>(DType::kU8);
  CheckInteger<uint16_t>(DType::kU16);
  CheckInteger<uint32_t>(DType::kU32);
  CheckInteger<uint64_t>(DType::kU64);
}

TEST_P(ReduceTest, BoolIsLogicalAndNormalised) {
  const std::vector<uint8_t> left = {0, 0, 1, 1, 2, 255, 0, 4};
  const std::vector<uint8_t> right = {0, 1, 0, 1, 1, 0, 8, 4};
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBor}) {
    EXPECT_THAT(Reduced(op, DType::kBool, left, right),
                testing::ElementsAre(0, 1, 1, 1, 1, 1, 1, 1));
  }
  for (const ReduceOp op : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kBand}) {
    EXPECT_THAT(Reduced(op, DType::kBool, left, right),
                testing::ElementsAre(0, 0, 0, 1, 1, 0, 0, 1));
  }
  EXPECT_THAT(Reduced(ReduceOp::kBxor, DType::kBool, left, right),
              testing::ElementsAre(0, 1, 1, 0, 0, 1, 1, 0));
}

// The average of `contributions` as a chain of pairwise reductions, as any program does it.
std::vector<uint16_t> Average(DType dtype, const std::vector<uint16_t>& contributions) {
  const int world = static_cast<int>(contributions.size());
  std::vector<uint16_t> scaled = contributions;
  if (AverageScalesContributions(dtype, world)) {
    ScaleContribution(dtype, world, Bytes(scaled), Bytes(contributions), world);
  }
  std::vector<uint16_t> sum = {scaled[0]};
  for (int r = 1; r < world; ++r) sum = Reduced(ReduceOp::kAvg, dtype, sum, {scaled[r]});
  if (AverageFinishesSum(dtype, world)) FinishAverage(dtype, world, Bytes(sum), 1);
  return sum;
}

TEST_P(ReduceTest, AverageOfHalvesDoesNotOverflow) {
  for (const Format& f : {kHalf, kBfloat}) {
    const uint16_t largest =
        static_cast<uint16_t>(((0x7fff >> f.fraction_bits) << f.fraction_bits) - 1);
    const uint16_t thirty_thousand = Encode(f, 30000);
    for (const uint16_t value : {largest, static_cast<uint16_t>(largest | 0x8000), thirty_thousand,
                                 Encode(f, 3e38), Encode(f, 1)}) {
      if ((value & 0x7fff) > largest) continue;  // 3e38 in float16
      const double exact = Decode(f, value);
      for (int world = 1; world <= 17; ++world) {
        const double mean = Decode(f, Average(f.dtype, std::vector(world, value))[0]);
        EXPECT_TRUE(std::isfinite(mean)) << world << " times " << exact;
        // Each of `world` roundings is at most half a unit in the last place.
        EXPECT_NEAR(mean / exact, 1, world * std::ldexp(1, -f.fraction_bits - 1)) << world;
        if (world <= 2 || (world == 4 && value == thirty_thousand)) {
          EXPECT_EQ(mean, exact) << world;
        }
      }
    }
  }
}

TEST(Reduce, AverageRules) {
  EXPECT_FALSE(AverageScalesContributions(DType::kF32, 4));
  EXPECT_TRUE(AverageScalesContributions(DType::kF16, 4));
  EXPECT_FALSE(AverageScalesContributions(DType::kF16, 1));
  EXPECT_FALSE(AverageFinishesSum(DType::kBF16, 8));
  EXPECT_TRUE(AverageFinishesSum(DType::kBF16, 6));
  EXPECT_TRUE(AverageFinishesSum(DType::kF64, 2));
  EXPECT_FALSE(AverageFinishesSum(DType::kF64, 1));
  std::vector<float> sums = {3, 1e30f, -7};
  FinishAverage(DType::kF32, 3, Bytes(sums), 3);
  EXPECT_THAT(sums, testing::ElementsAre(1.0f, 1e30f / 3, -7.0f / 3));
  std::vector<double> wide = {1};
  FinishAverage(DType::kF64, 3, Bytes(wide), 1);
  EXPECT_EQ(wide[0], 1.0 / 3);
}

TEST(Reduce, UnsupportedPairsNameBoth) {
  for (const DType dtype : kIntegers) {
    const absl::Status status = Supported(ReduceOp::kAvg, dtype);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                testing::AllOf(testing::HasSubstr("AVG"),
                               testing::HasSubstr(std::string(geomesh::Name(dtype)))));
    EXPECT_TRUE(Supported(ReduceOp::kBand, dtype).ok());
  }
  EXPECT_FALSE(Supported(ReduceOp::kAvg, DType::kBool).ok());
  EXPECT_TRUE(Supported(ReduceOp::kBxor, DType::kBool).ok());
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    for (const ReduceOp op : {ReduceOp::kBand, ReduceOp::kBor, ReduceOp::kBxor}) {
      const absl::Status status = Supported(op, dtype);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()),
                  testing::AllOf(testing::HasSubstr(std::string(Name(op))),
                                 testing::HasSubstr(std::string(geomesh::Name(dtype)))));
    }
    EXPECT_TRUE(Supported(ReduceOp::kAvg, dtype).ok());
  }
}

}  // namespace
}  // namespace geomesh::exec
