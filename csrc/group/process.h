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

// Runs closures in order on one thread, "geomesh-done". Post from any thread.
class CompletionThread {
 public:
  CompletionThread();
  // Runs what was posted, then ends.
  ~CompletionThread();
  void Post(absl::AnyInvocable<void() &&> work);
  bool IsCurrent() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<absl::AnyInvocable<void() &&>> queue_;  // guarded by mutex_
  bool stop_ = false;                                // guarded by mutex_
  std::thread thread_;
};

class Process {
 public:
  // The running one, or a new one made with `options`. It ends when the last group lets go of it.
  // InvalidArgument where one is running with another value of an option named in `given`.
  static absl::StatusOr<std::shared_ptr<Process>> Acquire(const Options& options,
                                                          absl::Span<const std::string> given);

  transport::Engine& engine() { return *engine_; }
  CompletionThread& completions() { return completions_; }
  const Options& options() const { return options_; }

 private:
  Process(Options options) : options_(std::move(options)) {}

  const Options options_;
  CompletionThread completions_;  // outlives the engine, whose last callbacks post to it
  std::unique_ptr<transport::Engine> engine_;
};

// This host's name, for errors.
std::string HostName();

}  // namespace geomesh::group
