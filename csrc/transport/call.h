// Waiting on one thread for a result that another one makes, or drops. Knows nothing of engines.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"

namespace geomesh::transport::internal {

template <typename R>
class CallState {
 public:
  void Set(std::optional<R> result) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (over_) return;
    over_ = true;
    result_ = std::move(result);
    changed_.notify_all();
  }

  // Cancelled (or a default value, for types that carry no status) if the call was dropped.
  R Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return over_; });
    if (result_.has_value()) return *std::move(result_);
    if constexpr (std::is_constructible_v<R, absl::Status>) {
      return R(absl::CancelledError("the engine of this process is shutting down"));
    } else {
      return R{};
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::optional<R> result_;
};

// Ends the wait when it is told the result, or else when it is destroyed.
template <typename R>
class Finisher {
 public:
  explicit Finisher(std::shared_ptr<CallState<R>> state) : state_(std::move(state)) {}
  Finisher(Finisher&&) = default;
  Finisher& operator=(Finisher&&) = delete;
  ~Finisher() {
    if (state_ != nullptr) state_->Set(std::nullopt);
  }
  void Finish(R result) {
    state_->Set(std::move(result));
    state_ = nullptr;
  }

 private:
  std::shared_ptr<CallState<R>> state_;
};

}  // namespace geomesh::transport::internal
