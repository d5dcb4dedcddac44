// The send scheduler alone: order, credit, waiting, lanes and how many of them.
#include "transport/scheduler.h"

#include <gtest/gtest.h>

#include "transport/balancer.h"
#include "transport/lane.h"
#include "transport/lane_tuner.h"

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

constexpr Instant kStart{};

int AnyLane(OutMessage&, Level) { return 0; }

std::vector<uint64_t> TakeIds(Outbox* outbox, int count, Instant now = kStart) {
  std::vector<uint64_t> ids;
  while (count-- > 0) {
    const auto segment = outbox->Take(now, AnyLane);
    if (!segment.has_value()) break;
    ids.push_back(segment->message->envelope.key.id);
  }
  return ids;
}

bool Idle(Outbox* outbox) { return !outbox->Take(kStart, AnyLane).has_value(); }

TEST(OutboxTest, WhatIsLeftDecidesAndProgressLiftsAMessage) {
  Outbox outbox;
  outbox.SetBound(1 << 30);
  EXPECT_TRUE(outbox.Add(Message(1, 33 * kSegment), kStart));  // above 8 MB: one level down
  EXPECT_TRUE(outbox.Add(Message(2, 7 * kSegment), kStart));
  EXPECT_TRUE(outbox.Add(Message(3, 2 * kSegment), kStart));
  EXPECT_TRUE(outbox.Add(Message(4, 8), kStart));
  EXPECT_FALSE(outbox.Add(Message(4, 8), kStart));
  EXPECT_TRUE(outbox.Add(Message(5, 0), kStart));
  EXPECT_EQ(TakeIds(&outbox, 11), (std::vector<uint64_t>{4, 5, 3, 3, 2, 2, 2, 2, 2, 2, 2}));
  EXPECT_EQ(TakeIds(&outbox, 1), (std::vector<uint64_t>{1}));  // 32 segments of it are left
  outbox.Add(Message(6, 32 * kSegment), kStart);               // as much, and later
  outbox.Add(Message(7, 5 * kSegment), kStart);
  EXPECT_EQ(TakeIds(&outbox, 28), (std::vector<uint64_t>(28, 1)));
  outbox.Add(Message(8, 4 * kSegment), kStart);  // as near its end as 1, and later
  EXPECT_EQ(TakeIds(&outbox, 9), (std::vector<uint64_t>{1, 1, 1, 1, 8, 8, 8, 8, 6}));
  outbox.Add(Message(9, 1), kStart);  // between two segments
  EXPECT_EQ(TakeIds(&outbox, 2), (std::vector<uint64_t>{9, 6}));
}

TEST(OutboxTest, UrgencyAndWhomTheReceiverWaitsForOrderALevel) {
  Outbox outbox;
  outbox.SetBound(1 << 30);
  outbox.Add(Message(1, 8, 5), kStart);
  outbox.Add(Message(2, 8, -5), kStart);
  outbox.Add(Message(3, 8), kStart);
  outbox.Add(Message(4, 9 * kSegment, -9), kStart);
  outbox.Add(Message(5, 8), kStart);
  outbox.OnWanted({1, 5});
  EXPECT_EQ(TakeIds(&outbox, 5), (std::vector<uint64_t>{2, 5, 3, 1, 4}));
}

TEST(OutboxTest, NothingWaitsLongerThanTheBound) {
  Outbox outbox;
  outbox.SetBound(int64_t{1} << 40);
  outbox.Add(Message(1, 1000 * kSegment), kStart);
  Instant now = kStart, last = kStart;
  int segments = 0;
  // Small ones without end.
  for (uint64_t id = 2; now < kStart + absl::Seconds(10);
       ++id, now += std::chrono::milliseconds(1)) {
    outbox.Add(Message(id, 8), now);
    const std::vector<uint64_t> ids = TakeIds(&outbox, 1, now);
    ASSERT_EQ(ids.size(), 1);
    if (ids[0] != 1) continue;
    ++segments;
    EXPECT_LE(Between(last, now), kMaxWait);
    last = now;
  }
  EXPECT_EQ(segments, 9);
}

TEST(OutboxTest, FifoAndFairSharing) {
  Outbox fifo(SchedulePolicy::kFifo), fair(SchedulePolicy::kFair);
  for (Outbox* outbox : {&fifo, &fair}) {
    outbox->SetBound(1 << 30);
    outbox->Add(Message(1, 3 * kSegment), kStart);
    outbox->Add(Message(2, 2 * kSegment, -1), kStart);
    outbox->Add(Message(3, 8), kStart);
  }
  EXPECT_EQ(TakeIds(&fifo, 9), (std::vector<uint64_t>{1, 1, 1, 2, 2, 3}));
  EXPECT_EQ(TakeIds(&fair, 9), (std::vector<uint64_t>{1, 2, 3, 1, 2, 1}));
}

TEST(OutboxTest, SegmentsCoverTheMessage) {
  Outbox outbox;
  outbox.SetBound(1 << 30);
  outbox.Add(Message(1, 3 * kSegment + 5), kStart);
  uint64_t next = 0;
  while (const auto segment = outbox.Take(kStart, AnyLane)) {
    EXPECT_EQ(segment->offset, next);
    next += segment->size;
  }
  EXPECT_EQ(next, 3 * kSegment + 5);
}

TEST(OutboxTest, CreditHoldsBackAndLetsGo) {
  Outbox outbox;
  outbox.SetBound(1 << 20);  // 7/8 of it for bulk: three segments
  outbox.Add(Message(1, 10 * kSegment), kStart);
  EXPECT_EQ(TakeIds(&outbox, 100).size(), 3);
  EXPECT_EQ(outbox.TakeAnnouncements(false), (std::vector<MessageKey>{{1, 1}}));
  EXPECT_TRUE(outbox.TakeAnnouncements(false).empty());
  EXPECT_TRUE(outbox.waits_for_credit());
  EXPECT_FALSE(outbox.has_ready());
  outbox.Add(Message(2, 1000), kStart);  // from the last eighth
  EXPECT_EQ(TakeIds(&outbox, 100), (std::vector<uint64_t>{2}));

  EXPECT_TRUE(outbox.OnReleased(2 * (kSegment + kSegmentChargeBytes)));
  EXPECT_EQ(TakeIds(&outbox, 100), (std::vector<uint64_t>{1, 1}));
  EXPECT_TRUE(outbox.OnReleased(1));            // an older lane's word
  EXPECT_FALSE(outbox.OnReleased(1ull << 40));  // more than was ever sent

  outbox.OnWanted({1, 1});
  EXPECT_FALSE(outbox.waits_for_credit());
  EXPECT_EQ(TakeIds(&outbox, 100).size(), 5);
}

TEST(OutboxTest, OneThatIsOverdueWithoutCreditHoldsNobodyUp) {
  Outbox outbox;
  outbox.SetBound(1 << 20);
  outbox.Add(Message(1, 10 * kSegment), kStart);
  EXPECT_EQ(TakeIds(&outbox, 3).size(), 3);
  outbox.Add(Message(2, 8), kStart + absl::Seconds(2));
  EXPECT_EQ(TakeIds(&outbox, 9, kStart + absl::Seconds(3)), (std::vector<uint64_t>{2}));
  EXPECT_TRUE(outbox.waits_for_credit());
}

TEST(OutboxTest, SegmentsPutBackGoFirstAndAreNotChargedTwice) {
  Outbox outbox;
  outbox.SetBound(1 << 20);
  outbox.Add(Message(1, 3 * kSegment), kStart);
  const Outbox::Segment first = *outbox.Take(kStart, AnyLane);
  EXPECT_EQ(TakeIds(&outbox, 2).size(), 2);
  EXPECT_TRUE(Idle(&outbox));
  outbox.PutBack(first.message, {first.offset, first.solicited});
  const auto again = outbox.Take(kStart, AnyLane);  // though there is no credit left
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(again->offset, first.offset);
  EXPECT_EQ(again->size, first.size);
  EXPECT_FALSE(outbox.OnReleased(4 * (kSegment + kSegmentChargeBytes)));
  EXPECT_TRUE(outbox.OnReleased(3 * (kSegment + kSegmentChargeBytes)));
}

TEST(OutboxTest, OneWhoseLaneIsFullIsPassedOver) {
  Outbox outbox;
  outbox.SetBound(1 << 30);
  for (uint64_t id = 1; id <= 3; ++id) outbox.Add(Message(id, kSegment), kStart);
  const auto full_for_1 = [](OutMessage& message, Level) {
    return message.envelope.key.id == 1 ? kItsLaneFull : 4;
  };
  const auto second = outbox.Take(kStart, full_for_1);
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(second->message->envelope.key.id, 2);
  EXPECT_EQ(second->lane, 4);
  EXPECT_FALSE(outbox.Take(kStart, [](OutMessage&, Level) { return kNoLane; }).has_value());
  EXPECT_EQ(TakeIds(&outbox, 9), (std::vector<uint64_t>{1, 3}));
}

OutMessage Bulk() {
  OutMessage message;
  static const std::byte nothing{};
  message.bytes = absl::MakeConstSpan(&nothing, 100 * kSegment);
  return message;
}

OutMessage Short() { return {}; }

TEST(LanePickerTest, BulkGoesWhereLeastTimeIsQueuedWithinTheWindow) {
  LanePicker picker(Balancer::kRateWeighted, kSmallBytes);
  OutMessage bulk = Bulk(), small = Short();
  std::vector<LaneView> lanes(3);
  for (uint32_t i = 0; i < 3; ++i) lanes[i] = {i, 0, 4 * kSegment, 1e8, 0.01};
  lanes[0].in_flight_bytes = 2 * kSegment;
  lanes[1].in_flight_bytes = 3 * kSegment;
  lanes[1].bytes_per_s = 4e8;  // more bytes, less time
  lanes[2].in_flight_bytes = 2 * kSegment;
  EXPECT_EQ(picker.Pick(lanes, bulk, Level::kMore), 1);
  lanes[1].in_flight_bytes = 4 * kSegment;  // full
  EXPECT_EQ(picker.Pick(lanes, bulk, Level::kMore), 0);
  for (LaneView& lane : lanes) lane.in_flight_bytes = 4 * kSegment;
  EXPECT_EQ(picker.Pick(lanes, bulk, Level::kMore), kNoLane);
  EXPECT_EQ(picker.Pick(lanes, small, Level::kSmall), 1);  // but not full for the small
  for (LaneView& lane : lanes) lane.in_flight_bytes = 100 * kSegment;
  EXPECT_EQ(picker.Pick(lanes, small, Level::kSmall), kNoLane);
  EXPECT_EQ(picker.Pick({}, small, Level::kSmall), kNoLane);
}

TEST(LanePickerTest, ShortOnesTakeTheLaneOnWhichTheyArriveFirst) {
  LanePicker picker(Balancer::kRateWeighted, kSmallBytes);
  OutMessage small = Short(), bulk = Bulk();
  std::vector<LaneView> lanes(2);
  lanes[0] = {7, 0, 4 * kSegment, 1e9, 0.3};
  lanes[1] = {8, 1000, 4 * kSegment, 1e7, 0.01};
  EXPECT_EQ(picker.Pick(lanes, small, Level::kSmall), 1);
  EXPECT_EQ(picker.Pick(lanes, bulk, Level::kMore), 0);
  // What the path holds is no queue, what is more than that is one.
  lanes[0] = {7, 1000000, 2000000, 1e8, 0.1};
  lanes[1] = {8, 2000000, 4000000, 1e7, 0.05};
  EXPECT_EQ(picker.Pick(lanes, small, Level::kSmall), 0);
}

TEST(LanePickerTest, APinnedMessageStaysOnItsLaneUntilThatIsGone) {
  LanePicker picker(Balancer::kRateWeighted, uint64_t{1} << 40);  // all of them
  OutMessage bulk = Bulk();
  std::vector<LaneView> lanes = {{7, 0, 4 * kSegment, 1e8, 0.2}, {8, 0, 4 * kSegment, 1e8, 0.1}};
  EXPECT_EQ(picker.Pick(lanes, bulk, Level::kMore), 1);
  bulk.first_handed_out = true;
  lanes[1].in_flight_bytes = 4 * kSegment;
  EXPECT_EQ(picker.Pick(lanes, bulk, Level::kMore), kItsLaneFull);
  lanes[1].in_flight_bytes = 3 * kSegment;
  EXPECT_EQ(picker.Pick(lanes, bulk, Level::kMore), 1);
  lanes.pop_back();
  EXPECT_EQ(picker.Pick(lanes, bulk, Level::kMore), 0);
}

TEST(LanePickerTest, SmallMessagesAloneTakeTheUrgentLane) {
  OutMessage small = Short(), bulk = Bulk();
  for (const uint64_t pin_bytes : {uint64_t{0}, kSmallBytes, uint64_t{1} << 40}) {
    LanePicker picker(Balancer::kRateWeighted, pin_bytes);
    std::vector<LaneView> lanes(3);
    for (uint32_t i = 0; i < 3; ++i) lanes[i] = {i, 0, 4 * kSegment, 1e8, 0.01};
    lanes[0].urgent = true;
    lanes[0].rtt_s = 0.3;  // though it is the slowest
    bulk.lane = small.lane = 99;
    EXPECT_EQ(picker.Pick(lanes, small, Level::kSmall), 0);
    EXPECT_EQ(picker.Pick(lanes, bulk, Level::kMore), 1);
    EXPECT_EQ(picker.Pick(lanes, bulk, Level::kOverdue), 1);
    lanes[1].in_flight_bytes = lanes[2].in_flight_bytes = 4 * kSegment;
    EXPECT_EQ(picker.Pick(lanes, bulk, Level::kMore), kNoLane);
    EXPECT_EQ(picker.Pick(lanes, small, Level::kSmall), 0);
  }
}

TEST(LanePickerTest, TheOtherBalancers) {
  std::vector<LaneView> lanes(3);
  for (uint32_t i = 0; i < 3; ++i) lanes[i] = {i, i * kSegment, 4 * kSegment, 1e6 + 1e9 * i, 0.1};
  OutMessage bulk = Bulk(), small = Short();
  LanePicker backlog(Balancer::kLeastBacklog, 0), robin(Balancer::kRoundRobin, 0);
  EXPECT_EQ(backlog.Pick(lanes, bulk, Level::kMore), 0);
  EXPECT_EQ(backlog.Pick(lanes, small, Level::kSmall), 0);  // nothing is pinned
  std::vector<int> order;
  for (int i = 0; i < 5; ++i) order.push_back(robin.Pick(lanes, bulk, Level::kMore));
  EXPECT_EQ(order, (std::vector<int>{1, 2, 0, 1, 2}));
  lanes[0].in_flight_bytes = 4 * kSegment;
  EXPECT_EQ(robin.Pick(lanes, bulk, Level::kMore), 1);
}

TEST(WindowTest, AMultipleOfBandwidthTimesDelay) {
  EXPECT_EQ(WindowBytes(2, 0, 0, 1), 4 * kSegment);
  EXPECT_EQ(WindowBytes(2, 0, 0, 2), 2 * kSegment);
  EXPECT_EQ(WindowBytes(2, 0, 0, 16), kSegment);
  EXPECT_EQ(WindowBytes(2, 1e8, 0.1, 1), 20000000);
  EXPECT_EQ(WindowBytes(1.25, 1e8, 0.1, 1), 12500000);
  EXPECT_EQ(WindowBytes(2, 1e12, 1, 1), 64u << 20);
}

// Drives a tuner over a network whose throughput with n lanes is rates[n].
struct Tuned {
  LaneTuner tuner{2, 16};
  absl::Duration rtt = absl::Milliseconds(40);
  Instant now = kStart;
  double delivered = 0;

  int Run(absl::Duration time, double (*bytes_per_s)(int lanes), bool limited = true) {
    for (const Instant end = now + time; now < end; now += std::chrono::milliseconds(10)) {
      delivered += 0.01 * bytes_per_s(tuner.lanes());
      tuner.Update(now, static_cast<uint64_t>(delivered), limited, rtt);
    }
    return tuner.lanes();
  }
};

TEST(LaneTunerTest, AddsWhileThroughputGrows) {
  Tuned grows, four, one;
  EXPECT_EQ(grows.Run(absl::Seconds(10), [](int lanes) { return 1e6 * lanes; }), 16);
  EXPECT_EQ(four.Run(absl::Seconds(10), [](int lanes) { return 1e6 * std::min(lanes, 4); }), 8);
  EXPECT_EQ(one.Run(absl::Seconds(10), [](int) { return 1e6; }), 4);  // one step to see that
}

TEST(LaneTunerTest, OnlyTimeSpentAtTheLimitCounts) {
  Tuned tuned;
  EXPECT_EQ(tuned.Run(
                absl::Seconds(10), [](int lanes) { return 1e6 * lanes; }, false),
            2);
  for (int i = 0; i < 20; ++i) {
    tuned.Run(absl::Milliseconds(100), [](int lanes) { return 1e6 * lanes; });  // under an epoch
    tuned.Run(
        absl::Milliseconds(10), [](int) { return 0.0; }, false);
  }
  EXPECT_EQ(tuned.tuner.lanes(), 2);
}

TEST(LaneTunerTest, LongPathsGetSeveralAtOnceWhereTheyAreTheLimit) {
  Tuned tuned;
  tuned.rtt = absl::Milliseconds(200);
  const auto grows = [](int lanes) { return 1e6 * lanes; };
  EXPECT_EQ(tuned.Run(absl::Seconds(5), grows, /*limited=*/false), 2);
  EXPECT_EQ(tuned.Run(absl::Milliseconds(10), grows), 8);
  // No more while these are starting: two epochs of three round trips, the second no quicker.
  EXPECT_EQ(tuned.Run(absl::Milliseconds(1190), grows), 8);
  EXPECT_EQ(tuned.Run(absl::Milliseconds(30), grows), 16);
  LaneTuner few(2, 4);
  few.Update(kStart, 0, true, tuned.rtt);
  EXPECT_EQ(few.lanes(), 4);
}

TEST(LaneTunerTest, AsManyAsHelpAreEnoughForAsLongAsNothingChanges) {
  Tuned tuned;
  EXPECT_EQ(tuned.Run(absl::Minutes(10), [](int) { return 1e6; }), 4);
  // A path that became slow, and then quick with many.
  EXPECT_EQ(tuned.Run(absl::Minutes(3), [](int) { return 1e5; }), 4);
  EXPECT_EQ(tuned.Run(absl::Minutes(3), [](int lanes) { return 1e5 * lanes; }), 16);
}

TEST(LaneTunerTest, TriesAgainWhenThePathMayHaveChanged) {
  Tuned tuned;
  EXPECT_EQ(tuned.Run(absl::Seconds(10), [](int) { return 1e6; }), 4);
  EXPECT_EQ(tuned.Run(absl::Minutes(1), [](int lanes) { return 1e6 * lanes; }), 16);
  tuned.tuner.AtLeast(99);
  EXPECT_EQ(tuned.tuner.lanes(), 16);
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
