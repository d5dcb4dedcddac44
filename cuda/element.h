// Elements in memory to and from fp32, by the same arithmetic as csrc/codec/convert-inl.h: integer
// operations and exact or correctly rounded fp32 ones, so that CPU and GPU agree in every bit.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "cuda/host_device.h"

namespace geomesh::cuda {

GEOMESH_HD inline float WidenBF16(uint16_t x) { return FromBits(static_cast<uint32_t>(x) << 16); }

GEOMESH_HD inline float WidenF16(uint16_t x) {
  const uint32_t sign = (x & 0x8000u) << 16;
  const uint32_t rest = x & 0x7FFFu;
  // Denormals are integers times 2^-24: exact in fp32.
  if (rest < 0x0400u) return FromBits(BitsOf(Product(static_cast<float>(rest), 0x1p-24f)) | sign);
  // Normal numbers move the exponent's bias from 15 to 127; infinity and NaN twice, to 255.
  constexpr uint32_t kRebias = 112u << 23;
  return FromBits(((rest << 13) + kRebias + (rest > 0x7BFFu ? kRebias : 0u)) | sign);
}

// Round to nearest even; a NaN stays one.
GEOMESH_HD inline uint16_t NarrowBF16(float x) {
  const uint32_t bits = BitsOf(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Round to nearest even; too large becomes infinity, a NaN stays one.
GEOMESH_HD inline uint16_t NarrowF16(float x) {
  const uint32_t sign = (BitsOf(x) >> 16) & 0x8000u;
  const uint32_t rest = BitsOf(x) & 0x7FFFFFFFu;
  uint32_t half;
  if (rest > 0x7F800000u) {
    half = 0x7E00u;
  } else if (rest > 0x477FEFFFu) {
    half = 0x7C00u;
  } else if (rest < 0x38800000u) {
    // Adding 1/2 makes the adder round at 2^-24, the spacing of half's denormals.
    half = BitsOf(FromBits(rest) + 0.5f) - 0x3F000000u;
  } else {
    half = (rest + 0x0FFFu + ((rest >> 13) & 1u) - (112u << 23)) >> 13;
  }
  return static_cast<uint16_t>(half | sign);
}

GEOMESH_HD inline float LoadElement(const void* memory, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kBF16:
      return WidenBF16(static_cast<const uint16_t*>(memory)[i]);
    case DType::kF16:
      return WidenF16(static_cast<const uint16_t*>(memory)[i]);
    default:
      return static_cast<const float*>(memory)[i];
  }
}

GEOMESH_HD inline void StoreElement(float x, void* memory, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kBF16:
      static_cast<uint16_t*>(memory)[i] = NarrowBF16(x);
      break;
    case DType::kF16:
      static_cast<uint16_t*>(memory)[i] = NarrowF16(x);
      break;
    default:
      static_cast<float*>(memory)[i] = x;
  }
}

}  // namespace geomesh::cuda
