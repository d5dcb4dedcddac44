// A queue and a thread.
#include "exec/compute.h"

#include <pthread.h>
#include <signal.h>

#include <utility>

namespace geomesh::exec {

std::shared_ptr<ComputeThread> ComputeThread::Shared() {
  static std::mutex* mutex = new std::mutex;  // never destroyed: groups may outlive main
  static std::weak_ptr<ComputeThread>* shared = new std::weak_ptr<ComputeThread>;
  std::lock_guard<std::mutex> lock(*mutex);
  std::shared_ptr<ComputeThread> thread = shared->lock();
  if (thread == nullptr) {
    thread = std::make_shared<ComputeThread>();
    *shared = thread;
  }
  return thread;
}

ComputeThread::~ComputeThread() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void ComputeThread::Submit(absl::AnyInvocable<void() &&> task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    if (!thread_.joinable()) {
      // Signals are for the threads of the program that we are a guest in.
      sigset_t all, before;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      thread_ = std::thread([this] { Loop(); });
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      pthread_setname_np(thread_.native_handle(), "geomesh-compute");
    }
  }
  wake_.notify_one();
}

void ComputeThread::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    absl::AnyInvocable<void()&&> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    std::move(task)();
    task = nullptr;  // what it holds goes before the next waits
    lock.lock();
  }
}

}  // namespace geomesh::exec
