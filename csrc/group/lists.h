// Lists of several tensors a rank, as Gloo takes them: all of one layout, dtype and size. One
// tensor goes over the network, and the others of the list are made of it, or it of them. Throws
// c10::Error naming the operation.
#pragma once

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace geomesh::group {

// Throws unless the tensors are alike, and at least one.
void CheckAlike(const std::string& operation, const std::vector<at::Tensor>& tensors);

// The reduction of a rank's own dense tensors, in memory of its own, rounded once; of a single
// tensor, itself. Throws for AVG and PREMUL_SUM, which count ranks, where there are several.
at::Tensor ReduceOwn(const std::string& operation, const std::vector<at::Tensor>& tensors,
                     const c10d::ReduceOp& op);

// The sum of a rank's own sparse tensors; of a single one, itself.
at::Tensor SumOwn(const std::vector<at::Tensor>& tensors);

// Makes all of them equal to `from`, which may be one of them.
void CopyToAll(const at::Tensor& from, const std::vector<at::Tensor>& tensors);

}  // namespace geomesh::group
