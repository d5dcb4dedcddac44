// The send scheduler alone: order, credit, lanes.
#include "transport/scheduler.h"

#include <gtest/gtest.h>

#include "transport/lane.h"

namespace geomesh::transport {
namespace {

constexpr uint64_t kSegment = kMaxSegmentPayloadBytes;

// Sizes only: nothing here reads the bytes.
OutMessagePtr Message(uint64_t id, uint64_t size, int urgency = 0) {
  static const std::byte nothing{};
  auto message = std::make_shared<OutMessage>();
  message->envelope.key = {1, id};
  message->bytes = absl::MakeConstSpan(&nothing, size);
  message->urgency = urgency;
  return message;
}

std::vector<uint64_t> TakeIds(Outbox* outbox, int count) {
  std::vector<uint64_t> ids;
  while (count-- > 0 && outbox->NextLevel() < kLevels) {
    ids.push_back(outbox->Take().message->envelope.key.id);
  }
  return ids;
}

TEST(OutboxTest, SmallThenNearlyCompleteThenBulk) {
  Outbox outbox;
  outbox.SetBound(1 << 30);
  EXPECT_TRUE(outbox.Add(Message(1, 7 * kSegment)));
  EXPECT_TRUE(outbox.Add(Message(2, 2 * kSegment)));
  EXPECT_TRUE(outbox.Add(Message(3, 8)));
  EXPECT_FALSE(outbox.Add(Message(3, 8)));
  EXPECT_TRUE(outbox.Add(Message(4, 0)));
  // 1 becomes nearly complete after three segments, and then goes by its age.
  EXPECT_EQ(TakeIds(&outbox, 100), (std::vector<uint64_t>{3, 4, 2, 2, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(outbox.NextLevel(), kLevels);
}

TEST(OutboxTest, UrgencyOrdersWithinALevel) {
  Outbox outbox;
  outbox.SetBound(1 << 30);
  outbox.Add(Message(1, 8, 5));
  outbox.Add(Message(2, 8, -5));
  outbox.Add(Message(3, 8));
  outbox.Add(Message(4, 9 * kSegment, -9));
  EXPECT_EQ(TakeIds(&outbox, 4), (std::vector<uint64_t>{2, 3, 1, 4}));
}

TEST(OutboxTest, SegmentsCoverTheMessage) {
  Outbox outbox;
  outbox.SetBound(1 << 30);
  outbox.Add(Message(1, 3 * kSegment + 5));
  uint64_t next = 0;
  while (outbox.NextLevel() < kLevels) {
    const Outbox::Segment segment = outbox.Take();
    EXPECT_EQ(segment.offset, next);
    next += segment.size;
  }
  EXPECT_EQ(next, 3 * kSegment + 5);
}

TEST(OutboxTest, CreditHoldsBackAndLetsGo) {
  Outbox outbox;
  outbox.SetBound(1 << 20);  // 7/8 of it for bulk: three segments
  outbox.Add(Message(1, 10 * kSegment));
  EXPECT_EQ(TakeIds(&outbox, 100).size(), 3);
  EXPECT_EQ(outbox.TakeAnnouncements(false), (std::vector<MessageKey>{{1, 1}}));
  EXPECT_TRUE(outbox.TakeAnnouncements(false).empty());
  EXPECT_TRUE(outbox.waits_for_credit());
  outbox.Add(Message(2, 1000));  // from the last eighth
  EXPECT_EQ(TakeIds(&outbox, 100), (std::vector<uint64_t>{2}));

  EXPECT_TRUE(outbox.OnReleased(2 * (kSegment + kSegmentChargeBytes)));
  EXPECT_EQ(TakeIds(&outbox, 100), (std::vector<uint64_t>{1, 1}));
  EXPECT_TRUE(outbox.OnReleased(1));            // an older lane's word
  EXPECT_FALSE(outbox.OnReleased(1ull << 40));  // more than was ever sent

  outbox.OnWanted({1, 1});
  EXPECT_FALSE(outbox.waits_for_credit());
  EXPECT_EQ(TakeIds(&outbox, 100).size(), 5);
}

TEST(OutboxTest, SegmentsPutBackGoFirstAndAreNotChargedTwice) {
  Outbox outbox;
  outbox.SetBound(1 << 20);
  outbox.Add(Message(1, 3 * kSegment));
  const Outbox::Segment first = outbox.Take();
  outbox.Take();
  outbox.Take();
  EXPECT_EQ(outbox.NextLevel(), kLevels);
  outbox.PutBack(first.message, {first.offset, first.solicited});
  ASSERT_LT(outbox.NextLevel(), kLevels);  // though there is no credit left
  const Outbox::Segment again = outbox.Take();
  EXPECT_EQ(again.offset, first.offset);
  EXPECT_EQ(again.size, first.size);
  EXPECT_FALSE(outbox.OnReleased(4 * (kSegment + kSegmentChargeBytes)));
  EXPECT_TRUE(outbox.OnReleased(3 * (kSegment + kSegmentChargeBytes)));
}

TEST(PickLaneTest, LeastBacklogInTimeWithinTheWindow) {
  std::vector<LaneView> lanes(3);
  for (LaneView& lane : lanes) lane = {0, 4 * kSegment, 1e8, 0.01};
  lanes[0].in_flight_bytes = 2 * kSegment;
  lanes[1].in_flight_bytes = 3 * kSegment;
  lanes[1].bytes_per_s = 4e8;  // more bytes, less time
  lanes[2].in_flight_bytes = 2 * kSegment;
  EXPECT_EQ(PickLane(lanes, Level::kBulk), 1);
  lanes[1].in_flight_bytes = 4 * kSegment;  // full
  EXPECT_EQ(PickLane(lanes, Level::kBulk), 0);
  EXPECT_EQ(PickLane(lanes, Level::kSmall), 1);  // but not for the small
  for (LaneView& lane : lanes) lane.in_flight_bytes = 4 * kSegment;
  EXPECT_EQ(PickLane(lanes, Level::kBulk), -1);
  for (LaneView& lane : lanes) lane.in_flight_bytes = 100 * kSegment;
  EXPECT_EQ(PickLane(lanes, Level::kSmall), -1);
  EXPECT_EQ(PickLane({}, Level::kSmall), -1);
}

TEST(PickLaneTest, SmallTakesTheQuickestPath) {
  std::vector<LaneView> lanes(2);
  lanes[0] = {0, 4 * kSegment, 1e9, 0.3};
  lanes[1] = {1000, 4 * kSegment, 1e7, 0.01};
  EXPECT_EQ(PickLane(lanes, Level::kSmall), 1);
  EXPECT_EQ(PickLane(lanes, Level::kBulk), 0);
}

TEST(WindowTest, TwiceBandwidthTimesDelay) {
  EXPECT_EQ(WindowBytes(0, 0, 1), 4 * kSegment);
  EXPECT_EQ(WindowBytes(0, 0, 2), 2 * kSegment);
  EXPECT_EQ(WindowBytes(0, 0, 16), kSegment);
  EXPECT_EQ(WindowBytes(1e8, 0.1, 1), 20000000);
  EXPECT_EQ(WindowBytes(1e12, 1, 1), 64u << 20);
}

TEST(LaneTest, RateAndDelayFromAcks) {
  Lane lane;
  Instant now{};
  Outgoing first, second;
  static const std::byte nothing{};
  first.payload = second.payload = absl::MakeConstSpan(&nothing, 99920);  // 100,000 with header
  lane.OnSend(&first, now, 1);
  lane.OnSend(&second, now, 1);
  EXPECT_EQ(lane.in_flight_bytes, 200000);
  // Both arrive after 100 ms, 50 of which the peer held its ack back.
  now = now + absl::Milliseconds(100);
  lane.delivered_bytes += 200000;
  lane.OnAck(second, absl::Milliseconds(50), now);
  EXPECT_EQ(lane.min_rtt, absl::Milliseconds(50));
  EXPECT_DOUBLE_EQ(lane.bytes_per_s, 2e6);

  // Two more, sent 200 ms apart, whose acks come as one: the time between the sends counts.
  Outgoing third, fourth;
  third.payload = fourth.payload = first.payload;
  lane.bytes_per_s = 0;
  lane.OnSend(&third, now, 1);
  now = now + absl::Milliseconds(200);
  lane.OnSend(&fourth, now, 1);
  now = now + absl::Milliseconds(10);
  lane.delivered_bytes += 200000;
  fourth.delivered_at_before = now - std::chrono::milliseconds(10);
  lane.OnAck(fourth, absl::ZeroDuration(), now);
  EXPECT_NEAR(lane.bytes_per_s, 200000 / 0.3, 1e4);  // since the first two were sent
}

}  // namespace
}  // namespace geomesh::transport
