// The monitored barrier of a group: rank 0 sees who comes, and says who does not.
//
// Unlike a barrier that fails, one of these that fails leaves the group as it was: ranks that come
// too late are told so at once, and the next one begins anew. Ranks are counted by mail, so a rank
// that has come may have died since. Engine thread only. Knows counts and ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "exec/mailbox.h"
#include "transport/engine.h"

namespace geomesh::exec {

class MonitoredBarrier : public std::enable_shared_from_this<MonitoredBarrier> {
 public:
  // DeadlineExceeded where ranks are missing; Unavailable where they are lost.
  using Done = std::function<void(const absl::Status&)>;

  // Becomes the mailbox's reader.
  MonitoredBarrier(transport::Engine* engine, Mailbox* mailbox, int rank,
                   std::vector<transport::PeerId> peers);

  // This rank has come. `done` runs once, and not within this call. Rank 0 waits until `deadline`
  // and then names the first missing rank, with `all` every one; the others wait for its word, at
  // most until their own `deadline`. `timeout`: what was given, for errors.
  void Enter(absl::Time deadline, absl::Duration timeout, bool all, Done done);

  // The group ends, and with it what waits.
  void Close(const absl::Status& reason);

 private:
  // One barrier of this rank that has not ended.
  struct Waiting {
    absl::Duration timeout;
    bool all = false;
    Done done;
    uint64_t timer = 0;
  };

  void OnMail(size_t rank, absl::string_view text);
  void OnLost(size_t rank, const absl::Status& reason);
  void SetTimer(uint64_t count, absl::Time when, std::function<void(MonitoredBarrier&)> work);
  void OnDeadline(uint64_t count);
  void LookForAll(uint64_t count);
  // On rank 0: ends the barrier, and tells those that came.
  void Decide(uint64_t count, const absl::Status& status);
  void Tell(size_t rank, uint64_t count, const absl::Status& status);
  void End(uint64_t count, const absl::Status& status);
  std::string Failed(uint64_t count, bool all) const;

  transport::Engine* const engine_;
  Mailbox* const mailbox_;
  const size_t rank_;
  const std::vector<transport::PeerId> peers_;

  uint64_t entered_ = 0;                 // barriers of this rank so far
  std::map<uint64_t, Waiting> waiting_;  // by count
  absl::Status closed_;

  // Rank 0 only.
  std::map<uint64_t, std::set<size_t>> came_;  // by barrier that is not decided
  std::map<size_t, std::string> lost_;         // ranks, and why
  std::map<uint64_t, absl::Status> failed_;    // the last ones, for those that come late
};

}  // namespace geomesh::exec
