// The program: what one rank does in one collective, as a list of steps over chunks. The one idea
// of this project.
//
// A program knows no bytes, no dtype and no memory: it is made from a topology and a call
// (collective, root, codec), and the executor applies it to buffers of any size. The same value is
// run (exec), checked for all ranks at once (verifier), timed on a described network (cost model),
// and printed.
//
// Buffers. A call has input blocks and output blocks, each a contiguous run of elements with a size
// of its own; scratch blocks are the program's own. A collective that c10d defines in place
// (all-reduce, broadcast, reduce) has output blocks only, which hold the rank's contribution at the
// start. A chunk is slice `slice` of `slices` equal slices of a block; its bounds are given by
// SliceBounds, equally on all ranks.
//
// Memory that a caller may share between buffers: input 0 with output `rank` (all-gather, and
// gather on the root), input `rank` with output 0 (reduce-scatter, and scatter on the root), input
// 0 with output 0 (sign all-reduce). Programs are ordered for that; a kCopy of a chunk onto itself
// is then a no-op.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"

namespace geomesh::plan {

enum class Buffer : uint8_t { kInput, kOutput, kScratch };

// The block of a chunk of no bytes: a message that only says "I got here" (barrier).
inline constexpr uint32_t kNoBlock = UINT32_MAX;

struct Chunk {
  Buffer buffer = Buffer::kOutput;
  uint32_t block = 0;
  uint32_t slice = 0;
  uint32_t slices = 1;
  friend bool operator==(const Chunk&, const Chunk&) = default;
};

// Elements [begin, end) of slice `slice` of `slices` of a block of `elements`. Inner bounds are
// multiples of `granule` (kPlainGranule, or the codec's block where the program encodes), so late
// slices may be empty.
struct SliceRange {
  int64_t begin = 0;
  int64_t end = 0;
};
inline constexpr int64_t kPlainGranule = 64;
SliceRange SliceBounds(int64_t elements, uint32_t slice, uint32_t slices, int64_t granule);

enum class StepKind : uint8_t {
  kSend,          // src -> message `message` to `peer`; done when src may be overwritten
  kRecv,          // message `message` from `peer` -> dst
  kReduce,        // dst = operand 0 (op) operand 1 (op) ..., element by element, from left to right
  kCopy,          // dst = src
  kEncode,        // dst (encoded scratch) = code of src (a slice of the call's encoded source)
  kDecodeAdd,     // accumulator dst += weight x estimate of src (encoded scratch)
  kDecodeFinish,  // dst = weighted mean of accumulator src
  kRecode,  // dst (encoded scratch) = code of the weighted mean of accumulator src, under a fresh
            // rotation
};

struct Step {
  StepKind kind = StepKind::kCopy;
  Chunk src = {};  // not of kRecv and kReduce
  Chunk dst = {};
  absl::InlinedVector<Chunk, 2> operands = {};  // kReduce: two or more; dst may be one of them
  int32_t peer = -1;                            // group rank, for kSend and kRecv
  uint32_t message = 0;                         // counts from 0 for each ordered pair of ranks
  absl::InlinedVector<uint32_t, 4> after = {};  // indices of earlier steps that must be done first
};

// What a step reads.
inline absl::Span<const Chunk> SourcesOf(const Step& step) {
  if (step.kind == StepKind::kRecv) return {};
  if (step.kind == StepKind::kReduce) return step.operands;
  return absl::MakeConstSpan(&step.src, 1);
}

enum class ScratchKind : uint8_t {
  kPlain,    // as many elements as `like`, of the call's dtype
  kEncoded,  // room for a code of `like`; it remembers the code's length, which kEncode, kRecode
             // and kRecv set and kSend sends
  kAccumulator,  // rotated fp32 sum for `like`, zero at the start; kRecode and kDecodeFinish use it
                 // up
};

struct ScratchBlock {
  ScratchKind kind = ScratchKind::kPlain;
  Chunk like;  // an input or output chunk
  uint8_t recoded =
      0;  // kEncoded and kAccumulator: 1 where the code is made by kRecode (second rotation)
};

struct Program {
  std::string name;  // "ring all-reduce", for errors, traces and reports
  int32_t rank = 0;
  int32_t world = 1;
  uint32_t input_blocks = 0;
  uint32_t output_blocks = 1;
  int64_t granule = kPlainGranule;
  // Every reduction is of all ranks' contributions in one step, so that a sum is rounded once
  // however many ranks there are; else sums of some ranks are rounded on their way. Equal on all
  // ranks.
  bool sums_once = false;
  std::vector<ScratchBlock> scratch;
  std::vector<Step> steps;  // in an order in which every step comes after those it waits for
};

enum class Collective : uint8_t {
  kAllReduce,      // output: 1 block, in place
  kBroadcast,      // output: 1 block, in place
  kReduce,         // output: 1 block, in place on the root, unchanged elsewhere
  kAllGather,      // input: 1 block, output: `world` blocks
  kReduceScatter,  // input: `world` blocks, output: 1 block
  kGather,         // input: 1 block, output: `world` blocks on the root, none elsewhere
  kScatter,        // input: `world` blocks on the root, none elsewhere; output: 1 block
  kAllToAll,       // input and output: `world` blocks
  kBarrier,        // no blocks
  kSendRecv,       // send: input 1 block; receive: output 1 block
  kSignAllReduce,  // input: the encoded source (1 block); output: 1 block of fp32, the weighted
                   // mean
};

// Whether `root` of a call means something (kSendRecv has a peer instead).
constexpr bool HasRoot(Collective c) {
  return c == Collective::kBroadcast || c == Collective::kReduce || c == Collective::kGather ||
         c == Collective::kScatter;
}

const char* Name(Collective collective);
const char* Name(StepKind kind);

// A table of the steps, one a line, for people.
std::string ToString(const Program& program);
std::string ToString(const Step& step);
std::string ToString(const Chunk& chunk);

}  // namespace geomesh::plan
