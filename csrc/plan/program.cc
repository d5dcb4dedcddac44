// Slice bounds, names and the printed form of programs. Knows nothing of topologies.
#include "plan/program.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace geomesh::plan {

SliceRange SliceBounds(int64_t elements, uint32_t slice, uint32_t slices, int64_t granule) {
  if (elements <= 0 || slices == 0) return {};
  // Bound i is granule x ceil(units x i / slices): a monotone function of the fraction i / slices
  // alone, so that slices of one block whose fractions are apart never overlap, whatever each one's
  // `slices` is. Split into quotient and remainder, which can't overflow.
  const uint64_t units = static_cast<uint64_t>((elements - 1) / granule + 1);
  const uint64_t quotient = units / slices;
  const uint64_t remainder = units % slices;
  const auto bound = [&](uint64_t i) {
    const uint64_t unit = quotient * i + (remainder * i + slices - 1) / slices;
    return unit >= units ? elements : static_cast<int64_t>(unit) * granule;
  };
  return {bound(slice), bound(static_cast<uint64_t>(slice) + 1)};
}

const char* Name(Collective collective) {
  switch (collective) {
    case Collective::kAllReduce:
      return "all-reduce";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kReduce:
      return "reduce";
    case Collective::kAllGather:
      return "all-gather";
    case Collective::kReduceScatter:
      return "reduce-scatter";
    case Collective::kGather:
      return "gather";
    case Collective::kScatter:
      return "scatter";
    case Collective::kAllToAll:
      return "all-to-all";
    case Collective::kBarrier:
      return "barrier";
    case Collective::kSendRecv:
      return "send-receive";
    case Collective::kSignAllReduce:
      return "sign all-reduce";
  }
  return "unknown collective";
}

const char* Name(StepKind kind) {
  switch (kind) {
    case StepKind::kSend:
      return "send";
    case StepKind::kRecv:
      return "recv";
    case StepKind::kReduce:
      return "reduce";
    case StepKind::kCopy:
      return "copy";
    case StepKind::kEncode:
      return "encode";
    case StepKind::kDecodeAdd:
      return "decode-add";
    case StepKind::kDecodeFinish:
      return "decode-finish";
    case StepKind::kRecode:
      return "recode";
  }
  return "unknown step";
}

std::string ToString(const Chunk& chunk) {
  if (chunk.block == kNoBlock) return "nothing";
  const char* buffer = chunk.buffer == Buffer::kInput    ? "in"
                       : chunk.buffer == Buffer::kOutput ? "out"
                                                         : "tmp";
  std::string text = absl::StrFormat("%s[%u]", buffer, chunk.block);
  if (chunk.slices != 1) absl::StrAppendFormat(&text, " %u/%u", chunk.slice, chunk.slices);
  return text;
}

std::string ToString(const Step& step) {
  std::string text = absl::StrFormat("%-13s ", Name(step.kind));
  switch (step.kind) {
    case StepKind::kSend:
      absl::StrAppendFormat(&text, "%s -> rank %d #%u", ToString(step.src), step.peer,
                            step.message);
      break;
    case StepKind::kRecv:
      absl::StrAppendFormat(&text, "%s <- rank %d #%u", ToString(step.dst), step.peer,
                            step.message);
      break;
    case StepKind::kReduce:
      absl::StrAppendFormat(
          &text, "%s = %s", ToString(step.dst),
          absl::StrJoin(step.operands, " op ", [](std::string* out, const Chunk& operand) {
            out->append(ToString(operand));
          }));
      break;
    case StepKind::kDecodeAdd:
      absl::StrAppendFormat(&text, "%s += %s", ToString(step.dst), ToString(step.src));
      break;
    default:
      absl::StrAppendFormat(&text, "%s = %s", ToString(step.dst), ToString(step.src));
  }
  if (!step.after.empty()) absl::StrAppend(&text, "  after ", absl::StrJoin(step.after, ","));
  return text;
}

std::string ToString(const Program& program) {
  std::string text =
      absl::StrFormat("%s, rank %d of %d: %u input and %u output blocks, %d scratch blocks\n",
                      program.name, program.rank, program.world, program.input_blocks,
                      program.output_blocks, program.scratch.size());
  for (size_t i = 0; i < program.scratch.size(); ++i) {
    const ScratchBlock& block = program.scratch[i];
    const char* kind = block.kind == ScratchKind::kPlain     ? "plain"
                       : block.kind == ScratchKind::kEncoded ? "code"
                                                             : "accumulator";
    absl::StrAppendFormat(&text, "  tmp[%d]: %s like %s%s\n", i, kind, ToString(block.like),
                          block.recoded ? ", recoded" : "");
  }
  for (size_t i = 0; i < program.steps.size(); ++i) {
    absl::StrAppendFormat(&text, "%4d  %s\n", i, ToString(program.steps[i]));
  }
  return text;
}

}  // namespace geomesh::plan
