// The "geomesh" backend of torch.distributed: turns c10d's calls into programs and hands them to
// the executor.
//
// Everything an operation needs is checked before a byte leaves. Operations may be issued from
// several threads; those of one group start in issue order. After a failure of one operation the
// group is of no more use: every later call raises the first reason. Errors name the operation, its
// number in the group, and the ranks that are missing with their region.
//
// Its methods are in several rooms: membership.cc (how a group begins and ends), regrouping.cc
// (groups made of groups), collectives.cc, point_to_point.cc, sparse.cc, sign_all_reduce.cc,
// barriers.cc, and process_group.cc (what every operation goes through, hooks and timeouts).
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/options.h"
#include "exec/executor.h"
#include "group/hooks.h"
#include "group/pending.h"
#include "group/process.h"
#include "group/rendezvous.h"
#include "group/tensors.h"
#include "group/topology_spec.h"
#include "group/work.h"
#include "plan/compile.h"
#include "plan/topology.h"

#include <c10/core/Allocator.h>
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
#if !defined(C10D_BACKEND_HAS_RECONFIGURE)
    bool enable_reconfigure = false;  // newer PyTorch's base has it
#endif
  };

  // Meets the other ranks through `store` and connects. Throws c10::DistBackendError naming what
  // went wrong.
  // With options->enable_reconfigure: nothing of that until reconfigure().
  ProcessGroupGeoMesh(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                      c10::intrusive_ptr<Options> options);
  // A group of some of a group's ranks (by rank in it, this one among them), whose processes know
  // each other: nothing is sent. `channel` is equal on all of them and never used before.
  ProcessGroupGeoMesh(const ProcessGroupGeoMesh& parent, const std::vector<int>& members,
                      uint64_t channel, c10::intrusive_ptr<Options> options);
  ~ProcessGroupGeoMesh() override;

  const std::string getBackendName() const override { return "geomesh"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }

  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  Work allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
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
  // Not in PyTorch 2.11, as all methods below without "override".
  Work gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts);
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
  Work recvAnysource(Tensors& tensors, int tag) override;
  Work barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // What is issued in between begins at once; endCoalescing returns one handle for all of it.
  // It does not say that it supports this, since PyTorch would use it for batch_isend_irecv, where
  // a call that raises leaves the group coalescing for good (PyTorch 2.15); there is nothing to
  // gain by it here.
  bool supportsCoalescing() const override { return false; }
  void startCoalescing() override;
  Work endCoalescing() override;

  // What is issued in between is not run, but timed by the cost model.
  bool supportsTimeEstimation() const { return true; }
  void startTimeEstimate();
  float endTimeEstimate();  // microseconds

  // The weighted mean over ranks of (anchor - current), or of current where `anchor` is empty,
  // sign-coded on the wire. `out`: flat contiguous fp32 on the CPU, all tensors' elements one after
  // the other. Anchors are contiguous fp32 on the CPU.
  c10::intrusive_ptr<WorkGeoMesh> SignAllReduce(const Tensors& current, const Tensors& anchor,
                                                at::Tensor out, SignArguments arguments);

  // ---- timeouts and hooks ----

  void setTimeout(std::chrono::milliseconds timeout) override;
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout);
  // Nothing to agree on, it begins at 0 everywhere; before 2.15 the default threw.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void enableCollectivesTiming() override {}  // they always are
#if defined(C10D_BACKEND_HAS_HOOKS)
  // Called before the works of a failed group end with their error (which wait 0.3 s for it, no
  // longer), and by abort(). shutdown() waits for them, 10 s at most.
  void registerAbortHook(int64_t hook_id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t hook_id) override;
#endif
#if defined(GEOMESH_TORCH_HAS_COMPLETION_HOOKS)
  bool supportsAbortHooks() const override { return true; }
  // Called on the completion thread when an operation has succeeded.
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t hook_id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t hook_id) override;
#endif
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;

  // ---- memory: plain CPU memory is as good as any other ----

  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  // Virtual from torch 2.15 on. suspend() gives back what is kept for the next operations, which
  // are refused until resume(); nothing may be pending. Bytes: "used" by operations under way,
  // "kept" for the next, "unexpected" from all peers of the process, before their receives.
  void suspend();
  void resume();
  std::unordered_map<std::string, uint64_t> getMemoryStats();

  // ---- beginning, regrouping, ending ----

  bool isInitialized();  // NOLINT: c10d's name
  bool supportsSplitting() const override { return true; }
  // No group for a rank that is not one of `ranks`.
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                          const int& rank, const int& size) override;
  bool supportsShrinking() const override { return true; }
  // Works also when this group has failed. shrink_flags 1: ends what is pending first.
  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts_override) override;
#if defined(C10D_BACKEND_HAS_RECONFIGURE)
  bool supportsReconfigure() const override { return true; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  // Of an unordered set of handles, neighbours in rank are neighbours in the topology.
  Work reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif
#if defined(C10D_BACKEND_HAS_WINDOW)
  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif
  // Ends everything pending; the group is of no more use. Returns at once.
  void abort() override;
  // Lets pending operations end, at most the linger time, then aborts. Then waits for hooks and
  // callbacks, 10 s at most.
  void shutdown() override;

  std::vector<transport::PeerStats> Stats();
  std::vector<std::string> regions() const;  // by rank
  uint64_t channel() const;

 private:
  friend class WindowGeoMesh;
  struct Operation;
  // An operation that has its place in the group's order, and how it ends.
  struct Issued {
    c10::intrusive_ptr<WorkGeoMesh> work;
    absl::Time deadline;
    std::function<void(const absl::Status&, const exec::Outcome&)> done;  // once, on any thread
  };
  struct EphemeralTimeout {
    std::chrono::milliseconds extension;
    bool attached = false;  // ends with a work that was issued already
  };

  Operation Begin(const char* name, const char* title, c10d::OpType type, std::string detail);
  c10::intrusive_ptr<WorkGeoMesh> Launch(Operation operation, std::chrono::milliseconds timeout);
  // Operations that were all checked before the first one begins, as one work.
  Work LaunchAll(std::vector<Operation> operations, Tensors outputs,
                 std::chrono::milliseconds timeout);
  Operation GatherInto(at::Tensor& output, at::Tensor& input);
  // `outputs`: of each rank, as many as inputs.
  Operation GatherLists(const char* name, c10d::OpType type, const std::vector<Tensors>& outputs,
                        const Tensors& inputs);
  Operation ReduceScatterFrom(at::Tensor& output, at::Tensor& input,
                              const c10d::ReduceScatterOptions& opts);
  // For what the executor's services do: no program.
  Issued LaunchService(Operation operation, std::chrono::milliseconds timeout);
  Issued Issue(Operation& operation, std::chrono::milliseconds timeout);  // mutex_ is held
  // One handle for works that were issued together, at least one.
  Work Join(std::vector<c10::intrusive_ptr<WorkGeoMesh>> works, Tensors outputs);
  void OnFailed();
  std::chrono::milliseconds Lengthened(std::chrono::milliseconds timeout,
                                       std::shared_ptr<void>* until_done);
  c10::intrusive_ptr<WorkGeoMesh> Estimate(Operation operation);
  Work PointToPoint(Tensors& tensors, int peer, int tag, bool sending);
  // The running one; throws after shutdown().
  std::shared_ptr<exec::Executor> executor();
  absl::Status Usable() const;  // mutex_ is held
  int CheckRoot(const std::string& operation, int64_t root) const;
  // For texts: which rank of the job this one of the group is, where that is known.
  int64_t JobRank(int64_t rank) const;
  void AcquireProcess();
  transport::PeerRecord OwnRecord() const;
  // From now on the group is these processes, in this order.
  void Connect(std::vector<transport::PeerRecord> records, uint64_t channel);
  c10::intrusive_ptr<Options> ChildOptions(
      const c10::intrusive_ptr<c10d::Backend::Options>& given) const;
  uint64_t ChildChannel(const char* kind, const std::vector<int>& members);

  struct Ending;
  // How long the end of a group waits for hooks and callbacks when all else is done: a flight
  // recorder takes seconds to write.
  static constexpr absl::Duration kHooksLimit = absl::Seconds(10);
  void WarnOfHooks() const;

  // A fork of the process that made the group has this object, but not the engine's threads.
  bool forked() const { return getpid() != owner_; }
  void CheckOwner() const;  // throws where forked

  const pid_t owner_ = getpid();
  const c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Process> process_;
  const std::shared_ptr<Pending> pending_ = std::make_shared<Pending>();
  const std::shared_ptr<Hooks> hooks_ = std::make_shared<Hooks>();

  mutable std::mutex mutex_;  // guards what is below, and keeps the order of operations
  std::vector<transport::PeerRecord> records_;  // by rank
  uint64_t channel_ = 0;
  std::shared_ptr<plan::PlanCache> plans_;
  std::shared_ptr<exec::Executor> executor_;  // none before reconfigure() and after shutdown()
  std::chrono::milliseconds timeout_;
  uint64_t sequence_ = 0;
  int64_t reading_ = 0;  // operations not started yet: their inputs come from a GPU
  bool suspended_ = false;
  bool shut_ = false;
  std::list<std::shared_ptr<EphemeralTimeout>> ephemeral_timeouts_;
  std::optional<std::vector<c10::intrusive_ptr<WorkGeoMesh>>> coalesced_;  // while coalescing
  std::optional<double> estimate_s_;                                       // while estimating
  uint64_t windows_ = 0;
  std::map<std::pair<std::string, std::vector<int>>, uint64_t> children_;  // made so far
  std::set<int64_t> reconfigured_;                                         // uuids
};

}  // namespace geomesh::group
