// The collectives on dense tensors: each method says what its tensors are to the program.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "group/arguments.h"
#include "group/lists.h"
#include "group/operation.h"
#include "group/process_group.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace geomesh::group {

using plan::Collective;

namespace {

std::string WithOp(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  return absl::StrCat(Describe(tensor), ", ", Describe(op));
}

// The tensors' elements one after the other, as one tensor that is staged like any other.
at::Tensor Flatten(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& tensor : tensors)
    flat.push_back(tensor.detach().reshape({-1}).to(at::kCPU));
  return at::cat(flat);
}

// What a tensor takes of a buffer in which each begins where any dtype may.
int64_t PlaceBytes(const at::Tensor& tensor) {
  return (static_cast<int64_t>(tensor.nbytes()) + 15) / 16 * 16;
}

int64_t FlatBytes(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += PlaceBytes(tensor);
  return bytes;
}

// Calls `visit` with each tensor and its place in `flat`, in its dtype and shape.
template <typename Visit>
void ForEachPlace(const std::vector<at::Tensor>& tensors, const at::Tensor& flat, Visit visit) {
  c10::NoGradGuard no_grad;
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    const int64_t bytes = static_cast<int64_t>(tensor.nbytes());
    if (bytes > 0) {
      visit(tensor.detach(),
            flat.narrow(0, offset, bytes).view(tensor.scalar_type()).view(tensor.sizes()));
    }
    offset += PlaceBytes(tensor);
  }
}

void CopyIn(const std::vector<at::Tensor>& tensors, const at::Tensor& flat) {
  ForEachPlace(tensors, flat,
               [](const at::Tensor& tensor, at::Tensor place) { place.copy_(tensor); });
}

void CopyOut(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  ForEachPlace(tensors, flat,
               [](at::Tensor tensor, const at::Tensor& place) { tensor.copy_(place); });
}

}  // namespace

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::LaunchAll(std::vector<Operation> operations,
                                                         Tensors outputs,
                                                         std::chrono::milliseconds timeout) {
  if (operations.size() == 1) return Launch(std::move(operations[0]), timeout);
  std::vector<c10::intrusive_ptr<WorkGeoMesh>> works;
  for (Operation& operation : operations) works.push_back(Launch(std::move(operation), timeout));
  return Join(std::move(works), std::move(outputs));
}

// ---- one buffer, in place ----

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::broadcast(Tensors& tensors,
                                                         const c10d::BroadcastOptions& opts) {
  const int64_t count = static_cast<int64_t>(tensors.size());
  TORCH_CHECK(opts.rootTensor >= 0 && opts.rootTensor < count,
              "broadcast: invalid root tensor: ", opts.rootTensor, " of a list of ", count);
  CheckAlike("broadcast", tensors);
  const at::Tensor tensor = tensors[opts.rootTensor];
  Operation op = Begin("broadcast", "geomesh:broadcast", c10d::OpType::BROADCAST,
                       absl::StrCat(Describe(tensor), ", root ", JobRank(opts.rootRank)));
  const int root = CheckRoot(op.work.operation, opts.rootRank);
  op.work.inputs = op.work.outputs = tensors;
  // Also at the root, which writes nothing: all ranks refuse, or none.
  for (const at::Tensor& each : tensors) op.staging->Check(each, /*written=*/true);
  if (count > 1) {
    for (const at::Tensor& each : tensors) op.staging->Join(each);
    CheckApart(op.work.operation, tensors);
    op.after = [tensor, tensors] { CopyToAll(tensor, tensors); };
  }
  at::Tensor memory = root == rank_ ? op.staging->Source(tensor) : op.staging->Sink(tensor);
  op.call.output = {ToBytes(memory)};
  op.shape = {.collective = Collective::kBroadcast,
              .bytes = static_cast<int64_t>(memory.nbytes()),
              .root = root};
  op.fingerprint.Add(root).Add(static_cast<uint64_t>(tensor.scalar_type())).Add(tensor.numel());
  return Launch(std::move(op), opts.timeout);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::allreduce(Tensors& tensors,
                                                         const c10d::AllreduceOptions& opts) {
  CheckAlike("all_reduce", tensors);
  if (tensors[0].layout() == at::kSparse) return allreduce_sparse(tensors, opts);
  Operation op = Begin("all_reduce", "geomesh:all_reduce", c10d::OpType::ALLREDUCE,
                       WithOp(tensors[0], opts.reduceOp));
  op.work.inputs = op.work.outputs = tensors;
  const Reduction reduction(&op.call, op.staging.get(), opts.reduceOp, tensors[0].scalar_type(),
                            op.work.operation);
  for (const at::Tensor& each : tensors) op.staging->Check(each, /*written=*/true);
  const at::Tensor tensor = ReduceOwn(op.work.operation, tensors, opts.reduceOp);
  if (tensors.size() > 1) {
    CheckApart(op.work.operation, tensors);
    for (const at::Tensor& each : tensors) op.staging->Join(each);
    op.after = [tensor, tensors] { CopyToAll(tensor, tensors); };
  }
  at::Tensor memory = reduction.InPlace(tensor);
  op.call.output = {ToBlock(memory)};
  op.shape = {.collective = Collective::kAllReduce, .bytes = static_cast<int64_t>(memory.nbytes())};
  op.fingerprint.Add(static_cast<uint64_t>(tensor.scalar_type()))
      .Add(tensor.numel())
      .Add(opts.reduceOp.op_);
  return Launch(std::move(op), opts.timeout);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  TORCH_CHECK(!tensors.empty(), "all_reduce_coalesced: requires non-empty tensor list");
  Operation op = Begin(
      "all_reduce_coalesced", "geomesh:all_reduce_coalesced", c10d::OpType::ALLREDUCE_COALESCED,
      absl::StrCat(tensors.size(), " tensors, first ", WithOp(tensors[0], opts.reduceOp)));
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK(tensors[i].defined(), op.work.operation, ": a tensor is undefined");
    TORCH_CHECK(tensors[i].layout() == tensors[0].layout(), op.work.operation,
                ": invalid tensor layout at index ", i, ": ", tensors[i].layout(),
                ", that of the first is ", tensors[0].layout());
    TORCH_CHECK(tensors[i].layout() == at::kStrided, op.work.operation,
                ": unsupported layout: ", tensors[i].layout(), "; pass sparse tensors one by one");
    TORCH_CHECK(tensors[i].scalar_type() == tensors[0].scalar_type(), op.work.operation,
                ": tensors must all have the same type: ", tensors[0].scalar_type(), " and ",
                tensors[i].scalar_type());
    op.staging->Check(tensors[i], /*written=*/true);
  }
  at::Tensor flat = Flatten(tensors);
  const Reduction reduction(&op.call, op.staging.get(), opts.reduceOp, flat.scalar_type(),
                            op.work.operation);
  at::Tensor memory = reduction.InPlace(flat);
  op.work.inputs = op.work.outputs = tensors;
  op.call.output = {ToBlock(memory)};
  op.shape = {.collective = Collective::kAllReduce, .bytes = static_cast<int64_t>(memory.nbytes())};
  op.fingerprint.Add(static_cast<uint64_t>(flat.scalar_type()))
      .Add(flat.numel())
      .Add(opts.reduceOp.op_);
  op.after = [flat, tensors]() mutable {
    c10::NoGradGuard no_grad;
    int64_t offset = 0;
    for (at::Tensor& tensor : tensors) {
      tensor.detach().copy_(flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
      offset += tensor.numel();
    }
  };
  return Launch(std::move(op), opts.timeout);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::reduce(Tensors& tensors,
                                                      const c10d::ReduceOptions& opts) {
  TORCH_CHECK(opts.rootTensor >= 0 && opts.rootTensor < static_cast<int64_t>(tensors.size()),
              "reduce: invalid root tensor: ", opts.rootTensor, " of a list of ", tensors.size());
  const at::Tensor& tensor = Single(tensors, "reduce");
  Operation op =
      Begin("reduce", "geomesh:reduce", c10d::OpType::REDUCE,
            absl::StrCat(WithOp(tensor, opts.reduceOp), ", root ", JobRank(opts.rootRank)));
  const int root = CheckRoot(op.work.operation, opts.rootRank);
  op.staging->Check(tensor, /*written=*/true);  // on all ranks, or on none
  op.work.inputs = op.work.outputs = {tensor};
  const Reduction reduction(&op.call, op.staging.get(), opts.reduceOp, tensor.scalar_type(),
                            op.work.operation);
  at::Tensor memory = root == rank_ ? reduction.InPlace(tensor) : reduction.Source(tensor);
  op.call.output = {ToBlock(memory)};
  op.shape = {.collective = Collective::kReduce,
              .bytes = static_cast<int64_t>(memory.nbytes()),
              .root = root};
  op.fingerprint.Add(root)
      .Add(static_cast<uint64_t>(tensor.scalar_type()))
      .Add(tensor.numel())
      .Add(opts.reduceOp.op_);
  return Launch(std::move(op), opts.timeout);
}

// ---- gathering ----

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::allgather(std::vector<Tensors>& outputs,
                                                         Tensors& inputs,
                                                         const c10d::AllgatherOptions& opts) {
  TORCH_CHECK(!inputs.empty(), "all_gather: requires non-empty input tensor list");
  TORCH_CHECK(outputs.size() == inputs.size(),
              "all_gather: requires input/output tensor lists to have the same length: one list of "
              "outputs for each of ",
              inputs.size(), " inputs, got ", outputs.size());
  for (const Tensors& list : outputs) {
    TORCH_CHECK(list.size() == inputs.size() * size_, "all_gather: invalid output tensor list of ",
                list.size(), ": takes ", inputs.size(), " for each of ", size_, " ranks");
  }
  if (inputs.size() > 1) {
    CheckAlike("all_gather", inputs);
    std::vector<Tensors> of_rank(size_);
    for (size_t i = 0; i < outputs[0].size(); ++i)
      of_rank[i / inputs.size()].push_back(outputs[0][i]);
    Operation op = GatherLists("all_gather", c10d::OpType::ALLGATHER, of_rank, inputs);
    for (size_t list = 0; list < outputs.size(); ++list) {
      for (const at::Tensor& output : outputs[list]) {
        CheckAlike(op.work.operation, {inputs[0], output});
        if (list == 0) continue;  // done by GatherLists
        op.staging->Check(output, /*written=*/true);
        op.staging->Join(output);
        op.work.outputs.push_back(output);
      }
    }
    CheckApart(op.work.operation, op.work.outputs);
    op.work.output_lists = outputs.size();
    op.after = [first = std::move(op.after), outputs] {
      first();
      c10::NoGradGuard no_grad;
      for (size_t list = 1; list < outputs.size(); ++list) {
        for (size_t i = 0; i < outputs[list].size(); ++i)
          outputs[list][i].detach().copy_(outputs[0][i].detach());
      }
    };
    return Launch(std::move(op), opts.timeout);
  }
  const at::Tensor& input = inputs[0];
  Operation op =
      Begin("all_gather", "geomesh:all_gather", c10d::OpType::ALLGATHER, Describe(input));
  op.work.inputs = {input};
  op.work.outputs = outputs[0];
  op.call.input = {ToBytes(op.staging->Source(input))};
  bool even = true;
  for (int r = 0; r < size_; ++r) {
    const at::Tensor& output = outputs[0][r];
    CheckType(op.work.operation, input, output);
    TORCH_CHECK(r != rank_ || output.numel() == input.numel(), op.work.operation,
                ": invalid tensor size: output ", r, " has ", output.numel(),
                " elements, the input that goes there has ", input.numel());
    even = even && output.numel() == input.numel();
    op.call.output.push_back(ToBytes(op.staging->Sink(output)));
  }
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ || !SameMemory(outputs[0][r], input))
      CheckApart(op.work.operation, outputs[0][r], input);
  }
  CheckApart(op.work.operation, outputs[0]);
  // Ranks may see uneven outputs differently only by an error, which the sizes of messages show.
  op.shape = {.collective = Collective::kAllGather,
              .bytes = even ? static_cast<int64_t>(input.nbytes()) : 0};
  op.fingerprint.Add(static_cast<uint64_t>(input.scalar_type()));
  for (const at::Tensor& output : outputs[0]) op.fingerprint.Add(output.numel());
  return Launch(std::move(op), opts.timeout);
}

ProcessGroupGeoMesh::Operation ProcessGroupGeoMesh::GatherInto(at::Tensor& output,
                                                               at::Tensor& input) {
  Operation op = Begin("all_gather_single", "geomesh:_all_gather_base",
                       c10d::OpType::_ALLGATHER_BASE, Describe(input));
  CheckType(op.work.operation, input, output);
  TORCH_CHECK(output.numel() == input.numel() * size_, op.work.operation, ": the output has ",
              output.numel(), " elements, but ", size_, " ranks times ", input.numel(),
              " are needed");
  op.work.inputs = {input};
  op.work.outputs = {output};
  at::Tensor from = op.staging->Source(input);
  at::Tensor to = op.staging->Sink(output);
  op.call.input = {ToBytes(from)};
  const int64_t bytes = from.nbytes();
  CheckOwnPart(op.work.operation, output, to, input, rank_ * bytes);
  for (int r = 0; r < size_; ++r)
    op.call.output.push_back({static_cast<std::byte*>(to.data_ptr()) + r * bytes, bytes});
  op.shape = {.collective = Collective::kAllGather, .bytes = bytes};
  op.fingerprint.Add(static_cast<uint64_t>(input.scalar_type())).Add(input.numel());
  return op;
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::_allgather_base(at::Tensor& output,
                                                               at::Tensor& input,
                                                               const c10d::AllgatherOptions& opts) {
  return Launch(GatherInto(output, input), opts.timeout);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  TORCH_CHECK(!inputs.empty() && inputs.size() == outputs.size(),
              "all_gather_single_coalesced: takes as many outputs as inputs, "
              "at least one; got ",
              outputs.size(), " and ", inputs.size());
  std::vector<Operation> operations;
  for (size_t i = 0; i < inputs.size(); ++i)
    operations.push_back(GatherInto(outputs[i], inputs[i]));
  return LaunchAll(std::move(operations), outputs, opts.timeout);
}

// One operation for all of them, through a buffer that has them one after the other.
ProcessGroupGeoMesh::Operation ProcessGroupGeoMesh::GatherLists(const char* name, c10d::OpType type,
                                                                const std::vector<Tensors>& outputs,
                                                                const Tensors& inputs) {
  Operation op = Begin(name, "geomesh:all_gather", type,
                       absl::StrCat(inputs.size(), " tensors, first ", Describe(inputs[0])));
  Tensors all;
  for (int r = 0; r < size_; ++r) {
    TORCH_CHECK(outputs[r].size() == inputs.size(), op.work.operation,
                ": takes as many outputs of each rank as inputs (", inputs.size(), "), got ",
                outputs[r].size(), " of rank ", r);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor &input = inputs[i], &output = outputs[r][i];
      if (r == 0) op.staging->Check(input, /*written=*/false);
      op.staging->Check(output, /*written=*/true);
      op.staging->Join(output);
      TORCH_CHECK(r != rank_ || output.numel() == input.numel(), op.work.operation,
                  ": invalid size of output tensor at index ", i, " of rank ", r, ": ",
                  output.numel(), " elements, the input there has ", input.numel());
      TORCH_CHECK(output.scalar_type() == input.scalar_type(), op.work.operation,
                  ": invalid tensor type at index ", i, " of rank ", r, ": ", output.scalar_type(),
                  ", the input there has ", input.scalar_type());
      all.push_back(output);
    }
  }
  CheckApart(op.work.operation, all);
  op.work.inputs = inputs;
  op.work.outputs = all;
  at::Tensor from = at::zeros({FlatBytes(inputs)}, at::kByte);
  CopyIn(inputs, from);
  std::vector<at::Tensor> to;
  op.call.input = {ToBytes(from)};
  bool even = true;
  for (const Tensors& of_rank : outputs) {
    const at::Tensor& memory = to.emplace_back(at::empty({FlatBytes(of_rank)}, at::kByte));
    even = even && memory.numel() == from.numel();
    op.call.output.push_back(ToBytes(memory));
  }
  op.shape = {.collective = Collective::kAllGather, .bytes = even ? from.numel() : 0};
  for (const at::Tensor& output : all) {
    op.fingerprint.Add(static_cast<uint64_t>(output.scalar_type())).Add(output.numel());
  }
  op.after = [from, to, outputs] {
    for (size_t r = 0; r < to.size(); ++r) CopyOut(to[r], outputs[r]);
  };
  return op;
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::allgather_coalesced(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  TORCH_CHECK(!inputs.empty(), "all_gather_coalesced: requires non-empty input tensor list");
  TORCH_CHECK(outputs.size() == static_cast<size_t>(size_),
              "all_gather_coalesced: output lists should be equal to world size, ", size_, ", got ",
              outputs.size());
  // As Gloo: each rank's tensors are like this rank's. (all_gather takes other sizes.)
  for (const Tensors& list : outputs) {
    for (size_t i = 0; i < std::min(list.size(), inputs.size()); ++i) {
      if (!list[i].defined() || !inputs[i].defined()) continue;  // refused below, by name
      TORCH_CHECK(list[i].scalar_type() == inputs[i].scalar_type(),
                  "all_gather_coalesced: invalid tensor type at index ", i, ": an output is ",
                  list[i].scalar_type(), ", the input ", inputs[i].scalar_type());
      TORCH_CHECK(list[i].sizes() == inputs[i].sizes(),
                  "all_gather_coalesced: invalid size of output tensor at index ", i,
                  ": an output has shape ", list[i].sizes(), ", the input ", inputs[i].sizes());
    }
  }
  return Launch(
      GatherLists("all_gather_coalesced", c10d::OpType::ALLGATHER_COALESCED, outputs, inputs),
      opts.timeout);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::gather(std::vector<Tensors>& outputs,
                                                      Tensors& inputs,
                                                      const c10d::GatherOptions& opts) {
  const at::Tensor& input = Single(inputs, "gather", "input ");
  Operation op = Begin("gather", "geomesh:gather", c10d::OpType::GATHER,
                       absl::StrCat(Describe(input), ", root ", JobRank(opts.rootRank)));
  const int root = CheckRoot(op.work.operation, opts.rootRank);
  op.work.inputs = {input};
  op.call.input = {ToBytes(op.staging->Source(input))};
  if (root == rank_) {
    TORCH_CHECK(outputs.size() == 1, op.work.operation,
                ": requires a single-element output list at the root, got one of ", outputs.size());
    CheckCount(op.work.operation, "output", outputs[0].size(), size_);
    for (int r = 0; r < size_; ++r) {
      CheckType(op.work.operation, input, outputs[0][r]);
      TORCH_CHECK(r != rank_ || outputs[0][r].numel() == input.numel(), op.work.operation,
                  ": invalid tensor size: output ", r, " has ", outputs[0][r].numel(),
                  " elements, the input that goes there has ", input.numel());
      op.call.output.push_back(ToBytes(op.staging->Sink(outputs[0][r])));
      if (r != rank_ || !SameMemory(outputs[0][r], input))
        CheckApart(op.work.operation, outputs[0][r], input);
    }
    CheckApart(op.work.operation, outputs[0]);
    op.work.outputs = outputs[0];
  } else {
    TORCH_CHECK(outputs.empty() || outputs[0].empty(), op.work.operation,
                ": requires empty output on non-root");
  }
  op.shape = {.collective = Collective::kGather, .bytes = 0, .root = root};
  op.fingerprint.Add(root).Add(static_cast<uint64_t>(input.scalar_type()));
  return Launch(std::move(op), opts.timeout);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::gather_single(at::Tensor& output, at::Tensor& input,
                                                             const c10d::GatherOptions& opts) {
  Operation op = Begin("gather_single", "geomesh:gather", c10d::OpType::GATHER,
                       absl::StrCat(Describe(input), ", root ", JobRank(opts.rootRank)));
  const int root = CheckRoot(op.work.operation, opts.rootRank);
  op.work.inputs = {input};
  const at::Tensor from = op.staging->Source(input);
  const int64_t bytes = from.nbytes();
  op.call.input = {ToBytes(from)};
  if (root == rank_) {
    CheckType(op.work.operation, input, output);
    TORCH_CHECK(output.numel() == input.numel() * size_, op.work.operation, ": the output has ",
                output.numel(), " elements, but ", size_, " ranks times ", input.numel(),
                " are needed");
    op.work.outputs = {output};
    const at::Tensor to = op.staging->Sink(output);
    CheckOwnPart(op.work.operation, output, to, input, rank_ * bytes);
    for (int r = 0; r < size_; ++r)
      op.call.output.push_back({static_cast<std::byte*>(to.data_ptr()) + r * bytes, bytes});
  }
  op.shape = {.collective = Collective::kGather, .bytes = 0, .root = root};
  op.fingerprint.Add(root).Add(static_cast<uint64_t>(input.scalar_type()));
  return Launch(std::move(op), opts.timeout);
}

// ---- scattering ----

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::scatter(Tensors& outputs,
                                                       std::vector<Tensors>& inputs,
                                                       const c10d::ScatterOptions& opts) {
  const at::Tensor& output = Single(outputs, "scatter", "output ");
  Operation op = Begin("scatter", "geomesh:scatter", c10d::OpType::SCATTER,
                       absl::StrCat(Describe(output), ", root ", JobRank(opts.rootRank)));
  const int root = CheckRoot(op.work.operation, opts.rootRank);
  op.work.outputs = {output};
  if (root == rank_) {
    TORCH_CHECK(inputs.size() == 1, op.work.operation,
                ": requires a single-element input list at the root, got one of ", inputs.size());
    CheckCount(op.work.operation, "input", inputs[0].size(), size_);
    for (int r = 0; r < size_; ++r) {
      CheckType(op.work.operation, inputs[0][r], output);
      TORCH_CHECK(r != rank_ || inputs[0][r].numel() == output.numel(), op.work.operation,
                  ": invalid tensor size: input ", r, " has ", inputs[0][r].numel(),
                  " elements, the output that it goes to has ", output.numel());
      op.call.input.push_back(ToBytes(op.staging->Source(inputs[0][r])));
      if (r != rank_ || !SameMemory(output, inputs[0][r]))
        CheckApart(op.work.operation, output, inputs[0][r]);
    }
    op.work.inputs = inputs[0];
  } else {
    TORCH_CHECK(inputs.empty() || inputs[0].empty(), op.work.operation,
                ": requires empty input on non-root");
  }
  op.call.output = {ToBytes(op.staging->Sink(output))};
  op.shape = {.collective = Collective::kScatter, .bytes = 0, .root = root};
  op.fingerprint.Add(root).Add(static_cast<uint64_t>(output.scalar_type()));
  return Launch(std::move(op), opts.timeout);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = Single(outputs, "reduce_scatter", "output ");
  Operation op = Begin("reduce_scatter", "geomesh:reduce_scatter", c10d::OpType::REDUCE_SCATTER,
                       WithOp(output, opts.reduceOp));
  TORCH_CHECK(inputs.size() == 1, op.work.operation,
              ": requires a single-element input list, got one of ", inputs.size());
  CheckCount(op.work.operation, "input", inputs[0].size(), size_);
  op.work.inputs = inputs[0];
  op.work.outputs = {output};
  const Reduction reduction(&op.call, op.staging.get(), opts.reduceOp, output.scalar_type(),
                            op.work.operation);
  int64_t largest = 0;
  bool even = true;
  for (int r = 0; r < size_; ++r) {
    const at::Tensor& input = inputs[0][r];
    CheckType(op.work.operation, input, output);
    TORCH_CHECK(r != rank_ || input.numel() == output.numel(), op.work.operation,
                ": invalid tensor size: input ", r, " has ", input.numel(),
                " elements, the output that it goes to has ", output.numel());
    if (r != rank_ || !SameMemory(output, input)) CheckApart(op.work.operation, output, input);
    at::Tensor memory = reduction.Source(input);
    op.call.input.push_back(ToBlock(memory));
    largest = std::max(largest, static_cast<int64_t>(memory.nbytes()));
    even = even && input.numel() == inputs[0][0].numel();
    op.fingerprint.Add(input.numel());
  }
  op.call.output = {ToBlock(reduction.Sink(output))};
  op.shape = {.collective = Collective::kReduceScatter, .bytes = even ? largest : 0};
  op.fingerprint.Add(static_cast<uint64_t>(output.scalar_type())).Add(opts.reduceOp.op_);
  return Launch(std::move(op), opts.timeout);
}

ProcessGroupGeoMesh::Operation ProcessGroupGeoMesh::ReduceScatterFrom(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  Operation op = Begin("reduce_scatter_single", "geomesh:_reduce_scatter_base",
                       c10d::OpType::_REDUCE_SCATTER_BASE, WithOp(output, opts.reduceOp));
  CheckType(op.work.operation, input, output);
  TORCH_CHECK(input.numel() == output.numel() * size_, op.work.operation, ": the input has ",
              input.numel(), " elements, but ", size_, " ranks times ", output.numel(),
              " are needed");
  op.work.inputs = {input};
  op.work.outputs = {output};
  const Reduction reduction(&op.call, op.staging.get(), opts.reduceOp, output.scalar_type(),
                            op.work.operation);
  at::Tensor from = reduction.Source(input);
  at::Tensor to = reduction.Sink(output);
  // The output may be this rank's own part of the input.
  if (to.const_data_ptr() !=
      static_cast<const std::byte*>(from.const_data_ptr()) + rank_ * to.nbytes()) {
    CheckApart(op.work.operation, output, input);
  }
  const int64_t elements = to.numel();
  for (int r = 0; r < size_; ++r) {
    op.call.input.push_back(
        {static_cast<std::byte*>(from.data_ptr()) + r * static_cast<int64_t>(to.nbytes()),
         elements});
  }
  op.call.output = {ToBlock(to)};
  op.shape = {.collective = Collective::kReduceScatter, .bytes = static_cast<int64_t>(to.nbytes())};
  op.fingerprint.Add(static_cast<uint64_t>(output.scalar_type()))
      .Add(output.numel())
      .Add(opts.reduceOp.op_);
  return op;
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  return Launch(ReduceScatterFrom(output, input, opts), opts.timeout);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK(!inputs.empty() && inputs.size() == outputs.size(),
              "reduce_scatter_single_coalesced: takes as many outputs as inputs, "
              "at least one; got ",
              outputs.size(), " and ", inputs.size());
  std::vector<Operation> operations;
  for (size_t i = 0; i < inputs.size(); ++i)
    operations.push_back(ReduceScatterFrom(outputs[i], inputs[i], opts));
  return LaunchAll(std::move(operations), outputs, opts.timeout);
}

// ---- all to all ----

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                             std::vector<int64_t>& output_splits,
                                                             std::vector<int64_t>& input_splits,
                                                             const c10d::AllToAllOptions& opts) {
  Operation op = Begin("all_to_all_single", "geomesh:all_to_all", c10d::OpType::ALLTOALL_BASE,
                       Describe(input));
  CheckType(op.work.operation, input, output);
  op.work.inputs = {input};
  op.work.outputs = {output};
  // Bytes that go to (or come from) each rank: `splits` counts rows of the first dimension;
  // without, equal shares.
  auto blocks = [&](const at::Tensor& memory, const std::vector<int64_t>& splits,
                    const char* what) {
    std::vector<exec::Block> result;
    const int64_t rows = memory.dim() == 0 ? memory.numel() : memory.size(0);
    const int64_t row_bytes = rows == 0 ? 0 : static_cast<int64_t>(memory.nbytes()) / rows;
    std::vector<int64_t> counts = splits;
    if (counts.empty()) {
      TORCH_CHECK(rows % size_ == 0, op.work.operation, ": the ", what, "'s first dimension (",
                  rows, ") is not a multiple of the ", size_, " ranks; pass split sizes");
      counts.assign(size_, rows / size_);
    }
    TORCH_CHECK(counts.size() == static_cast<size_t>(size_), op.work.operation,
                ": takes one split size a rank (", size_, ") for the ", what, ", got ",
                counts.size());
    int64_t sum = 0;
    for (int64_t count : counts) {
      TORCH_CHECK(count >= 0, op.work.operation, ": a split size is negative: ", count);
      result.push_back(
          {static_cast<std::byte*>(memory.data_ptr()) + sum * row_bytes, count * row_bytes});
      sum += count;
    }
    TORCH_CHECK(sum == rows, op.work.operation, ": the ", what, "'s split sizes add up to ", sum,
                ", its first dimension is ", rows);
    return result;
  };
  CheckApart(op.work.operation, output, input);
  op.call.input = blocks(op.staging->Source(input), input_splits, "input");
  op.call.output = blocks(op.staging->Sink(output), output_splits, "output");
  const size_t own = static_cast<size_t>(rank_);
  TORCH_CHECK(op.call.input[own].elements == op.call.output[own].elements, op.work.operation,
              ": of this rank's own part, the input's split has ", op.call.input[own].elements,
              " bytes, the output's ", op.call.output[own].elements);
  op.shape = {.collective = Collective::kAllToAll, .bytes = 0};
  op.fingerprint.Add(static_cast<uint64_t>(input.scalar_type()));
  return Launch(std::move(op), opts.timeout);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::alltoall(Tensors& outputs, Tensors& inputs,
                                                        const c10d::AllToAllOptions& opts) {
  Operation op = Begin("all_to_all", "geomesh:all_to_all", c10d::OpType::ALLTOALL,
                       absl::StrCat(inputs.size(), " tensors"));
  CheckCount(op.work.operation, "input", inputs.size(), size_);
  CheckCount(op.work.operation, "output", outputs.size(), size_);
  op.work.inputs = inputs;
  op.work.outputs = outputs;
  for (int r = 0; r < size_; ++r) {
    CheckType(op.work.operation, inputs[r], outputs[0]);
    CheckType(op.work.operation, inputs[0], outputs[r]);
    op.call.input.push_back(ToBytes(op.staging->Source(inputs[r])));
    op.call.output.push_back(ToBytes(op.staging->Sink(outputs[r])));
  }
  CheckApart(op.work.operation, outputs);
  for (const at::Tensor& output : outputs) {
    for (const at::Tensor& input : inputs) CheckApart(op.work.operation, output, input);
  }
  TORCH_CHECK(inputs[rank_].numel() == outputs[rank_].numel(), op.work.operation,
              ": invalid tensor size: input ", rank_, " has ", inputs[rank_].numel(),
              " elements, the output that it goes to has ", outputs[rank_].numel());
  op.shape = {.collective = Collective::kAllToAll, .bytes = 0};
  op.fingerprint.Add(static_cast<uint64_t>(inputs[0].scalar_type()));
  return Launch(std::move(op), opts.timeout);
}

}  // namespace geomesh::group
