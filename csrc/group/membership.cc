// How a group begins and ends: meeting the other ranks, lingering, aborting, and what a fork gets.
#include "group/process_group.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/log.h"

#include <c10/util/Exception.h>

namespace geomesh::group {
namespace {

absl::Duration ToDuration(std::chrono::milliseconds ms) { return absl::Milliseconds(ms.count()); }

}  // namespace

ProcessGroupGeoMesh::ProcessGroupGeoMesh(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                         int size, c10::intrusive_ptr<Options> options)
    : c10d::Backend(rank, size), options_(std::move(options)), timeout_(options_->timeout) {
  TORCH_CHECK(timeout_.count() > 0, "geomesh: the timeout must be positive, got ", timeout_.count(),
              " ms");
  const absl::Time deadline = absl::Now() + ToDuration(timeout_);
  auto check = [](const absl::Status& status) {
    if (!status.ok())
      Throw(absl::Status(status.code(), absl::StrCat("geomesh: ", status.message())));
  };
  absl::StatusOr<std::shared_ptr<Process>> process =
      Process::Acquire(options_->engine, options_->given);
  TORCH_CHECK_VALUE(!absl::IsInvalidArgument(process.status()), "geomesh, rank ", rank, ": ",
                    std::string(process.status().message()));
  check(process.status());
  process_ = *std::move(process);
  transport::Engine& engine = process_->engine();

  transport::PeerRecord own;
  own.uid = engine.uid();
  own.rank = rank;
  own.host = HostName();
  own.region = process_->options().region;
  own.wire = std::string(engine.wire_name());
  own.address = engine.address();
  own.topology_fingerprint = options_->topology.Fingerprint();
  Meeting meeting = options_->meeting;
  for (int r = 0; options_->meeting.members.empty() && r < size; ++r) meeting.members.push_back(r);
  TORCH_CHECK(meeting.members.size() == static_cast<size_t>(size), "geomesh: a group of ", size,
              " ranks with ", meeting.members.size(), " members");
  absl::StatusOr<Rendezvous> met = Meet(*store, own, meeting, deadline);
  check(met.status());
  channel_ = met->channel;
  for (const transport::PeerRecord& record : met->records) {
    if (record.topology_fingerprint != own.topology_fingerprint) {
      check(absl::FailedPreconditionError(absl::StrCat(
          "rank ", record.rank, " (host ", record.host, ") uses another topology than rank ", rank,
          ": all ranks need the same GEOMESH_TOPOLOGY. There: ", record.topology_fingerprint,
          "; here: ", own.topology_fingerprint)));
    }
    regions_.push_back(record.region);
  }
  absl::StatusOr<plan::Topology> topology = MakeTopology(options_->topology, met->records);
  check(topology.status());
  plans_ = std::make_unique<plan::PlanCache>(*std::move(topology), rank);

  absl::StatusOr<std::vector<transport::PeerId>> peers =
      engine.Call([&]() -> absl::StatusOr<std::vector<transport::PeerId>> {
        std::vector<transport::PeerId> ids;
        for (const transport::PeerRecord& record : met->records) {
          absl::StatusOr<transport::PeerId> id = engine.AddPeer(record);
          if (!id.ok()) return id.status();
          ids.push_back(*id);
        }
        return ids;
      });
  check(peers.status());
  executor_ = std::make_shared<exec::Executor>(&engine, channel_, rank, *std::move(peers));
  init();
}

ProcessGroupGeoMesh::~ProcessGroupGeoMesh() {
  try {
    shutdown();
  } catch (const std::exception& e) {
    Log(LogLevel::kWarning, "group", absl::StrCat("interrupted at the end: ", e.what()));
  }
}

c10d::ErrorType ProcessGroupGeoMesh::getError() {
  const absl::Status health = executor()->health();
  if (health.ok()) return c10d::ErrorType::SUCCESS;
  return absl::IsDeadlineExceeded(health) ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::COMM_ERROR;
}

void ProcessGroupGeoMesh::abort() {
  if (forked()) return;
  std::shared_ptr<exec::Executor> executor;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    executor = executor_;
  }
  if (executor == nullptr) return;  // the group has ended already
  executor->Abort(absl::CancelledError(absl::StrCat("rank ", rank_, " aborted the group")));
}

void ProcessGroupGeoMesh::shutdown() {
  if (forked()) {  // nothing of it runs here, and nothing of it must be torn down
    shut_ = true;
    new std::shared_ptr<exec::Executor>(std::move(executor_));
    new std::shared_ptr<Process>(std::move(process_));
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  if (shut_) return;
  shut_ = true;
  absl::Time deadline = absl::Now() + process_->options().linger;
  std::exception_ptr interrupt;  // Ctrl-C: ends the waiting, and is thrown when all is tidied up
  const auto wait_on = [&] {
    try {
      CheckInterrupt();
    } catch (...) {
      interrupt = std::current_exception();
      deadline = absl::Now();
    }
    return absl::Now() < deadline;
  };

  bool idle = pending_ == 0;
  while (!idle) {
    idle = idle_.wait_for(lock, kInterruptPeriod, [this] { return pending_ == 0; });
    lock.unlock();
    const bool go_on = wait_on();
    lock.lock();
    if (!go_on) break;
  }
  if (pending_ > 0) {
    Log(LogLevel::kWarning, "group",
        absl::StrCat("the group ends with ", pending_, " operations unfinished after ",
                     interrupt ? "an interrupt" : "GEOMESH_LINGER"));
    executor_->Abort(absl::CancelledError(absl::StrCat("rank ", rank_, " has left the group")));
    idle_.wait(lock, [this] { return pending_ == 0; });
  }
  lock.unlock();

  // What was sent last may still be in this process; peers count on it.
  absl::Status drained;
  do {
    const absl::Time piece = absl::Now() + absl::FromChrono(kInterruptPeriod);
    drained = process_->engine().Drain(std::min(piece, deadline));
  } while (!drained.ok() && wait_on());
  if (!drained.ok()) Log(LogLevel::kWarning, "group", drained.message());

  lock.lock();
  std::shared_ptr<exec::Executor> executor = std::move(executor_);
  std::shared_ptr<Process> process = std::move(process_);
  lock.unlock();
  executor.reset();  // before the engine that it runs on, which ends with its last group
  process.reset();
  if (interrupt) std::rethrow_exception(interrupt);
}

void ProcessGroupGeoMesh::CheckOwner() const {
  if (forked()) {
    Throw(absl::FailedPreconditionError(absl::StrCat(
        "geomesh, rank ", rank_, ": process ", getpid(), " is a fork of process ", owner_,
        ", which made the group and alone can use it: call it there, or start processes with "
        "spawn and give each a group of its own")));
  }
}

std::shared_ptr<exec::Executor> ProcessGroupGeoMesh::executor() {
  CheckOwner();
  std::lock_guard<std::mutex> lock(mutex_);
  if (executor_ == nullptr)
    Throw(absl::FailedPreconditionError("geomesh: the group was destroyed"));
  return executor_;
}

std::vector<transport::PeerStats> ProcessGroupGeoMesh::Stats() {
  std::shared_ptr<Process> process;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    process = process_;
  }
  if (process == nullptr) Throw(absl::FailedPreconditionError("geomesh: the group was destroyed"));
  transport::Engine& engine = process->engine();
  return engine.Call([&engine] { return engine.Stats(); });
}

}  // namespace geomesh::group
