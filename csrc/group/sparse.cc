// The sum of sparse tensors: each rank gives as many entries as it has.
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "group/arguments.h"
#include "group/lists.h"
#include "group/operation.h"
#include "group/process_group.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace geomesh::group {
namespace {

// Indices, then values, as bytes: one message a rank.
at::Tensor Pack(const at::Tensor& indices, const at::Tensor& values) {
  at::Tensor bytes =
      at::empty({static_cast<int64_t>(indices.nbytes() + values.nbytes())}, at::kByte);
  auto* to = static_cast<std::byte*>(bytes.mutable_data_ptr());
  if (indices.nbytes() > 0) std::memcpy(to, indices.const_data_ptr(), indices.nbytes());
  if (values.nbytes() > 0)
    std::memcpy(to + indices.nbytes(), values.const_data_ptr(), values.nbytes());
  return bytes;
}

}  // namespace

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::allreduce_sparse(
    Tensors& tensors, const c10d::AllreduceOptions& opts) {
  CheckAlike("all_reduce_sparse", tensors);
  const at::Tensor& tensor = tensors[0];
  Operation op =
      Begin("all_reduce_sparse", "geomesh:sparse_all_reduce", c10d::OpType::_ALLREDUCE_SPARSE,
            absl::StrCat(Describe(tensor), ", ", Describe(opts.reduceOp)));
  const std::string name = op.work.operation;
  TORCH_CHECK(tensor.layout() == at::kSparse, name, ": takes a sparse COO tensor, got layout ",
              tensor.layout());
  TORCH_CHECK(opts.reduceOp.op_ == c10d::ReduceOp::SUM, name,
              ": unsupported reduction operation: sparse tensors take SUM only");
  c10::NoGradGuard no_grad;
  const at::Tensor own = SumOwn(tensors).detach().coalesce();
  const at::Tensor indices = own.indices().to(at::kCPU).contiguous();
  const at::Tensor values = own.values().to(at::kCPU).contiguous();
  const int64_t entries = indices.size(1);

  // How many entries each rank has: known before the entries themselves can be received.
  at::Tensor counts = at::empty({size_}, at::kLong);
  {
    at::Tensor count = at::full({1}, entries, at::kLong);
    c10d::AllgatherOptions gather;
    gather.timeout = opts.timeout;
    _allgather_base(counts, count, gather)->wait();
  }

  const int64_t entry_bytes =
      own.sparse_dim() * static_cast<int64_t>(sizeof(int64_t)) +
      c10::multiply_integers(values.sizes().slice(1)) * static_cast<int64_t>(values.element_size());
  auto gathered = std::make_shared<Tensors>();
  op.work.inputs = op.work.outputs = tensors;
  op.call.input = {ToBytes(op.staging->Source(Pack(indices, values)))};
  for (int rank = 0; rank < size_; ++rank) {
    const int64_t theirs = counts[rank].item<int64_t>();
    gathered->push_back(at::empty({theirs * entry_bytes}, at::kByte));
    op.call.output.push_back(ToBytes(op.staging->Sink(gathered->back())));
  }
  op.shape = {.collective = plan::Collective::kAllGather, .bytes = 0};
  op.fingerprint.Add(static_cast<uint64_t>(tensor.scalar_type()))
      .Add(own.sparse_dim())
      .Add(own.dense_dim());
  for (const int64_t size : tensor.sizes()) op.fingerprint.Add(size);
  op.after = [gathered, counts, tensors, sparse_dim = own.sparse_dim(),
              entry_sizes = values.sizes().slice(1).vec(), type = tensor.scalar_type()]() mutable {
    c10::NoGradGuard no_grad;
    Tensors all_indices, all_values;
    for (size_t rank = 0; rank < gathered->size(); ++rank) {
      const int64_t entries = counts[static_cast<int64_t>(rank)].item<int64_t>();
      const at::Tensor& bytes = (*gathered)[rank];
      const int64_t split = entries * sparse_dim * static_cast<int64_t>(sizeof(int64_t));
      std::vector<int64_t> sizes = {entries};
      sizes.insert(sizes.end(), entry_sizes.begin(), entry_sizes.end());
      at::Tensor rank_indices = at::empty({sparse_dim, entries}, at::kLong);
      at::Tensor rank_values = at::empty(sizes, at::TensorOptions().dtype(type));
      const auto* from = static_cast<const std::byte*>(bytes.const_data_ptr());
      if (split > 0) std::memcpy(rank_indices.mutable_data_ptr(), from, split);
      if (rank_values.nbytes() > 0)
        std::memcpy(rank_values.mutable_data_ptr(), from + split, rank_values.nbytes());
      all_indices.push_back(std::move(rank_indices));
      all_values.push_back(std::move(rank_values));
    }
    // Entries of one place are added in the order of ranks, on all of them.
    const at::Tensor sum =
        at::sparse_coo_tensor(at::cat(all_indices, 1), at::cat(all_values), tensors[0].sizes())
            .coalesce();
    CopyToAll(sum, tensors);
  };
  return Launch(std::move(op), opts.timeout);
}

}  // namespace geomesh::group
