// Messages read in place: from another process's memory, and between engines that may read each
// other's. Nothing is taken for a message that its sender took back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/time/clock.h"
#include "transport/local_memory.h"
#include "transport_test_util.h"

namespace geomesh::transport {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr size_t kLarge = (3 << 20) + 5;  // several pulls, and a rest

absl::Span<const std::byte> BytesOf(const ProcessUid& uid) {
  return {reinterpret_cast<const std::byte*>(&uid), sizeof(uid)};
}

// ---- Another process ----

// A child that only keeps what it had when it was forked.
class Keeper {
 public:
  Keeper() : pid_(fork()) {
    if (pid_ == 0) {
      for (;;) pause();
    }
  }
  ~Keeper() { End(); }
  void End() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    pid_ = -1;
  }
  // What it would have offered.
  std::string Offer(const ProcessUid& uid) const {
    std::string offer = LocalMemory::Offer(BytesOf(uid));
    const auto pid = static_cast<uint32_t>(pid_);
    std::memcpy(offer.data() + 2, &pid, sizeof(pid));  // after the version
    return offer;
  }

 private:
  pid_t pid_;
};

TEST(LocalMemoryTest, ReadsAnotherProcess) {
  const ProcessUid uid{11, 12};
  std::vector<std::byte> bytes = RandomBytes(kLarge, 1);
  const std::vector<std::byte> then = bytes;
  Leases leases;
  const InPlace place = leases.Lend(bytes);
  Keeper keeper;
  std::fill(bytes.begin(), bytes.end(), std::byte{0});  // here, not there
  const absl::StatusOr<LocalMemory> memory = LocalMemory::Open(keeper.Offer(uid), BytesOf(uid));
  ASSERT_TRUE(memory.ok()) << memory.status();
  std::vector<std::byte> read(kLarge);
  ASSERT_EQ(memory->Read(place, 0, absl::MakeSpan(read).first(7)), absl::OkStatus());
  ASSERT_EQ(memory->Read(place, 7, absl::MakeSpan(read).subspan(7)), absl::OkStatus());
  EXPECT_TRUE(read == then);
  InPlace nowhere = place;
  nowhere.address = 16;
  EXPECT_EQ(memory->Read(nowhere, 0, absl::MakeSpan(read)).code(), absl::StatusCode::kUnavailable);
  keeper.End();
  EXPECT_EQ(memory->Read(place, 0, absl::MakeSpan(read)).code(), absl::StatusCode::kUnavailable);
}

TEST(LocalMemoryTest, OffersThatCannotBeTakenSayWhy) {
  const ProcessUid uid{11, 12}, other{11, 13};
  Keeper keeper;
  const std::string offer = keeper.Offer(uid);
  EXPECT_THAT(std::string(LocalMemory::Open(offer, BytesOf(other)).status().message()),
              HasSubstr("is another one"));
  std::string elsewhere = offer;
  elsewhere[6] ^= 1;
  EXPECT_THAT(std::string(LocalMemory::Open(elsewhere, BytesOf(uid)).status().message()),
              HasSubstr("another host or in another namespace"));
  for (size_t size = 0; size < offer.size(); ++size) {
    EXPECT_FALSE(LocalMemory::Open(offer.substr(0, size), BytesOf(uid)).ok()) << size;
  }
  EXPECT_FALSE(LocalMemory::Open(offer + "x", BytesOf(uid)).ok());
  keeper.End();
  EXPECT_THAT(std::string(LocalMemory::Open(offer, BytesOf(uid)).status().message()),
              HasSubstr("can't be read"));
}

TEST(LocalMemoryTest, WhatWasTakenBackIsNotRead) {
  const ProcessUid uid{11, 12};
  const absl::StatusOr<LocalMemory> memory =
      LocalMemory::Open(LocalMemory::Offer(BytesOf(uid)), BytesOf(uid));
  ASSERT_TRUE(memory.ok()) << memory.status();
  const std::vector<std::byte> bytes = RandomBytes(100, 1);
  std::vector<std::byte> read(100);
  Leases leases;
  const InPlace first = leases.Lend(bytes), second = leases.Lend(bytes);
  leases.TakeBack(first);
  EXPECT_EQ(memory->Read(first, 0, absl::MakeSpan(read)).code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(memory->Read(second, 0, absl::MakeSpan(read)), absl::OkStatus());
  const InPlace third = leases.Lend(bytes);  // the first one's word, with another value
  EXPECT_EQ(third.lease_address, first.lease_address);
  EXPECT_EQ(memory->Read(first, 0, absl::MakeSpan(read)).code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(memory->Read(third, 0, absl::MakeSpan(read)), absl::OkStatus());
}

// ---- Engines ----

PeerRecord Readable(const Node& node) {
  PeerRecord record = node.Record();
  record.region = "";  // as the engines' own
  record.memory = node.engine->memory_offer();
  return record;
}

class InPlaceTest : public ::testing::Test {
 protected:
  explicit InPlaceTest(EngineOptions options = {})
      : a_(&network_, "a", 0, options), b_(&network_, "b", 1, options) {
    a_.Add(Readable(b_));
    b_.Add(Readable(a_));
    // What may be read is known to both before the first message of the other has arrived.
    Exchange(a_, b_, RandomBytes(8, 1));
    Exchange(b_, a_, RandomBytes(8, 2));
    Exchange(a_, b_, RandomBytes(8, 3));
  }

  Done Send(Node& from, const Node& to, uint64_t id, const std::vector<std::byte>& bytes,
            uint32_t fingerprint = 0) {
    Done done;
    from.engine->Post([engine = from.engine.get(), to = to.Record(), id, fingerprint,
                       span = absl::MakeConstSpan(bytes), done]() mutable {
      engine->Send(*engine->AddPeer(to), {{kChannel, id}, fingerprint}, span,
                   [done](const absl::Status& status) mutable { done.Finish(status); },
                   {.in_place = true});
    });
    return done;
  }

  void Exchange(Node& from, Node& to, const std::vector<std::byte>& bytes) {
    const uint64_t id = ++id_;
    Received received = to.Recv(from, {kChannel, id}, bytes.size());
    Done done = Send(from, to, id, bytes);
    ASSERT_EQ(received.Wait(), absl::OkStatus());
    ASSERT_EQ(done.Wait(), absl::OkStatus());
    EXPECT_TRUE(received.bytes() == bytes);
  }

  void WaitUntilUnexpected(Node& at, const Node& from, uint64_t id) {
    const PeerId peer = at.Id(from);
    const absl::Time limit = absl::Now() + kTestLimit;
    while (!at.engine->Call([&] { return at.engine->IsUnexpected(peer, {kChannel, id}); })) {
      ASSERT_LT(absl::Now(), limit);
      absl::SleepFor(absl::Milliseconds(1));
    }
  }

  FakeNetwork network_;
  Node a_, b_;
  uint64_t id_ = 1000;
};

TEST_F(InPlaceTest, LargeMessagesTakeNoSegmentAndArriveExactly) {
  for (const size_t size : {size_t{64} << 10, (size_t{64} << 10) + 1, size_t{512} << 10, kLarge}) {
    for (const bool forth : {true, false}) {
      Node& from = forth ? a_ : b_;
      Node& to = forth ? b_ : a_;
      const PeerStats before = from.Stats(to), there = to.Stats(from);
      Exchange(from, to, RandomBytes(size, size));
      EXPECT_EQ(from.Stats(to).segments_sent, before.segments_sent) << size;
      EXPECT_EQ(from.Stats(to).bytes_sent, before.bytes_sent + size);
      EXPECT_EQ(to.Stats(from).bytes_received, there.bytes_received + size);
    }
  }
  const uint64_t before = a_.Stats(b_).segments_sent;
  Exchange(a_, b_, RandomBytes((64 << 10) - 1, 1));  // too small to be worth it
  EXPECT_EQ(a_.Stats(b_).segments_sent, before + 1);
}

TEST_F(InPlaceTest, OnlyTheOwnRegionIsRead) {
  EngineOptions elsewhere;
  elsewhere.region = "elsewhere";
  Node c(&network_, "c", 2, elsewhere);
  PeerRecord record = c.Record();
  record.memory = c.engine->memory_offer();
  a_.Add(record);
  c.Add(Readable(a_));
  const std::vector<std::byte> bytes = RandomBytes(kLarge, 1);
  for (uint64_t id = 1; id <= 2; ++id) {
    Received received = a_.Recv(c, {kChannel, id}, bytes.size());
    Done done = Send(c, a_, id, bytes);
    ASSERT_EQ(received.Wait(), absl::OkStatus());
    ASSERT_EQ(done.Wait(), absl::OkStatus());
    EXPECT_EQ(c.Stats(a_).segments_sent, id * (bytes.size() / kMaxSegmentPayloadBytes + 1));
  }
}

TEST_F(InPlaceTest, IsDoneWhenItsReceiveIs) {
  const std::vector<std::byte> bytes = RandomBytes(kLarge, 1);
  Done done = Send(a_, b_, 1, bytes);
  WaitUntilUnexpected(b_, a_, 1);
  EXPECT_EQ(b_.Stats(a_).unexpected_bytes, 0u);  // it takes no memory there
  Exchange(a_, b_, RandomBytes(100, 1));         // and is in nobody's way
  EXPECT_FALSE(done.over());
  EXPECT_EQ(a_.engine->Drain(absl::Now() + absl::Milliseconds(20)).code(),
            absl::StatusCode::kDeadlineExceeded);
  Received received = b_.Recv(a_, {kChannel, 1}, bytes.size());
  EXPECT_EQ(received.Wait(), absl::OkStatus());
  EXPECT_EQ(done.Wait(), absl::OkStatus());
  EXPECT_TRUE(received.bytes() == bytes);
  EXPECT_EQ(b_.Stats(a_).unexpected_bytes, 0u);
  EXPECT_EQ(a_.engine->Drain(absl::Now() + kTestLimit), absl::OkStatus());
}

TEST_F(InPlaceTest, RefusalsReachBothSides) {
  const std::vector<std::byte> bytes = RandomBytes(kLarge, 1);
  for (const bool posted_first : {true, false}) {
    const uint64_t small = ++id_, other = ++id_;
    std::optional<Received> tight, different;
    const auto post = [&] {
      tight = b_.Recv(a_, {kChannel, small}, bytes.size() - 1);
      different = b_.Recv(a_, {kChannel, other}, bytes.size(), 0xaaaa1111);
    };
    if (posted_first) post();
    Done done = Send(a_, b_, small, bytes), done_other = Send(a_, b_, other, bytes, 0xbbbb2222);
    if (!posted_first) {
      WaitUntilUnexpected(b_, a_, other);
      post();
    }
    for (const absl::Status& status : {tight->Wait(), done.Wait()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("3145733"), HasSubstr("3145732")));
    }
    for (const absl::Status& status : {different->Wait(), done_other.Wait()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("aaaa1111"), HasSubstr("bbbb2222")));
    }
  }
  Done first = Send(a_, b_, 7, bytes), second = Send(a_, b_, 7, bytes);
  EXPECT_EQ(second.Wait().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(b_.Recv(a_, {kChannel, 7}, bytes.size()).Wait(), absl::OkStatus());
  EXPECT_EQ(first.Wait(), absl::OkStatus());
}

// The sender's memory is its own again although the other side has not heard of it.
TEST_F(InPlaceTest, TakenBackWhileTheReceiverIsCutOff) {
  std::vector<std::byte> bytes = RandomBytes(kLarge, 1);
  Done done = Send(a_, b_, 1, bytes);
  WaitUntilUnexpected(b_, a_, 1);
  network_.Freeze("b");
  const PeerId b = a_.Id(b_);
  a_.engine->Call([&] { a_.engine->CloseChannel(kChannel, absl::AbortedError("enough"), {b}); });
  EXPECT_EQ(done.Wait().code(), absl::StatusCode::kAborted);
  std::fill(bytes.begin(), bytes.end(), std::byte{0xee});
  const absl::Status status = b_.Recv(a_, {kChannel, 1}, bytes.size()).Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("rank 0 on host host-a"), HasSubstr("taken back")));
}

TEST_F(InPlaceTest, ReceiverThatClosesEndsTheLoan) {
  const std::vector<std::byte> bytes = RandomBytes(kLarge, 1);
  Done done = Send(a_, b_, 1, bytes);
  WaitUntilUnexpected(b_, a_, 1);
  b_.engine->Call([&] { b_.engine->CloseChannel(kChannel, absl::CancelledError("over"), {}); });
  EXPECT_EQ(done.Wait(), absl::OkStatus());  // as any message to a closed channel
}

class TightInPlaceTest : public InPlaceTest {
 protected:
  static EngineOptions Tight() {
    EngineOptions options;
    options.unexpected_bytes = 1 << 20;
    return options;
  }
  TightInPlaceTest() : InPlaceTest(Tight()) {}
};

// What waits in place leaves all of the credit to what does not.
TEST_F(TightInPlaceTest, TakesNoCreditFromOthers) {
  const std::vector<std::byte> large = RandomBytes(kLarge, 1);
  std::vector<Done> lent = {Send(a_, b_, 1, large), Send(a_, b_, 2, large)};
  WaitUntilUnexpected(b_, a_, 2);
  // 1 MiB with 128 bytes for each message, to the last byte.
  std::vector<std::vector<std::byte>> small(15, RandomBytes(65536, 2));
  small.push_back(RandomBytes((1 << 20) - 15 * (65536 + 128) - 128, 3));
  for (size_t i = 0; i < small.size(); ++i) {
    EXPECT_EQ(a_.Send(b_, {kChannel, 10 + i}, small[i]).Wait(), absl::OkStatus());
  }
  WaitUntilUnexpected(b_, a_, 10 + small.size() - 1);
  EXPECT_EQ(b_.Stats(a_).unexpected_bytes, 1u << 20);
  for (size_t i = 0; i < small.size(); ++i) {
    Received received = b_.Recv(a_, {kChannel, 10 + i}, small[i].size());
    ASSERT_EQ(received.Wait(), absl::OkStatus());
    EXPECT_TRUE(received.bytes() == small[i]);
  }
  for (const uint64_t id : {1, 2}) {
    EXPECT_EQ(b_.Recv(a_, {kChannel, id}, large.size()).Wait(), absl::OkStatus());
  }
  for (Done& done : lent) EXPECT_EQ(done.Wait(), absl::OkStatus());
}

TEST_F(InPlaceTest, KilledPeerEndsBothDirections) {
  const std::vector<std::byte> bytes = RandomBytes(kLarge, 1);
  Done sent = Send(b_, a_, 1, bytes);
  Done lent = Send(a_, b_, 2, bytes);
  WaitUntilUnexpected(b_, a_, 2);
  network_.Kill("a");
  EXPECT_EQ(sent.Wait().code(), absl::StatusCode::kUnavailable);
  // What a killed process had lent is gone with it.
  EXPECT_EQ(b_.Recv(a_, {kChannel, 2}, bytes.size()).Wait().code(), absl::StatusCode::kUnavailable);
  a_.engine.reset();
  EXPECT_EQ(lent.Wait().code(), absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace geomesh::transport
