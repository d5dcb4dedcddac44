// A group's window: memory that its ranks write into without the owner taking part.
#pragma once

#include "group/process_group.h"

#if defined(C10D_BACKEND_HAS_WINDOW)

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include <torch/csrc/distributed/c10d/Window.hpp>

namespace geomesh::group {

// Tensors are contiguous, on the CPU; each rank's may have its own size, all have one dtype. A put
// is done when the target has it in its memory; a signal is seen after all puts that its sender
// began before. wait_signal takes one signal. Methods may be called from any thread;
// tensor_register and tensor_deregister are collective, and block.
class WindowGeoMesh : public c10d::Window {
 public:
  // `window` is equal on all ranks, and of this window alone in the group.
  WindowGeoMesh(c10::intrusive_ptr<ProcessGroupGeoMesh> group, uint64_t window);
  // Lets the memory go without asking the other ranks.
  ~WindowGeoMesh() override;

  using Work = c10::intrusive_ptr<c10d::Work>;
  void tensor_register(const at::Tensor& tensor, bool owning) override;
  void tensor_deregister() override;
  Work put(const at::Tensor& tensor, int64_t dst_rank, int64_t target_offset_elements,
           bool async_op, const c10d::PutOptions& opts) override;
  // Only this rank's own: memory of other processes can't be mapped over a network.
  at::Tensor map_remote_tensor(int64_t rank) override;
  Work signal(int64_t peer_rank, bool async_op, const c10d::SignalOptions& opts) override;
  Work wait_signal(int64_t peer_rank, bool async_op, const c10d::WaitSignalOptions& opts) override;
  c10d::WindowAttr get_attr(int64_t peer_rank) override;

 private:
  int64_t CheckPeer(const char* what, int64_t rank) const;

  const c10::intrusive_ptr<ProcessGroupGeoMesh> group_;
  const uint64_t window_;
  mutable std::mutex mutex_;
  at::Tensor tensor_;              // guarded by mutex_; undefined where none is registered
  std::vector<int64_t> elements_;  // guarded by mutex_; by rank
};

}  // namespace geomesh::group

#endif
