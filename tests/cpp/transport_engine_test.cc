// Engines over wire/fake: messages arrive whole, in any order of posting, within bounds, and what
// can't be received says why on both sides.
#include "transport/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <numeric>
#include <thread>

#include "absl/time/clock.h"
#include "transport_test_util.h"

namespace geomesh::transport {
namespace {

using ::testing::HasSubstr;

constexpr size_t kSegment = kMaxSegmentPayloadBytes;

TEST(EngineTest, EverySizeArrivesExactly) {
  for (const int lanes : {1, 4}) {
    FakeNetwork network;
    EngineOptions options;
    options.lanes = lanes;
    Pair pair(&network, options);
    uint64_t id = 0;
    for (size_t size : {size_t{0}, size_t{1}, size_t{8}, kSegment - 1, kSegment, kSegment + 1,
                        3 * kSegment + 5, size_t{64} << 20}) {
      if (lanes == 1 && size > 4 * kSegment) continue;
      const std::vector<std::byte> sent = RandomBytes(size, size + 1);
      for (const bool forth : {true, false}) {
        Node& from = forth ? pair.a : pair.b;
        Node& to = forth ? pair.b : pair.a;
        Received received = to.Recv(from, {kChannel, ++id}, size);
        Done done = from.Send(to, {kChannel, id}, sent);
        ASSERT_EQ(done.Wait(), absl::OkStatus()) << size;
        ASSERT_EQ(received.Wait(), absl::OkStatus()) << size;
        EXPECT_EQ(received.size(), size);
        EXPECT_TRUE(received.bytes() == sent) << size;
      }
    }
    EXPECT_EQ(network.Lanes("a", "b"), lanes);
  }
}

TEST(EngineTest, BothDirectionsAtOnceUnpostedAndLarge) {
  FakeNetwork network;
  EngineOptions options;
  options.unexpected_bytes = 1 << 20;
  Pair pair(&network, options);
  // Both sides have more on the way than either may keep; no receive is posted before.
  const std::vector<std::byte> from_a = RandomBytes(20 * kSegment + 3, 1);
  const std::vector<std::byte> from_b = RandomBytes(21 * kSegment + 7, 2);
  Done a = pair.a.Send(pair.b, {kChannel, 1}, from_a);
  Done b = pair.b.Send(pair.a, {kChannel, 1}, from_b);
  Received at_b = pair.b.Recv(pair.a, {kChannel, 1}, from_a.size());
  Received at_a = pair.a.Recv(pair.b, {kChannel, 1}, from_b.size());
  ASSERT_EQ(at_b.Wait(), absl::OkStatus());
  ASSERT_EQ(at_a.Wait(), absl::OkStatus());
  EXPECT_EQ(a.Wait(), absl::OkStatus());
  EXPECT_EQ(b.Wait(), absl::OkStatus());
  EXPECT_TRUE(at_b.bytes() == from_a);
  EXPECT_TRUE(at_a.bytes() == from_b);
}

TEST(EngineTest, ManySmallMessagesFromManyThreads) {
  FakeNetwork network;
  EngineOptions options;
  options.lanes = 3;
  Pair pair(&network, options);
  constexpr int kThreads = 4, kMessages = 500;
  std::vector<std::vector<std::byte>> sent(kThreads * kMessages);
  std::vector<Received> received;
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = RandomBytes(i % 70, i);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kMessages; ++i) {
        const uint64_t id = t * kMessages + i;
        pair.a.Send(pair.b, {kChannel, id}, sent[id]);
      }
    });
  }
  for (size_t id = 0; id < sent.size(); ++id) {
    received.push_back(pair.b.Recv(pair.a, {kChannel, id}, 70));
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t id = 0; id < sent.size(); ++id) {
    ASSERT_EQ(received[id].Wait(), absl::OkStatus());
    ASSERT_TRUE(received[id].bytes() == sent[id]) << id;
  }
}

// A receiver that takes the last message first, with a bound far below what was sent.
TEST(EngineTest, UnexpectedMessagesAreBoundedAndAllArrive) {
  FakeNetwork network;
  EngineOptions options;
  options.unexpected_bytes = 2 << 20;
  Pair pair(&network, options);
  std::vector<std::vector<std::byte>> sent;
  std::vector<Done> done;
  for (uint64_t i = 0; i < 60; ++i) {
    sent.push_back(RandomBytes(i % 3 == 0 ? 700000 : 1000 + i, i));
  }
  for (uint64_t i = 0; i < 60; ++i) done.push_back(pair.a.Send(pair.b, {kChannel, i}, sent[i]));
  // It fills the bound, and no more.
  const absl::Time limit = absl::Now() + kTestLimit;
  while (pair.b.Stats(pair.a).unexpected_bytes < (2 << 20) / 2) {
    ASSERT_LT(absl::Now(), limit);
    absl::SleepFor(absl::Milliseconds(1));
  }
  for (uint64_t i = 60; i-- > 0;) {
    EXPECT_LE(pair.b.Stats(pair.a).unexpected_bytes, uint64_t{2} << 20);
    Received received = pair.b.Recv(pair.a, {kChannel, i}, sent[i].size());
    ASSERT_EQ(received.Wait(), absl::OkStatus()) << i;
    ASSERT_TRUE(received.bytes() == sent[i]) << i;
    ASSERT_EQ(done[i].Wait(), absl::OkStatus()) << i;
  }
  EXPECT_EQ(pair.b.Stats(pair.a).unexpected_bytes, 0);
}

// 20,000 small messages exceed a bound of 1 MB (each counts with its overhead).
TEST(EngineTest, SmallUnexpectedMessagesAreBoundedToo) {
  FakeNetwork network;
  EngineOptions options;
  options.unexpected_bytes = 1 << 20;
  Pair pair(&network, options);
  constexpr uint64_t kMessages = 10000;
  std::vector<uint64_t> values(kMessages);
  std::iota(values.begin(), values.end(), 77);
  std::atomic<int> sent{0};
  const PeerId b = pair.a.Id(pair.b), a = pair.b.Id(pair.a);
  pair.a.engine->Post([&] {
    for (uint64_t i = 0; i < kMessages; ++i) {
      pair.a.engine->Send(b, {{kChannel, i}, 0},
                          absl::MakeConstSpan(reinterpret_cast<std::byte*>(&values[i]), 8),
                          [&](const absl::Status& status) { sent += status.ok(); });
    }
  });
  std::vector<uint64_t> got(kMessages);
  Notification all;
  std::atomic<uint64_t> received{0};
  for (uint64_t i = kMessages; i-- > 0;) {
    pair.b.engine->Post([&, i] {
      pair.b.engine->Recv(a, {{kChannel, i}, 0},
                          absl::MakeSpan(reinterpret_cast<std::byte*>(&got[i]), 8),
                          [&](absl::StatusOr<size_t> size) {
                            if (size.ok() && *size == 8 && ++received == kMessages) all.Notify();
                          });
    });
    if (i % 1000 == 0) {
      EXPECT_LE(pair.b.Stats(pair.a).unexpected_bytes, uint64_t{1} << 20);
    }
  }
  ASSERT_TRUE(all.WaitForNotificationWithTimeout(kTestLimit)) << received;
  EXPECT_TRUE(got == values);
  ASSERT_EQ(pair.a.engine->Drain(absl::Now() + kTestLimit), absl::OkStatus());
  EXPECT_EQ(sent, kMessages);
}

TEST(EngineTest, ShorterMessageFitsLongerIsRefusedOnBothSides) {
  FakeNetwork network({absl::ZeroDuration(), 200e6});
  Pair pair(&network);
  // More than is ever under way at once: its sender hears of the refusal before its end.
  const std::vector<std::byte> bytes = RandomBytes(80 * kSegment, 3);
  Received roomy = pair.b.Recv(pair.a, {kChannel, 1}, bytes.size() + 100);
  Done done = pair.a.Send(pair.b, {kChannel, 1}, bytes);
  ASSERT_EQ(roomy.Wait(), absl::OkStatus());
  EXPECT_EQ(roomy.size(), bytes.size());

  Received tight = pair.b.Recv(pair.a, {kChannel, 2}, bytes.size() - 1);
  done = pair.a.Send(pair.b, {kChannel, 2}, bytes);
  EXPECT_EQ(tight.Wait().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(tight.Wait().message()), HasSubstr("20971520"));
  EXPECT_THAT(std::string(tight.Wait().message()), HasSubstr("20971519"));
  EXPECT_THAT(std::string(tight.Wait().message()), HasSubstr("rank 0 on host host-a (region-a)"));
  EXPECT_EQ(done.Wait().code(), absl::StatusCode::kInvalidArgument);

  // The same, with the message there before its receive.
  const std::vector<std::byte> small = RandomBytes(9, 4);
  ASSERT_EQ(pair.a.Send(pair.b, {kChannel, 3}, small).Wait(), absl::OkStatus());
  ASSERT_EQ(pair.a.engine->Drain(absl::Now() + kTestLimit), absl::OkStatus());
  EXPECT_EQ(pair.b.Recv(pair.a, {kChannel, 3}, 8).Wait().code(),
            absl::StatusCode::kInvalidArgument);

  // And neither side is the worse for it.
  Received next = pair.b.Recv(pair.a, {kChannel, 4}, bytes.size());
  pair.a.Send(pair.b, {kChannel, 4}, bytes);
  ASSERT_EQ(next.Wait(), absl::OkStatus());
  EXPECT_TRUE(next.bytes() == bytes);
}

TEST(EngineTest, DifferentOperationsAreToldApart) {
  FakeNetwork network({absl::ZeroDuration(), 200e6});
  Pair pair(&network);
  const std::vector<std::byte> bytes = RandomBytes(6 * kSegment, 3);
  Received received = pair.b.Recv(pair.a, {kChannel, 1}, bytes.size(), 0xaaaa1111);
  Done done = pair.a.Send(pair.b, {kChannel, 1}, bytes, 0xbbbb2222);
  for (const absl::Status& status : {received.Wait(), done.Wait()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("aaaa1111"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("bbbb2222"));
  }
  // Zero on either side is not compared.
  Received any = pair.b.Recv(pair.a, {kChannel, 2}, bytes.size(), 0);
  pair.a.Send(pair.b, {kChannel, 2}, bytes, 0xbbbb2222);
  EXPECT_EQ(any.Wait(), absl::OkStatus());
}

TEST(EngineTest, KeysInUseAreRefused) {
  FakeNetwork network;
  Pair pair(&network);
  Received first = pair.b.Recv(pair.a, {kChannel, 1}, 8);
  EXPECT_EQ(pair.b.Recv(pair.a, {kChannel, 1}, 8).Wait().code(),
            absl::StatusCode::kInvalidArgument);
  const std::vector<std::byte> bytes = RandomBytes(8, 1);
  pair.a.Send(pair.b, {kChannel, 1}, bytes);
  EXPECT_EQ(first.Wait(), absl::OkStatus());
}

TEST(EngineTest, MessagesToSelfInEitherOrder) {
  FakeNetwork network;
  EngineOptions options;
  options.unexpected_bytes = 1 << 20;
  Node node(&network, "self", 0, options);
  uint64_t id = 0;
  for (const size_t size : {size_t{0}, size_t{8}, 3 * kSegment + 1, size_t{9} << 20}) {
    const std::vector<std::byte> bytes = RandomBytes(size, size);
    Received before = node.Recv(node, {kChannel, ++id}, size);
    EXPECT_EQ(node.Send(node, {kChannel, id}, bytes).Wait(), absl::OkStatus());
    ASSERT_EQ(before.Wait(), absl::OkStatus());
    EXPECT_TRUE(before.bytes() == bytes);

    Done done = node.Send(node, {kChannel, ++id}, bytes);
    Received after = node.Recv(node, {kChannel, id}, size);
    ASSERT_EQ(after.Wait(), absl::OkStatus());
    EXPECT_EQ(done.Wait(), absl::OkStatus());
    EXPECT_TRUE(after.bytes() == bytes);
  }
  const std::vector<std::byte> bytes = RandomBytes(9, 1);
  Received tight = node.Recv(node, {kChannel, ++id}, 8);
  EXPECT_EQ(node.Send(node, {kChannel, id}, bytes).Wait().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(tight.Wait().code(), absl::StatusCode::kInvalidArgument);
}

// 8 bytes posted behind 32 MB on a lane of 50 MB/s, which takes 0.6 s for them.
TEST(EngineTest, SmallMessageDoesNotWaitForBulk) {
  FakeNetwork network({absl::Milliseconds(1), 50e6});
  EngineOptions options;
  options.lanes = 1;
  Pair pair(&network, options);
  const std::vector<std::byte> bulk = RandomBytes(32 << 20, 1), small = RandomBytes(8, 2);
  Received big = pair.b.Recv(pair.a, {kChannel, 1}, bulk.size());
  Received little = pair.b.Recv(pair.a, {kChannel, 2}, small.size());
  pair.a.Send(pair.b, {kChannel, 1}, bulk);
  absl::SleepFor(absl::Milliseconds(100));  // the bulk is under way
  pair.a.Send(pair.b, {kChannel, 2}, small);
  ASSERT_EQ(little.Wait(), absl::OkStatus());
  EXPECT_FALSE(big.over());
  ASSERT_EQ(big.Wait(), absl::OkStatus());
  EXPECT_TRUE(big.bytes() == bulk);
}

TEST(EngineTest, ClosedChannelEndsBothSides) {
  FakeNetwork network;
  Pair pair(&network);
  const PeerId b = pair.a.Id(pair.b), a = pair.b.Id(pair.a);
  struct Told {
    Notification over;
    PeerId peer;
    absl::Status status;
  } told;
  pair.b.engine->Call([&] {
    Engine::ChannelEvents events;
    events.on_closed = [&](PeerId peer, const absl::Status& status) {
      told.peer = peer;
      told.status = status;
      told.over.Notify();
    };
    pair.b.engine->OpenChannel(kChannel, {a}, std::move(events));
  });
  Received at_a = pair.a.Recv(pair.b, {kChannel, 1}, 8);
  Received at_b = pair.b.Recv(pair.a, {kChannel, 1}, 8);
  Received other = pair.b.Recv(pair.a, {kChannel + 1, 1}, 8);
  const std::vector<std::byte> large = RandomBytes(80 << 20, 1);
  Done blocked = pair.a.Send(pair.b, {kChannel, 2}, large);
  pair.a.engine->Call([&] {
    pair.a.engine->CloseChannel(kChannel, absl::DataLossError("disk of rank 0 is on fire"), {b});
  });
  EXPECT_EQ(at_a.Wait().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(blocked.Wait().code(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(told.over.WaitForNotificationWithTimeout(kTestLimit));
  EXPECT_EQ(told.peer, a);
  EXPECT_EQ(told.status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(told.status.message()), HasSubstr("disk of rank 0 is on fire"));
  EXPECT_THAT(std::string(told.status.message()), HasSubstr("rank 0 on host host-a"));
  EXPECT_FALSE(at_b.over());  // it is for the owner of the channel to end it here
  pair.b.engine->Call([&] { pair.b.engine->CloseChannel(kChannel, told.status, {}); });
  EXPECT_EQ(at_b.Wait().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(pair.b.Recv(pair.a, {kChannel, 3}, 8).Wait().code(), absl::StatusCode::kDataLoss);

  // Other channels go on, and what comes late for the closed one is dropped, not kept.
  const std::vector<std::byte> bytes = RandomBytes(8, 1);
  pair.a.Send(pair.b, {kChannel + 1, 1}, bytes);
  EXPECT_EQ(other.Wait(), absl::OkStatus());
  ASSERT_EQ(pair.a.engine->Drain(absl::Now() + kTestLimit), absl::OkStatus());
  EXPECT_EQ(pair.b.Stats(pair.a).unexpected_bytes, 0);
}

TEST(EngineTest, ChannelClosedBeforeItIsOpenedHereIsRemembered) {
  FakeNetwork network;
  Pair pair(&network);
  const PeerId b = pair.a.Id(pair.b), a = pair.b.Id(pair.a);
  pair.a.engine->Call(
      [&] { pair.a.engine->CloseChannel(kChannel, absl::AbortedError("early"), {b}); });
  const std::vector<std::byte> bytes = RandomBytes(8, 1);
  Received marker = pair.b.Recv(pair.a, {kChannel + 1, 1}, 8);
  pair.a.Send(pair.b, {kChannel + 1, 1}, bytes);
  ASSERT_EQ(marker.Wait(), absl::OkStatus());  // behind it on the same lane

  Notification told;
  pair.b.engine->Call([&] {
    Engine::ChannelEvents events;
    events.on_closed = [&](PeerId, const absl::Status& status) {
      EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
      told.Notify();
    };
    pair.b.engine->OpenChannel(kChannel, {a}, std::move(events));
  });
  EXPECT_TRUE(told.WaitForNotificationWithTimeout(kTestLimit));
}

TEST(EngineTest, AChannelLeftInOrderEndsWhatIsStillWantedOfThatPeer) {
  FakeNetwork network;
  Pair pair(&network);
  const PeerId b = pair.a.Id(pair.b), a = pair.b.Id(pair.a);
  Notification left;
  const auto open = [&] {
    Engine::ChannelEvents events;
    events.on_peer_left = [&](PeerId peer, const absl::Status& status) {
      EXPECT_EQ(peer, a);
      EXPECT_EQ(std::string(status.message()),
                "rank 0 on host host-a (region-a) has left the group");
      left.Notify();
    };
    events.on_closed = [](PeerId, const absl::Status& status) { ADD_FAILURE() << status; };
    pair.b.engine->OpenChannel(kChannel, {a}, std::move(events));
  };
  pair.b.engine->Call(open);
  const std::vector<std::byte> bytes = RandomBytes(1000, 1), large = RandomBytes(80 << 20, 1);
  pair.a.Send(pair.b, {kChannel, 1}, bytes);
  Received waiting = pair.b.Recv(pair.a, {kChannel, 2}, 8);
  Received elsewhere = pair.b.Recv(pair.a, {kChannel + 1, 2}, 1000);
  Done blocked = pair.b.Send(pair.a, {kChannel, 1}, large);  // without credit for all of it
  ASSERT_EQ(pair.a.engine->Drain(absl::Now() + kTestLimit), absl::OkStatus());
  pair.a.engine->Call([&] { pair.a.engine->CloseChannel(kChannel, absl::OkStatus(), {b}); });

  ASSERT_TRUE(left.WaitForNotificationWithTimeout(kTestLimit));
  EXPECT_EQ(waiting.Wait().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(blocked.Wait().code(), absl::StatusCode::kUnavailable);
  // What it had sent is there; nothing else will be.
  Received sent = pair.b.Recv(pair.a, {kChannel, 1}, 1000);
  EXPECT_EQ(sent.Wait(), absl::OkStatus());
  EXPECT_EQ(sent.bytes(), bytes);
  EXPECT_EQ(pair.b.Recv(pair.a, {kChannel, 3}, 8).Wait().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(pair.b.Send(pair.a, {kChannel, 3}, bytes).Wait().code(),
            absl::StatusCode::kUnavailable);
  // Other channels go on.
  pair.a.Send(pair.b, {kChannel + 1, 2}, bytes);
  EXPECT_EQ(elsewhere.Wait(), absl::OkStatus());

  // When it is opened only now, that is told again.
  Notification again;
  pair.b.engine->Call([&] {
    Engine::ChannelEvents events;
    events.on_peer_left = [&](PeerId, const absl::Status&) { again.Notify(); };
    pair.b.engine->OpenChannel(kChannel, {a}, std::move(events));
  });
  EXPECT_TRUE(again.WaitForNotificationWithTimeout(kTestLimit));
}

// The word that a channel is left overtakes nothing that was sent in it before, on whatever lane.
TEST(EngineTest, WhatWasSentBeforeAChannelIsLeftArrives) {
  FakeNetwork network;
  EngineOptions options;
  options.lanes = 2;
  Pair pair(&network, options);
  const PeerId b = pair.a.Id(pair.b);
  const std::vector<std::byte> first = RandomBytes(8, 1), last = RandomBytes(900 << 10, 2);
  Received marker = pair.b.Recv(pair.a, {kChannel + 1, 1}, 8);
  pair.a.Send(pair.b, {kChannel + 1, 1}, first);
  ASSERT_EQ(marker.Wait(), absl::OkStatus());
  for (const int slow : {0, 1}) {  // its segments take much longer than the word would
    const uint64_t channel = kChannel + 10 + slow;
    network.SetLink("a", "b", slow, {absl::Milliseconds(300), 0});
    network.SetLink("a", "b", 1 - slow, {});
    Received received = pair.b.Recv(pair.a, {channel, 1}, last.size());
    Received missing = pair.b.Recv(pair.a, {channel, 2}, 8);
    ASSERT_EQ(pair.a.Send(pair.b, {channel, 1}, last).Wait(), absl::OkStatus());
    pair.a.engine->Call([&] { pair.a.engine->CloseChannel(channel, absl::OkStatus(), {b}); });
    EXPECT_EQ(received.Wait(), absl::OkStatus());
    EXPECT_TRUE(received.bytes() == last);
    EXPECT_EQ(missing.Wait().code(), absl::StatusCode::kUnavailable);
  }
}

TEST(EngineTest, TimersRunInOrderAndCanBeCancelled) {
  FakeNetwork network;
  Node node(&network, "a", 0);
  std::vector<int> ran;
  Notification last;
  node.engine->Call([&] {
    const absl::Time now = absl::Now();
    node.engine->AddTimer(now + absl::Milliseconds(20), [&] {
      ran.push_back(2);
      last.Notify();
    });
    node.engine->AddTimer(now + absl::Milliseconds(10), [&] { ran.push_back(1); });
    const uint64_t cancelled =
        node.engine->AddTimer(now + absl::Milliseconds(5), [&] { ran.push_back(0); });
    node.engine->CancelTimer(cancelled);
    node.engine->AddTimer(absl::InfiniteFuture(), [&] { ran.push_back(3); });
  });
  ASSERT_TRUE(last.WaitForNotificationWithTimeout(kTestLimit));
  EXPECT_EQ(ran, (std::vector<int>{1, 2}));
}

TEST(EngineTest, DrainWaitsForTheReceiver) {
  FakeNetwork network;
  EngineOptions options;
  options.unexpected_bytes = 1 << 20;
  Pair pair(&network, options);
  const std::vector<std::byte> bytes = RandomBytes(8 << 20, 1);
  Done done = pair.a.Send(pair.b, {kChannel, 1}, bytes);
  const absl::Status early = pair.a.engine->Drain(absl::Now() + absl::Milliseconds(50));
  EXPECT_EQ(early.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(early.message()), HasSubstr("rank 1 on host host-b"));
  EXPECT_THAT(std::string(early.message()), HasSubstr("1 messages"));
  EXPECT_GT(pair.a.engine->Call([&] { return pair.a.engine->unsent_bytes(); }), 0);
  Received received = pair.b.Recv(pair.a, {kChannel, 1}, bytes.size());
  EXPECT_EQ(pair.a.engine->Drain(absl::Now() + kTestLimit), absl::OkStatus());
  EXPECT_EQ(received.Wait(), absl::OkStatus());
  EXPECT_EQ(pair.a.engine->Call([&] { return pair.a.engine->unsent_bytes(); }), 0);
}

TEST(EngineTest, StatsCountPayloadAndMeasureRateAndDelay) {
  FakeNetwork network({absl::Milliseconds(10), 100e6});
  EngineOptions options;
  options.lanes = 2;
  Pair pair(&network, options);
  const std::vector<std::byte> bytes = RandomBytes(40 << 20, 1);
  Received received = pair.b.Recv(pair.a, {kChannel, 1}, bytes.size());
  pair.a.Send(pair.b, {kChannel, 1}, bytes);
  ASSERT_EQ(received.Wait(), absl::OkStatus());
  ASSERT_EQ(pair.a.engine->Drain(absl::Now() + kTestLimit), absl::OkStatus());
  const PeerStats a = pair.a.Stats(pair.b), b = pair.b.Stats(pair.a);
  EXPECT_EQ(a.description, "rank 1 on host host-b (region-b)");
  EXPECT_EQ(a.lanes, 2);
  EXPECT_EQ(a.bytes_sent, bytes.size());
  EXPECT_EQ(b.bytes_received, bytes.size());
  EXPECT_EQ(a.segments_sent, 160);
  EXPECT_EQ(b.segments_received, 160);
  EXPECT_GE(a.rtt, absl::Milliseconds(20));
  EXPECT_GT(a.delivery_bytes_per_s, 1e6);    // of 200e6; the machine may be slow or busy
  EXPECT_LT(a.delivery_bytes_per_s, 250e6);  // nor does it ever see what is not there
}

TEST(EngineTest, IdleEngineUsesNoCpu) {
  FakeNetwork network;
  Pair pair(&network);
  Received waiting = pair.b.Recv(pair.a, {kChannel, 1}, 8);
  const std::vector<std::byte> bytes = RandomBytes(8, 1);
  Received first = pair.b.Recv(pair.a, {kChannel, 2}, 8);
  pair.a.Send(pair.b, {kChannel, 2}, bytes);
  ASSERT_EQ(first.Wait(), absl::OkStatus());  // connected
  const auto cpu = [&pair] {
    return pair.b.engine->Call([] {
      timespec time{};
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
      return absl::DurationFromTimespec(time);
    });
  };
  const absl::Duration before = cpu();
  absl::SleepFor(absl::Seconds(2));
  EXPECT_LT(cpu() - before, absl::Milliseconds(20));  // 1 % of 2 s
  EXPECT_FALSE(waiting.over());
}

// A forked child (a data loader's worker) may destroy its copy of the engine or exit; neither
// disturbs the parent, and calls in the child return.
TEST(EngineTest, ForkedChildIsHarmless) {
  FakeNetwork network;
  Pair pair(&network);
  const pid_t child = fork();
  if (child == 0) {
    pair.a.engine->Post([] { _exit(7); });
    const int nothing = pair.a.engine->Call([] { return 5; });
    const absl::Status drained = pair.a.engine->Drain(absl::Now() + absl::Seconds(1));
    pair.a.engine.reset();
    pair.b.engine.reset();
    _exit(nothing == 0 && absl::IsCancelled(drained) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  const std::vector<std::byte> bytes = RandomBytes(1000, 1);
  Received received = pair.b.Recv(pair.a, {kChannel, 1}, 1000);
  pair.a.Send(pair.b, {kChannel, 1}, bytes);
  EXPECT_EQ(received.Wait(), absl::OkStatus());
}

TEST(EngineTest, CallFromDestroyedEngineReturns) {
  FakeNetwork network;
  Node node(&network, "a", 0);
  Received pending = node.Recv(node, {kChannel, 1}, 8);
  Done own = node.Send(node, {kChannel, 2}, RandomBytes(0, 1));
  EXPECT_EQ(own.Wait(), absl::OkStatus());
  node.engine.reset();
  EXPECT_EQ(pending.Wait().code(), absl::StatusCode::kCancelled);
}

// ---- Callers that run the engine themselves ----

// Begins a receive and a send of the same key, on this thread if the engine's own one sleeps.
std::pair<Received, Done> Exchange(Node& self, PeerId peer, uint64_t id,
                                   const std::vector<std::byte>& bytes) {
  Received received(bytes.size());
  Done done;
  auto kept = std::make_shared<const std::vector<std::byte>>(bytes);
  self.engine->PostQuietly([engine = self.engine.get(), peer, id, kept, received, done]() mutable {
    engine->Recv(
        peer, {{kChannel, id}}, received.buffer(),
        [received](absl::StatusOr<size_t> size) mutable { received.Finish(std::move(size)); });
    engine->Send(peer, {{kChannel, id}}, absl::MakeConstSpan(*kept),
                 [kept, done](const absl::Status& status) mutable { done.Finish(status); });
  });
  self.engine->Nudge(/*here=*/id % 3 != 0);
  return {received, done};
}

TEST(HelpTest, ManyCallersExchangeMessagesAndNoneIsLost) {
  FakeNetwork network;
  Pair pair(&network);
  const PeerId at_a = pair.a.Id(pair.b), at_b = pair.b.Id(pair.a);
  constexpr int kThreads = 3, kRounds = 400;
  std::atomic<int> right = 0;
  const auto run = [&](Node& self, PeerId peer, uint64_t own, uint64_t other, int thread) {
    for (int round = 0; round < kRounds; ++round) {
      const uint64_t id = static_cast<uint64_t>(round) * kThreads + thread + 1;
      const size_t size = round % 50 == 7 ? 2 * kSegment + 1 : round % 97;
      auto [received, done] = Exchange(self, peer, id, RandomBytes(size, 2 * id + own));
      // With patience, without, and not at all: then the engine's own thread has to go on.
      if (round % 4 != 3) {
        self.engine->Help([&] { return received.over(); },
                          round % 4 == 2 ? absl::ZeroDuration() : absl::Microseconds(200));
      }
      ASSERT_EQ(received.Wait(), absl::OkStatus()) << id;
      ASSERT_EQ(done.Wait(), absl::OkStatus()) << id;
      right += received.bytes() == RandomBytes(size, 2 * id + other) ? 1 : 0;
    }
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] { run(pair.a, at_a, 0, 1, thread); });
    threads.emplace_back([&, thread] { run(pair.b, at_b, 1, 0, thread); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 2 * kThreads * kRounds);
}

TEST(HelpTest, WhatIsToBeDoneLaterIsDoneAlthoughNobodyHelpsThen) {
  FakeNetwork network;
  EngineOptions options;  // nothing else wakes the engine for hours
  options.heartbeat = absl::Hours(2);
  options.suspect_after = absl::Hours(16);
  options.dead_after = absl::Hours(24);
  Pair pair(&network, options);
  const PeerId at_a = pair.a.Id(pair.b);
  for (int round = 0; round < 10; ++round) {
    absl::SleepFor(absl::Milliseconds(150));  // until no alarm of the engine's own is near
    // A timer that comes before the engine's alarm, left by a caller.
    Done done;
    pair.a.engine->PostQuietly([engine = pair.a.engine.get(), done]() mutable {
      engine->AddTimer(absl::Now() + absl::Milliseconds(1),
                       [done]() mutable { done.Finish(absl::OkStatus()); });
    });
    pair.a.engine->Nudge(/*here=*/true);
    ASSERT_EQ(done.Wait(), absl::OkStatus());
    // A request begun by a caller that does not wait, and one by a caller that helps in vain.
    const uint64_t id = 5000 + round;
    auto [received, sent] = Exchange(pair.a, at_a, id, RandomBytes(8, 2 * id));
    if (round % 2 == 0) pair.a.engine->Help([] { return false; }, absl::Microseconds(50));
    const std::vector<std::byte> answer = RandomBytes(8, 2 * id + 1);
    Done answering = pair.b.Send(pair.a, {kChannel, id}, answer);
    Received question = pair.b.Recv(pair.a, {kChannel, id}, 8);
    ASSERT_EQ(received.Wait(), absl::OkStatus());
    ASSERT_EQ(question.Wait(), absl::OkStatus());
    ASSERT_EQ(sent.Wait(), absl::OkStatus());
    ASSERT_EQ(answering.Wait(), absl::OkStatus());
    EXPECT_TRUE(received.bytes() == answer);
    EXPECT_TRUE(question.bytes() == RandomBytes(8, 2 * id));
  }
}

TEST(HelpTest, ACallerThatHelpsMayBeTheLastToHaveTheEngine) {
  for (int round = 0; round < 20; ++round) {
    FakeNetwork network;
    Pair pair(&network);
    std::shared_ptr<Engine> engine = std::move(pair.a.engine);
    std::weak_ptr<Engine> ended = engine;
    Done helping;
    std::atomic<bool> stop = false;
    std::thread helper([&stop, helping, engine]() mutable {
      while (!stop) {
        engine->Help([] { return false; }, absl::Microseconds(100));
        if (!helping.over()) helping.Finish(absl::OkStatus());
      }
      engine.reset();
    });
    ASSERT_EQ(helping.Wait(), absl::OkStatus());
    engine.reset();
    EXPECT_FALSE(ended.expired());
    stop = true;
    helper.join();
    EXPECT_TRUE(ended.expired());
  }
}

}  // namespace
}  // namespace geomesh::transport
