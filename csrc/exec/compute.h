// The one compute thread of the process: runs long arithmetic, first in first out, so that the
// engine thread stays free for heartbeats and traffic. Knows nothing of what it runs.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "absl/functional/any_invocable.h"

namespace geomesh::exec {

class ComputeThread {
 public:
  // The process's own. It starts with the first task, and is joined when the last holder lets go
  // (not on the thread itself). A task must not hold it.
  static std::shared_ptr<ComputeThread> Shared();

  ComputeThread() = default;
  ~ComputeThread();  // runs what was submitted, then joins
  ComputeThread(const ComputeThread&) = delete;
  ComputeThread& operator=(const ComputeThread&) = delete;

  // Any thread.
  void Submit(absl::AnyInvocable<void() &&> task);

 private:
  void Loop();

  std::mutex mutex_;  // guards what is below
  std::condition_variable wake_;
  std::deque<absl::AnyInvocable<void() &&>> tasks_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace geomesh::exec
