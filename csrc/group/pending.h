// What a group has begun and not ended yet, counted, so that the group's end can wait for it.
//
// An operation ends in two steps: first the group itself is done with it and lets its waiters go,
// then somebody else's code runs (callbacks, hooks), which may take its time, hang, or end the very
// group. So the group's end waits for the second step no longer than it likes, and this outlives
// the group.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/time/time.h"

namespace geomesh::group {

// Any thread.
class Pending {
 public:
  // One more, until a Foreign that is made for it goes.
  void Begin();

  // Lives while somebody else's code runs, on the thread that runs it. It is not waited for there.
  class Foreign {
   public:
    explicit Foreign(std::shared_ptr<Pending> pending);
    ~Foreign();
    Foreign(const Foreign&) = delete;

   private:
    friend class Pending;
    const std::shared_ptr<Pending> pending_;
    Foreign* const outer_;
  };

  int64_t count() const;  // all
  // Without those that are in somebody else's code.
  int64_t own() const;
  bool Idle() const;  // nothing is pending, but for what runs on this very thread

  // False: not so by the deadline.
  bool AwaitOwn(absl::Time deadline);   // own() is 0
  bool AwaitIdle(absl::Time deadline);  // Idle()

 private:
  bool IsIdle() const;  // mutex_ is held
  template <typename Predicate>
  bool Await(std::unique_lock<std::mutex>& lock, absl::Time deadline, Predicate done);

  mutable std::mutex mutex_;
  std::condition_variable fewer_;
  int64_t count_ = 0;
  int64_t foreign_ = 0;  // of these
};

}  // namespace geomesh::group
