// Runs closures in order, on threads of its own. Knows nothing of what they do.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"

namespace geomesh {

class OrderedThread {
 public:
  explicit OrderedThread(const char* name);
  // Runs what was posted, then ends. Does not wait for a closure that let others pass and is not
  // back after its patience, nor for the one that calls this: they go on to their end.
  ~OrderedThread();

  // Any thread. Never waits for a closure.
  void Post(absl::AnyInvocable<void() &&> work);
  // One after the other, each as if it had been posted by itself; wakes the thread once.
  void PostAll(std::vector<absl::AnyInvocable<void() &&>> works);

  // From a closure: what it does from now on is somebody else's code and may take its time, or wait
  // for what comes later in this queue. If it is not back after `patience` while more is to be run,
  // another thread goes on with that, still one closure at a time. (Callbacks that are quick keep
  // their order.)
  void LetOthersPass(std::chrono::milliseconds patience = std::chrono::milliseconds(2));

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace geomesh
