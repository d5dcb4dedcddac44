// Memory for programs' scratch blocks: kept for reuse between operations, because fresh pages cost
// more than most reductions. Engine thread only.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <new>

namespace geomesh::exec {

inline constexpr size_t kScratchAlignmentBytes = 64;

struct ScratchDelete {
  void operator()(std::byte* memory) const {
    ::operator delete[](memory, std::align_val_t{kScratchAlignmentBytes});
  }
};

// Uninitialised memory; `bytes` is its capacity.
struct ScratchMemory {
  std::unique_ptr<std::byte[], ScratchDelete> data;
  size_t bytes = 0;
};

class ScratchPool {
 public:
  // At least `bytes` long, aligned to kScratchAlignmentBytes. Nothing for 0 bytes.
  ScratchMemory Take(size_t bytes);
  void Give(ScratchMemory memory);
  // Gives back what is kept.
  void Clear();
  size_t kept_bytes() const { return kept_bytes_; }
  size_t taken_bytes() const { return taken_bytes_; }

  // What is kept at most; the rest goes back to the system.
  static constexpr size_t kMaxKeptBytes = size_t{128} << 20;

 private:
  std::multimap<size_t, ScratchMemory> free_;  // by capacity
  size_t kept_bytes_ = 0;
  size_t taken_bytes_ = 0;
};

}  // namespace geomesh::exec
