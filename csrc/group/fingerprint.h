// A short hash of what must be equal on all ranks. Not for security.
#pragma once

#include <algorithm>
#include <cstdint>

namespace geomesh::group {

// FNV-1a over what must be equal on all ranks of an operation.
class Fingerprint {
 public:
  Fingerprint& Add(uint64_t value) {
    for (int i = 0; i < 8; ++i) hash_ = (hash_ ^ ((value >> (8 * i)) & 0xff)) * 0x100000001b3ull;
    return *this;
  }
  uint32_t value() const {
    return std::max<uint32_t>(1, static_cast<uint32_t>(hash_ ^ (hash_ >> 32)));
  }

 private:
  uint64_t hash_ = 0xcbf29ce484222325ull;
};

}  // namespace geomesh::group
