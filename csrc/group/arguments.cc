#include "group/arguments.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "exec/reduce.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

namespace geomesh::group {

std::string Describe(const at::Tensor& tensor) {
  return absl::StrCat(c10::toString(tensor.scalar_type()), "[", absl::StrJoin(tensor.sizes(), ","),
                      "]");
}

std::string Describe(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return "SUM";
    case c10d::ReduceOp::AVG:
      return "AVG";
    case c10d::ReduceOp::PRODUCT:
      return "PRODUCT";
    case c10d::ReduceOp::MIN:
      return "MIN";
    case c10d::ReduceOp::MAX:
      return "MAX";
    case c10d::ReduceOp::BAND:
      return "BAND";
    case c10d::ReduceOp::BOR:
      return "BOR";
    case c10d::ReduceOp::BXOR:
      return "BXOR";
    case c10d::ReduceOp::PREMUL_SUM:
      return "PREMUL_SUM";
    default:
      return absl::StrCat("reduction ", static_cast<int>(op.op_));
  }
}

const at::Tensor& Single(const std::vector<at::Tensor>& tensors, const char* name,
                         const char* what) {
  TORCH_CHECK(tensors.size() == 1, name, ": requires a single-element ", what,
              "tensor list, got one of ", tensors.size());
  TORCH_CHECK(tensors[0].defined(), name, ": the tensor is undefined");
  return tensors[0];
}

void CheckCount(const std::string& operation, const char* what, size_t count, int size) {
  const char* capital = what[0] == 'i' ? "Input" : "Output";
  TORCH_CHECK(count == static_cast<size_t>(size), operation, ": Incorrect ", what, " list size ",
              count, ". ", capital, " list size should be ", size, ", one ", what, " a rank");
}

void CheckType(const std::string& operation, const at::Tensor& input, const at::Tensor& output) {
  TORCH_CHECK(input.defined() && output.defined(), operation, ": a tensor is undefined");
  TORCH_CHECK(input.scalar_type() == output.scalar_type(), operation,
              ": invalid tensor type: input and output differ in dtype: ", input.scalar_type(),
              " and ", output.scalar_type());
}

namespace {

// The bytes a strided tensor lies between; a dense one fills them.
struct Extent {
  const char* begin = nullptr;
  const char* end = nullptr;
};

Extent ExtentOf(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.numel() == 0) return {};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size())};
}

}  // namespace

void CheckApart(const std::string& operation, const std::vector<at::Tensor>& results) {
  // Only neighbours in memory can overlap where all before do not.
  std::vector<std::pair<Extent, size_t>> extents;
  for (size_t i = 0; i < results.size(); ++i) {
    const Extent extent = ExtentOf(results[i]);
    if (extent.begin != extent.end) extents.emplace_back(extent, i);
  }
  std::sort(extents.begin(), extents.end(),
            [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
  for (size_t i = 1; i < extents.size(); ++i) {
    const size_t a = extents[i - 1].second, b = extents[i].second;
    if (extents[i].first.begin >= extents[i - 1].first.end) continue;
    // Interleaved ones (columns of a matrix) need not share an element.
    const at::MemOverlapStatus status = at::get_overlap_status(results[a], results[b]);
    TORCH_CHECK(status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial,
                operation, ": outputs ", std::min(a, b), " and ", std::max(a, b),
                " share memory, so what one rank sent would overwrite what another did; pass "
                "separate tensors");
  }
}

void CheckApart(const std::string& operation, const at::Tensor& result, const at::Tensor& input) {
  const Extent a = ExtentOf(result), b = ExtentOf(input);
  TORCH_CHECK(a.begin == a.end || b.begin == b.end || a.end <= b.begin || b.end <= a.begin,
              operation,
              ": the input lies where another rank's result goes to; pass a copy (clone()), or "
              "the part of the output that is this rank's own");
}

bool SameMemory(const at::Tensor& result, const at::Tensor& input) {
  if (result.const_data_ptr() != input.const_data_ptr() || result.numel() != input.numel())
    return false;
  return (result.is_contiguous() && input.is_contiguous()) ||
         (result.sizes() == input.sizes() && result.strides() == input.strides());
}

void CheckOwnPart(const std::string& operation, const at::Tensor& output, const at::Tensor& memory,
                  const at::Tensor& input, int64_t own) {
  if (memory.const_data_ptr() != output.const_data_ptr()) return;
  const auto* part = static_cast<const std::byte*>(memory.const_data_ptr()) + own;
  if (input.const_data_ptr() != part || !input.is_contiguous())
    CheckApart(operation, output, input);
}

namespace {

exec::ReduceOp ToReduceOp(const c10d::ReduceOp& op, const std::string& operation) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PREMUL_SUM:
      return exec::ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return exec::ReduceOp::kAvg;
    case c10d::ReduceOp::PRODUCT:
      return exec::ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      return exec::ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return exec::ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      return exec::ReduceOp::kBand;
    case c10d::ReduceOp::BOR:
      return exec::ReduceOp::kBor;
    case c10d::ReduceOp::BXOR:
      return exec::ReduceOp::kBxor;
    default:
      TORCH_CHECK(false, operation,
                  ": takes SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR and PREMUL_SUM");
  }
}

}  // namespace

at::ScalarType ComputeType(at::ScalarType type) {
  return c10::isFloat8Type(type) ? at::kFloat : type;
}

Reduction::Reduction(exec::Call* call, Staging* staging, const c10d::ReduceOp& op,
                     at::ScalarType type, std::string operation)
    : staging_(staging), op_(op), operation_(std::move(operation)), type_(ComputeType(type)) {
  TORCH_CHECK(!c10::isComplexType(type) || c10d::isComplexViewAsRealAllowed(op), operation_,
              ": complex tensors take SUM, AVG and PREMUL_SUM only");
  TORCH_CHECK(op.op_ != c10d::ReduceOp::PREMUL_SUM || c10::isFloatingType(type) ||
                  c10::isComplexType(type) || c10::isFloat8Type(type),
              operation_, ": PREMUL_SUM takes floating-point and complex tensors, got ", type);
  call->op = ToReduceOp(op, operation_);
  call->dtype =
      ToDType(c10::isComplexType(type_) ? c10::toRealValueType(type_) : type_, operation_);
  const absl::Status status = exec::Supported(call->op, call->dtype);
  TORCH_CHECK(status.ok(), operation_, ": ", std::string(status.message()),
              c10::isFloat8Type(type) ? " (float8 is reduced as float32)" : "");
}

// The values that this rank gives; the tensor itself where they are its own.
at::Tensor Reduction::Given(const at::Tensor& tensor) const {
  at::Tensor given = tensor;
  if (op_.op_ == c10d::ReduceOp::PREMUL_SUM) {
    const auto* factor = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op_.supplement_.get());
    TORCH_CHECK(factor != nullptr, operation_, ": PREMUL_SUM without its factor");
    given = given.detach().to(type_);
    given = factor->tensor_factor.defined()
                ? given.mul(factor->tensor_factor.detach().to(given.device()))
                : given.mul(factor->double_factor);
  }
  return given.scalar_type() == type_ ? given : given.detach().to(type_);
}

at::Tensor Reduction::Reals(const at::Tensor& memory) const {
  return memory.is_complex() ? at::view_as_real(memory) : memory;
}

at::Tensor Reduction::Source(const at::Tensor& tensor) const {
  staging_->Check(tensor, /*written=*/false);
  return Reals(staging_->Source(Given(tensor)));
}

at::Tensor Reduction::Sink(const at::Tensor& tensor) const {
  return Reals(staging_->Sink(tensor, type_));
}

at::Tensor Reduction::InPlace(const at::Tensor& tensor) const {
  staging_->Check(tensor, /*written=*/true);
  const at::Tensor given = Given(tensor);
  return Reals(given.is_same(tensor) ? staging_->InPlace(tensor)
                                     : staging_->InPlace(tensor, given));
}

}  // namespace geomesh::group
