// Lost lanes, lost peers and failed connections over wire/fake: every pending operation ends, with
// an error that names the peer and the reason, and what can go on goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>

#include "absl/time/clock.h"
#include "base/log.h"
#include "transport/engine.h"
#include "transport_test_util.h"

namespace geomesh::transport {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr size_t kSegment = kMaxSegmentPayloadBytes;

EngineOptions Impatient() {
  EngineOptions options;
  options.heartbeat = absl::Milliseconds(20);
  options.suspect_after = absl::Milliseconds(300);
  options.dead_after = absl::Seconds(1);
  options.connect_timeout = absl::Seconds(1);
  return options;
}

void Exchange(Pair* pair, uint64_t id) {
  const std::vector<std::byte> bytes = RandomBytes(1000, id);
  Received received = pair->b.Recv(pair->a, {kChannel, id}, bytes.size());
  Done done = pair->a.Send(pair->b, {kChannel, id}, bytes);
  ASSERT_EQ(received.Wait(), absl::OkStatus());
  ASSERT_EQ(done.Wait(), absl::OkStatus());
  EXPECT_TRUE(received.bytes() == bytes);
}

// Log lines since construction.
class LogLines {
 public:
  LogLines() {
    SetLogSink([this](LogLevel, absl::string_view line) {
      const std::lock_guard<std::mutex> lock(mutex_);
      lines_.emplace_back(line);
    });
  }
  ~LogLines() { SetLogSink(nullptr); }
  int Count(absl::string_view text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(
        std::count_if(lines_.begin(), lines_.end(), [&](const std::string& line) {
          return line.find(std::string(text)) != std::string::npos;
        }));
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

bool Eventually(const std::function<bool()>& holds) {
  const absl::Time limit = absl::Now() + kTestLimit;
  while (!holds() && absl::Now() < limit) absl::SleepFor(absl::Milliseconds(5));
  return holds();
}

struct LostPeer {
  Notification over;
  PeerId peer{};
  absl::Status status;

  void Watch(Node* node, PeerId watched) {
    node->engine->Call([&] {
      Engine::ChannelEvents events;
      events.on_peer_lost = [this](PeerId lost, const absl::Status& why) {
        peer = lost;
        status = why;
        over.Notify();
      };
      node->engine->OpenChannel(kChannel, {watched}, std::move(events));
    });
  }
};

TEST(FailureTest, KilledPeerIsLostAtOnce) {
  FakeNetwork network;
  Pair pair(&network);  // patient options: only the broken lanes can tell
  Exchange(&pair, 1);
  LostPeer lost;
  lost.Watch(&pair.b, pair.b.Id(pair.a));
  Received received = pair.b.Recv(pair.a, {kChannel, 2}, 8);
  const std::vector<std::byte> large = RandomBytes(40 << 20, 1);
  Done done = pair.b.Send(pair.a, {kChannel, 3}, large);
  const absl::Time start = absl::Now();
  network.Kill("a");
  for (const absl::Status& status : {received.Wait(), done.Wait()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("rank 0 on host host-a (region-a)"),
                                                     HasSubstr("connection reset by its process")));
  }
  ASSERT_TRUE(lost.over.WaitForNotificationWithTimeout(kTestLimit));
  EXPECT_EQ(lost.peer, pair.b.Id(pair.a));
  EXPECT_EQ(lost.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(absl::Now() - start, absl::Seconds(2));  // far from suspect_after
  // Later calls end at once, too.
  EXPECT_EQ(pair.b.Send(pair.a, {kChannel, 4}, large).Wait().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(pair.b.Recv(pair.a, {kChannel, 4}, 8).Wait().code(), absl::StatusCode::kUnavailable);
}

TEST(FailureTest, FrozenPeerIsSuspectedThenLost) {
  LogLines log;
  FakeNetwork network;
  Pair pair(&network, Impatient());
  Exchange(&pair, 1);
  Received received = pair.b.Recv(pair.a, {kChannel, 2}, 8);
  const absl::Time start = absl::Now();
  network.Freeze("a");
  const absl::Status status = received.Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("rank 0"), HasSubstr("silent for")));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(500));
  EXPECT_EQ(log.Count("rank 0 on host host-a (region-a) has been silent"), 1);
  // Woken up, it learns that it was given up.
  Received at_a = pair.a.Recv(pair.b, {kChannel, 3}, 8);
  network.Thaw("a");
  EXPECT_EQ(at_a.Wait().code(), absl::StatusCode::kUnavailable);
}

// Heartbeats are too rare to tell: the waiting side asks.
TEST(FailureTest, FrozenPeerIsSuspectedBecauseItWasAsked) {
  LogLines log;
  FakeNetwork network;
  EngineOptions options;
  options.heartbeat = absl::Seconds(60);
  options.suspect_after = absl::Milliseconds(500);
  options.dead_after = absl::Seconds(60);
  Pair pair(&network, options);
  Exchange(&pair, 1);
  Received received = pair.b.Recv(pair.a, {kChannel, 2}, 8);
  network.Freeze("a");
  // Cut off, the other one may suspect this one too.
  EXPECT_TRUE(Eventually(
      [&] { return log.Count("rank 0 on host host-a (region-a) has been silent for") == 1; }));
  network.Thaw("a");
  EXPECT_TRUE(Eventually(
      [&] { return log.Count("rank 0 on host host-a (region-a) is heard again") == 1; }));
  const std::vector<std::byte> bytes = RandomBytes(8, 2);
  Done done = pair.a.Send(pair.b, {kChannel, 2}, bytes);
  EXPECT_EQ(received.Wait(), absl::OkStatus());
  EXPECT_EQ(done.Wait(), absl::OkStatus());
}

TEST(FailureTest, PeerThatIsAskedAndAnswersIsNotSuspected) {
  LogLines log;
  FakeNetwork network;
  EngineOptions options = Impatient();
  options.heartbeat = absl::Seconds(60);
  Pair pair(&network, options);
  Exchange(&pair, 1);
  Received received = pair.b.Recv(pair.a, {kChannel, 2}, 8);
  // Longer than it takes to be given up; each answer begins the silence anew.
  const absl::Time end = absl::Now() + absl::Milliseconds(1500);
  int renewed = 0;
  for (absl::Duration before; absl::Now() < end; absl::SleepFor(absl::Milliseconds(5))) {
    const absl::Duration now = pair.b.Stats(pair.a).silent;
    if (now < before) ++renewed;
    before = now;
  }
  EXPECT_GE(renewed, 5);
  EXPECT_EQ(log.Count("silent"), 0);
  const std::vector<std::byte> bytes = RandomBytes(8, 2);
  Done done = pair.a.Send(pair.b, {kChannel, 2}, bytes);
  EXPECT_EQ(received.Wait(), absl::OkStatus());
}

TEST(FailureTest, ALossLeavesTheLastEventsInAFileThatItsReasonNames) {
  FakeNetwork network;
  EngineOptions options;
  options.record_folder = testing::TempDir();
  Pair pair(&network, options);
  Exchange(&pair, 1);
  Received received = pair.b.Recv(pair.a, {kChannel, 0x22}, 77);
  network.Kill("a");
  const absl::Status status = received.Wait();
  const std::string path = absl::StrCat(testing::TempDir(), "/geomesh-", getpid(), ".events");
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("(last events: ", path, ")")));
  std::string text;
  ASSERT_TRUE(Eventually([&] {
    std::stringstream read;
    read << std::ifstream(path).rdbuf();
    text = read.str();
    return !text.empty();
  }));
  for (const char* event :
       {"rank 0 on host host-a (region-a): connected\n",
        "rank 0 on host host-a (region-a): lane up ", "rank 0 on host host-a (region-a): received ",
        "/0000000000000022, 77 bytes\n", "rank 0 on host host-a (region-a): lane lost ",
        "rank 0 on host host-a (region-a): lost, UNAVAILABLE\n"}) {
    EXPECT_THAT(text, HasSubstr(event));
  }
  std::remove(path.c_str());
}

TEST(FailureTest, ShortPauseIsForgiven) {
  LogLines log;
  FakeNetwork network;
  Pair pair(&network, Impatient());
  Exchange(&pair, 1);
  network.Freeze("a");
  const absl::Time limit = absl::Now() + kTestLimit;
  while (log.Count("silent") == 0 && absl::Now() < limit) absl::SleepFor(absl::Milliseconds(5));
  network.Thaw("a");
  Exchange(&pair, 2);
  EXPECT_EQ(log.Count("lost rank"), 0);
}

TEST(FailureTest, BlackHoleIsLostOnBothSides) {
  FakeNetwork network;
  Pair pair(&network, Impatient());
  Exchange(&pair, 1);
  Received at_a = pair.a.Recv(pair.b, {kChannel, 2}, 8);
  Received at_b = pair.b.Recv(pair.a, {kChannel, 2}, 8);
  network.BlackHole("a", "b");
  for (const char* name : {"a", "b"}) network.IgnoreDials(name);
  EXPECT_THAT(std::string(at_a.Wait().message()), HasSubstr("rank 1 on host host-b"));
  EXPECT_THAT(std::string(at_b.Wait().message()), HasSubstr("rank 0 on host host-a"));
}

// A path that is gone for a while and comes back, over lanes on which TCP has not noticed yet: new
// ones are there in time, and what was on the old ones arrives, also where its send was done.
TEST(FailureTest, SilentLanesAreReplacedBeforeTheirPeerIsGivenUp) {
  for (const int lanes : {1, 2}) {
    FakeNetwork network;
    EngineOptions options;
    options.lanes = lanes;
    options.suspect_after = absl::Milliseconds(400);
    Pair pair(&network, options);
    Exchange(&pair, 1);
    const std::vector<std::byte> from_a = RandomBytes(3 * kSegment + 5, 1);
    const std::vector<std::byte> from_b = RandomBytes(9, 2);
    std::vector<std::byte> bytes_a = from_a, bytes_b = from_b;
    Received at_b = pair.b.Recv(pair.a, {kChannel, 2}, bytes_a.size());
    Received at_a = pair.a.Recv(pair.b, {kChannel, 3}, bytes_b.size());
    network.BlackHole("a", "b");
    ASSERT_EQ(pair.a.Send(pair.b, {kChannel, 2}, bytes_a).Wait(), absl::OkStatus());
    ASSERT_EQ(pair.b.Send(pair.a, {kChannel, 3}, bytes_b).Wait(), absl::OkStatus());
    for (std::vector<std::byte>* bytes : {&bytes_a, &bytes_b}) {
      std::fill(bytes->begin(), bytes->end(), std::byte{0});
    }
    EXPECT_EQ(at_b.Wait(), absl::OkStatus());
    EXPECT_EQ(at_a.Wait(), absl::OkStatus());
    EXPECT_TRUE(at_b.bytes() == from_a);
    EXPECT_TRUE(at_a.bytes() == from_b);
    EXPECT_TRUE(Eventually([&] { return pair.a.Stats(pair.b).lanes == lanes; }));
    Exchange(&pair, 4);
  }
}

// The same again and again, at any moment of the recovery, with some lanes that work and some that
// do not: nothing waits for ever, and nothing comes twice.
TEST(FailureTest, APathThatComesAndGoesLosesNothing) {
  std::mt19937 random(7);
  const auto up_to = [&random](int most) { return static_cast<int>(random() % (most + 1)); };
  for (int world = 0; world < 4; ++world) {
    FakeNetwork network({absl::Milliseconds(3), 0});
    EngineOptions options;
    options.lanes = 1 + world;
    options.heartbeat = absl::Milliseconds(20);
    options.suspect_after = absl::Milliseconds(60);
    Pair pair(&network, options);
    Exchange(&pair, 1);
    for (uint64_t id = 2; id < 20; id += 2) {
      const std::vector<std::byte> from_a = RandomBytes(up_to(3) * kSegment + up_to(99), id);
      const std::vector<std::byte> from_b = RandomBytes(up_to(3) * kSegment + up_to(99), id + 1);
      std::vector<std::byte> bytes_a = from_a, bytes_b = from_b;
      Received at_b = pair.b.Recv(pair.a, {kChannel, id}, from_a.size());
      Received at_a = pair.a.Recv(pair.b, {kChannel, id + 1}, from_b.size());
      Done a = pair.a.Send(pair.b, {kChannel, id}, bytes_a);
      Done b = pair.b.Send(pair.a, {kChannel, id + 1}, bytes_b);
      for (int holes = up_to(3); holes > 0; --holes) {
        absl::SleepFor(absl::Milliseconds(up_to(120)));
        network.BlackHole("a", "b", up_to(2) > 0 ? -1 : up_to(world));
      }
      ASSERT_EQ(a.Wait(), absl::OkStatus());
      ASSERT_EQ(b.Wait(), absl::OkStatus());
      std::fill(bytes_a.begin(), bytes_a.end(), std::byte{0});
      std::fill(bytes_b.begin(), bytes_b.end(), std::byte{0});
      ASSERT_EQ(at_b.Wait(), absl::OkStatus());
      ASSERT_EQ(at_a.Wait(), absl::OkStatus());
      ASSERT_TRUE(at_b.bytes() == from_a);
      ASSERT_TRUE(at_a.bytes() == from_b);
    }
    Exchange(&pair, 50);
    EXPECT_TRUE(Eventually([&] { return pair.a.Stats(pair.b).lanes == options.lanes; }));
  }
}

// One of two lanes breaks in the middle of messages both ways: all arrives, nothing twice.
TEST(FailureTest, LostLaneIsMadeGoodByTheOthers) {
  for (int round = 0; round < 4; ++round) {
    FakeNetwork network({absl::Milliseconds(2), 100e6});
    EngineOptions options;
    options.lanes = 2;
    Pair pair(&network, options);
    Exchange(&pair, 1);
    const std::vector<std::byte> from_a = RandomBytes(12 << 20, 1);
    const std::vector<std::byte> from_b = RandomBytes((12 << 20) + 5, 2);
    Received at_b = pair.b.Recv(pair.a, {kChannel, 2}, from_a.size());
    Received at_a = pair.a.Recv(pair.b, {kChannel, 3}, from_b.size());
    Done a = pair.a.Send(pair.b, {kChannel, 2}, from_a);
    Done b = pair.b.Send(pair.a, {kChannel, 3}, from_b);
    absl::SleepFor(absl::Milliseconds(10 + 15 * round));
    network.Cut("a", "b", round % 2);
    ASSERT_EQ(at_b.Wait(), absl::OkStatus());
    ASSERT_EQ(at_a.Wait(), absl::OkStatus());
    EXPECT_EQ(a.Wait(), absl::OkStatus());
    EXPECT_EQ(b.Wait(), absl::OkStatus());
    EXPECT_TRUE(at_b.bytes() == from_a);
    EXPECT_TRUE(at_a.bytes() == from_b);
    // And it is opened again.
    for (Node* node : {&pair.a, &pair.b}) {
      Node& other = node == &pair.a ? pair.b : pair.a;
      EXPECT_TRUE(Eventually([&] { return node->Stats(other).lanes == 2; }));
      EXPECT_EQ(node->Stats(other).lanes_lost, 1);
    }
    Exchange(&pair, 4);
  }
}

// A lane that only swallows is found by its own silence; what was on it goes another way.
TEST(FailureTest, SilentLaneIsMadeGoodByTheOthers) {
  FakeNetwork network({absl::Milliseconds(1), 8e6});  // busy for longer than dead_after
  EngineOptions options = Impatient();
  options.lanes = 3;
  Pair pair(&network, options);
  Exchange(&pair, 1);
  const std::vector<std::byte> bytes = RandomBytes(40 << 20, 1);
  Received received = pair.b.Recv(pair.a, {kChannel, 2}, bytes.size());
  Done done = pair.a.Send(pair.b, {kChannel, 2}, bytes);
  absl::SleepFor(absl::Milliseconds(30));
  network.BlackHole("a", "b", 1);
  ASSERT_EQ(received.Wait(), absl::OkStatus());
  EXPECT_TRUE(received.bytes() == bytes);
  EXPECT_EQ(done.Wait(), absl::OkStatus());
}

// A lane that swallows what others deliver is taken out long before its peer would be given up.
TEST(FailureTest, StalledLaneIsReplaced) {
  FakeNetwork network({absl::Milliseconds(1), 8e6});
  EngineOptions options;
  options.lanes = 3;
  options.dead_after = absl::Hours(1);
  Pair pair(&network, options);
  Exchange(&pair, 1);
  const std::vector<std::byte> bytes = RandomBytes(90 << 20, 1);
  Received received = pair.b.Recv(pair.a, {kChannel, 2}, bytes.size());
  Done done = pair.a.Send(pair.b, {kChannel, 2}, bytes);
  network.BlackHole("a", "b", 1);
  ASSERT_EQ(received.Wait(), absl::OkStatus());
  EXPECT_TRUE(received.bytes() == bytes);
  EXPECT_EQ(done.Wait(), absl::OkStatus());
  EXPECT_TRUE(Eventually([&] { return pair.a.Stats(pair.b).lanes == 3; }));
  EXPECT_EQ(pair.a.Stats(pair.b).lanes_lost, 1);
}

// Nobody acknowledges a heartbeat by itself: it may stay on a lane's books for long while all that
// is sent takes another lane.
TEST(FailureTest, QuietLaneIsNotTakenForAStalledOne) {
  FakeNetwork network({absl::Milliseconds(1), 0});
  EngineOptions options;
  options.lanes = 3;
  options.heartbeat = absl::Milliseconds(20);
  Pair pair(&network, options);
  uint64_t id = 1;
  Exchange(&pair, id++);
  const auto carries = [&](const PeerStats& stats) {
    return std::all_of(stats.lane_stats.begin(), stats.lane_stats.end(),
                       [](const LaneStats& lane) { return lane.in_flight_bytes > 0; });
  };
  ASSERT_TRUE(Eventually([&] { return carries(pair.a.Stats(pair.b)); }));
  const absl::Time end = absl::Now() + absl::Seconds(3);
  while (absl::Now() < end) Exchange(&pair, id++);
  EXPECT_EQ(pair.a.Stats(pair.b).lanes_lost, 0);
  EXPECT_EQ(pair.b.Stats(pair.a).lanes_lost, 0);
}

// A segment that takes seconds, while another lane's arrives.
TEST(FailureTest, SlowLaneIsNotTakenForAStalledOne) {
  FakeNetwork network({absl::Milliseconds(1), 80e3});
  EngineOptions options;
  options.lanes = 2;
  Pair pair(&network, options);
  Exchange(&pair, 1);
  const std::vector<std::byte> first = RandomBytes(200'000, 1);
  const std::vector<std::byte> second = RandomBytes(kSegment, 2);
  Received at_b = pair.b.Recv(pair.a, {kChannel, 2}, first.size());
  Received later_at_b = pair.b.Recv(pair.a, {kChannel, 3}, second.size());
  Done done = pair.a.Send(pair.b, {kChannel, 2}, first);
  ASSERT_TRUE(Eventually([&] { return pair.a.Stats(pair.b).segments_sent == 2; }));
  absl::SleepFor(absl::Seconds(1));
  Done later = pair.a.Send(pair.b, {kChannel, 3}, second);
  EXPECT_EQ(at_b.Wait(), absl::OkStatus());
  EXPECT_EQ(later_at_b.Wait(), absl::OkStatus());
  EXPECT_TRUE(later_at_b.bytes() == second);
  EXPECT_EQ(pair.a.Stats(pair.b).lanes_lost, 0);
}

// A send is done when the wire has taken it, and its memory is the caller's again. If its lane then
// breaks before delivery, the message still arrives, with the bytes it had; also when the second
// lane breaks.
TEST(FailureTest, MessageWhoseLaneBreaksAfterItsSendWasDoneArrives) {
  FakeNetwork network({absl::Milliseconds(300), 0});
  EngineOptions options;
  options.lanes = 2;
  Pair pair(&network, options);
  Exchange(&pair, 1);
  const std::vector<std::byte> sent = RandomBytes(3 * kSegment + 5, 1), small = RandomBytes(9, 2);
  std::vector<std::byte> bytes = sent, small_bytes = small;
  Received received = pair.b.Recv(pair.a, {kChannel, 2}, bytes.size());
  Received small_received = pair.b.Recv(pair.a, {kChannel, 3}, 9);
  ASSERT_EQ(pair.a.Send(pair.b, {kChannel, 2}, bytes).Wait(), absl::OkStatus());
  ASSERT_EQ(pair.a.Send(pair.b, {kChannel, 3}, small_bytes).Wait(), absl::OkStatus());
  std::fill(bytes.begin(), bytes.end(), std::byte{0});
  std::fill(small_bytes.begin(), small_bytes.end(), std::byte{0});
  network.Cut("a", "b", 0);
  ASSERT_TRUE(Eventually([&] { return pair.a.Stats(pair.b).lanes == 2; }));
  network.Cut("a", "b", 1);
  EXPECT_EQ(received.Wait(), absl::OkStatus());
  EXPECT_TRUE(received.bytes() == sent);
  EXPECT_EQ(small_received.Wait(), absl::OkStatus());
  EXPECT_TRUE(small_received.bytes() == small);
}

// The last of them is another matter.
TEST(FailureTest, MessageLostWithTheLastLaneIsAnError) {
  FakeNetwork network({absl::Milliseconds(300), 0});
  EngineOptions options;
  options.lanes = 1;
  Pair pair(&network, options);
  Exchange(&pair, 1);
  const std::vector<std::byte> bytes = RandomBytes(8, 1);
  Received received = pair.b.Recv(pair.a, {kChannel, 2}, bytes.size());
  ASSERT_EQ(pair.a.Send(pair.b, {kChannel, 2}, bytes).Wait(), absl::OkStatus());
  network.Cut("a", "b");
  EXPECT_EQ(received.Wait().code(), absl::StatusCode::kUnavailable);
}

TEST(FailureTest, LanesAreAddedWhereTheyHelp) {
  FakeNetwork network({absl::Milliseconds(5), 5e6});  // of each lane
  for (const bool dialler_sends : {true, false}) {
    Node one(&network, absl::StrCat("one", dialler_sends), 0);
    Node two(&network, absl::StrCat("two", dialler_sends), 1);
    one.Id(two);
    two.Id(one);
    const bool one_dials = one.engine->uid().high < two.engine->uid().high;
    Node& from = one_dials == dialler_sends ? one : two;
    Node& to = one_dials == dialler_sends ? two : one;
    const std::vector<std::byte> bytes = RandomBytes(80 << 20, 1);
    const std::vector<std::byte> word = RandomBytes(8, 2);
    Received first = to.Recv(from, {kChannel, 1}, word.size());
    ASSERT_EQ(from.Send(to, {kChannel, 1}, word).Wait(), absl::OkStatus());
    ASSERT_EQ(first.Wait(), absl::OkStatus());
    ASSERT_TRUE(Eventually([&] { return from.Stats(to).rtt > absl::ZeroDuration(); }));
    Received received = to.Recv(from, {kChannel, 2}, bytes.size());
    Done done = from.Send(to, {kChannel, 2}, bytes);
    ASSERT_EQ(received.Wait(), absl::OkStatus());
    EXPECT_TRUE(received.bytes() == bytes);
    EXPECT_EQ(done.Wait(), absl::OkStatus());
    const PeerStats stats = from.Stats(to);
    EXPECT_EQ(stats.lanes, 16);
    EXPECT_EQ(stats.lane_stats.size(), 16);
    uint64_t sent = 0;
    for (const LaneStats& lane : stats.lane_stats) sent += lane.bytes_sent;
    EXPECT_GT(sent, bytes.size());
    EXPECT_EQ(stats.lanes_lost, 0);
    EXPECT_GT(stats.queue_wait, absl::Seconds(1));
    // Those opened under load know the path's delay, and not that of the queue they were opened in:
    // a segment alone takes a lane 52 ms.
    for (const LaneStats& lane : stats.lane_stats) {
      EXPECT_LT(lane.min_rtt, absl::Milliseconds(30)) << "lane " << lane.name;
    }
  }
}

TEST(FailureTest, UrgentTrafficHasALaneOfItsOwnUntilThatIsLost) {
  FakeNetwork network;
  EngineOptions options;
  options.lanes = 3;
  options.urgent_lane = true;
  Pair pair(&network, options);
  Exchange(&pair, 1);
  const std::vector<std::byte> bulk = RandomBytes(8 << 20, 1), small = RandomBytes(60'000, 2);
  uint64_t id = 10;
  const auto exchange = [&] {
    std::vector<Received> receives;
    std::vector<Done> sends;
    for (int i = 0; i < 12; ++i) {
      const std::vector<std::byte>& bytes = i % 3 == 0 ? bulk : small;
      for (const bool back : {false, true}) {
        Node &from = back ? pair.b : pair.a, &to = back ? pair.a : pair.b;
        receives.push_back(to.Recv(from, {kChannel, ++id}, bytes.size()));
        sends.push_back(from.Send(to, {kChannel, id}, bytes));
      }
    }
    for (Received& receive : receives) ASSERT_EQ(receive.Wait(), absl::OkStatus());
    for (Done& send : sends) ASSERT_EQ(send.Wait(), absl::OkStatus());
  };
  std::map<uint32_t, uint64_t> before[2];
  for (const bool lost : {false, true}) {
    if (lost) network.Cut("a", "b", 0);
    const auto whole = [&](Node& from, Node& to) {
      const PeerStats stats = from.Stats(to);
      return stats.lanes == 3 && stats.lanes_lost == (lost ? 1 : 0);
    };
    ASSERT_TRUE(Eventually([&] { return whole(pair.a, pair.b) && whole(pair.b, pair.a); }));
    exchange();
    for (const bool back : {false, true}) {
      const PeerStats stats = back ? pair.b.Stats(pair.a) : pair.a.Stats(pair.b);
      std::vector<uint64_t> sent;
      for (const LaneStats& lane : stats.lane_stats) {
        sent.push_back(lane.bytes_sent - before[back][lane.name]);
        before[back][lane.name] = lane.bytes_sent;
      }
      ASSERT_EQ(sent.size(), 3);
      EXPECT_GT(sent[0], 8 * small.size());
      EXPECT_LT(sent[0], 8 * small.size() + 100'000);  // control too
      EXPECT_GT(sent[1] + sent[2], 4 * bulk.size());
    }
  }
}

TEST(FailureTest, RefusedConnectionsAreTriedAgain) {
  FakeNetwork network;
  network.RefuseDials("a", 2);
  network.RefuseDials("b", 2);
  Pair pair(&network);
  Exchange(&pair, 1);
}

TEST(FailureTest, NoConnectionEndsAtTheTimeout) {
  FakeNetwork network;
  network.RefuseDials("a", 1 << 20);
  network.RefuseDials("b", 1 << 20);
  Pair pair(&network, Impatient());
  const std::vector<std::byte> bytes = RandomBytes(8, 1);
  Done a = pair.a.Send(pair.b, {kChannel, 1}, bytes);
  Received b = pair.b.Recv(pair.a, {kChannel, 1}, 8);
  EXPECT_THAT(std::string(a.Wait().message()),
              AllOf(HasSubstr("rank 1 on host host-b (region-b)"), HasSubstr("within 1s")));
  EXPECT_THAT(std::string(b.Wait().message()), HasSubstr("rank 0 on host host-a (region-a)"));
  // The one that dialled knows more.
  EXPECT_TRUE(std::string(a.Wait().message()).find("connection refused") != std::string::npos ||
              std::string(b.Wait().message()).find("connection refused") != std::string::npos);
}

TEST(FailureTest, UnansweredConnectionEndsAtTheTimeout) {
  FakeNetwork network;
  network.IgnoreDials("a");
  network.IgnoreDials("b");
  Pair pair(&network, Impatient());
  EXPECT_EQ(pair.a.Recv(pair.b, {kChannel, 1}, 8).Wait().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(pair.b.Recv(pair.a, {kChannel, 1}, 8).Wait().code(), absl::StatusCode::kUnavailable);
}

// The acceptor may hear of a peer by its connection before its record was read.
TEST(FailureTest, ConnectionWaitsForItsPeerToBeAdded) {
  FakeNetwork network;
  Node a(&network, "a", 0), b(&network, "b", 1);
  const std::vector<std::byte> bytes = RandomBytes(100, 1);
  Done from_a = a.Send(b, {kChannel, 1}, bytes);
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_FALSE(from_a.over());
  Received received = b.Recv(a, {kChannel, 1}, 100);
  EXPECT_EQ(received.Wait(), absl::OkStatus());
  EXPECT_TRUE(received.bytes() == bytes);
}

// A new process has the address of one that ended: the old one's record must not lead to it.
TEST(FailureTest, StaleIncarnationIsRefused) {
  FakeNetwork network;
  for (int round = 0; round < 6; ++round) {
    const std::string name = absl::StrCat("b", round);
    Node a(&network, absl::StrCat("a", round), 0, Impatient());
    auto before = std::make_unique<Node>(&network, name, 1, Impatient());
    const PeerRecord stale = before->Record();
    before.reset();
    Node after(&network, name, 1, Impatient());
    const absl::Status status = a.Recv(stale, {kChannel, 1}, 8).Wait();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    const bool a_dials = a.engine->uid().high < stale.uid.high;
    if (a_dials) {
      EXPECT_THAT(std::string(status.message()), HasSubstr("stale"));
    }
    // The true one is reached.
    const std::vector<std::byte> bytes = RandomBytes(8, 1);
    Received received = after.Recv(a, {kChannel, 1}, 8);
    EXPECT_EQ(a.Send(after, {kChannel, 1}, bytes).Wait(), absl::OkStatus());
    EXPECT_EQ(received.Wait(), absl::OkStatus());
  }
}

TEST(FailureTest, OtherWireAndDamagedAddressAreNamed) {
  FakeNetwork network;
  Node a(&network, "a", 0), b(&network, "b", 1);
  PeerRecord record = b.Record();
  record.wire = "tls";
  EXPECT_THAT(std::string(a.Recv(record, {kChannel, 1}, 8).Wait().message()),
              AllOf(HasSubstr("rank 1"), HasSubstr("\"tls\""), HasSubstr("\"fake\"")));
  record = b.Record();
  record.uid = {~uint64_t{0}, ~uint64_t{0}};  // a dials it
  record.address = "nonsense";
  EXPECT_THAT(std::string(a.Recv(record, {kChannel, 1}, 8).Wait().message()),
              AllOf(HasSubstr("cannot connect to rank 1"), HasSubstr("nonsense")));
}

TEST(FailureTest, LeavingIsNotACrashAndLeavesItsMessages) {
  LogLines log;
  FakeNetwork network({absl::Milliseconds(5), 0});
  EngineOptions options;
  options.lanes = 4;
  auto a = std::make_unique<Node>(&network, "a", 0, options);
  Node b(&network, "b", 1, options);
  const PeerRecord record = a->Record();
  a->Id(b);
  LostPeer lost;
  lost.Watch(&b, b.Id(*a));
  const std::vector<std::byte> bytes = RandomBytes(10 * kSegment + 1, 1);
  Received waiting = b.Recv(*a, {kChannel, 9}, 8);
  ASSERT_EQ(a->Send(b, {kChannel, 1}, bytes).Wait(), absl::OkStatus());
  ASSERT_EQ(a->engine->Drain(absl::Now() + kTestLimit), absl::OkStatus());
  const absl::Time start = absl::Now();
  a.reset();
  EXPECT_LT(absl::Now() - start, absl::Milliseconds(450));  // it did not wait in vain
  ASSERT_TRUE(lost.over.WaitForNotificationWithTimeout(kTestLimit));
  EXPECT_THAT(std::string(lost.status.message()), AllOf(HasSubstr("rank 0"), HasSubstr("left")));
  EXPECT_EQ(waiting.Wait(), lost.status);
  // What it had sent is here.
  Received late = b.Recv(record, {kChannel, 1}, bytes.size());
  ASSERT_EQ(late.Wait(), absl::OkStatus());
  EXPECT_TRUE(late.bytes() == bytes);
  EXPECT_EQ(b.Recv(record, {kChannel, 2}, 8).Wait(), lost.status);
  EXPECT_EQ(log.Count(" E "), 0);
}

TEST(FailureTest, AllLeaveAtOnce) {
  FakeNetwork network;
  std::vector<std::unique_ptr<Node>> nodes;
  for (int i = 0; i < 5; ++i) {
    nodes.push_back(std::make_unique<Node>(&network, absl::StrCat("n", i), i));
  }
  for (auto& node : nodes) {
    for (auto& other : nodes) node->Id(*other);
  }
  std::vector<Received> received;
  const std::vector<std::byte> bytes = RandomBytes(100, 1);
  for (auto& node : nodes) {
    for (auto& other : nodes) {
      node->Send(*other, {kChannel, 1}, bytes);
      received.push_back(node->Recv(*other, {kChannel, 1}, 100));
    }
  }
  for (Received& one : received) ASSERT_EQ(one.Wait(), absl::OkStatus());
  std::vector<std::thread> threads;
  const absl::Time start = absl::Now();
  for (auto& node : nodes) threads.emplace_back([&node] { node.reset(); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
}

TEST(FailureTest, PendingOperationsEndWithTheEngine) {
  FakeNetwork network;
  EngineOptions options;
  options.unexpected_bytes = 1 << 20;
  Pair pair(&network, options);
  Exchange(&pair, 1);
  const std::vector<std::byte> large = RandomBytes(30 << 20, 1);
  Done done = pair.a.Send(pair.b, {kChannel, 2}, large);
  Received received = pair.a.Recv(pair.b, {kChannel, 3}, 8);
  pair.a.engine.reset();
  EXPECT_EQ(done.Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(received.Wait().code(), absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace geomesh::transport
