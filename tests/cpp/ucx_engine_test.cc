// The engine over wire/ucx, between two processes: 64 MB each way, then one of them is killed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>

#include "absl/synchronization/notification.h"
#include "transport/engine.h"
#include "ucx_testing.h"

namespace geomesh::transport {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kChannel = 0x5eed;
constexpr size_t kBytes = (64 << 20) + 13;

std::vector<std::byte> Pattern(uint64_t seed) {
  std::vector<std::byte> bytes(kBytes);
  uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  for (std::byte& b : bytes) {
    state = state * 6364136223846793005 + 1442695040888963407;
    b = static_cast<std::byte>(state >> 56);
  }
  return bytes;
}

struct Node {
  std::unique_ptr<Engine> engine;
  int rank;

  explicit Node(int rank) : rank(rank) {
    EngineOptions options;
    options.lanes = 4;
    auto created = Engine::Create(options, *MakeUcxWire(OnLoopback()));
    EXPECT_TRUE(created.ok()) << created.status();
    engine = *std::move(created);
  }

  std::string Record() const {
    PeerRecord record;
    record.uid = engine->uid();
    record.rank = rank;
    record.host = absl::StrCat("host-", rank);
    record.region = "loop";
    record.wire = std::string(engine->wire_name());
    record.address = engine->address();
    return record.Serialize();
  }
  PeerId Add(absl::string_view record) {
    return *engine->Call([&] { return engine->AddPeer(*PeerRecord::Parse(record)); });
  }
};

// One result, waited for from outside the engine's thread.
struct Result {
  absl::Notification over;
  absl::StatusOr<size_t> value = absl::UnknownError("not over");

  absl::Status Wait(absl::Duration limit = absl::Seconds(60)) {
    if (!over.WaitForNotificationWithTimeout(limit)) return absl::DeadlineExceededError("test");
    return value.status();
  }
};

// Results outlive the test's failure paths: an engine may still finish them.
std::shared_ptr<Result> Send(Node& node, PeerId to, uint64_t id,
                             absl::Span<const std::byte> bytes) {
  auto result = std::make_shared<Result>();
  node.engine->Post([&node, to, id, bytes, result] {
    node.engine->Send(to, {{kChannel, id}}, bytes, [result](const absl::Status& status) {
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

// Echoes message 1 as message 2, then waits to be killed.
int RunEcho() {
  Node node(1);
  Process::WriteLine(1, node.Record());
  const PeerId peer = node.Add(*Process::ReadLine(0));
  std::vector<std::byte> buffer(kBytes);
  if (!Recv(node, peer, 1, absl::MakeSpan(buffer))->Wait().ok()) return 1;
  if (!Send(node, peer, 2, buffer)->Wait().ok()) return 1;
  Process::WriteLine(1, "echoed");
  for (;;) pause();
}

TEST(UcxEngine, CarriesMessagesAndSeesAKilledProcess) {
  Node node(0);
  Process other("echo", {});
  const std::string record = *other.Hear();
  other.Tell(node.Record());
  const PeerId peer = node.Add(record);

  auto lost = std::make_shared<Result>();
  node.engine->Call([&] {
    Engine::ChannelEvents events;
    events.on_peer_lost = [lost](PeerId, const absl::Status& why) {
      lost->value = why;
      lost->over.Notify();
    };
    events.on_closed = [](PeerId, const absl::Status&) {};
    node.engine->OpenChannel(kChannel, {peer}, std::move(events));
  });

  const std::vector<std::byte> bytes = Pattern(7);
  std::vector<std::byte> back(kBytes);
  auto received = Recv(node, peer, 2, absl::MakeSpan(back));
  auto sent = Send(node, peer, 1, bytes);
  ASSERT_TRUE(sent->Wait().ok()) << sent->value.status();
  ASSERT_TRUE(received->Wait().ok()) << received->value.status();
  EXPECT_EQ(*received->value, kBytes);
  EXPECT_TRUE(back == bytes);
  EXPECT_EQ(node.engine->Call([&] { return node.engine->Stats(); })[0].lanes, 4);
  ASSERT_EQ(other.Hear(), "echoed");

  // Nobody takes this one: what the unexpected buffer there holds arrives, the rest waits.
  auto stuck = Send(node, peer, 3, bytes);
  auto never = Recv(node, peer, 4, absl::MakeSpan(back));
  const absl::Time start = absl::Now();
  other.Kill(SIGKILL);
  EXPECT_FALSE(stuck->Wait().ok());
  EXPECT_FALSE(never->Wait().ok());
  EXPECT_FALSE(lost->Wait().ok());
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  EXPECT_THAT(std::string(lost->value.status().message()), HasSubstr("rank 1"));
  EXPECT_FALSE(absl::IsDeadlineExceeded(stuck->value.status())) << stuck->value.status();
}

}  // namespace
}  // namespace geomesh::transport

int main(int argc, char** argv) {
  geomesh::transport::EnsureUcxEnvironment(argv);
  if (argc == 2 && std::string(argv[1]) == "--as=echo") {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    return geomesh::transport::RunEcho();
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
