// What the GPU's codec and outer step must equal, bit by bit: csrc/codec and csrc/train on the same
// data. The cases are the same whether the kernels' functions run on the CPU (cuda_codec_test.cc)
// or on a GPU (cuda_device_test.cc).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "codec/kernels.h"
#include "codec/pieces.h"
#include "codec/random.h"
#include "codec/sign.h"
#include "codec_values.h"
#include "gtest/gtest.h"
#include "train/outer_step.h"

namespace geomesh::cuda_cases {

using codec::Data;
using codec::EncodeOptions;
using codec::kAllData;
using codec::MakeValues;
using codec::Piece;
using codec::Range;
using codec::RowsOf;
using codec::SignParams;

// Runs the code under test on data in host memory.
class Processor {
 public:
  virtual ~Processor() = default;
  // codec::Encode; the residual too is changed in place.
  virtual absl::StatusOr<std::vector<std::byte>> Encode(absl::Span<const Piece> pieces, Range range,
                                                        const SignParams& params,
                                                        const EncodeOptions& options) = 0;
  // What the encoder's kernel says of each block, before it is rounded to a byte: m, the sum of |x|
  // in plain codes, or -1.
  virtual std::vector<float> Magnitudes(absl::Span<const Piece> pieces, Range range,
                                        const SignParams& params) = 0;
  // codec::SignAccumulator over all codes.
  virtual absl::StatusOr<std::vector<float>> Mean(
      absl::Span<const Piece> pieces, Range range, const SignParams& params,
      const std::vector<std::vector<std::byte>>& codes) = 0;
  virtual absl::Status OuterStep(absl::Span<const train::OuterPiece> pieces,
                                 absl::Span<float> momentum, absl::Span<const float> mean,
                                 const train::OuterParams& params) = 0;
};

inline absl::StatusOr<std::vector<std::byte>> CpuEncode(absl::Span<const Piece> pieces, Range range,
                                                        const SignParams& params,
                                                        const EncodeOptions& options) {
  std::vector<std::byte> code(static_cast<size_t>(codec::MaxEncodedBytes(pieces, range)));
  const absl::StatusOr<size_t> bytes =
      codec::Encode(pieces, range, params, options, absl::MakeSpan(code));
  if (!bytes.ok()) return bytes.status();
  code.resize(*bytes);
  return code;
}

inline absl::StatusOr<std::vector<float>> CpuMean(
    absl::Span<const Piece> pieces, Range range, const SignParams& params,
    const std::vector<std::vector<std::byte>>& codes) {
  std::vector<float> sum(static_cast<size_t>(codec::SignAccumulator::SumElements(range)));
  codec::SignAccumulator accumulator(pieces, range, params, absl::MakeSpan(sum));
  for (const auto& code : codes) {
    const absl::Status status = accumulator.Add(code);
    if (!status.ok()) return status;
  }
  std::vector<float> mean(static_cast<size_t>(range.elements));
  accumulator.Finish(absl::MakeSpan(mean));
  return mean;
}

inline std::vector<uint32_t> Bits(absl::Span<const float> values) {
  std::vector<uint32_t> bits;
  for (float x : values) bits.push_back(std::bit_cast<uint32_t>(x));
  return bits;
}

// Encodes on both sides; the code, or nothing where both refuse with the same words.
inline std::vector<std::byte> ExpectSameCode(Processor& processor, absl::Span<const Piece> pieces,
                                             Range range, const SignParams& params,
                                             const EncodeOptions& options) {
  EncodeOptions own = options;
  std::vector<float> residual(options.residual.begin(), options.residual.end());
  own.residual = absl::MakeSpan(residual);
  const auto expected = CpuEncode(pieces, range, params, options);
  const auto actual = processor.Encode(pieces, range, params, own);
  EXPECT_EQ(actual.status(), expected.status());
  EXPECT_EQ(Bits(residual), Bits(options.residual));
  if (!expected.ok() || !actual.ok()) return {};
  EXPECT_TRUE(*actual == *expected);
  return *expected;
}

inline void ExpectSameMean(Processor& processor, absl::Span<const Piece> pieces, Range range,
                           const SignParams& params,
                           const std::vector<std::vector<std::byte>>& codes) {
  const auto expected = CpuMean(pieces, range, params, codes);
  const auto actual = processor.Mean(pieces, range, params, codes);
  ASSERT_EQ(actual.status(), expected.status());
  if (expected.ok()) {
    ASSERT_EQ(Bits(*actual), Bits(*expected));
  }
}

// A table of rows of 24, an empty piece, a piece of one row, and the rest in rows of 1,000.
struct Vector {
  std::vector<float> values;
  std::vector<Piece> pieces;

  Vector(int64_t n, Data data, uint32_t seed) {
    const auto [first, second] = RowsOf(n);
    values = MakeValues(n, data, seed);
    const int64_t lengths[] = {first, 0, second, n - first - second};
    const int64_t rows[] = {24, 5, 0, 1000};
    const char* const names[] = {"embedding", "nothing", "bias", "weight"};
    int64_t begin = 0;
    for (int i = 0; i < 4; ++i) {
      pieces.push_back({.current = values.data() + begin,
                        .elements = lengths[i],
                        .row_elements = rows[i],
                        .name = names[i]});
      begin += lengths[i];
    }
  }
  Vector(const Vector&) = delete;

  Range All() const { return {0, static_cast<int64_t>(values.size())}; }
};

inline void CheckSizesAndData(Processor& processor) {
  for (int64_t n : {0,    1,    7,    8,    9,    63,   64,   65,   127,  200,   1025,
                    2305, 4032, 4033, 4095, 4096, 4097, 8191, 8192, 8193, 12289, 20780}) {
    for (Data data : kAllData) {
      for (bool rotate : {true, false}) {
        SCOPED_TRACE(testing::Message()
                     << "n " << n << ", data " << static_cast<int>(data) << ", rotate " << rotate);
        const Vector geometry(n, Data::kZero, 0);
        SignParams params{.rotate = rotate, .rotation_seed = static_cast<uint64_t>(1000 + n)};
        std::vector<std::vector<std::byte>> codes;
        for (uint32_t rank = 0; rank < 4; ++rank) {
          const Vector v(n, data, rank);
          params.dither_seed = rank;
          const uint64_t weights[] = {1, 1000003, 0, (1ull << 48) - 1};
          codes.push_back(
              ExpectSameCode(processor, v.pieces, v.All(), params, {.weight = weights[rank]}));
          if (testing::Test::HasFailure()) return;
        }
        ExpectSameMean(processor, geometry.pieces, geometry.All(), params, codes);
        ExpectSameMean(processor, geometry.pieces, geometry.All(), params, {codes[1]});
        ExpectSameMean(processor, geometry.pieces, geometry.All(), params, {codes[2]});
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

// A code has four bits of a magnitude, which hide the order of its sums: here are all of them.
inline void CheckMagnitudes(Processor& processor) {
  for (int64_t n : {1, 64, 65, 1000, 4096, 8191, 20780}) {
    for (Data data : kAllData) {
      for (bool rotate : {true, false}) {
        SCOPED_TRACE(testing::Message()
                     << "n " << n << ", data " << static_cast<int>(data) << ", rotate " << rotate);
        const Vector v(n, data, 4);
        const SignParams params{.rotate = rotate, .rotation_seed = static_cast<uint64_t>(n)};
        const codec::WordStream rotation(params.rotation_seed, codec::kRotationDomain);
        std::vector<float> expected;
        codec::BlockCursor blocks(n);
        for (codec::Block block; blocks.Next(&block);) {
          alignas(64) float z[codec::kBlockElements] = {};
          uint64_t signs[codec::kBlockElements / 64 + 1] = {};
          uint8_t bits[codec::kBlockElements / 8 + codec::kBitPadding];
          std::copy_n(v.values.begin() + block.begin, block.elements, z);
          if (std::all_of(z, z + block.elements, [](float x) { return x == 0; })) {
            expected.push_back(-1);
            continue;
          }
          const uint64_t first_word = codec::FirstWord(v.All(), block);
          for (int i = 0; i < block.padded / 64; ++i) signs[i] = rotation.Word(first_word + i);
          if (rotate) codec::Rotate(z, block.padded, reinterpret_cast<const uint8_t*>(signs));
          const codec::Norms norms = codec::PlainSign(z, block.padded, bits);
          double l1 = 0, l2 = 0;
          for (int i = 0; i < block.padded; ++i) {
            l1 += std::abs(static_cast<double>(z[i]));
            l2 += static_cast<double>(z[i]) * z[i];
          }
          expected.push_back(!rotate                        ? norms.l1
                             : norms.l2_squared < 0x1p-100f ? static_cast<float>(l2 / l1)
                                                            : norms.l2_squared / norms.l1);
        }
        ASSERT_EQ(Bits(processor.Magnitudes(v.pieces, v.All(), params)), Bits(expected));
      }
    }
  }
}

inline void CheckRanges(Processor& processor) {
  const Vector v(5 * 4096 + 300, Data::kDeadRows, 3);
  const SignParams params{.rotation_seed = 9, .dither_seed = 4};
  for (Range range : {Range{0, 4096}, Range{4096, 8192}, Range{12288, 4096}, Range{8192, 12588},
                      Range{16384, 4396}, Range{20480, 300}, Range{20780, 0}, Range{4096, 0},
                      Range{1, 4096}, Range{0, 5000}}) {
    SCOPED_TRACE(testing::Message() << range.begin << " + " << range.elements);
    const auto code = ExpectSameCode(processor, v.pieces, range, params, {});
    ExpectSameMean(processor, v.pieces, range, params, {code});
  }
}

inline void CheckTypesAndAnchors(Processor& processor) {
  // Every finite value of both half types, in pieces of odd lengths.
  std::vector<uint16_t> bf16, f16;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float b = std::bit_cast<float>(bits << 16);
    if (std::isfinite(b) && std::abs(b) < 0x1p50f) bf16.push_back(static_cast<uint16_t>(bits));
    if ((bits & 0x7C00) != 0x7C00) f16.push_back(static_cast<uint16_t>(bits));
  }
  std::mt19937 random(5);
  std::shuffle(bf16.begin(), bf16.end(), random);
  std::shuffle(f16.begin(), f16.end(), random);
  std::normal_distribution<float> normal;
  std::vector<float> f32(9001), anchor(65536);
  for (float& x : f32) x = normal(random);
  for (float& x : anchor) x = normal(random);
  for (const float* a : std::initializer_list<const float*>{nullptr, anchor.data()}) {
    const std::vector<Piece> pieces = {
        {a, bf16.data(), DType::kBF16, static_cast<int64_t>(bf16.size()), 17, "b"},
        {a, f16.data(), DType::kF16, static_cast<int64_t>(f16.size()), 0, "h"},
        {a, f32.data(), DType::kF32, 9001, 100, "f"},
    };
    const Range all{0, static_cast<int64_t>(bf16.size() + f16.size() + 9001)};
    for (bool rotate : {true, false}) {
      const SignParams params{.rotate = rotate, .rotation_seed = 6, .dither_seed = 7};
      const auto code = ExpectSameCode(processor, pieces, all, params, {});
      ExpectSameMean(processor, pieces, all, params, {code});
    }
  }
}

inline void CheckResidual(Processor& processor) {
  for (int64_t n : {1, 65, 4097, 20780}) {
    for (Data data : {Data::kNormal, Data::kDeadRows, Data::kZeroBlocks, Data::kWideRange}) {
      for (bool rotate : {true, false}) {
        SCOPED_TRACE(testing::Message()
                     << "n " << n << ", data " << static_cast<int>(data) << ", rotate " << rotate);
        std::vector<float> residual(static_cast<size_t>(n), 0.0f);
        for (uint32_t round = 0; round < 3; ++round) {
          const Vector v(n, data, 0);  // the same rows each round, so that some stay dead
          const EncodeOptions options{
              .weight = 5, .residual = absl::MakeSpan(residual), .residual_decay = 0.9f};
          ExpectSameCode(processor, v.pieces, v.All(),
                         {.rotate = rotate, .rotation_seed = round, .dither_seed = round}, options);
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

inline void CheckNonFinite(Processor& processor) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (bool rotate : {true, false}) {
    const SignParams params{.rotate = rotate, .rotation_seed = 1};
    for (int64_t n : {1, 70, 4096, 20780}) {
      for (float bad : {nan, infinity, -infinity, 0x1p100f, 3e38f}) {
        for (int64_t at : {int64_t{0}, n / 2, n - 1}) {
          SCOPED_TRACE(testing::Message() << "n " << n << ", " << bad << " at " << at);
          Vector v(n, Data::kDeadRows, 2);
          v.values[at] = bad;
          if (at + 1 < n) v.values[n - 1] = std::abs(bad) > 1e30f ? bad * 0.5f : infinity;
          ExpectSameCode(processor, v.pieces, v.All(), params, {});
          // A residual that is bad, and one that makes the sum so.
          Vector clean(n, Data::kDeadRows, 2);
          std::vector<float> residual(static_cast<size_t>(n), 0.25f);
          residual[at] = bad;
          clean.values[at] = bad == 3e38f ? bad : 1.0f;
          ExpectSameCode(processor, clean.pieces, clean.All(), params,
                         {.residual = absl::MakeSpan(residual)});
        }
      }
    }
  }
}

inline void CheckRefusals(Processor& processor) {
  Vector v(5000, Data::kDeadRows, 1);
  const SignParams params{.rotation_seed = 1};
  auto code = ExpectSameCode(processor, v.pieces, v.All(), params, {});
  for (size_t at : {0, 2, 4, 9, 20, 28, 33, 40}) {
    SCOPED_TRACE(at);
    auto damaged = code;
    damaged[at] ^= std::byte{0x41};
    ExpectSameMean(processor, v.pieces, v.All(), params, {code, damaged});
  }
  code.pop_back();
  ExpectSameMean(processor, v.pieces, v.All(), params, {code});
  ExpectSameCode(processor, v.pieces, v.All(), params, {.weight = 1ull << 48});
  std::vector<float> residual(4);
  ExpectSameCode(processor, v.pieces, v.All(), params, {.residual = absl::MakeSpan(residual)});
  v.pieces[0].dtype = DType::kF64;
  ExpectSameCode(processor, v.pieces, v.All(), params, {});
}

// Both sides step the same state; `anchor` holds any fp32 patterns.
inline void CheckOuterStep(Processor& processor, const train::OuterParams& params, DType dtype,
                           const std::vector<float>& anchor, float spread) {
  SCOPED_TRACE(testing::Message() << Name(dtype) << ", nesterov " << params.nesterov);
  const auto n = static_cast<int64_t>(anchor.size());
  struct State {
    std::vector<float> anchor, momentum;
    std::vector<std::byte> current;
    std::vector<train::OuterPiece> Pieces(DType dtype) {
      const auto n = static_cast<int64_t>(anchor.size());
      const int64_t first = n / 3;
      return {{anchor.data(), current.data(), dtype, first},
              {anchor.data() + first, current.data() + first * SizeOf(dtype), dtype, n - first}};
    }
  };
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  State expected{anchor, std::vector<float>(anchor.size()),
                 std::vector<std::byte>(anchor.size() * SizeOf(dtype))};
  for (float& m : expected.momentum) m = normal(random) * spread;
  State actual = expected;
  std::vector<float> mean(static_cast<size_t>(n));
  for (int step = 0; step < 3; ++step) {
    for (float& g : mean) g = normal(random) * spread;
    train::OuterStep(expected.Pieces(dtype), absl::MakeSpan(expected.momentum), mean, params);
    const absl::Status status =
        processor.OuterStep(actual.Pieces(dtype), absl::MakeSpan(actual.momentum), mean, params);
    ASSERT_TRUE(status.ok()) << status;
    for (int64_t i = 0; i < n; ++i) {
      // A NaN's sign and payload are the processor's own.
      if (std::isnan(expected.anchor[i])) {
        ASSERT_TRUE(std::isnan(actual.anchor[i])) << i;
        actual.anchor[i] = expected.anchor[i];
        std::memcpy(actual.current.data() + i * SizeOf(dtype),
                    expected.current.data() + i * SizeOf(dtype), SizeOf(dtype));
      }
    }
    ASSERT_EQ(Bits(actual.anchor), Bits(expected.anchor));
    ASSERT_EQ(Bits(actual.momentum), Bits(expected.momentum));
    ASSERT_TRUE(actual.current == expected.current);
  }
}

inline void CheckOuterSteps(Processor& processor) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (bool nesterov : {true, false}) {
      const train::OuterParams params{.lr = 0.7f, .momentum = 0.9f, .nesterov = nesterov};
      for (size_t n : {0, 1, 7, 255, 256, 257, 5000}) {
        std::vector<float> anchor(n);
        for (float& x : anchor) x = normal(random);
        CheckOuterStep(processor, params, dtype, anchor, 0.01f);
      }
      // Every exponent: what narrows to denormals, to infinity, ties, zeros.
      std::vector<float> anchor;
      for (uint32_t bits = 0; bits < 0xFFFF0000u; bits += 0xFFFF) {
        anchor.push_back(std::bit_cast<float>(bits));
        anchor.push_back(std::bit_cast<float>((bits & 0xFFFF0000u) | 0x8000u));
        anchor.push_back(std::bit_cast<float>((bits & 0xFFFFE000u) | 0x1000u));
      }
      CheckOuterStep(processor, params, dtype, anchor, 0.0f);
    }
  }
}

}  // namespace geomesh::cuda_cases
