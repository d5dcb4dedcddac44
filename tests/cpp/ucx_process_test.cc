// wire/ucx between processes: death, stops, forked and exec'd children, strangers on the port.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/prctl.h>

#include "base/log.h"
#include "transport/wire/sockets.h"
#include "ucx_testing.h"

namespace geomesh::transport {
namespace {

using ::testing::HasSubstr;

// ---- what the other process does

// What it leaves behind beside its wire.
void HoldSockets(const std::string& how) {
  if (how == "fork") {
    // As a DataLoader's worker: lives on after its parent, calls nothing of UCX.
    if (fork() == 0) {
      for (;;) pause();
    }
  } else if (how == "spawn") {
    char name[] = "sleep", time[] = "60";
    char* argv[] = {name, time, nullptr};
    pid_t child;
    if (posix_spawn(&child, "/bin/sleep", nullptr, nullptr, argv, environ) != 0) abort();
  }
}

// Hears an address, dials two lanes, says "up" when both are, then runs until it is killed.
int RunDialler(const std::string& how) {
  End end(OnLoopback());
  auto address = Process::ReadLine(0);
  if (!end.address.ok() || !address.has_value()) return 1;
  if (!end.wire->Dial(*address, "the test", 2, Span("from afar")).ok()) return 1;
  bool told = false;
  for (;;) {
    end.wire->Progress();
    if (end.events.up.size() == 2 && !told) {
      told = true;
      HoldSockets(how);
      Process::WriteLine(1, "up");
    }
  }
}

// ---- tests

// A process that accepted two lanes of ours.
struct WithAcceptor {
  Process other;
  End end{OnLoopback()};
  LaneId lane{};

  explicit WithAcceptor(const std::string& how = "plain") : other("acceptor", {how}) {
    auto address = other.Hear();
    EXPECT_TRUE(address.has_value());
    auto first = end.wire->Dial(*address, "rank 1 on host b", 2, Span("hi"));
    EXPECT_TRUE(first.ok()) << first.status();
    lane = *first;
    EXPECT_TRUE(Run([&] { return end.events.up.size() == 2; }));
    EXPECT_EQ(other.Hear(), "accepted");
  }
  bool Run(const std::function<bool()>& done, absl::Duration limit = absl::Seconds(20)) {
    return RunUntil({end.wire.get()}, done, limit);
  }
};

TEST(UcxProcess, SegmentsBetweenTwoProcesses) {
  WithAcceptor w;
  std::string payload(kMaxSegmentPayloadBytes, 'x');
  for (size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<char>(i * 31 + i / 256);
  constexpr int kCount = 200;
  for (int i = 0; i < kCount; ++i) {
    ASSERT_TRUE(w.end.wire
                    ->Post(w.lane, Span(absl::StrCat("segment ", i)),
                           Span(absl::string_view(payload).substr(i * 1000)), PostToken{1})
                    .ok());
  }
  ASSERT_TRUE(w.Run([&] { return w.end.events.segments.size() == kCount; }));
  for (int i = 0; i < kCount; ++i) {
    EXPECT_EQ(w.end.events.segments[i].header, absl::StrCat("segment ", i));
    EXPECT_TRUE(w.end.events.segments[i].payload == payload.substr(i * 1000)) << i;
  }
}

// From the kill to the loss of both lanes.
absl::Duration KillAndWait(Process& other, End& end, size_t lanes) {
  const absl::Time start = absl::Now();
  other.Kill(SIGKILL);
  EXPECT_TRUE(RunUntil({end.wire.get()}, [&] { return end.events.lost.size() == lanes; }));
  for (auto& [lane, reasons] : end.events.lost) EXPECT_EQ(reasons.size(), 1) << lane;
  return absl::Now() - start;
}

TEST(UcxProcess, KilledAcceptorIsSeenAtOnce) {
  WithAcceptor w;
  EXPECT_LT(KillAndWait(w.other, w.end, 2), absl::Seconds(2));
  const std::string reason(w.end.events.lost.begin()->second[0].message());
  EXPECT_THAT(reason, HasSubstr("lane 0 to rank 1 on host b: connection lost: UCX: "));
}

TEST(UcxProcess, KilledDiallerIsSeenAtOnce) {
  End end(OnLoopback());
  Process other("dialler", {"plain"});
  other.Tell(*end.address);
  ASSERT_TRUE(RunUntil({end.wire.get()}, [&] { return end.events.accepted.size() == 2; }));
  EXPECT_EQ(end.events.accepted[0].hello, "from afar");
  EXPECT_LT(KillAndWait(other, end, 2), absl::Seconds(2));
}

// With much posted: each post ends exactly once, in success or with an error.
TEST(UcxProcess, KilledInMidTransfer) {
  for (int round = 0; round < 5; ++round) {
    WithAcceptor w;
    const std::string payload(kMaxSegmentPayloadBytes, 'x');
    constexpr uint64_t kCount = 400;
    for (uint64_t i = 0; i < kCount; ++i) {
      ASSERT_TRUE(w.end.wire
                      ->Post(LaneId{static_cast<uint32_t>(w.lane) + static_cast<uint32_t>(i % 2)},
                             Span("h"), Span(payload), PostToken{i})
                      .ok());
    }
    ASSERT_TRUE(w.Run([&] { return w.end.events.posted.size() > 10 * round; }));
    EXPECT_LT(KillAndWait(w.other, w.end, 2), absl::Seconds(2));
    ASSERT_TRUE(w.Run([&] { return w.end.events.posted.size() == kCount; }))
        << w.end.events.posted.size();
    int failed = 0;
    for (auto& [token, statuses] : w.end.events.posted) {
      EXPECT_EQ(statuses.size(), 1) << token;
      failed += !statuses[0].ok();
    }
    EXPECT_GT(failed, 0);
    // The wire is as good as new for others.
    Process next("acceptor", {"plain"});
    ASSERT_TRUE(w.end.wire->Dial(*next.Hear(), "next", 2, {}).ok());
    ASSERT_TRUE(w.Run([&] { return w.end.events.up.size() == 4; }));
  }
}

// A child that inherited the lanes' sockets would keep them alive.
TEST(UcxProcess, ForkedChildOfAcceptorHoldsNoLane) {
  WithAcceptor w("fork");
  EXPECT_LT(KillAndWait(w.other, w.end, 2), absl::Seconds(2));
}
TEST(UcxProcess, SpawnedChildOfAcceptorHoldsNoLane) {
  WithAcceptor w("spawn");
  EXPECT_LT(KillAndWait(w.other, w.end, 2), absl::Seconds(2));
}
TEST(UcxProcess, ChildOfDiallerHoldsNoLane) {
  for (const char* how : {"fork", "spawn"}) {
    End end(OnLoopback());
    Process other("dialler", {how});
    other.Tell(*end.address);
    ASSERT_TRUE(RunUntil({end.wire.get()}, [&] { return end.events.accepted.size() == 2; }));
    ASSERT_EQ(other.Hear(), "up");
    EXPECT_LT(KillAndWait(other, end, 2), absl::Seconds(2)) << how;
  }
}

// The parent's lanes are none the worse for a fork, and the child closes only what is the wire's.
TEST(UcxProcess, ParentGoesOnAfterFork) {
  WithAcceptor w;
  const int other_socket = socket(AF_INET, SOCK_STREAM, 0);
  int result[2];
  ASSERT_EQ(pipe(result), 0);
  const pid_t child = fork();
  if (child == 0) {
    int sockets = 0;
    ForEachTcpSocket([&](const SocketInfo&) { ++sockets; });
    const bool kept = fcntl(other_socket, F_GETFD) >= 0;
    w.end.wire.reset();  // as at an exit: must not touch what the parent shares
    Process::WriteLine(result[1], absl::StrCat(sockets, kept ? " kept" : " lost"));
    _exit(0);
  }
  EXPECT_EQ(Process::ReadLine(result[0]), "1 kept");
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  for (int fd : {other_socket, result[0], result[1]}) close(fd);
  ASSERT_TRUE(w.end.wire->Post(w.lane, Span("still"), Span("here"), PostToken{1}).ok());
  ASSERT_TRUE(w.Run([&] { return w.end.events.segments.size() == 1; }));
  EXPECT_TRUE(w.end.events.lost.empty());
}

// TCP cannot tell a stopped process from a slow one: no loss, posts stay pending, and Close ends
// them all at once.
TEST(UcxProcess, StoppedPeerIsNotLostAndCanBeClosed) {
  WithAcceptor w;
  w.other.Kill(SIGSTOP);
  const std::string payload(kMaxSegmentPayloadBytes, 'x');
  constexpr uint64_t kCount = 200;
  for (uint64_t i = 0; i < kCount; ++i) {
    ASSERT_TRUE(w.end.wire->Post(w.lane, Span("h"), Span(payload), PostToken{i}).ok());
  }
  EXPECT_FALSE(w.Run([&] { return !w.end.events.lost.empty(); }, absl::Seconds(2)));
  EXPECT_LT(w.end.events.posted.size(), kCount);
  const absl::Time start = absl::Now();
  w.end.wire->Close(w.lane);
  w.end.wire->Close(LaneId{static_cast<uint32_t>(w.lane) + 1});
  ASSERT_TRUE(w.Run([&] { return w.end.events.posted.size() == kCount; }, absl::Seconds(5)));
  EXPECT_LT(absl::Now() - start, absl::Seconds(1));
  EXPECT_TRUE(w.end.events.lost.empty());
  // And the wire goes away quickly, too.
  w.end.wire.reset();
  EXPECT_LT(absl::Now() - start, absl::Seconds(2));
}

// As above, but the wire itself is destroyed with all that pending.
TEST(UcxProcess, WireCanBeDestroyedWithPostsPending) {
  WithAcceptor w;
  w.other.Kill(SIGSTOP);
  auto payload = std::make_unique<std::string>(kMaxSegmentPayloadBytes, 'x');
  for (uint64_t i = 0; i < 200; ++i) {
    ASSERT_TRUE(w.end.wire->Post(w.lane, Span("h"), Span(*payload), PostToken{i}).ok());
  }
  const absl::Time start = absl::Now();
  w.end.wire.reset();
  EXPECT_LT(absl::Now() - start, absl::Seconds(2));
  payload.reset();
}

// Variables meant for another UCX program in the same job reach neither the settings nor the log.
TEST(UcxProcess, ForeignUcxVariablesDoNotDisturb) {
  Process other("acceptor", {"plain"},
                {"env", "UCX_TLS=nonsense", "UCX_NET_DEVICES=mlx9:1", "UCX_PREFIX=/x",
                 "UCX_RNDV_THRESH=1", "UCX_ZCOPY_THRESH=inf", "UCX_TCP_TX_SEG_SIZE=1m",
                 "UCX_TCP_RX_SEG_SIZE=2m", "UCX_TCP_AF_PRIO=inet6", "UCX_TCP_PORT_RANGE=1-2",
                 "UCX_TCP_CONN_NB=n", "UCX_NO_SUCH_THING=1"});
  const std::string address = *other.Hear();  // the first line: nothing came before it on stdout
  End end(OnLoopback());
  auto lane = end.wire->Dial(address, "rank 1", 2, {});
  ASSERT_TRUE(lane.ok()) << lane.status();
  ASSERT_TRUE(RunUntil({end.wire.get()}, [&] { return end.events.up.size() == 2; }));
  ASSERT_EQ(other.Hear(), "accepted");
  const std::string payload(kMaxSegmentPayloadBytes, 'x');
  for (uint64_t i = 0; i < 50; ++i) {
    ASSERT_TRUE(end.wire->Post(*lane, Span("h"), Span(payload), PostToken{i}).ok());
  }
  ASSERT_TRUE(RunUntil({end.wire.get()}, [&] { return end.events.segments.size() == 50; }));
  for (const auto& segment : end.events.segments) EXPECT_TRUE(segment.payload == payload);
}

// ---- strangers on the port (what of it can be survived: see docs/security.md)

int ConnectTo(uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
  return fd;
}

TEST(UcxProcess, SurvivesStrangersWithoutTheMagic) {
  WithAcceptor w;
  int before = 0;
  ForEachTcpSocket([&](const SocketInfo&) { ++before; });
  std::vector<std::string> payloads = {
      "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
      std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11), "SSH-2.0-OpenSSH_9.2\r\n",
      std::string(64, '\0')};
  uint64_t state = 88172645463325252;
  for (int i = 0; i < 100; ++i) {
    std::string random;
    for (int k = 0; k < 1 + i * 7; ++k) {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      random.push_back(static_cast<char>(state));
    }
    payloads.push_back(random);
  }
  const int own = static_cast<int>(w.end.ucx().port());
  int echoed = 0;
  for (const std::string& payload : payloads) {
    const int fd = ConnectTo(own);
    EXPECT_EQ(send(fd, payload.data(), payload.size(), MSG_NOSIGNAL), payload.size());
    // Traffic beside it goes on.
    ASSERT_TRUE(w.end.wire->Post(w.lane, Span("h"), Span("beside"), PostToken{1}).ok());
    ++echoed;
    ASSERT_TRUE(w.Run([&] { return w.end.events.segments.size() == echoed; }));
    close(fd);
  }
  EXPECT_TRUE(w.Run([&] {
    int now = 0;
    ForEachTcpSocket([&](const SocketInfo&) { ++now; });
    return now == before;
  }));
  EXPECT_TRUE(w.end.events.lost.empty());
  EXPECT_TRUE(w.end.events.accepted.empty());
}

}  // namespace

int RunAs(const std::string& mode, const std::string& how) {
  // Dies with the test even if that is killed.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (mode == "--as=acceptor") return RunAcceptor(OnLoopback(), [&] { HoldSockets(how); });
  if (mode == "--as=dialler") return RunDialler(how);
  return 2;
}

}  // namespace geomesh::transport

int main(int argc, char** argv) {
  geomesh::transport::EnsureUcxEnvironment(argv);
  if (argc == 3 && std::string(argv[1]).rfind("--as=", 0) == 0) {
    return geomesh::transport::RunAs(argv[1], argv[2]);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
