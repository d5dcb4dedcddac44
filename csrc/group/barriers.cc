// Barriers: the one that is a program like any other, and the one that names who is missing.
#include "absl/strings/str_cat.h"
#include "group/operation.h"
#include "group/process_group.h"

#include <c10/util/Exception.h>

namespace geomesh::group {

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::barrier(const c10d::BarrierOptions& opts) {
  Operation op = Begin("barrier", "geomesh:barrier", c10d::OpType::BARRIER, "");
  op.shape = {.collective = plan::Collective::kBarrier};
  op.call.after_all = true;
  return Launch(std::move(op), opts.timeout);
}

void ProcessGroupGeoMesh::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  Operation op = Begin("monitored_barrier", "geomesh:monitored_barrier", c10d::OpType::BARRIER,
                       wait_all_ranks ? "all ranks" : "");
  Issued issued = LaunchService(std::move(op), opts.timeout);
  executor()->EnterMonitoredBarrier(
      issued.deadline, absl::FromChrono(issued.work->getTimeout()), wait_all_ranks,
      [done = std::move(issued.done), rank = rank_](const absl::Status& status) {
        if (status.ok()) return done(status, {});
        done(absl::Status(status.code(), absl::StrCat("[Rank ", rank, "]: ", status.message())),
             {});
      });
  issued.work->wait();
}

}  // namespace geomesh::group
