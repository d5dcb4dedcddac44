// The sign codec against an independent reference, on every vector target of this machine: bytes,
// floats, what is promised of them, and what must be refused.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

// Must name the same targets as the library's kernels.
#define HWY_COMPILE_ALL_ATTAINABLE
#include "codec/sign.h"
#include "codec_reference.h"
#include "codec_values.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hwy/targets.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace geomesh::codec {
namespace {

using ::testing::HasSubstr;
namespace reference = codec_reference;

// A whole vector in one or more fp32 pieces without anchors, cut into rows.
struct Vector {
  std::vector<float> values;
  std::vector<int64_t> piece_elements;
  std::vector<int64_t> row_elements;

  std::vector<Piece> Pieces() const {
    std::vector<Piece> pieces;
    int64_t begin = 0;
    for (size_t i = 0; i < piece_elements.size(); ++i) {
      pieces.push_back({.current = values.data() + begin,
                        .elements = piece_elements[i],
                        .row_elements = row_elements[i],
                        .name = kNames[i % 4]});
      begin += piece_elements[i];
    }
    return pieces;
  }

  reference::Slice Slice(Range range) const {
    reference::Slice slice;
    slice.begin = static_cast<uint64_t>(range.begin);
    slice.values.assign(values.begin() + range.begin,
                        values.begin() + range.begin + range.elements);
    if (range.elements == 0) return slice;
    int64_t begin = 0;
    for (size_t i = 0; i < piece_elements.size(); ++i) {
      const int64_t step = row_elements[i] == 0 ? piece_elements[i] : row_elements[i];
      for (int64_t row = 0; row < piece_elements[i]; row += step) {
        const int64_t end = begin + std::min(row + step, piece_elements[i]);
        if (end <= range.begin || begin + row >= range.begin + range.elements) continue;
        slice.row_ends.push_back(std::min(end - range.begin, range.elements));
      }
      begin += piece_elements[i];
    }
    return slice;
  }

  Range All() const { return {0, static_cast<int64_t>(values.size())}; }

  static constexpr const char* kNames[4] = {"embedding", "weight", "bias", "head"};
};

Vector MakeVector(int64_t n, Data data, uint32_t seed) {
  Vector v;
  v.values = MakeValues(n, data, seed);
  const auto [first, second] = RowsOf(n);
  v.piece_elements = {first, second, n - first - second};
  v.row_elements = {24, 0, 1000};
  return v;
}

std::vector<std::byte> EncodeOrDie(const std::vector<Piece>& pieces, Range range,
                                   const SignParams& params, const EncodeOptions& options = {}) {
  // Exactly as long as asked for, so that a sanitizer sees any write behind it.
  std::vector<std::byte> code(static_cast<size_t>(MaxEncodedBytes(pieces, range)));
  const auto used = Encode(pieces, range, params, options, absl::MakeSpan(code));
  EXPECT_TRUE(used.ok()) << used.status();
  if (!used.ok()) return {};
  EXPECT_LE(*used, code.size());
  return std::vector<std::byte>(code.begin(), code.begin() + static_cast<int64_t>(*used));
}

std::vector<float> DecodeOrDie(const std::vector<Piece>& pieces, Range range,
                               const SignParams& params,
                               const std::vector<std::vector<std::byte>>& codes) {
  std::vector<float> sum(static_cast<size_t>(SignAccumulator::SumElements(range)), 7.0f);
  SignAccumulator accumulator(pieces, range, params, absl::MakeSpan(sum));
  for (const auto& code : codes) {
    const absl::Status status = accumulator.Add(code);
    EXPECT_TRUE(status.ok()) << status;
  }
  std::vector<float> mean(static_cast<size_t>(range.elements), 7.0f);
  accumulator.Finish(absl::MakeSpan(mean));
  return mean;
}

std::vector<uint8_t> Plain(const std::vector<std::byte>& bytes) {
  std::vector<uint8_t> out(bytes.size());
  if (!bytes.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

std::vector<uint32_t> Bits(const std::vector<float>& values) {
  std::vector<uint32_t> bits(values.size());
  for (size_t i = 0; i < values.size(); ++i) bits[i] = std::bit_cast<uint32_t>(values[i]);
  return bits;
}

double SquaredNorm(const std::vector<float>& x) {
  double sum = 0;
  for (float v : x) sum += static_cast<double>(v) * v;
  return sum;
}

// ---- the same bytes and floats on every target ----

class CodecTarget : public ::testing::TestWithParam<int64_t> {
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

INSTANTIATE_TEST_SUITE_P(Targets, CodecTarget,
                         ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& info) { return hwy::TargetName(info.param); });

TEST_P(CodecTarget, EqualsReference) {
  for (int64_t n : {1,   2,    7,    8,    9,    63,   64,   65,   127,   129,
                    200, 2305, 4032, 4033, 4095, 4096, 4097, 8191, 12289, 50000}) {
    for (Data data : kAllData) {
      for (bool rotate : {true, false}) {
        SCOPED_TRACE(testing::Message()
                     << "n " << n << ", data " << static_cast<int>(data) << ", rotate " << rotate);
        const SignParams params{.rotate = rotate, .rotation_seed = static_cast<uint64_t>(1000 + n)};
        std::vector<std::vector<std::byte>> codes;
        std::vector<std::vector<uint8_t>> expected_codes;
        const Vector geometry = MakeVector(n, data, 0);
        for (uint32_t rank = 0; rank < 4; ++rank) {
          const Vector v = MakeVector(n, data, rank);
          const uint64_t weight = std::array<uint64_t, 4>{1, 1000003, 0, (1ull << 48) - 1}[rank];
          SignParams own = params;
          own.dither_seed = rank;
          codes.push_back(EncodeOrDie(v.Pieces(), v.All(), own, {.weight = weight}));
          expected_codes.push_back(reference::Encode(
              v.Slice(v.All()), {rotate, own.rotation_seed, own.dither_seed}, weight));
          ASSERT_EQ(Plain(codes.back()), expected_codes.back());
          EXPECT_EQ(WeightOf(codes.back()).value(), weight);
        }
        const auto mean = DecodeOrDie(geometry.Pieces(), geometry.All(), params, codes);
        const auto expected = reference::DecodeMean(expected_codes, geometry.Slice(geometry.All()),
                                                    {rotate, params.rotation_seed, 0});
        ASSERT_EQ(Bits(mean), Bits(expected));
      }
    }
  }
}

TEST_P(CodecTarget, SlicesEqualReference) {
  const Vector v = MakeVector(5 * 4096 + 300, Data::kDeadRows, 3);
  const SignParams params{.rotation_seed = 9, .dither_seed = 4};
  for (Range range : {Range{0, 4096}, Range{4096, 8192}, Range{12288, 4096}, Range{8192, 12588},
                      Range{16384, 4396}, Range{20480, 300}, Range{20780, 0}, Range{4096, 0}}) {
    SCOPED_TRACE(testing::Message() << range.begin << " + " << range.elements);
    const auto code = EncodeOrDie(v.Pieces(), range, params);
    ASSERT_EQ(Plain(code), reference::Encode(v.Slice(range), {true, 9, 4}, 1));
    ASSERT_EQ(Bits(DecodeOrDie(v.Pieces(), range, params, {code})),
              Bits(reference::DecodeMean({Plain(code)}, v.Slice(range), {true, 9, 4})));
  }
}

float FromBF16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

float FromF16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float sign = bits >> 15 ? -1.0f : 1.0f;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
}

TEST_P(CodecTarget, ReadsEveryTypeWithAndWithoutAnchor) {
  // All finite values of both half types, denormals too, in pieces of odd lengths.
  std::vector<uint16_t> bf16, f16;
  for (uint32_t bits = 0; bits < 65536; bits += 3) {
    const float b = FromBF16(static_cast<uint16_t>(bits));
    if (std::isfinite(b) && std::abs(b) < 0x1p50f) bf16.push_back(static_cast<uint16_t>(bits));
    if (std::isfinite(FromF16(static_cast<uint16_t>(bits)))) {
      f16.push_back(static_cast<uint16_t>(bits));
    }
  }
  const size_t n = 9001;
  std::mt19937 random(5);
  std::shuffle(bf16.begin(), bf16.end(), random);
  std::shuffle(f16.begin(), f16.end(), random);
  std::normal_distribution<float> normal;
  std::vector<float> f32(n), anchor(n);
  for (float& x : f32) x = normal(random);
  for (float& x : anchor) x = normal(random);
  for (bool with_anchor : {false, true}) {
    const float* a = with_anchor ? anchor.data() : nullptr;
    const std::vector<Piece> pieces = {
        {a, bf16.data(), DType::kBF16, n, 17, "b"},
        {a, f16.data(), DType::kF16, n, 0, "h"},
        {a, f32.data(), DType::kF32, n, 100, "f"},
    };
    reference::Slice slice;
    for (size_t i = 0; i < 3 * n; ++i) {
      const size_t at = i % n;
      const float x = i < n ? FromBF16(bf16[at]) : i < 2 * n ? FromF16(f16[at]) : f32[at];
      slice.values.push_back(with_anchor ? anchor[at] - x : x);
    }
    for (size_t row = 17; row < n; row += 17) slice.row_ends.push_back(row);
    slice.row_ends.push_back(n);
    slice.row_ends.push_back(2 * n);
    for (size_t row = 100; row < n; row += 100) slice.row_ends.push_back(2 * n + row);
    slice.row_ends.push_back(3 * n);
    const auto code = EncodeOrDie(pieces, {0, 3 * n}, {.rotation_seed = 6, .dither_seed = 7});
    EXPECT_EQ(Plain(code), reference::Encode(slice, {true, 6, 7}, 1));
  }
}

TEST_P(CodecTarget, LargeVectorEqualsReferenceAndMeetsTheSizeBound) {
  const Vector v = MakeVector((1 << 20) + 2100, Data::kNormal, 1);
  const auto code = EncodeOrDie(v.Pieces(), v.All(), {.rotation_seed = 2, .dither_seed = 3});
  ASSERT_EQ(Plain(code), reference::Encode(v.Slice(v.All()), {true, 2, 3}, 1));
  EXPECT_LE(static_cast<double>(code.size()), 4.0 * v.values.size() / 31.9);
}

#if defined(__SSE__)
TEST_P(CodecTarget, FlushToZeroOfTheCallerChangesNothing) {
  const Vector v = MakeVector(5000, Data::kTiny, 8);
  const SignParams params{.rotation_seed = 1};
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);  // flush results and operands to zero
  const auto code = EncodeOrDie(v.Pieces(), v.All(), params);
  const auto mean = DecodeOrDie(v.Pieces(), v.All(), params, {code});
  EXPECT_EQ(_mm_getcsr() & 0x8040, 0x8040u);
  _mm_setcsr(saved);
  EXPECT_EQ(Plain(code), reference::Encode(v.Slice(v.All()), {true, 1, 0}, 1));
  EXPECT_EQ(Bits(mean), Bits(reference::DecodeMean({Plain(code)}, v.Slice(v.All()), {true, 1, 0})));
}
#endif

// ---- the document's vectors ----

std::string Hex(const std::vector<uint8_t>& bytes) {
  std::string out;
  char text[3];
  for (uint8_t byte : bytes) {
    std::snprintf(text, sizeof(text), "%02x", byte);
    out += text;
  }
  return out;
}

std::string HexWords(const std::vector<float>& values) {
  std::string out;
  char text[9];
  for (uint32_t word : Bits(values)) {
    std::snprintf(text, sizeof(text), "%08x", word);
    out += text;
  }
  return out;
}

std::string Joined(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += word;
  return out;
}

// The fenced blocks of docs/wire-format.md that begin with "sign-code", as key -> words.
std::vector<std::map<std::string, std::vector<std::string>>> DocumentVectors() {
  std::ifstream file(GEOMESH_WIRE_FORMAT_MD);
  std::vector<std::map<std::string, std::vector<std::string>>> vectors;
  bool inside = false;
  std::string key;
  for (std::string line; std::getline(file, line);) {
    if (line == "```sign-code") {
      inside = true;
      vectors.emplace_back();
      continue;
    }
    if (line == "```") inside = false;
    if (!inside) continue;
    std::istringstream words(line);
    if (line.empty() || line[0] != ' ') words >> key;
    for (std::string word; words >> word;) {
      // "count*value" repeats.
      const size_t star = word.find('*');
      const int count = star == std::string::npos ? 1 : std::stoi(word.substr(0, star));
      if (star != std::string::npos) word.erase(0, star + 1);
      for (int i = 0; i < count; ++i) vectors.back()[key].push_back(word);
    }
  }
  return vectors;
}

TEST_P(CodecTarget, DocumentVectors) {
  const auto vectors = DocumentVectors();
  ASSERT_EQ(vectors.size(), 4u) << GEOMESH_WIRE_FORMAT_MD;
  for (auto vector : vectors) {
    SCOPED_TRACE(vector["name"].at(0));
    const auto number = [&](const char* key) { return std::stoull(vector[key].at(0)); };
    std::vector<float> values;
    // Not stof, which takes a denormal for an error.
    for (const auto& word : vector["values"]) values.push_back(std::strtof(word.c_str(), nullptr));
    const std::vector<Piece> pieces = {
        {.current = values.data(),
         .elements = static_cast<int64_t>(values.size()),
         .row_elements = static_cast<int64_t>(number("row_elements")),
         .name = "w"}};
    const Range range{0, static_cast<int64_t>(values.size())};
    const SignParams params{.rotate = number("rotate") == 1,
                            .rotation_seed = number("rotation_seed"),
                            .dither_seed = number("dither_seed")};
    const auto code = EncodeOrDie(pieces, range, params, {.weight = number("weight")});
    EXPECT_EQ(Hex(Plain(code)), Joined(vector["code"]));
    EXPECT_EQ(HexWords(DecodeOrDie(pieces, range, params, {code})), Joined(vector["mean"]));
  }
}

// ---- what the estimate promises ----

TEST(CodecEstimate, KeepsTheProjectionOnTheInput) {
  // <estimate, x> = (m / m exact) ||x||^2 for each block and any seed: m is rounded by less than
  // 1/16, and without bias over dither seeds.
  const Vector v = MakeVector(4096, Data::kNormal, 11);
  const double norm = SquaredNorm(v.values);
  const int seeds = 2000;
  double mean = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    const SignParams params{.rotation_seed = 5, .dither_seed = static_cast<uint64_t>(seed)};
    const auto estimate =
        DecodeOrDie(v.Pieces(), v.All(), params, {EncodeOrDie(v.Pieces(), v.All(), params)});
    double dot = 0;
    for (int i = 0; i < 4096; ++i) dot += static_cast<double>(estimate[i]) * v.values[i];
    ASSERT_NEAR(dot / norm, 1.0, 1.0 / 16 + 1e-5);
    mean += dot / norm / seeds;
  }
  // A rounding to one of two values 1/16 apart at most has a deviation of 1/32 at most: 5 sigma.
  EXPECT_NEAR(mean, 1.0, 5.0 / 32 / std::sqrt(seeds));
}

TEST(CodecEstimate, IsUnbiasedOverRotations) {
  // One estimate of dense data errs by (pi/2 - 1) of the squared norm; the mean of R by 1/R of
  // that, if and only if there is no bias.
  const Vector v = MakeVector(4096, Data::kNormal, 12);
  const double norm = SquaredNorm(v.values);
  const int seeds = 1000;
  std::vector<double> mean(4096);
  for (int seed = 0; seed < seeds; ++seed) {
    const SignParams params{.rotation_seed = static_cast<uint64_t>(seed),
                            .dither_seed = static_cast<uint64_t>(seed)};
    const auto estimate =
        DecodeOrDie(v.Pieces(), v.All(), params, {EncodeOrDie(v.Pieces(), v.All(), params)});
    for (int i = 0; i < 4096; ++i) mean[i] += estimate[i] / static_cast<double>(seeds);
  }
  double error = 0;
  for (int i = 0; i < 4096; ++i) error += std::pow(mean[i] - v.values[i], 2);
  const double expected = (M_PI / 2 - 1) * norm / seeds;
  // Deviation of a sum of 4,096 squares is sqrt(2 / 4096) of it: five of them, and room for bias
  // of 0.01 % of the norm.
  EXPECT_LT(error, expected * (1 + 5 * std::sqrt(2.0 / 4096)) + 1e-4 * norm);
  EXPECT_GT(error, expected * (1 - 5 * std::sqrt(2.0 / 4096)));
}

TEST(CodecEstimate, MeanOverRanksIsWeightedAndItsErrorFallsWithRanks) {
  // Independent data: each rank's error is (pi/2 - 1) of its squared norm, so the weighted mean's
  // is that times the sum of w^2 over (sum of w)^2.
  const int64_t n = 3 * 4096 + 64;
  for (int ranks : {1, 4, 16, 64}) {
    std::vector<std::vector<std::byte>> codes;
    std::vector<double> truth(n);
    double total = 0, expected = 0;
    Vector v;
    for (int rank = 0; rank < ranks; ++rank) {
      v = MakeVector(n, Data::kNormal, 1000u + static_cast<uint32_t>(rank));
      const uint64_t weight = static_cast<uint64_t>(1 + rank % 3);
      codes.push_back(
          EncodeOrDie(v.Pieces(), v.All(),
                      {.rotation_seed = 77, .dither_seed = static_cast<uint64_t>(100 + rank)},
                      {.weight = weight}));
      const auto w = static_cast<double>(weight);
      for (int64_t i = 0; i < n; ++i) truth[i] += w * v.values[i];
      total += w;
      expected += w * w * (M_PI / 2 - 1) * SquaredNorm(v.values);
    }
    expected /= total * total;
    const auto mean = DecodeOrDie(v.Pieces(), v.All(), {.rotation_seed = 77}, codes);
    double error = 0;
    for (int64_t i = 0; i < n; ++i) error += std::pow(mean[i] - truth[i] / total, 2);
    EXPECT_NEAR(error / expected, 1.0, 0.1) << ranks << " ranks";
  }
}

TEST(CodecEstimate, SmallBlocksBesideLargeOnesStayUnbiased) {
  // 18 octaves below the largest magnitude: beyond a byte's span, so there or absent at random.
  Vector v;
  v.values.assign(8192, 0.0f);
  v.values[0] = 1.0f;
  v.values[4096 + 17] = -0x1.8p-18f;
  v.piece_elements = {8192};
  v.row_elements = {0};
  const int seeds = 4000;
  double mean = 0;
  int absent = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    const SignParams params{.rotation_seed = 1, .dither_seed = static_cast<uint64_t>(seed)};
    const auto code = EncodeOrDie(v.Pieces(), v.All(), params);
    const auto estimate = DecodeOrDie(v.Pieces(), v.All(), params, {code});
    absent += estimate[4096 + 17] == 0;
    mean += static_cast<double>(estimate[4096 + 17]) / seeds;
  }
  EXPECT_GT(absent, seeds / 2);
  EXPECT_LT(absent, seeds);
  // Present with probability p = 0.37 or so, at value / p: relative deviation sqrt((1 - p) / p).
  const double p = 1 - absent / static_cast<double>(seeds);
  EXPECT_NEAR(mean / -0x1.8p-18, 1.0, 5 * std::sqrt((1 - p) / p / seeds));
}

TEST(CodecEstimate, OneNonzeroElementIsExactUpToItsMagnitudesRounding) {
  for (int64_t n : {1, 5, 64, 100, 4096}) {
    Vector v;
    v.values.assign(n, 0.0f);
    v.values[n - 1] = -1.5f;  // has four bits of mantissa
    v.piece_elements = {n};
    v.row_elements = {0};
    const auto estimate = DecodeOrDie(v.Pieces(), v.All(), {.rotation_seed = 3},
                                      {EncodeOrDie(v.Pieces(), v.All(), {.rotation_seed = 3})});
    EXPECT_EQ(Bits(estimate), Bits(v.values));
  }
}

TEST(CodecRows, DeadRowsComeOutAsPlusZeroAndOthersDoNot) {
  for (bool rotate : {true, false}) {
    Vector v = MakeVector(10000, Data::kNormal, 20);
    v.piece_elements = {10000};
    v.row_elements = {100};
    std::vector<std::vector<std::byte>> codes;
    for (int rank = 0; rank < 3; ++rank) {
      Vector own = v;
      // Rank r lacks rows r, r + 3, ...; all lack rows 40 to 59 (as -0).
      for (int i = 0; i < 10000; ++i) {
        if (i / 100 % 3 == rank) own.values[i] = 0.0f;
        if (i / 100 >= 40 && i / 100 < 60) own.values[i] = -0.0f;
      }
      codes.push_back(EncodeOrDie(own.Pieces(), own.All(),
                                  {.rotate = rotate, .rotation_seed = 1, .dither_seed = 2}));
    }
    const auto mean =
        DecodeOrDie(v.Pieces(), v.All(), {.rotate = rotate, .rotation_seed = 1}, codes);
    for (int i = 0; i < 10000; ++i) {
      if (i / 100 >= 40 && i / 100 < 60) {
        ASSERT_EQ(std::bit_cast<uint32_t>(mean[i]), 0u) << i;
      } else {
        ASSERT_NE(std::bit_cast<uint32_t>(mean[i]), 0x80000000u) << i;
      }
    }
    EXPECT_GT(std::count_if(mean.begin(), mean.end(), [](float x) { return x != 0; }), 7000);
  }
}

TEST(CodecRows, ZeroVectorIsHeaderAndMagnitudes) {
  Vector v;
  v.values.assign(20000, -0.0f);
  v.piece_elements = {20000};
  v.row_elements = {10};
  const auto code = EncodeOrDie(v.Pieces(), v.All(), {}, {.weight = 5});
  EXPECT_EQ(code.size(), 32u + 3u + 8u);  // runs: 0 live, 2,000 dead; 4 + 4 blocks
  const auto mean = DecodeOrDie(v.Pieces(), v.All(), {}, {code});
  EXPECT_EQ(Bits(mean), std::vector<uint32_t>(20000, 0u));
}

TEST(CodecSize, BoundHoldsFrom303000ElementsOn) {
  const auto bytes = [](int64_t n) {
    const std::vector<Piece> pieces = {{.elements = n, .name = "w"}};
    return MaxEncodedBytes(pieces, {0, n}) - 1;  // less the row bitmap of one row
  };
  for (int64_t n = 303000; n < 303000 + 3 * 4096; ++n) {
    ASSERT_LE(static_cast<double>(bytes(n)), 4.0 * static_cast<double>(n) / 31.9) << n;
  }
  EXPECT_EQ(bytes(1), 32 + 1 + 8);
  EXPECT_EQ(bytes(4096 + 65), 32 + 2 + 512 + 16);
}

TEST(CodecRows, FewDeadRowsKeepALargeModelWithinTheSizeBound) {
  Vector v = MakeVector(1 << 21, Data::kNormal, 21);
  v.piece_elements = {1 << 21};
  v.row_elements = {128};
  std::fill(v.values.begin() + 128 * 500, v.values.begin() + 128 * 700, 0.0f);
  v.values[128 * 600] = 1.0f;
  const auto code = EncodeOrDie(v.Pieces(), v.All(), {});
  EXPECT_LE(static_cast<double>(code.size()), 4.0 * v.values.size() / 31.9);
}

TEST(CodecResidual, IsWhatTheCodeLostTimesDecay) {
  for (bool rotate : {true, false}) {
    const Vector v = MakeVector(9000, Data::kDeadRows, 30);
    const SignParams params{.rotate = rotate, .rotation_seed = 1, .dither_seed = 2};
    Vector with_residual = v;
    std::vector<float> residual(9000);
    for (int i = 0; i < 9000; ++i) {
      residual[i] = v.values[i] == 0 ? 0 : static_cast<float>(i % 7) / 8;
      with_residual.values[i] = v.values[i] + residual[i];
    }
    const auto code = EncodeOrDie(v.Pieces(), v.All(), params,
                                  {.residual = absl::MakeSpan(residual), .residual_decay = 0.5f});
    EXPECT_EQ(Plain(code), Plain(EncodeOrDie(with_residual.Pieces(), v.All(), params)));
    const auto estimate = DecodeOrDie(v.Pieces(), v.All(), params, {code});
    for (int i = 0; i < 9000; ++i) {
      ASSERT_EQ(residual[i], (with_residual.values[i] - estimate[i]) * 0.5f) << i;
    }
  }
}

// ---- what is refused ----

TEST(CodecErrors, NonFiniteValuesNamePieceAndElementAndLeaveTheResidual) {
  for (bool rotate : {true, false}) {
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), INFINITY, -INFINITY}) {
      for (int64_t at : {0, 1, 4200, 5000, 5069, 5070, 9999}) {
        Vector v = MakeVector(10000, Data::kNormal, 40);
        v.piece_elements = {5000, 70, 4930};
        v.values[at] = bad;
        std::vector<float> residual(10000, 0.25f);
        std::vector<std::byte> code(static_cast<size_t>(MaxEncodedBytes(v.Pieces(), v.All())));
        const auto used = Encode(v.Pieces(), v.All(), {.rotate = rotate},
                                 {.residual = absl::MakeSpan(residual)}, absl::MakeSpan(code));
        ASSERT_EQ(used.status().code(), absl::StatusCode::kInvalidArgument);
        const bool first = at < 5000, second = at < 5070;
        EXPECT_THAT(std::string(used.status().message()),
                    HasSubstr(first    ? "\"embedding\" at element " + std::to_string(at) + " "
                              : second ? "\"weight\" at element " + std::to_string(at - 5000) + " "
                                       : "\"bias\" at element " + std::to_string(at - 5070) + " "));
        EXPECT_EQ(residual, std::vector<float>(10000, 0.25f));
      }
    }
  }
}

TEST(CodecErrors, TooLargeValuesAndBadResidualsAreNamed) {
  Vector v = MakeVector(5000, Data::kNormal, 41);
  v.piece_elements = {5000};
  v.row_elements = {0};
  v.values[4321] = 0x1p70f;
  std::vector<std::byte> code(static_cast<size_t>(MaxEncodedBytes(v.Pieces(), v.All())));
  for (bool rotate : {true, false}) {
    const auto used = Encode(v.Pieces(), v.All(), {.rotate = rotate}, {}, absl::MakeSpan(code));
    EXPECT_THAT(std::string(used.status().message()),
                HasSubstr("\"embedding\" at element 4321 is 1.18059e+21, too large"));
  }
  v.values[4321] = 0x1p55f;
  EXPECT_TRUE(Encode(v.Pieces(), v.All(), {}, {}, absl::MakeSpan(code)).ok());
  std::vector<float> residual(5000);
  residual[77] = NAN;
  const auto used =
      Encode(v.Pieces(), v.All(), {}, {.residual = absl::MakeSpan(residual)}, absl::MakeSpan(code));
  EXPECT_THAT(std::string(used.status().message()),
              HasSubstr("the residual of \"embedding\" at element 77 is nan"));
}

TEST(CodecErrors, HalfNonFiniteValuesAreFound) {
  std::vector<uint16_t> values(300, 0x3C00);
  for (auto [dtype, bits] : {std::pair{DType::kF16, 0x7C00},
                             {DType::kF16, 0xFE01},
                             {DType::kBF16, 0x7F80},
                             {DType::kBF16, 0xFFC1}}) {
    values[123] = static_cast<uint16_t>(bits);
    const std::vector<Piece> pieces = {
        {.current = values.data(), .dtype = dtype, .elements = 300, .name = "w"}};
    std::vector<std::byte> code(static_cast<size_t>(MaxEncodedBytes(pieces, {0, 300})));
    EXPECT_THAT(
        std::string(Encode(pieces, {0, 300}, {}, {}, absl::MakeSpan(code)).status().message()),
        HasSubstr("\"w\" at element 123"));
  }
}

TEST(CodecErrors, WeightZeroReadsNothing) {
  std::vector<float> residual(10, 3.0f);
  const std::vector<Piece> pieces = {{.elements = 10, .name = "w"}};
  std::vector<std::byte> code(static_cast<size_t>(MaxEncodedBytes(pieces, {0, 10})));
  const auto used = Encode(pieces, {0, 10}, {}, {.weight = 0, .residual = absl::MakeSpan(residual)},
                           absl::MakeSpan(code));
  ASSERT_TRUE(used.ok()) << used.status();
  EXPECT_EQ(*used, 32u);
  EXPECT_EQ(residual, std::vector<float>(10, 3.0f));
}

TEST(CodecErrors, BadCallsSayWhatIsWrong) {
  const Vector v = MakeVector(10000, Data::kNormal, 42);
  const auto message = [&](std::vector<Piece> pieces, Range range, EncodeOptions options = {},
                           size_t room = 100000) {
    std::vector<std::byte> code(room);
    const auto used = Encode(pieces, range, {}, options, absl::MakeSpan(code));
    EXPECT_EQ(used.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(used.status().message());
  };
  EXPECT_THAT(message(v.Pieces(), {100, 9900}), HasSubstr("begins at 100"));
  EXPECT_THAT(message(v.Pieces(), {0, 5000}), HasSubstr("ends inside a block"));
  EXPECT_THAT(message(v.Pieces(), {0, 10001}), HasSubstr("outside the vector's 10000"));
  EXPECT_THAT(message(v.Pieces(), {4096, 8192}), HasSubstr("outside"));
  EXPECT_THAT(message(v.Pieces(), {-4096, 4096}), HasSubstr("outside"));
  EXPECT_THAT(message(v.Pieces(), v.All(), {}, 32), HasSubstr("32 bytes for a code"));
  EXPECT_THAT(message(v.Pieces(), v.All(), {.weight = uint64_t{1} << 48}), HasSubstr("2^48"));
  std::vector<float> residual(9999);
  EXPECT_THAT(message(v.Pieces(), v.All(), {.residual = absl::MakeSpan(residual)}),
              HasSubstr("residual has 9999"));
  auto pieces = v.Pieces();
  pieces[1].dtype = DType::kF64;
  EXPECT_THAT(message(pieces, v.All()), HasSubstr("\"weight\" is float64"));
  pieces = v.Pieces();
  pieces[0].current = nullptr;
  EXPECT_THAT(message(pieces, v.All()), HasSubstr("\"embedding\" has no memory"));
  pieces = v.Pieces();
  pieces[0].row_elements = -1;
  EXPECT_THAT(message(pieces, v.All()), HasSubstr("negative"));
}

// An accumulator that already holds something, to see that a refused code leaves it alone.
class CodecDamage : public ::testing::Test {
 protected:
  void Use(const Vector& v, bool rotate) {
    vector_ = v;
    pieces_ = vector_.Pieces();
    params_ = {.rotate = rotate, .rotation_seed = 50, .dither_seed = 51};
    code_ = EncodeOrDie(pieces_, vector_.All(), params_, {.weight = 3});
    sum_.assign(static_cast<size_t>(SignAccumulator::SumElements(vector_.All())), 0.0f);
    accumulator_.emplace(pieces_, vector_.All(), params_, absl::MakeSpan(sum_));
    ASSERT_TRUE(accumulator_->Add(code_).ok());
    before_ = sum_;
  }

  // Adds `code` from memory of exactly its size; the error's text, "" if it was taken.
  std::string Add(const std::vector<std::byte>& code) {
    const std::vector<std::byte> copy(code);
    const uint64_t weight = accumulator_->total_weight();
    const absl::Status status = accumulator_->Add(copy);
    if (status.ok()) {
      before_ = sum_;
      return "";
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(accumulator_->total_weight(), weight);
    EXPECT_EQ(std::memcmp(sum_.data(), before_.data(), 4 * sum_.size()), 0);
    return std::string(status.message());
  }

  // The code with one byte set.
  std::vector<std::byte> With(size_t at, int byte) const {
    std::vector<std::byte> code = code_;
    code.at(at) = static_cast<std::byte>(byte);
    return code;
  }

  Vector vector_;
  std::vector<Piece> pieces_;
  SignParams params_;
  std::vector<std::byte> code_;
  std::vector<float> sum_, before_;
  std::optional<SignAccumulator> accumulator_;
};

TEST_F(CodecDamage, HeaderFields) {
  Use(MakeVector(10000, Data::kNormal, 43), true);
  EXPECT_THAT(Add(With(0, 'X')), HasSubstr("\"GS\""));
  EXPECT_THAT(Add(With(1, 'X')), HasSubstr("\"GS\""));
  EXPECT_THAT(Add(With(2, 2)), HasSubstr("version 2"));
  EXPECT_THAT(Add(With(3, 0)), HasSubstr("plain signs, expected a rotation"));
  EXPECT_THAT(Add(With(3, 7)), HasSubstr("flags"));
  EXPECT_THAT(Add(With(3, 0x81)), HasSubstr("flags"));
  EXPECT_THAT(Add(With(5, 0x7F)), HasSubstr("base"));
  EXPECT_THAT(Add(With(5, 0x80)), HasSubstr("base"));
  EXPECT_THAT(Add(With(6, 1)), HasSubstr("rows"));
  EXPECT_THAT(Add(With(15, 1)), HasSubstr("weight"));
  EXPECT_THAT(Add(With(16, 1)), HasSubstr("expected 10000 from block 0"));
  EXPECT_THAT(Add(With(24, 1)), HasSubstr("from block 1"));
  EXPECT_THAT(Add(With(28, static_cast<int>(code_[28]) ^ 1)), HasSubstr("seed"));
  EXPECT_THAT(WeightOf(With(1, 0)).status().message(), HasSubstr("\"GS\""));
  EXPECT_FALSE(WeightOf({}).ok());
  std::vector<std::byte> zero_weight = With(8, 0);
  EXPECT_THAT(Add(zero_weight), HasSubstr("weight is 0"));
  EXPECT_EQ(Add(code_), "");
}

TEST_F(CodecDamage, EveryTruncationAndAnyExtension) {
  for (Data data : {Data::kNormal, Data::kDeadRows}) {
    Use(MakeVector(9000, data, 44), true);
    for (size_t size = 0; size < code_.size(); ++size) {
      ASSERT_NE(Add({code_.begin(), code_.begin() + static_cast<int64_t>(size)}), "") << size;
    }
    auto longer = code_;
    longer.push_back(std::byte{0});
    EXPECT_THAT(Add(longer), HasSubstr("bytes of signs"));
  }
}

TEST_F(CodecDamage, Magnitudes) {
  Use(MakeVector(10000, Data::kNormal, 45), true);
  // 3 full blocks would be 12,288: 2 full ones, then 1,024, 512, 256 and 64 (10,048 in all).
  ASSERT_EQ(reference::Blocks(10000), (std::vector<int64_t>{4096, 4096, 1024, 512, 256, 64}));
  EXPECT_THAT(Add(With(32, 0)), HasSubstr("bytes of signs"));
  for (size_t k = 0; k < 6; ++k) {
    if (code_[32 + k] != std::byte{255}) continue;
    EXPECT_THAT(Add(With(32 + k, 254)), HasSubstr("base"));
  }
  auto absent = code_;
  for (size_t k = 0; k < 6; ++k) absent[32 + k] = std::byte{0};
  absent.resize(38);
  EXPECT_THAT(Add(absent), HasSubstr("base"));
  absent[4] = absent[5] = std::byte{0};
  EXPECT_EQ(Add(absent), "");  // all blocks rounded to nothing: can be
  auto low = code_;
  low[4] = std::byte{0x40}, low[5] = std::byte{0xFF};  // base -192: bytes to 192 are nothing
  low[32] = std::byte{150};
  EXPECT_THAT(Add(low), HasSubstr("magnitude of block 0 is zero"));
}

TEST_F(CodecDamage, RowMaps) {
  Vector v = MakeVector(4096, Data::kNormal, 46);
  v.piece_elements = {4096};
  v.row_elements = {512};
  std::fill(v.values.begin() + 512, v.values.begin() + 1024, 0.0f);
  Use(v, true);
  ASSERT_EQ(code_[3], std::byte{1 | 1 << 1});  // bitmap of one byte; runs would be 1 1 6
  ASSERT_EQ(code_[32], std::byte{0xFD});
  EXPECT_THAT(Add(With(32, 0xFF)), HasSubstr("shortest"));
  EXPECT_THAT(Add(With(32, 0x00)), HasSubstr("all of its rows are zero"));
  auto runs = code_;
  runs[3] = std::byte{1 | 2 << 1};
  runs[32] = std::byte{1};
  runs.insert(runs.begin() + 33, {std::byte{1}, std::byte{6}});
  EXPECT_THAT(Add(runs), HasSubstr("shortest"));

  v.row_elements = {64};  // 64 rows: bitmap 8 bytes, runs fewer
  std::fill(v.values.begin(), v.values.end(), 1.0f);
  std::fill(v.values.begin() + 64 * 10, v.values.begin() + 64 * 20, 0.0f);
  Use(v, true);
  ASSERT_EQ(code_[3], std::byte{1 | 2 << 1});
  EXPECT_EQ(code_[32], std::byte{10});
  EXPECT_EQ(code_[33], std::byte{10});
  EXPECT_EQ(code_[34], std::byte{44});
  EXPECT_THAT(Add(With(34, 45)), HasSubstr("too long"));
  EXPECT_THAT(Add(With(33, 0)), HasSubstr("is empty"));
  EXPECT_THAT(Add(With(32, 64)), HasSubstr("shortest"));  // no dead row at all
  EXPECT_THAT(Add(With(32, 0x8A)), ::testing::Ne(""));
  auto padded = code_;
  padded[34] = std::byte{0xAC};  // 44 in two bytes
  padded.insert(padded.begin() + 35, std::byte{0});
  EXPECT_THAT(Add(padded), HasSubstr("needless"));
  auto huge = code_;
  huge.insert(huge.begin() + 32, 12, std::byte{0xFF});
  EXPECT_THAT(Add(huge), HasSubstr("too long"));
}

TEST_F(CodecDamage, BitmapBeyondTheLastRow) {
  Vector v = MakeVector(60, Data::kNormal, 47);
  v.piece_elements = {60};
  v.row_elements = {10};  // 6 rows
  std::fill(v.values.begin() + 10, v.values.begin() + 20, 0.0f);
  Use(v, true);
  ASSERT_EQ(code_[32], std::byte{0x3D});
  EXPECT_THAT(Add(With(32, 0x7D)), HasSubstr("after the last row"));
}

TEST_F(CodecDamage, PlainSignsInPaddingOrDeadRows) {
  Vector v = MakeVector(60, Data::kNormal, 48);
  v.piece_elements = {60};
  v.row_elements = {10};
  std::fill(v.values.begin() + 10, v.values.begin() + 20, 0.0f);
  Use(v, false);
  ASSERT_EQ(code_.size(), 32u + 1 + 1 + 8);
  const auto flip = [&](size_t bit) {
    const size_t at = 34 + bit / 8;
    return With(at, static_cast<int>(code_[at]) ^ 1 << (bit % 8));
  };
  EXPECT_THAT(Add(flip(60)), HasSubstr("padding"));
  EXPECT_THAT(Add(flip(63)), HasSubstr("padding"));
  EXPECT_THAT(Add(flip(10)), HasSubstr("row 1 is zero"));
  EXPECT_THAT(Add(flip(19)), HasSubstr("row 1 is zero"));
  EXPECT_EQ(Add(flip(20)), "");
}

TEST_F(CodecDamage, RandomBytesNeverHarm) {
  std::mt19937 random(49);
  int taken = 0, refused = 0;
  for (bool rotate : {true, false}) {
    for (Data data : kAllData) {
      Use(MakeVector(4500, data, 50), rotate);
      for (int i = 0; i < 1500; ++i) {
        auto code = code_;
        // Mostly near the front, where the structure is.
        for (uint32_t changes = 1 + random() % 3; changes > 0; --changes) {
          const size_t at =
              random() % (random() % 2 ? code.size() : std::min<size_t>(60, code.size()));
          code[at] = static_cast<std::byte>(random());
        }
        if (random() % 4 == 0) code.resize(random() % (code.size() + 40), std::byte{0x5A});
        const bool ok = Add(code).empty();
        ++(ok ? taken : refused);
        for (float x : {sum_.front(), sum_.back()}) ASSERT_TRUE(std::isfinite(x));
      }
      for (int i = 0; i < 300; ++i) {
        std::vector<std::byte> code(random() % 700);
        for (std::byte& byte : code) byte = static_cast<std::byte>(random());
        EXPECT_NE(Add(code), "");
        std::copy_n(code_.begin(), std::min<size_t>(code.size(), 32), code.begin());
        Add(code);
      }
    }
  }
  EXPECT_GT(taken, 100);  // signs alone may take any pattern
  EXPECT_GT(refused, 5000);
}

TEST(CodecEmpty, NoElements) {
  const std::vector<Piece> pieces = {{.elements = 0, .name = "none"}};
  for (const std::vector<Piece>& p : {std::vector<Piece>{}, pieces}) {
    const auto code = EncodeOrDie(p, {0, 0}, {}, {.weight = 7});
    EXPECT_EQ(code.size(), 32u);
    std::vector<float> none;
    SignAccumulator accumulator(p, {0, 0}, {}, absl::MakeSpan(none));
    EXPECT_TRUE(accumulator.Add(code).ok());
    EXPECT_EQ(accumulator.total_weight(), 7u);
    accumulator.Finish(absl::MakeSpan(none));
  }
}

TEST(CodecEmpty, NoWeightGivesPlusZero) {
  const Vector v = MakeVector(5000, Data::kNormal, 60);
  const auto code = EncodeOrDie(v.Pieces(), v.All(), {}, {.weight = 0});
  EXPECT_EQ(code.size(), 32u);
  EXPECT_EQ(Bits(DecodeOrDie(v.Pieces(), v.All(), {}, {code, code})),
            std::vector<uint32_t>(5000, 0u));
  EXPECT_EQ(Bits(DecodeOrDie(v.Pieces(), v.All(), {}, {})), std::vector<uint32_t>(5000, 0u));
}

}  // namespace
}  // namespace geomesh::codec
