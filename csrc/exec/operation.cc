// How an operation begins, goes on and ends; what single steps do is in operation_steps.cc.
#include "exec/operation.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"

namespace geomesh::exec {
namespace {

using plan::Buffer;
using plan::Program;
using plan::ScratchKind;
using plan::Step;
using plan::StepKind;

bool Touches(const plan::Chunk& chunk) {
  return chunk.buffer != Buffer::kScratch && chunk.block != plan::kNoBlock;
}

bool HasDestination(StepKind kind) { return kind != StepKind::kSend; }

int64_t TotalElements(absl::Span<const codec::Piece> pieces) {
  int64_t total = 0;
  for (const codec::Piece& piece : pieces) total += piece.elements;
  return total;
}

}  // namespace

uint64_t Mix(uint64_t seed, uint64_t stream) {
  // SplitMix64 of the stream, and of its exclusive or with the seed: a bijection of the seed.
  const auto split = [](uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  };
  return split(seed ^ split(stream));
}

// ---- before the start ----

absl::StatusOr<std::shared_ptr<Operation>> Operation::Create(GroupContext* group, uint64_t number,
                                                             std::shared_ptr<Call> call) {
  std::shared_ptr<Operation> operation(new Operation(group, number, std::move(call)));
  GM_RETURN_IF_ERROR(operation->Check());
  operation->input_ = operation->call_->input;
  operation->output_ = operation->call_->output;
  operation->FindExtents();
  operation->CountDueBytes();
  return operation;
}

absl::Status Operation::Check() {
  const auto error = [this](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(Name(), ": ", what...));
  };
  if (call_->program == nullptr) return error("no program");
  const Program& program = *call_->program;
  if (program.world != static_cast<int>(group_->peers.size()) || program.rank != group_->rank) {
    return error("the program is for rank ", program.rank, " of ", program.world,
                 ", the group has rank ", group_->rank, " of ", group_->peers.size());
  }
  if (call_->input.size() != program.input_blocks ||
      call_->output.size() != program.output_blocks) {
    return error(call_->input.size(), " input and ", call_->output.size(),
                 " output blocks, the program (", program.name, ") has ", program.input_blocks,
                 " and ", program.output_blocks);
  }
  for (const auto* blocks : {&call_->input, &call_->output}) {
    for (const Block& block : *blocks) {
      if (block.elements < 0) return error("a block of ", block.elements, " elements");
    }
  }
  if (absl::Status status = Supported(call_->op, call_->dtype); !status.ok()) {
    return error(status.message());
  }
  const bool coded = std::any_of(
      program.scratch.begin(), program.scratch.end(),
      [](const plan::ScratchBlock& block) { return block.kind != ScratchKind::kPlain; });
  if (!coded) return absl::OkStatus();

  if (call_->sign == nullptr) return error("the program encodes, but the call has no sign part");
  if (call_->dtype != DType::kF32)
    return error("the mean is of float32, not ", geomesh::Name(call_->dtype));
  if (program.granule % codec::kBlockElements != 0) {
    return error("slices of ", program.granule, " elements cut through the codec's blocks");
  }
  const int64_t total = TotalElements(pieces());
  for (const auto* blocks : {&call_->input, &call_->output}) {
    for (const Block& block : *blocks) {
      if (block.elements != total) {
        return error("a block of ", block.elements, " elements for pieces of ", total);
      }
    }
  }
  if (!call_->sign->residual.empty() &&
      static_cast<int64_t>(call_->sign->residual.size()) != total) {
    return error("a residual of ", call_->sign->residual.size(), " elements for pieces of ", total);
  }
  return absl::OkStatus();
}

void Operation::FindExtents() {
  const Program& program = *call_->program;
  output_written_.assign(program.output_blocks, false);
  for (const Step& step : program.steps) {
    if (HasDestination(step.kind) && step.dst.buffer == Buffer::kOutput && Touches(step.dst)) {
      output_written_[step.dst.block] = true;
    }
  }
  const auto add = [this](const void* data, int64_t bytes, bool written) {
    if (bytes <= 0 || data == nullptr) return;
    const auto* begin = static_cast<const std::byte*>(data);
    extents_.push_back({begin, begin + bytes, written});
  };
  const int64_t size = static_cast<int64_t>(SizeOf(call_->dtype));
  for (const Block& block : input_) add(block.data, block.elements * size, false);
  for (size_t i = 0; i < output_.size(); ++i) {
    add(output_[i].data, output_[i].elements * size, output_written_[i]);
  }
  if (call_->sign == nullptr) return;
  for (const codec::Piece& piece : pieces()) {
    add(piece.anchor, piece.elements * static_cast<int64_t>(sizeof(float)), false);
    add(piece.current, piece.elements * static_cast<int64_t>(SizeOf(piece.dtype)), false);
  }
  add(call_->sign->residual.data(),
      static_cast<int64_t>(call_->sign->residual.size() * sizeof(float)), true);
}

bool Operation::ConflictsWith(const Operation& other) const {
  for (const Extent& a : extents_) {
    for (const Extent& b : other.extents_) {
      if ((a.written || b.written) && a.begin < b.end && b.begin < a.end) return true;
    }
  }
  return false;
}

const plan::ScratchBlock* Operation::EncodedBlock(const plan::Chunk& chunk) const {
  if (chunk.buffer != Buffer::kScratch) return nullptr;
  const plan::ScratchBlock& block = call_->program->scratch[chunk.block];
  return block.kind == ScratchKind::kEncoded ? &block : nullptr;
}

namespace {

// Elements of a scratch block: those of the slice that it is like.
plan::SliceRange RangeLike(const Program& program, const Call& call, const plan::Chunk& like) {
  const Block& block =
      like.buffer == Buffer::kInput ? call.input[like.block] : call.output[like.block];
  return plan::SliceBounds(block.elements, like.slice, like.slices, program.granule);
}

}  // namespace

int64_t Operation::DueBytes(const plan::Chunk& chunk) const {
  if (chunk.block == plan::kNoBlock) return 0;
  const Program& program = *call_->program;
  if (chunk.buffer != Buffer::kScratch) {
    const plan::SliceRange range = RangeLike(program, *call_, chunk);
    return (range.end - range.begin) * static_cast<int64_t>(SizeOf(call_->dtype));
  }
  const plan::ScratchBlock& block = program.scratch[chunk.block];
  const plan::SliceRange like = RangeLike(program, *call_, block.like);
  if (block.kind == ScratchKind::kEncoded) {
    if (like.begin == like.end) return 0;
    return codec::MaxEncodedBytes(pieces(), {like.begin, like.end - like.begin});
  }
  const plan::SliceRange range =
      plan::SliceBounds(like.end - like.begin, chunk.slice, chunk.slices, program.granule);
  return (range.end - range.begin) * static_cast<int64_t>(SizeOf(call_->dtype));
}

void Operation::CountDueBytes() {
  for (const Step& step : call_->program->steps) {
    if (step.kind == StepKind::kSend) due_sent_bytes_ += DueBytes(step.src);
    if (step.kind == StepKind::kRecv) due_received_bytes_ += DueBytes(step.dst);
  }
}

// ---- start ----

void Operation::TakeScratch() {
  const Program& program = *call_->program;
  scratch_.resize(program.scratch.size());
  for (size_t i = 0; i < scratch_.size(); ++i) {
    const plan::ScratchBlock& block = program.scratch[i];
    const plan::SliceRange range = RangeLike(program, *call_, block.like);
    Scratch& scratch = scratch_[i];
    scratch.elements = range.end - range.begin;
    scratch.range = {range.begin, scratch.elements};
    if (scratch.elements == 0) continue;
    int64_t bytes = 0;
    switch (block.kind) {
      case ScratchKind::kPlain:
        bytes = scratch.elements * static_cast<int64_t>(SizeOf(call_->dtype));
        break;
      case ScratchKind::kEncoded:
        bytes = codec::MaxEncodedBytes(pieces(), scratch.range);
        break;
      case ScratchKind::kAccumulator:
        bytes = codec::SignAccumulator::SumElements(scratch.range) *
                static_cast<int64_t>(sizeof(float));
        break;
    }
    scratch.memory = group_->scratch.Take(static_cast<size_t>(bytes));
  }
  if (call_->sign != nullptr && !call_->sign->residual.empty()) {
    residual_ = group_->scratch.Take(call_->sign->residual.size() * sizeof(float));
  }
}

// AVG of half types, where partial sums are rounded on their way: contributions are scaled before
// they are read. Those in blocks that the program does not write belong to the caller and are
// scaled into memory of our own.
void Operation::PrepareAverage() {
  const Program& program = *call_->program;
  scales_contributions_ = call_->op == ReduceOp::kAvg && !program.sums_once &&
                          AverageScalesContributions(call_->dtype, program.world);
  if (!scales_contributions_) return;
  const auto move_out = [this](Block& block) {
    const size_t bytes = static_cast<size_t>(block.elements) * SizeOf(call_->dtype);
    if (bytes == 0) return;
    extra_.push_back(group_->scratch.Take(bytes));
    block.data = extra_.back().data.get();
  };
  for (Block& block : input_) move_out(block);
  if (!input_.empty()) return;
  for (size_t i = 0; i < output_.size(); ++i) {
    if (!output_written_[i]) move_out(output_[i]);
  }
}

void Operation::Start() {
  started_ = true;
  start_time_ = absl::Now();
  TakeScratch();
  PrepareAverage();

  const std::vector<Step>& steps = call_->program->steps;
  const uint32_t count = static_cast<uint32_t>(steps.size());
  steps_left_ = count;
  state_.assign(count, StepState::kWaiting);
  waits_.assign(count, 0);
  next_begin_.assign(count + 1, 0);
  for (const Step& step : steps) {
    for (const uint32_t earlier : step.after) ++next_begin_[earlier + 1];
  }
  for (uint32_t i = 0; i < count; ++i) next_begin_[i + 1] += next_begin_[i];
  next_.resize(next_begin_[count]);
  std::vector<uint32_t> filled(next_begin_.begin(), next_begin_.end() - 1);
  for (uint32_t i = 0; i < count; ++i) {
    waits_[i] = static_cast<uint32_t>(steps[i].after.size());
    for (const uint32_t earlier : steps[i].after) next_[filled[earlier]++] = i;
    const auto sources = plan::SourcesOf(steps[i]);
    if (scales_contributions_ && (std::any_of(sources.begin(), sources.end(), Touches) ||
                                  (HasDestination(steps[i].kind) && Touches(steps[i].dst)))) {
      ++waits_[i];
      held_.push_back(i);
    }
  }
  for (uint32_t i = 0; i < count; ++i) {
    if (waits_[i] == 0) Release(i);
  }
  if (BeginFirst()) {
    first_done_ = true;
    for (const uint32_t step : held_) {
      if (--waits_[step] == 0) Release(step);
    }
  }
  Drain();
}

// ---- going on ----

void Operation::Release(uint32_t step) {
  (call_->program->steps[step].kind == StepKind::kRecv ? ready_recv_ : ready_).push_back(step);
}

void Operation::Drain() {
  while (!stopped_.load(std::memory_order_relaxed)) {
    uint32_t step;
    // Receives first: a message then finds its final buffer.
    if (ready_recv_head_ < ready_recv_.size()) {
      step = ready_recv_[ready_recv_head_++];
    } else if (ready_head_ < ready_.size()) {
      step = ready_[ready_head_++];
    } else {
      break;
    }
    if (Begin(step)) Complete(step);
  }
  if (stopped_.load(std::memory_order_relaxed)) return EndIfIdle();
  if (steps_left_ > 0 || under_way_ > 0 || !first_done_) return;
  if (!last_begun_) {
    last_begun_ = true;
    if (!BeginLast()) return;
  }
  End(absl::OkStatus());
}

void Operation::Complete(uint32_t step) {
  state_[step] = StepState::kDone;
  --steps_left_;
  for (uint32_t i = next_begin_[step]; i < next_begin_[step + 1]; ++i) {
    if (--waits_[next_[i]] == 0) Release(next_[i]);
  }
}

void Operation::OnSent(uint32_t step, size_t bytes, const absl::Status& status) {
  --under_way_;
  if (stopped_.load(std::memory_order_relaxed)) return EndIfIdle();
  if (!status.ok()) return Fail(MessageError(call_->program->steps[step], status));
  sent_bytes_ += bytes;
  Complete(step);
  Drain();
}

void Operation::OnReceived(uint32_t step_index, const absl::StatusOr<size_t>& bytes) {
  --under_way_;
  if (stopped_.load(std::memory_order_relaxed)) return EndIfIdle();
  const Step& step = call_->program->steps[step_index];
  if (!bytes.ok()) return Fail(MessageError(step, bytes.status()));
  received_bytes_ += *bytes;
  if (EncodedBlock(step.dst) != nullptr) {
    scratch_[step.dst.block].code_bytes = *bytes;
    scratch_[step.dst.block].from_rank = step.peer;
  } else if (static_cast<int64_t>(*bytes) != DueBytes(step.dst)) {
    return Fail(
        MessageError(step, absl::InvalidArgumentError(absl::StrCat(
                               "a message of ", *bytes, " bytes where ", DueBytes(step.dst),
                               " are due: the two ranks call with different sizes or dtypes"))));
  }
  Complete(step_index);
  Drain();
}

void Operation::OnComputed(uint32_t step, const absl::Status& status) {
  --under_way_;
  if (stopped_.load(std::memory_order_relaxed)) return EndIfIdle();
  if (!status.ok()) return Fail(status);
  if (step < state_.size()) {
    Complete(step);
  } else if (!first_done_) {
    first_done_ = true;
    for (const uint32_t held : held_) {
      if (--waits_[held] == 0) Release(held);
    }
  }
  Drain();
}

// ---- the end ----

void Operation::Fail(absl::Status cause) {
  if (!stopped_.load(std::memory_order_relaxed)) group_->OnFailed(*this, std::move(cause));
}

void Operation::Stop(absl::Status status) {
  if (stopped_.load(std::memory_order_relaxed)) return;
  end_status_ = std::move(status);
  stopped_.store(true, std::memory_order_relaxed);
}

void Operation::EndIfIdle() {
  if (stopped_.load(std::memory_order_relaxed) && under_way_ == 0) End(end_status_);
}

void Operation::End(const absl::Status& status) {
  if (ended_) return;
  ended_ = true;
  for (Scratch& scratch : scratch_) group_->scratch.Give(std::move(scratch.memory));
  for (ScratchMemory& memory : extra_) group_->scratch.Give(std::move(memory));
  group_->scratch.Give(std::move(residual_));
  group_->OnEnded(*this, status);
}

Outcome Operation::outcome() const {
  Outcome outcome{.bytes_sent = sent_bytes_, .bytes_received = received_bytes_};
  for (const Step& step : call_->program->steps) {
    if (step.kind != StepKind::kDecodeFinish) continue;
    const auto& accumulator = scratch_[step.src.block].accumulator;
    // Every finished slice holds all contributions, so any of them will do.
    if (accumulator != nullptr) outcome.total_weight = accumulator->total_weight();
  }
  if (const auto& message = call_->point_to_point; message.has_value() && !message->sending) {
    outcome.source = call_->program->steps.empty() ? group_->rank : call_->program->steps[0].peer;
  }
  return outcome;
}

// ---- texts ----

std::string Operation::Name() const {
  return absl::StrCat(call_->operation, ", sequence ", call_->sequence);
}

absl::Status Operation::MessageError(const Step& step, const absl::Status& status) const {
  if (status.code() == absl::StatusCode::kUnavailable) return status;  // says who is lost, and how
  if (status.code() == absl::StatusCode::kFailedPrecondition && point_to_point()) {
    return absl::InvalidArgumentError(
        absl::StrCat(step.kind == StepKind::kRecv ? "receiving from " : "sending to ",
                     group_->engine->DescribePeer(group_->peers[step.peer]),
                     ": the two sides give tensors of different dtypes"));
  }
  return absl::Status(
      status.code(),
      absl::StrCat(step.kind == StepKind::kRecv ? "receiving from " : "sending to ",
                   group_->engine->DescribePeer(group_->peers[step.peer]), ": ", status.message()));
}

std::string Operation::WaitingFor() const {
  const size_t world = group_->peers.size();
  std::vector<int> from(world, 0), to(world, 0);
  bool computing = false;
  for (size_t i = 0; i < state_.size(); ++i) {
    if (state_[i] != StepState::kUnderWay) continue;
    const Step& step = call_->program->steps[i];
    if (step.kind == StepKind::kRecv) {
      ++from[step.peer];
    } else if (step.kind == StepKind::kSend) {
      ++to[step.peer];
    } else {
      computing = true;
    }
  }
  constexpr int kMaxNamed = 16;
  const std::vector<transport::PeerStats> stats = group_->engine->Stats();
  std::string text;
  int named = 0, unnamed = 0;
  for (const bool receiving : {true, false}) {
    const std::vector<int>& messages = receiving ? from : to;
    for (size_t rank = 0; rank < world; ++rank) {
      if (messages[rank] == 0) continue;
      if (++named > kMaxNamed) {
        ++unnamed;
        continue;
      }
      const transport::PeerId peer = group_->peers[rank];
      absl::StrAppend(&text, text.empty() ? "" : "; ",
                      receiving ? "waiting for " : "not yet able to send ", messages[rank],
                      messages[rank] == 1 ? " message" : " messages", receiving ? " from " : " to ",
                      group_->engine->DescribePeer(peer));
      const size_t index = static_cast<size_t>(peer);
      if (index >= stats.size() || static_cast<int>(rank) == group_->rank) continue;
      if (!stats[index].trouble.empty()) {
        absl::StrAppend(&text, ", ", stats[index].trouble);
      } else {
        absl::StrAppendFormat(&text, ", silent for %.1f s",
                              absl::ToDoubleSeconds(stats[index].silent));
      }
    }
    // What is owed to others is of interest only where nothing is missing from them.
    if (!text.empty()) break;
  }
  if (unnamed > 0) absl::StrAppend(&text, "; and for ", unnamed, " more ranks");
  if (text.empty()) return computing || under_way_ > 0 ? "computing" : "";
  return text;
}

absl::Status Operation::Explain(const absl::Status& cause, absl::string_view not_begun) const {
  const std::string name = absl::StrCat(Name(), ": ");
  // What ends the group through this very operation (a wait's own limit) has its name already.
  std::string text =
      absl::StrCat(absl::StartsWith(cause.message(), name) ? "" : name, cause.message(), "; ",
                   sent_bytes_, " of ", due_sent_bytes_, " bytes sent, ", received_bytes_, " of ",
                   due_received_bytes_, " received");
  if (!started_) {
    absl::StrAppend(&text, "; not begun", not_begun);
  } else if (const std::string waiting = WaitingFor(); !waiting.empty()) {
    absl::StrAppend(&text, "; ", waiting);
  }
  return absl::Status(cause.code(), text);
}

}  // namespace geomesh::exec
