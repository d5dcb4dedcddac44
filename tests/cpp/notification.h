// absl::Notification of the standard library's parts, which ThreadSanitizer understands without a
// rebuilt Abseil.
#pragma once

#include <condition_variable>
#include <mutex>

#include "absl/time/time.h"

namespace geomesh::transport {

class Notification {
 public:
  void Notify() {
    const std::lock_guard<std::mutex> lock(mutex_);
    notified_ = true;
    changed_.notify_all();
  }
  bool HasBeenNotified() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return notified_;
  }
  bool WaitForNotificationWithTimeout(absl::Duration limit) const {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, absl::ToChronoNanoseconds(limit), [this] { return notified_; });
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool notified_ = false;
};

}  // namespace geomesh::transport
