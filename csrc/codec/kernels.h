// The codec's inner loops, compiled for every vector target and chosen at run time. Each does one
// block; all targets give the same bits. No allocation, no error, no knowledge of the wire.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace geomesh::codec {

// Bit arrays that kernels read or write are followed by this many bytes they may touch.
inline constexpr size_t kBitPadding = 8;

struct Norms {
  float l1 = 0;          // sum of |z|
  float l2_squared = 0;  // sum of z * z
};

// out[i] = anchor[i] - current[i] in fp32, or current[i] where `anchor` is null.
void Gather(const float* anchor, const void* current, DType dtype, size_t elements, float* out);

// block = H (signs * block), in place. `padded`: a power of two from 64 to 4,096. `block` is
// aligned to 64 bytes.
void Rotate(float* block, size_t padded, const uint8_t* signs);

// bits = where the rotated block is negative; its norms. What `block` holds is lost.
Norms RotateAndSign(float* block, size_t padded, const uint8_t* signs, uint8_t* bits);

// The same without a rotation; `block` is only read.
Norms PlainSign(const float* block, size_t padded, uint8_t* bits);

// sum[i] += bits[i] ? -magnitude : magnitude.
void AddSigned(const uint8_t* bits, size_t padded, float magnitude, float* sum);

// out = (signs * (H (sum / padded))) * scale, +0 where that is -0. `out` is aligned to 64 bytes
// and does not overlap `sum`.
void RotateBack(const float* sum, size_t padded, const uint8_t* signs, float scale, float* out);

}  // namespace geomesh::codec
