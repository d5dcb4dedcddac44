// wire/ucx between two workers of one process, over loopback: bytes, order, limits, refusals.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "base/log.h"
#include "transport/wire/sockets.h"
#include "transport/wire/ucx_address.h"
#include "transport/wire/ucx_config.h"
#include "ucx_testing.h"
#include "wire_contract.h"

namespace geomesh::transport {
namespace {

using ::testing::HasSubstr;

struct Pair : WirePair<End> {
  Pair() : WirePair{End(OnLoopback()), End(OnLoopback())} {}
};

TEST(UcxWire, CarriesExactBytesBothWays) {
  Pair p;
  ASSERT_TRUE(p.Connect(1));
  EXPECT_EQ(p.b.events.accepted[0].hello, "hello");
  EXPECT_EQ(p.b.events.accepted[0].index, 0);
  EXPECT_EQ(p.b.events.accepted[0].lanes, 1);
  const std::vector<std::pair<size_t, size_t>> sizes = {{0, 0},
                                                        {1, 0},
                                                        {0, 1},
                                                        {128, 1},
                                                        {17, 255},
                                                        {128, 4096},
                                                        {3, 8191},
                                                        {3, 8192},
                                                        {64, 65537},
                                                        {128, kMaxSegmentPayloadBytes},
                                                        {0, kMaxSegmentPayloadBytes}};
  std::vector<std::string> headers, payloads;
  for (size_t i = 0; i < sizes.size(); ++i) {
    headers.push_back(Pattern(sizes[i].first, 2 * i));
    payloads.push_back(Pattern(sizes[i].second, 2 * i + 1));
  }
  const LaneId there = p.Lane(0), back = p.b.events.accepted[0].lane;
  for (size_t i = 0; i < sizes.size(); ++i) {
    ASSERT_TRUE(p.a.wire->Post(there, Span(headers[i]), Span(payloads[i]), PostToken{i}).ok());
    ASSERT_TRUE(p.b.wire->Post(back, Span(headers[i]), Span(payloads[i]), PostToken{i}).ok());
  }
  ASSERT_TRUE(p.Run([&] {
    return p.a.events.segments.size() == sizes.size() &&
           p.b.events.segments.size() == sizes.size() && p.a.events.posted.size() == sizes.size() &&
           p.b.events.posted.size() == sizes.size();
  }));
  for (End* end : {&p.a, &p.b}) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_EQ(end->events.segments[i].lane, end == &p.a ? there : back);
      EXPECT_TRUE(end->events.segments[i].header == headers[i]) << i;
      EXPECT_TRUE(end->events.segments[i].payload == payloads[i]) << i;
      ASSERT_EQ(end->events.posted[i].size(), 1);
      EXPECT_TRUE(end->events.posted[i][0].ok());
    }
    EXPECT_TRUE(end->events.lost.empty());
    EXPECT_EQ(end->ucx().stats().dropped_malformed, 0);
    EXPECT_EQ(end->ucx().stats().dropped_unknown_lane, 0);
  }
}

TEST(UcxWire, PostCallsNobodyBack) {
  Pair p;
  ASSERT_TRUE(p.Connect(1));
  ASSERT_TRUE(p.a.wire->Post(p.Lane(0), Span("h"), Span("p"), PostToken{7}).ok());
  EXPECT_TRUE(p.a.events.posted.empty());
  ASSERT_TRUE(p.Run([&] { return p.a.events.posted.size() == 1; }));
}

TEST(UcxWire, LanesAreConnections) {
  const int before = CountSockets();
  Pair p;
  EXPECT_EQ(CountSockets() - before, 2);  // two listeners
  ASSERT_TRUE(p.Connect(4));
  EXPECT_EQ(CountSockets() - before, 2 + 4 * 2);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(p.b.events.accepted[i].index, i);
    EXPECT_EQ(p.b.events.accepted[i].lanes, 4);
  }
}

// 10,000 segments over 4 lanes, both ways at once, many outstanding, in order on each lane.
TEST(UcxWire, KeepsOrderOnEachLane) {
  constexpr int kLanes = 4, kSegments = 10000;
  Pair p;
  ASSERT_TRUE(p.Connect(kLanes));
  const std::string source = Pattern(1 << 16, 5);
  struct Expected {
    uint64_t next[kLanes] = {};
    uint64_t segments = 0;
    std::map<uint32_t, int> lane_index;
  };
  Expected at_a, at_b;
  for (int i = 0; i < kLanes; ++i) {
    at_a.lane_index[static_cast<uint32_t>(p.Lane(i))] = i;
    at_b.lane_index[static_cast<uint32_t>(p.b.events.accepted[i].lane)] = i;
  }
  auto check = [&](Expected& e) {
    return
        [&](LaneId lane, absl::Span<const std::byte> header, absl::Span<const std::byte> payload) {
          const int i = e.lane_index.at(static_cast<uint32_t>(lane));
          uint64_t sequence = 0;
          ASSERT_EQ(header.size(), 8);
          std::memcpy(&sequence, header.data(), 8);
          ASSERT_EQ(sequence, e.next[i]++);
          const size_t size = sequence * 37 % 5000, offset = sequence * 13 % 60000;
          ASSERT_EQ(payload.size(), size);
          ASSERT_EQ(std::memcmp(payload.data(), source.data() + offset, size), 0);
          ++e.segments;
        };
  };
  p.a.events.on_segment = check(at_a);
  p.b.events.on_segment = check(at_b);
  uint64_t token = 0;
  std::vector<std::pair<uint64_t, uint64_t>> window;
  for (int round = 0; round < kSegments / kLanes; ++round) {
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t sequence = round;
      const std::string header(reinterpret_cast<const char*>(&sequence), 8);
      const auto payload =
          Span(absl::string_view(source).substr(sequence * 13 % 60000, sequence * 37 % 5000));
      ASSERT_TRUE(p.a.wire->Post(p.Lane(i), Span(header), payload, PostToken{token}).ok());
      ASSERT_TRUE(
          p.b.wire->Post(p.b.events.accepted[i].lane, Span(header), payload, PostToken{token})
              .ok());
      ++token;
    }
    if (round % 100 == 0) p.a.wire->Progress(), p.b.wire->Progress();
  }
  ASSERT_TRUE(p.Run([&] {
    return at_a.segments == kSegments && at_b.segments == kSegments &&
           p.a.events.posted.size() == kSegments && p.b.events.posted.size() == kSegments;
  }));
  for (End* end : {&p.a, &p.b}) {
    for (const auto& [t, statuses] : end->events.posted) {
      ASSERT_EQ(statuses.size(), 1) << t;
      ASSERT_TRUE(statuses[0].ok());
    }
  }
}

// 64 MB posted at once: the bytes are read from the caller's memory until OnPosted, not copied.
TEST(UcxWire, PostsManyOutstanding) {
  Pair p;
  ASSERT_TRUE(p.Connect(1));
  constexpr int kCount = 256;
  const std::string all = Pattern(kCount * kMaxSegmentPayloadBytes, 9);
  std::string received(all.size(), '\0');
  size_t at = 0;
  p.b.events.on_segment = [&](LaneId, absl::Span<const std::byte>,
                              absl::Span<const std::byte> payload) {
    ASSERT_LE(at + payload.size(), received.size());
    std::memcpy(received.data() + at, payload.data(), payload.size());
    at += payload.size();
  };
  for (int i = 0; i < kCount; ++i) {
    ASSERT_TRUE(p.a.wire
                    ->Post(p.Lane(0), Span("s"),
                           Span(absl::string_view(all).substr(i * kMaxSegmentPayloadBytes,
                                                              kMaxSegmentPayloadBytes)),
                           PostToken{static_cast<uint64_t>(i)})
                    .ok());
  }
  ASSERT_TRUE(p.Run([&] { return at == all.size() && p.a.events.posted.size() == kCount; }));
  EXPECT_TRUE(received == all);
}

TEST(UcxWire, SleepsAndWakes) {
  Pair p;
  ASSERT_TRUE(p.Connect(1));
  // Quiet after a while: both may sleep.
  auto quiet = [](Wire& wire) {
    const absl::Time end = absl::Now() + absl::Seconds(5);
    while (absl::Now() < end) {
      while (wire.Progress() != 0) {
      }
      if (wire.Arm()) return true;
    }
    return false;
  };
  ASSERT_TRUE(quiet(*p.a.wire));
  ASSERT_TRUE(quiet(*p.b.wire));
  pollfd poll_b = {p.b.wire->fd(), POLLIN, 0};
  EXPECT_EQ(poll(&poll_b, 1, 100), 0);
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(p.a.wire->Post(p.Lane(0), Span("wake"), Span("up"), PostToken{1}).ok());
    while (p.a.wire->Progress() != 0) {
    }
    ASSERT_EQ(poll(&poll_b, 1, 5000), 1) << i;
    ASSERT_TRUE(p.Run([&] { return p.b.events.segments.size() == i + 1; }));
    ASSERT_TRUE(quiet(*p.b.wire));
  }
}

TEST(UcxWire, SeveralDialsBetweenTheSameTwo) { SeveralDialsBetweenTheSameTwo<Pair>(); }

TEST(UcxWire, CloseIsSeenByTheOtherSideAndFreesItsSockets) {
  CloseIsSeenByTheOtherSideAndFreesItsSockets<Pair>();
}

TEST(UcxWire, RefusedLanesAreLostToTheDialler) {
  Pair p;
  p.b.events.keep = [](int index) { return index != 1; };
  auto first = p.a.wire->Dial(*p.b.address, "rank 1", 3, Span("hello"));
  ASSERT_TRUE(first.ok());
  p.dialled = *first;
  ASSERT_TRUE(p.Run([&] { return p.a.events.lost.size() == 1 && p.a.events.up.size() >= 2; }));
  EXPECT_EQ(p.b.events.accepted.size(), 3);
  EXPECT_EQ(p.a.events.lost.begin()->first, static_cast<uint32_t>(p.Lane(1)));
  const std::string reason(p.a.events.lost.begin()->second[0].message());
  EXPECT_THAT(reason, HasSubstr("lane 1 to rank 1"));
  EXPECT_TRUE(p.b.events.lost.empty());
  ASSERT_TRUE(p.a.wire->Post(p.Lane(2), Span("h"), Span("p"), PostToken{1}).ok());
  ASSERT_TRUE(p.Run([&] { return p.b.events.segments.size() == 1; }));
}

TEST(UcxWire, RefusesWhatDoesNotFit) {
  Pair p;
  ASSERT_TRUE(p.Connect(1));
  const std::string long_header(129, 'h'), long_payload(kMaxSegmentPayloadBytes + 1, 'p');
  EXPECT_EQ(p.a.wire->Post(p.Lane(0), Span(long_header), {}, PostToken{1}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(p.a.wire->Post(p.Lane(0), {}, Span(long_payload), PostToken{1}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(p.a.wire->Post(LaneId{99}, {}, {}, PostToken{1}).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(p.a.wire->Dial(*p.b.address, "x", 0, {}).ok());
  EXPECT_FALSE(p.a.wire->Dial(*p.b.address, "x", 257, {}).ok());
  EXPECT_FALSE(p.a.wire->Dial(*p.b.address, "x", 1, Span(std::string(257, 'x'))).ok());
  auto before_up = p.a.wire->Dial(*p.b.address, "rank 1", 1, {});
  ASSERT_TRUE(before_up.ok());
  EXPECT_EQ(p.a.wire->Post(*before_up, {}, {}, PostToken{1}).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(UcxWire, DialRefusesDamagedAndUnfitBlobs) {
  Pair p;
  auto dial = [&](absl::string_view blob) {
    auto result = p.a.wire->Dial(blob, "rank 3 on host c", 2, {});
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("rank 3 on host c"));
    return std::string(result.status().message());
  };
  const std::string good = *p.b.address;
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] ^= 0x10;
    dial(bad);
    dial(absl::string_view(good).substr(0, i));
  }
  dial(good + "x");
  dial("");
  EXPECT_THAT(dial(*p.a.address), HasSubstr("own"));

  auto altered = [&](const std::function<void(UcxAddress&)>& change) {
    UcxAddress address = *UcxAddress::Parse(good);
    change(address);
    return dial(address.Serialize());
  };
  EXPECT_THAT(altered([](UcxAddress& a) { a.rx_segment_bytes = 65536; }),
              HasSubstr("segment sizes differ: 8192/65536 bytes (send/receive) there, 8192/270336 "
                        "here"));
  EXPECT_THAT(altered([](UcxAddress& a) { a.tx_segment_bytes = 262144; }),
              HasSubstr("segment sizes differ"));
  EXPECT_THAT(altered([](UcxAddress& a) { a.listening = *IpEndpoint::Parse("10.1.2.3"); }),
              HasSubstr("loopback"));
  EXPECT_THAT(altered([](UcxAddress& a) { a.network ^= 1; }), HasSubstr("loopback"));
  EXPECT_THAT(altered([](UcxAddress& a) { a.listening = *IpEndpoint::Parse("fd00::1"); }),
              HasSubstr("IPv6"));
  EXPECT_THAT(altered([](UcxAddress& a) { a.ucx_version = 2 << 16; }), HasSubstr("2.0.0"));
  EXPECT_TRUE(p.a.events.lost.empty());
}

TEST(UcxWire, StaleBlobIsALostLane) {
  End a(OnLoopback());
  std::string stale;
  uint16_t port;
  {
    End gone(OnLoopback());
    stale = *gone.address;
    port = gone.ucx().port();
  }
  auto first = a.wire->Dial(stale, "rank 1", 2, {});
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(RunUntil({a.wire.get()}, [&] { return a.events.lost.size() == 2; }));
  EXPECT_TRUE(a.events.up.empty());

  // Another process of ours has the port by now: it is not taken for the one that is gone.
  UcxWireOptions options = OnLoopback();
  options.ports = {port, port};
  End successor(options);
  ASSERT_TRUE(successor.address.ok()) << successor.address.status();
  ASSERT_TRUE(a.wire->Dial(stale, "rank 1", 2, {}).ok());
  ASSERT_TRUE(
      RunUntil({a.wire.get(), successor.wire.get()}, [&] { return a.events.lost.size() == 4; }));
  EXPECT_TRUE(successor.events.accepted.empty());
  EXPECT_EQ(successor.ucx().stats().dropped_greetings, 2);
  // The right blob works, although the two count endpoints differently by now.
  ASSERT_TRUE(a.wire->Dial(*successor.address, "rank 1", 2, {}).ok());
  ASSERT_TRUE(RunUntil({a.wire.get(), successor.wire.get()}, [&] {
    return a.events.up.size() == 2 && successor.events.accepted.size() == 2;
  }));
}

TEST(UcxWire, PortRange) {
  // A range that is free now.
  End probe(OnLoopback());
  const uint16_t low = std::min<uint16_t>(probe.ucx().port(), 65000);
  UcxWireOptions options = OnLoopback();
  options.ports = {low, static_cast<uint16_t>(low + 3)};
  std::vector<std::unique_ptr<End>> ends;
  absl::Status full;
  for (int i = 0; i < 5; ++i) {
    auto end = std::make_unique<End>(options);
    if (!end->address.ok()) {
      full = end->address.status();
      break;
    }
    EXPECT_GE(end->ucx().port(), low);
    EXPECT_LE(end->ucx().port(), low + 3);
    ends.push_back(std::move(end));
  }
  // The probe holds one of the four ports; others may hold more.
  EXPECT_LE(ends.size(), 3);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_THAT(std::string(full.message()),
              HasSubstr(absl::StrCat(low, "-", low + 3, " on 127.0.0.1 (lo)")));
}

TEST(UcxWire, LeavesSignalsAndDescriptorsAlone) {
  std::vector<std::string> lines;
  SetLogSink([&](LogLevel level, absl::string_view line) {
    if (level <= LogLevel::kWarning) lines.push_back(std::string(line));
  });
  EXPECT_THAT(UcxLoadTimeProblems(), ::testing::IsEmpty());
  auto handlers = [] {  // (a sanitizer has some of its own)
    std::vector<void*> all;
    for (int signal = 1; signal < NSIG; ++signal) {
      struct sigaction action = {};
      sigaction(signal, nullptr, &action);
      all.push_back(reinterpret_cast<void*>(action.sa_handler));
    }
    return all;
  };
  const auto before = handlers();
  Pair p;
  ASSERT_TRUE(p.Connect(3));
  int checked = 0;
  ForEachTcpSocket([&](const SocketInfo& s) {
    EXPECT_TRUE((fcntl(s.ref.fd, F_GETFD) & FD_CLOEXEC) != 0) << s.local.ToString();
    ++checked;
  });
  EXPECT_EQ(handlers(), before);
  EXPECT_EQ(checked, 2 + 6);
  EXPECT_THAT(lines, ::testing::IsEmpty());
  SetLogSink(nullptr);
}

TEST(UcxWire, DropsWhatIsForNoLane) {
  Pair p;
  ASSERT_TRUE(p.Connect(2));
  p.b.wire->Close(p.b.events.accepted[0].lane);
  ASSERT_TRUE(p.a.wire->Post(p.Lane(0), Span("h"), Span("late"), PostToken{1}).ok());
  ASSERT_TRUE(p.a.wire->Post(p.Lane(1), Span("h"), Span("good"), PostToken{2}).ok());
  ASSERT_TRUE(
      p.Run([&] { return p.b.events.segments.size() == 1 && p.a.events.lost.size() == 1; }));
  EXPECT_EQ(p.b.events.segments[0].payload, "good");
  ASSERT_TRUE(p.Run([&] { return p.a.events.posted.size() == 2; }));
}

TEST(UcxWire, ManyLanesAndCyclesLeakNothing) {
  End hub(OnLoopback());
  for (int cycle = 0; cycle < 20; ++cycle) {
    {
      End spoke(OnLoopback());
      ASSERT_TRUE(spoke.wire->Dial(*hub.address, "hub", 8, {}).ok());
      ASSERT_TRUE(RunUntil({spoke.wire.get(), hub.wire.get()},
                           [&] { return spoke.events.up.size() == 8; }));
    }
    ASSERT_TRUE(
        RunUntil({hub.wire.get()}, [&] { return hub.events.lost.size() == 8 * (cycle + 1); }));
    ASSERT_TRUE(RunUntil({hub.wire.get()}, [&] { return CountSockets() == 1; })) << CountSockets();
  }
  ASSERT_TRUE(RunUntil({hub.wire.get()}, [&] { return hub.ucx().stats().endpoints == 0; }));
}

}  // namespace
}  // namespace geomesh::transport

int main(int argc, char** argv) {
  geomesh::transport::EnsureUcxEnvironment(argv);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
