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

void Check(const absl::Status& status) {
  if (!status.ok()) Throw(absl::Status(status.code(), absl::StrCat("geomesh: ", status.message())));
}

}  // namespace

ProcessGroupGeoMesh::ProcessGroupGeoMesh(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                         int size, c10::intrusive_ptr<Options> options)
    : c10d::Backend(rank, size), options_(std::move(options)), timeout_(options_->timeout) {
  AcquireProcess();
  if (!options_->enable_reconfigure) {
    const absl::Time deadline = absl::Now() + absl::FromChrono(timeout_);
    Meeting meeting = options_->meeting;
    for (int r = 0; options_->meeting.members.empty() && r < size; ++r)
      meeting.members.push_back(r);
    TORCH_CHECK(meeting.members.size() == static_cast<size_t>(size), "geomesh: a group of ", size,
                " ranks with ", meeting.members.size(), " members");
    absl::StatusOr<Rendezvous> met = Meet(*store, OwnRecord(), meeting, deadline);
    Check(met.status());
    Connect(std::move(met->records), met->channel);
  }
  init();
}

ProcessGroupGeoMesh::ProcessGroupGeoMesh(const ProcessGroupGeoMesh& parent,
                                         const std::vector<int>& members, uint64_t channel,
                                         c10::intrusive_ptr<Options> options)
    : c10d::Backend(static_cast<int>(std::find(members.begin(), members.end(), parent.rank_) -
                                     members.begin()),
                    static_cast<int>(members.size())),
      options_(std::move(options)),
      timeout_(options_->timeout) {
  AcquireProcess();
  std::vector<transport::PeerRecord> records;
  {
    std::lock_guard<std::mutex> lock(parent.mutex_);
    for (const int member : members) {
      transport::PeerRecord record = parent.records_.at(member);
      record.rank = static_cast<int>(records.size());
      records.push_back(std::move(record));
    }
  }
  Connect(std::move(records), channel);
  init();
}

void ProcessGroupGeoMesh::AcquireProcess() {
  TORCH_CHECK(timeout_.count() > 0, "geomesh: the timeout must be positive, got ", timeout_.count(),
              " ms");
  absl::StatusOr<std::shared_ptr<Process>> process =
      Process::Acquire(options_->engine, options_->given);
  TORCH_CHECK_VALUE(!absl::IsInvalidArgument(process.status()), "geomesh, rank ", rank_, ": ",
                    std::string(process.status().message()));
  Check(process.status());
  process_ = *std::move(process);
}

transport::PeerRecord ProcessGroupGeoMesh::OwnRecord() const {
  transport::Engine& engine = process_->engine();
  transport::PeerRecord own;
  own.uid = engine.uid();
  own.rank = rank_;
  own.host = HostName();
  own.region = process_->options().region;
  own.wire = std::string(engine.wire_name());
  own.address = engine.address();
  own.memory = engine.memory_offer();
  own.topology_fingerprint = options_->topology.Fingerprint();
  return own;
}

void ProcessGroupGeoMesh::Connect(std::vector<transport::PeerRecord> records, uint64_t channel) {
  const std::string own_fingerprint = options_->topology.Fingerprint();
  for (const transport::PeerRecord& record : records) {
    if (record.topology_fingerprint != own_fingerprint) {
      Check(absl::FailedPreconditionError(absl::StrCat(
          "rank ", record.rank, " (host ", record.host, ") uses another topology than rank ", rank_,
          ": all ranks need the same GEOMESH_TOPOLOGY. There: ", record.topology_fingerprint,
          "; here: ", own_fingerprint)));
    }
  }
  absl::StatusOr<plan::Topology> topology = MakeTopology(options_->topology, records);
  Check(topology.status());
  auto plans = std::make_shared<plan::PlanCache>(*std::move(topology), rank_);

  std::shared_ptr<Process> process;  // before the executor that runs on it
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (shut_) Throw(Usable());
    process = process_;
  }
  process->CountRanksHere(static_cast<int>(
      std::count_if(records.begin(), records.end(), [&](const transport::PeerRecord& record) {
        return record.host == records[static_cast<size_t>(rank_)].host;
      })));
  transport::Engine& engine = process->engine();
  absl::StatusOr<std::vector<transport::PeerId>> peers =
      engine.Call([&]() -> absl::StatusOr<std::vector<transport::PeerId>> {
        std::vector<transport::PeerId> ids;
        for (const transport::PeerRecord& record : records) {
          absl::StatusOr<transport::PeerId> id = engine.AddPeer(record);
          if (!id.ok()) return id.status();
          ids.push_back(*id);
        }
        return ids;
      });
  Check(peers.status());
  auto executor = std::make_shared<exec::Executor>(&engine, channel, rank_, *std::move(peers),
                                                   [this] { OnFailed(); });
  hooks_->Renew();
  std::unique_lock<std::mutex> lock(mutex_);
  if (shut_) {  // another thread has ended the group
    lock.unlock();
    executor->Disown();
    lock.lock();
    Throw(Usable());
  }
  records_ = std::move(records);
  channel_ = channel;
  plans_ = std::move(plans);
  executor_ = std::move(executor);
}

std::vector<std::string> ProcessGroupGeoMesh::regions() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> regions;
  for (const transport::PeerRecord& record : records_) regions.push_back(record.region);
  return regions;
}

uint64_t ProcessGroupGeoMesh::channel() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return channel_;
}

bool ProcessGroupGeoMesh::isInitialized() {
  std::lock_guard<std::mutex> lock(mutex_);
  return executor_ != nullptr;
}

namespace {

// How long the end of a failed group waits for its reason to leave this process.
constexpr absl::Duration kTellingLimit = absl::Seconds(2);
// Who did not take what was sent, or is not to be waited for, is owed no long goodbye.
constexpr absl::Duration kGoodbye = absl::Seconds(3);
constexpr absl::Duration kGoodbyeAfterTrouble = absl::Milliseconds(200);
constexpr absl::Duration kHooksLimitAfterInterrupt = absl::Seconds(1);

}  // namespace

ProcessGroupGeoMesh::~ProcessGroupGeoMesh() {
  const std::shared_ptr<void> unlocked = Unlocked();
  try {
    shutdown();
  } catch (const std::exception& e) {
    Log(LogLevel::kWarning, "group", absl::StrCat("interrupted at the end: ", e.what()));
  }
}

c10d::ErrorType ProcessGroupGeoMesh::getError() {
  if (!isInitialized() && !forked()) return c10d::ErrorType::SUCCESS;  // nothing has gone wrong yet
  const absl::Status health = executor()->health();
  if (health.ok()) return c10d::ErrorType::SUCCESS;
  return absl::IsDeadlineExceeded(health) ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::COMM_ERROR;
}

void ProcessGroupGeoMesh::abort() {
  if (forked()) return;
  std::shared_ptr<Process> process;  // the group may end meanwhile, and in a hook
  std::shared_ptr<exec::Executor> executor;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    process = process_;
    executor = executor_;
  }
  if (executor == nullptr) return;  // the group has ended already
  {
    pending_->Begin();
    const Pending::Foreign foreign(pending_);
    hooks_->RunAbort();
  }
  executor->Abort(
      absl::CancelledError(absl::StrCat("rank ", JobRank(rank_), " aborted the group")));
}

void ProcessGroupGeoMesh::shutdown() {
  if (forked()) {  // nothing of it runs here, and nothing of it must be torn down
    shut_ = true;
    new std::shared_ptr<exec::Executor>(std::move(executor_));
    new std::shared_ptr<Process>(std::move(process_));
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (shut_) return;
    shut_ = true;
  }
  const absl::Time lingered = absl::Now() + process_->options().linger;
  absl::Time deadline = lingered;
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
  const auto piece = [&] {
    return std::min(deadline, absl::Now() + absl::FromChrono(kInterruptPeriod));
  };

  const bool aborting = hooks_->abort_ran();  // this may be one of its hooks
  while (!pending_->AwaitOwn(piece()) && wait_on() && !aborting) {
  }
  if (const int64_t unfinished = pending_->own(); unfinished > 0) {
    Log(LogLevel::kWarning, "group",
        absl::StrCat("the group ends with ", unfinished, " operations unfinished after ",
                     interrupt  ? "an interrupt"
                     : aborting ? "an abort"
                                : "GEOMESH_LINGER"));
    std::unique_lock<std::mutex> lock(mutex_);
    const std::shared_ptr<exec::Executor> executor = executor_;
    lock.unlock();
    if (executor != nullptr) {  // else it is being configured anew, and they end by that
      executor->Abort(
          absl::CancelledError(absl::StrCat("rank ", JobRank(rank_), " has left the group")));
    }
    pending_->AwaitOwn(absl::InfiniteFuture());
  }
  deadline = absl::Now() + (interrupt ? kHooksLimitAfterInterrupt : kHooksLimit);
  while (!pending_->AwaitIdle(piece()) && wait_on()) {
  }
  WarnOfHooks();
  deadline = interrupt ? absl::Now() : lingered;

  // What was sent last may still be in this process; peers count on it. After a failure that is its
  // reason, and who stands still must not hold the others up.
  if (executor_ != nullptr && !executor_->health().ok())
    deadline = std::min(deadline, absl::Now() + kTellingLimit);
  absl::Status drained;
  do {
    drained = process_->engine().Drain(piece());
  } while (!drained.ok() && wait_on());
  if (!drained.ok()) Log(LogLevel::kWarning, "group", drained.message());
  // The engine ends with its last group, so the last one's word counts.
  process_->engine().LimitGoodbye(drained.ok() && !interrupt ? kGoodbye : kGoodbyeAfterTrouble);

  std::shared_ptr<exec::Executor> executor;
  std::shared_ptr<Process> process;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    executor = std::move(executor_);
    process = std::move(process_);
  }
  if (executor != nullptr) executor->Disown();  // a wait that runs out may hold it still
  executor.reset();  // before the engine that it runs on, which ends with its last group
  process.reset();
  hooks_->Forget();
  if (interrupt) std::rethrow_exception(interrupt);
}

void ProcessGroupGeoMesh::WarnOfHooks() const {
  if (pending_->Idle()) return;
  Log(LogLevel::kWarning, "group",
      absl::StrCat("the group waits no longer for ", pending_->count(),
                   " of its hooks or callbacks, which have not come back"));
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
  if (executor_ == nullptr) Throw(Usable());
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
