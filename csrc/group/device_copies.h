// One operation's copies between GPU and pinned host memory, ordered by streams and events alone:
// nothing waits for a whole device, and the caller's stream never waits for the host.
//
// On each device the operation has a stream of its own. It begins behind what the caller's current
// stream had been given when the call was made; reads are done when an event on it is; who uses the
// results orders itself behind it (the Work's future does that for c10d).
//
// Speaks to PyTorch's device-neutral interface only, so that it builds without a CUDA toolkit and
// links against a CPU build of PyTorch.
#pragma once

#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace geomesh::group {

class DeviceCopies {
 public:
  // Pinned host memory of the tensor's shape and dtype, without values. On the thread of the call.
  at::Tensor HostMemory(const at::Tensor& tensor);
  at::Tensor HostMemory(const at::Tensor& tensor, at::ScalarType type);  // of another dtype
  // Puts a copy of the tensor's values into `host`; there when ReadsDone. Likewise.
  void Read(const at::Tensor& tensor, const at::Tensor& host);

  bool any_reads() const;
  // Never blocks; throws what the device reports.
  bool ReadsDone() const;

  // Puts a copy of `host` into the tensor. Any thread.
  void Write(const at::Tensor& host, const at::Tensor& tensor);

  // What is put on the tensor's device later comes behind what the caller's stream was given by
  // now.
  void Join(const at::Tensor& tensor) { LaneOf(tensor); }

  // The operation's streams, one a device.
  std::vector<c10::Stream> streams() const;

 private:
  struct Lane {
    c10::Stream stream;
    c10::Event read;  // after the last Read
    bool reading = false;
  };
  Lane& LaneOf(const at::Tensor& tensor);

  std::vector<Lane> lanes_;
};

}  // namespace geomesh::group
