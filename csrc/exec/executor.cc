// One group's operations: their order, deadlines, and the one failure that ends them all.
#include "exec/executor.h"

#include <algorithm>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "exec/census.h"
#include "exec/mailbox.h"
#include "exec/monitored_barrier.h"
#include "exec/operation.h"
#include "exec/point_to_point.h"
#include "exec/windows.h"

namespace geomesh::exec {
namespace {

// How long before its deadline an operation asks the others who is behind, or how long one that has
// met another operation waits for what they say.
constexpr absl::Duration kCensusTime = absl::Seconds(1);

}  // namespace

// Everything but `health` belongs to the engine thread.
struct Executor::State : GroupContext, std::enable_shared_from_this<Executor::State> {
  struct Entry {
    std::shared_ptr<Operation> operation;
    bool matched = true;  // false: a receive that does not yet know its message
    uint64_t timer = 0;
    bool has_timer = false;
    absl::Time begin;
  };

  void Open();
  void Start(std::shared_ptr<Call> call);
  void Schedule();
  // Counts a send's or receive's message; returns what receives are matched by that.
  std::vector<PointToPointCounts::Matched> CountMessage(uint64_t number, Call& call);
  void Take(const std::vector<PointToPointCounts::Matched>& matched);
  const Operation* QueuedBehind(const Operation& operation) const;
  absl::Status Explain(const absl::Status& cause, const Operation& operation) const;
  int RankOf(transport::PeerId peer) const;
  std::vector<transport::PeerId> Others() const;
  // From now on receives that do not know their message fail.
  void NoneComes(const absl::Status& reason);
  void FailUnmatched();
  // The services end with the group.
  void CloseServices(const absl::Status& reason);
  void SetTimer(Entry& entry, absl::Time when, uint64_t number, void (State::*handler)(uint64_t));
  void BeforeDeadline(uint64_t number);
  void OnDeadline(uint64_t number);
  // The operation has met another one: asks the others what they called, then fails.
  void FailAfterCensus(absl::Status cause, uint64_t number);
  // A collective's message has come before its receive: remembered, to see that it gets one.
  void OnEarly(transport::PeerId peer, uint64_t message_id);
  // A collective has ended here and left a message over.
  void CheckLeftOver(uint64_t sequence);
  void FailOverStray(transport::PeerId peer, uint64_t sequence);
  // Ends the group. `culprit`: the operation whose error `cause` is, or null for the group's own.
  // `told`: `cause` is what a peer told, and already names its origin.
  void Fail(absl::Status cause, Operation* culprit, bool told = false);
  void Leave(const absl::Status& reason);  // fails only where anything is pending
  void ShutDown(std::shared_ptr<std::promise<void>> drained);
  // Records the first reason; returns the one that counts.
  absl::Status Record(const absl::Status& reason);

  void OnEnded(Operation& operation, const absl::Status& status) override;
  void OnStray(transport::PeerId peer, uint64_t sequence) override {
    if (!failed) FailOverStray(peer, sequence);
  }
  void OnFailed(Operation& operation, absl::Status cause) override {
    // A lost peer is the whole group's trouble, not this operation's.
    const bool lost = cause.code() == absl::StatusCode::kUnavailable;
    const bool different = cause.code() == absl::StatusCode::kFailedPrecondition;
    if (different && operation.call().fingerprint != 0 && !operation.call().point_to_point) {
      FailAfterCensus(std::move(cause), operation.number());
    } else {
      Fail(std::move(cause), lost ? nullptr : &operation);
    }
  }

  std::shared_ptr<ComputeThread> compute_holder;
  std::shared_ptr<Mailbox> mailbox;
  std::unique_ptr<Census> census;
  std::shared_ptr<MonitoredBarrier> monitored_barrier;
  std::shared_ptr<Windows> windows;
  PointToPointCounts counts;
  absl::Status met;            // why FailAfterCensus or FailOverStray is on its way; OK: neither is
  uint64_t last_sequence = 0;  // of the collectives called here
  std::map<uint64_t, std::vector<std::pair<transport::PeerId, uint64_t>>> early;  // by sequence
  std::map<uint64_t, Entry> operations;  // unfinished, by issue number
  uint64_t next_number = 0;
  size_t not_started = 0;
  bool scheduling = false;
  bool schedule_again = false;
  bool failed = false;
  std::set<transport::PeerId> gone;  // that have left the group, or were lost
  absl::Status none_comes;
  std::shared_ptr<std::promise<void>> drained;
  absl::AnyInvocable<void() &&> on_failed;

  mutable std::mutex mutex;  // guards health
  absl::Status health;
};

void Executor::State::Open() {
  transport::Engine::ChannelEvents events;
  // A peer that is gone is noticed by the messages that are due from or to it. A receive from any
  // rank has none yet; as long as one of the others is there, it may come.
  const auto gone = [weak = weak_from_this()](transport::PeerId peer, const absl::Status& reason) {
    const auto state = weak.lock();
    if (state == nullptr) return;
    state->gone.insert(peer);
    if (state->gone.size() + 1 == state->peers.size()) state->NoneComes(reason);
  };
  events.on_peer_lost = gone;
  events.on_peer_left = gone;
  events.on_closed = [weak = weak_from_this()](transport::PeerId peer, const absl::Status& status) {
    const auto state = weak.lock();
    if (state == nullptr) return;
    // The text names its origin; who passed it on to us does not matter.
    absl::string_view text = status.message();
    absl::ConsumePrefix(&text,
                        absl::StrCat(state->engine->DescribePeer(peer), " closed the channel: "));
    state->Fail(absl::Status(status.code(), text), nullptr, /*told=*/true);
  };
  events.on_unexpected = [weak = weak_from_this()](transport::PeerId peer,
                                                   const transport::MessageKey& key) {
    const auto state = weak.lock();
    if (state == nullptr || state->failed) return;
    if ((key.id & kPointToPointMessages) != 0) {
      state->Take(state->counts.OnUnexpected(state->RankOf(peer), key.id));
    } else if (key.id < kWindowMessages) {
      state->OnEarly(peer, key.id);
    }
  };
  mailbox = std::make_shared<Mailbox>(engine, channel, peers);
  census = std::make_unique<Census>(engine, mailbox.get(), rank, peers);
  monitored_barrier = std::make_shared<MonitoredBarrier>(engine, mailbox.get(), rank, peers);
  windows = std::make_shared<Windows>(engine, mailbox.get(), channel, peers,
                                      [weak = weak_from_this()](absl::Status reason) {
                                        if (const auto state = weak.lock()) {
                                          state->Fail(std::move(reason), nullptr);
                                        }
                                      });
  engine->OpenChannel(channel, Others(), std::move(events));
  mailbox->Open();
}

std::vector<transport::PeerId> Executor::State::Others() const {
  std::vector<transport::PeerId> others = peers;
  others.erase(others.begin() + rank);
  return others;
}

void Executor::State::NoneComes(const absl::Status& reason) {
  none_comes = reason;
  FailUnmatched();
}

void Executor::State::FailUnmatched() {
  if (failed || none_comes.ok()) return;
  for (const auto& [number, entry] : operations) {
    if (!entry.matched) return Fail(none_comes, entry.operation.get());
  }
}

int Executor::State::RankOf(transport::PeerId peer) const {
  return static_cast<int>(std::find(peers.begin(), peers.end(), peer) - peers.begin());
}

void Executor::State::CloseServices(const absl::Status& reason) {
  mailbox->Close();
  monitored_barrier->Close(reason);
  windows->Close(reason);
}

std::vector<PointToPointCounts::Matched> Executor::State::CountMessage(uint64_t number,
                                                                       Call& call) {
  const PointToPoint& message = *call.point_to_point;
  if (!message.sending) return counts.Post(number, message.peer, message.tag);
  call.first_message_id = counts.NextSent(message.peer, message.tag);
  return {};
}

void Executor::State::Take(const std::vector<PointToPointCounts::Matched>& matched) {
  for (const PointToPointCounts::Matched& match : matched) {
    const auto it = operations.find(match.receive);
    if (it == operations.end()) continue;
    Operation& operation = *it->second.operation;
    Call& call = operation.call();
    call.first_message_id = match.message_id;
    if (call.point_to_point->receive_from) {
      auto program = call.point_to_point->receive_from(match.rank);
      if (!program.ok()) return Fail(program.status(), &operation);
      call.program = *std::move(program);
    }
    it->second.matched = true;
  }
  if (!matched.empty()) Schedule();
}

void Executor::State::Start(std::shared_ptr<Call> call) {
  if (failed || drained != nullptr) {
    absl::Status reason;
    {
      std::lock_guard<std::mutex> lock(mutex);
      reason = health;
    }
    if (reason.ok()) reason = absl::CancelledError("the group is being destroyed");
    const absl::Status refused(reason.code(),
                               absl::StrCat(call->operation, ", sequence ", call->sequence,
                                            ": refused, the group has failed: ", reason.message()));
    std::move(call->done)(refused, Outcome{});
    return;
  }
  auto operation = Operation::Create(this, next_number, call);
  if (!operation.ok()) {
    std::move(call->done)(operation.status(), Outcome{});
    return;
  }
  const uint64_t number = next_number++;
  Entry& entry = operations[number];
  entry.operation = *std::move(operation);
  entry.begin = absl::Now();
  ++not_started;
  std::vector<PointToPointCounts::Matched> matched;
  if (call->point_to_point.has_value()) {
    entry.matched = call->point_to_point->sending;
    matched = CountMessage(number, *call);
  } else {
    call->first_message_id = call->sequence << kMessageBits;
    last_sequence = std::max(last_sequence, call->sequence);
    if (call->fingerprint != 0) census->Note(call->sequence, call->fingerprint, call->operation);
  }
  if (call->deadline != absl::InfiniteFuture()) {
    const absl::Duration early =
        std::clamp((call->deadline - entry.begin) / 10, absl::ZeroDuration(), kCensusTime);
    SetTimer(entry, call->deadline - early, number, &State::BeforeDeadline);
  }
  if (matched.empty()) {
    Schedule();
    FailUnmatched();
  } else {
    Take(matched);
  }
}

void Executor::State::SetTimer(Entry& entry, absl::Time when, uint64_t number,
                               void (State::*handler)(uint64_t)) {
  entry.has_timer = true;
  entry.timer = engine->AddTimer(when, [weak = weak_from_this(), number, handler] {
    if (const auto state = weak.lock()) (state.get()->*handler)(number);
  });
}

const Operation* Executor::State::QueuedBehind(const Operation& operation) const {
  for (const auto& [number, entry] : operations) {
    if (number >= operation.number()) break;
    const bool waits = operation.ConflictsWith(*entry.operation) ||
                       (operation.after_all() && !entry.operation->point_to_point());
    if (waits) return entry.operation.get();
  }
  return nullptr;
}

absl::Status Executor::State::Explain(const absl::Status& cause, const Operation& operation) const {
  std::string not_begun;
  if (!operations.at(operation.number()).matched) {
    not_begun = ": no message with its tag has come";
  } else if (const Operation* behind = QueuedBehind(operation); behind != nullptr) {
    not_begun = absl::StrCat(", behind ", behind->Name());
  }
  return operation.Explain(cause, not_begun);
}

// Starts what may start. The oldest collective always may (its conflicts are with older ones
// only), on every rank alike, so turns can't deadlock.
void Executor::State::Schedule() {
  schedule_again = true;
  if (scheduling || !met.ok()) return;  // what has not begun does not begin any more
  scheduling = true;
  while (schedule_again && not_started > 0 && !failed) {
    schedule_again = false;
    int in_flight = 0;
    // An operation may end in its own Start, so iterators don't last.
    for (auto it = operations.begin(); it != operations.end() && !failed;) {
      const uint64_t number = it->first;
      const std::shared_ptr<Operation> operation = it->second.operation;
      if (!operation->point_to_point()) ++in_flight;
      if (!operation->started() && it->second.matched &&
          (operation->point_to_point() || in_flight <= kMaxInFlight) &&
          QueuedBehind(*operation) == nullptr) {
        --not_started;
        operation->Start();
      }
      it = operations.upper_bound(number);
    }
  }
  scheduling = false;
}

void Executor::State::OnEnded(Operation& operation, const absl::Status& status) {
  const auto it = operations.find(operation.number());
  if (it == operations.end()) return;
  const Entry entry = std::move(it->second);  // keeps the operation while its call ends
  operations.erase(it);
  if (!operation.started()) --not_started;
  if (entry.has_timer) engine->CancelTimer(entry.timer);
  if (!operation.call().point_to_point) census->Forget(operation.call().sequence);
  const bool collective = !operation.call().point_to_point;
  const uint64_t sequence = operation.call().sequence;
  std::move(operation.call().done)(status, operation.outcome());
  if (!failed && collective) CheckLeftOver(sequence);
  if (operations.empty() && drained != nullptr) {
    drained->set_value();
    return;
  }
  if (!failed) Schedule();
}

void Executor::State::BeforeDeadline(uint64_t number) {
  const auto it = operations.find(number);
  if (it == operations.end()) return;
  const Call& call = it->second.operation->call();
  SetTimer(it->second, call.deadline, number, &State::OnDeadline);
  if (!failed && call.fingerprint != 0 && !call.point_to_point) census->Ask(call.sequence);
}

void Executor::State::FailAfterCensus(absl::Status cause, uint64_t number) {
  if (!met.ok()) return;
  met = cause;
  const auto fail = [weak = weak_from_this(), cause, number] {
    const auto state = weak.lock();
    if (state == nullptr) return;
    const auto it = state->operations.find(number);
    if (it != state->operations.end()) state->Fail(cause, it->second.operation.get());
  };
  engine->AddTimer(absl::Now() + kCensusTime, fail);
  census->Ask(operations.at(number).operation->call().sequence, fail);
}

void Executor::State::OnEarly(transport::PeerId peer, uint64_t message_id) {
  const uint64_t sequence = message_id >> kMessageBits;
  if (sequence <= last_sequence &&
      std::none_of(operations.begin(), operations.end(), [&](const auto& entry) {
        const Call& call = entry.second.operation->call();
        return !call.point_to_point && call.sequence == sequence;
      })) {
    return FailOverStray(peer, sequence);
  }
  early[sequence].emplace_back(peer, message_id);
}

void Executor::State::CheckLeftOver(uint64_t sequence) {
  const auto it = early.find(sequence);
  if (it == early.end()) return;
  const auto messages = std::move(it->second);
  early.erase(it);
  for (const auto& [peer, id] : messages) {
    if (engine->IsUnexpected(peer, {channel, id})) return FailOverStray(peer, sequence);
  }
}

void Executor::State::FailOverStray(transport::PeerId peer, uint64_t sequence) {
  if (!met.ok()) return;
  const absl::Status cause = absl::FailedPreconditionError(absl::StrCat(
      "sequence ", sequence, ": ", engine->DescribePeer(peer),
      " sent a message for it that this rank's operation does not take: the ranks have called "
      "different operations, or with different roots or sizes"));
  met = cause;
  const auto fail = [weak = weak_from_this(), cause, sequence] {
    const auto state = weak.lock();
    if (state == nullptr) return;
    state->Fail(
        absl::Status(cause.code(), absl::StrCat(cause.message(), state->census->Report(sequence))),
        nullptr);
  };
  engine->AddTimer(absl::Now() + kCensusTime, fail);
  census->Ask(sequence, fail);
}

void Executor::State::OnDeadline(uint64_t number) {
  const auto it = operations.find(number);
  if (it == operations.end()) return;
  it->second.has_timer = false;
  const std::string record = failed ? "" : engine->WriteRecord();
  Fail(absl::DeadlineExceededError(
           absl::StrFormat("not done within its timeout of %.1f s%s",
                           absl::ToDoubleSeconds(absl::Now() - it->second.begin),
                           record.empty() ? "" : absl::StrCat(" (last events: ", record, ")"))),
       it->second.operation.get());
}

absl::Status Executor::State::Record(const absl::Status& reason) {
  std::lock_guard<std::mutex> lock(mutex);
  if (health.ok()) health = reason;
  return health;
}

void Executor::State::Fail(absl::Status cause, Operation* culprit, bool told) {
  if (failed) return;
  failed = true;
  if (culprit != nullptr) {
    cause = Explain(cause, *culprit);
    const Call& call = culprit->call();
    if (call.fingerprint != 0 && !call.point_to_point) {
      cause =
          absl::Status(cause.code(), absl::StrCat(cause.message(), census->Report(call.sequence)));
    }
  }
  const absl::Status reason = Record(cause);
  if (on_failed != nullptr) std::move(on_failed)();
  on_failed = nullptr;
  if (reason.message() != cause.message()) culprit = nullptr, told = false;  // Abort came first

  std::vector<std::shared_ptr<Operation>> pending;
  for (const auto& [number, entry] : operations) {
    Operation& operation = *entry.operation;
    pending.push_back(entry.operation);
    if (&operation == culprit) {
      operation.Stop(reason);
    } else if (culprit != nullptr) {
      operation.Stop(absl::Status(
          reason.code(),
          absl::StrCat(operation.Name(), ": ended with its group, because of ", reason.message())));
    } else {
      operation.Stop(Explain(reason, operation));
    }
  }

  // What was told is passed on as it is, so that everybody reads one origin.
  const absl::Status tell =
      told ? reason
           : absl::Status(
                 reason.code(),
                 absl::StrCat(
                     engine->DescribePeer(peers[rank]), " reported: ", reason.message(),
                     absl::FormatTime(" (at %H:%M:%E3S UTC)", absl::Now(), absl::UTCTimeZone())));
  engine->CloseChannel(channel, tell, Others());
  CloseServices(reason);
  for (const std::shared_ptr<Operation>& operation : pending) operation->EndIfIdle();
}

void Executor::State::Leave(const absl::Status& reason) {
  if (failed) return;
  if (!met.ok()) {  // nobody calls here any more who could be told
    Log(LogLevel::kError, "exec", absl::StrCat(reason.message(), ", but ", met.message()));
    Fail(met, nullptr);
  } else if (!operations.empty()) {
    Fail(absl::Status(reason.code(), absl::StrCat(reason.message(), " with ", operations.size(),
                                                  " operations pending")),
         nullptr);
  } else {
    // Nothing is due to anybody: whoever still works among themselves is left in peace.
    failed = true;
    CloseServices(Record(reason));
    engine->CloseChannel(channel, absl::OkStatus(), Others());
  }
}

void Executor::State::ShutDown(std::shared_ptr<std::promise<void>> promise) {
  Leave(absl::CancelledError("the group was destroyed"));
  if (operations.empty()) {
    promise->set_value();
  } else {
    drained = std::move(promise);
  }
}

Executor::Executor(transport::Engine* engine, uint64_t channel, int rank,
                   std::vector<transport::PeerId> peers, absl::AnyInvocable<void() &&> on_failed)
    : state_(std::make_shared<State>()) {
  state_->engine = engine;
  state_->channel = channel;
  state_->rank = rank;
  state_->peers = std::move(peers);
  state_->on_failed = std::move(on_failed);
  state_->compute_holder = ComputeThread::Shared();
  state_->compute = state_->compute_holder.get();
  engine->Call([state = state_] { state->Open(); });
}

Executor::~Executor() {
  auto drained = std::make_shared<std::promise<void>>();
  std::future<void> done = drained->get_future();
  state_->engine->Post(
      [state = state_, drained]() mutable { state->ShutDown(std::move(drained)); });
  done.wait();
  // Joined here if this was the last group: no task is left, and this is not the compute thread.
  const std::shared_ptr<ComputeThread> compute = std::move(state_->compute_holder);
}

void Executor::Disown() {
  state_->engine->Call([state = state_] { state->on_failed = nullptr; });
}

void Executor::Start(Call call) {
  StartQuietly(std::move(call));
  state_->engine->Nudge(/*here=*/false);
}

void Executor::StartQuietly(Call call) {
  state_->engine->PostQuietly(
      [state = state_, call = std::make_shared<Call>(std::move(call))]() mutable {
        state->Start(std::move(call));
      });
}

void Executor::Abort(absl::Status reason) {
  if (reason.ok()) reason = absl::CancelledError("aborted");
  reason = state_->Record(reason);
  state_->engine->Post([state = state_, reason] { state->Fail(reason, nullptr); });
}

void Executor::Leave(absl::Status reason) {
  state_->engine->Post([state = state_, reason = std::move(reason)] { state->Leave(reason); });
}

void Executor::EnterMonitoredBarrier(absl::Time deadline, absl::Duration timeout, bool all,
                                     std::function<void(const absl::Status&)> done) {
  state_->engine->Post([state = state_, deadline, timeout, all, done = std::move(done)]() mutable {
    state->monitored_barrier->Enter(deadline, timeout, all, std::move(done));
  });
}

void Executor::WithWindows(absl::AnyInvocable<void(Windows&) &&> work) {
  state_->engine->Post(
      [state = state_, work = std::move(work)]() mutable { std::move(work)(*state->windows); });
}

Executor::Memory Executor::MemoryStats() const {
  return state_->engine->Call([state = state_.get()]() -> Memory {
    return {.used_bytes = state->scratch.taken_bytes(), .kept_bytes = state->scratch.kept_bytes()};
  });
}

void Executor::ReleaseMemory() {
  state_->engine->Call([state = state_.get()] { state->scratch.Clear(); });
}

absl::Status Executor::health() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->health;
}

}  // namespace geomesh::exec
