// See program_checks.h.
#include "plan/program_checks.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace geomesh::plan {
namespace {

enum class Place : uint8_t { kElements, kCode, kRecoded, kSum, kRecodedSum, kNothing };

Place PlaceOf(const Program& program, const Chunk& chunk) {
  if (chunk.block == kNoBlock) return Place::kNothing;
  if (chunk.buffer != Buffer::kScratch) return Place::kElements;
  const ScratchBlock& block = program.scratch[chunk.block];
  switch (block.kind) {
    case ScratchKind::kPlain:
      return Place::kElements;
    case ScratchKind::kEncoded:
      return block.recoded ? Place::kRecoded : Place::kCode;
    case ScratchKind::kAccumulator:
      return block.recoded ? Place::kRecodedSum : Place::kSum;
  }
  return Place::kNothing;
}

absl::Status CheckChunk(const Program& program, const Chunk& chunk, bool scratch_allowed) {
  if (chunk.block == kNoBlock) return absl::OkStatus();
  const size_t blocks = chunk.buffer == Buffer::kInput    ? program.input_blocks
                        : chunk.buffer == Buffer::kOutput ? program.output_blocks
                                                          : program.scratch.size();
  if (chunk.buffer == Buffer::kScratch && !scratch_allowed) {
    return absl::InvalidArgumentError("scratch can't be like scratch");
  }
  if (chunk.block >= blocks) {
    return absl::InvalidArgumentError(
        absl::StrCat(ToString(chunk), " is out of bounds: there are ", blocks, " such blocks"));
  }
  if (chunk.slice >= chunk.slices) {
    return absl::InvalidArgumentError(absl::StrCat(ToString(chunk), " is no slice"));
  }
  if (chunk.slices != 1 && PlaceOf(program, chunk) != Place::kElements) {
    return absl::InvalidArgumentError(absl::StrCat(ToString(chunk), ": a code has no slices"));
  }
  return absl::OkStatus();
}

bool PlacesFit(StepKind kind, Place src, Place dst) {
  switch (kind) {
    case StepKind::kSend:
      return src == Place::kElements || src == Place::kCode || src == Place::kRecoded ||
             src == Place::kNothing;
    case StepKind::kRecv:
      return dst == Place::kElements || dst == Place::kCode || dst == Place::kRecoded ||
             dst == Place::kNothing;
    case StepKind::kReduce:
    case StepKind::kCopy:
      return src == Place::kElements && dst == Place::kElements;
    case StepKind::kEncode:
      return src == Place::kElements && dst == Place::kCode;
    case StepKind::kDecodeAdd:
      return (src == Place::kCode && dst == Place::kSum) ||
             (src == Place::kRecoded && dst == Place::kRecodedSum);
    case StepKind::kDecodeFinish:
      return (src == Place::kSum || src == Place::kRecodedSum) && dst == Place::kElements;
    case StepKind::kRecode:
      return src == Place::kSum && dst == Place::kRecoded;
  }
  return false;
}

}  // namespace

absl::Status Wrong(int rank, size_t index, const Step& step, const std::string& what) {
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", rank, ", step ", index, " (", ToString(step), "): ", what));
}

absl::Status CheckProgram(const Program& program, int rank, int world) {
  const auto wrong = [&](const std::string& what) {
    return absl::FailedPreconditionError(absl::StrCat("rank ", rank, ": ", what));
  };
  if (program.rank != rank || program.world != world) {
    return wrong(absl::StrCat("its program is for rank ", program.rank, " of ", program.world));
  }
  if (program.granule <= 0) return wrong("granule is not positive");
  for (const ScratchBlock& block : program.scratch) {
    if (absl::Status status = CheckChunk(program, block.like, false); !status.ok()) {
      return wrong(absl::StrCat("scratch: ", status.message()));
    }
  }
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const Step& step = program.steps[i];
    const bool message = step.kind == StepKind::kSend || step.kind == StepKind::kRecv;
    std::vector<Chunk> chunks(SourcesOf(step).begin(), SourcesOf(step).end());
    if (WritesDestination(step.kind)) chunks.push_back(step.dst);
    for (const Chunk& chunk : chunks) {
      if (absl::Status status = CheckChunk(program, chunk, true); !status.ok()) {
        return Wrong(rank, i, step, std::string(status.message()));
      }
    }
    if (step.kind == StepKind::kReduce && step.operands.size() < 2) {
      return Wrong(rank, i, step, "reduces fewer than two operands");
    }
    const Place dst = step.kind == StepKind::kSend ? Place::kNothing : PlaceOf(program, step.dst);
    bool fits = step.kind != StepKind::kRecv || PlacesFit(step.kind, Place::kNothing, dst);
    for (const Chunk& source : SourcesOf(step)) {
      fits = fits && PlacesFit(step.kind, PlaceOf(program, source), dst);
    }
    if (!fits) return Wrong(rank, i, step, "operands of the wrong kind");
    if (message && (step.peer < 0 || step.peer >= world || step.peer == rank)) {
      return Wrong(rank, i, step, "no such peer");
    }
    for (const uint32_t earlier : step.after) {
      if (earlier >= i) return Wrong(rank, i, step, "waits for a step that is not before it");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckMessages(absl::Span<const Program> programs, const std::vector<RankView>& views) {
  struct StepRef {
    int rank;
    uint32_t index;
  };
  using MessageKey = std::tuple<int, int, uint32_t>;  // from, to, message
  std::map<MessageKey, StepRef> sends, receives;
  for (const Program& program : programs) {
    for (uint32_t i = 0; i < program.steps.size(); ++i) {
      const Step& step = program.steps[i];
      bool fresh = true;
      if (step.kind == StepKind::kSend) {
        fresh = sends.try_emplace({program.rank, step.peer, step.message}, StepRef{program.rank, i})
                    .second;
      } else if (step.kind == StepKind::kRecv) {
        fresh =
            receives.try_emplace({step.peer, program.rank, step.message}, StepRef{program.rank, i})
                .second;
      }
      if (!fresh) return Wrong(program.rank, i, step, "this message exists twice");
    }
  }
  for (const auto& [key, at] : receives) {
    if (!sends.contains(key)) {
      return Wrong(at.rank, at.index, programs[at.rank].steps[at.index],
                   "nobody sends this message");
    }
  }
  for (const auto& [key, from] : sends) {
    const Step& send = programs[from.rank].steps[from.index];
    const auto it = receives.find(key);
    if (it == receives.end()) {
      return Wrong(from.rank, from.index, send, "nobody receives this message");
    }
    const StepRef to = it->second;
    const Step& receive = programs[to.rank].steps[to.index];
    const int64_t sent = views[from.rank].Elements(send.src);
    const int64_t expected = views[to.rank].Elements(receive.dst);
    if (sent != expected) {
      return Wrong(from.rank, from.index, send,
                   absl::StrCat("sends ", sent, " elements, but rank ", to.rank, ", step ",
                                to.index, " expects ", expected));
    }
    if (PlaceOf(programs[from.rank], send.src) != PlaceOf(programs[to.rank], receive.dst)) {
      return Wrong(from.rank, from.index, send,
                   absl::StrCat("sends another kind of data than rank ", to.rank, ", step ",
                                to.index, " expects"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckRaces(Collective collective, const Program& program) {
  struct Access {
    uint32_t step;
    Chunk chunk;
    bool write;
    bool self_copy;
  };
  absl::flat_hash_map<BlockId, std::vector<Access>> accesses;
  for (uint32_t i = 0; i < program.steps.size(); ++i) {
    const Step& step = program.steps[i];
    const bool self_copy = IsSelfCopy(collective, program.rank, step);
    for (const Chunk& source : SourcesOf(step)) {
      if (source.block == kNoBlock) continue;
      accesses[IdOf(source)].push_back({i, source, WritesSource(step.kind), self_copy});
    }
    if (WritesDestination(step.kind) && step.dst.block != kNoBlock) {
      accesses[IdOf(step.dst)].push_back({i, step.dst, true, self_copy});
    }
  }
  StepOrder order;
  for (const Step& step : program.steps) order.Append(step.after);
  const auto check = [&](const Access& a, const Access& b) -> absl::Status {
    if (a.step == b.step || !(a.write || b.write) || !SlicesOverlap(a.chunk, b.chunk)) {
      return absl::OkStatus();
    }
    const auto [early, late] = std::minmax(a.step, b.step);
    if (order.IsBefore(early, late)) return absl::OkStatus();
    return Wrong(program.rank, late, program.steps[late],
                 absl::StrCat("may run at the same time as step ", early, " (",
                              ToString(program.steps[early]), "), on the same elements"));
  };
  for (const auto& [id, own] : accesses) {
    for (size_t i = 0; i < own.size(); ++i) {
      for (size_t j = 0; j < i; ++j) GM_RETURN_IF_ERROR(check(own[i], own[j]));
    }
    const auto shared = SharedWith(collective, program.rank, id);
    if (!shared.has_value() || !accesses.contains(*shared)) continue;
    for (const Access& a : own) {
      for (const Access& b : accesses[*shared]) {
        if (!a.self_copy && !b.self_copy) GM_RETURN_IF_ERROR(check(a, b));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace geomesh::plan
