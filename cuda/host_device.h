// What lets one source serve nvcc and the host's compiler: kernels run these functions, and so does
// a test on machines without a GPU, with the same bits. Knows nothing of codecs.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define GEOMESH_HD __host__ __device__
#else
#define GEOMESH_HD
#endif

// Before a loop whose variable indexes registers.
#if defined(__CUDA_ARCH__)
#define GEOMESH_UNROLL _Pragma("unroll")
#else
#define GEOMESH_UNROLL
#endif

namespace geomesh::cuda {

// Threads of a thread block.
inline constexpr int kThreads = 256;

// A product that is rounded by itself: no compiler makes it half of a fused multiply-add.
GEOMESH_HD inline float Product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;  // all host code has -ffp-contract=off
#endif
}

GEOMESH_HD inline uint32_t BitsOf(float x) { return std::bit_cast<uint32_t>(x); }
GEOMESH_HD inline float FromBits(uint32_t bits) { return std::bit_cast<float>(bits); }
GEOMESH_HD inline float Magnitude(float x) { return FromBits(BitsOf(x) & 0x7FFFFFFFu); }
GEOMESH_HD inline float NegateIf(bool negate, float x) {
  return FromBits(BitsOf(x) ^ (negate ? 0x80000000u : 0u));
}
GEOMESH_HD inline bool IsFinite(float x) { return (BitsOf(x) & 0x7F800000u) != 0x7F800000u; }

// *at = min(*at, value), by any number of threads of a launch.
GEOMESH_HD inline void KeepSmallest(unsigned long long value, unsigned long long* at) {
#if defined(__CUDA_ARCH__)
  atomicMin(at, value);
#else
  if (value < *at) *at = value;
#endif
}

}  // namespace geomesh::cuda
