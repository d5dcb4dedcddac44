// The handle of one operation that c10d gives to callers.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "exec/executor.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace geomesh::group {

// Called every 0.2 s of a blocking wait, on the waiting thread; throws to end the wait (Ctrl-C).
// Set once, by the bindings.
void SetInterruptCheck(void (*check)());
// Calls it. No lock is held: it takes Python's.
void CheckInterrupt();
inline constexpr std::chrono::milliseconds kInterruptPeriod{200};

// Makes what lets go of Python's lock, where the calling thread holds it, for as long as the result
// lives. Set once, by the bindings.
void SetUnlock(std::shared_ptr<void> (*unlock)());
// For what waits where Python may have called: in destructors.
std::shared_ptr<void> Unlocked();

// Runs `drop`, which may take Python's lock (a hook, a callback, the last reference to a tensor
// that Python has made), on a thread of our own. False, and nothing is run, once Python has ended:
// taking its lock would then end the process. The caller leaks what it holds.
bool WhilePythonLives(absl::FunctionRef<void()> drop);
// Python is about to end. Returns when no such thing is under way, or after 2 s; Python's lock is
// not held.
void EndPython();

// c10::DistBackendError with the status's text.
std::exception_ptr ToException(const absl::Status& status);
[[noreturn]] void Throw(const absl::Status& status);

class Process;

class WorkGeoMesh : public c10d::Work {
 public:
  struct Description {
    int rank = -1;
    c10d::OpType type = c10d::OpType::UNKNOWN;
    const char* profiling_title = nullptr;  // static storage
    std::string operation;                  // for errors
    std::vector<at::Tensor> inputs;         // for the profiler
    std::vector<at::Tensor> outputs;        // result() and the future's value
    size_t output_lists = 1;                // several: the future has them as lists of this number
    std::vector<c10::Device> devices;       // GPUs whose streams the operation uses
    uint64_t sequence = 0;
    std::chrono::milliseconds timeout{0};
    std::function<void(const absl::Status&)>
        expire;                      // ends the operation when a wait(timeout) runs out
    std::weak_ptr<Process> process;  // whose engine a wait may help
  };
  explicit WorkGeoMesh(Description description);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  // Of a receive that is done: whose message it was.
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  // Orders the current streams behind the results; where none is on a GPU, nothing.
  void synchronize() override;
  // Returns when the operation is done, and as synchronize().
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  // Its value is a c10d::WorkResult, also where the work failed: it has no error.
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  c10d::WorkResult work_result() const;  // UNKNOWN until it is done
  float getDuration() const override;    // ms, of a work that is done
  std::chrono::steady_clock::time_point start() const { return start_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  // Overrides Work's where PyTorch has it: never used again in this process.
  uint64_t getCompletionKey() const { return completion_key_; }  // NOLINT
  // Overrides Work's where PyTorch has it (not in 2.11).
  std::chrono::milliseconds getTimeout() const { return timeout_; }  // NOLINT

  // After completion. Bytes of this rank on the wire; token counts of all ranks of a sign
  // all-reduce.
  exec::Outcome outcome() const;

  // On any thread, instead of Complete: lets waiters go. False, and nothing is done, where somebody
  // else's code is to run as the work ends: a future's callbacks, a profiler's.
  bool CompleteHere(const exec::Outcome& outcome);
  // Once, on the completion thread: lets waiters go.
  void Complete(const absl::Status& status, const exec::Outcome& outcome);
  // Once, after that: the future, and with it its callbacks. The streams that results were put on
  // are current.
  void CompleteFuture();

  // After completion.
  std::shared_ptr<c10d::WorkInfo> Info() const;

 private:
  void Expire(const absl::Status& reason);
  // Runs the engine here until the work is done, where it may.
  void HelpEngine();
  void MarkFuture(c10::ivalue::Future& future) const;
  // Throws in a fork, where nothing completes the work (and its lock may be held for ever).
  void CheckOwner() const;

  const std::string operation_;
  const c10d::OpType type_;
  const pid_t owner_ = getpid();
  const uint64_t sequence_;
  const uint64_t completion_key_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::vector<at::Tensor> outputs_;
  const size_t output_lists_;
  std::function<void(const absl::Status&)> expire_;  // guarded by mutex_; empty once complete
  const std::weak_ptr<Process> process_;
  // Made when it is first asked for (with GPUs at once: it orders streams): most works have none,
  // and no callbacks. Guarded by mutex_.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_due_ = false;  // guarded by mutex_: it is to be made completed
  const bool on_gpu_;
  std::chrono::steady_clock::time_point end_;  // guarded by mutex_, as the base's state
  exec::Outcome outcome_;                      // guarded by mutex_
  c10d::WorkResult work_result_ = c10d::WorkResult::UNKNOWN;  // guarded by mutex_
};

// One handle for several works that were issued together, at least one: done when all are, failed
// when one did. `on_success` is called once, with the handle's completion key and its duration in
// ms, before its future is completed: by who completes the last work, or by the caller.
c10::intrusive_ptr<c10d::Work> JoinWorks(std::vector<c10::intrusive_ptr<WorkGeoMesh>> works,
                                         std::vector<at::Tensor> outputs,
                                         std::function<void(uint64_t, float)> on_success);

}  // namespace geomesh::group
