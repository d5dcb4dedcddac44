#include "group/tensors.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace geomesh::group {

void Staging::Check(const at::Tensor& tensor, bool written) const {
  TORCH_CHECK(tensor.defined(), operation_, ": a tensor is undefined");
  TORCH_CHECK(tensor.layout() == at::kStrided, operation_,
              ": takes dense tensors, got one with layout ", tensor.layout(),
              "; use its dense form or its indices and values");
  TORCH_CHECK(tensor.is_cpu() || tensor.is_cuda(), operation_,
              ": takes tensors on cpu or cuda, got one on ", tensor.device());
  TORCH_CHECK(!written || at::has_internal_overlap(tensor) != at::MemOverlap::Yes, operation_,
              ": the result would be written to a tensor several of whose elements share memory "
              "(an expanded one?): shape ",
              tensor.sizes(), ", strides ", tensor.strides(), ". Pass tensor.contiguous()");
}

at::Tensor Staging::Source(const at::Tensor& tensor) {
  Check(tensor, /*written=*/false);
  if (tensor.is_cuda()) {
    at::Tensor staged = copies_.HostMemory(tensor);
    copies_.Read(tensor.detach(), staged);
    kept_.push_back(staged);
    return staged;
  }
  at::Tensor memory = tensor.detach().resolve_conj().resolve_neg().contiguous();
  kept_.push_back(memory);
  return memory;
}

at::Tensor Staging::Sink(const at::Tensor& tensor) {
  Check(tensor, /*written=*/true);
  if (tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
    kept_.push_back(tensor);
    return tensor.detach();
  }
  at::Tensor staged =
      tensor.is_cuda()
          ? copies_.HostMemory(tensor)
          : at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  back_.push_back({tensor, staged});
  return staged;
}

at::Tensor Staging::Sink(const at::Tensor& tensor, at::ScalarType type) {
  if (tensor.scalar_type() == type) return Sink(tensor);
  Check(tensor, /*written=*/true);
  at::Tensor staged = tensor.is_cuda()
                          ? copies_.HostMemory(tensor, type)
                          : at::empty(tensor.sizes(), at::TensorOptions(at::kCPU).dtype(type));
  back_.push_back({tensor, staged});
  return staged;
}

at::Tensor Staging::InPlace(const at::Tensor& tensor, const at::Tensor& values) {
  Check(tensor, /*written=*/true);
  at::Tensor memory = Source(values);
  back_.push_back({tensor, memory});
  return memory;
}

at::Tensor Staging::InPlace(const at::Tensor& tensor) {
  at::Tensor memory = Sink(tensor);
  if (tensor.is_cuda()) {
    copies_.Read(tensor.detach(), memory);
  } else if (!back_.empty() && back_.back().staged.is_same(memory)) {
    memory.copy_(tensor.detach());
  }
  return memory;
}

void Staging::CopyBack() {
  c10::NoGradGuard no_grad;
  for (const Pair& pair : back_) {
    if (pair.original.is_cuda()) {
      copies_.Write(pair.staged, pair.original.detach());
    } else {
      pair.original.detach().copy_(pair.staged);
    }
  }
}

void Staging::Release() {
  back_.clear();
  kept_.clear();
}

DType ToDType(at::ScalarType type, const std::string& operation) {
  switch (type) {
    case at::kFloat:
      return DType::kF32;
    case at::kDouble:
      return DType::kF64;
    case at::kHalf:
      return DType::kF16;
    case at::kBFloat16:
      return DType::kBF16;
    case at::kChar:
      return DType::kI8;
    case at::kShort:
      return DType::kI16;
    case at::kInt:
      return DType::kI32;
    case at::kLong:
      return DType::kI64;
    case at::kByte:
      return DType::kU8;
    case at::kBool:
      return DType::kBool;
    case at::kUInt16:
      return DType::kU16;
    case at::kUInt32:
      return DType::kU32;
    case at::kUInt64:
      return DType::kU64;
    default:
      TORCH_CHECK(
          false, operation,
          ": reductions take floating-point, complex, integer and bool tensors, not ", type);
  }
}

exec::Block ToBlock(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.numel()};
}

exec::Block ToBytes(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), static_cast<int64_t>(tensor.nbytes())};
}

}  // namespace geomesh::group
