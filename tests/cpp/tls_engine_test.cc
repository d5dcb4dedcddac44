// The engine over wire/tls, between two engines of one process: 64 MB each way; and what each of
// them says when their keys differ.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "notification.h"
#include "tls_testing.h"
#include "transport/engine.h"

namespace geomesh::transport {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kChannel = 0x5eed;
constexpr size_t kBytes = (64 << 20) + 13;

struct Node {
  std::unique_ptr<Engine> engine;
  int rank;

  Node(int rank, const TlsKeyFiles& keys) : rank(rank) {
    EngineOptions options;
    options.lanes = 4;
    auto created = Engine::Create(options, *MakeTlsWire(OnLoopback(keys)));
    EXPECT_TRUE(created.ok()) << created.status();
    engine = *std::move(created);
  }
  PeerRecord Record() const {
    PeerRecord record;
    record.uid = engine->uid();
    record.rank = rank;
    record.host = absl::StrCat("host-", rank);
    record.region = "loop";
    record.wire = std::string(engine->wire_name());
    record.address = engine->address();
    return record;
  }
  PeerId Add(const Node& other) {
    return *engine->Call([&] { return engine->AddPeer(other.Record()); });
  }
};

struct Result {
  Notification over;
  absl::StatusOr<size_t> value = absl::UnknownError("not over");

  absl::Status Wait(absl::Duration limit = absl::Seconds(60)) {
    if (!over.WaitForNotificationWithTimeout(limit)) return absl::DeadlineExceededError("test");
    return value.status();
  }
};

// Results outlive the test's failure paths: an engine may still finish them.
std::shared_ptr<Result> Send(Node& node, PeerId to, uint64_t id, absl::string_view bytes) {
  auto result = std::make_shared<Result>();
  node.engine->Post([&node, to, id, bytes, result] {
    node.engine->Send(to, {{kChannel, id}}, Span(bytes), [result](const absl::Status& status) {
      result->value = status.ok() ? absl::StatusOr<size_t>(0) : status;
      result->over.Notify();
    });
  });
  return result;
}
std::shared_ptr<Result> Recv(Node& node, PeerId from, uint64_t id, absl::Span<std::byte> buffer) {
  auto result = std::make_shared<Result>();
  node.engine->Post([&node, from, id, buffer, result] {
    node.engine->Recv(from, {{kChannel, id}}, buffer, [result](absl::StatusOr<size_t> got) {
      result->value = std::move(got);
      result->over.Notify();
    });
  });
  return result;
}

void OpenChannel(Node& node, PeerId peer) {
  node.engine->Call([&] {
    Engine::ChannelEvents events;
    events.on_peer_lost = [](PeerId, const absl::Status&) {};
    events.on_closed = [](PeerId, const absl::Status&) {};
    node.engine->OpenChannel(kChannel, {peer}, std::move(events));
  });
}

TEST(TlsEngine, CarriesMessagesBothWays) {
  for (const bool certificates : {false, true}) {
    const TestCa ca;
    Node a(0, certificates ? ca.Issue("a") : SharedKeys(kKey1));
    Node b(1, certificates ? ca.Issue("b") : SharedKeys(kKey1));
    const PeerId b_at_a = a.Add(b), a_at_b = b.Add(a);
    OpenChannel(a, b_at_a);
    OpenChannel(b, a_at_b);
    const std::string from_a = Pattern(kBytes, 7), from_b = Pattern(kBytes, 8);
    std::vector<std::byte> at_a(kBytes), at_b(kBytes);
    auto received_a = Recv(a, b_at_a, 2, absl::MakeSpan(at_a));
    auto received_b = Recv(b, a_at_b, 1, absl::MakeSpan(at_b));
    auto sent_a = Send(a, b_at_a, 1, from_a);
    auto sent_b = Send(b, a_at_b, 2, from_b);
    for (auto& result : {sent_a, sent_b, received_a, received_b}) {
      ASSERT_TRUE(result->Wait().ok()) << result->value.status();
    }
    EXPECT_TRUE(Bytes(at_a) == from_b);
    EXPECT_TRUE(Bytes(at_b) == from_a);
    EXPECT_EQ(a.engine->Call([&] { return a.engine->Stats(); })[0].lanes, 4);
  }
}

// Whichever of them dials, both say it, at once, by rank.
TEST(TlsEngine, BothSidesSayThatKeysDiffer) {
  Node a(0, SharedKeys(kKey1)), b(1, SharedKeys(kKey2));
  const PeerId b_at_a = a.Add(b), a_at_b = b.Add(a);
  OpenChannel(a, b_at_a);
  OpenChannel(b, a_at_b);
  auto at_a = Send(a, b_at_a, 1, "x"), at_b = Send(b, a_at_b, 1, "x");
  const absl::Time start = absl::Now();
  EXPECT_FALSE(at_a->Wait().ok());
  EXPECT_FALSE(at_b->Wait().ok());
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  for (const auto& [result, rank] : {std::pair(at_a, "rank 1"), std::pair(at_b, "rank 0")}) {
    const std::string text(result->value.status().message());
    EXPECT_THAT(text, HasSubstr(rank));
    EXPECT_THAT(text, HasSubstr("the other side has another key; give both the same file"));
  }
}

}  // namespace
}  // namespace geomesh::transport
