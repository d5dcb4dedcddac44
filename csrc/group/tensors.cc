#include "group/tensors.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/MemoryOverlap.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace geomesh::group {

namespace {

// Whether two elements share memory. at::has_internal_overlap gives up where dimensions interleave.
bool Overlaps(const at::Tensor& tensor) {
  const at::MemOverlap known = at::has_internal_overlap(tensor);
  if (known != at::MemOverlap::TooHard) return known == at::MemOverlap::Yes;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size, the innermost first
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t last = 0;  // offset of the last element of the dimensions before
  bool nested = true;
  for (const auto& [stride, size] : dims) {
    nested = nested && stride > last;
    last += stride * (size - 1);
  }
  if (nested || tensor.numel() == 0) return false;
  // Rare: count.
  std::vector<bool> taken(last + 1);
  std::vector<int64_t> index(dims.size());
  for (int64_t i = 0, offset = 0; i < tensor.numel(); ++i) {
    if (taken[offset]) return true;
    taken[offset] = true;
    for (size_t d = 0; d < dims.size(); ++d) {
      offset += dims[d].first;
      if (++index[d] < dims[d].second) break;
      offset -= dims[d].first * dims[d].second;
      index[d] = 0;
    }
  }
  return false;
}

}  // namespace

void Staging::Check(const at::Tensor& tensor, bool written) const {
  TORCH_CHECK(tensor.defined(), operation_, ": a tensor is undefined");
  TORCH_CHECK(tensor.layout() == at::kStrided, operation_,
              ": takes dense tensors, got one with layout ", tensor.layout(),
              "; use its dense form or its indices and values");
  TORCH_CHECK(tensor.is_cpu() || tensor.is_cuda(), operation_,
              ": takes tensors on cpu or cuda, got one on ", tensor.device());
  TORCH_CHECK(!written || !Overlaps(tensor), operation_,
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
      TORCH_CHECK(false, operation,
                  ": reductions take floating-point, complex, integer and bool tensors, not ",
                  type);
  }
}

exec::Block ToBlock(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.numel()};
}

exec::Block ToBytes(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), static_cast<int64_t>(tensor.nbytes())};
}

}  // namespace geomesh::group
