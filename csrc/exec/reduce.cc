// The loops behind reduce.h: plain ones, which the compiler vectorises (this file is built with
// -O3), compiled once for each vector target and chosen at run time by Highway. Conversions of half
// types are integer arithmetic and exact float additions, so that targets with and without
// conversion instructions agree in every bit, and so do threads that flush denormals.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "exec/reduce.cc"
// Loops this plain gain nothing from the targets in between.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// clang-format off: highway.h comes after foreach_target.h
#include "hwy/highway.h"
// clang-format on

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "exec/reduce.h"

#ifndef GEOMESH_EXEC_REDUCE_MEAN
#define GEOMESH_EXEC_REDUCE_MEAN
namespace geomesh::exec {

// How a sum becomes a mean: operands times `scale`, a power of two, are added up; the sum times
// `factor` / `divisor` is the mean.
struct Mean {
  float scale = 1;
  double factor = 1, divisor = 1;
};

}  // namespace geomesh::exec
#endif  // GEOMESH_EXEC_REDUCE_MEAN

HWY_BEFORE_NAMESPACE();
namespace geomesh::exec {
namespace HWY_NAMESPACE {

// ---- half types: 16 bits, computed on as float ----

struct Half {
  uint16_t bits;
  static constexpr uint16_t kLargest = 0x7bff;
  static float ToFloat(Half h) {
    constexpr uint32_t kRebias = 112u << 23;            // float's exponent bias less half's
    constexpr float kSmallestNormal = 6.103515625e-5f;  // 2^-14
    const uint32_t magnitude = (h.bits & 0x7fffu) << 13;
    const uint32_t exponent = magnitude & (31u << 23);
    const uint32_t normal = magnitude + kRebias;
    const uint32_t special = normal + kRebias;  // infinity, NaN
    // Subnormal: as the fraction of a normal number with the smallest exponent, less that number.
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(normal + (1u << 23)) - kSmallestNormal);
    uint32_t result = exponent == 0 ? subnormal : normal;
    result = exponent == (31u << 23) ? special : result;
    return std::bit_cast<float>(result | (h.bits & 0x8000u) << 16);
  }
  static Half FromFloat(float value) {
    const uint32_t all = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (all >> 16) & 0x8000u;
    const uint32_t magnitude = all & 0x7fffffffu;
    // Normal: rebias and round to nearest even; 65520 and above carries over into infinity.
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Subnormal: adding 0.5 leaves exactly the half's bits in the fraction, rounded by the adder.
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - (126u << 23);
    uint32_t result = magnitude < (113u << 23) ? subnormal : normal;
    result = magnitude >= (143u << 23) ? 0x7c00u : result;
    result = magnitude > 0x7f800000u ? 0x7e00u : result;
    return Half{static_cast<uint16_t>(result | sign)};
  }
};

struct Bfloat {
  uint16_t bits;
  static constexpr uint16_t kLargest = 0x7f7f;
  static float ToFloat(Bfloat b) {
    return std::bit_cast<float>(static_cast<uint32_t>(b.bits) << 16);
  }
  static Bfloat FromFloat(float value) {
    const uint32_t all = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (all + 0x7fffu + ((all >> 16) & 1u)) >> 16;
    const uint32_t nan = ((all >> 16) & 0x8000u) | 0x7fc0u;
    return Bfloat{static_cast<uint16_t>((all & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
  }
};

template <typename T>
inline constexpr bool kIsHalf = std::is_same_v<T, Half> || std::is_same_v<T, Bfloat>;

// Unsigned and at least as wide as int, so that nothing overflows in the sense of the language.
template <typename T>
using Wrapping = std::conditional_t<sizeof(T) < 4, uint32_t, std::make_unsigned_t<T>>;

// ---- operators ----

struct Sum {
  template <typename T>
  static T Apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      return a + b;
    } else {
      return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    }
  }
};

struct Product {
  template <typename T>
  static T Apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      return a * b;
    } else {
      return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    }
  }
};

struct Min {
  template <typename T>
  static bool KeepsLeft(T a, T b) {
    return (a <= b) | (a != a);
  }
};

struct Max {
  template <typename T>
  static bool KeepsLeft(T a, T b) {
    return (a >= b) | (a != a);
  }
};

struct Band {
  template <typename T>
  static T Apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct Bor {
  template <typename T>
  static T Apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct Bxor {
  template <typename T>
  static T Apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

template <typename Op, typename T>
T Combine(T a, T b) {
  if constexpr (std::is_same_v<Op, Min> || std::is_same_v<Op, Max>) {
    if constexpr (kIsHalf<T>) {
      return T{Op::KeepsLeft(T::ToFloat(a), T::ToFloat(b)) ? a.bits : b.bits};
    } else {
      return Op::KeepsLeft(a, b) ? a : b;
    }
  } else if constexpr (kIsHalf<T>) {
    return T::FromFloat(Op::template Apply<float>(T::ToFloat(a), T::ToFloat(b)));
  } else {
    return Op::template Apply<T>(a, b);
  }
}

// The tile of elements that is reduced at a time: all operands' share of it fits the first cache.
constexpr int64_t kTile = 1024;

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)
inline constexpr bool kConvertsHalves = true;
#else
inline constexpr bool kConvertsHalves = false;
#endif

// out[i] = combine(out[i], float of from[i]), with the processor's own conversions, which are
// exact. Returns how many elements are done.
template <typename Combine>
int64_t WidenHalves(float* HWY_RESTRICT out, const Half* from, int64_t elements, Combine combine) {
  if constexpr (kConvertsHalves) {
    namespace hn = hwy::HWY_NAMESPACE;
    const hn::ScalableTag<float> df;
    const hn::Rebind<hwy::float16_t, decltype(df)> dh;
    const auto* HWY_RESTRICT halves = reinterpret_cast<const hwy::float16_t*>(from);
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
    int64_t i = 0;
    for (; i + lanes <= elements; i += lanes) {
      const auto value = hn::PromoteTo(df, hn::LoadU(dh, halves + i));
      hn::StoreU(combine(hn::LoadU(df, out + i), value), df, out + i);
    }
    return i;
  }
  return 0;
}

// to[i] = half of from[i]: the processor rounds as FromFloat does; NaNs are made alike here.
int64_t NarrowToHalves(Half* to, const float* HWY_RESTRICT from, int64_t elements) {
  if constexpr (kConvertsHalves) {
    namespace hn = hwy::HWY_NAMESPACE;
    const hn::ScalableTag<float> df;
    const hn::Rebind<hwy::float16_t, decltype(df)> dh;
    const auto sign = hn::Set(df, -0.0f);
    const auto quiet =
        hn::BitCast(df, hn::Set(hn::Repartition<uint32_t, decltype(df)>(), 0x7fc00000));
    auto* HWY_RESTRICT halves = reinterpret_cast<hwy::float16_t*>(to);
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
    int64_t i = 0;
    for (; i + lanes <= elements; i += lanes) {
      const auto value = hn::LoadU(df, from + i);
      const auto nan = hn::Or(hn::And(value, sign), quiet);
      hn::StoreU(hn::DemoteTo(dh, hn::IfThenElse(hn::IsNaN(value), nan, value)), dh, halves + i);
    }
    return i;
  }
  return 0;
}

// Sums and products of halves, in float.
template <typename Op, typename T>
struct WideTile {
  float at[kTile];

  void Load(const T* HWY_RESTRICT from, int64_t n) {
    int64_t i = 0;
    if constexpr (std::is_same_v<T, Half>) {
      i = WidenHalves(at, from, n, [](auto, auto value) { return value; });
    }
    for (; i < n; ++i) at[i] = T::ToFloat(from[i]);
  }
  void Combine(const T* HWY_RESTRICT from, int64_t n) {
    int64_t i = 0;
    if constexpr (std::is_same_v<T, Half>) {
      i = WidenHalves(at, from, n, [](auto sum, auto value) {
        namespace hn = hwy::HWY_NAMESPACE;
        return std::is_same_v<Op, Sum> ? hn::Add(sum, value) : hn::Mul(sum, value);
      });
    }
    for (; i < n; ++i) at[i] = Op::template Apply<float>(at[i], T::ToFloat(from[i]));
  }
  void Store(T* HWY_RESTRICT to, int64_t n, const Mean&) {
    int64_t i = 0;
    if constexpr (std::is_same_v<T, Half>) i = NarrowToHalves(to, at, n);
    for (; i < n; ++i) to[i] = T::FromFloat(at[i]);
  }
};

// The mean of finite values is not infinite, whatever the sum's rounding did. In double, since the
// product may be beyond float.
template <typename T>
T MeanOfHalves(float sum, const Mean& mean) {
  const float largest = T::ToFloat(T{T::kLargest});
  const bool finite = sum - sum == 0;
  float value = static_cast<float>(sum * mean.factor / mean.divisor);
  value = finite && value > largest ? largest : value;
  value = finite && value < -largest ? -largest : value;
  return T::FromFloat(value);
}

template <typename T>
struct MeanTile {
  float at[kTile];
  float scale;

  void Load(const T* HWY_RESTRICT from, int64_t n) {
    for (int64_t i = 0; i < n; ++i) at[i] = T::ToFloat(from[i]) * scale;
  }
  void Combine(const T* HWY_RESTRICT from, int64_t n) {
    for (int64_t i = 0; i < n; ++i) at[i] += T::ToFloat(from[i]) * scale;
  }
  void Store(T* HWY_RESTRICT to, int64_t n, const Mean& mean) {
    for (int64_t i = 0; i < n; ++i) to[i] = MeanOfHalves<T>(at[i], mean);
  }
};

// Everything that is reduced in its own type.
template <typename Op, typename T>
struct PlainTile {
  T at[kTile];

  void Load(const T* HWY_RESTRICT from, int64_t n) {
    std::memcpy(at, from, static_cast<size_t>(n) * sizeof(T));
  }
  void Combine(const T* HWY_RESTRICT from, int64_t n) {
    for (int64_t i = 0; i < n; ++i) at[i] = HWY_NAMESPACE::Combine<Op, T>(at[i], from[i]);
  }
  void Store(T* HWY_RESTRICT to, int64_t n, const Mean& mean) {
    if constexpr (std::is_floating_point_v<T>) {
      if (mean.divisor != 1) {
        const T divisor = static_cast<T>(mean.divisor);
        for (int64_t i = 0; i < n; ++i) at[i] = at[i] / divisor;
      }
    }
    std::memcpy(to, at, static_cast<size_t>(n) * sizeof(T));
  }
};

template <typename Op>
struct BoolTile {
  uint8_t at[kTile];

  void Load(const uint8_t* HWY_RESTRICT from, int64_t n) {
    for (int64_t i = 0; i < n; ++i) at[i] = from[i] != 0;
  }
  void Combine(const uint8_t* HWY_RESTRICT from, int64_t n) {
    for (int64_t i = 0; i < n; ++i) at[i] = Op::template Apply<uint8_t>(at[i], from[i] != 0);
  }
  void Store(uint8_t* HWY_RESTRICT to, int64_t n, const Mean&) {
    std::memcpy(to, at, static_cast<size_t>(n));
  }
};

// A whole tile of `dst` is read before it is written, since `dst` may be an operand.
template <typename T, typename Tile>
void Fold(Tile tile, std::byte* dst, absl::Span<const std::byte* const> operands, int64_t elements,
          const Mean& mean) {
  for (int64_t begin = 0; begin < elements; begin += kTile) {
    const int64_t n = std::min(kTile, elements - begin);
    tile.Load(reinterpret_cast<const T*>(operands[0]) + begin, n);
    for (size_t i = 1; i < operands.size(); ++i) {
      tile.Combine(reinterpret_cast<const T*>(operands[i]) + begin, n);
    }
    tile.Store(reinterpret_cast<T*>(dst) + begin, n, mean);
  }
}

template <typename Op, typename T>
void FoldNumbers(std::byte* dst, absl::Span<const std::byte* const> operands, int64_t elements,
                 const Mean& mean) {
  constexpr bool kArithmetic = std::is_same_v<Op, Sum> || std::is_same_v<Op, Product>;
  if constexpr (kIsHalf<T> && kArithmetic) {
    if (mean.divisor != 1) {
      MeanTile<T> tile;
      tile.scale = mean.scale;
      return Fold<T>(tile, dst, operands, elements, mean);
    }
    return Fold<T>(WideTile<Op, T>(), dst, operands, elements, mean);
  } else {
    return Fold<T>(PlainTile<Op, T>(), dst, operands, elements, mean);
  }
}

template <typename T>
void ReduceNumbers(ReduceOp op, std::byte* dst, absl::Span<const std::byte* const> operands,
                   int64_t elements, const Mean& mean) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return FoldNumbers<Sum, T>(dst, operands, elements, mean);
    case ReduceOp::kProduct:
      return FoldNumbers<Product, T>(dst, operands, elements, mean);
    case ReduceOp::kMin:
      return FoldNumbers<Min, T>(dst, operands, elements, mean);
    case ReduceOp::kMax:
      return FoldNumbers<Max, T>(dst, operands, elements, mean);
    case ReduceOp::kBand:
      if constexpr (std::is_integral_v<T>) {
        return FoldNumbers<Band, T>(dst, operands, elements, mean);
      }
      return;
    case ReduceOp::kBor:
      if constexpr (std::is_integral_v<T>) {
        return FoldNumbers<Bor, T>(dst, operands, elements, mean);
      }
      return;
    case ReduceOp::kBxor:
      if constexpr (std::is_integral_v<T>) {
        return FoldNumbers<Bxor, T>(dst, operands, elements, mean);
      }
      return;
  }
}

void ReduceBools(ReduceOp op, std::byte* dst, absl::Span<const std::byte* const> operands,
                 int64_t elements) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBor:
      return Fold<uint8_t>(BoolTile<Bor>(), dst, operands, elements, {});
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBand:
      return Fold<uint8_t>(BoolTile<Band>(), dst, operands, elements, {});
    case ReduceOp::kBxor:
      return Fold<uint8_t>(BoolTile<Bxor>(), dst, operands, elements, {});
    case ReduceOp::kAvg:
      return;
  }
}

void ReduceOnTarget(ReduceOp op, DType dtype, std::byte* dst,
                    absl::Span<const std::byte* const> operands, int64_t elements,
                    const Mean& mean) {
  switch (dtype) {
    case DType::kF32:
      return ReduceNumbers<float>(op, dst, operands, elements, mean);
    case DType::kF64:
      return ReduceNumbers<double>(op, dst, operands, elements, mean);
    case DType::kF16:
      return ReduceNumbers<Half>(op, dst, operands, elements, mean);
    case DType::kBF16:
      return ReduceNumbers<Bfloat>(op, dst, operands, elements, mean);
    case DType::kI8:
      return ReduceNumbers<int8_t>(op, dst, operands, elements, mean);
    case DType::kI16:
      return ReduceNumbers<int16_t>(op, dst, operands, elements, mean);
    case DType::kI32:
      return ReduceNumbers<int32_t>(op, dst, operands, elements, mean);
    case DType::kI64:
      return ReduceNumbers<int64_t>(op, dst, operands, elements, mean);
    case DType::kU8:
      return ReduceNumbers<uint8_t>(op, dst, operands, elements, mean);
    case DType::kU16:
      return ReduceNumbers<uint16_t>(op, dst, operands, elements, mean);
    case DType::kU32:
      return ReduceNumbers<uint32_t>(op, dst, operands, elements, mean);
    case DType::kU64:
      return ReduceNumbers<uint64_t>(op, dst, operands, elements, mean);
    case DType::kBool:
      return ReduceBools(op, dst, operands, elements);
  }
}

// dst = src * factor, a power of two.
template <typename T>
void ScaleHalves(std::byte* dst_bytes, const std::byte* src_bytes, int64_t elements, float factor) {
  T* dst = reinterpret_cast<T*>(dst_bytes);
  const T* src = reinterpret_cast<const T*>(src_bytes);
  for (int64_t i = 0; i < elements; ++i) dst[i] = T::FromFloat(T::ToFloat(src[i]) * factor);
}

// data = data * factor / divisor.
template <typename T>
void FinishHalves(std::byte* data_bytes, int64_t elements, const Mean& mean) {
  T* data = reinterpret_cast<T*>(data_bytes);
  for (int64_t i = 0; i < elements; ++i) data[i] = MeanOfHalves<T>(T::ToFloat(data[i]), mean);
}

template <typename T>
void Divide(std::byte* data_bytes, int64_t elements, T divisor) {
  T* data = reinterpret_cast<T*>(data_bytes);
  for (int64_t i = 0; i < elements; ++i) data[i] = data[i] / divisor;
}

void ScaleOnTarget(DType dtype, std::byte* dst, const std::byte* src, int64_t elements,
                   float factor) {
  if (dtype == DType::kF16) return ScaleHalves<Half>(dst, src, elements, factor);
  if (dtype == DType::kBF16) return ScaleHalves<Bfloat>(dst, src, elements, factor);
}

void FinishOnTarget(DType dtype, std::byte* data, int64_t elements, const Mean& mean) {
  switch (dtype) {
    case DType::kF16:
      return FinishHalves<Half>(data, elements, mean);
    case DType::kBF16:
      return FinishHalves<Bfloat>(data, elements, mean);
    case DType::kF32:
      return Divide<float>(data, elements, static_cast<float>(mean.divisor));
    case DType::kF64:
      return Divide<double>(data, elements, mean.divisor);
    default:
      return;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace geomesh::exec
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "absl/strings/str_cat.h"

namespace geomesh::exec {

HWY_EXPORT(ReduceOnTarget);
HWY_EXPORT(ScaleOnTarget);
HWY_EXPORT(FinishOnTarget);

namespace {

bool IsHalf(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16; }
bool IsFloating(DType dtype) {
  return IsHalf(dtype) || dtype == DType::kF32 || dtype == DType::kF64;
}

// Contributions are scaled by the smallest power of two that is not below their number.
Mean MeanOver(int world) {
  const double power = std::bit_ceil(static_cast<uint32_t>(world));
  return {.scale = static_cast<float>(1 / power),
          .factor = power,
          .divisor = static_cast<double>(world)};
}

}  // namespace

absl::string_view Name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "SUM";
    case ReduceOp::kAvg:
      return "AVG";
    case ReduceOp::kProduct:
      return "PRODUCT";
    case ReduceOp::kMin:
      return "MIN";
    case ReduceOp::kMax:
      return "MAX";
    case ReduceOp::kBand:
      return "BAND";
    case ReduceOp::kBor:
      return "BOR";
    case ReduceOp::kBxor:
      return "BXOR";
  }
  return "unknown";
}

absl::Status Supported(ReduceOp op, DType dtype) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return absl::OkStatus();
    case ReduceOp::kAvg:
      if (IsFloating(dtype)) return absl::OkStatus();
      return absl::InvalidArgumentError(
          absl::StrCat("AVG of ", Name(dtype),
                       " tensors is not defined: reduce with SUM and divide with the rounding you "
                       "want, or use a floating-point tensor"));
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      if (!IsFloating(dtype)) return absl::OkStatus();
      return absl::InvalidArgumentError(
          absl::StrCat(Name(op), " of ", Name(dtype),
                       " tensors is not defined: bitwise reductions take integers and bool"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("reduction ", static_cast<int>(op), " of ", Name(dtype), " is unknown"));
}

void Reduce(ReduceOp op, DType dtype, std::byte* dst, absl::Span<const std::byte* const> operands,
            int64_t elements, int mean_of) {
  HWY_DYNAMIC_DISPATCH(ReduceOnTarget)(op, dtype, dst, operands, elements, MeanOver(mean_of));
}

bool AverageScalesContributions(DType dtype, int world) { return world > 1 && IsHalf(dtype); }

bool AverageFinishesSum(DType dtype, int world) {
  if (world <= 1) return false;
  return !IsHalf(dtype) || !std::has_single_bit(static_cast<uint32_t>(world));
}

void ScaleContribution(DType dtype, int world, std::byte* dst, const std::byte* src,
                       int64_t elements) {
  HWY_DYNAMIC_DISPATCH(ScaleOnTarget)
  (dtype, dst, src, elements, MeanOver(world).scale);
}

void FinishAverage(DType dtype, int world, std::byte* data, int64_t elements) {
  HWY_DYNAMIC_DISPATCH(FinishOnTarget)(dtype, data, elements, MeanOver(world));
}

}  // namespace geomesh::exec
#endif  // HWY_ONCE
