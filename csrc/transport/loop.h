// The engine's event loop: work posted from any thread, timers, and sleep. Knows nothing of peers.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace geomesh::transport {

// Monotonic: a step of the wall clock ends no peer.
using Instant = std::chrono::steady_clock::time_point;

// An infinite duration leads far away and overflows nothing.
inline Instant operator+(Instant at, absl::Duration d) {
  constexpr absl::Duration kFar = absl::Hours(24 * 365 * 20);
  return at + absl::ToChronoNanoseconds(std::clamp(d, -kFar, kFar));
}
inline absl::Duration Between(Instant from, Instant to) { return absl::FromChrono(to - from); }

class EventLoop {
 public:
  using Work = absl::AnyInvocable<void() &&>;

  static absl::StatusOr<std::unique_ptr<EventLoop>> Create();
  ~EventLoop();

  // Any thread. Lock-free; in the order of the calls of one thread.
  void Post(Work work);
  // The same in two steps: the second one sees to it that what was posted is run.
  void PostQuietly(Work work);
  void Wake();

  // In a forked child, where the loop's thread does not exist: closes the inherited descriptor.
  void AbandonAfterFork();

  // ---- whoever has the turn ----

  bool has_posted() const { return posted_.load(std::memory_order_relaxed) != nullptr; }
  int RunPosted();

  uint64_t AddTimer(Instant when, Work work);
  void CancelTimer(uint64_t timer);
  int RunTimers();

  // Sleeps until work is posted, a timer is due or `fd` is readable, and `most` at most; longer
  // while others are at it who see to all that. Returns at once if work is waiting already. `turn`
  // is let go of meanwhile.
  void Sleep(int fd, absl::Duration most, std::unique_lock<std::mutex>& turn,
             absl::FunctionRef<bool()> others_at_it);
  // Who adds timers while the loop's thread sleeps must wake it where one comes before its alarm.
  bool TimerBeforeAlarm() const {
    return !timers_.empty() && timers_.begin()->first.first < alarm_;
  }

  // Drops what is queued, without running it.
  void Clear();

 private:
  struct Node {
    Node* next;
    Work work;
  };

  explicit EventLoop(int wake_fd) : wake_fd_(wake_fd) {}
  Node* TakeAll();

  // Newest first; the consumer takes the whole list and turns it round.
  std::atomic<Node*> posted_{nullptr};
  std::atomic<bool> sleeping_{false};
  int wake_fd_;

  Instant alarm_;  // when the sleep will end by itself
  uint64_t next_timer_ = 1;
  absl::btree_map<std::pair<Instant, uint64_t>, Work> timers_;
  absl::flat_hash_map<uint64_t, Instant> timer_times_;
};

}  // namespace geomesh::transport
