// The "geomesh" backend of torch.distributed: turns c10d's calls into programs and hands them to
// the executor.
//
// Everything an operation needs is checked before a byte leaves. Operations may be issued from
// several threads; those of one group start in issue order. After a failure of one operation the
// group is of no more use: every later call raises the first reason. Errors name the operation, its
// number in the group, and the ranks that are missing with their region.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/options.h"
#include "exec/executor.h"
#include "group/process.h"
#include "group/rendezvous.h"
#include "group/tensors.h"
#include "group/topology_spec.h"
#include "group/work.h"
#include "plan/compile.h"
#include "plan/topology.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace geomesh::group {

// What a sign all-reduce takes besides its tensors.
struct SignArguments {
  uint64_t weight = 1;
  uint64_t rotation_seed = 0;
  std::vector<std::string> names;     // one a tensor, or none
  std::vector<int64_t> row_elements;  // one a tensor, or none
  bool rotate = true;
  std::optional<at::Tensor> residual;  // flat fp32, as many elements as all tensors together
  double residual_decay = 1.0;
  plan::SignForm form = plan::SignForm::kChosen;
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
};

class ProcessGroupGeoMesh : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
        : c10d::Backend::Options("geomesh", timeout) {}
    c10::intrusive_ptr<c10d::Backend::Options> clone() const
#if defined(C10D_BACKEND_HAS_RECONFIGURE)
        override
#endif
    {
      return c10::make_intrusive<Options>(*this);
    }

    geomesh::Options engine;
    std::vector<std::string> given;  // names of the engine's options that the user set here
    TopologySpec topology;
    // Which group this is; no members: all ranks of the job, in order.
    Meeting meeting;
  };

  // Meets the other ranks through `store` and connects. Throws c10::DistBackendError naming what
  // went wrong.
  ProcessGroupGeoMesh(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                      c10::intrusive_ptr<Options> options);
  ~ProcessGroupGeoMesh() override;

  const std::string getBackendName() const override { return "geomesh"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }

  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions& opts) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions& opts) override;
  Work allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                           const c10d::AllgatherOptions& opts) override;
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& opts) override;
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs,
              const c10d::GatherOptions& opts) override;
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs,
               const c10d::ScatterOptions& opts) override;
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ReduceScatterOptions& opts) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& opts) override;
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& opts) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                     std::vector<int64_t>& input_splits,
                     const c10d::AllToAllOptions& opts) override;
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  Work send(Tensors& tensors, int peer, int tag) override;
  Work recv(Tensors& tensors, int peer, int tag) override;
  Work barrier(const c10d::BarrierOptions& opts) override;

  // The weighted mean over ranks of (anchor - current), or of current where `anchor` is empty,
  // sign-coded on the wire. `out`: flat contiguous fp32 on the CPU, all tensors' elements one after
  // the other. Anchors are contiguous fp32 on the CPU.
  c10::intrusive_ptr<WorkGeoMesh> SignAllReduce(const Tensors& current, const Tensors& anchor,
                                                at::Tensor out, SignArguments arguments);

  void setTimeout(std::chrono::milliseconds timeout) override;
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  // Ends everything pending; the group is of no more use. Returns at once.
  void abort() override;
  // Lets pending operations end, at most the linger time, then aborts.
  void shutdown() override;

  std::vector<transport::PeerStats> Stats();
  const plan::Topology& topology() const { return plans_->topology(); }
  std::vector<std::string> regions() const { return regions_; }
  uint64_t channel() const { return channel_; }

 private:
  struct Operation;
  Operation Begin(const char* name, const char* title, c10d::OpType type, std::string detail);
  c10::intrusive_ptr<WorkGeoMesh> Launch(Operation operation, std::chrono::milliseconds timeout);
  Work PointToPoint(Tensors& tensors, int peer, int tag, bool sending);
  // The running one; throws after shutdown().
  std::shared_ptr<exec::Executor> executor();
  int CheckRoot(const std::string& operation, int64_t root) const;

  // A fork of the process that made the group has this object, but not the engine's threads.
  bool forked() const { return getpid() != owner_; }
  void CheckOwner() const;  // throws where forked

  const pid_t owner_ = getpid();
  const c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Process> process_;
  std::unique_ptr<plan::PlanCache> plans_;
  std::vector<std::string> regions_;  // by rank
  uint64_t channel_ = 0;
  std::shared_ptr<exec::Executor> executor_;

  std::mutex mutex_;  // guards what is below, and keeps the order of operations
  std::condition_variable idle_;
  std::chrono::milliseconds timeout_;
  uint64_t sequence_ = 0;
  int64_t pending_ = 0;
  int64_t reading_ = 0;  // of these, not started yet: their inputs come from a GPU
  bool shut_ = false;
  std::map<std::tuple<int, int, bool>, uint32_t>
      point_to_point_;  // messages so far by peer, tag, direction
};

}  // namespace geomesh::group
