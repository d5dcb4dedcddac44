#include "group/window.h"

#if defined(C10D_BACKEND_HAS_WINDOW)

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "exec/windows.h"
#include "group/arguments.h"
#include "group/operation.h"

#include <c10/util/Exception.h>

namespace geomesh::group {

c10::intrusive_ptr<c10d::Window> ProcessGroupGeoMesh::new_window(
    const std::optional<at::Tensor>& tensor) {
  uint64_t window = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const absl::Status usable = Usable(); !usable.ok()) Throw(usable);
    window = ++windows_;
  }
  auto made = c10::make_intrusive<WindowGeoMesh>(
      c10::intrusive_ptr<ProcessGroupGeoMesh>::reclaim_copy(this), window);
  if (tensor.has_value()) made->tensor_register(*tensor, /*owning=*/true);
  return made;
}

WindowGeoMesh::WindowGeoMesh(c10::intrusive_ptr<ProcessGroupGeoMesh> group, uint64_t window)
    : group_(std::move(group)), window_(window) {}

WindowGeoMesh::~WindowGeoMesh() {
  if (!tensor_.defined()) return;
  try {
    group_->executor()->WithWindows(
        [window = window_](exec::Windows& windows) { windows.Deregister(window); });
  } catch (const std::exception&) {
    // The group has ended, and its windows with it.
  }
}

void WindowGeoMesh::tensor_register(const at::Tensor& tensor, bool owning) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!tensor_.defined(), "window: a tensor is registered already; deregister it first");
  }
  TORCH_CHECK(tensor.defined() && tensor.layout() == at::kStrided && tensor.is_cpu() &&
                  tensor.is_contiguous(),
              "window: takes a dense, contiguous tensor on the CPU; got ",
              !tensor.defined() ? std::string("none")
              : tensor.layout() == at::kStrided && !tensor.is_contiguous()
                  ? absl::StrCat(Describe(tensor), " with strides [",
                                 absl::StrJoin(tensor.strides(), ","), "]")
                  : absl::StrCat(Describe(tensor), " on ", tensor.device().str()));
  // Without owning the caller keeps the tensor; what lands meanwhile needs the memory all the same.
  auto keep = std::make_shared<at::Tensor>(tensor.detach());
  absl::Span<std::byte> bytes(static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes());
  group_->executor()->WithWindows(
      [window = window_, bytes, keep = std::move(keep)](exec::Windows& windows) mutable {
        windows.Register(window, bytes, std::move(keep));
      });
  // When this is done, all ranks have registered theirs.
  const int size = group_->getSize();
  at::Tensor own = at::empty({2}, at::kLong), all = at::empty({size, 2}, at::kLong);
  own[0] = tensor.numel();
  own[1] = static_cast<int64_t>(tensor.scalar_type());
  group_->_allgather_base(all, own, {})->wait();
  std::vector<int64_t> elements;
  for (int rank = 0; rank < size; ++rank) {
    TORCH_CHECK(all[rank][1].item<int64_t>() == static_cast<int64_t>(tensor.scalar_type()),
                "window: rank ", rank, " registers a tensor of dtype ",
                static_cast<at::ScalarType>(all[rank][1].item<int64_t>()), ", this rank ",
                tensor.scalar_type());
    elements.push_back(all[rank][0].item<int64_t>());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  tensor_ = tensor;
  elements_ = std::move(elements);
}

void WindowGeoMesh::tensor_deregister() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(tensor_.defined(), "window: no tensor is registered");
  }
  group_->barrier({})->wait();  // nobody puts into it any more
  group_->executor()->WithWindows(
      [window = window_](exec::Windows& windows) { windows.Deregister(window); });
  std::lock_guard<std::mutex> lock(mutex_);
  tensor_.reset();
  elements_.clear();
}

int64_t WindowGeoMesh::CheckPeer(const char* what, int64_t rank) const {
  TORCH_CHECK(rank >= 0 && rank < group_->getSize(), "window, ", what, ": rank ", rank,
              ", but the group has ranks 0 to ", group_->getSize() - 1);
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(tensor_.defined(), "window, ", what, ": no tensor is registered");
  return elements_[static_cast<size_t>(rank)];
}

WindowGeoMesh::Work WindowGeoMesh::put(const at::Tensor& tensor, int64_t dst_rank,
                                       int64_t target_offset_elements, bool async_op,
                                       const c10d::PutOptions& opts) {
  const int64_t room = CheckPeer("put", dst_rank);
  auto op = group_->Begin("put", "geomesh:put", c10d::OpType::SEND,
                          absl::StrCat(Describe(tensor), ", to rank ", dst_rank, " at element ",
                                       target_offset_elements));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    CheckType(op.work.operation, tensor, tensor_);
  }
  TORCH_CHECK(target_offset_elements >= 0 && target_offset_elements <= room &&
                  tensor.numel() <= room - target_offset_elements,
              op.work.operation, ": the window there has ", room, " elements");
  const at::Tensor memory = op.staging->Source(tensor);
  TORCH_CHECK(!op.staging->any_reads(), op.work.operation, ": takes a tensor on the CPU");
  op.work.inputs = {tensor};
  const absl::Span<const std::byte> bytes(static_cast<const std::byte*>(memory.const_data_ptr()),
                                          memory.nbytes());
  const uint64_t offset =
      static_cast<uint64_t>(target_offset_elements) * static_cast<uint64_t>(tensor.element_size());
  auto issued = group_->LaunchService(std::move(op), opts.timeout);
  group_->executor()->WithWindows([window = window_, dst_rank, offset, bytes,
                                   deadline = issued.deadline,
                                   done = std::move(issued.done)](exec::Windows& windows) mutable {
    windows.Put(window, static_cast<size_t>(dst_rank), offset, bytes, deadline,
                [done = std::move(done)](const absl::Status& status) { done(status, {}); });
  });
  if (!async_op) issued.work->wait();
  return issued.work;
}

at::Tensor WindowGeoMesh::map_remote_tensor(int64_t rank) {
  CheckPeer("map_remote_tensor", rank);
  TORCH_CHECK_NOT_IMPLEMENTED(rank == group_->getRank(),
                              "window, map_remote_tensor: the memory of rank ", rank,
                              " is in another process, which a network can't map; use put, or "
                              "have that rank put it here");
  std::lock_guard<std::mutex> lock(mutex_);
  return tensor_;
}

WindowGeoMesh::Work WindowGeoMesh::signal(int64_t peer_rank, bool async_op,
                                          const c10d::SignalOptions& opts) {
  CheckPeer("signal", peer_rank);
  auto issued = group_->LaunchService(group_->Begin("signal", "geomesh:signal", c10d::OpType::SEND,
                                                    absl::StrCat("to rank ", peer_rank)),
                                      opts.timeout);
  group_->executor()->WithWindows(
      [window = window_, peer_rank, done = std::move(issued.done)](exec::Windows& windows) mutable {
        windows.Signal(window, static_cast<size_t>(peer_rank),
                       [done = std::move(done)](const absl::Status& status) { done(status, {}); });
      });
  if (!async_op) issued.work->wait();
  return issued.work;
}

WindowGeoMesh::Work WindowGeoMesh::wait_signal(int64_t peer_rank, bool async_op,
                                               const c10d::WaitSignalOptions& opts) {
  CheckPeer("wait_signal", peer_rank);
  auto op = group_->Begin("wait_signal", "geomesh:wait_signal", c10d::OpType::RECV,
                          absl::StrCat("from rank ", peer_rank));
  const std::string operation = op.work.operation;
  auto issued = group_->LaunchService(std::move(op), opts.timeout);
  const std::string name = absl::StrCat(operation, ", sequence ", issued.work->getSequencenumber());
  group_->executor()->WithWindows([window = window_, peer_rank, name, deadline = issued.deadline,
                                   done = std::move(issued.done)](exec::Windows& windows) mutable {
    windows.AwaitSignal(
        window, static_cast<size_t>(peer_rank), deadline,
        [done = std::move(done), name = std::move(name)](const absl::Status& status) {
          if (status.ok()) return done(status, {});
          done(absl::Status(status.code(), absl::StrCat(name, ": ", status.message())), {});
        });
  });
  if (!async_op) issued.work->wait();
  return issued.work;
}

c10d::WindowAttr WindowGeoMesh::get_attr(int64_t peer_rank) {
  CheckPeer("get_attr", peer_rank);
  return {.access_type = c10d::WindowAccessType::UNIFIED};
}

}  // namespace geomesh::group

#endif
