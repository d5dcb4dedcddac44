// A group's hooks: somebody else's code, that is told how operations end and that the group failed.
// Knows nothing of the group, which may end in one of them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "group/work.h"

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

// PyTorch has no macro of its own for them: hooks on completion, and whether hooks are supported.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
#define GEOMESH_TORCH_HAS_COMPLETION_HOOKS
#endif

namespace geomesh::group {

// Any thread. A hook that throws is logged; it must not end the thread that runs it, and with it
// the process.
class Hooks {
 public:
  using OnCompletion = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  // Those on completion come while Python lives: the caller sees to it (WhilePythonLives).
  void RunCompletion(uint64_t completion_key, float duration_ms) const;
  void RunCompletion(const WorkGeoMesh& work) const;  // and the onCompletion hook
  // Once until Renew(), whatever the number of works that end with a failure.
  void RunAbort();
  bool abort_ran() const;  // or runs
  void Renew();
  // The group has ended: none is run any more.
  void Forget();

  void SetOnCompletion(OnCompletion hook);
#if defined(C10D_BACKEND_HAS_HOOKS)
  // Throws where the id is taken.
  void AddAbort(int64_t id, c10d::AbortHook hook);
  void RemoveAbort(int64_t id);
#endif
#if defined(GEOMESH_TORCH_HAS_COMPLETION_HOOKS)
  void AddCompletion(int64_t id, c10d::CompletionHook hook);
  void RemoveCompletion(int64_t id);
#endif

 private:
  // Guards what follows. No hook runs, is copied or goes under it: that may take Python's lock.
  mutable std::mutex mutex_;
  bool abort_ran_ = false;
  std::shared_ptr<const OnCompletion> on_completion_;
#if defined(C10D_BACKEND_HAS_HOOKS)
  std::map<int64_t, std::shared_ptr<const c10d::AbortHook>> abort_;
#endif
#if defined(GEOMESH_TORCH_HAS_COMPLETION_HOOKS)
  std::map<int64_t, std::shared_ptr<const c10d::CompletionHook>> completion_;
#endif
};

}  // namespace geomesh::group
