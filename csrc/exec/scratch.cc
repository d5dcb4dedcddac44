// Best fit among kept blocks. Knows nothing of programs.
#include "exec/scratch.h"

#include <utility>

namespace geomesh::exec {

ScratchMemory ScratchPool::Take(size_t bytes) {
  if (bytes == 0) return {};
  // A block much larger than asked for would starve the next large one.
  if (const auto it = free_.lower_bound(bytes); it != free_.end() && it->first / 4 <= bytes) {
    ScratchMemory memory = std::move(it->second);
    free_.erase(it);
    kept_bytes_ -= memory.bytes;
    taken_bytes_ += memory.bytes;
    return memory;
  }
  const size_t capacity = (bytes + kScratchAlignmentBytes - 1) & ~(kScratchAlignmentBytes - 1);
  ScratchMemory memory;
  memory.data.reset(static_cast<std::byte*>(
      ::operator new[](capacity, std::align_val_t{kScratchAlignmentBytes})));
  memory.bytes = capacity;
  taken_bytes_ += capacity;
  return memory;
}

void ScratchPool::Clear() {
  free_.clear();
  kept_bytes_ = 0;
}

void ScratchPool::Give(ScratchMemory memory) {
  taken_bytes_ -= memory.bytes;
  if (memory.bytes == 0 || memory.bytes > kMaxKeptBytes) return;
  kept_bytes_ += memory.bytes;
  const size_t capacity = memory.bytes;
  free_.emplace(capacity, std::move(memory));
  // The smallest go first: they are the cheapest to make again.
  while (kept_bytes_ > kMaxKeptBytes) {
    kept_bytes_ -= free_.begin()->first;
    free_.erase(free_.begin());
  }
}

}  // namespace geomesh::exec
