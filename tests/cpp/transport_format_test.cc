// The bytes of segment headers, hellos and peer records, and that nothing damaged is taken for
// whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "absl/strings/escaping.h"
#include "transport/bytes.h"
#include "transport/segment.h"
#include "transport_test_util.h"

namespace geomesh::transport {
namespace {

using ::testing::HasSubstr;

constexpr size_t kSegment = kMaxSegmentPayloadBytes;

SegmentHeader DataHeader(uint64_t total, uint64_t offset, uint32_t payload) {
  SegmentHeader header;
  header.type = SegmentType::kData;
  header.total_bytes = total;
  header.offset = offset;
  header.payload_bytes = payload;
  return header;
}

absl::Status Check(const SegmentHeader& header) {
  HeaderBytes bytes;
  EncodeHeader(header, &bytes);
  return ParseHeader(bytes, header.payload_bytes).status();
}

// The layout of docs/wire-format.md, byte by byte.
TEST(SegmentTest, LayoutIsAsDocumented) {
  SegmentHeader header;
  header.type = SegmentType::kData;
  header.flags = kSolicited;
  header.source_check = 0x11121314;
  header.ack_delay_us = 0x21222324;
  header.sequence = 0x3132333435363738;
  header.ack = 0x4142434445464748;
  header.released = 0x5152535455565758;
  header.key = {0x6162636465666768, 0x7172737475767778};
  header.total_bytes = 0x40005;
  header.offset = 0x40000;
  header.fingerprint = 0x91929394;
  header.payload_bytes = 5;
  HeaderBytes bytes;
  EncodeHeader(header, &bytes);
  EXPECT_EQ(absl::BytesToHexString(AsText(bytes)),
            "474d5331"          // magic "GMS1"
            "01010000"          // type, flags, zero
            "14131211"          // source check
            "24232221"          // ack delay
            "3837363534333231"  // sequence
            "4847464544434241"  // ack
            "5857565554535251"  // released
            "6867666564636261"  // channel
            "7877767574737271"  // id
            "0500040000000000"  // total bytes
            "0000040000000000"  // offset
            "94939291"          // fingerprint
            "05000000");        // payload bytes
  const absl::StatusOr<SegmentHeader> parsed = ParseHeader(bytes, 5);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  HeaderBytes again;
  EncodeHeader(*parsed, &again);
  EXPECT_EQ(again, bytes);
}

TEST(SegmentTest, DataMustLieInsideItsMessage) {
  EXPECT_TRUE(Check(DataHeader(0, 0, 0)).ok());
  EXPECT_TRUE(Check(DataHeader(1, 0, 1)).ok());
  EXPECT_TRUE(Check(DataHeader(kSegment, 0, kSegment)).ok());
  EXPECT_TRUE(Check(DataHeader(kSegment + 1, 0, kSegment)).ok());
  EXPECT_TRUE(Check(DataHeader(kSegment + 1, kSegment, 1)).ok());
  EXPECT_FALSE(Check(DataHeader(0, 0, 1)).ok());
  EXPECT_FALSE(Check(DataHeader(0, kSegment, 0)).ok());
  EXPECT_FALSE(Check(DataHeader(8, 0, 7)).ok());
  EXPECT_FALSE(Check(DataHeader(8, 0, 9)).ok());
  EXPECT_FALSE(Check(DataHeader(8, 1, 7)).ok());
  EXPECT_FALSE(Check(DataHeader(kSegment + 1, kSegment, 2)).ok());
  EXPECT_FALSE(Check(DataHeader(kSegment, kSegment, 0)).ok());
  EXPECT_FALSE(Check(DataHeader(kMaxMessageBytes + 1, 0, kSegment)).ok());
  EXPECT_FALSE(Check(DataHeader(8, ~uint64_t{0} / kSegment * kSegment, 8)).ok());
}

TEST(SegmentTest, EveryFieldThatMustBeFixedIsChecked) {
  HeaderBytes bytes;
  EncodeHeader(DataHeader(8, 0, 8), &bytes);
  EXPECT_TRUE(ParseHeader(bytes, 8).ok());
  EXPECT_FALSE(ParseHeader(bytes, 7).ok());
  EXPECT_FALSE(ParseHeader(absl::MakeConstSpan(bytes).first(79), 8).ok());
  EXPECT_FALSE(ParseHeader({}, 8).ok());
  for (const size_t at : {0, 1, 2, 3, 4, 5, 6, 7}) {  // magic, type, flags, zero
    for (const int value : {0x02, 0x40, 0x80, 0xff}) {
      HeaderBytes broken = bytes;
      broken[at] = static_cast<std::byte>(value);
      EXPECT_FALSE(ParseHeader(broken, 8).ok()) << at << " " << value;
    }
  }
  SegmentHeader keys;
  keys.type = SegmentType::kWanted;
  for (const auto& [size, ok] : {std::pair{0u, false},
                                 {8u, false},
                                 {16u, true},
                                 {32u, true},
                                 {16u * 4096, true},
                                 {16u * 4097, false}}) {
    keys.payload_bytes = size;
    EXPECT_EQ(Check(keys).ok(), ok) << size;
  }
  SegmentHeader in_place;
  in_place.type = SegmentType::kInPlace;
  in_place.total_bytes = 1;
  in_place.payload_bytes = 24;
  EXPECT_TRUE(Check(in_place).ok());
  for (const uint32_t payload : {0u, 23u, 25u}) {
    in_place.payload_bytes = payload;
    EXPECT_FALSE(Check(in_place).ok()) << payload;
  }
  in_place.payload_bytes = 24;
  for (const uint64_t total : {uint64_t{0}, kMaxMessageBytes + 1}) {
    in_place.total_bytes = total;
    EXPECT_FALSE(Check(in_place).ok()) << total;
  }
  in_place.total_bytes = 2 * kSegment;
  in_place.offset = kSegment;
  EXPECT_FALSE(Check(in_place).ok());
  for (const SegmentType type :
       {SegmentType::kAck, SegmentType::kBye, SegmentType::kWelcome, SegmentType::kReads}) {
    SegmentHeader bare;
    bare.type = type;
    EXPECT_TRUE(Check(bare).ok());
    bare.payload_bytes = 1;
    EXPECT_FALSE(Check(bare).ok());
    bare.payload_bytes = 0;
    for (const uint8_t flags : {kSolicited, kAnswer}) {
      bare.flags = flags;
      EXPECT_FALSE(Check(bare).ok());
    }
  }
  SegmentHeader heartbeat;
  heartbeat.type = SegmentType::kHeartbeat;
  heartbeat.flags = kAnswer;
  EXPECT_TRUE(Check(heartbeat).ok());
  heartbeat.flags = kSolicited;
  EXPECT_FALSE(Check(heartbeat).ok());
}

TEST(SegmentTest, SourceCheckTellsThePairAndItsDirection) {
  const ProcessUid a{1, 2}, b{3, 4}, c{3, 5};
  EXPECT_NE(SourceCheck(a, b), SourceCheck(b, a));
  EXPECT_NE(SourceCheck(a, b), SourceCheck(a, c));
  EXPECT_EQ(SourceCheck(a, b), SourceCheck(a, b));
}

TEST(SegmentTest, KeysRoundTrip) {
  const std::vector<MessageKey> keys = {{1, 2}, {~uint64_t{0}, 0}, {7, ~uint64_t{0}}};
  EXPECT_EQ(DecodeKeys(AsBytes(EncodeKeys(keys))), keys);
}

TEST(HelloTest, RoundTripAndDamage) {
  Hello hello;
  hello.dialer = {1, 2};
  hello.target = {3, 4};
  hello.attempt = 5;
  hello.unexpected_bytes = 6;
  hello.description = std::string(1000, 'x');  // cut to what fits
  const std::string bytes = hello.Serialize();
  EXPECT_LE(bytes.size(), kMaxHelloBytes);
  const absl::StatusOr<Hello> parsed = Hello::Parse(AsBytes(bytes));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->dialer, hello.dialer);
  EXPECT_EQ(parsed->target, hello.target);
  EXPECT_EQ(parsed->attempt, 5);
  EXPECT_EQ(parsed->unexpected_bytes, 6);
  EXPECT_EQ(parsed->description, std::string(120, 'x'));
  for (size_t at = 6; at < bytes.size(); ++at) {
    std::string broken = bytes;
    broken[at] ^= 1;
    EXPECT_FALSE(Hello::Parse(AsBytes(broken)).ok()) << at;
  }
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(Hello::Parse(AsBytes(absl::string_view(bytes).substr(0, size))).ok()) << size;
  }
  // Another version is told by its number, whatever follows.
  std::string other = bytes;
  other[4] = 9;
  ASSERT_TRUE(Hello::Parse(AsBytes(other)).ok());
  EXPECT_EQ(Hello::Parse(AsBytes(other))->version, 9);
}

TEST(PeerRecordTest, RoundTripAndDamage) {
  PeerRecord record;
  record.uid = {0x0102030405060708, 0x1112131415161718};
  record.rank = 3;
  record.host = "worker-3.example";
  record.region = "eastasia";
  record.wire = "ucx";
  record.address = std::string("\0\1binary\xff", 9);
  record.topology_fingerprint = "cafe";
  record.memory = std::string("\0offer", 6);
  const std::string bytes = record.Serialize();
  const absl::StatusOr<PeerRecord> parsed = PeerRecord::Parse(bytes);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->uid, record.uid);
  EXPECT_EQ(parsed->rank, 3);
  EXPECT_EQ(parsed->host, record.host);
  EXPECT_EQ(parsed->region, record.region);
  EXPECT_EQ(parsed->wire, record.wire);
  EXPECT_EQ(parsed->address, record.address);
  EXPECT_EQ(parsed->topology_fingerprint, record.topology_fingerprint);
  EXPECT_EQ(parsed->memory, record.memory);
  for (size_t at = 0; at < bytes.size(); ++at) {
    std::string broken = bytes;
    broken[at] ^= 4;
    EXPECT_FALSE(PeerRecord::Parse(broken).ok()) << at;
  }
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(PeerRecord::Parse(absl::string_view(bytes).substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(PeerRecord::Parse(bytes + "x").ok());
  std::string other = bytes;
  other[4] = 7;
  EXPECT_THAT(std::string(PeerRecord::Parse(other).status().message()), HasSubstr("version 7"));
}

TEST(FormatTest, RandomBytesAreNeverTakenForAnything) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 10000; ++i) {
    const std::vector<std::byte> bytes = RandomBytes(random() % 200, i);
    EXPECT_FALSE(ParseHeader(bytes, random() % kSegment).ok());
    EXPECT_FALSE(Hello::Parse(bytes).ok());
    EXPECT_FALSE(PeerRecord::Parse(AsText(bytes)).ok());
  }
}

}  // namespace
}  // namespace geomesh::transport
