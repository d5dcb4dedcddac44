#include "group/lists.h"

#include "group/arguments.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace geomesh::group {
namespace {

// Adding many in half precision would round many times.
at::ScalarType WideType(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : ComputeType(type);
}

}  // namespace

void CheckAlike(const std::string& operation, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(!tensors.empty(), operation, ": requires non-empty tensor list");
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.defined(), operation, ": a tensor is undefined");
    TORCH_CHECK(tensor.layout() == tensors[0].layout(), operation,
                ": invalid tensor layout: ", tensor.layout(), ", that of the list's first is ",
                tensors[0].layout());
    TORCH_CHECK(tensor.scalar_type() == tensors[0].scalar_type(), operation,
                ": invalid tensor type: ", tensor.scalar_type(), ", that of the list's first is ",
                tensors[0].scalar_type());
    TORCH_CHECK(tensor.sizes() == tensors[0].sizes(), operation,
                ": invalid tensor size: ", tensor.sizes(), ", that of the list's first is ",
                tensors[0].sizes());
  }
}

at::Tensor ReduceOwn(const std::string& operation, const std::vector<at::Tensor>& tensors,
                     const c10d::ReduceOp& op) {
  if (tensors.size() == 1) return tensors[0];
  c10::NoGradGuard no_grad;
  const at::ScalarType type = tensors[0].scalar_type();
  at::Tensor own = tensors[0].detach().to(WideType(type), /*non_blocking=*/false, /*copy=*/true);
  for (size_t i = 1; i < tensors.size(); ++i) {
    const at::Tensor next = tensors[i].detach().to(own.device(), own.scalar_type());
    switch (op.op_) {
      case c10d::ReduceOp::SUM:
        own = own.add(next);
        break;
      case c10d::ReduceOp::PRODUCT:
        own = own.mul(next);
        break;
      case c10d::ReduceOp::MIN:
        own = at::minimum(own, next);
        break;
      case c10d::ReduceOp::MAX:
        own = at::maximum(own, next);
        break;
      case c10d::ReduceOp::BAND:
        own = own.bitwise_and(next);
        break;
      case c10d::ReduceOp::BOR:
        own = own.bitwise_or(next);
        break;
      case c10d::ReduceOp::BXOR:
        own = own.bitwise_xor(next);
        break;
      default:
        TORCH_CHECK(false, operation,
                    ": AVG and PREMUL_SUM take one tensor a rank; reduce the list's ",
                    tensors.size(), " tensors first");
    }
  }
  return own.to(type);
}

at::Tensor SumOwn(const std::vector<at::Tensor>& tensors) {
  c10::NoGradGuard no_grad;
  at::Tensor sum = tensors[0];
  for (size_t i = 1; i < tensors.size(); ++i) sum = sum.detach().add(tensors[i].detach());
  return sum;
}

void CopyToAll(const at::Tensor& from, const std::vector<at::Tensor>& tensors) {
  c10::NoGradGuard no_grad;
  for (const at::Tensor& tensor : tensors) {
    // A detached sparse tensor would keep the values to itself.
    if (!tensor.is_same(from)) at::Tensor(tensor).copy_(from);
  }
}

}  // namespace geomesh::group
