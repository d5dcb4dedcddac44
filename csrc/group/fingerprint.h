// Short hashes of what must be equal on all ranks. Not for security.
#pragma once

#include <algorithm>
#include <cstdint>

namespace geomesh::group {

// FNV-1a, 64 bits, with its bits mixed at the end.
class WideFingerprint {
 public:
  WideFingerprint& Add(uint64_t value) {
    for (int i = 0; i < 8; ++i) hash_ = (hash_ ^ ((value >> (8 * i)) & 0xff)) * 0x100000001b3ull;
    return *this;
  }
  uint64_t value() const {
    uint64_t x = hash_;
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 33);
  }

 private:
  uint64_t hash_ = 0xcbf29ce484222325ull;
};

// Of an operation, in a message's envelope: never 0, which stands for "not compared".
class Fingerprint {
 public:
  Fingerprint& Add(uint64_t value) {
    wide_.Add(value);
    return *this;
  }
  uint32_t value() const { return std::max<uint32_t>(1, static_cast<uint32_t>(wide_.value())); }

 private:
  WideFingerprint wide_;
};

}  // namespace geomesh::group
