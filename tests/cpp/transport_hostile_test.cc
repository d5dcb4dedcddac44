// A peer that breaks the protocol: played by hand over wire/fake against a true engine. Whatever it
// sends, the engine neither crashes nor grows; it gives the peer up and says what was wrong, and
// goes on with the others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <functional>
#include <list>
#include <random>

#include "absl/time/clock.h"
#include "base/log.h"
#include "transport/bytes.h"
#include "transport/segment.h"
#include "transport_test_util.h"

namespace geomesh::transport {
namespace {

using ::testing::HasSubstr;

constexpr size_t kSegment = kMaxSegmentPayloadBytes;

// Among the smallest uids of all, so that it is this side that dials.
constexpr ProcessUid kHostileUid{0, 1};

class HostilePeer : private WireEvents {
 public:
  HostilePeer(FakeNetwork* network, const std::string& name, ProcessUid uid = kHostileUid)
      : wire_(network->MakeWire(name)) {
    record_.uid = uid;
    record_.rank = 7;
    record_.host = "hostile";
    record_.wire = "fake";
    record_.address = *wire_->Listen(this);
  }

  const PeerRecord& record() const { return record_; }

  void Dial(const Node& node, std::string hello_bytes = "", int lanes = 1) {
    target_ = node.engine->uid();
    Hello hello;
    hello.dialer = record_.uid;
    hello.target = target_;
    hello.attempt = ++attempt_;
    hello.unexpected_bytes = 32 << 20;
    hello.description = "hostile";
    if (hello_bytes.empty()) hello_bytes = hello.Serialize();
    lost_ = false;
    sequence_ = 0;
    received_.clear();
    lane_ = *wire_->Dial(node.engine->address(), "victim", lanes, AsBytes(hello_bytes));
  }

  bool Until(const std::function<bool()>& condition) {
    const absl::Time limit = absl::Now() + kTestLimit;
    while (!condition()) {
      if (absl::Now() > limit) return false;
      if (wire_->Progress() > 0 || !wire_->Arm()) continue;
      pollfd fd{wire_->fd(), POLLIN, 0};
      poll(&fd, 1, 5);
    }
    return true;
  }
  bool WaitFor(SegmentType type) {
    return Until([&] {
      return std::any_of(received_.begin(), received_.end(),
                         [type](const auto& h) { return h.type == type; });
    });
  }
  bool WaitLost() {
    return Until([this] { return lost_; });
  }

  // A header that is right in all that is not under test.
  SegmentHeader Header(SegmentType type) {
    SegmentHeader header;
    header.type = type;
    header.source_check = SourceCheck(record_.uid, target_);
    header.sequence = ++sequence_;
    header.key = {kChannel, 1};
    return header;
  }
  SegmentHeader Data(uint64_t id, uint64_t total, uint64_t offset) {
    SegmentHeader header = Header(SegmentType::kData);
    header.key.id = id;
    header.total_bytes = total;
    header.offset = offset;
    header.payload_bytes = static_cast<uint32_t>(std::min<uint64_t>(kSegment, total - offset));
    return header;
  }

  void Post(const SegmentHeader& header) {
    HeaderBytes bytes;
    EncodeHeader(header, &bytes);
    Post(bytes, std::vector<std::byte>(header.payload_bytes));
  }
  void Post(absl::Span<const std::byte> header, std::vector<std::byte> payload) {
    memory_.push_back({{header.begin(), header.end()}, std::move(payload)});
    wire_->Post(lane_, memory_.back().first, memory_.back().second, PostToken{1}).IgnoreError();
  }
  const std::vector<SegmentHeader>& received() const { return received_; }

 private:
  void OnLaneUp(LaneId) override {}
  bool OnLaneAccepted(LaneId, int, int, absl::Span<const std::byte>) override { return true; }
  void OnSegment(LaneId, absl::Span<const std::byte> header,
                 absl::Span<const std::byte> payload) override {
    const absl::StatusOr<SegmentHeader> parsed = ParseHeader(header, payload.size());
    if (parsed.ok()) received_.push_back(*parsed);
  }
  void OnPosted(LaneId, PostToken, const absl::Status&) override {}
  void OnLaneLost(LaneId, const absl::Status&) override { lost_ = true; }

  std::unique_ptr<Wire> wire_;
  PeerRecord record_;
  ProcessUid target_;
  LaneId lane_{};
  uint32_t attempt_ = 0;
  uint64_t sequence_ = 0;
  bool lost_ = false;
  std::vector<SegmentHeader> received_;
  std::list<std::pair<std::vector<std::byte>, std::vector<std::byte>>> memory_;
};

class HostileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    SetLogSink([](LogLevel, absl::string_view) {});
  }
  void TearDown() override { SetLogSink(nullptr); }
};

// Connects, does `attack`, and returns how a receive from the attacker ended.
absl::Status Attack(const std::function<void(HostilePeer*)>& attack) {
  FakeNetwork network;
  EngineOptions options;
  options.unexpected_bytes = 1 << 20;
  Node victim(&network, "victim", 0, options);
  HostilePeer hostile(&network, "hostile");
  Received received = victim.Recv(hostile.record(), {kChannel, 999}, 3 * kSegment);
  hostile.Dial(victim);
  EXPECT_TRUE(hostile.WaitFor(SegmentType::kWelcome));
  attack(&hostile);
  EXPECT_TRUE(hostile.WaitLost());
  const absl::Status status = received.Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 7 on host hostile"));
  return status;
}

TEST_F(HostileTest, EachBreachIsNamed) {
  const std::vector<std::pair<std::string, std::function<void(HostilePeer*)>>> attacks = {
      {"another process",
       [](HostilePeer* p) {
         SegmentHeader h = p->Header(SegmentType::kHeartbeat);
         h.source_check ^= 1;
         p->Post(h);
       }},
      {"follows segment 0",
       [](HostilePeer* p) {
         SegmentHeader h = p->Header(SegmentType::kHeartbeat);
         h.sequence = 2;
         p->Post(h);
       }},
      {"follows segment 1",
       [](HostilePeer* p) {
         p->Post(p->Header(SegmentType::kHeartbeat));
         SegmentHeader h = p->Header(SegmentType::kHeartbeat);
         h.sequence = 1;
         p->Post(h);
       }},
      {"acknowledgement",
       [](HostilePeer* p) {
         SegmentHeader h = p->Header(SegmentType::kAck);
         h.ack = 1000000;
         p->Post(h);
       }},
      {"credit",
       [](HostilePeer* p) {
         SegmentHeader h = p->Header(SegmentType::kAck);
         h.released = 1;
         p->Post(h);
       }},
      {"came twice",
       [](HostilePeer* p) {
         p->Post(p->Data(1, 2 * kSegment, 0));
         p->Post(p->Data(1, 2 * kSegment, 0));
       }},
      {"came twice",
       [](HostilePeer* p) {
         p->Post(p->Data(999, 2 * kSegment, kSegment));
         p->Post(p->Data(999, 2 * kSegment, kSegment));
       }},
      {"changed its size",
       [](HostilePeer* p) {
         p->Post(p->Data(1, 2 * kSegment, 0));
         p->Post(p->Data(1, 3 * kSegment, kSegment));
       }},
      {"changed its size",
       [](HostilePeer* p) {
         p->Post(p->Data(999, 3 * kSegment, 0));
         p->Post(p->Data(999, uint64_t{1} << 40, uint64_t{1} << 30));
       }},
      {"agreed 1048576 bytes",
       [](HostilePeer* p) {
         for (uint64_t id = 1; id < 9; ++id) p->Post(p->Data(id, kSegment, 0));
       }},
      {"agreed 1048576 bytes",
       [](HostilePeer* p) {  // "solicited" is no way round the bound
         for (uint64_t id = 1; id < 9; ++id) {
           SegmentHeader h = p->Data(id, kSegment, 0);
           h.flags = kSolicited;
           p->Post(h);
         }
       }},
      {"agreed 1048576 bytes",
       [](HostilePeer* p) {  // nor are messages of no bytes
         for (uint64_t id = 1000; id < 20000; ++id) p->Post(p->Data(id, 0, 0));
       }},
      {"welcome in the middle", [](HostilePeer* p) { p->Post(p->Header(SegmentType::kWelcome)); }},
      {"after bye",
       [](HostilePeer* p) {
         p->Post(p->Header(SegmentType::kBye));
         p->Post(p->Header(SegmentType::kHeartbeat));
         p->Until([] { return true; });
       }},
      {"impossible lane",
       [](HostilePeer* p) {
         SegmentHeader h = p->Header(SegmentType::kLaneLost);
         h.key.id = uint64_t{1} << 40;
         p->Post(h);
       }},
      {"in place that this process can't read",
       [](HostilePeer* p) {
         SegmentHeader h = p->Header(SegmentType::kInPlace);
         h.total_bytes = 100;
         h.payload_bytes = 24;
         p->Post(h);
       }},
      {"refused", [](HostilePeer* p) { p->Post(p->Header(SegmentType::kRefused)); }},
      {"magic", [](HostilePeer* p) { p->Post(RandomBytes(80, 5), {}); }},
      {"header of 3 bytes", [](HostilePeer* p) { p->Post(RandomBytes(3, 5), {}); }},
      {"header of 128 bytes", [](HostilePeer* p) { p->Post(RandomBytes(128, 5), {}); }},
  };
  for (const auto& [text, attack] : attacks) {
    if (text == "after bye") continue;  // its bye has ended it: see the next test
    EXPECT_THAT(std::string(Attack(attack).message()), HasSubstr(text));
  }
}

TEST_F(HostileTest, SegmentsAfterByeDoNothing) {
  FakeNetwork network;
  Node victim(&network, "victim", 0);
  HostilePeer hostile(&network, "hostile");
  Received received = victim.Recv(hostile.record(), {kChannel, 999}, 8);
  hostile.Dial(victim);
  ASSERT_TRUE(hostile.WaitFor(SegmentType::kWelcome));
  hostile.Post(hostile.Header(SegmentType::kBye));
  for (int i = 0; i < 10; ++i) hostile.Post(hostile.Data(999, 8, 0));
  ASSERT_TRUE(hostile.WaitFor(SegmentType::kAck));
  EXPECT_THAT(std::string(received.Wait().message()), HasSubstr("left the job"));
}

// Messages that it announces, wants, rejects or closes without end cost nothing that lasts.
TEST_F(HostileTest, ControlSegmentsWithoutMeaningAreHarmless) {
  FakeNetwork network;
  Node victim(&network, "victim", 0);
  HostilePeer hostile(&network, "hostile");
  Received received = victim.Recv(hostile.record(), {kChannel, 999}, 8);
  hostile.Dial(victim);
  ASSERT_TRUE(hostile.WaitFor(SegmentType::kWelcome));
  for (uint64_t i = 0; i < 20000; ++i) {
    SegmentHeader h = hostile.Header(i % 4 == 0   ? SegmentType::kAnnounce
                                     : i % 4 == 1 ? SegmentType::kWanted
                                     : i % 4 == 2 ? SegmentType::kReject
                                                  : SegmentType::kClose);
    h.key = {i, i};
    h.fingerprint = static_cast<uint32_t>(i);
    h.payload_bytes = 16;
    hostile.Post(h);
  }
  hostile.Post(hostile.Data(999, 8, 0));
  ASSERT_TRUE(hostile.Until([&] { return received.over(); }));
  EXPECT_EQ(received.Wait(), absl::OkStatus());
}

TEST_F(HostileTest, TenThousandRandomSegments) {
  FakeNetwork network;
  EngineOptions options;
  options.unexpected_bytes = 1 << 20;
  std::mt19937_64 random(42);
  Node victim(&network, "victim", 0, options);
  Node friendly(&network, "friendly", 1, options);
  constexpr int kPeers = 500, kSegmentsOfEach = 20;
  for (uint64_t peer = 1; peer <= kPeers; ++peer) {
    HostilePeer hostile(&network, absl::StrCat("hostile", peer), {0, peer});
    Received received = victim.Recv(hostile.record(), {kChannel, 999}, 100);
    hostile.Dial(victim);
    ASSERT_TRUE(hostile.WaitFor(SegmentType::kWelcome));
    // Mostly right headers, so that the deeper checks are reached; then some damage.
    for (int i = 0; i < kSegmentsOfEach; ++i) {
      // Not kBye, after which nothing is looked at.
      const auto type = static_cast<SegmentType>(1 + random() % 14);
      SegmentHeader h = hostile.Header(type == SegmentType::kBye ? SegmentType::kHeartbeat : type);
      h.key = {random() % 3 == 0 ? kChannel : random() % 4, random() % 5 == 0 ? 999 : random() % 8};
      h.total_bytes = random() % 4 == 0 ? random() : random() % (4 * kSegment);
      h.offset = random() % 3 * kSegment;
      h.fingerprint = static_cast<uint32_t>(random());
      h.ack = random() % 3;
      h.flags = h.type == SegmentType::kData ? random() % 2 : 0;
      size_t payload = random() % 3 == 0 ? random() % 1000 : 0;
      if (h.type == SegmentType::kData && h.offset < h.total_bytes) {
        payload = std::min<uint64_t>(kSegment, h.total_bytes - h.offset);
      } else if (h.type == SegmentType::kWanted || h.type == SegmentType::kAnnounce ||
                 h.type == SegmentType::kPulled) {
        payload = 16 * (1 + random() % 3);
      }
      h.payload_bytes = static_cast<uint32_t>(payload);
      HeaderBytes bytes;
      EncodeHeader(h, &bytes);
      if (random() % 8 == 0) bytes[random() % bytes.size()] ^= static_cast<std::byte>(random());
      hostile.Post(bytes, RandomBytes(payload, random()));
    }
    hostile.Post(RandomBytes(80, peer), {});  // none survives this
    ASSERT_TRUE(hostile.WaitLost());
    ASSERT_TRUE(hostile.Until([&] { return received.over(); }));
  }
  // The engine still serves others.
  const std::vector<std::byte> bytes = RandomBytes(5000, 1);
  Received received = victim.Recv(friendly, {kChannel, 1}, 5000);
  EXPECT_EQ(friendly.Send(victim, {kChannel, 1}, bytes).Wait(), absl::OkStatus());
  EXPECT_EQ(received.Wait(), absl::OkStatus());
}

TEST_F(HostileTest, RandomHellosAreRefused) {
  FakeNetwork network;
  Node victim(&network, "victim", 0);
  HostilePeer hostile(&network, "hostile");
  std::mt19937_64 random(7);
  Hello good;
  good.dialer = kHostileUid;
  good.target = victim.engine->uid();
  for (int i = 0; i < 300; ++i) {
    std::string hello = good.Serialize();
    if (i % 2 == 0) {
      hello[6 + random() % (hello.size() - 6)] ^= static_cast<char>(1 + random() % 255);
    } else {
      hello = std::string(AsText(RandomBytes(1 + random() % 200, i)));
    }
    hostile.Dial(victim, hello);
    ASSERT_TRUE(hostile.WaitLost()) << i;
  }
}

TEST_F(HostileTest, OtherProtocolVersionIsToldSo) {
  FakeNetwork network;
  Node victim(&network, "victim", 0);
  HostilePeer hostile(&network, "hostile");
  Hello hello;
  hello.version = kProtocolVersion + 1;
  hello.dialer = kHostileUid;
  hello.target = victim.engine->uid();
  hostile.Dial(victim, hello.Serialize());
  EXPECT_TRUE(hostile.WaitFor(SegmentType::kRefused));
  EXPECT_TRUE(hostile.WaitLost());  // closed after a moment
}

// Lanes of processes that nobody added are few, and not for ever.
TEST_F(HostileTest, StrangersAreBounded) {
  FakeNetwork network;
  EngineOptions options;
  options.connect_timeout = absl::Milliseconds(300);
  Node victim(&network, "victim", 0, options);
  HostilePeer hostile(&network, "hostile");
  for (int i = 0; i < 6; ++i) hostile.Dial(victim, "", 255);
  EXPECT_TRUE(hostile.Until([&] { return network.Lanes("victim", "hostile") > 0; }));
  EXPECT_LE(network.Lanes("victim", "hostile"), 1024);
  EXPECT_TRUE(hostile.Until([&] { return network.Lanes("victim", "hostile") == 0; }));
}

// A byte of a true peer's header flipped on the way.
TEST_F(HostileTest, FlippedHeaderBytesEndThePeerOrNothing) {
  const std::vector<std::byte> bytes = RandomBytes(100, 1);  // outlives the engines
  for (size_t at = 0; at < kSegmentHeaderBytes; ++at) {
    FakeNetwork network;
    EngineOptions options;
    options.heartbeat = absl::Milliseconds(10);
    options.suspect_after = absl::Milliseconds(100);
    options.dead_after = absl::Milliseconds(300);
    Pair pair(&network, options);
    Received first = pair.b.Recv(pair.a, {kChannel, 1}, 100);
    pair.a.Send(pair.b, {kChannel, 1}, bytes);
    ASSERT_EQ(first.Wait(), absl::OkStatus());
    network.CorruptNext("b", at, 1);
    Received second = pair.b.Recv(pair.a, {kChannel, 2}, 100);
    pair.a.Send(pair.b, {kChannel, 2}, bytes);
    // It arrives, or the peer is given up; or the key was hit, and it is another message.
    const absl::Status status = second.Wait(absl::Milliseconds(200));
    if (status.ok()) {
      EXPECT_TRUE(second.bytes() == bytes);
    } else {
      EXPECT_THAT(status.code(), testing::AnyOf(absl::StatusCode::kUnavailable,
                                                absl::StatusCode::kDeadlineExceeded));
    }
  }
}

}  // namespace
}  // namespace geomesh::transport
