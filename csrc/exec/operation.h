// One call in progress: a program's steps, what each waits for, and the memory they work on. Knows
// its own steps and messages; the executor above knows the group and the order of operations.
// Engine thread only, but for the arithmetic it hands to the compute thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "codec/sign.h"
#include "exec/compute.h"
#include "exec/executor.h"
#include "exec/scratch.h"
#include "plan/program.h"
#include "transport/engine.h"

namespace geomesh::exec {

// Work on at most so many bytes runs on the engine thread: some 10 us, less than handing it over.
inline constexpr int64_t kInlineBytes = 64 * 1024;

// The second rotation of a sign all-reduce (kRecode).
inline constexpr uint64_t kRecodeStream = uint64_t{1} << 63;
// A seed of its own for each stream of a round. Equal on all ranks (docs/wire-format.md).
uint64_t Mix(uint64_t seed, uint64_t stream);

class Operation;

// The group as its operations see it. Outlives them.
struct GroupContext {
  transport::Engine* engine = nullptr;
  uint64_t channel = 0;
  int rank = 0;
  std::vector<transport::PeerId> peers;
  ComputeThread* compute = nullptr;
  ScratchPool scratch;

  virtual ~GroupContext() = default;
  // Everything is done or undone, and nothing touches the call's memory any more.
  virtual void OnEnded(Operation& operation, const absl::Status& status) = 0;
  // A message of `peer` does not fit the operation, which may have ended.
  virtual void OnStray(transport::PeerId peer, uint64_t sequence) = 0;
  // The operation can't go on. The group stops it (and everything else) with Stop.
  virtual void OnFailed(Operation& operation, absl::Status cause) = 0;
};

class Operation : public std::enable_shared_from_this<Operation> {
 public:
  // Checks the call against its program. Takes no memory yet.
  static absl::StatusOr<std::shared_ptr<Operation>> Create(GroupContext* group, uint64_t number,
                                                           std::shared_ptr<Call> call);

  uint64_t number() const { return number_; }  // in issue order
  bool started() const { return started_; }
  bool point_to_point() const { return call_->point_to_point.has_value(); }
  bool after_all() const { return call_->after_all; }
  Call& call() { return *call_; }
  Outcome outcome() const;

  // True where both can't run at the same time.
  bool ConflictsWith(const Operation& other) const;

  void Start();
  // Begins no further step. `status` is what the call will end with.
  void Stop(absl::Status status);
  // After Stop: ends the operation if nothing is under way.
  void EndIfIdle();

  // `cause` with the operation's name and number, bytes done of bytes due, and what it waits for;
  // where it has not begun, with `not_begun`.
  absl::Status Explain(const absl::Status& cause, absl::string_view not_begun) const;
  std::string Name() const;  // "all_reduce(float32, 8), sequence 3"

 private:
  enum class StepState : uint8_t { kWaiting, kUnderWay, kDone };
  struct Memory {
    std::byte* data = nullptr;
    int64_t elements = 0;
  };
  struct Scratch {
    ScratchMemory memory;
    int64_t elements = 0;
    codec::Range range;     // in the encoded source, for codes and accumulators
    size_t code_bytes = 0;  // of a code: set by what makes or receives it
    int from_rank = -1;     // of a code: who sent it
    std::unique_ptr<codec::SignAccumulator> accumulator;
  };
  struct Extent {
    const std::byte* begin = nullptr;
    const std::byte* end = nullptr;
    bool written = false;
  };

  Operation(GroupContext* group, uint64_t number, std::shared_ptr<Call> call)
      : group_(group), number_(number), call_(std::move(call)) {}

  absl::Status Check();
  void FindExtents();
  void CountDueBytes();
  void TakeScratch();
  void PrepareAverage();

  Memory Locate(const plan::Chunk& chunk) const;
  const plan::ScratchBlock* EncodedBlock(const plan::Chunk& chunk) const;
  int64_t DueBytes(const plan::Chunk& chunk) const;
  bool IsOfEmptyBlock(const plan::Chunk& chunk) const;
  void AwaitNothing(int rank, const transport::Envelope& envelope);
  absl::Span<const codec::Piece> pieces() const { return call_->sign->pieces; }
  codec::SignParams Params(uint32_t scratch_block) const;
  // Made, and its sum zeroed, at the first use: in the task that uses it.
  codec::SignAccumulator& AccumulatorOf(uint32_t scratch_block);

  // Begin steps until all that is left waits for something.
  void Drain();
  // Each returns true if the step is done already.
  bool Begin(uint32_t step);
  bool BeginSend(uint32_t step);
  bool BeginRecv(uint32_t step);
  bool BeginReduce(uint32_t step);
  bool BeginCopy(uint32_t step);
  bool BeginEncode(uint32_t step);
  bool BeginDecodeAdd(uint32_t step);
  bool BeginDecodeFinish(uint32_t step);
  bool BeginRecode(uint32_t step);
  bool BeginFirst();  // scales contributions (AVG)
  bool BeginLast();   // finishes AVG, writes the residual back
  template <typename Work>
  bool Compute(uint32_t step, int64_t touched_bytes, Work work);

  void OnSent(uint32_t step, size_t bytes, const absl::Status& status);
  void OnReceived(uint32_t step, const absl::StatusOr<size_t>& bytes);
  void OnComputed(uint32_t step, const absl::Status& status);
  void Complete(uint32_t step);
  void Release(uint32_t step);
  void Fail(absl::Status cause);
  absl::Status MessageError(const plan::Step& step, const absl::Status& status) const;
  void End(const absl::Status& status);
  std::string WaitingFor() const;
  std::shared_ptr<Operation> Self() { return shared_from_this(); }

  GroupContext* const group_;
  const uint64_t number_;
  const std::shared_ptr<Call> call_;

  bool started_ = false;
  bool ended_ = false;
  std::atomic<bool> stopped_{false};  // read by tasks that have not begun
  absl::Status end_status_;           // valid once stopped_
  absl::Time start_time_ = absl::InfinitePast();
  bool first_done_ = false;
  bool last_begun_ = false;

  std::vector<Extent> extents_;
  std::vector<Block> input_, output_;  // where contributions are read: the caller's, or scaled
  std::vector<bool> output_written_;
  bool scales_contributions_ = false;
  std::vector<Scratch> scratch_;
  std::vector<ScratchMemory> extra_;  // scaled contributions, means on their way to kRecode
  ScratchMemory residual_;            // the next residual until the operation has succeeded

  std::vector<StepState> state_;
  std::vector<uint32_t> waits_;               // of each step: for how many it still waits
  std::vector<uint32_t> next_begin_, next_;   // steps that wait for step i: next_[next_begin_[i]..]
  std::vector<uint32_t> held_;                // steps that wait for BeginFirst
  std::vector<uint32_t> ready_recv_, ready_;  // first in, first out
  size_t ready_recv_head_ = 0, ready_head_ = 0;
  uint32_t steps_left_ = 0;
  int under_way_ = 0;  // sends, receives and tasks that still use memory

  uint64_t sent_bytes_ = 0, received_bytes_ = 0;
  uint64_t due_sent_bytes_ = 0, due_received_bytes_ = 0;
};

}  // namespace geomesh::exec
