#include "exec/monitored_barrier.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "transport/bytes.h"

namespace geomesh::exec {
namespace {

enum class Mail : uint8_t { kCame, kDecided };

constexpr size_t kMaxReasonBytes = 900;
constexpr size_t kRemembered = 64;  // failed barriers

}  // namespace

MonitoredBarrier::MonitoredBarrier(transport::Engine* engine, Mailbox* mailbox, int rank,
                                   std::vector<transport::PeerId> peers)
    : engine_(engine),
      mailbox_(mailbox),
      rank_(static_cast<size_t>(rank)),
      peers_(std::move(peers)) {
  mailbox->SetReader(
      Mailbox::Service::kMonitoredBarrier,
      {.on_mail = [this](size_t from, absl::string_view text) { OnMail(from, text); },
       .on_lost = [this](size_t who, const absl::Status& reason) { OnLost(who, reason); }});
}

void MonitoredBarrier::SetTimer(uint64_t count, absl::Time when,
                                std::function<void(MonitoredBarrier&)> work) {
  waiting_.at(count).timer =
      engine_->AddTimer(when, [weak = weak_from_this(), work = std::move(work)] {
        if (const auto self = weak.lock()) work(*self);
      });
}

void MonitoredBarrier::Enter(absl::Time deadline, absl::Duration timeout, bool all, Done done) {
  const uint64_t count = ++entered_;
  const absl::Time now = absl::Now();
  Waiting& waiting = waiting_[count];
  waiting.timeout = timeout;
  waiting.all = all;
  waiting.done = std::move(done);
  if (!closed_.ok()) {
    const absl::Status reason = closed_;
    SetTimer(count, now, [count, reason](auto& self) { self.End(count, reason); });
    return;
  }
  SetTimer(count, deadline, [count](auto& self) { self.OnDeadline(count); });
  if (rank_ == 0) {
    came_[count].insert(0);
    engine_->Post([weak = weak_from_this(), count] {  // not within this call
      if (const auto self = weak.lock()) self->LookForAll(count);
    });
    return;
  }
  transport::ByteWriter mail;
  mail.Integer(static_cast<uint8_t>(Mail::kCame));
  mail.Integer(count);
  mailbox_->Send(0, Mailbox::Service::kMonitoredBarrier, mail.bytes());
}

void MonitoredBarrier::OnMail(size_t rank, absl::string_view text) {
  transport::ByteReader reader(text);
  uint8_t kind = 0;
  uint64_t count = 0;
  if (!reader.Integer(&kind) || !reader.Integer(&count)) return;
  if (static_cast<Mail>(kind) == Mail::kCame) {
    if (rank_ != 0) return;
    if (const auto failed = failed_.find(count); failed != failed_.end()) {
      return Tell(rank, count, failed->second);
    }
    came_[count].insert(rank);
    return LookForAll(count);
  }
  int32_t code = 0;
  std::string reason;
  if (rank != 0 || !reader.Integer(&code) || !reader.Text(&reason, kMaxReasonBytes)) return;
  if (code == 0) return End(count, absl::OkStatus());
  End(count, absl::Status(static_cast<absl::StatusCode>(code),
                          absl::StrCat("Rank ", rank_,
                                       " successfully reached monitoredBarrier, but received "
                                       "errors while waiting for send/recv from rank 0: ",
                                       reason)));
}

void MonitoredBarrier::OnLost(size_t rank, const absl::Status& reason) {
  if (rank_ != 0) {
    if (rank != 0) return;
    const std::map<uint64_t, Waiting> all = waiting_;
    for (const auto& [count, waiting] : all) {
      End(count, absl::Status(reason.code(),
                              absl::StrCat("Rank ", rank_,
                                           " successfully reached monitoredBarrier, but received "
                                           "errors while waiting for send/recv from rank 0: ",
                                           reason.message())));
    }
    return;
  }
  lost_[rank] = std::string(reason.message());
  const std::map<uint64_t, Waiting> all = waiting_;
  for (const auto& [count, waiting] : all) LookForAll(count);
}

void MonitoredBarrier::LookForAll(uint64_t count) {
  const auto waiting = waiting_.find(count);
  if (waiting == waiting_.end()) return;  // this rank has not come itself, or it is decided
  if (waiting->second.timeout <= absl::ZeroDuration()) return;  // it has no time to look
  const std::set<size_t>& came = came_[count];
  if (came.size() == peers_.size()) return Decide(count, absl::OkStatus());
  // Nobody waits for a rank that can't come any more.
  for (const auto& [rank, why] : lost_) {
    if (came.contains(rank)) continue;
    return Decide(count, absl::UnavailableError(absl::StrCat(
                             "Rank ", rank, " failed to pass monitoredBarrier: ", why)));
  }
}

std::string MonitoredBarrier::Failed(uint64_t count, bool all) const {
  const auto came = came_.find(count);
  std::vector<size_t> missing;
  std::vector<std::string> who;
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    if (came != came_.end() && came->second.contains(rank)) continue;
    missing.push_back(rank);
    who.push_back(engine_->DescribePeer(peers_[rank]));
    if (!all) break;
  }
  return absl::StrCat(missing.size() == 1 ? "Rank " : "Ranks ", absl::StrJoin(missing, ", "),
                      " failed to pass monitoredBarrier in ",
                      absl::ToInt64Milliseconds(waiting_.at(count).timeout), " ms (",
                      absl::StrJoin(who, ", "), ")");
}

void MonitoredBarrier::OnDeadline(uint64_t count) {
  const auto waiting = waiting_.find(count);
  if (waiting == waiting_.end()) return;
  const absl::Duration timeout = waiting->second.timeout;
  if (rank_ != 0) {
    return End(count, absl::DeadlineExceededError(absl::StrCat(
                          "Rank ", rank_,
                          " successfully reached monitoredBarrier, but received errors while "
                          "waiting for send/recv from rank 0: nothing came from ",
                          engine_->DescribePeer(peers_[0]), " in ",
                          absl::ToInt64Milliseconds(timeout), " ms")));
  }
  if (timeout <= absl::ZeroDuration()) {
    return Decide(
        count, absl::DeadlineExceededError(absl::StrCat(
                   "Rank 0 timed out in monitoredBarrier after ",
                   absl::ToInt64Milliseconds(timeout), " ms: it had no time to wait for anybody")));
  }
  Decide(count, absl::DeadlineExceededError(Failed(count, waiting->second.all)));
}

void MonitoredBarrier::Decide(uint64_t count, const absl::Status& status) {
  for (const size_t rank : came_[count]) {
    if (rank != 0) Tell(rank, count, status);
  }
  came_.erase(count);
  if (!status.ok()) {
    failed_.emplace(count, status);
    if (failed_.size() > kRemembered) failed_.erase(failed_.begin());
  }
  End(count, status);
}

void MonitoredBarrier::Tell(size_t rank, uint64_t count, const absl::Status& status) {
  transport::ByteWriter mail;
  mail.Integer(static_cast<uint8_t>(Mail::kDecided));
  mail.Integer(count);
  mail.Integer(static_cast<int32_t>(status.code()));
  mail.Text(status.message(), kMaxReasonBytes);
  mailbox_->Send(rank, Mailbox::Service::kMonitoredBarrier, mail.bytes());
}

void MonitoredBarrier::End(uint64_t count, const absl::Status& status) {
  const auto it = waiting_.find(count);
  if (it == waiting_.end()) return;
  const Done done = std::move(it->second.done);
  engine_->CancelTimer(it->second.timer);
  waiting_.erase(it);
  done(status);
}

void MonitoredBarrier::Close(const absl::Status& reason) {
  if (!closed_.ok()) return;
  closed_ = reason;
  const std::map<uint64_t, Waiting> all = waiting_;
  for (const auto& [count, waiting] : all) End(count, reason);
}

}  // namespace geomesh::exec
