#include "transport/loop.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace geomesh::transport {
namespace {

constexpr absl::Duration kNap = absl::Microseconds(100);

}  // namespace

absl::StatusOr<std::unique_ptr<EventLoop>> EventLoop::Create() {
  const int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (fd < 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no descriptor for the engine's event queue: ", std::strerror(errno)));
  }
  return std::unique_ptr<EventLoop>(new EventLoop(fd));
}

EventLoop::~EventLoop() {
  Clear();
  if (wake_fd_ >= 0) close(wake_fd_);
}

void EventLoop::Post(Work work) {
  PostQuietly(std::move(work));
  Wake();
}

void EventLoop::PostQuietly(Work work) {
  Node* node = new Node{posted_.load(std::memory_order_relaxed), std::move(work)};
  // seq_cst on this and on sleeping_: either the loop sees the node, or we see that it sleeps.
  while (!posted_.compare_exchange_weak(node->next, node, std::memory_order_seq_cst,
                                        std::memory_order_relaxed)) {
  }
}

void EventLoop::Wake() {
  if (sleeping_.exchange(false, std::memory_order_seq_cst)) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(wake_fd_, &one, sizeof(one));
  }
}

void EventLoop::AbandonAfterFork() {
  close(wake_fd_);
  wake_fd_ = -1;
}

EventLoop::Node* EventLoop::TakeAll() {
  Node* newest = posted_.exchange(nullptr, std::memory_order_acquire);
  Node* oldest = nullptr;
  while (newest != nullptr) {
    Node* next = newest->next;
    newest->next = oldest;
    oldest = newest;
    newest = next;
  }
  return oldest;
}

int EventLoop::RunPosted() {
  if (posted_.load(std::memory_order_relaxed) == nullptr) return 0;
  int count = 0;
  for (Node* node = TakeAll(); node != nullptr; ++count) {
    Node* next = node->next;
    std::move(node->work)();
    delete node;
    node = next;
  }
  return count;
}

void EventLoop::Clear() {
  // What is dropped may post again while it is destroyed.
  while (Node* node = TakeAll()) {
    while (node != nullptr) delete std::exchange(node, node->next);
  }
  timers_.clear();
  timer_times_.clear();
}

uint64_t EventLoop::AddTimer(Instant when, Work work) {
  const uint64_t id = next_timer_++;
  timers_.emplace(std::pair(when, id), std::move(work));
  timer_times_.emplace(id, when);
  return id;
}

void EventLoop::CancelTimer(uint64_t timer) {
  const auto it = timer_times_.find(timer);
  if (it == timer_times_.end()) return;
  timers_.erase(std::pair(it->second, timer));
  timer_times_.erase(it);
}

int EventLoop::RunTimers() {
  if (timers_.empty()) return 0;
  const Instant now = std::chrono::steady_clock::now();
  int count = 0;
  while (!timers_.empty() && timers_.begin()->first.first <= now) {
    const auto first = timers_.begin();
    Work work = std::move(first->second);
    timer_times_.erase(first->first.second);
    timers_.erase(first);
    std::move(work)();
    ++count;
  }
  return count;
}

void EventLoop::Sleep(int fd, absl::Duration most, std::unique_lock<std::mutex>& turn,
                      absl::FunctionRef<bool()> others_at_it) {
  sleeping_.store(true, std::memory_order_seq_cst);
  if (posted_.load(std::memory_order_seq_cst) == nullptr) {
    pollfd fds[2] = {{wake_fd_, POLLIN, 0}, {fd, POLLIN, 0}};
    const Instant now = std::chrono::steady_clock::now();
    alarm_ = now + std::min(most, absl::Hours(1));
    if (!timers_.empty()) alarm_ = std::min(alarm_, timers_.begin()->first.first);
    const int64_t ns = std::max<int64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(alarm_ - now).count(), 0);
    const timespec timeout{ns / 1000000000, ns % 1000000000};
    turn.unlock();
    ppoll(fds, 2, &timeout, nullptr);
    // Somebody else at it: there is no hurry, and to look at `fd` meanwhile would cost a wake-up
    // for each message. Who posts to this thread wakes it.
    const timespec nap{0, absl::ToInt64Nanoseconds(kNap)};
    while ((fds[0].revents & POLLIN) == 0 && others_at_it()) ppoll(fds, 1, &nap, nullptr);
    turn.lock();
    if ((fds[0].revents & POLLIN) != 0) {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t n = read(wake_fd_, &count, sizeof(count));
    }
  }
  sleeping_.store(false, std::memory_order_seq_cst);
}

}  // namespace geomesh::transport
