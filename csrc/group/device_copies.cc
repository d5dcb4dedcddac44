#include "group/device_copies.h"

#include <utility>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace geomesh::group {

DeviceCopies::Lane& DeviceCopies::LaneOf(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  for (Lane& lane : lanes_) {
    if (lane.stream.device() == device) return lane;
  }
  const c10::impl::VirtualGuardImpl devices(device.type());
  Lane lane{devices.getStreamFromGlobalPool(device), c10::Event(device.type())};
  c10::Event called(device.type());
  called.record(devices.getStream(device));
  called.block(lane.stream);
  lanes_.push_back(std::move(lane));
  return lanes_.back();
}

at::Tensor DeviceCopies::HostMemory(const at::Tensor& tensor) {
  return HostMemory(tensor, tensor.scalar_type());
}

at::Tensor DeviceCopies::HostMemory(const at::Tensor& tensor, at::ScalarType type) {
  LaneOf(tensor);
  return at::empty(tensor.sizes(),
                   tensor.options().dtype(type).device(at::kCPU).pinned_memory(true).memory_format(
                       at::MemoryFormat::Contiguous));
}

void DeviceCopies::Read(const at::Tensor& tensor, const at::Tensor& host) {
  Lane& lane = LaneOf(tensor);
  const c10::StreamGuard guard(lane.stream);
  // What makes the tensor plain runs here too, and so does the freeing of what that needs.
  host.copy_(tensor.resolve_conj().resolve_neg().contiguous(), /*non_blocking=*/true);
  // The caller may let go of the tensor at once; its memory is not given away before the copy.
  c10::impl::VirtualGuardImpl(tensor.device().type())
      .recordDataPtrOnStream(tensor.storage().data_ptr(), lane.stream);
  lane.read.record(lane.stream);
  lane.reading = true;
}

bool DeviceCopies::any_reads() const {
  for (const Lane& lane : lanes_) {
    if (lane.reading) return true;
  }
  return false;
}

bool DeviceCopies::ReadsDone() const {
  for (const Lane& lane : lanes_) {
    if (lane.reading && !lane.read.query()) return false;
  }
  return true;
}

void DeviceCopies::Write(const at::Tensor& host, const at::Tensor& tensor) {
  const Lane& lane = LaneOf(tensor);
  const c10::StreamGuard guard(lane.stream);
  // PyTorch's pinned allocator keeps `host` until the copy is done.
  tensor.copy_(host, /*non_blocking=*/true);
  c10::impl::VirtualGuardImpl(tensor.device().type())
      .recordDataPtrOnStream(tensor.storage().data_ptr(), lane.stream);
}

std::vector<c10::Stream> DeviceCopies::streams() const {
  std::vector<c10::Stream> streams;
  for (const Lane& lane : lanes_) streams.push_back(lane.stream);
  return streams;
}

}  // namespace geomesh::group
