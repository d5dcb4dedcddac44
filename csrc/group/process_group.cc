#include "group/process_group.h"

#include <algorithm>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "group/operation.h"
#include "plan/cost_model.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

namespace geomesh::group {

ProcessGroupGeoMesh::Operation ProcessGroupGeoMesh::Begin(const char* name, const char* title,
                                                          c10d::OpType type, std::string detail) {
  Operation operation;
  operation.work.rank = rank_;
  operation.work.type = type;
  operation.work.profiling_title = title;
  operation.work.operation = absl::StrCat(name, "(", detail, ")");
  operation.call.dtype = DType::kU8;  // plain bytes, where nothing is computed
  operation.staging = std::make_shared<Staging>(operation.work.operation);
  operation.fingerprint.Add(static_cast<uint64_t>(type));
  return operation;
}

namespace {

// Returns when the inputs have come from the GPU. Also OK if the group has failed meanwhile, which
// the executor will tell. Sleeps between looks: waiting for an event would keep a core busy.
absl::Status AwaitReads(const Staging& staging, const exec::Executor& executor,
                        const exec::Call& call) {
  absl::Duration pause = absl::Microseconds(20);
  try {
    while (!staging.ReadsDone() && executor.health().ok()) {
      if (absl::Now() > call.deadline) {
        return absl::DeadlineExceededError(absl::StrCat(
            call.operation, ", operation ", call.sequence,
            " of its group: the GPU did not come to it within the timeout. Something that was put "
            "on the stream before it hangs, or takes longer"));
      }
      absl::SleepFor(pause);
      pause = std::min(2 * pause, absl::Milliseconds(1));
    }
  } catch (const std::exception& e) {
    return absl::InternalError(
        absl::StrCat(call.operation, ": copying from the GPU failed: ", e.what()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ProcessGroupGeoMesh::Usable() const {
  if (shut_) return absl::FailedPreconditionError("geomesh: the group was destroyed");
  if (executor_ == nullptr) {
    return absl::FailedPreconditionError(
        "geomesh: the group was made to be configured: call reconfigure() with the handles of its "
        "ranks first");
  }
  if (suspended_) {
    return absl::FailedPreconditionError("geomesh: the group is suspended: call resume() first");
  }
  return executor_->health();
}

std::chrono::milliseconds ProcessGroupGeoMesh::Lengthened(std::chrono::milliseconds timeout,
                                                          std::shared_ptr<void>* until_done) {
  std::vector<std::shared_ptr<EphemeralTimeout>> ending;
  for (const std::shared_ptr<EphemeralTimeout>& one : ephemeral_timeouts_) {
    timeout += one->extension;
    if (!std::exchange(one->attached, true)) ending.push_back(one);
  }
  if (!ending.empty()) {
    *until_done = std::shared_ptr<void>(nullptr, [this, ending](void*) {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& one : ending) ephemeral_timeouts_.remove(one);
    });
  }
  return timeout;
}

// What an operation holds until it has ended.
struct ProcessGroupGeoMesh::Ending {
  std::shared_ptr<Pending> pending;
  std::shared_ptr<Hooks> hooks;
  c10::intrusive_ptr<WorkGeoMesh> work;
  std::shared_ptr<Staging> staging;
  std::function<void()> after;
  std::shared_ptr<void> keep, until_done;

  // On the completion thread: what is somebody else's code, and letting go of what was held.
  static void RunLast(std::shared_ptr<Ending> ending) {
    const Pending::Foreign foreign(ending->pending);
    WhilePythonLives([&ending] {
      ending->work->CompleteFuture();
      if (ending->work->isSuccess()) ending->hooks->RunCompletion(*ending->work);
    });
    // Tensors that Python made may need its lock to go.
    if (!WhilePythonLives([&ending] { ending.reset(); })) {
      new std::shared_ptr<Ending>(std::move(ending));
    }
  }
};

ProcessGroupGeoMesh::Issued ProcessGroupGeoMesh::Issue(Operation& operation,
                                                       std::chrono::milliseconds timeout) {
  const std::string& name = operation.work.operation;
  if (const absl::Status usable = Usable(); !usable.ok()) {
    Throw(absl::Status(usable.code(), absl::StrCat(name, ": refused: ", usable.message())));
  }
  if (timeout == c10d::kUnsetTimeout) timeout = timeout_;
  std::shared_ptr<void> until_done;
  timeout = Lengthened(timeout, &until_done);

  Issued issued;
  issued.deadline = absl::Now() + absl::FromChrono(timeout);
  operation.work.timeout = timeout;
  operation.work.expire =
      [executor = std::weak_ptr<exec::Executor>(executor_)](const absl::Status& reason) {
        if (auto alive = executor.lock()) alive->Abort(reason);
      };
  for (const c10::Stream& stream : operation.staging->streams()) {
    operation.work.devices.push_back(stream.device());
  }
  operation.work.process = process_;
  issued.work = c10::make_intrusive<WorkGeoMesh>(std::move(operation.work));
  if (coalesced_.has_value()) coalesced_->push_back(issued.work);

  // Runs on the engine thread: hands over to the completion thread, which may wait for Python's
  // lock.
  auto ending = std::make_shared<Ending>(Ending{pending_, hooks_, issued.work, operation.staging,
                                                std::move(operation.after),
                                                std::move(operation.keep), std::move(until_done)});
  pending_->Begin();
  // Waiters may be let go at once, and the rest is for later.
  const bool direct = ending->staging->direct() && !ending->after;
  issued.done = [ending = std::move(ending), process = process_.get(), direct](
                    const absl::Status& status, const exec::Outcome& outcome) mutable {
    if (direct) ending->until_done.reset();  // before anybody can call the next operation
    if (direct && status.ok() && ending->work->CompleteHere(outcome)) {
      return process->Later([process, ending = std::move(ending)]() mutable {
        process->completions().LetOthersPass();
        Ending::RunLast(std::move(ending));
      });
    }
    process->completions().Post([process, ending = std::move(ending), status, outcome]() mutable {
      absl::Status result = status;
      // The future records its events on these, and callbacks' streams wait for them.
      const std::vector<c10::Stream> streams = ending->staging->streams();
      const c10::MultiStreamGuard guard(streams);
      if (result.ok()) {
        try {
          ending->staging->CopyBack();
          if (ending->after) ending->after();
        } catch (const std::exception& e) {
          result = absl::InternalError(absl::StrCat("copying a result back failed: ", e.what()));
        }
      }
      WhilePythonLives([&ending] {
        ending->staging->Release();
        ending->until_done.reset();
      });
      ending->work->Complete(result, outcome);
      process->completions().LetOthersPass();  // callbacks are somebody else's code
      Ending::RunLast(std::move(ending));
    });
  };
  return issued;
}

namespace {

bool SumsHalves(plan::Collective collective, const exec::Call& call) {
  const bool reduces = collective == plan::Collective::kAllReduce ||
                       collective == plan::Collective::kReduce ||
                       collective == plan::Collective::kReduceScatter;
  const bool rounds = call.op == exec::ReduceOp::kSum || call.op == exec::ReduceOp::kAvg ||
                      call.op == exec::ReduceOp::kProduct;
  return reduces && rounds && (call.dtype == DType::kF16 || call.dtype == DType::kBF16);
}

// Calls of at most so many bytes are begun by the caller itself, which takes no longer than to have
// the engine's thread woken.
constexpr int64_t kIssuedHereBytes = 64 * 1024;

int64_t CallBytes(const exec::Call& call) {
  int64_t elements = 0;
  for (const auto* blocks : {&call.input, &call.output}) {
    for (const exec::Block& block : *blocks) elements += block.elements;
  }
  return elements * static_cast<int64_t>(SizeOf(call.dtype));
}

// Sees to it, when it goes, that the engine runs what was posted to it.
struct Nudge {
  std::shared_ptr<Process> process;
  bool here = false;
  ~Nudge() {
    if (process != nullptr) process->engine().Nudge(here);
  }
};

}  // namespace

c10::intrusive_ptr<WorkGeoMesh> ProcessGroupGeoMesh::Launch(Operation operation,
                                                            std::chrono::milliseconds timeout) {
  TORCH_CHECK(timeout == c10d::kUnsetTimeout || timeout.count() > 0, operation.work.operation,
              ": the timeout must be positive, got ", timeout.count(), " ms");
  CheckOwner();
  Nudge nudge;  // at the end, when mutex_ is free: the engine's callbacks take it
  std::lock_guard<std::mutex> lock(mutex_);
  operation.shape.sums_halves = SumsHalves(operation.shape.collective, operation.call);
  if (estimate_s_.has_value()) return Estimate(std::move(operation));
  if (plans_ == nullptr) Throw(Usable());
  absl::StatusOr<std::shared_ptr<const plan::Program>> program = plans_->Get(operation.shape);
  if (!program.ok()) Throw(program.status());

  exec::Call& call = operation.call;
  call.program = *std::move(program);
  call.operation = operation.work.operation;
  call.fingerprint = operation.fingerprint.value();
  call.sequence = call.point_to_point.has_value() ? sequence_ : sequence_ + 1;
  operation.work.sequence = call.sequence;
  std::shared_ptr<Staging> staging = operation.staging;
  Issued issued = Issue(operation, timeout);
  sequence_ = call.sequence;
  call.deadline = issued.deadline;
  call.done = [done = std::move(issued.done)](const absl::Status& status,
                                              const exec::Outcome& outcome) {
    done(status, outcome);
  };
  if (!staging->any_reads() && reading_ == 0) {
    nudge.process = process_;
    nudge.here = CallBytes(call) <= kIssuedHereBytes;
    executor_->StartQuietly(std::move(call));
    return issued.work;
  }
  // Inputs are on their way from a GPU, which may first have much else to do. The caller goes on;
  // operations start in the order of their calls, as on all ranks.
  ++reading_;
  process_->gpu_reads().Post(
      [this, executor = executor_.get(), staging, call = std::move(call)]() mutable {
        const absl::Status read = AwaitReads(*staging, *executor, call);
        if (!read.ok()) executor->Abort(read);
        staging.reset();
        // `this` and the executor live at least until the call is done.
        std::lock_guard<std::mutex> lock(mutex_);
        --reading_;
        executor->Start(std::move(call));
      });
  return issued.work;
}

ProcessGroupGeoMesh::Issued ProcessGroupGeoMesh::LaunchService(Operation operation,
                                                               std::chrono::milliseconds timeout) {
  CheckOwner();
  std::lock_guard<std::mutex> lock(mutex_);
  operation.work.sequence = sequence_;
  return Issue(operation, timeout);
}

// Engine thread. The works end after this, in the same queue.
void ProcessGroupGeoMesh::OnFailed() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (shut_ && pending_->count() == 0) return;  // shutdown() waits for what is pending only
  pending_->Begin();
  process_->RunLater();  // what has ended before comes first, to its hooks too
  process_->completions().Post([process = process_.get(), pending = pending_, hooks = hooks_] {
    // The errors wait for a quick hook, but not for one that writes seconds long.
    process->completions().LetOthersPass(std::chrono::milliseconds(300));
    const Pending::Foreign foreign(pending);
    hooks->RunAbort();
  });
}

int64_t ProcessGroupGeoMesh::JobRank(int64_t rank) const {
  std::vector<int64_t> members(options_->meeting.members.begin(), options_->meeting.members.end());
  if (members.empty()) {
    members.assign(options_->global_ranks_in_group.begin(), options_->global_ranks_in_group.end());
  }
  const bool known = !options_->enable_reconfigure && rank >= 0 && rank < size_ &&
                     static_cast<int>(members.size()) == size_;
  return known ? members[static_cast<size_t>(rank)] : rank;
}

int ProcessGroupGeoMesh::CheckRoot(const std::string& operation, int64_t root) const {
  TORCH_CHECK(root >= 0 && root < size_, operation, ": invalid root rank: ", root,
              ", the group has ranks 0 to ", size_ - 1);
  return static_cast<int>(root);
}

// ---- coalescing and estimating ----

void ProcessGroupGeoMesh::startCoalescing() {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(
      !coalesced_.has_value(),
      "geomesh: startCoalescing() where the group coalesces already; endCoalescing() first");
  coalesced_.emplace();
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::endCoalescing() {
  std::vector<c10::intrusive_ptr<WorkGeoMesh>> works;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(coalesced_.has_value(), "geomesh: endCoalescing() without startCoalescing()");
    works = *std::move(coalesced_);
    coalesced_.reset();
  }
  Tensors outputs;
  for (const auto& work : works) {
    for (const at::Tensor& output : work->result()) outputs.push_back(output);
  }
  return Join(std::move(works), std::move(outputs));
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::Join(
    std::vector<c10::intrusive_ptr<WorkGeoMesh>> works, Tensors outputs) {
  if (works.empty()) {
    auto done =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    done->markCompleted(c10::IValue(outputs));
    return c10d::Work::create_from_future(done);
  }
  return JoinWorks(std::move(works), std::move(outputs),
                   [hooks = hooks_](uint64_t key, float ms) { hooks->RunCompletion(key, ms); });
}

void ProcessGroupGeoMesh::startTimeEstimate() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const absl::Status usable = Usable(); !usable.ok()) Throw(usable);
  TORCH_CHECK(!estimate_s_.has_value(),
              "geomesh: startTimeEstimate() where the group estimates already");
  estimate_s_ = 0.0;
}

float ProcessGroupGeoMesh::endTimeEstimate() {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(estimate_s_.has_value(), "geomesh: endTimeEstimate() without startTimeEstimate()");
  const double seconds = *estimate_s_;
  estimate_s_.reset();
  return static_cast<float>(1e6 * seconds);
}

c10::intrusive_ptr<WorkGeoMesh> ProcessGroupGeoMesh::Estimate(Operation operation) {
  const plan::Topology& topology = plans_->topology();
  std::vector<plan::Program> programs;
  for (int rank = 0; rank < size_; ++rank) {
    plan::CallShape shape = operation.shape;
    if (operation.call.point_to_point.has_value()) {
      // Only this rank and its peer have a part in it.
      const int peer = shape.root;
      if (rank != rank_) shape.root = rank_, shape.sending = !shape.sending;
      if (rank != rank_ && rank != peer) {
        plan::Program none;
        none.rank = rank;
        none.world = size_;
        programs.push_back(std::move(none));
        continue;
      }
    }
    absl::StatusOr<plan::Program> program = plan::Compile(shape, topology, rank);
    if (!program.ok()) Throw(program.status());
    programs.push_back(*std::move(program));
  }
  plan::CallShape shape = operation.shape;
  for (const auto* blocks : {&operation.call.input, &operation.call.output}) {
    for (const exec::Block& block : *blocks) {
      shape.bytes = std::max<int64_t>(
          shape.bytes, block.elements * static_cast<int64_t>(SizeOf(operation.call.dtype)));
    }
  }
  *estimate_s_ += plan::EstimateTime(shape, topology, programs).total_s;
  auto work = c10::make_intrusive<WorkGeoMesh>(std::move(operation.work));
  work->Complete(absl::OkStatus(), {});
  work->CompleteFuture();
  return work;
}

// ---- timeouts, sequence, hooks ----

void ProcessGroupGeoMesh::setTimeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK(timeout.count() > 0, "geomesh: the timeout must be positive, got ", timeout.count(),
              " ms");
  std::lock_guard<std::mutex> lock(mutex_);
  timeout_ = timeout;
  options_->timeout = timeout;
}

void ProcessGroupGeoMesh::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  TORCH_CHECK(timeout.count() >= 0, "geomesh: a timeout can't be lengthened by ", timeout.count(),
              " ms");
  std::lock_guard<std::mutex> lock(mutex_);
  ephemeral_timeouts_.push_back(std::make_shared<EphemeralTimeout>(EphemeralTimeout{timeout}));
}

uint64_t ProcessGroupGeoMesh::getSequenceNumberForGroup() {
  std::lock_guard<std::mutex> lock(mutex_);
  return sequence_;
}

#if defined(C10D_BACKEND_HAS_HOOKS)
void ProcessGroupGeoMesh::registerAbortHook(int64_t hook_id, c10d::AbortHook hook) {
  hooks_->AddAbort(hook_id, std::move(hook));
}

void ProcessGroupGeoMesh::unregisterAbortHook(int64_t hook_id) { hooks_->RemoveAbort(hook_id); }
#endif

#if defined(GEOMESH_TORCH_HAS_COMPLETION_HOOKS)
void ProcessGroupGeoMesh::registerCompletionHook(int64_t hook_id, c10d::CompletionHook hook) {
  hooks_->AddCompletion(hook_id, std::move(hook));
}

void ProcessGroupGeoMesh::unregisterCompletionHook(int64_t hook_id) {
  hooks_->RemoveCompletion(hook_id);
}
#endif

void ProcessGroupGeoMesh::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  TORCH_CHECK(onCompletionHook_ == nullptr, "geomesh: an onCompletion hook is registered already");
  TORCH_CHECK(pending_->count() == 0,
              "geomesh: register the onCompletion hook before the first operation");
  hooks_->SetOnCompletion(hook);
  onCompletionHook_ = std::move(hook);  // what the base knows of it: that there is one
}

void ProcessGroupGeoMesh::waitForPendingWorks() {
  // Operations end by their deadlines; hooks and callbacks have none, and may hang.
  absl::Time limit = absl::InfiniteFuture();
  while (!pending_->AwaitIdle(absl::Now() + absl::FromChrono(kInterruptPeriod))) {
    CheckInterrupt();
    if (pending_->own() > 0) {
      limit = absl::InfiniteFuture();
    } else if (limit == absl::InfiniteFuture()) {
      limit = absl::Now() + kHooksLimit;
    } else if (absl::Now() >= limit) {
      return WarnOfHooks();
    }
  }
}

// ---- memory ----

std::shared_ptr<c10::Allocator> ProcessGroupGeoMesh::getMemAllocator() {
  return {c10::GetCPUAllocator(), [](c10::Allocator*) {}};  // it is never freed
}

at::Tensor ProcessGroupGeoMesh::allocateTensor(long size, at::TensorOptions options) {
  return at::empty({size}, options);
}

void ProcessGroupGeoMesh::suspend() {
  const std::shared_ptr<void> unlocked = Unlocked();
  const std::shared_ptr<exec::Executor> running = executor();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const absl::Status usable = Usable(); !suspended_ && !usable.ok()) Throw(usable);
  }
  // A work that was waited for is counted for a moment more, while its callbacks run.
  pending_->AwaitIdle(absl::Now() + absl::Seconds(1));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(pending_->Idle(), "geomesh: suspend() with ", pending_->count(),
                " operations pending: wait for them first");
    suspended_ = true;
  }
  running->ReleaseMemory();
}

void ProcessGroupGeoMesh::resume() {
  CheckOwner();
  std::lock_guard<std::mutex> lock(mutex_);
  suspended_ = false;
}

std::unordered_map<std::string, uint64_t> ProcessGroupGeoMesh::getMemoryStats() {
  const exec::Executor::Memory memory = executor()->MemoryStats();
  uint64_t unexpected = 0;
  for (const transport::PeerStats& peer : Stats()) unexpected += peer.unexpected_bytes;
  return {{"used", memory.used_bytes}, {"kept", memory.kept_bytes}, {"unexpected", unexpected}};
}

}  // namespace geomesh::group
