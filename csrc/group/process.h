// What a process has once, whatever the number of its groups: the engine, and the thread on which
// works complete.
//
// Works complete on a thread of their own because that may run user code (futures' callbacks,
// tensor destructors that need Python's lock), which the engine thread must never wait for.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/options.h"
#include "transport/engine.h"

namespace geomesh::group {

// Runs closures in order on one thread. Post from any thread.
class OrderedThread {
 public:
  explicit OrderedThread(const char* name);
  // Runs what was posted, then ends.
  ~OrderedThread();
  void Post(absl::AnyInvocable<void() &&> work);
  bool IsCurrent() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<absl::AnyInvocable<void() &&>> queue_;  // guarded by mutex_
  bool stop_ = false;                                // guarded by mutex_
  const char* const name_;
  std::thread thread_;
};

class Process {
 public:
  // The running one, or a new one made with `options`. It ends when the last group lets go of it.
  // InvalidArgument where one is running with another value of an option named in `given`.
  static absl::StatusOr<std::shared_ptr<Process>> Acquire(const Options& options,
                                                          absl::Span<const std::string> given);

  transport::Engine& engine() { return *engine_; }
  // "geomesh-done": copies results back and completes works.
  OrderedThread& completions() { return completions_; }
  // "geomesh-gpu": waits until inputs have come from a GPU. Made when it is first needed.
  OrderedThread& gpu_reads();
  const Options& options() const { return options_; }

 private:
  Process(Options options) : options_(std::move(options)) {}

  const Options options_;
  OrderedThread completions_{
      "geomesh-done"};  // outlives the engine, whose last callbacks post to it
  std::unique_ptr<transport::Engine> engine_;
  std::once_flag gpu_reads_made_;
  std::unique_ptr<OrderedThread> gpu_reads_;
};

// This host's name, for errors.
std::string HostName();

}  // namespace geomesh::group
