// The codec's random numbers: a counter-based generator, so that any word of any block is had
// without the others, on every machine alike. Knows nothing of blocks or ranks.
#pragma once

#include <cstdint>

namespace geomesh::codec {

// The finaliser of SplitMix64 (Steele, Lea, Flood, 2014).
constexpr uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// One stream of 64-bit words. `domain` keeps the streams of one seed apart.
class WordStream {
 public:
  constexpr WordStream(uint64_t seed, uint64_t domain) : state_(Mix(Mix(seed + domain) + domain)) {}

  // Word `index`: any order, no state.
  constexpr uint64_t Word(uint64_t index) const {
    return Mix(state_ + (index + 1) * 0x9E3779B97F4A7C15u);
  }

  // A short mark of the seed, to tell seeds apart in a header.
  constexpr uint32_t Mark() const { return static_cast<uint32_t>(Mix(~state_) >> 32); }

 private:
  uint64_t state_;
};

inline constexpr uint64_t kRotationDomain = 0x726F746174696F6Eu;  // "rotation"
inline constexpr uint64_t kDitherDomain = 0x6469746865722020u;    // "dither  "

}  // namespace geomesh::codec
