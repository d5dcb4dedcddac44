// The arithmetic that all ranks agree on. Knows the processor's control register only.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace geomesh {

// For its lifetime, this thread rounds to nearest and keeps denormals, whatever its program (or the
// thread that started it) has set: ranks that differed in it would end with different bits.
class CommonArithmetic {
 public:
#if defined(__SSE__)
  CommonArithmetic() : before_(_mm_getcsr()) {
    if (before_ != kDefault) _mm_setcsr(kDefault);
  }
  ~CommonArithmetic() {
    if (before_ != kDefault) _mm_setcsr(before_);
  }

 private:
  static constexpr uint32_t kDefault = 0x1f80;
  const uint32_t before_;
#elif defined(__aarch64__)
  CommonArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    if (before_ != 0) asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~CommonArithmetic() {
    if (before_ != 0) asm volatile("msr fpcr, %0" : : "r"(before_));
  }

 private:
  uint64_t before_ = 0;
#else
  CommonArithmetic() = default;
#endif

 public:
  CommonArithmetic(const CommonArithmetic&) = delete;
  CommonArithmetic& operator=(const CommonArithmetic&) = delete;
};

}  // namespace geomesh
