// What a process has once, whatever the number of its groups: the engine, and the threads on which
// works complete.
//
// Works complete on a thread of their own because that may run user code (futures' callbacks,
// tensor destructors that need Python's lock), which the engine thread must never wait for. A
// callback that waits for another work does not keep that from completing.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/options.h"
#include "base/ordered_thread.h"
#include "transport/engine.h"

namespace geomesh::group {

class Process {
 public:
  // The running one, or a new one made with `options`. It ends when the last group lets go of it.
  // InvalidArgument where one is running with another value of an option named in `given`.
  static absl::StatusOr<std::shared_ptr<Process>> Acquire(const Options& options,
                                                          absl::Span<const std::string> given);

  transport::Engine& engine() { return *engine_; }
  // "geomesh-done": copies results back and completes works.
  OrderedThread& completions() { return completions_; }
  // Engine thread: `work`, for which nobody waits, runs on the completion thread in some
  // milliseconds, after more of its kind: to wake that thread for each would cost more.
  void Later(absl::AnyInvocable<void() &&> work);
  void RunLater();  // at once
  // "geomesh-gpu": waits until inputs have come from a GPU. Made when it is first needed.
  OrderedThread& gpu_reads();
  const Options& options() const { return options_; }

  // How long a caller that waits keeps its core busy before it sleeps: not at all where this host
  // has more ranks than cores.
  absl::Duration patience() const { return absl::Nanoseconds(patience_ns_.load()); }
  // Of a group; the largest one counts.
  void CountRanksHere(int ranks);

 private:
  Process(Options options) : options_(std::move(options)) {}

  const Options options_;
  OrderedThread completions_{
      "geomesh-done"};  // outlives the engine, whose last callbacks post to it
  std::unique_ptr<transport::Engine> engine_;
  std::atomic<int> ranks_here_{0};
  std::atomic<int64_t> patience_ns_{0};
  std::vector<absl::AnyInvocable<void() &&>> later_;  // of the engine thread
  bool later_timer_ = false;
  std::once_flag gpu_reads_made_;
  std::unique_ptr<OrderedThread> gpu_reads_;
};

// This host's name, for errors.
std::string HostName();

}  // namespace geomesh::group
