// Dependencies from memory accesses, and message numbers.
#include "plan/builder.h"

#include <algorithm>

namespace geomesh::plan {
namespace {

// The two slices as fractions: a ends at or before b begins.
bool EndsBefore(const Chunk& a, const Chunk& b) {
  return (static_cast<uint64_t>(a.slice) + 1) * b.slices <=
         static_cast<uint64_t>(b.slice) * a.slices;
}

bool Covers(const Chunk& outer, const Chunk& inner) {
  return static_cast<uint64_t>(outer.slice) * inner.slices <=
             static_cast<uint64_t>(inner.slice) * outer.slices &&
         (static_cast<uint64_t>(inner.slice) + 1) * outer.slices <=
             (static_cast<uint64_t>(outer.slice) + 1) * inner.slices;
}

}  // namespace

bool SlicesOverlap(const Chunk& a, const Chunk& b) {
  return !EndsBefore(a, b) && !EndsBefore(b, a);
}

bool WritesSource(StepKind kind) {
  return kind == StepKind::kRecode || kind == StepKind::kDecodeFinish;
}

bool WritesDestination(StepKind kind) { return kind != StepKind::kSend; }

std::optional<BlockId> SharedWith(Collective collective, int rank, BlockId id) {
  const uint32_t own = static_cast<uint32_t>(rank);
  uint32_t input = 0, output = 0;
  switch (collective) {
    case Collective::kAllGather:
    case Collective::kGather:
      output = own;
      break;
    case Collective::kReduceScatter:
    case Collective::kScatter:
      input = own;
      break;
    case Collective::kSignAllReduce:
      break;
    default:
      return std::nullopt;
  }
  if (id == BlockId{Buffer::kInput, input}) return BlockId{Buffer::kOutput, output};
  if (id == BlockId{Buffer::kOutput, output}) return BlockId{Buffer::kInput, input};
  return std::nullopt;
}

bool IsSelfCopy(Collective collective, int rank, const Step& step) {
  return step.kind == StepKind::kCopy &&
         SharedWith(collective, rank, IdOf(step.src)) == IdOf(step.dst) &&
         step.src.slice == step.dst.slice && step.src.slices == step.dst.slices;
}

uint32_t InputBlocks(const CallShape& shape, int rank, int world) {
  switch (shape.collective) {
    case Collective::kAllReduce:
    case Collective::kBroadcast:
    case Collective::kReduce:
    case Collective::kBarrier:
      return 0;
    case Collective::kAllGather:
    case Collective::kGather:
    case Collective::kSignAllReduce:
      return 1;
    case Collective::kReduceScatter:
    case Collective::kAllToAll:
      return world;
    case Collective::kScatter:
      return rank == shape.root ? world : 0;
    case Collective::kSendRecv:
      return shape.sending ? 1 : 0;
  }
  return 0;
}

uint32_t OutputBlocks(const CallShape& shape, int rank, int world) {
  switch (shape.collective) {
    case Collective::kAllReduce:
    case Collective::kBroadcast:
    case Collective::kReduce:
    case Collective::kReduceScatter:
    case Collective::kScatter:
    case Collective::kSignAllReduce:
      return 1;
    case Collective::kAllGather:
    case Collective::kAllToAll:
      return world;
    case Collective::kGather:
      return rank == shape.root ? world : 0;
    case Collective::kBarrier:
      return 0;
    case Collective::kSendRecv:
      return shape.sending ? 0 : 1;
  }
  return 0;
}

void StepOrder::Append(const absl::InlinedVector<uint32_t, 4>& after) {
  std::vector<uint64_t>& bits = before_.emplace_back();
  if (after.empty()) return;
  bits.resize(*std::max_element(after.begin(), after.end()) / 64 + 1);
  for (const uint32_t early : after) {
    const std::vector<uint64_t>& earlier = before_[early];
    for (size_t w = 0; w < earlier.size(); ++w) bits[w] |= earlier[w];
    bits[early / 64] |= uint64_t{1} << (early % 64);
  }
}

ProgramBuilder::ProgramBuilder(const CallShape& shape, std::string name, int rank, int world,
                               int64_t granule)
    : collective_(shape.collective), sent_(world), received_(world) {
  program_.name = std::move(name);
  program_.rank = rank;
  program_.world = world;
  program_.input_blocks = InputBlocks(shape, rank, world);
  program_.output_blocks = OutputBlocks(shape, rank, world);
  program_.granule = granule;
}

Chunk ProgramBuilder::Scratch(ScratchKind kind, const Chunk& like, bool recoded) {
  program_.scratch.push_back({kind, like, static_cast<uint8_t>(recoded)});
  return {Buffer::kScratch, static_cast<uint32_t>(program_.scratch.size() - 1), 0, 1};
}

uint32_t ProgramBuilder::Send(const Chunk& src, int peer, std::vector<uint32_t> after) {
  return Append({.kind = StepKind::kSend, .src = src, .peer = peer, .message = sent_[peer]++},
                std::move(after));
}

uint32_t ProgramBuilder::Recv(int peer, const Chunk& dst, std::vector<uint32_t> after) {
  return Append({.kind = StepKind::kRecv, .dst = dst, .peer = peer, .message = received_[peer]++},
                std::move(after));
}

uint32_t ProgramBuilder::Reduce(const Chunk& dst, std::vector<Chunk> operands) {
  return Append(
      {.kind = StepKind::kReduce, .dst = dst, .operands = {operands.begin(), operands.end()}}, {});
}

uint32_t ProgramBuilder::Local(StepKind kind, const Chunk& dst, const Chunk& src) {
  return Append({.kind = kind, .src = src, .dst = dst}, {});
}

uint32_t ProgramBuilder::Append(Step made, std::vector<uint32_t> after) {
  const uint32_t index = static_cast<uint32_t>(program_.steps.size());
  Step& step = program_.steps.emplace_back(std::move(made));
  const bool self_copy = IsSelfCopy(collective_, program_.rank, step);
  for (const Chunk& source : SourcesOf(step)) {
    Track(source, index, WritesSource(step.kind), self_copy, after);
  }
  if (WritesDestination(step.kind)) Track(step.dst, index, true, self_copy, after);

  std::sort(after.begin(), after.end());
  after.erase(std::unique(after.begin(), after.end()), after.end());
  // What another of them waits for already need not be named.
  for (const uint32_t early : after) {
    const bool implied = std::any_of(after.begin(), after.end(), [&](uint32_t late) {
      return late != index && order_.IsBefore(early, late);
    });
    if (early != index && !implied) step.after.push_back(early);
  }
  order_.Append(step.after);
  return index;
}

void ProgramBuilder::Track(const Chunk& chunk, uint32_t index, bool write, bool self_copy,
                           std::vector<uint32_t>& after) {
  if (chunk.block == kNoBlock) return;
  const auto wait_for = [&](const std::vector<Access>& earlier, bool shared) {
    for (const Access& access : earlier) {
      if (shared && access.self_copy) continue;
      if ((write || access.write) && SlicesOverlap(chunk, access.chunk)) {
        after.push_back(access.step);
      }
    }
  };
  if (const auto other = SharedWith(collective_, program_.rank, IdOf(chunk));
      other.has_value() && !self_copy) {
    if (const auto it = accesses_.find(*other); it != accesses_.end()) wait_for(it->second, true);
  }
  std::vector<Access>& own = accesses_[IdOf(chunk)];
  wait_for(own, false);
  if (write && !self_copy) {
    // This step is after them, and whoever touches these elements later is after this step.
    own.erase(std::remove_if(own.begin(), own.end(),
                             [&](const Access& a) { return Covers(chunk, a.chunk); }),
              own.end());
  }
  own.push_back({chunk, index, write, self_copy});
}

}  // namespace geomesh::plan
