// From at::Tensor to the executor's blocks and back: what is refused, what is copied, and when.
//
// The executor moves contiguous CPU memory. A tensor that already is that is used in place. Any
// other layout, and any CUDA tensor, goes through a contiguous CPU copy ("staging"), which is
// copied back into the original when the operation is done. So results always arrive through the
// caller's own view, whatever its strides. Copies from and to a GPU are put on streams and not
// waited for here: memory of a CUDA tensor has its values when ReadsDone, and what CopyBack wrote
// is ordered by streams().
#pragma once

#include <string>
#include <vector>

#include "base/dtype.h"
#include "exec/executor.h"
#include "group/device_copies.h"

#include <ATen/ATen.h>

namespace geomesh::group {

// The tensors of one operation while it runs.
class Staging {
 public:
  explicit Staging(std::string operation) : operation_(std::move(operation)) {}

  // Throws for a tensor that can't be taken, or can't be written to.
  void Check(const at::Tensor& tensor, bool written) const;

  // Memory with the tensor's values, for reading.
  at::Tensor Source(const at::Tensor& tensor);
  // Memory that becomes the tensor's values; of the tensor's dtype, or of another one that is
  // converted at the end.
  at::Tensor Sink(const at::Tensor& tensor);
  at::Tensor Sink(const at::Tensor& tensor, at::ScalarType type);
  // Both.
  at::Tensor InPlace(const at::Tensor& tensor);
  // Memory with `values` (of the tensor's shape, a copy on its device) that becomes the tensor's.
  at::Tensor InPlace(const at::Tensor& tensor, const at::Tensor& values);

  // For a tensor that is written at the end by other means, on streams().
  void Join(const at::Tensor& tensor) {
    if (tensor.is_cuda()) copies_.Join(tensor);
  }

  // Whether some memory is still on its way from a GPU. ReadsDone never blocks; it throws what the
  // GPU reports.
  bool any_reads() const { return copies_.any_reads(); }
  bool ReadsDone() const { return copies_.ReadsDone(); }
  // Where copies to and from GPUs are put; empty where all tensors are on the CPU.
  std::vector<c10::Stream> streams() const { return copies_.streams(); }

  // Whether the call's own memory is used, so that nothing is to be written back.
  bool direct() const { return back_.empty() && copies_.streams().empty(); }
  // Writes staged results back. Once, when the operation succeeded; on a thread that may take
  // Python's lock.
  void CopyBack();
  // Lets go of every tensor; likewise.
  void Release();

 private:
  struct Pair {
    at::Tensor original;
    at::Tensor staged;
  };

  const std::string operation_;
  DeviceCopies copies_;
  std::vector<Pair> back_;
  std::vector<at::Tensor> kept_;
};

// For reductions. Complex tensors of a sum or mean are passed as pairs of reals by the caller.
DType ToDType(at::ScalarType type, const std::string& operation);

// A whole contiguous CPU tensor as elements of its dtype, or as plain bytes where nothing is
// computed.
exec::Block ToBlock(const at::Tensor& tensor);
exec::Block ToBytes(const at::Tensor& tensor);

}  // namespace geomesh::group
