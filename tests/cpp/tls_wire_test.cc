// wire/tls between two wires of one process, over loopback: bytes, order, limits, refusals,
// endings. Strangers and enemies are in tls_hostile_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/tcp.h>
#include <sys/prctl.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "tls_testing.h"
#include "transport/wire/tls_address.h"
#include "transport/wire/tls_keys.h"
#include "wire_contract.h"

namespace geomesh::transport {
namespace {

using ::testing::HasSubstr;

TlsKeyFiles KeysOf(TlsMode mode) {
  if (mode == TlsMode::kSharedKey) return SharedKeys(kKey1);
  static const TestCa* ca = new TestCa;
  return ca->Issue("a rank");
}

class BothModes : public ::testing::TestWithParam<TlsMode> {};
INSTANTIATE_TEST_SUITE_P(TlsWire, BothModes,
                         ::testing::Values(TlsMode::kSharedKey, TlsMode::kCertificate),
                         [](const auto& info) {
                           return info.param == TlsMode::kSharedKey ? "SharedKey" : "Certificate";
                         });

TEST_P(BothModes, CarriesExactBytesBothWays) {
  Pair p(OnLoopback(KeysOf(GetParam())), OnLoopback(KeysOf(GetParam())));
  ASSERT_TRUE(p.Connect(1));
  EXPECT_EQ(p.b.events.accepted[0].hello, "hello");
  EXPECT_EQ(p.b.events.accepted[0].index, 0);
  EXPECT_EQ(p.b.events.accepted[0].lanes, 1);
  // Around a record (16,384 with a header of 8 before it), and the limits.
  const std::vector<std::pair<size_t, size_t>> sizes = {
      {0, 0},      {1, 0},      {0, 1},       {128, 1},
      {17, 255},   {128, 4096}, {0, 16375},   {0, 16376},
      {0, 16377},  {3, 16384},  {80, 32767},  {128, 32768},
      {64, 65537}, {5, 262143}, {0, 1 << 18}, {128, kMaxSegmentPayloadBytes}};
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
  }
}

TEST(TlsWire, PostDialAndCloseCallNobodyBack) {
  Pair p;
  ASSERT_TRUE(p.Connect(2));
  ASSERT_TRUE(p.a.wire->Post(p.Lane(0), Span("h"), Span("p"), PostToken{7}).ok());
  ASSERT_TRUE(p.a.wire->Post(p.Lane(1), Span("h"), Span("p"), PostToken{8}).ok());
  p.a.wire->Close(p.Lane(1));
  ASSERT_TRUE(p.a.wire->Dial(*p.b.address, "rank 1", 1, {}).ok());
  EXPECT_TRUE(p.a.events.posted.empty());
  EXPECT_FALSE(p.a.wire->Arm());
  ASSERT_TRUE(p.Run([&] { return p.a.events.posted.size() == 2; }));
  EXPECT_TRUE(p.a.events.posted[7][0].ok());
  EXPECT_EQ(p.a.events.posted[8][0].code(), absl::StatusCode::kCancelled);
}

TEST(TlsWire, LanesAreConnectionsInOrderAndCloseOnExec) {
  const int before = CountSockets();
  Pair p;
  EXPECT_EQ(CountSockets() - before, 2);  // two listeners
  ASSERT_TRUE(p.Connect(8));
  EXPECT_EQ(CountSockets() - before, 2 + 8 * 2);
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(p.b.events.accepted[i].index, i);
    EXPECT_EQ(p.b.events.accepted[i].lanes, 8);
    // Index i is the same lane on both sides.
    const std::string name = absl::StrCat("lane ", i);
    ASSERT_TRUE(p.a.wire->Post(p.Lane(i), Span(name), {}, PostToken{1}).ok());
    ASSERT_TRUE(p.Run([&] { return p.b.events.segments.size() == i + 1; }));
    EXPECT_EQ(p.b.events.segments[i].lane, p.b.events.accepted[i].lane);
    EXPECT_EQ(p.b.events.segments[i].header, name);
  }
  ForEachTcpSocket([&](const SocketInfo& s) {
    EXPECT_TRUE((fcntl(s.ref.fd, F_GETFD) & FD_CLOEXEC) != 0) << s.local.ToString();
    if (s.listening) return;
    int milliseconds = 0, nodelay = 0;
    socklen_t size = sizeof(int);
    getsockopt(s.ref.fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, &size);
    getsockopt(s.ref.fd, IPPROTO_TCP, TCP_NODELAY, &nodelay, &size);
    EXPECT_EQ(milliseconds, 10000);
    EXPECT_NE(nodelay, 0);
  });
}

// 10,000 segments over 4 lanes, both ways at once, many outstanding, in order on each lane.
TEST(TlsWire, KeepsOrderOnEachLane) {
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
  std::vector<std::string> headers(kSegments / kLanes);  // stay until OnPosted
  for (uint64_t round = 0; round < headers.size(); ++round) {
    std::string& header = headers[round];
    header.assign(reinterpret_cast<const char*>(&round), 8);
    for (int i = 0; i < kLanes; ++i) {
      const auto payload =
          Span(absl::string_view(source).substr(round * 13 % 60000, round * 37 % 5000));
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

// 64 MB posted at once, and new keys every 64 records: 4,352 records are 68 keys.
TEST(TlsWire, PostsManyOutstandingAndRenewsKeys) {
  TlsWireOptions options = OnLoopback(SharedKeys(kKey1));
  options.records_per_key = 64;
  Pair p(options, options);
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
  EXPECT_TRUE(p.a.events.lost.empty());
}

TEST(TlsWire, SleepsAndWakes) {
  Pair p;
  ASSERT_TRUE(p.Connect(1));
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
  // No ticks are left either: an idle rank uses no CPU.
  pollfd poll_b = {p.b.wire->fd(), POLLIN, 0};
  const absl::Time deadline = absl::Now() + absl::Seconds(5);
  while (poll(&poll_b, 1, 600) != 0) {
    ASSERT_LT(absl::Now(), deadline);
    ASSERT_TRUE(quiet(*p.b.wire));
  }
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(p.a.wire->Post(p.Lane(0), Span("wake"), Span("up"), PostToken{1}).ok());
    ASSERT_FALSE(p.a.wire->Arm());
    while (p.a.wire->Progress() != 0) {
    }
    ASSERT_EQ(poll(&poll_b, 1, 5000), 1) << i;
    ASSERT_TRUE(p.Run([&] { return p.b.events.segments.size() == i + 1; }));
    ASSERT_TRUE(quiet(*p.b.wire));
  }
}

// Data and the end of the stream that come together are both seen.
TEST(TlsWire, DataJustBeforeTheEndArrives) {
  for (int round = 0; round < 20; ++round) {
    Pair p;
    ASSERT_TRUE(p.Connect(1));
    ASSERT_TRUE(p.a.wire->Post(p.Lane(0), Span("last"), Span("words"), PostToken{1}).ok());
    ASSERT_TRUE(RunUntil({p.a.wire.get()}, [&] { return p.a.events.posted.size() == 1; }));
    p.a.wire->Close(p.Lane(0));
    ASSERT_TRUE(p.Run([&] { return p.b.events.lost.size() == 1; }));
    ASSERT_EQ(p.b.events.segments.size(), 1);
    EXPECT_EQ(p.b.events.segments[0].payload, "words");
  }
}

TEST(TlsWire, SeveralDialsBetweenTheSameTwo) { SeveralDialsBetweenTheSameTwo<Pair>(); }

TEST(TlsWire, CloseIsSeenByTheOtherSideAndFreesItsSockets) {
  CloseIsSeenByTheOtherSideAndFreesItsSockets<Pair>();
}

TEST(TlsWire, RefusedLanesAreLostToTheDialler) {
  Pair p;
  p.b.events.keep = [](int index) { return index != 1; };
  auto first = p.a.wire->Dial(*p.b.address, "rank 1", 3, Span("hello"));
  ASSERT_TRUE(first.ok());
  p.dialled = *first;
  ASSERT_TRUE(p.Run([&] { return p.a.events.lost.size() == 1 && p.a.events.up.size() >= 2; }));
  EXPECT_EQ(p.b.events.accepted.size(), 3);
  EXPECT_EQ(p.a.LossOf(p.Lane(1)), "lane 1 to rank 1: connection lost: the other side closed it");
  EXPECT_TRUE(p.b.events.lost.empty());
  ASSERT_TRUE(p.a.wire->Post(p.Lane(2), Span("h"), Span("p"), PostToken{1}).ok());
  ASSERT_TRUE(p.Run([&] { return p.b.events.segments.size() == 1; }));
}

TEST(TlsWire, RefusesWhatDoesNotFit) {
  Pair p;
  EXPECT_EQ(p.a.wire->Post(LaneId{0}, {}, {}, PostToken{1}).message(), "lane 0 does not exist");
  ASSERT_TRUE(p.Connect(1));
  const std::string long_header(129, 'h'), long_payload(kMaxSegmentPayloadBytes + 1, 'p');
  EXPECT_EQ(p.a.wire->Post(p.Lane(0), Span(long_header), {}, PostToken{1}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(p.a.wire->Post(p.Lane(0), {}, Span(long_payload), PostToken{1}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(p.a.wire->Dial(*p.b.address, "x", 0, {}).ok());
  EXPECT_FALSE(p.a.wire->Dial(*p.b.address, "x", 257, {}).ok());
  EXPECT_FALSE(p.a.wire->Dial(*p.b.address, "x", 1, Span(std::string(257, 'x'))).ok());
  auto before_up = p.a.wire->Dial(*p.b.address, "rank 1", 1, {});
  ASSERT_TRUE(before_up.ok());
  EXPECT_EQ(p.a.wire->Post(*before_up, {}, {}, PostToken{1}).message(), "lane 1 is not up yet");
  p.a.wire->Close(p.Lane(0));
  EXPECT_EQ(p.a.wire->Post(p.Lane(0), {}, {}, PostToken{1}).message(), "lane 0 is closed");
}

TEST_P(BothModes, DialRefusesChangedAddresses) {
  Pair p(OnLoopback(KeysOf(GetParam())), OnLoopback(KeysOf(GetParam())));
  auto dial = [&](absl::string_view blob) {
    auto result = p.a.wire->Dial(blob, "rank 3 on host c", 2, {});
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("rank 3 on host c"));
    EXPECT_EQ(p.a.wire->CheckAddress(blob, "x").ok(), blob == *p.a.address);
    return std::string(result.status().message());
  };
  const std::string good = *p.b.address;
  ASSERT_TRUE(p.a.wire->CheckAddress(good, "x").ok());
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] ^= 0x10;
    dial(bad);
    dial(absl::string_view(good).substr(0, i));
  }
  dial(good + "x");
  EXPECT_THAT(dial(""), HasSubstr("not one of wire/tls"));
  EXPECT_THAT(dial(*p.a.address), HasSubstr("own"));
  // The port: byte 4 + 2 + 1 + 16 + 8 + 1.
  std::string elsewhere = good;
  elsewhere[32] ^= 1;
  EXPECT_THAT(dial(elsewhere), HasSubstr("its address was changed on the way"));
  EXPECT_TRUE(p.a.events.lost.empty());
}

TEST_P(BothModes, StaleAddressIsALostLane) {
  const TlsKeyFiles keys = KeysOf(GetParam());
  End a(OnLoopback(keys));
  std::string stale;
  uint16_t port;
  {
    End gone(OnLoopback(keys));
    stale = *gone.address;
    port = gone.tls().port();
  }
  auto first = a.wire->Dial(stale, "rank 1", 2, {});
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(RunUntil({a.wire.get()}, [&] { return a.events.lost.size() == 2; }));
  EXPECT_TRUE(a.events.up.empty());
  EXPECT_EQ(a.LossOf(*first), absl::StrCat("lane 0 to rank 1: cannot connect to 127.0.0.1:", port,
                                           ": Connection refused"));

  // Another process of ours has the port by now: it is not taken for the one that is gone.
  LogLines log;
  TlsWireOptions options = OnLoopback(keys);
  options.ports = {port, port};
  End successor(options);
  ASSERT_TRUE(successor.address.ok()) << successor.address.status();
  first = a.wire->Dial(stale, "rank 1", 2, {});
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(
      RunUntil({a.wire.get(), successor.wire.get()}, [&] { return a.events.lost.size() == 4; }));
  EXPECT_TRUE(successor.events.accepted.empty());
  const std::string why = a.LossOf(*first);
  if (GetParam() == TlsMode::kSharedKey) {
    EXPECT_THAT(why, HasSubstr("the process there is not the one whose address was read"));
  } else {
    EXPECT_THAT(why, HasSubstr("the process that was dialled is another one"));
  }
  EXPECT_THAT(log.Joined(), HasSubstr("refused a connection from 127.0.0.1:"));
  ASSERT_TRUE(a.wire->Dial(*successor.address, "rank 1", 2, {}).ok());
  ASSERT_TRUE(RunUntil({a.wire.get(), successor.wire.get()}, [&] {
    return a.events.up.size() == 2 && successor.events.accepted.size() == 2;
  }));
}

TEST(TlsWire, PortRange) {
  End probe(OnLoopback(SharedKeys(kKey1)));
  const uint16_t low = std::min<uint16_t>(probe.tls().port(), 65000);
  TlsWireOptions options = OnLoopback(SharedKeys(kKey1));
  options.ports = {low, static_cast<uint16_t>(low + 3)};
  std::vector<std::unique_ptr<End>> ends;
  absl::Status full;
  for (int i = 0; i < 5; ++i) {
    auto end = std::make_unique<End>(options);
    if (!end->address.ok()) {
      full = end->address.status();
      break;
    }
    EXPECT_GE(end->tls().port(), low);
    EXPECT_LE(end->tls().port(), low + 3);
    ends.push_back(std::move(end));
  }
  // The probe holds one of the four ports; others may hold more.
  EXPECT_LE(ends.size(), 3);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_THAT(std::string(full.message()),
              HasSubstr(absl::StrCat(low, "-", low + 3, " on 127.0.0.1 (lo)")));
}

TEST(TlsWire, OverIpv6) {
  TlsWireOptions options = OnLoopback(SharedKeys(kKey1));
  options.device.interface = "::1";
  Pair p(options, options);
  if (!p.a.address.ok()) GTEST_SKIP() << p.a.address.status();
  ASSERT_TRUE(p.Connect(2));
  EXPECT_EQ(ParseTlsAddress(*p.b.address)->address.endpoint.ToString(),
            absl::StrCat("[::1]:", p.b.tls().port()));
  ASSERT_TRUE(p.a.wire->Post(p.Lane(1), Span("h"), Span("six"), PostToken{1}).ok());
  ASSERT_TRUE(p.Run([&] { return p.b.events.segments.size() == 1; }));
  EXPECT_EQ(p.b.events.segments[0].payload, "six");
}

TEST(TlsWire, AdvertisesWhatItIsTold) {
  auto endpoint = [](const std::string& text) {
    TlsWireOptions options = OnLoopback(SharedKeys(kKey1));
    options.advertise = text;
    End end(options);
    if (!end.address.ok()) return std::string(end.address.status().message());
    std::string told = ParseTlsAddress(*end.address)->address.endpoint.ToString();
    const std::string own = absl::StrCat(":", end.tls().port());
    return absl::EndsWith(told, own) ? told.substr(0, told.size() - own.size()) + ":own" : told;
  };
  EXPECT_EQ(endpoint("203.0.113.7:23000"), "203.0.113.7:23000");
  EXPECT_EQ(endpoint("203.0.113.7"), "203.0.113.7:own");
  EXPECT_EQ(endpoint("2001:db8::7"), "[2001:db8::7]:own");
  EXPECT_EQ(endpoint("[2001:db8::7]:443"), "[2001:db8::7]:443");
  EXPECT_EQ(endpoint("localhost:99"), "127.0.0.1:99");
  EXPECT_THAT(endpoint("no-such-host.invalid:99"), HasSubstr("looking up 'no-such-host.invalid'"));
  for (const char* wrong :
       {"203.0.113.7:0", "203.0.113.7:x", "203.0.113.7:65536", ":5", "1::2::3:4"}) {
    EXPECT_THAT(endpoint(wrong), HasSubstr("takes an address or a name")) << wrong;
  }
  EXPECT_THAT(endpoint("fe80::1"), HasSubstr("link-local"));
}

TEST(TlsKeys, FilesAreRead) {
  const auto load = [](absl::string_view content, mode_t mode = 0600) {
    auto ring = KeyRing::Load(TestFiles().Write(content, mode));
    return ring.ok() ? absl::StrCat(ring->size(), " keys") : std::string(ring.status().message());
  };
  EXPECT_EQ(load(kKey1), "1 keys");
  EXPECT_EQ(load(absl::StrCat("# ours\n\n  ", kKey1, "  # new\r\n", kKey2, "\n")), "2 keys");
  EXPECT_EQ(load("8J+YgPCfmIHwn5iC8J+Yg/CfmITwn5iF8J+YhvCfmIc="), "1 keys");  // base64, 32 bytes
  EXPECT_EQ(load(absl::StrCat(kKey1, "\n", kKey1)), "1 keys");
  EXPECT_THAT(load(kKey1, 0640),
              HasSubstr("others than its owner can read or change it (mode 0640): chmod 600"));
  EXPECT_THAT(load(kKey1, 0604), HasSubstr("mode 0604"));
  EXPECT_THAT(load("00112233"),
              HasSubstr("the key in line 1 holds 4 bytes of key, and a key has at least 32"));
  EXPECT_THAT(load("swordfish, and more of it than 32 bytes!!"),
              HasSubstr("line 1 is neither base64 nor hex"));
  EXPECT_THAT(load("\n12345"), HasSubstr("line 2 has an odd number of hex digits"));
  EXPECT_THAT(load(std::string(64, '0')), HasSubstr("one byte over and over"));
  EXPECT_THAT(load("# nothing\n"), HasSubstr("there is no key in it"));
  EXPECT_THAT(std::string(KeyRing::Load("/no/such/file").status().message()),
              HasSubstr("GEOMESH_PSK_FILE=/no/such/file: No such file"));
  EXPECT_THAT(std::string(KeyRing::Load("/tmp").status().message()), HasSubstr("not a file"));
}

// Test vectors, for other implementations (docs/wire-format.md): RFC 5869 with the given inputs.
TEST(TlsKeys, Derivations) {
  auto ring = KeyRing::Parse(kKey1);
  ASSERT_TRUE(ring.ok());
  const auto hex = [](absl::Span<const uint8_t> bytes) {
    std::string out;
    for (const uint8_t b : bytes) absl::StrAppend(&out, absl::Hex(b, absl::kZeroPad2));
    return out;
  };
  EXPECT_EQ(hex(ring->first().id()), "bc13878b22d41c46");
  EXPECT_EQ(hex(ring->first().LaneKey("x")),
            "ac487de4558505b236164d67f855c5965ff46267b5877db438aaf5a044cb1461");
  EXPECT_EQ(hex(ring->first().Seal("x")),
            "04a4515936e5e9fd80ddd0bff9456f7b159eaa0aa7ba9a1401ea9965c64380d8");
}

// Keys are exchanged in three steps, and at each the job's processes may be of two kinds.
TEST(TlsWire, KeysRotate) {
  const std::string old_new = absl::StrCat(kKey1, "\n", kKey2);
  const std::string new_old = absl::StrCat(kKey2, "\n", kKey1);
  const std::pair<std::string, std::string> steps[] = {{kKey1, old_new},   {old_new, kKey1},
                                                       {old_new, new_old}, {new_old, old_new},
                                                       {new_old, kKey2},   {kKey2, new_old}};
  for (const auto& [a, b] : steps) {
    Pair p(OnLoopback(SharedKeys(a)), OnLoopback(SharedKeys(b)));
    EXPECT_TRUE(p.Connect(1)) << a << " dials " << b;
  }
}

TEST(TlsWire, ManyLanesAndCyclesLeakNothing) {
  const TlsKeyFiles keys = SharedKeys(kKey1);
  End hub(OnLoopback(keys));
  for (int cycle = 0; cycle < 20; ++cycle) {
    {
      End spoke(OnLoopback(keys));
      ASSERT_TRUE(spoke.wire->Dial(*hub.address, "hub", 8, {}).ok());
      ASSERT_TRUE(RunUntil({spoke.wire.get(), hub.wire.get()},
                           [&] { return spoke.events.up.size() == 8; }));
    }
    ASSERT_TRUE(
        RunUntil({hub.wire.get()}, [&] { return hub.events.lost.size() == 8 * (cycle + 1); }));
    ASSERT_TRUE(RunUntil({hub.wire.get()}, [&] { return CountSockets() == 1; })) << CountSockets();
  }
  EXPECT_EQ(hub.tls().stats().connections, 0);
}

TEST(TlsWire, DestroyedWithPostsPending) {
  Pair p;
  ASSERT_TRUE(p.Connect(1));
  auto payload = std::make_unique<std::string>(kMaxSegmentPayloadBytes, 'x');
  for (uint64_t i = 0; i < 200; ++i) {
    ASSERT_TRUE(p.a.wire->Post(p.Lane(0), Span("h"), Span(*payload), PostToken{i}).ok());
  }
  p.a.wire->Progress();
  p.a.wire.reset();
  payload.reset();
  ASSERT_TRUE(RunUntil({p.b.wire.get()}, [&] { return p.b.events.lost.size() == 1; }));
}

// ---- processes

// Listens, accepts, then leaves a forked child behind; killed by the test.
int RunForker(const std::string& key_file) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  TlsKeyFiles keys;
  keys.psk = key_file;
  End end(OnLoopback(keys));
  return RunAcceptor(end, [] {
    if (fork() == 0) {
      for (;;) pause();
    }
  });
}

TEST(TlsProcess, ForkedChildHoldsNoLane) {
  const TlsKeyFiles keys = SharedKeys(kKey1);
  End end(OnLoopback(keys));
  Process other("forker", {keys.psk});
  const std::string address = *other.Hear();
  ASSERT_TRUE(end.wire->Dial(address, "rank 1", 2, {}).ok());
  ASSERT_TRUE(RunUntil({end.wire.get()}, [&] { return end.events.up.size() == 2; }));
  ASSERT_EQ(other.Hear(), "accepted");
  const absl::Time start = absl::Now();
  other.Kill(SIGKILL);
  ASSERT_TRUE(RunUntil({end.wire.get()}, [&] { return end.events.lost.size() == 2; }));
  EXPECT_LT(absl::Now() - start, absl::Seconds(2));
}

TEST(TlsProcess, ParentGoesOnAfterFork) {
  Pair p;
  ASSERT_TRUE(p.Connect(2));
  const int other_socket = socket(AF_INET, SOCK_STREAM, 0);
  int result[2];
  ASSERT_EQ(pipe(result), 0);
  const pid_t child = fork();
  if (child == 0) {
    const int sockets = CountSockets();
    p.a.wire.reset();  // as at an exit: must not touch what the parent shares
    p.b.wire.reset();
    Process::WriteLine(result[1], absl::StrCat(sockets, " ", CountSockets()));
    _exit(0);
  }
  EXPECT_EQ(Process::ReadLine(result[0]), "1 1");
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  for (int fd : {other_socket, result[0], result[1]}) close(fd);
  ASSERT_TRUE(p.a.wire->Post(p.Lane(0), Span("still"), Span("here"), PostToken{1}).ok());
  ASSERT_TRUE(p.Run([&] { return p.b.events.segments.size() == 1; }));
  EXPECT_TRUE(p.a.events.lost.empty());
  EXPECT_TRUE(p.b.events.lost.empty());
}

}  // namespace
}  // namespace geomesh::transport

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--as=forker") {
    return geomesh::transport::RunForker(argv[2]);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
