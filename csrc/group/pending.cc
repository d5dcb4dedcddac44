#include "group/pending.h"

namespace geomesh::group {
namespace {

// The innermost of the calling thread.
thread_local Pending::Foreign* here = nullptr;

}  // namespace

Pending::Foreign::Foreign(std::shared_ptr<Pending> pending)
    : pending_(std::move(pending)), outer_(std::exchange(here, this)) {
  std::lock_guard<std::mutex> lock(pending_->mutex_);
  ++pending_->foreign_;
  pending_->fewer_.notify_all();
}

Pending::Foreign::~Foreign() {
  here = outer_;
  std::lock_guard<std::mutex> lock(pending_->mutex_);
  --pending_->foreign_;
  --pending_->count_;
  pending_->fewer_.notify_all();
}

void Pending::Begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++count_;
}

int64_t Pending::count() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return count_;
}

int64_t Pending::own() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return count_ - foreign_;
}

template <typename Predicate>
bool Pending::Await(std::unique_lock<std::mutex>& lock, absl::Time deadline, Predicate done) {
  if (deadline == absl::InfiniteFuture()) {
    fewer_.wait(lock, done);
    return true;
  }
  return fewer_.wait_until(lock, absl::ToChronoTime(deadline), done);
}

bool Pending::IsIdle() const {
  int64_t on_this_thread = 0;
  for (const Foreign* one = here; one != nullptr; one = one->outer_) {
    on_this_thread += one->pending_.get() == this;
  }
  return count_ == on_this_thread;
}

bool Pending::Idle() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return IsIdle();
}

bool Pending::AwaitOwn(absl::Time deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  return Await(lock, deadline, [this] { return count_ == foreign_; });
}

bool Pending::AwaitIdle(absl::Time deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  return Await(lock, deadline, [this] { return IsIdle(); });
}

}  // namespace geomesh::group
