// Default floating-point environment for a scope: round to nearest even, denormals kept. A process
// may have switched denormals off (torch.set_flush_denormal, -ffast-math in some library), and then
// ranks would differ in their last bits.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace geomesh::codec {

class DefaultFloatEnvironment {
 public:
#if defined(__SSE__)
  DefaultFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  DefaultFloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~DefaultFloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
  DefaultFloatEnvironment() = default;
#endif
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
#if defined(__SSE__)
  unsigned saved_;
#elif defined(__aarch64__)
  uint64_t saved_;
#endif
};

}  // namespace geomesh::codec
