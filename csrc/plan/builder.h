// Writes one rank's program in sequential order, and finds out what may run at the same time.
//
// An algorithm calls the step functions as if they ran one after the other. The builder numbers
// messages, and gives each step the earlier steps it must wait for: those that wrote what it reads,
// and those that read or wrote what it overwrites. So a program is free of races by construction
// (the verifier checks it all the same), and everything that is independent may overlap. Messages
// are numbered in the order of the calls: sender and receiver must issue the messages of their
// ordered pair in the same order.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "plan/compile.h"
#include "plan/program.h"

namespace geomesh::plan {

inline Chunk Input(uint32_t block = 0, uint32_t slice = 0, uint32_t slices = 1) {
  return {Buffer::kInput, block, slice, slices};
}
inline Chunk Output(uint32_t block = 0, uint32_t slice = 0, uint32_t slices = 1) {
  return {Buffer::kOutput, block, slice, slices};
}
inline constexpr Chunk kNothing{Buffer::kOutput, kNoBlock, 0, 1};

// True where the two slices can share elements, for some number of elements. Both are of one block.
bool SlicesOverlap(const Chunk& a, const Chunk& b);

// What a step does to memory besides reading its sources.
bool WritesSource(StepKind kind);  // kRecode and kDecodeFinish use their accumulator up
bool WritesDestination(StepKind kind);

// One block of one buffer.
struct BlockId {
  Buffer buffer;
  uint32_t block;
  friend bool operator==(const BlockId&, const BlockId&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const BlockId& id) {
    return H::combine(std::move(h), id.buffer, id.block);
  }
};
inline BlockId IdOf(const Chunk& chunk) { return {chunk.buffer, chunk.block}; }

// The other block whose memory the caller may have passed for this one (program.h).
std::optional<BlockId> SharedWith(Collective collective, int rank, BlockId id);
// A copy that is a no-op where the two blocks are the same memory.
bool IsSelfCopy(Collective collective, int rank, const Step& step);

// Blocks of a call on `rank`, as program.h defines them.
uint32_t InputBlocks(const CallShape& shape, int rank, int world);
uint32_t OutputBlocks(const CallShape& shape, int rank, int world);

// Which steps come before which: the transitive closure of `after`, grown step by step.
class StepOrder {
 public:
  // The next step waits for `after`.
  void Append(const absl::InlinedVector<uint32_t, 4>& after);
  bool IsBefore(uint32_t early, uint32_t late) const {
    const std::vector<uint64_t>& bits = before_[late];
    return early / 64 < bits.size() && ((bits[early / 64] >> (early % 64)) & 1);
  }

 private:
  std::vector<std::vector<uint64_t>> before_;  // a bit for each earlier step
};

class ProgramBuilder {
 public:
  ProgramBuilder(const CallShape& shape, std::string name, int rank, int world,
                 int64_t granule = kPlainGranule);

  int rank() const { return program_.rank; }
  int world() const { return program_.world; }

  // A new scratch block.
  Chunk Plain(const Chunk& like) { return Scratch(ScratchKind::kPlain, like, false); }
  Chunk Code(const Chunk& like, bool recoded) {
    return Scratch(ScratchKind::kEncoded, like, recoded);
  }
  Chunk Accumulator(const Chunk& like, bool recoded) {
    return Scratch(ScratchKind::kAccumulator, like, recoded);
  }

  // Each returns the step's index. `after` adds what memory does not tell.
  uint32_t Send(const Chunk& src, int peer, std::vector<uint32_t> after = {});
  uint32_t Recv(int peer, const Chunk& dst, std::vector<uint32_t> after = {});
  uint32_t Reduce(const Chunk& dst, std::vector<Chunk> operands);
  uint32_t Copy(const Chunk& dst, const Chunk& src) { return Local(StepKind::kCopy, dst, src); }
  uint32_t Encode(const Chunk& dst, const Chunk& src) { return Local(StepKind::kEncode, dst, src); }
  uint32_t DecodeAdd(const Chunk& dst, const Chunk& src) {
    return Local(StepKind::kDecodeAdd, dst, src);
  }
  uint32_t DecodeFinish(const Chunk& dst, const Chunk& src) {
    return Local(StepKind::kDecodeFinish, dst, src);
  }
  uint32_t Recode(const Chunk& dst, const Chunk& src) { return Local(StepKind::kRecode, dst, src); }

  // The program is one of `sums_once` (program.h).
  void SumsOnce() { program_.sums_once = true; }

  Program Build() && { return std::move(program_); }

 private:
  struct Access {
    Chunk chunk;
    uint32_t step;
    bool write;
    bool self_copy;
  };

  Chunk Scratch(ScratchKind kind, const Chunk& like, bool recoded);
  uint32_t Local(StepKind kind, const Chunk& dst, const Chunk& src);
  uint32_t Append(Step step, std::vector<uint32_t> after);
  void Track(const Chunk& chunk, uint32_t index, bool write, bool self_copy,
             std::vector<uint32_t>& after);

  Collective collective_;
  Program program_;
  // Of each block: the accesses that a later step may have to wait for.
  absl::flat_hash_map<BlockId, std::vector<Access>> accesses_;
  StepOrder order_;
  std::vector<uint32_t> sent_, received_;  // messages so far, by peer
};

}  // namespace geomesh::plan
