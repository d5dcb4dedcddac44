// bfloat16 and float16 to and from float32 by integer arithmetic alone, so that every vector target
// gives the same bits (Highway's own demotions round differently on old targets). Included once for
// each target by files that use foreach_target.
#if defined(GEOMESH_CODEC_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GEOMESH_CODEC_CONVERT_INL_H_
#undef GEOMESH_CODEC_CONVERT_INL_H_
#else
#define GEOMESH_CODEC_CONVERT_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace geomesh::codec {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes: the spec's order of sums is by 16, and buffers are padded to that.
using F32 = hn::CappedTag<float, 16>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<uint16_t, F32>;

struct LoadF32 {
  using Element = float;
  HWY_INLINE hn::Vec<F32> operator()(const float* from) const { return hn::LoadU(F32(), from); }
};

struct LoadBF16 {
  using Element = uint16_t;
  HWY_INLINE hn::Vec<F32> operator()(const uint16_t* from) const {
    const U32 du;
    return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(U16(), from))));
  }
};

struct LoadF16 {
  using Element = uint16_t;
  HWY_INLINE hn::Vec<F32> operator()(const uint16_t* from) const {
    const F32 d;
    const U32 du;
    const hn::RebindToSigned<F32> di;
    const auto half = hn::PromoteTo(du, hn::LoadU(U16(), from));
    const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000u)));
    const auto rest = hn::And(half, hn::Set(du, 0x7FFFu));
    // Normal numbers move the exponent's bias from 15 to 127; infinity and NaN twice, to 255.
    const auto rebias = hn::Set(du, 112u << 23);
    auto wide = hn::Add(hn::ShiftLeft<13>(rest), rebias);
    const auto special = hn::Gt(hn::BitCast(di, rest), hn::Set(di, 0x7BFF));
    wide = hn::Add(wide, hn::IfThenElseZero(hn::RebindMask(du, special), rebias));
    // Denormals are integers times 2^-24: exact in fp32.
    const auto small =
        hn::BitCast(du, hn::Mul(hn::ConvertTo(d, hn::BitCast(di, rest)), hn::Set(d, 0x1p-24f)));
    const auto denormal = hn::Lt(hn::BitCast(di, rest), hn::Set(di, 0x0400));
    const auto magnitude = hn::IfThenElse(hn::RebindMask(du, denormal), small, wide);
    return hn::BitCast(d, hn::Or(magnitude, sign));
  }
};

struct StoreF32 {
  using Element = float;
  HWY_INLINE void operator()(hn::Vec<F32> v, float* to) const { hn::StoreU(v, F32(), to); }
};

// Round to nearest even; a NaN stays one.
struct StoreBF16 {
  using Element = uint16_t;
  HWY_INLINE void operator()(hn::Vec<F32> v, uint16_t* to) const {
    const U32 du;
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
    const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFu)), odd));
    const auto nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x0040u));
    const auto is_nan = hn::RebindMask(du, hn::Ne(v, v));
    hn::StoreU(hn::TruncateTo(U16(), hn::IfThenElse(is_nan, nan, rounded)), U16(), to);
  }
};

// Round to nearest even; too large becomes infinity, a NaN stays one.
struct StoreF16 {
  using Element = uint16_t;
  HWY_INLINE void operator()(hn::Vec<F32> v, uint16_t* to) const {
    const F32 d;
    const U32 du;
    const hn::RebindToSigned<F32> di;
    const auto bits = hn::BitCast(du, v);
    const auto sign = hn::ShiftRight<16>(hn::And(bits, hn::Set(du, 0x80000000u)));
    const auto rest = hn::And(bits, hn::Set(du, 0x7FFFFFFFu));
    const auto rest_signed = hn::BitCast(di, rest);
    // Normal: drop 13 bits with rounding to even, bias 127 to 15. A carry out of the mantissa is
    // right: it raises the exponent, up to infinity.
    const auto odd = hn::And(hn::ShiftRight<13>(rest), hn::Set(du, 1u));
    const auto normal = hn::ShiftRight<13>(
        hn::Sub(hn::Add(hn::Add(rest, hn::Set(du, 0x0FFFu)), odd), hn::Set(du, 112u << 23)));
    // Below 2^-14: adding 1/2 makes the adder round at 2^-24, the spacing of half's denormals.
    const auto shifted = hn::BitCast(du, hn::Add(hn::BitCast(d, rest), hn::Set(d, 0.5f)));
    const auto denormal = hn::Sub(shifted, hn::Set(du, 0x3F000000u));
    const auto is_small = hn::RebindMask(du, hn::Lt(rest_signed, hn::Set(di, 0x38800000)));
    const auto is_large = hn::RebindMask(du, hn::Gt(rest_signed, hn::Set(di, 0x477FEFFF)));
    const auto is_nan = hn::RebindMask(du, hn::Gt(rest_signed, hn::Set(di, 0x7F800000)));
    auto half = hn::IfThenElse(is_small, denormal, normal);
    half = hn::IfThenElse(is_large, hn::Set(du, 0x7C00u), half);
    half = hn::IfThenElse(is_nan, hn::Set(du, 0x7E00u), half);
    hn::StoreU(hn::TruncateTo(U16(), hn::Or(half, sign)), U16(), to);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace geomesh::codec
HWY_AFTER_NAMESPACE();

#endif  // GEOMESH_CODEC_CONVERT_INL_H_
