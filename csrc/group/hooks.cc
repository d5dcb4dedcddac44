#include "group/hooks.h"

#include <exception>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"

#include <c10/util/Exception.h>

namespace geomesh::group {
namespace {

void Run(const char* which, absl::FunctionRef<void()> hook) {
  try {
    hook();
  } catch (const std::exception& e) {
    Log(LogLevel::kWarning, "group", absl::StrCat(which, " failed: ", e.what()));
  }
}

#if defined(C10D_BACKEND_HAS_HOOKS)
template <typename Hook>
using ById = std::map<int64_t, std::shared_ptr<const Hook>>;

template <typename Hook>
std::vector<std::shared_ptr<const Hook>> Values(const ById<Hook>& hooks) {
  std::vector<std::shared_ptr<const Hook>> values;
  for (const auto& [id, hook] : hooks) values.push_back(hook);
  return values;
}

template <typename Hook>
void Add(const char* kind, std::mutex& mutex, ById<Hook>& hooks, int64_t id, Hook hook) {
  auto owned = std::make_shared<const Hook>(std::move(hook));
  std::unique_lock<std::mutex> lock(mutex);
  const bool added = hooks.emplace(id, owned).second;
  lock.unlock();
  TORCH_CHECK(added, "geomesh: ", kind, " hook ", id, " is registered already");
}

template <typename Hook>
void Remove(std::mutex& mutex, ById<Hook>& hooks, int64_t id) {
  typename ById<Hook>::node_type removed;
  std::lock_guard<std::mutex> lock(mutex);
  removed = hooks.extract(id);
}
#endif

}  // namespace

void Hooks::RunCompletion(uint64_t completion_key, float duration_ms) const {
#if defined(GEOMESH_TORCH_HAS_COMPLETION_HOOKS)
  std::unique_lock<std::mutex> lock(mutex_);
  const auto hooks = Values(completion_);
  lock.unlock();
  for (const auto& hook : hooks) {
    Run("a completion hook",
        [&] { (*hook)({.completionKey = completion_key, .duration_ms = duration_ms}); });
  }
#endif
}

void Hooks::RunCompletion(const WorkGeoMesh& work) const {
  RunCompletion(work.getCompletionKey(), work.getDuration());
  std::unique_lock<std::mutex> lock(mutex_);
  const std::shared_ptr<const OnCompletion> hook = on_completion_;
  lock.unlock();
  if (hook != nullptr) Run("the onCompletion hook", [&] { (*hook)(work.Info()); });
}

void Hooks::RunAbort() {
#if defined(C10D_BACKEND_HAS_HOOKS)
  std::unique_lock<std::mutex> lock(mutex_);
  if (std::exchange(abort_ran_, true)) return;
  auto hooks = Values(abort_);
  lock.unlock();
  const bool ran = WhilePythonLives([&hooks] {
    for (const auto& hook : hooks) Run("an abort hook", *hook);
    hooks.clear();
  });
  if (!ran) new auto(std::move(hooks));
#endif
}

bool Hooks::abort_ran() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return abort_ran_;
}

void Hooks::Renew() {
  std::lock_guard<std::mutex> lock(mutex_);
  abort_ran_ = false;
}

void Hooks::Forget() {
  Hooks forgotten;  // goes last
  std::lock_guard<std::mutex> lock(mutex_);
  abort_ran_ = true;
  on_completion_.swap(forgotten.on_completion_);
#if defined(C10D_BACKEND_HAS_HOOKS)
  abort_.swap(forgotten.abort_);
#endif
#if defined(GEOMESH_TORCH_HAS_COMPLETION_HOOKS)
  completion_.swap(forgotten.completion_);
#endif
}

void Hooks::SetOnCompletion(OnCompletion hook) {
  auto owned = std::make_shared<const OnCompletion>(std::move(hook));
  std::lock_guard<std::mutex> lock(mutex_);
  on_completion_.swap(owned);
}

#if defined(C10D_BACKEND_HAS_HOOKS)
void Hooks::AddAbort(int64_t id, c10d::AbortHook hook) {
  Add("abort", mutex_, abort_, id, std::move(hook));
}

void Hooks::RemoveAbort(int64_t id) { Remove(mutex_, abort_, id); }
#endif

#if defined(GEOMESH_TORCH_HAS_COMPLETION_HOOKS)
void Hooks::AddCompletion(int64_t id, c10d::CompletionHook hook) {
  Add("completion", mutex_, completion_, id, std::move(hook));
}

void Hooks::RemoveCompletion(int64_t id) { Remove(mutex_, completion_, id); }
#endif

}  // namespace geomesh::group
