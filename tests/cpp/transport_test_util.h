// Two or more engines in one process for the transport's tests.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "notification.h"
#include "transport/engine.h"
#include "transport/wire/fake.h"

namespace geomesh::transport {

inline constexpr uint64_t kChannel = 0xc0ffee;
inline constexpr absl::Duration kTestLimit = absl::Seconds(60);  // only ever reached by a failure

inline std::vector<std::byte> RandomBytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint64_t> words(size / 8 + 1);
  for (uint64_t& word : words) word = random();
  std::vector<std::byte> bytes(size);
  if (size > 0) std::memcpy(bytes.data(), words.data(), size);
  return bytes;
}

// Compares by memcmp: with a sanitizer, byte by byte takes minutes.
struct Bytes {
  absl::Span<const std::byte> span;
  friend bool operator==(const Bytes& a, const std::vector<std::byte>& b) {
    return a.span.size() == b.size() &&
           (b.empty() || std::memcmp(a.span.data(), b.data(), b.size()) == 0);
  }
};

// The result of a Send; waits for it.
class Done {
 public:
  absl::Status Wait(absl::Duration limit = kTestLimit) {
    if (!state_->over.WaitForNotificationWithTimeout(limit)) {
      return absl::DeadlineExceededError("the test's limit");
    }
    return state_->status;
  }
  bool over() const { return state_->over.HasBeenNotified(); }
  void Finish(absl::Status status) {
    state_->status = std::move(status);
    state_->over.Notify();
  }

 private:
  struct State {
    Notification over;
    absl::Status status;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// The result of a Recv, with its buffer.
class Received {
 public:
  explicit Received(size_t capacity) { state_->buffer.resize(capacity); }
  absl::Status Wait(absl::Duration limit = kTestLimit) {
    if (!state_->over.WaitForNotificationWithTimeout(limit)) {
      return absl::DeadlineExceededError("the test's limit");
    }
    return state_->result.status();
  }
  bool over() const { return state_->over.HasBeenNotified(); }
  size_t size() const { return state_->result.value_or(0); }
  Bytes bytes() const { return {absl::MakeConstSpan(state_->buffer).first(size())}; }
  absl::Span<std::byte> buffer() { return absl::MakeSpan(state_->buffer); }
  void Finish(absl::StatusOr<size_t> result) {
    state_->result = std::move(result);
    state_->over.Notify();
  }

 private:
  struct State {
    Notification over;
    std::vector<std::byte> buffer;
    absl::StatusOr<size_t> result;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// One engine, as rank `rank`, on a wire of the network.
class Node {
 public:
  Node(FakeNetwork* network, std::string name, int rank, EngineOptions options = {})
      : name(std::move(name)), rank(rank) {
    absl::StatusOr<std::unique_ptr<Engine>> created =
        Engine::Create(std::move(options), network->MakeWire(this->name));
    EXPECT_TRUE(created.ok()) << created.status();
    engine = *std::move(created);
  }

  PeerRecord Record() const {
    PeerRecord record;
    record.uid = engine->uid();
    record.rank = rank;
    record.host = absl::StrCat("host-", name);
    record.region = absl::StrCat("region-", name);
    record.wire = std::string(engine->wire_name());
    record.address = engine->address();
    return record;
  }

  PeerId Add(const PeerRecord& record) {
    return *engine->Call([&] { return engine->AddPeer(record); });
  }
  PeerId Id(const Node& peer) { return Add(peer.Record()); }

  Done Send(const Node& to, MessageKey key, const std::vector<std::byte>& bytes,
            uint32_t fingerprint = 0) {
    return Send(to.Record(), key, bytes, fingerprint);
  }
  Done Send(const PeerRecord& to, MessageKey key, const std::vector<std::byte>& bytes,
            uint32_t fingerprint = 0) {
    Done done;
    // Sent from a copy that lives until it is done, as the engine demands, whatever the test does.
    auto kept = std::make_shared<const std::vector<std::byte>>(bytes);
    engine->Post([engine = engine.get(), to, key, fingerprint, kept, done]() mutable {
      engine->Send(*engine->AddPeer(to), {key, fingerprint}, absl::MakeConstSpan(*kept),
                   [kept, done](const absl::Status& status) mutable { done.Finish(status); });
    });
    return done;
  }
  Received Recv(const Node& from, MessageKey key, size_t capacity, uint32_t fingerprint = 0) {
    return Recv(from.Record(), key, capacity, fingerprint);
  }
  Received Recv(const PeerRecord& from, MessageKey key, size_t capacity, uint32_t fingerprint = 0) {
    Received received(capacity);
    engine->Post([engine = engine.get(), from, key, fingerprint, received]() mutable {
      engine->Recv(*engine->AddPeer(from), {key, fingerprint}, received.buffer(),
                   [received](absl::StatusOr<size_t> result) mutable {
                     received.Finish(std::move(result));
                   });
    });
    return received;
  }

  PeerStats Stats(const Node& peer) {
    const PeerId id = Id(peer);
    return engine->Call([&] { return engine->Stats(); })[static_cast<size_t>(id)];
  }

  const std::string name;
  const int rank;
  std::unique_ptr<Engine> engine;
};

struct Pair {
  explicit Pair(FakeNetwork* network, EngineOptions options = {})
      : a(network, "a", 0, options), b(network, "b", 1, options) {
    a.Id(b);
    b.Id(a);
  }
  Node a, b;
};

}  // namespace geomesh::transport
