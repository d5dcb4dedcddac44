// Values for the codec's tests, on the CPU and on a GPU: what training produces, and what breaks
// codecs.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace geomesh::codec {

enum class Data {
  kNormal,
  kDeadRows,
  kZeroBlocks,
  kWideRange,
  kTiny,
  kDenormals,
  kSignedZeros,
  kZero
};
inline constexpr Data kAllData[] = {Data::kNormal,      Data::kDeadRows, Data::kZeroBlocks,
                                    Data::kWideRange,   Data::kTiny,     Data::kDenormals,
                                    Data::kSignedZeros, Data::kZero};

// The vectors are a table of rows of 24, a piece of one row, and the rest in rows of 1,000.
struct Rows {
  int64_t table = 0;  // elements
  int64_t one = 0;
};
inline Rows RowsOf(int64_t n) {
  const int64_t table = n / 2 / 24 * 24;
  return {table, std::min<int64_t>(n - table, 70)};
}

inline std::vector<float> MakeValues(int64_t n, Data data, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const int64_t table = RowsOf(n).table;
  std::vector<float> values;
  for (int64_t i = 0; i < n; ++i) {
    float x = normal(random);
    switch (data) {
      case Data::kNormal:
        break;
      case Data::kDeadRows:
        if (i < table ? (i / 24 * 2654435761u + seed) % 5 < 2 : (i - table) % 3000 > 2000) x = 0;
        break;
      case Data::kZeroBlocks:
        if (i / 4096 % 3 == seed % 3 || i % 4096 / 64 == 5) x = 0;
        break;
      case Data::kWideRange:
        x = std::ldexp(x, -static_cast<int>(i / 4096 * 11 % 40));
        break;
      case Data::kTiny:
        x = std::ldexp(x, -110 - static_cast<int>(i / 64 % 40));
        break;
      case Data::kDenormals:
        x = std::bit_cast<float>(static_cast<uint32_t>(random() % 5000 | random() % 2 << 31));
        break;
      case Data::kSignedZeros:
        if (i % 3 != 0) x = i % 3 == 1 ? -0.0f : 0.0f;
        break;
      case Data::kZero:
        x = i % 2 == 0 ? 0.0f : -0.0f;
        break;
    }
    values.push_back(x);
  }
  return values;
}

}  // namespace geomesh::codec
