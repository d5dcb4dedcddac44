// What the methods of a group ask of their arguments, and say about them in errors. Throws
// c10::Error naming the operation.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "exec/executor.h"
#include "group/tensors.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace geomesh::group {

// "Float[2,3]".
std::string Describe(const at::Tensor& tensor);
// "SUM".
std::string Describe(const c10d::ReduceOp& op);

// Where Gloo's text says what is wrong, ours begins with it: scripts look for it.
//
// `what`: "input ", "output " or nothing.
const at::Tensor& Single(const std::vector<at::Tensor>& tensors, const char* name,
                         const char* what = "");
// `what`: "input" or "output".
void CheckCount(const std::string& operation, const char* what, size_t count, int size);
void CheckType(const std::string& operation, const at::Tensor& input, const at::Tensor& output);
// Results that share memory would depend on the order in which they arrive.
void CheckApart(const std::string& operation, const std::vector<at::Tensor>& results);
// Likewise for a result and another rank's input of the same call.
void CheckApart(const std::string& operation, const at::Tensor& result, const at::Tensor& input);
// The same elements in the same order: a rank's own part may be both input and result.
bool SameMemory(const at::Tensor& result, const at::Tensor& input);
// The input may be this rank's own part, which begins at byte `own`, of `output`, whose elements
// arrive in `memory`: the output itself or a stand-in.
void CheckOwnPart(const std::string& operation, const at::Tensor& output, const at::Tensor& memory,
                  const at::Tensor& input, int64_t own);

// What values of a dtype with which no processor computes are reduced in; others in their own.
at::ScalarType ComputeType(at::ScalarType type);

// A reduction's memory. Sets the call's op and dtype.
//
// Complex sums and means run on pairs of reals. Dtypes with which no processor computes run in a
// wider one, and are rounded once, at the end: float8 in float32; unsigned integers of 16 and 32
// bits in the next signed one. PREMUL_SUM multiplies what this rank gives.
class Reduction {
 public:
  Reduction(exec::Call* call, Staging* staging, const c10d::ReduceOp& op, at::ScalarType type,
            std::string operation);

  at::Tensor Source(const at::Tensor& tensor) const;
  at::Tensor Sink(const at::Tensor& tensor) const;
  at::Tensor InPlace(const at::Tensor& tensor) const;

 private:
  at::Tensor Given(const at::Tensor& tensor) const;
  at::Tensor Reals(const at::Tensor& memory) const;

  Staging* const staging_;
  const c10d::ReduceOp op_;
  const std::string operation_;
  at::ScalarType type_;  // in which it runs
};

}  // namespace geomesh::group
