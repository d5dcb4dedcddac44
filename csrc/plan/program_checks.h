// Checks of programs that need no execution: references and kinds, messages, races. Parts of the
// verifier.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "plan/builder.h"
#include "plan/compile.h"
#include "plan/program.h"
#include "plan/verifier.h"

namespace geomesh::plan {

// The verifier's error for one step.
absl::Status Wrong(int rank, size_t index, const Step& step, const std::string& what);

// Elements of input and output blocks.
class Sizes {
 public:
  Sizes(const CallShape& shape, int world, const VerifySizes& sizes)
      : shape_(shape), world_(world), sizes_(sizes) {}

  int64_t Block(int rank, BlockId id) const {
    switch (shape_.collective) {
      case Collective::kAllGather:
      case Collective::kGather:
        return id.buffer == Buffer::kInput ? Part(rank) : Part(id.block);
      case Collective::kReduceScatter:
      case Collective::kScatter:
        return id.buffer == Buffer::kInput ? Part(id.block) : Part(rank);
      case Collective::kAllToAll:
        return id.buffer == Buffer::kInput ? Part(rank + 2 * id.block) : Part(id.block + 2 * rank);
      default:
        return sizes_.elements;
    }
  }

 private:
  int64_t Part(int64_t index) const {
    if (!sizes_.uneven) return sizes_.elements;
    return std::max<int64_t>(0, sizes_.elements - index * (sizes_.elements / (world_ + 1) + 1));
  }
  const CallShape& shape_;
  const int world_;
  const VerifySizes sizes_;
};

// One rank's program with its block sizes.
class RankView {
 public:
  RankView(const Program& program, const Sizes& sizes) : program_(program), sizes_(sizes) {}

  int64_t BlockElements(BlockId id) const {
    if (id.buffer != Buffer::kScratch) return sizes_.Block(program_.rank, id);
    const SliceRange like = Range(program_.scratch[id.block].like);
    return like.end - like.begin;
  }
  SliceRange Range(const Chunk& chunk) const {
    if (chunk.block == kNoBlock) return {};
    return SliceBounds(BlockElements(IdOf(chunk)), chunk.slice, chunk.slices, program_.granule);
  }
  int64_t Elements(const Chunk& chunk) const {
    const SliceRange range = Range(chunk);
    return range.end - range.begin;
  }
  std::optional<ScratchBlock> ScratchOf(const Chunk& chunk) const {
    if (chunk.buffer != Buffer::kScratch || chunk.block == kNoBlock) return std::nullopt;
    return program_.scratch[chunk.block];
  }

 private:
  const Program& program_;
  const Sizes& sizes_;
};

// References are in bounds, operands of the right kinds, dependencies point backwards.
absl::Status CheckProgram(const Program& program, int rank, int world);

// Every message has one sender and one receiver, and one size.
absl::Status CheckMessages(absl::Span<const Program> programs, const std::vector<RankView>& views);

// Steps that are not ordered by `after` don't conflict in memory.
absl::Status CheckRaces(Collective collective, const Program& program);

}  // namespace geomesh::plan
