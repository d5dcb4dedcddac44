#include "group/work.h"

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "group/process.h"

#include <c10/util/Exception.h>

namespace geomesh::group {
namespace {

std::atomic<void (*)()> interrupt_check{nullptr};
std::atomic<std::shared_ptr<void> (*)()> unlock_python{nullptr};
std::atomic<uint64_t> next_completion_key{1};

}  // namespace

void SetInterruptCheck(void (*check)()) { interrupt_check = check; }

void CheckInterrupt() {
  if (auto check = interrupt_check.load()) check();
}

void SetUnlock(std::shared_ptr<void> (*unlock)()) { unlock_python = unlock; }

std::shared_ptr<void> Unlocked() {
  const auto unlock = unlock_python.load();
  return unlock == nullptr ? nullptr : unlock();
}

namespace {

// Never destroyed: threads use them while the process ends.
std::shared_timed_mutex& python_mutex = *new std::shared_timed_mutex;
std::atomic<bool> python_ended{false};

// A hook or a callback that hangs must not hold up the end of the process.
constexpr std::chrono::seconds kLongestDrop{2};

}  // namespace

bool WhilePythonLives(absl::FunctionRef<void()> drop) {
  std::shared_lock<std::shared_timed_mutex> lock(python_mutex);
  if (python_ended) return false;
  drop();
  return true;
}

void EndPython() {
  std::unique_lock<std::shared_timed_mutex> lock(python_mutex, kLongestDrop);
  python_ended = true;
}

void Throw(const absl::Status& status) {
  throw c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                              std::string(status.message()));
}

std::exception_ptr ToException(const absl::Status& status) {
  try {
    Throw(status);
  } catch (...) {
    return std::current_exception();
  }
}

namespace {

// A work's future is completed right after it.
constexpr std::chrono::seconds kFutureFollows{1};

c10::TypePtr FutureType(size_t output_lists) {
  const c10::TypePtr list = c10::ListType::create(c10::TensorType::get());
  return output_lists == 1 ? list : c10::ListType::create(list);
}

// The result of the first of the works that failed, once `future` is completed in either way.
c10::intrusive_ptr<c10::ivalue::Future> ResultAfter(
    const c10::intrusive_ptr<c10::ivalue::Future>& future,
    std::vector<c10::intrusive_ptr<WorkGeoMesh>> works) {
  return future->then(
      [works = std::move(works)](c10::ivalue::Future&) {
        c10d::WorkResult result = c10d::WorkResult::SUCCESS;
        for (const auto& work : works) {
          if (result == c10d::WorkResult::SUCCESS) result = work->work_result();
        }
        return c10::IValue(static_cast<int64_t>(result));
      },
      c10::IntType::get());
}

}  // namespace

WorkGeoMesh::WorkGeoMesh(Description description)
    : c10d::Work(description.rank, description.type, description.profiling_title,
                 std::optional<std::vector<at::Tensor>>(std::move(description.inputs))),
      operation_(std::move(description.operation)),
      type_(description.type),
      sequence_(description.sequence),
      completion_key_(next_completion_key++),
      timeout_(description.timeout),
      outputs_(std::move(description.outputs)),
      output_lists_(description.output_lists),
      expire_(std::move(description.expire)),
      process_(std::move(description.process)),
      on_gpu_(!description.devices.empty()) {
  if (!on_gpu_) return;
  future_ = c10::make_intrusive<c10::ivalue::Future>(FutureType(output_lists_),
                                                     std::move(description.devices));
}

c10::intrusive_ptr<c10::ivalue::Future> WorkGeoMesh::getFuture() {
  CheckOwner();
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (future_ != nullptr) return future_;
    future = future_ = c10::make_intrusive<c10::ivalue::Future>(FutureType(output_lists_));
    if (!future_due_) return future;
  }
  MarkFuture(*future);
  return future;
}

void WorkGeoMesh::CheckOwner() const {
  if (getpid() == owner_) return;
  Throw(absl::FailedPreconditionError(absl::StrCat(
      operation_, ", sequence ", sequence_, ": process ", getpid(), " is a fork of process ",
      owner_, ", which called it and alone can wait for it")));
}

bool WorkGeoMesh::isCompleted() {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_;
}

bool WorkGeoMesh::isSuccess() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ && !exception_;
}

std::exception_ptr WorkGeoMesh::exception() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return exception_;
}

bool WorkGeoMesh::wait(std::chrono::milliseconds timeout) {
  CheckOwner();
  using Clock = std::chrono::steady_clock;
  HelpEngine();
  const bool bounded = timeout > kNoTimeout;
  const Clock::time_point deadline = bounded ? Clock::now() + timeout : Clock::time_point::max();
  bool expired = false;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!completed_) {
    const Clock::time_point piece = Clock::now() + kInterruptPeriod;
    cv_.wait_until(lock, expired ? piece : std::min(piece, deadline),
                   [this] { return completed_; });
    if (completed_) break;
    lock.unlock();
    CheckInterrupt();
    if (!expired && Clock::now() >= deadline) {
      // The wait's own limit is the strongest: it ends the operation, whose buffers are free once
      // it says so.
      expired = true;
      Expire(absl::DeadlineExceededError(absl::StrCat(operation_, ", sequence ", sequence_,
                                                      ": not done within the ", timeout.count(),
                                                      " ms given to wait()")));
    }
    lock.lock();
  }
  const std::exception_ptr exception = exception_;
  const c10::intrusive_ptr<c10::ivalue::Future> future = future_;
  lock.unlock();
  // The future is completed next, on the completion thread; callers take its value then. Not for
  // ever: once Python has ended it is not completed at all.
  const Clock::time_point next = Clock::now() + kFutureFollows;
  while (future != nullptr && !future->completed() && Clock::now() < next) {
    std::this_thread::yield();
  }
  if (exception) std::rethrow_exception(exception);
  synchronize();
  return true;
}

void WorkGeoMesh::HelpEngine() {
  const std::shared_ptr<Process> process = process_.lock();
  if (process == nullptr || process->patience() == absl::ZeroDuration()) return;
  process->engine().Help([this] { return isCompleted(); }, process->patience());
}

void WorkGeoMesh::synchronize() {
  // The future recorded events when it was marked completed, an instant after waiters were let go.
  if (on_gpu_) getFuture()->wait();
}

void WorkGeoMesh::Expire(const absl::Status& reason) {
  std::function<void(const absl::Status&)> expire;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    expire = expire_;
  }
  if (expire) expire(reason);
}

void WorkGeoMesh::abort() {
  Expire(absl::CancelledError(
      absl::StrCat(operation_, ", sequence ", sequence_, ": aborted by its work's abort()")));
}

float WorkGeoMesh::getDuration() const {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(completed_, operation_, " has no duration yet: it isn't done");
  return std::chrono::duration<float, std::milli>(end_ - start_).count();
}

int WorkGeoMesh::sourceRank() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return outcome_.source;
}

std::shared_ptr<c10d::WorkInfo> WorkGeoMesh::Info() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::make_shared<c10d::WorkInfo>(type_, sequence_, start_, end_, end_ - start_);
}

exec::Outcome WorkGeoMesh::outcome() const {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(completed_, operation_, " has no outcome yet: it isn't done");
  return outcome_;
}

c10d::WorkResult WorkGeoMesh::work_result() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return work_result_;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkGeoMesh::getFutureResult() {
  const auto self = c10::intrusive_ptr<WorkGeoMesh>::unsafe_reclaim_from_nonowning(this);
  return ResultAfter(getFuture(), {self});
}

bool WorkGeoMesh::CompleteHere(const exec::Outcome& outcome) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (future_ != nullptr || recordFunctionEndCallback_) return false;
  }
  Complete(absl::OkStatus(), outcome);
  // Who asks for the future from now on gets a completed one, who did in between waits for
  // CompleteFuture.
  std::lock_guard<std::mutex> lock(mutex_);
  future_due_ = future_ == nullptr;
  return true;
}

void WorkGeoMesh::Complete(const absl::Status& status, const exec::Outcome& outcome) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    work_result_ = status.ok()                        ? c10d::WorkResult::SUCCESS
                   : absl::IsDeadlineExceeded(status) ? c10d::WorkResult::TIMEOUT
                                                      : c10d::WorkResult::COMM_ERROR;
    end_ = std::chrono::steady_clock::now();
    outcome_ = outcome;
    expire_ = nullptr;
  }
  if (status.ok()) {
    finish();
  } else {
    finish(ToException(status));
  }
}

void WorkGeoMesh::CompleteFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(future_due_, true)) return;
    future = future_;
  }
  if (future != nullptr) MarkFuture(*future);
}

void WorkGeoMesh::MarkFuture(c10::ivalue::Future& future) const {
  if (const std::exception_ptr failure = exception()) {
    future.setError(failure);
  } else if (output_lists_ == 1) {
    future.markCompleted(c10::IValue(outputs_));
  } else {
    std::vector<std::vector<at::Tensor>> lists(output_lists_);
    const size_t length = outputs_.size() / output_lists_;
    for (size_t i = 0; i < outputs_.size(); ++i) lists[i / length].push_back(outputs_[i]);
    future.markCompleted(c10::IValue(std::move(lists)));
  }
}

namespace {

// How long several works took together, in ms.
float TogetherMs(const std::vector<c10::intrusive_ptr<WorkGeoMesh>>& works) {
  float end = 0;
  const auto start = works.front()->start();
  for (const auto& work : works) {
    const std::chrono::duration<float, std::milli> later = work->start() - start;
    end = std::max(end, later.count() + work->getDuration());
  }
  return end;
}

class JoinedWork : public c10d::Work {
 public:
  JoinedWork(std::vector<c10::intrusive_ptr<WorkGeoMesh>> works, std::vector<at::Tensor> outputs,
             std::function<void(uint64_t, float)> on_success)
      : c10d::Work(-1, c10d::OpType::COALESCED),
        works_(std::move(works)),
        outputs_(std::move(outputs)) {
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
        c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    for (const auto& work : works_) futures.push_back(work->getFuture());
    future_ = c10::collectAll(futures)->then(
        [works = works_, outputs = outputs_, key = completion_key_,
         on_success = std::move(on_success)](c10::ivalue::Future& all) {
          if (all.hasError()) std::rethrow_exception(all.exception_ptr());
          for (const c10::IValue& one : all.value().toListRef()) one.toFuture()->wait();
          on_success(key, TogetherMs(works));
          return c10::IValue(outputs);
        },
        c10::ListType::create(c10::TensorType::get()));
  }

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(),
                       [](const auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(),
                       [](const auto& work) { return work->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const auto& work : works_) {
      if (auto exception = work->exception()) return exception;
    }
    return nullptr;
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override {
    for (const auto& work : works_) work->synchronize();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point deadline = Clock::now() + timeout;
    for (const auto& work : works_) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      work->wait(timeout > kNoTimeout ? std::max(left, std::chrono::milliseconds(1)) : timeout);
    }
    return true;
  }
  void abort() override {
    for (const auto& work : works_) work->abort();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return ResultAfter(future_, works_);
  }
  uint64_t getSequencenumber() const override { return works_.front()->getSequencenumber(); }
  float getDuration() const override { return TogetherMs(works_); }
  // Override Work's where PyTorch has them.
  uint64_t getCompletionKey() const { return completion_key_; }                          // NOLINT
  std::chrono::milliseconds getTimeout() const { return works_.front()->getTimeout(); }  // NOLINT

 private:
  const uint64_t completion_key_ = next_completion_key++;
  const std::vector<c10::intrusive_ptr<WorkGeoMesh>> works_;
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> JoinWorks(std::vector<c10::intrusive_ptr<WorkGeoMesh>> works,
                                         std::vector<at::Tensor> outputs,
                                         std::function<void(uint64_t, float)> on_success) {
  return c10::make_intrusive<JoinedWork>(std::move(works), std::move(outputs),
                                         std::move(on_success));
}

}  // namespace geomesh::group
