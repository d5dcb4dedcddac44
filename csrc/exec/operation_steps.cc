// What each kind of step does to memory and messages.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "base/arithmetic.h"
#include "exec/operation.h"

namespace geomesh::exec {

using plan::Buffer;
using plan::Program;
using plan::Step;
using plan::StepKind;
using transport::Envelope;

namespace {

// Names the work before and after all steps where a step is asked for.
constexpr uint32_t kFirstOrLast = UINT32_MAX;

}  // namespace

Operation::Memory Operation::Locate(const plan::Chunk& chunk) const {
  if (chunk.block == plan::kNoBlock) return {};
  std::byte* data = nullptr;
  int64_t elements = 0;
  switch (chunk.buffer) {
    case Buffer::kInput:
      data = input_[chunk.block].data;
      elements = input_[chunk.block].elements;
      break;
    case Buffer::kOutput:
      data = output_[chunk.block].data;
      elements = output_[chunk.block].elements;
      break;
    case Buffer::kScratch:
      data = scratch_[chunk.block].memory.data.get();
      elements = scratch_[chunk.block].elements;
      break;
  }
  const plan::SliceRange range =
      plan::SliceBounds(elements, chunk.slice, chunk.slices, call_->program->granule);
  if (range.begin == range.end) return {};
  return {data + range.begin * static_cast<int64_t>(SizeOf(call_->dtype)), range.end - range.begin};
}

// An empty slice of a block has no message: the other side knows the block's size too. One of an
// empty block has, for which nobody waits: the other side might mean another size, and would wait
// until its deadline.
bool Operation::IsOfEmptyBlock(const plan::Chunk& chunk) const {
  const plan::Chunk& like =
      chunk.buffer == Buffer::kScratch ? call_->program->scratch[chunk.block].like : chunk;
  return (like.buffer == Buffer::kInput ? input_ : output_)[like.block].elements == 0;
}

void Operation::AwaitNothing(int rank, const transport::Envelope& envelope) {
  group_->engine->Recv(
      group_->peers[rank], envelope, {},
      [self = Self(), peer = group_->peers[rank]](const absl::StatusOr<size_t>& size) {
        const absl::StatusCode code = size.status().code();
        if (code == absl::StatusCode::kFailedPrecondition ||
            code == absl::StatusCode::kInvalidArgument) {
          self->group_->OnStray(peer, self->call_->sequence);
        }
      },
      {.standing = true});
}

codec::SignParams Operation::Params(uint32_t scratch_block) const {
  const SignCall& sign = *call_->sign;
  const bool recoded = call_->program->scratch[scratch_block].recoded != 0;
  codec::SignParams params;
  params.rotate = sign.rotate;
  params.rotation_seed = recoded ? Mix(sign.rotation_seed, kRecodeStream) : sign.rotation_seed;
  params.dither_seed = Mix(params.rotation_seed, static_cast<uint64_t>(group_->rank));
  return params;
}

codec::SignAccumulator& Operation::AccumulatorOf(uint32_t scratch_block) {
  Scratch& scratch = scratch_[scratch_block];
  if (scratch.accumulator == nullptr) {
    scratch.accumulator = std::make_unique<codec::SignAccumulator>(
        pieces(), scratch.range, Params(scratch_block),
        absl::MakeSpan(reinterpret_cast<float*>(scratch.memory.data.get()),
                       codec::SignAccumulator::SumElements(scratch.range)));
  }
  return *scratch.accumulator;
}

// Runs `work` here if it is short, else on the compute thread. `work` may use the operation's and
// the caller's memory: the operation does not end before it has returned.
template <typename Work>
bool Operation::Compute(uint32_t step, int64_t touched_bytes, Work work) {
  if (touched_bytes <= kInlineBytes) {
    const CommonArithmetic common;
    absl::Status status = work();
    if (status.ok()) return true;
    Fail(std::move(status));
    return false;
  }
  if (step < state_.size()) state_[step] = StepState::kUnderWay;
  ++under_way_;
  group_->compute->Submit([self = Self(), step, work = std::move(work)]() mutable {
    const CommonArithmetic common;
    absl::Status status = self->stopped_.load(std::memory_order_relaxed)
                              ? absl::CancelledError("stopped before it began")
                              : work();
    transport::Engine* engine = self->group_->engine;
    engine->Post([self = std::move(self), step, status = std::move(status)] {
      self->OnComputed(step, status);
    });
  });
  return false;
}

bool Operation::Begin(uint32_t step) {
  switch (call_->program->steps[step].kind) {
    case StepKind::kSend:
      return BeginSend(step);
    case StepKind::kRecv:
      return BeginRecv(step);
    case StepKind::kReduce:
      return BeginReduce(step);
    case StepKind::kCopy:
      return BeginCopy(step);
    case StepKind::kEncode:
      return BeginEncode(step);
    case StepKind::kDecodeAdd:
      return BeginDecodeAdd(step);
    case StepKind::kDecodeFinish:
      return BeginDecodeFinish(step);
    case StepKind::kRecode:
      return BeginRecode(step);
  }
  return true;
}

bool Operation::BeginSend(uint32_t index) {
  const Step& step = call_->program->steps[index];
  absl::Span<const std::byte> bytes;
  if (EncodedBlock(step.src) != nullptr) {
    const Scratch& code = scratch_[step.src.block];
    bytes = {code.memory.data.get(), code.code_bytes};
  } else {
    const Memory source = Locate(step.src);
    bytes = {source.data, static_cast<size_t>(source.elements) * SizeOf(call_->dtype)};
  }
  const Envelope envelope{{group_->channel, call_->first_message_id + step.message},
                          call_->fingerprint};
  if (bytes.empty() && step.src.block != plan::kNoBlock && !point_to_point()) {
    if (IsOfEmptyBlock(step.src)) {
      group_->engine->Send(group_->peers[step.peer], envelope, bytes, [](const absl::Status&) {});
    }
    return true;
  }
  state_[index] = StepState::kUnderWay;
  ++under_way_;
  group_->engine->Send(
      group_->peers[step.peer], envelope, bytes,
      [self = Self(), index, size = bytes.size()](const absl::Status& status) {
        self->OnSent(index, size, status);
      },
      // Sends of their own may be waited for before their receives are posted; a collective's not.
      {.in_place = !point_to_point()});
  return false;
}

bool Operation::BeginRecv(uint32_t index) {
  const Step& step = call_->program->steps[index];
  absl::Span<std::byte> bytes;
  if (EncodedBlock(step.dst) != nullptr) {
    Scratch& code = scratch_[step.dst.block];
    bytes = {code.memory.data.get(), static_cast<size_t>(DueBytes(step.dst))};
  } else {
    const Memory destination = Locate(step.dst);
    bytes = {destination.data, static_cast<size_t>(destination.elements) * SizeOf(call_->dtype)};
  }
  const Envelope envelope{{group_->channel, call_->first_message_id + step.message},
                          call_->fingerprint};
  if (bytes.empty() && step.dst.block != plan::kNoBlock && !point_to_point()) {
    if (IsOfEmptyBlock(step.dst)) AwaitNothing(step.peer, envelope);
    return true;
  }
  state_[index] = StepState::kUnderWay;
  ++under_way_;
  group_->engine->Recv(
      group_->peers[step.peer], envelope, bytes,
      [self = Self(), index](absl::StatusOr<size_t> size) { self->OnReceived(index, size); });
  return false;
}

bool Operation::BeginReduce(uint32_t index) {
  const Step& step = call_->program->steps[index];
  const Memory dst = Locate(step.dst);
  absl::InlinedVector<const std::byte*, 8> operands;
  for (const plan::Chunk& chunk : step.operands) {
    const Memory operand = Locate(chunk);
    if (operand.elements != dst.elements) {
      Fail(absl::InternalError(absl::StrCat("step ", index, " of the program (",
                                            call_->program->name, ") reduces ", operand.elements,
                                            " elements into ", dst.elements)));
      return false;
    }
    operands.push_back(operand.data);
  }
  const int64_t touched =
      static_cast<int64_t>(operands.size() * SizeOf(call_->dtype)) * dst.elements;
  const int mean_of = call_->program->sums_once && call_->op == ReduceOp::kAvg
                          ? static_cast<int>(operands.size())
                          : 1;
  return Compute(
      index, touched,
      [op = call_->op, dtype = call_->dtype, dst, operands = std::move(operands), mean_of] {
        Reduce(op, dtype, dst.data, operands, dst.elements, mean_of);
        return absl::OkStatus();
      });
}

bool Operation::BeginCopy(uint32_t index) {
  const Step& step = call_->program->steps[index];
  const Memory dst = Locate(step.dst), src = Locate(step.src);
  if (dst.elements != src.elements) {
    Fail(absl::InternalError(absl::StrCat("step ", index, " of the program (", call_->program->name,
                                          ") copies ", src.elements, " elements to ",
                                          dst.elements)));
    return false;
  }
  // The caller may share memory between an input and an output block.
  if (dst.data == src.data) return true;
  const int64_t bytes = dst.elements * static_cast<int64_t>(SizeOf(call_->dtype));
  return Compute(index, 2 * bytes, [dst, src, bytes] {
    std::memmove(dst.data, src.data, static_cast<size_t>(bytes));
    return absl::OkStatus();
  });
}

bool Operation::BeginEncode(uint32_t index) {
  const Step& step = call_->program->steps[index];
  Scratch& code = scratch_[step.dst.block];
  const int64_t elements = code.range.elements;
  if (elements == 0) return true;
  const codec::SignParams params = Params(step.dst.block);
  return Compute(
      index, 2 * elements * static_cast<int64_t>(sizeof(float)), [this, &code, params, elements] {
        const SignCall& sign = *call_->sign;
        codec::EncodeOptions options;
        options.weight = sign.weight;
        if (!sign.residual.empty()) {
          const size_t begin = static_cast<size_t>(code.range.begin);
          options.residual = {reinterpret_cast<float*>(residual_.data.get()) + begin,
                              static_cast<size_t>(elements)};
          const auto now = sign.residual.subspan(begin, static_cast<size_t>(elements));
          std::copy(now.begin(), now.end(), options.residual.begin());
          options.residual_decay = sign.residual_decay;
        }
        absl::StatusOr<size_t> bytes = codec::Encode(pieces(), code.range, params, options,
                                                     {code.memory.data.get(), code.memory.bytes});
        if (!bytes.ok()) return std::move(bytes).status();
        code.code_bytes = *bytes;
        return absl::OkStatus();
      });
}

bool Operation::BeginDecodeAdd(uint32_t index) {
  const Step& step = call_->program->steps[index];
  const int64_t elements = scratch_[step.dst.block].range.elements;
  const Scratch& code = scratch_[step.src.block];
  if (elements == 0) return true;
  // Named here, since the engine must not be asked from the compute thread.
  const std::string origin =
      code.from_rank < 0
          ? "this rank's own code"
          : absl::StrCat("the code from ",
                         group_->engine->DescribePeer(group_->peers[code.from_rank]));
  return Compute(
      index, elements * static_cast<int64_t>(sizeof(float)),
      [this, sum = step.dst.block, &code, origin] {
        absl::Status status = AccumulatorOf(sum).Add({code.memory.data.get(), code.code_bytes});
        if (status.ok()) return status;
        return absl::Status(status.code(), absl::StrCat(origin, ": ", status.message()));
      });
}

bool Operation::BeginDecodeFinish(uint32_t index) {
  const Step& step = call_->program->steps[index];
  const Memory mean = Locate(step.dst);
  if (mean.elements == 0) return true;
  return Compute(index, 2 * mean.elements * static_cast<int64_t>(sizeof(float)),
                 [this, sum = step.src.block, mean] {
                   AccumulatorOf(sum).Finish(absl::MakeSpan(reinterpret_cast<float*>(mean.data),
                                                            static_cast<size_t>(mean.elements)));
                   return absl::OkStatus();
                 });
}

bool Operation::BeginRecode(uint32_t index) {
  const Step& step = call_->program->steps[index];
  Scratch& code = scratch_[step.dst.block];
  const codec::Range range = scratch_[step.src.block].range;
  if (range.elements == 0) return true;
  const codec::SignParams params = Params(step.dst.block);
  extra_.push_back(group_->scratch.Take(static_cast<size_t>(range.elements) * sizeof(float)));
  float* mean = reinterpret_cast<float*>(extra_.back().data.get());
  return Compute(
      index, 2 * range.elements * static_cast<int64_t>(sizeof(float)),
      [this, sum_block = step.src.block, &code, range, params, mean] {
        codec::SignAccumulator& sum = AccumulatorOf(sum_block);
        sum.Finish(absl::MakeSpan(mean, static_cast<size_t>(range.elements)));
        // The mean in the source's rows. `mean` is only the range; each piece is made to begin
        // where its element 0 would be, and the codec reads within the range only.
        std::vector<codec::Piece> means(pieces().begin(), pieces().end());
        int64_t begin = 0;
        for (codec::Piece& piece : means) {
          piece.anchor = nullptr;
          piece.dtype = DType::kF32;
          piece.current = reinterpret_cast<const void*>(
              reinterpret_cast<uintptr_t>(mean) +
              static_cast<uintptr_t>((begin - range.begin) * static_cast<int64_t>(sizeof(float))));
          begin += piece.elements;
        }
        codec::EncodeOptions options;
        options.weight = sum.total_weight();
        absl::StatusOr<size_t> bytes = codec::Encode(means, range, params, options,
                                                     {code.memory.data.get(), code.memory.bytes});
        if (!bytes.ok()) {
          return absl::Status(bytes.status().code(),
                              absl::StrCat("the mean: ", bytes.status().message()));
        }
        code.code_bytes = *bytes;
        return absl::OkStatus();
      });
}

bool Operation::BeginFirst() {
  if (!scales_contributions_) return true;
  std::vector<std::pair<Block, const std::byte*>> work;  // destination, source
  int64_t touched = 0;
  const auto add = [&](const std::vector<Block>& to, const std::vector<Block>& from) {
    for (size_t i = 0; i < to.size(); ++i) {
      work.emplace_back(to[i], from[i].data);
      touched += 2 * to[i].elements * static_cast<int64_t>(SizeOf(call_->dtype));
    }
  };
  if (input_.empty()) {
    add(output_, call_->output);
  } else {
    add(input_, call_->input);
  }
  return Compute(kFirstOrLast, touched,
                 [work = std::move(work), dtype = call_->dtype, world = call_->program->world] {
                   for (const auto& [to, from] : work) {
                     ScaleContribution(dtype, world, to.data, from, to.elements);
                   }
                   return absl::OkStatus();
                 });
}

bool Operation::BeginLast() {
  const int world = call_->program->world;
  const bool average = call_->op == ReduceOp::kAvg && !call_->program->sums_once &&
                       AverageFinishesSum(call_->dtype, world);
  const bool residual = residual_.bytes > 0;
  if (!average && !residual) return true;
  int64_t touched = static_cast<int64_t>(residual_.bytes) * 2;
  std::vector<Block> sums;
  for (size_t i = 0; average && i < output_.size(); ++i) {
    if (!output_written_[i]) continue;
    sums.push_back(output_[i]);
    touched += output_[i].elements * static_cast<int64_t>(SizeOf(call_->dtype));
  }
  return Compute(kFirstOrLast, touched, [this, sums = std::move(sums), world] {
    for (const Block& sum : sums) FinishAverage(call_->dtype, world, sum.data, sum.elements);
    if (residual_.bytes > 0) {
      const absl::Span<float> residual = call_->sign->residual;
      std::memcpy(residual.data(), residual_.data.get(), residual.size() * sizeof(float));
    }
    return absl::OkStatus();
  });
}

}  // namespace geomesh::exec
