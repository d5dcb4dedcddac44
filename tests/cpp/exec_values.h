// Elements of any dtype as doubles, for tests: plain conversions that share nothing with the code
// under test.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/dtype.h"
#include "exec/reduce.h"

namespace geomesh::testing {

// Only values that the type holds exactly, or that double rounds like it (float32).
inline void Store(DType dtype, double value, std::byte* at) {
  const auto put = [at](auto v) { std::memcpy(at, &v, sizeof(v)); };
  switch (dtype) {
    case DType::kF32:
      return put(static_cast<float>(value));
    case DType::kF64:
      return put(value);
    case DType::kF16: {
      if (value == 0) return put(uint16_t{0});
      const int exponent = std::max(std::ilogb(std::fabs(value)), -14);
      const int units =
          static_cast<int>(std::nearbyint(std::ldexp(std::fabs(value), 10 - exponent)));
      const int bits = ((exponent + 14) << 10) + units;  // the leading one adds 1 to the exponent
      return put(static_cast<uint16_t>((value < 0 ? 0x8000 : 0) | bits));
    }
    case DType::kBF16: {
      const float narrow = static_cast<float>(value);
      uint32_t bits;
      std::memcpy(&bits, &narrow, sizeof(bits));
      return put(static_cast<uint16_t>(bits >> 16));
    }
    case DType::kI8:
      return put(static_cast<int8_t>(value));
    case DType::kI16:
      return put(static_cast<int16_t>(value));
    case DType::kI32:
      return put(static_cast<int32_t>(value));
    case DType::kI64:
      return put(static_cast<int64_t>(value));
    case DType::kU8:
    case DType::kBool:
      return put(static_cast<uint8_t>(value));
    case DType::kU16:
      return put(static_cast<uint16_t>(value));
    case DType::kU32:
      return put(static_cast<uint32_t>(value));
    case DType::kU64:
      return put(static_cast<uint64_t>(value));
  }
}

inline double Load(DType dtype, const std::byte* at) {
  const auto get = [at](auto v) {
    std::memcpy(&v, at, sizeof(v));
    return v;
  };
  switch (dtype) {
    case DType::kF32:
      return get(float{});
    case DType::kF64:
      return get(double{});
    case DType::kF16: {
      const int bits = get(uint16_t{});
      const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
      const double magnitude = exponent == 31  ? (fraction == 0 ? INFINITY : NAN)
                               : exponent == 0 ? std::ldexp(fraction, -24)
                                               : std::ldexp(fraction + 1024, exponent - 25);
      return bits >> 15 ? -magnitude : magnitude;
    }
    case DType::kBF16: {
      const uint32_t bits = static_cast<uint32_t>(get(uint16_t{})) << 16;
      float value;
      std::memcpy(&value, &bits, sizeof(value));
      return value;
    }
    case DType::kI8:
      return get(int8_t{});
    case DType::kI16:
      return get(int16_t{});
    case DType::kI32:
      return get(int32_t{});
    case DType::kI64:
      return static_cast<double>(get(int64_t{}));
    case DType::kU8:
    case DType::kBool:
      return get(uint8_t{});
    case DType::kU16:
      return get(uint16_t{});
    case DType::kU32:
      return get(uint32_t{});
    case DType::kU64:
      return static_cast<double>(get(uint64_t{}));
  }
  return NAN;
}

// The reduction of all contributions, with real numbers.
inline double ReduceAll(exec::ReduceOp op, DType dtype, const std::vector<double>& values) {
  double result = values[0];
  const auto bits = [](double v) { return static_cast<int64_t>(v); };
  for (size_t i = 1; i < values.size(); ++i) {
    switch (op) {
      case exec::ReduceOp::kSum:
      case exec::ReduceOp::kAvg:
        result += values[i];
        break;
      case exec::ReduceOp::kProduct:
        result *= values[i];
        break;
      case exec::ReduceOp::kMin:
        result = std::min(result, values[i]);
        break;
      case exec::ReduceOp::kMax:
        result = std::max(result, values[i]);
        break;
      case exec::ReduceOp::kBand:
        result = static_cast<double>(bits(result) & bits(values[i]));
        break;
      case exec::ReduceOp::kBor:
        result = static_cast<double>(bits(result) | bits(values[i]));
        break;
      case exec::ReduceOp::kBxor:
        result = static_cast<double>(bits(result) ^ bits(values[i]));
        break;
    }
  }
  if (dtype == DType::kBool && op == exec::ReduceOp::kSum) result = result > 0 ? 1 : 0;
  return op == exec::ReduceOp::kAvg ? result / static_cast<double>(values.size()) : result;
}

}  // namespace geomesh::testing
