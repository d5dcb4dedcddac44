// A job in one process: N engines over wire/fake that know each other, and what runs calls on them.
// For tests of exec and of what stands on it. Ranks are named "rank0", "rank1", ... on the network,
// are on hosts "host0", ..., in regions "region0", ...
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "exec/executor.h"
#include "transport/engine.h"
#include "transport/wire/fake.h"

namespace geomesh::testing {

// How long a test waits for what must happen, before it says that it did not.
inline constexpr std::chrono::seconds kPatience{60};

struct CallResult {
  absl::Status status = absl::UnknownError("the call never ended");
  exec::Outcome outcome;
};

// A started call. Dies loudly if `done` runs twice (a promise is set once).
class PendingCall {
 public:
  bool ended() const {
    return future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  const CallResult& Wait() {
    if (future_.wait_for(kPatience) == std::future_status::ready) result_ = future_.get();
    return result_;
  }

 private:
  friend PendingCall Start(exec::Executor& executor, exec::Call call);
  std::shared_future<CallResult> future_;
  CallResult result_;
};

// Starts `call` (whose `done` is set here).
inline PendingCall Start(exec::Executor& executor, exec::Call call) {
  auto promise = std::make_shared<std::promise<CallResult>>();
  PendingCall pending;
  pending.future_ = promise->get_future().share();
  call.done = [promise](const absl::Status& status, const exec::Outcome& outcome) {
    promise->set_value({status, outcome});
  };
  executor.Start(std::move(call));
  return pending;
}

class FakeWorld {
 public:
  struct Options {
    transport::EngineOptions engine;
    transport::FakeNetwork::Link link;
  };

  explicit FakeWorld(int world) : FakeWorld(world, Options()) {}
  FakeWorld(int world, Options options)
      : network_(std::make_unique<transport::FakeNetwork>(options.link)) {
    std::vector<transport::PeerRecord> records;
    for (int rank = 0; rank < world; ++rank) {
      transport::EngineOptions engine = options.engine;
      engine.host = absl::StrCat("host", rank);
      engine.region = absl::StrCat("region", rank);
      auto created = transport::Engine::Create(engine, network_->MakeWire(WireName(rank)));
      if (!created.ok()) {
        ADD_FAILURE() << created.status();
        std::abort();
      }
      engines_.push_back(*std::move(created));
      transport::PeerRecord record;
      record.uid = engines_.back()->uid();
      record.rank = rank;
      record.host = engine.host;
      record.region = engine.region;
      record.wire = std::string(engines_.back()->wire_name());
      record.address = engines_.back()->address();
      records.push_back(std::move(record));
    }
    for (const auto& engine : engines_) {
      std::vector<transport::PeerId> ids;
      for (const transport::PeerRecord& record : records) {
        ids.push_back(*engine->Call([&] { return engine->AddPeer(record); }));
      }
      peers_.push_back(std::move(ids));
    }
  }

  static std::string WireName(int rank) { return absl::StrCat("rank", rank); }

  int world() const { return static_cast<int>(engines_.size()); }
  transport::FakeNetwork& network() { return *network_; }
  transport::Engine& engine(int rank) { return *engines_[rank]; }
  // Rank `of` as rank `rank`'s engine knows it.
  transport::PeerId peer(int rank, int of) const { return peers_[rank][of]; }

  // Rank `rank`'s executor of a group of these members (group rank = place in the list).
  std::unique_ptr<exec::Executor> MakeExecutor(int rank, uint64_t channel,
                                               const std::vector<int>& members) {
    std::vector<transport::PeerId> peers;
    int group_rank = -1;
    for (const int member : members) {
      if (member == rank) group_rank = static_cast<int>(peers.size());
      peers.push_back(peers_[rank][member]);
    }
    return std::make_unique<exec::Executor>(engines_[rank].get(), channel, group_rank,
                                            std::move(peers));
  }

  // All ranks' executors of a group of everybody.
  std::vector<std::unique_ptr<exec::Executor>> MakeExecutors(uint64_t channel) {
    std::vector<int> everybody;
    for (int rank = 0; rank < world(); ++rank) everybody.push_back(rank);
    std::vector<std::unique_ptr<exec::Executor>> executors;
    for (int rank = 0; rank < world(); ++rank) {
      executors.push_back(MakeExecutor(rank, channel, everybody));
    }
    return executors;
  }

 private:
  std::unique_ptr<transport::FakeNetwork> network_;
  std::vector<std::unique_ptr<transport::Engine>> engines_;
  std::vector<std::vector<transport::PeerId>> peers_;
};

}  // namespace geomesh::testing
