// The emulator without devices: splitting of super-packets, links as virtual clocks, control words.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "emulator/control.h"
#include "emulator/forwarder.h"
#include "emulator/link.h"
#include "emulator/packet.h"

namespace geomesh::emulator {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kSequence = 0xfffffe00;  // wraps inside a super-packet
constexpr uint16_t kIpId = 0xfffe;
constexpr uint8_t kAllFlags = 0x99;  // CWR, ACK, PSH, FIN
constexpr int64_t kMs = 1'000'000;

void Put16(std::vector<uint8_t>& bytes, size_t at, uint32_t value) {
  bytes[at] = static_cast<uint8_t>(value >> 8);
  bytes[at + 1] = static_cast<uint8_t>(value);
}
uint32_t Get16(const std::vector<uint8_t>& bytes, size_t at) {
  return static_cast<uint32_t>(bytes[at] << 8 | bytes[at + 1]);
}
uint32_t Get32(const std::vector<uint8_t>& bytes, size_t at) {
  return Get16(bytes, at) << 16 | Get16(bytes, at + 2);
}

// The word-by-word reference: sum of the pseudo header of a TCP segment, not inverted.
uint16_t PseudoSum(const std::vector<uint8_t>& bytes) {
  uint64_t sum = 6;
  size_t first = 12, last = 20, header = 20;
  if (bytes[0] >> 4 == 6) first = 8, last = 40, header = 40;
  for (size_t i = first; i < last; i += 2) sum += Get16(bytes, i);
  sum += bytes.size() - header;
  while (sum > 0xffff) sum = (sum & 0xffff) + (sum >> 16);
  return static_cast<uint16_t>(sum);
}

struct Flow {
  int from = 0;
  int to = 1;
  int source_port = 40000;
  bool v6 = false;
};

// A TCP packet with 12 bytes of options and `payload` counted bytes, as the kernel would hand it
// over with `gso_size`.
struct Super {
  VnetHeader vnet;
  std::vector<uint8_t> bytes;
};
Super MakeTcp(size_t payload, uint16_t gso_size, const Flow& flow = {}) {
  const size_t ip_bytes = flow.v6 ? 40 : 20;
  std::vector<uint8_t> bytes(ip_bytes + 32 + payload);
  if (flow.v6) {
    bytes[0] = 0x60;
    Put16(bytes, 4, bytes.size() - 40);
    bytes[6] = 6;
    const int owners[2] = {flow.from + 1, flow.to + 1};
    for (int i = 0; i < 2; ++i) {
      bytes[8 + 16 * i] = 0xfd;
      bytes[9 + 16 * i] = 0x71;
      Put16(bytes, 20 + 16 * i, owners[i]);
      bytes[23 + 16 * i] = 1;
    }
  } else {
    bytes[0] = 0x45;
    Put16(bytes, 2, bytes.size());
    Put16(bytes, 4, kIpId);
    bytes[9] = 6;
    const uint8_t ends[8] = {10, 71, static_cast<uint8_t>(flow.from + 1), 1,
                             10, 71, static_cast<uint8_t>(flow.to + 1),   1};
    std::memcpy(&bytes[12], ends, sizeof(ends));
    Put16(bytes, 10, static_cast<uint16_t>(~OnesComplementSum({bytes.data(), 20})));
  }
  Put16(bytes, ip_bytes, flow.source_port);
  Put16(bytes, ip_bytes + 2, 5000);
  Put16(bytes, ip_bytes + 4, kSequence >> 16);
  Put16(bytes, ip_bytes + 6, kSequence & 0xffff);
  bytes[ip_bytes + 12] = 8 << 4;
  bytes[ip_bytes + 13] = kAllFlags;
  for (size_t i = 0; i < payload; ++i) bytes[ip_bytes + 32 + i] = static_cast<uint8_t>(i * 7 + 3);
  Put16(bytes, ip_bytes + 16, PseudoSum(bytes));
  VnetHeader vnet;
  vnet.flags = VnetHeader::kNeedsChecksum;
  vnet.gso_type = gso_size == 0 ? VnetHeader::kGsoNone
                                : (flow.v6 ? VnetHeader::kGsoTcpV6 : VnetHeader::kGsoTcpV4);
  vnet.gso_size = gso_size;
  vnet.checksum_start = static_cast<uint16_t>(ip_bytes);
  vnet.checksum_offset = 16;
  return {vnet, bytes};
}

std::shared_ptr<const Packet> MakePacket(size_t payload, uint16_t gso_size, const Flow& flow = {}) {
  const Super super = MakeTcp(payload, gso_size, flow);
  std::optional<Packet> packet = Packet::Parse(super.vnet, super.bytes);
  EXPECT_TRUE(packet.has_value());
  return std::make_shared<const Packet>(*std::move(packet));
}

std::vector<uint8_t> Bytes(const Piece& piece, VnetHeader* vnet = nullptr) {
  Piece::Image image;
  piece.Render(image);
  if (vnet != nullptr) *vnet = image.vnet;
  std::vector<uint8_t> bytes(image.headers.begin(), image.headers.begin() + image.header_bytes);
  bytes.insert(bytes.end(), image.payload.begin(), image.payload.end());
  return bytes;
}

class Splitting : public ::testing::TestWithParam<bool> {};

TEST_P(Splitting, EveryPieceIsAPacketOfItsOwn) {
  const bool v6 = GetParam();
  const size_t ip_bytes = v6 ? 40 : 20;
  const size_t header = ip_bytes + 32;
  // 5 segments, the last of 1 byte; every run of them must come out right.
  const size_t payload = 4 * 1448 + 1;
  const Super super = MakeTcp(payload, 1448, {.v6 = v6});
  const auto packet = MakePacket(payload, 1448, {.v6 = v6});
  ASSERT_EQ(packet->segments(), 5u);
  EXPECT_EQ(packet->SegmentBytes(0), header + 1448);
  EXPECT_EQ(packet->SegmentBytes(4), header + 1);
  EXPECT_EQ(packet->WireBytes(), payload + 5 * header);
  for (uint32_t first = 0; first < 5; ++first) {
    for (uint32_t count = 1; first + count <= 5; ++count) {
      SCOPED_TRACE(absl::StrCat("segments ", first, " + ", count));
      VnetHeader vnet;
      const std::vector<uint8_t> bytes = Bytes(Piece(packet, first, count), &vnet);
      const size_t begin = first * 1448;
      const size_t expected = std::min<size_t>(payload - begin, count * 1448);
      ASSERT_EQ(bytes.size(), header + expected);
      EXPECT_TRUE(
          std::equal(bytes.begin() + header, bytes.end(), super.bytes.begin() + header + begin));
      if (v6) {
        EXPECT_EQ(Get16(bytes, 4), bytes.size() - 40);
      } else {
        EXPECT_EQ(Get16(bytes, 2), bytes.size());
        EXPECT_EQ(Get16(bytes, 4), (kIpId + first) & 0xffff);
        EXPECT_EQ(OnesComplementSum({bytes.data(), 20}), 0xffff);
      }
      EXPECT_EQ(Get32(bytes, ip_bytes + 4), static_cast<uint32_t>(kSequence + begin));
      uint8_t flags = kAllFlags;
      if (first > 0) flags &= 0x7f;
      if (first + count < 5) flags &= 0xf6;
      EXPECT_EQ(bytes[ip_bytes + 13], flags);
      EXPECT_EQ(Get16(bytes, ip_bytes + 16), PseudoSum(bytes));
      EXPECT_EQ(vnet.flags, VnetHeader::kNeedsChecksum);
      EXPECT_EQ(vnet.checksum_start, ip_bytes);
      if (count == 1) {
        EXPECT_EQ(vnet.gso_type, VnetHeader::kGsoNone);
        EXPECT_EQ(vnet.gso_size, 0);
      } else {
        EXPECT_EQ(vnet.gso_type, v6 ? VnetHeader::kGsoTcpV6 : VnetHeader::kGsoTcpV4);
        EXPECT_EQ(vnet.gso_size, 1448);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, Splitting, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "IPv6" : "IPv4"; });

TEST(Packet, KnowsTheRegionOfItsDestination) {
  EXPECT_EQ(MakePacket(10, 0, {.to = 0})->destination(), 0);
  EXPECT_EQ(MakePacket(10, 0, {.to = 249})->destination(), 249);
  EXPECT_EQ(MakePacket(10, 0, {.to = 3, .v6 = true})->destination(), 3);
  EXPECT_EQ(MakePacket(10, 0, {.to = 250})->destination(), -1);
  Super elsewhere = MakeTcp(10, 0);
  elsewhere.bytes[17] = 72;
  EXPECT_EQ(Packet::Parse(elsewhere.vnet, elsewhere.bytes)->destination(), -1);
  Super multicast = MakeTcp(10, 0, {.v6 = true});
  multicast.bytes[24] = 0xff;
  EXPECT_EQ(Packet::Parse(multicast.vnet, multicast.bytes)->destination(), -1);
}

TEST(Packet, RefusesWhatItCannotSplit) {
  EXPECT_FALSE(Packet::Parse({}, {}));
  EXPECT_FALSE(Packet::Parse({}, std::vector<uint8_t>(19, 0x45)));
  EXPECT_FALSE(Packet::Parse({}, std::vector<uint8_t>(39, 0x60)));
  EXPECT_FALSE(Packet::Parse({}, std::vector<uint8_t>(60, 0x50)));
  Super long_ip = MakeTcp(0, 0);
  long_ip.bytes.resize(40);
  long_ip.bytes[0] = 0x4f;
  EXPECT_FALSE(Packet::Parse(long_ip.vnet, long_ip.bytes));

  auto refused = [](auto change) {
    Super super = MakeTcp(4000, 1448);
    change(super);
    return !Packet::Parse(super.vnet, super.bytes).has_value();
  };
  EXPECT_FALSE(refused([](Super&) {}));
  EXPECT_TRUE(refused([](Super& s) { s.vnet.gso_type = VnetHeader::kGsoTcpV6; }));
  EXPECT_TRUE(refused([](Super& s) { s.vnet.gso_type = 3; }));  // UDP
  EXPECT_TRUE(refused([](Super& s) { s.vnet.gso_type = 5; }));  // UDP_L4
  EXPECT_TRUE(refused([](Super& s) { s.vnet.gso_size = 0; }));
  EXPECT_TRUE(refused([](Super& s) { s.vnet.flags = 0; }));
  EXPECT_TRUE(refused([](Super& s) { s.vnet.checksum_start = 10; }));
  EXPECT_TRUE(refused([](Super& s) { s.vnet.checksum_start = 4045; }));
  EXPECT_TRUE(refused([](Super& s) { s.bytes[32] = 4 << 4; }));
  EXPECT_TRUE(refused([](Super& s) {
    s.bytes.resize(45);
    s.bytes[32] = 15 << 4;
  }));
}

TEST(Packet, FlowHashSpreadsFlowsAndKeepsEach) {
  EXPECT_EQ(MakePacket(10, 0)->flow_hash(), MakePacket(4000, 1448)->flow_hash());
  for (const bool v6 : {false, true}) {
    std::vector<int> share(4);
    for (int port = 0; port < 4000; ++port) {
      const Flow flow = {.source_port = 20000 + port, .v6 = v6};
      ++share[MakePacket(1, 0, flow)->flow_hash() % 4];
    }
    for (int count : share) EXPECT_NEAR(count, 1000, 5 * std::sqrt(750.0));
  }
}

TEST(Packet, FragmentsOfOneFlowStayTogether) {
  Super first = MakeTcp(100, 0), later = MakeTcp(100, 0);
  first.bytes[6] = 0x20;                                 // more fragments
  Put16(later.bytes, 6, 20);                             // offset
  std::fill_n(later.bytes.begin() + 20, 4, uint8_t{9});  // payload where ports would be
  EXPECT_EQ(Packet::Parse(first.vnet, first.bytes)->flow_hash(),
            Packet::Parse(later.vnet, later.bytes)->flow_hash());
}

PathSettings Settings(double bytes_per_s, int64_t delay_ns, int64_t queue_bytes = 1 << 30) {
  return {.bytes_per_s = bytes_per_s, .delay_ns = delay_ns, .queue_bytes = queue_bytes};
}

TEST(Path, DeliversAfterWireTimeAndDelayInOrder) {
  Path path(Settings(1e6, 40 * kMs), 1);
  const auto packet = MakePacket(948, 0);  // 1000 bytes: 1 ms
  path.Admit(packet, 100);
  path.Admit(packet, 100);
  path.Admit(packet, 10 * kMs);  // the wire is idle again
  EXPECT_EQ(path.next_due_ns(), 100 + 41 * kMs);
  path.Pop();
  EXPECT_EQ(path.next_due_ns(), 100 + 42 * kMs);
  path.Pop();
  EXPECT_EQ(path.next_due_ns(), 51 * kMs);
  path.Pop();
  EXPECT_TRUE(path.empty());
  EXPECT_EQ(path.counters().sent.bytes, 3000u);
  EXPECT_EQ(path.counters().sent.packets, 3u);
}

TEST(Path, FractionsOfNanosecondsAddUp) {
  Path path(Settings(7e9, 0), 1);
  const auto packet = MakePacket(0, 0);  // 52 bytes: 7.43 ns
  for (int i = 0; i < 70'000; ++i) path.Admit(packet, 0);
  int64_t last = 0;
  for (; !path.empty(); path.Pop()) last = path.next_due_ns();
  EXPECT_NEAR(static_cast<double>(last), 520'000, 1);
}

TEST(Path, DeliversSuperPacketsInPiecesOfAMillisecond) {
  const auto packet = MakePacket(43 * 1448 + 100, 1448);
  const struct {
    double bytes_per_s;
    uint32_t segments_a_piece;
  } cases[] = {{1.25e6, 1}, {12.5e6, 8}, {125e6, 44}};
  for (const auto& [bytes_per_s, segments_a_piece] : cases) {
    SCOPED_TRACE(bytes_per_s);
    Path path(Settings(bytes_per_s, 5 * kMs), 1);
    path.Admit(packet, 0);
    uint32_t next = 0;
    uint64_t bytes = 0;
    while (!path.empty()) {
      const int64_t due = path.next_due_ns();
      const Piece piece = path.Pop();
      EXPECT_EQ(piece.first(), next);
      next += piece.count();
      if (next < 44) {
        EXPECT_EQ(piece.count(), segments_a_piece);
      }
      for (uint32_t i = 0; i < piece.count(); ++i) bytes += packet->SegmentBytes(piece.first() + i);
      EXPECT_NEAR(static_cast<double>(due), 5e6 + bytes * 1e9 / bytes_per_s, 2);
    }
    EXPECT_EQ(next, 44u);
    EXPECT_EQ(bytes, packet->WireBytes());
  }
}

TEST(Path, DropsWhatDoesNotFitTheQueue) {
  Path path(Settings(1e6, 0, 3000), 1);
  const auto packet = MakePacket(948, 0);
  for (int i = 0; i < 5; ++i) path.Admit(packet, 0);
  EXPECT_EQ(path.counters().sent.packets, 3u);
  EXPECT_EQ(path.counters().dropped.packets, 2u);
  EXPECT_EQ(path.counters().dropped.bytes, 2000u);
  EXPECT_EQ(path.BacklogBytes(0), 3000);
  path.Admit(packet, kMs - 10'000);  // ten bytes short of room
  EXPECT_EQ(path.counters().dropped.packets, 3u);
  path.Admit(packet, kMs);
  EXPECT_EQ(path.counters().sent.packets, 4u);
  EXPECT_EQ(path.BacklogBytes(2 * kMs), 2000);
  EXPECT_EQ(path.BacklogBytes(9 * kMs), 0);
}

TEST(Path, DropsTheTailOfASuperPacket) {
  Path path(Settings(1.25e6, 0, 4600), 1);
  path.Admit(MakePacket(10 * 1448, 1448), 0);
  EXPECT_EQ(path.counters().sent.packets, 3u);
  EXPECT_EQ(path.counters().dropped.packets, 7u);
  for (uint32_t i = 0; i < 3; ++i) {
    const Piece piece = path.Pop();
    EXPECT_EQ(piece.first(), i);
    EXPECT_EQ(piece.count(), 1u);
  }
  EXPECT_TRUE(path.empty());
}

TEST(Path, LosesByChanceEachSegmentByItself) {
  PathSettings settings = Settings(125e6, 0);
  settings.loss = 0.02;
  Path path(settings, 7);
  const auto packet = MakePacket(44 * 1448, 1448);
  const int packets = 2000;
  int64_t now = 0;
  uint64_t delivered = 0;
  int64_t last_due = 0;
  for (int i = 0; i < packets; ++i, now += 10 * kMs) {
    path.Admit(packet, now);
    std::set<uint32_t> seen;
    while (!path.empty()) {
      last_due = path.next_due_ns();
      const Piece piece = path.Pop();
      for (uint32_t k = 0; k < piece.count(); ++k) {
        EXPECT_TRUE(seen.insert(piece.first() + k).second);
      }
      // Lost segments took wire time: what comes after them is not early.
      EXPECT_NEAR(static_cast<double>(last_due - now), (piece.first() + piece.count()) * 12'000, 2);
    }
    delivered += seen.size();
  }
  const double segments = packets * 44.0;
  EXPECT_EQ(path.counters().sent.packets, packets * 44u);
  EXPECT_EQ(path.counters().lost.packets + delivered, packets * 44u);
  EXPECT_NEAR(path.counters().lost.packets / segments, 0.02, 5 * std::sqrt(0.02 * 0.98 / segments));
}

TEST(Path, JitterKeepsTheOrderAndItsBounds) {
  PathSettings settings = Settings(1e9, 10 * kMs);
  settings.jitter_ns = 4 * kMs;
  Path path(settings, 3);
  const auto packet = MakePacket(948, 0);  // 1 us
  double sum_ns = 0;
  int64_t last = 0;
  for (int i = 0; i < 1000; ++i) {
    const int64_t now = i * 20 * kMs;
    path.Admit(packet, now);
    const int64_t extra = path.next_due_ns() - now - 10 * kMs - 1000;
    EXPECT_GE(extra, 0);
    EXPECT_LE(extra, 4 * kMs);
    EXPECT_GE(path.next_due_ns(), last);
    last = path.next_due_ns();
    path.Pop();
    sum_ns += static_cast<double>(extra);
  }
  EXPECT_NEAR(sum_ns / 1000, 2e6, 5 * 4e6 / std::sqrt(12 * 1000.0));
  // Back to back, where the dice would reorder.
  for (int i = 0; i < 1000; ++i) path.Admit(packet, 100'000 * kMs);
  last = 0;
  while (!path.empty()) {
    EXPECT_GE(path.next_due_ns(), last);
    last = path.next_due_ns();
    path.Pop();
  }
}

TEST(Path, ANewRateAppliesToWhatWaits) {
  Path path(Settings(1e6, 0), 1);
  const auto packet = MakePacket(948, 0);
  for (int i = 0; i < 10; ++i) path.Admit(packet, 0);
  path.Configure(Settings(10e6, 0), 5 * kMs);
  EXPECT_EQ(path.BacklogBytes(5 * kMs), 5000);
  EXPECT_EQ(path.BacklogBytes(5 * kMs + kMs / 2), 0);
}

TEST(Link, CutLosesWhatIsUnderWayAndWhatComes) {
  Link link;
  const auto packet = MakePacket(4000, 1448);
  EXPECT_FALSE(link.up());
  EXPECT_EQ(link.Route(*packet), -1);
  EXPECT_EQ(link.cut_drops().packets, 3u);
  link.Configure({Settings(1e6, kMs)}, 1, 0);
  ASSERT_EQ(link.Route(*packet), 0);
  const uint64_t ticket = link.paths()[0]->ticket();
  link.paths()[0]->Admit(packet, 0);
  link.Cut(kMs);
  EXPECT_TRUE(link.paths()[0]->empty());
  EXPECT_NE(link.paths()[0]->ticket(), ticket);
  EXPECT_EQ(link.cut_drops().packets, 6u);
  EXPECT_EQ(link.cut_drops().bytes, 2 * packet->WireBytes());
  EXPECT_EQ(link.Route(*packet), -1);
  EXPECT_EQ(link.cut_drops().packets, 9u);
  link.Restore();
  ASSERT_EQ(link.Route(*packet), 0);
  link.paths()[0]->Admit(packet, 2 * kMs);
  EXPECT_EQ(link.paths()[0]->next_due_ns(), 2 * kMs + 1'500'000 + kMs);
  EXPECT_EQ(link.Counters().sent.packets, 6u);
}

TEST(Link, CountersSurviveAnotherNumberOfPaths) {
  Link link;
  link.Configure({Settings(1e6, 0)}, 1, 0);
  const auto packet = MakePacket(948, 0);
  link.paths()[0]->Admit(packet, 0);
  link.Configure({Settings(1e6, 0), Settings(2e6, 0)}, 1, 0);
  EXPECT_EQ(link.paths().size(), 2u);
  EXPECT_EQ(link.cut_drops().packets, 1u);
  link.paths()[1]->Admit(packet, 0);
  EXPECT_EQ(link.Counters().sent.packets, 2u);
  link.ResetCounters();
  EXPECT_EQ(link.Counters().sent.packets, 0u);
  EXPECT_EQ(link.cut_drops().packets, 0u);
}

TEST(LatenessHistogram, QuantilesAreWithinAnEighth) {
  LatenessHistogram histogram;
  EXPECT_EQ(histogram.Quantile(0.99), 0);
  for (int64_t i = 1; i <= 100'000; ++i) histogram.Add(i);
  histogram.Add(-5);  // ahead of time is not late
  for (const double q : {0.001, 0.1, 0.5, 0.9, 0.99}) {
    EXPECT_GE(histogram.Quantile(q), q * 100'000 * 0.999);
    EXPECT_LE(histogram.Quantile(q), q * 100'000 * 1.126);
  }
  EXPECT_EQ(histogram.Quantile(1.0), 100'000);
  EXPECT_EQ(histogram.max_ns(), 100'000);
}

class ControlTest : public ::testing::Test {
 protected:
  static std::vector<Region> Regions() {
    std::vector<Region> regions(3);
    regions[0].name = "a";
    regions[1].name = "b";
    regions[2].name = "c";
    return regions;
  }
  Forwarder forwarder_{Regions()};
  Fd none_;
  Control control_{forwarder_, none_, 1, false};
};

TEST_F(ControlTest, SetsLinksAndCutsThem) {
  EXPECT_EQ(
      control_.Answer("link a b path bytes_per_s=1e6 delay_s=0.04 queue_bytes=64000 "
                      "path bytes_per_s=2e6 delay_s=0 jitter_s=0.001 loss=0.5 queue_bytes=2000"),
      "{\"ok\": true}");
  Link& link = forwarder_.link(0, 1);
  ASSERT_EQ(link.paths().size(), 2u);
  EXPECT_EQ(link.paths()[0]->settings().bytes_per_s, 1e6);
  EXPECT_EQ(link.paths()[0]->settings().delay_ns, 40 * kMs);
  EXPECT_EQ(link.paths()[0]->settings().queue_bytes, 64000);
  EXPECT_EQ(link.paths()[1]->settings().jitter_ns, kMs);
  EXPECT_EQ(link.paths()[1]->settings().loss, 0.5);
  EXPECT_FALSE(forwarder_.link(1, 0).up());
  EXPECT_EQ(control_.Answer("cut a b"), "{\"ok\": true}");
  EXPECT_TRUE(link.is_cut());
  EXPECT_EQ(control_.Answer("restore a b"), "{\"ok\": true}");
  EXPECT_TRUE(link.up());
}

TEST_F(ControlTest, CountersNameThePairs) {
  control_.Answer("link c a path bytes_per_s=1e6 delay_s=0 queue_bytes=64000");
  forwarder_.link(2, 0).paths()[0]->Admit(MakePacket(948, 0), 0);
  const std::string counters = control_.Answer("counters");
  EXPECT_THAT(counters,
              HasSubstr("\"from\": \"c\", \"to\": \"a\", \"bytes\": 1000, \"packets\": 1"));
  EXPECT_THAT(counters, HasSubstr("\"from\": \"a\", \"to\": \"c\", \"bytes\": 0, \"packets\": 0"));
  EXPECT_EQ(control_.Answer("reset"), "{\"ok\": true}");
  EXPECT_THAT(control_.Answer("counters"), HasSubstr("\"c\", \"to\": \"a\", \"bytes\": 0"));
}

TEST_F(ControlTest, RefusesWhatItDoesNotUnderstand) {
  const char* const lines[] = {
      "",
      "fly",
      "cut a",
      "cut a d",
      "cut a a",
      "restore x b",
      "counters now",
      "link a b",
      "link a b bytes_per_s=1",
      "link a b path",
      "link a b path bytes_per_s=1e6 delay_s=0",
      "link a b path bytes_per_s=0 delay_s=0 queue_bytes=9000",
      "link a b path bytes_per_s=1e6 delay_s=0 queue_bytes=1",
      "link a b path bytes_per_s=1e6 delay_s=-1 queue_bytes=9000",
      "link a b path bytes_per_s=1e6 delay_s=nan queue_bytes=9000",
      "link a b path bytes_per_s=1e6 delay_s=0 loss=1.5 queue_bytes=9000",
      "link a b path bytes_per_s=1e6 delay_s=0 queue_bytes=9000 colour=1",
      "link a b path bytes_per_s=fast delay_s=0 queue_bytes=9000",
  };
  for (const char* line : lines) {
    EXPECT_THAT(control_.Answer(line), HasSubstr("{\"ok\": false, \"error\": ")) << line;
  }
  EXPECT_THAT(control_.Answer("cut a \"d"), HasSubstr("no region named \\\"d"));
  EXPECT_FALSE(forwarder_.link(0, 1).up());
}

}  // namespace
}  // namespace geomesh::emulator
