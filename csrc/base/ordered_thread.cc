#include "base/ordered_thread.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace geomesh {

struct OrderedThread::State {
  using Clock = std::chrono::steady_clock;

  explicit State(const char* thread_name) : name(thread_name) {}

  const char* const name;
  std::mutex mutex;  // guards what follows
  std::condition_variable wake;
  std::deque<absl::AnyInvocable<void() &&>> queue;
  std::vector<std::thread> threads;
  size_t idle = 0;                           // threads that wait for something to run
  std::thread::id leader;                    // runs a closure in its turn; none: nobody does
  std::optional<Clock::time_point> passing;  // from then on, others may pass the leader
  std::vector<std::thread::id> passed;       // run closures that others have passed
  size_t starting = 0;                       // threads that have not looked yet
  bool stop = false;
  std::vector<std::thread::id> ended;  // because of `stop`
  std::condition_variable changed;     // for who has set `stop`

  static void AddThread(const std::shared_ptr<State>& self) {
    self->threads.emplace_back([self] { Run(*self); });
    ++self->starting;
  }

  // One thread to go on with and one to spare are enough; those that slow closures made necessary
  // end. False: not this one.
  bool Retire(std::thread::id own) {
    if (idle < 2) return false;
    const auto at = std::find_if(threads.begin(), threads.end(),
                                 [&](const std::thread& t) { return t.get_id() == own; });
    if (at == threads.end()) return false;  // it is being joined
    at->detach();                           // touches nothing but `self`, which it holds
    threads.erase(at);
    return true;
  }

  // Until the thread has ended. False: it runs a closure that others have passed, or could have.
  bool AwaitEnd(std::unique_lock<std::mutex>& lock, std::thread::id thread) {
    const auto among = [thread](const std::vector<std::thread::id>& ids) {
      return std::find(ids.begin(), ids.end(), thread) != ids.end();
    };
    while (!among(ended)) {
      const bool may_be_passed = leader == thread && passing.has_value();
      if (among(passed) || (may_be_passed && Clock::now() >= *passing)) return false;
      may_be_passed ? (void)changed.wait_until(lock, *passing) : changed.wait(lock);
    }
    return true;
  }

  static void Run(State& self) {
    pthread_setname_np(pthread_self(), self.name);
    const std::thread::id own = std::this_thread::get_id();
    std::unique_lock<std::mutex> lock(self.mutex);
    --self.starting;
    for (;;) {
      if (self.queue.empty() && self.stop) {
        self.wake.notify_all();  // the others may end, too
        self.ended.push_back(own);
        self.changed.notify_all();
        return;
      }
      const bool nobody_leads = self.leader == std::thread::id();
      if (self.queue.empty() || (!nobody_leads && !self.passing.has_value())) {
        if (self.Retire(own)) return;
        ++self.idle;
        self.wake.wait(lock);
        --self.idle;
        continue;
      }
      if (!nobody_leads && Clock::now() < *self.passing) {
        ++self.idle;
        self.wake.wait_until(lock, *self.passing);
        --self.idle;
        continue;
      }
      if (!nobody_leads) self.passed.push_back(self.leader);
      self.leader = own;
      self.passing.reset();
      self.changed.notify_all();
      absl::AnyInvocable<void()&&> work = std::move(self.queue.front());
      self.queue.pop_front();
      lock.unlock();
      std::move(work)();
      work = nullptr;  // what it held is let go of outside the lock
      lock.lock();
      if (self.leader != own) {  // another one goes on
        self.passed.erase(std::find(self.passed.begin(), self.passed.end(), own));
        continue;
      }
      self.leader = {};
      self.passing.reset();
    }
  }
};

OrderedThread::OrderedThread(const char* name) : state_(std::make_shared<State>(name)) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  State::AddThread(state_);
}

OrderedThread::~OrderedThread() {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->stop = true;
  if (state_->leader == std::this_thread::get_id()) state_->passing = State::Clock::now();
  state_->wake.notify_all();
  while (!state_->threads.empty()) {  // more may be added meanwhile
    std::thread thread = std::move(state_->threads.back());
    state_->threads.pop_back();
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();  // its state lives as long
      continue;
    }
    if (!state_->AwaitEnd(lock, thread.get_id())) {
      thread.detach();
      continue;
    }
    lock.unlock();
    thread.join();
    lock.lock();
  }
}

void OrderedThread::Post(absl::AnyInvocable<void() &&> work) {
  std::vector<absl::AnyInvocable<void() &&>> works;
  works.push_back(std::move(work));
  PostAll(std::move(works));
}

void OrderedThread::PostAll(std::vector<absl::AnyInvocable<void() &&>> works) {
  if (works.empty()) return;
  std::lock_guard<std::mutex> lock(state_->mutex);
  for (auto& work : works) state_->queue.push_back(std::move(work));
  // A leader that is at work looks again by itself.
  const bool led = state_->leader != std::thread::id() && !state_->passing.has_value();
  if (!led) state_->wake.notify_one();
}

void OrderedThread::LetOthersPass(std::chrono::milliseconds patience) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->leader != std::this_thread::get_id()) return;
  state_->passing = State::Clock::now() + patience;
  state_->changed.notify_all();
  // There is always one that can.
  if (state_->idle + state_->starting == 0) State::AddThread(state_);
  if (!state_->queue.empty()) state_->wake.notify_one();
}

}  // namespace geomesh
