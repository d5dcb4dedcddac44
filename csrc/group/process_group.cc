#include "group/process_group.h"

#include <algorithm>
#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "exec/reduce.h"
#include "group/fingerprint.h"

#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace geomesh::group {
namespace {

using plan::CallShape;
using plan::Collective;

// Key ids: an operation's messages count from sequence << kMessageBits; point-to-point messages
// have the top bit set.
constexpr int kMessageBits = 24;
constexpr uint64_t kPointToPoint = uint64_t{1} << 63;

exec::ReduceOp ToReduceOp(const c10d::ReduceOp& op, const std::string& operation) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
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
      TORCH_CHECK(false, operation, ": takes SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR");
  }
}

absl::Duration ToDuration(std::chrono::milliseconds ms) { return absl::Milliseconds(ms.count()); }

std::string Describe(const at::Tensor& tensor) {
  return absl::StrCat(c10::toString(tensor.scalar_type()), "[", absl::StrJoin(tensor.sizes(), ","),
                      "]");
}

// The tensors' elements one after the other, as one tensor that is staged like any other.
at::Tensor Flatten(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& tensor : tensors)
    flat.push_back(tensor.detach().reshape({-1}).to(at::kCPU));
  return at::cat(flat);
}

}  // namespace

// What one call is made of; filled by the c10d method, consumed by Launch.
struct ProcessGroupGeoMesh::Operation {
  WorkGeoMesh::Description work;
  CallShape shape;
  exec::Call call;
  std::shared_ptr<Staging> staging;
  Fingerprint fingerprint;
  bool check_fingerprint = true;
  std::function<void()> after;  // on success, after CopyBack, on the completion thread
  std::shared_ptr<void> keep;
  std::optional<std::tuple<int, int, bool>> point_to_point;
};

ProcessGroupGeoMesh::Operation ProcessGroupGeoMesh::Begin(const char* name, const char* title,
                                                          c10d::OpType type, std::string detail) {
  Operation operation;
  operation.work.rank = rank_;
  operation.work.type = type;
  operation.work.profiling_title = title;
  operation.work.operation = absl::StrCat(name, "(", detail, ")");
  operation.staging = std::make_shared<Staging>(operation.work.operation);
  operation.fingerprint.Add(static_cast<uint64_t>(type));
  return operation;
}

namespace {

// Returns when the inputs have come from the GPU. Also OK if the group has failed meanwhile, which
// the executor will tell. Sleeps between looks: waiting for an event would keep a core busy.
absl::Status AwaitReads(const Staging& staging, const exec::Executor& executor,
                        const exec::Call& call) {
  absl::Duration pause = absl::Microseconds(20);
  try {
    while (!staging.ReadsDone() && executor.health().ok()) {
      if (absl::Now() > call.deadline) {
        return absl::DeadlineExceededError(absl::StrCat(
            call.operation, ", operation ", call.sequence,
            " of its group: the GPU did not come to it within the timeout. Something that was put "
            "on the stream before it hangs, or takes longer"));
      }
      absl::SleepFor(pause);
      pause = std::min(2 * pause, absl::Milliseconds(1));
    }
  } catch (const std::exception& e) {
    return absl::InternalError(
        absl::StrCat(call.operation, ": copying from the GPU failed: ", e.what()));
  }
  return absl::OkStatus();
}

}  // namespace

c10::intrusive_ptr<WorkGeoMesh> ProcessGroupGeoMesh::Launch(Operation operation,
                                                            std::chrono::milliseconds timeout) {
  TORCH_CHECK(timeout == c10d::kUnsetTimeout || timeout.count() > 0, operation.work.operation,
              ": the timeout must be positive, got ", timeout.count(), " ms");
  CheckOwner();
  absl::StatusOr<std::shared_ptr<const plan::Program>> program = plans_->Get(operation.shape);
  if (!program.ok()) Throw(program.status());

  exec::Call& call = operation.call;
  call.program = *std::move(program);
  call.operation = operation.work.operation;
  call.fingerprint = operation.check_fingerprint ? operation.fingerprint.value() : 0;

  std::lock_guard<std::mutex> lock(mutex_);
  if (shut_) Throw(absl::FailedPreconditionError("geomesh: the group was destroyed"));
  if (const absl::Status health = executor_->health(); !health.ok()) Throw(health);
  if (timeout == c10d::kUnsetTimeout) timeout = timeout_;
  call.deadline = absl::Now() + ToDuration(timeout);
  if (operation.point_to_point) {
    const uint32_t count = point_to_point_[*operation.point_to_point]++;
    const uint64_t tag = static_cast<uint64_t>(std::get<1>(*operation.point_to_point));
    call.first_message_id = kPointToPoint | (tag << 32) | count;
    call.sequence = sequence_;
  } else {
    call.sequence = ++sequence_;
    call.first_message_id = call.sequence << kMessageBits;
  }

  operation.work.sequence = call.sequence;
  operation.work.timeout = timeout;
  operation.work.expire =
      [executor = std::weak_ptr<exec::Executor>(executor_)](const absl::Status& reason) {
        if (auto alive = executor.lock()) alive->Abort(reason);
      };
  for (const c10::Stream& stream : operation.staging->streams()) {
    operation.work.devices.push_back(stream.device());
  }
  auto work = c10::make_intrusive<WorkGeoMesh>(std::move(operation.work));

  // Runs on the engine thread: hands over to the completion thread, which may wait for Python's
  // lock.
  ++pending_;
  call.done = [this, work, staging = operation.staging, after = std::move(operation.after),
               keep = std::move(operation.keep), process = process_.get()](
                  const absl::Status& status, const exec::Outcome& outcome) mutable {
    process->completions().Post([this, work = std::move(work), staging = std::move(staging),
                                 after = std::move(after), keep = std::move(keep), status,
                                 outcome]() mutable {
      absl::Status result = status;
      // The future records its events on these, and callbacks' streams wait for them.
      const std::vector<c10::Stream> streams = staging->streams();
      const c10::MultiStreamGuard guard(streams);
      if (result.ok()) {
        try {
          staging->CopyBack();
          if (after) after();
        } catch (const std::exception& e) {
          result = absl::InternalError(absl::StrCat("copying a result back failed: ", e.what()));
        }
      }
      staging->Release();
      work->Complete(result, outcome);
      // Under the lock until the end: shutdown() must not return, and this object not die, in
      // between.
      std::lock_guard<std::mutex> lock(mutex_);
      --pending_;
      idle_.notify_all();
    });
  };
  if (!operation.staging->any_reads() && reading_ == 0) {
    executor_->Start(std::move(call));
    return work;
  }
  // Inputs are on their way from a GPU, which may first have much else to do. The caller goes on;
  // operations start in the order of their calls, as on all ranks.
  ++reading_;
  process_->gpu_reads().Post([this, executor = executor_.get(), staging = operation.staging,
                              call = std::move(call)]() mutable {
    const absl::Status read = AwaitReads(*staging, *executor, call);
    if (!read.ok()) executor->Abort(read);
    staging.reset();
    // `this` and the executor live at least until the call is done.
    std::lock_guard<std::mutex> lock(mutex_);
    --reading_;
    executor->Start(std::move(call));
  });
  return work;
}

int ProcessGroupGeoMesh::CheckRoot(const std::string& operation, int64_t root) const {
  TORCH_CHECK(root >= 0 && root < size_, operation, ": the root is rank ", root,
              ", but the group has ranks 0 to ", size_ - 1);
  return static_cast<int>(root);
}

namespace {

const at::Tensor& Single(const std::vector<at::Tensor>& tensors, const char* name) {
  TORCH_CHECK(tensors.size() == 1, name, ": takes one tensor, got ", tensors.size());
  TORCH_CHECK(tensors[0].defined(), name, ": the tensor is undefined");
  return tensors[0];
}

void CheckCount(const std::string& operation, const char* what, size_t count, int size) {
  TORCH_CHECK(count == static_cast<size_t>(size), operation, ": takes one ", what, " a rank (",
              size, "), got ", count);
}

void CheckType(const std::string& operation, const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), operation,
              ": input and output differ in dtype: ", a.scalar_type(), " and ", b.scalar_type());
}

// Sets up a reduction's dtype; complex sums and means run on pairs of reals.
at::Tensor Reducible(exec::Call& call, const c10d::ReduceOp& op, const at::Tensor& memory,
                     const std::string& operation) {
  at::Tensor reals = memory;
  if (memory.is_complex()) {
    TORCH_CHECK(c10d::isComplexViewAsRealAllowed(op), operation,
                ": complex tensors take SUM and AVG only");
    reals = at::view_as_real(memory);
  }
  call.op = ToReduceOp(op, operation);
  call.dtype = ToDType(reals.scalar_type(), operation);
  if (const absl::Status status = exec::Supported(call.op, call.dtype); !status.ok()) {
    TORCH_CHECK(false, operation, ": ", std::string(status.message()));
  }
  return reals;
}

}  // namespace

// ---- one buffer, in place ----

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::broadcast(Tensors& tensors,
                                                         const c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = Single(tensors, "broadcast");
  Operation op = Begin("broadcast", "geomesh:broadcast", c10d::OpType::BROADCAST, Describe(tensor));
  const int root = CheckRoot(op.work.operation, opts.rootRank);
  op.work.inputs = op.work.outputs = {tensor};
  op.call.dtype = DType::kU8;
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
  const at::Tensor& tensor = Single(tensors, "all_reduce");
  Operation op =
      Begin("all_reduce", "geomesh:all_reduce", c10d::OpType::ALLREDUCE, Describe(tensor));
  op.work.inputs = op.work.outputs = {tensor};
  at::Tensor memory =
      Reducible(op.call, opts.reduceOp, op.staging->InPlace(tensor), op.work.operation);
  op.call.output = {ToBlock(memory)};
  op.shape = {.collective = Collective::kAllReduce, .bytes = static_cast<int64_t>(memory.nbytes())};
  op.fingerprint.Add(static_cast<uint64_t>(tensor.scalar_type()))
      .Add(tensor.numel())
      .Add(opts.reduceOp.op_);
  return Launch(std::move(op), opts.timeout);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  TORCH_CHECK(!tensors.empty(), "all_reduce_coalesced: takes at least one tensor");
  Operation op = Begin("all_reduce_coalesced", "geomesh:all_reduce_coalesced",
                       c10d::OpType::ALLREDUCE_COALESCED,
                       absl::StrCat(tensors.size(), " tensors, first ", Describe(tensors[0])));
  for (const at::Tensor& tensor : tensors) {
    CheckType(op.work.operation, tensors[0], tensor);
    op.staging->Check(tensor, /*written=*/true);
  }
  at::Tensor flat = op.staging->InPlace(Flatten(tensors));
  at::Tensor memory = Reducible(op.call, opts.reduceOp, flat, op.work.operation);
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
  const at::Tensor& tensor = Single(tensors, "reduce");
  Operation op = Begin("reduce", "geomesh:reduce", c10d::OpType::REDUCE, Describe(tensor));
  const int root = CheckRoot(op.work.operation, opts.rootRank);
  op.work.inputs = op.work.outputs = {tensor};
  at::Tensor staged = root == rank_ ? op.staging->InPlace(tensor) : op.staging->Source(tensor);
  at::Tensor memory = Reducible(op.call, opts.reduceOp, staged, op.work.operation);
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
  const at::Tensor& input = Single(inputs, "all_gather");
  Operation op =
      Begin("all_gather", "geomesh:all_gather", c10d::OpType::ALLGATHER, Describe(input));
  TORCH_CHECK(outputs.size() == 1, op.work.operation, ": takes one list of outputs, got ",
              outputs.size());
  CheckCount(op.work.operation, "output", outputs[0].size(), size_);
  op.work.inputs = {input};
  op.work.outputs = outputs[0];
  op.call.dtype = DType::kU8;
  op.call.input = {ToBytes(op.staging->Source(input))};
  bool even = true;
  for (int r = 0; r < size_; ++r) {
    const at::Tensor& output = outputs[0][r];
    CheckType(op.work.operation, input, output);
    TORCH_CHECK(r != rank_ || output.numel() == input.numel(), op.work.operation, ": output ", r,
                " has ", output.numel(), " elements, the input that goes there has ",
                input.numel());
    even = even && output.numel() == input.numel();
    op.call.output.push_back(ToBytes(op.staging->Sink(output)));
  }
  // Ranks may see uneven outputs differently only by an error, which the sizes of messages show.
  op.shape = {.collective = Collective::kAllGather,
              .bytes = even ? static_cast<int64_t>(input.nbytes()) : 0};
  op.fingerprint.Add(static_cast<uint64_t>(input.scalar_type()));
  for (const at::Tensor& output : outputs[0]) op.fingerprint.Add(output.numel());
  return Launch(std::move(op), opts.timeout);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::_allgather_base(at::Tensor& output,
                                                               at::Tensor& input,
                                                               const c10d::AllgatherOptions& opts) {
  Operation op = Begin("all_gather_single", "geomesh:_all_gather_base",
                       c10d::OpType::_ALLGATHER_BASE, Describe(input));
  CheckType(op.work.operation, input, output);
  TORCH_CHECK(output.numel() == input.numel() * size_, op.work.operation, ": the output has ",
              output.numel(), " elements, but ", size_, " ranks times ", input.numel(),
              " are needed");
  op.work.inputs = {input};
  op.work.outputs = {output};
  op.call.dtype = DType::kU8;
  at::Tensor from = op.staging->Source(input);
  at::Tensor to = op.staging->Sink(output);
  op.call.input = {ToBytes(from)};
  const int64_t bytes = from.nbytes();
  for (int r = 0; r < size_; ++r)
    op.call.output.push_back({static_cast<std::byte*>(to.data_ptr()) + r * bytes, bytes});
  op.shape = {.collective = Collective::kAllGather, .bytes = bytes};
  op.fingerprint.Add(static_cast<uint64_t>(input.scalar_type())).Add(input.numel());
  return Launch(std::move(op), opts.timeout);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  TORCH_CHECK(!inputs.empty() && inputs.size() == outputs.size(),
              "all_gather_single_coalesced: takes as many outputs as inputs, "
              "at least one; got ",
              outputs.size(), " and ", inputs.size());
  std::vector<Work> works;
  for (size_t i = 0; i < inputs.size(); ++i)
    works.push_back(_allgather_base(outputs[i], inputs[i], opts));
  return JoinWorks(std::move(works), outputs);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::allgather_coalesced(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  CheckCount("all_gather_coalesced", "list of outputs", outputs.size(), size_);
  std::vector<Work> works;
  Tensors all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::vector<Tensors> lists(1);
    for (Tensors& of_rank : outputs) {
      TORCH_CHECK(of_rank.size() == inputs.size(),
                  "all_gather_coalesced: takes as many outputs of each rank as inputs (",
                  inputs.size(), "), got ", of_rank.size());
      lists[0].push_back(of_rank[i]);
      all.push_back(of_rank[i]);
    }
    Tensors single = {inputs[i]};
    works.push_back(allgather(lists, single, opts));
  }
  return JoinWorks(std::move(works), std::move(all));
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::gather(std::vector<Tensors>& outputs,
                                                      Tensors& inputs,
                                                      const c10d::GatherOptions& opts) {
  const at::Tensor& input = Single(inputs, "gather");
  Operation op = Begin("gather", "geomesh:gather", c10d::OpType::GATHER, Describe(input));
  const int root = CheckRoot(op.work.operation, opts.rootRank);
  op.work.inputs = {input};
  op.call.dtype = DType::kU8;
  op.call.input = {ToBytes(op.staging->Source(input))};
  if (root == rank_) {
    TORCH_CHECK(outputs.size() == 1, op.work.operation,
                ": the root takes one list of outputs, got ", outputs.size());
    CheckCount(op.work.operation, "output", outputs[0].size(), size_);
    for (int r = 0; r < size_; ++r) {
      CheckType(op.work.operation, input, outputs[0][r]);
      TORCH_CHECK(r != rank_ || outputs[0][r].numel() == input.numel(), op.work.operation,
                  ": output ", r, " has ", outputs[0][r].numel(),
                  " elements, the input that goes there has ", input.numel());
      op.call.output.push_back(ToBytes(op.staging->Sink(outputs[0][r])));
    }
    op.work.outputs = outputs[0];
  } else {
    TORCH_CHECK(outputs.empty() || outputs[0].empty(), op.work.operation,
                ": only the root takes outputs");
  }
  op.shape = {.collective = Collective::kGather, .bytes = 0, .root = root};
  op.fingerprint.Add(root).Add(static_cast<uint64_t>(input.scalar_type()));
  return Launch(std::move(op), opts.timeout);
}

// ---- scattering ----

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::scatter(Tensors& outputs,
                                                       std::vector<Tensors>& inputs,
                                                       const c10d::ScatterOptions& opts) {
  const at::Tensor& output = Single(outputs, "scatter");
  Operation op = Begin("scatter", "geomesh:scatter", c10d::OpType::SCATTER, Describe(output));
  const int root = CheckRoot(op.work.operation, opts.rootRank);
  op.work.outputs = {output};
  op.call.dtype = DType::kU8;
  if (root == rank_) {
    TORCH_CHECK(inputs.size() == 1, op.work.operation, ": the root takes one list of inputs, got ",
                inputs.size());
    CheckCount(op.work.operation, "input", inputs[0].size(), size_);
    for (int r = 0; r < size_; ++r) {
      CheckType(op.work.operation, inputs[0][r], output);
      TORCH_CHECK(r != rank_ || inputs[0][r].numel() == output.numel(), op.work.operation,
                  ": input ", r, " has ", inputs[0][r].numel(),
                  " elements, the output that it goes to has ", output.numel());
      op.call.input.push_back(ToBytes(op.staging->Source(inputs[0][r])));
    }
    op.work.inputs = inputs[0];
  } else {
    TORCH_CHECK(inputs.empty() || inputs[0].empty(), op.work.operation,
                ": only the root takes inputs");
  }
  op.call.output = {ToBytes(op.staging->Sink(output))};
  op.shape = {.collective = Collective::kScatter, .bytes = 0, .root = root};
  op.fingerprint.Add(root).Add(static_cast<uint64_t>(output.scalar_type()));
  return Launch(std::move(op), opts.timeout);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = Single(outputs, "reduce_scatter");
  Operation op = Begin("reduce_scatter", "geomesh:reduce_scatter", c10d::OpType::REDUCE_SCATTER,
                       Describe(output));
  TORCH_CHECK(inputs.size() == 1, op.work.operation, ": takes one list of inputs, got ",
              inputs.size());
  CheckCount(op.work.operation, "input", inputs[0].size(), size_);
  op.work.inputs = inputs[0];
  op.work.outputs = {output};
  int64_t largest = 0;
  bool even = true;
  for (int r = 0; r < size_; ++r) {
    const at::Tensor& input = inputs[0][r];
    CheckType(op.work.operation, input, output);
    TORCH_CHECK(r != rank_ || input.numel() == output.numel(), op.work.operation, ": input ", r,
                " has ", input.numel(), " elements, the output that it goes to has ",
                output.numel());
    at::Tensor memory =
        Reducible(op.call, opts.reduceOp, op.staging->Source(input), op.work.operation);
    op.call.input.push_back(ToBlock(memory));
    largest = std::max(largest, static_cast<int64_t>(memory.nbytes()));
    even = even && input.numel() == inputs[0][0].numel();
    op.fingerprint.Add(input.numel());
  }
  op.call.output = {
      ToBlock(Reducible(op.call, opts.reduceOp, op.staging->Sink(output), op.work.operation))};
  op.shape = {.collective = Collective::kReduceScatter, .bytes = even ? largest : 0};
  op.fingerprint.Add(static_cast<uint64_t>(output.scalar_type())).Add(opts.reduceOp.op_);
  return Launch(std::move(op), opts.timeout);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  Operation op = Begin("reduce_scatter_single", "geomesh:_reduce_scatter_base",
                       c10d::OpType::_REDUCE_SCATTER_BASE, Describe(output));
  CheckType(op.work.operation, input, output);
  TORCH_CHECK(input.numel() == output.numel() * size_, op.work.operation, ": the input has ",
              input.numel(), " elements, but ", size_, " ranks times ", output.numel(),
              " are needed");
  op.work.inputs = {input};
  op.work.outputs = {output};
  at::Tensor from = Reducible(op.call, opts.reduceOp, op.staging->Source(input), op.work.operation);
  at::Tensor to = Reducible(op.call, opts.reduceOp, op.staging->Sink(output), op.work.operation);
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
  return Launch(std::move(op), opts.timeout);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK(!inputs.empty() && inputs.size() == outputs.size(),
              "reduce_scatter_single_coalesced: takes as many outputs as inputs, "
              "at least one; got ",
              outputs.size(), " and ", inputs.size());
  std::vector<Work> works;
  for (size_t i = 0; i < inputs.size(); ++i)
    works.push_back(_reduce_scatter_base(outputs[i], inputs[i], opts));
  return JoinWorks(std::move(works), outputs);
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
  op.call.dtype = DType::kU8;
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
    CheckCount(op.work.operation, "split size", counts.size(), size_);
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
  op.call.input = blocks(op.staging->Source(input), input_splits, "input");
  op.call.output = blocks(op.staging->Sink(output), output_splits, "output");
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
  op.call.dtype = DType::kU8;
  for (int r = 0; r < size_; ++r) {
    CheckType(op.work.operation, inputs[r], outputs[0]);
    CheckType(op.work.operation, inputs[0], outputs[r]);
    op.call.input.push_back(ToBytes(op.staging->Source(inputs[r])));
    op.call.output.push_back(ToBytes(op.staging->Sink(outputs[r])));
  }
  TORCH_CHECK(inputs[rank_].numel() == outputs[rank_].numel(), op.work.operation, ": input ", rank_,
              " has ", inputs[rank_].numel(), " elements, the output that it goes to has ",
              outputs[rank_].numel());
  op.shape = {.collective = Collective::kAllToAll, .bytes = 0};
  op.fingerprint.Add(static_cast<uint64_t>(inputs[0].scalar_type()));
  return Launch(std::move(op), opts.timeout);
}

// ---- point to point, barrier ----

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::PointToPoint(Tensors& tensors, int peer, int tag,
                                                            bool sending) {
  const char* name = sending ? "send" : "recv";
  const at::Tensor& tensor = Single(tensors, name);
  Operation op = Begin(
      name, sending ? "geomesh:send" : "geomesh:recv",
      sending ? c10d::OpType::SEND : c10d::OpType::RECV,
      absl::StrCat(Describe(tensor), sending ? ", to rank " : ", from rank ", peer, ", tag ", tag));
  TORCH_CHECK(peer >= 0 && peer < size_, op.work.operation, ": the group has ranks 0 to ",
              size_ - 1);
  TORCH_CHECK_VALUE(peer != rank_, op.work.operation,
                    ": a rank can't exchange messages with itself; copy the tensor instead");
  TORCH_CHECK(tag >= 0, op.work.operation, ": a tag is never negative, got ", tag);
  op.work.inputs = op.work.outputs = {tensor};
  op.call.dtype = DType::kU8;
  if (sending) {
    op.call.input = {ToBytes(op.staging->Source(tensor))};
  } else {
    op.call.output = {ToBytes(op.staging->Sink(tensor))};
  }
  op.shape = {.collective = Collective::kSendRecv, .bytes = 0, .root = peer, .sending = sending};
  op.check_fingerprint = false;
  op.point_to_point = {peer, tag, sending};
  return Launch(std::move(op), c10d::kUnsetTimeout);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::send(Tensors& tensors, int peer, int tag) {
  return PointToPoint(tensors, peer, tag, /*sending=*/true);
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::recv(Tensors& tensors, int peer, int tag) {
  auto work = PointToPoint(tensors, peer, tag, /*sending=*/false);
  static_cast<WorkGeoMesh*>(work.get())->SetSourceRank(peer);
  return work;
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::barrier(const c10d::BarrierOptions& opts) {
  Operation op = Begin("barrier", "geomesh:barrier", c10d::OpType::BARRIER, "");
  op.call.dtype = DType::kU8;
  op.shape = {.collective = Collective::kBarrier};
  return Launch(std::move(op), opts.timeout);
}

// ---- sign all-reduce ----

c10::intrusive_ptr<WorkGeoMesh> ProcessGroupGeoMesh::SignAllReduce(const Tensors& current,
                                                                   const Tensors& anchor,
                                                                   at::Tensor out,
                                                                   SignArguments arguments) {
  // Keeps what the executor only points to.
  struct Kept {
    exec::SignCall call;
    std::vector<std::string> names;
  };
  Operation op = Begin("sign_all_reduce", "geomesh:sign_all_reduce", c10d::OpType::ALLREDUCE,
                       absl::StrCat(current.size(), " tensors"));
  const std::string& name = op.work.operation;
  TORCH_CHECK(anchor.empty() || anchor.size() == current.size(), name,
              ": takes an anchor for each tensor or none, got ", anchor.size());
  TORCH_CHECK(arguments.names.empty() || arguments.names.size() == current.size(), name,
              ": takes a name for each tensor or none, got ", arguments.names.size());
  TORCH_CHECK(arguments.row_elements.empty() || arguments.row_elements.size() == current.size(),
              name, ": takes the row length of each tensor or none, got ",
              arguments.row_elements.size());
  auto kept = std::make_shared<Kept>();
  kept->names = std::move(arguments.names);
  int64_t elements = 0;
  for (size_t i = 0; i < current.size(); ++i) {
    codec::Piece piece;
    const std::string label = kept->names.empty() ? absl::StrCat("tensor ", i) : kept->names[i];
    const at::ScalarType type = current[i].scalar_type();
    TORCH_CHECK(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, name, ": ", label,
                " must be float32, bfloat16 or float16, it is ", type);
    at::Tensor memory = op.staging->Source(current[i]);
    piece.current = memory.data_ptr();
    piece.dtype = ToDType(type, name);
    piece.elements = memory.numel();
    if (!anchor.empty()) {
      TORCH_CHECK(anchor[i].is_cpu() && anchor[i].is_contiguous() &&
                      anchor[i].scalar_type() == at::kFloat && anchor[i].numel() == memory.numel(),
                  name, ": the anchor of ", label, " must be contiguous float32 on the CPU with ",
                  memory.numel(), " elements, it is ", Describe(anchor[i]));
      piece.anchor = op.staging->Source(anchor[i]).const_data_ptr<float>();
    }
    if (!arguments.row_elements.empty()) {
      const int64_t row = arguments.row_elements[i];
      TORCH_CHECK(row >= 0 && (row == 0 || memory.numel() % row == 0), name, ": ", label, " has ",
                  memory.numel(), " elements, which are no whole number of rows of ", row);
      piece.row_elements = row;
    }
    if (!kept->names.empty()) piece.name = kept->names[i];
    elements += piece.elements;
    kept->call.pieces.push_back(piece);
    op.fingerprint.Add(piece.elements).Add(piece.row_elements);
  }
  TORCH_CHECK(out.is_cpu() && out.is_contiguous() && out.scalar_type() == at::kFloat &&
                  out.numel() == elements,
              name, ": out must be contiguous float32 on the CPU with ", elements,
              " elements, it is ", Describe(out));
  kept->call.weight = arguments.weight;
  kept->call.rotation_seed = arguments.rotation_seed;
  kept->call.rotate = arguments.rotate;
  if (arguments.residual) {
    at::Tensor& residual = *arguments.residual;
    TORCH_CHECK(residual.is_cpu() && residual.is_contiguous() &&
                    residual.scalar_type() == at::kFloat && residual.numel() == elements,
                name, ": the residual must be contiguous float32 on the CPU with ", elements,
                " elements");
    kept->call.residual = absl::MakeSpan(op.staging->Sink(residual).data_ptr<float>(), elements);
    kept->call.residual_decay = static_cast<float>(arguments.residual_decay);
  }
  op.fingerprint.Add(arguments.rotation_seed)
      .Add(arguments.rotate)
      .Add(static_cast<uint64_t>(arguments.form));
  op.work.inputs = current;
  op.work.outputs = {out};
  op.call.dtype = DType::kF32;
  op.call.input = {{nullptr, elements}};
  op.call.output = {ToBlock(op.staging->Sink(out))};
  op.call.sign = std::shared_ptr<exec::SignCall>(kept, &kept->call);
  op.keep = kept;
  op.shape = {.collective = Collective::kSignAllReduce,
              .bytes = elements * static_cast<int64_t>(sizeof(float)),
              .form = arguments.form};
  return Launch(std::move(op), arguments.timeout);
}

// ---- the group itself ----

void ProcessGroupGeoMesh::setTimeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK(timeout.count() > 0, "geomesh: the timeout must be positive, got ", timeout.count(),
              " ms");
  std::lock_guard<std::mutex> lock(mutex_);
  timeout_ = timeout;
  options_->timeout = timeout;
}

uint64_t ProcessGroupGeoMesh::getSequenceNumberForGroup() {
  std::lock_guard<std::mutex> lock(mutex_);
  return sequence_;
}

}  // namespace geomesh::group
