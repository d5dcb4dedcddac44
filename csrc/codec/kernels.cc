// The inner loops of the sign codec for every vector target (foreach_target compiles this file once
// for each). The order of all sums is that of docs/wire-format.md and does not depend on the number
// of lanes: the transform goes through strides 1, 2, 4, ... upwards, and norms have 16 virtual
// lanes. Nothing here multiplies and adds in one rounding.
#include "codec/kernels.h"

#include <cmath>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/kernels.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which defines the target.
#include "codec/convert-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace geomesh::codec {
namespace HWY_NAMESPACE {

using V = hn::Vec<F32>;

// Elements of a column over which the last pass of a full block works at once, and which the order
// of the norms is defined by.
constexpr size_t kColumn = 256;
constexpr size_t kNormLanes = 16;
constexpr size_t kFullBlock = 4096;

HWY_INLINE hn::Mask<F32> LoadBits(const uint8_t* bits, size_t element) {
  const F32 d;
  if (hn::Lanes(d) >= 8) return hn::LoadMaskBits(d, bits + element / 8);
  const uint8_t part[8] = {static_cast<uint8_t>(bits[element / 8] >> (element % 8))};
  return hn::LoadMaskBits(d, part);
}

// `bits` must hold zeros where less than a byte is written at a time.
HWY_INLINE void StoreBits(hn::Mask<F32> mask, uint8_t* bits, size_t element) {
  const F32 d;
  uint8_t part[8] = {};
  hn::StoreMaskBits(d, mask, part);
  if (hn::Lanes(d) >= 8) {
    std::memcpy(bits + element / 8, part, hn::Lanes(d) / 8);
  } else {
    const unsigned low = part[0] & ((1u << hn::Lanes(d)) - 1);
    bits[element / 8] = static_cast<uint8_t>(bits[element / 8] | (low << (element % 8)));
  }
}

HWY_INLINE V NegateWhere(hn::Mask<F32> mask, V v) {
  const F32 d;
  return hn::Xor(v, hn::IfThenElseZero(mask, hn::SignBit(d)));
}

// The strides below the number of lanes: b = a[i ^ stride]; a + b in lower, b - a in upper lanes.
// `upper` holds the sign bit in the upper lanes.
HWY_INLINE V LaneStages(V v) {
  const F32 d;
  (void)d;
#if HWY_TARGET != HWY_SCALAR
  const U32 du;
  const auto lane = hn::Iota(du, 0);
  const auto upper = [&](uint32_t bit, int shift) HWY_ATTR {
    return hn::BitCast(d, hn::ShiftLeftSame(hn::And(lane, hn::Set(du, bit)), shift));
  };
  if (hn::Lanes(d) >= 2) v = hn::Add(hn::Shuffle2301(v), hn::Xor(v, upper(1, 31)));
  if (hn::Lanes(d) >= 4) v = hn::Add(hn::Shuffle1032(v), hn::Xor(v, upper(2, 30)));
#if HWY_MAX_BYTES >= 32
  if (hn::Lanes(d) >= 8) v = hn::Add(hn::SwapAdjacentBlocks(v), hn::Xor(v, upper(4, 29)));
#endif
#if HWY_MAX_BYTES >= 64
  if (hn::Lanes(d) >= 16) {
    const V swapped = hn::SwapAdjacentBlocks(hn::ReverseBlocks(d, v));
    v = hn::Add(swapped, hn::Xor(v, upper(8, 28)));
  }
#endif
#endif
  return v;
}

HWY_INLINE void Butterfly(V& a, V& b) {
  const V sum = hn::Add(a, b);
  b = hn::Sub(a, b);
  a = sum;
}

HWY_INLINE void Radix16(V& v0, V& v1, V& v2, V& v3, V& v4, V& v5, V& v6, V& v7, V& v8, V& v9,
                        V& v10, V& v11, V& v12, V& v13, V& v14, V& v15) {
  Butterfly(v0, v1), Butterfly(v2, v3), Butterfly(v4, v5), Butterfly(v6, v7);
  Butterfly(v8, v9), Butterfly(v10, v11), Butterfly(v12, v13), Butterfly(v14, v15);
  Butterfly(v0, v2), Butterfly(v1, v3), Butterfly(v4, v6), Butterfly(v5, v7);
  Butterfly(v8, v10), Butterfly(v9, v11), Butterfly(v12, v14), Butterfly(v13, v15);
  Butterfly(v0, v4), Butterfly(v1, v5), Butterfly(v2, v6), Butterfly(v3, v7);
  Butterfly(v8, v12), Butterfly(v9, v13), Butterfly(v10, v14), Butterfly(v11, v15);
  Butterfly(v0, v8), Butterfly(v1, v9), Butterfly(v2, v10), Butterfly(v3, v11);
  Butterfly(v4, v12), Butterfly(v5, v13), Butterfly(v6, v14), Butterfly(v7, v15);
}

// Four strides at once (stride, 2, 4 and 8 times it) for the `count` elements from `first` on, a
// vector a step. `load(e)` gives the vector at element e, `store(e, v)` takes it; stores of one
// step come in rising order of e.
template <class Load, class Store>
HWY_INLINE void Pass16(size_t first, size_t count, size_t stride, const Load& load, Store& store) {
  const size_t lanes = hn::Lanes(F32());
  for (size_t e = first; e < first + count; e += lanes) {
    V v0 = load(e), v1 = load(e + stride), v2 = load(e + 2 * stride), v3 = load(e + 3 * stride);
    V v4 = load(e + 4 * stride), v5 = load(e + 5 * stride), v6 = load(e + 6 * stride);
    V v7 = load(e + 7 * stride), v8 = load(e + 8 * stride), v9 = load(e + 9 * stride);
    V v10 = load(e + 10 * stride), v11 = load(e + 11 * stride), v12 = load(e + 12 * stride);
    V v13 = load(e + 13 * stride), v14 = load(e + 14 * stride), v15 = load(e + 15 * stride);
    Radix16(v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15);
    store(e, v0), store(e + stride, v1), store(e + 2 * stride, v2), store(e + 3 * stride, v3);
    store(e + 4 * stride, v4), store(e + 5 * stride, v5), store(e + 6 * stride, v6);
    store(e + 7 * stride, v7), store(e + 8 * stride, v8), store(e + 9 * stride, v9);
    store(e + 10 * stride, v10), store(e + 11 * stride, v11), store(e + 12 * stride, v12);
    store(e + 13 * stride, v13), store(e + 14 * stride, v14), store(e + 15 * stride, v15);
  }
}

HWY_INLINE void Pass2(float* block, size_t padded, size_t stride) {
  const F32 d;
  for (size_t base = 0; base < padded; base += 2 * stride) {
    for (size_t e = base; e < base + stride; e += hn::Lanes(d)) {
      V a = hn::Load(d, block + e);
      V b = hn::Load(d, block + e + stride);
      Butterfly(a, b);
      hn::Store(a, d, block + e);
      hn::Store(b, d, block + e + stride);
    }
  }
}

struct BlockLoad {
  const float* block;
  HWY_INLINE V operator()(size_t e) const { return hn::Load(F32(), block + e); }
};

struct BlockStore {
  float* block;
  HWY_INLINE void operator()(size_t e, V v) const { hn::Store(v, F32(), block + e); }
};

struct SignedLoad {
  const float* block;
  const uint8_t* signs;
  HWY_INLINE V operator()(size_t e) const {
    return LaneStages(NegateWhere(LoadBits(signs, e), hn::Load(F32(), block + e)));
  }
};

struct ScaledLoad {
  const float* sum;
  V scale;
  HWY_INLINE V operator()(size_t e) const {
    return LaneStages(hn::Mul(hn::LoadU(F32(), sum + e), scale));
  }
};

struct MeanStore {
  float* out;
  const uint8_t* signs;
  V scale;
  HWY_INLINE void operator()(size_t e, V v) const {
    const F32 d;
    v = hn::Mul(NegateWhere(LoadBits(signs, e), v), scale);
    hn::Store(hn::Add(v, hn::Zero(d)), d, out + e);  // -0 + 0 is +0
  }
};

// Sign bits and norms of vectors that lie in the same lanes of 16.
struct SignStore {
  uint8_t* bits;
  V l1, l2;
  HWY_INLINE void operator()(size_t e, V v) {
    l1 = hn::Add(l1, hn::Abs(v));
    l2 = hn::Add(l2, hn::Mul(v, v));
    StoreBits(hn::Lt(v, hn::Zero(F32())), bits, e);
  }
};

// The 16 lanes of both norms; `From` and `Back` move one vector's share of them.
struct NormLanes {
  alignas(64) float l1[kNormLanes] = {};
  alignas(64) float l2[kNormLanes] = {};

  HWY_INLINE SignStore From(size_t e, uint8_t* bits) const {
    const F32 d;
    return {bits, hn::Load(d, l1 + e % kNormLanes), hn::Load(d, l2 + e % kNormLanes)};
  }
  HWY_INLINE void Back(size_t e, const SignStore& store) {
    const F32 d;
    hn::Store(store.l1, d, l1 + e % kNormLanes);
    hn::Store(store.l2, d, l2 + e % kNormLanes);
  }
  Norms Total() {
    for (size_t half = kNormLanes / 2; half > 0; half /= 2) {
      for (size_t i = 0; i < half; ++i) {
        l1[i] += l1[i + half];
        l2[i] += l2[i + half];
      }
    }
    return {l1[0], l2[0]};
  }
};

// Signs and norms of a block as it lies there: column by column, down each column in steps of 256.
HWY_INLINE Norms SignsAndNorms(const float* block, size_t padded, uint8_t* bits) {
  const F32 d;
  NormLanes norms;
  const size_t width = padded < kColumn ? padded : kColumn;
  for (size_t column = 0; column < width; column += hn::Lanes(d)) {
    SignStore store = norms.From(column, bits);
    for (size_t e = column; e < padded; e += kColumn) store(e, hn::Load(d, block + e));
    norms.Back(column, store);
  }
  return norms.Total();
}

// All strides below 256 of a full block, from `load` into `block`.
template <class Load>
HWY_INLINE void LowStrides(const Load& load, float* block) {
  const size_t lanes = hn::Lanes(F32());
  BlockStore store{block};
  for (size_t group = 0; group < kFullBlock; group += 16 * lanes) {
    Pass16(group, lanes, lanes, load, store);
  }
  for (size_t stride = 16 * lanes; stride < kColumn; stride *= 2) Pass2(block, kFullBlock, stride);
}

// All strides of a block of any size, one a pass, from `load` into `block`.
template <class Load>
HWY_INLINE void AllStrides(const Load& load, float* block, size_t padded) {
  const F32 d;
  for (size_t e = 0; e < padded; e += hn::Lanes(d)) hn::Store(load(e), d, block + e);
  for (size_t stride = hn::Lanes(d); stride < padded; stride *= 2) Pass2(block, padded, stride);
}

void Rotate(float* block, size_t padded, const uint8_t* signs) {
  AllStrides(SignedLoad{block, signs}, block, padded);
}

Norms RotateAndSign(float* block, size_t padded, const uint8_t* signs, uint8_t* bits) {
  const size_t lanes = hn::Lanes(F32());
  if (lanes < 8) std::memset(bits, 0, padded / 8);
  const SignedLoad load{block, signs};
  if (padded < kFullBlock) {
    AllStrides(load, block, padded);
    return SignsAndNorms(block, padded, bits);
  }
  LowStrides(load, block);
  const BlockLoad rest{block};
  NormLanes norms;
  for (size_t column = 0; column < kColumn; column += lanes) {
    SignStore store = norms.From(column, bits);
    Pass16(column, lanes, kColumn, rest, store);
    norms.Back(column, store);
  }
  return norms.Total();
}

Norms PlainSign(const float* block, size_t padded, uint8_t* bits) {
  if (hn::Lanes(F32()) < 8) std::memset(bits, 0, padded / 8);
  return SignsAndNorms(block, padded, bits);
}

void AddSigned(const uint8_t* bits, size_t padded, float magnitude, float* sum) {
  const F32 d;
  const V plus = hn::Set(d, magnitude);
  const V minus = hn::Set(d, -magnitude);
  for (size_t e = 0; e < padded; e += hn::Lanes(d)) {
    const V signed_magnitude = hn::IfThenElse(LoadBits(bits, e), minus, plus);
    hn::StoreU(hn::Add(hn::LoadU(d, sum + e), signed_magnitude), d, sum + e);
  }
}

void RotateBack(const float* sum, size_t padded, const uint8_t* signs, float scale, float* out) {
  const F32 d;
  const ScaledLoad load{sum, hn::Set(d, 1.0f / static_cast<float>(padded))};
  MeanStore store{out, signs, hn::Set(d, scale)};
  const BlockLoad rest{out};
  if (padded < kFullBlock) {
    AllStrides(load, out, padded);
    for (size_t e = 0; e < padded; e += hn::Lanes(d)) store(e, rest(e));
    return;
  }
  LowStrides(load, out);
  Pass16(0, kColumn, kColumn, rest, store);
}

template <class Load>
HWY_INLINE void GatherAs(const float* anchor, const void* current, size_t elements, float* out) {
  using Element = typename Load::Element;
  const F32 d;
  const Load load;
  const auto* from = static_cast<const Element*>(current);
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  if (anchor == nullptr) {
    for (; i + lanes <= elements; i += lanes) hn::StoreU(load(from + i), d, out + i);
  } else {
    for (; i + lanes <= elements; i += lanes) {
      hn::StoreU(hn::Sub(hn::LoadU(d, anchor + i), load(from + i)), d, out + i);
    }
  }
  if (i == elements) return;
  alignas(64) Element rest_from[16] = {};
  alignas(64) float rest_anchor[16] = {};
  alignas(64) float rest[16];
  std::memcpy(rest_from, from + i, (elements - i) * sizeof(Element));
  V v = load(rest_from);
  if (anchor != nullptr) {
    std::memcpy(rest_anchor, anchor + i, (elements - i) * sizeof(float));
    v = hn::Sub(hn::Load(d, rest_anchor), v);
  }
  hn::Store(v, d, rest);
  std::memcpy(out + i, rest, (elements - i) * sizeof(float));
}

void GatherF32(const float* anchor, const void* current, size_t elements, float* out) {
  GatherAs<LoadF32>(anchor, current, elements, out);
}
void GatherBF16(const float* anchor, const void* current, size_t elements, float* out) {
  GatherAs<LoadBF16>(anchor, current, elements, out);
}
void GatherF16(const float* anchor, const void* current, size_t elements, float* out) {
  GatherAs<LoadF16>(anchor, current, elements, out);
}

}  // namespace HWY_NAMESPACE
}  // namespace geomesh::codec
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace geomesh::codec {

HWY_EXPORT(Rotate);
HWY_EXPORT(RotateAndSign);
HWY_EXPORT(PlainSign);
HWY_EXPORT(AddSigned);
HWY_EXPORT(RotateBack);
HWY_EXPORT(GatherF32);
HWY_EXPORT(GatherBF16);
HWY_EXPORT(GatherF16);

void Rotate(float* block, size_t padded, const uint8_t* signs) {
  HWY_DYNAMIC_DISPATCH(Rotate)(block, padded, signs);
}

Norms RotateAndSign(float* block, size_t padded, const uint8_t* signs, uint8_t* bits) {
  return HWY_DYNAMIC_DISPATCH(RotateAndSign)(block, padded, signs, bits);
}

Norms PlainSign(const float* block, size_t padded, uint8_t* bits) {
  return HWY_DYNAMIC_DISPATCH(PlainSign)(block, padded, bits);
}

void AddSigned(const uint8_t* bits, size_t padded, float magnitude, float* sum) {
  HWY_DYNAMIC_DISPATCH(AddSigned)(bits, padded, magnitude, sum);
}

void RotateBack(const float* sum, size_t padded, const uint8_t* signs, float scale, float* out) {
  HWY_DYNAMIC_DISPATCH(RotateBack)(sum, padded, signs, scale, out);
}

void Gather(const float* anchor, const void* current, DType dtype, size_t elements, float* out) {
  switch (dtype) {
    case DType::kF16:
      return HWY_DYNAMIC_DISPATCH(GatherF16)(anchor, current, elements, out);
    case DType::kBF16:
      return HWY_DYNAMIC_DISPATCH(GatherBF16)(anchor, current, elements, out);
    default:
      return HWY_DYNAMIC_DISPATCH(GatherF32)(anchor, current, elements, out);
  }
}

}  // namespace geomesh::codec
#endif  // HWY_ONCE
