// What ends operations before they are done: lost peers, deadlines, aborts, wrong calls. All ranks
// raise within a bound, with the facts that a user needs, and memory is never touched afterwards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "fake_world.h"
#include "plan/compile.h"

namespace geomesh {
namespace {

using exec::Call;
using plan::Collective;
using ::testing::AllOf;
using testing::FakeWorld;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::PendingCall;
using testing::Start;

constexpr absl::Duration kDeadAfter = absl::Seconds(2);

FakeWorld::Options Impatient() {
  FakeWorld::Options options;
  options.engine.heartbeat = absl::Milliseconds(50);
  options.engine.suspect_after = absl::Milliseconds(500);
  options.engine.dead_after = kDeadAfter;
  return options;
}

Call AllReduce(int rank, int world, std::vector<float>& data, uint64_t sequence) {
  plan::CallShape shape;
  Call call;
  // Size 0: the direct algorithm, in which every rank needs every other.
  call.program =
      std::make_shared<plan::Program>(*plan::Compile(shape, plan::Topology::Flat(world), rank));
  call.output = {{reinterpret_cast<std::byte*>(data.data()), static_cast<int64_t>(data.size())}};
  call.sequence = sequence;
  call.operation = absl::StrCat("all_reduce(float32, ", data.size(), ")");
  return call;
}

Call PointToPoint(bool sending, int rank, int peer, int world, std::vector<float>& data,
                  uint64_t id) {
  plan::CallShape shape;
  shape.collective = Collective::kSendRecv;
  shape.root = peer;
  shape.sending = sending;
  Call call;
  call.program =
      std::make_shared<plan::Program>(*plan::Compile(shape, plan::Topology::Flat(world), rank));
  (sending ? call.input : call.output) = {
      {reinterpret_cast<std::byte*>(data.data()), static_cast<int64_t>(data.size())}};
  call.sequence = id;
  call.point_to_point = {.peer = peer, .tag = static_cast<uint32_t>(id), .sending = sending};
  call.operation = sending ? "send" : "recv";
  return call;
}

std::string Text(const absl::Status& status) { return std::string(status.message()); }

class ExecFailureTest : public ::testing::Test {
 protected:
  static constexpr int kWorld = 3;
  ExecFailureTest()
      : world_(kWorld, Impatient()),
        executors_(world_.MakeExecutors(9)),
        data_(kWorld, std::vector<float>(1000, 1.0f)) {}

  // A complete operation, so that everybody is connected.
  void Warm() {
    std::vector<PendingCall> calls;
    for (int rank = 0; rank < kWorld; ++rank) calls.push_back(StartAllReduce(rank, 1));
    for (PendingCall& call : calls) ASSERT_TRUE(call.Wait().status.ok()) << call.Wait().status;
    EXPECT_EQ(data_[0][0], kWorld);
  }
  PendingCall StartAllReduce(int rank, uint64_t sequence,
                             absl::Duration timeout = absl::InfiniteDuration()) {
    Call call = AllReduce(rank, kWorld, data_[rank], sequence);
    if (timeout < absl::InfiniteDuration()) call.deadline = absl::Now() + timeout;
    return Start(*executors_[rank], std::move(call));
  }
  void ExpectRefused(int rank, absl::StatusCode code, const std::string& reason) {
    PendingCall later = StartAllReduce(rank, 99);
    EXPECT_EQ(later.Wait().status.code(), code);
    EXPECT_THAT(Text(later.Wait().status), AllOf(HasSubstr("sequence 99"), HasSubstr(reason)));
    EXPECT_EQ(executors_[rank]->health().code(), code);
    EXPECT_THAT(Text(executors_[rank]->health()), HasSubstr(reason));
  }

  // Ranks 0 and 1 are in an operation when `fault` takes rank 2 away. Returns how long both took.
  absl::Duration SurvivorsRaise(const std::function<void()>& fault) {
    Warm();
    std::vector<PendingCall> calls = {StartAllReduce(0, 2), StartAllReduce(1, 2)};
    for (const int rank : {0, 1}) world_.engine(rank).Call([] {});  // both have begun
    const absl::Time begin = absl::Now();
    fault();
    const std::string lost = "rank 2 on host host2 (region2)";
    for (PendingCall& call : calls) {
      const absl::Status& status = call.Wait().status;
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
      EXPECT_THAT(Text(status),
                  AllOf(HasSubstr("all_reduce(float32, 1000), sequence 2"), HasSubstr(lost),
                        HasSubstr("of 8000 bytes sent"), HasSubstr("of 8000 received")));
    }
    const absl::Duration took = absl::Now() - begin;
    for (const int rank : {0, 1}) ExpectRefused(rank, absl::StatusCode::kUnavailable, lost);
    return took;
  }

  FakeWorld world_;
  std::vector<std::unique_ptr<exec::Executor>> executors_;
  std::vector<std::vector<float>> data_;
};

TEST_F(ExecFailureTest, KilledPeer) {
  EXPECT_LT(SurvivorsRaise([&] { world_.network().Kill("rank2"); }), absl::Seconds(2));
}

TEST_F(ExecFailureTest, FrozenPeer) {
  EXPECT_LT(SurvivorsRaise([&] { world_.network().Freeze("rank2"); }), 3 * kDeadAfter);
  world_.network().Thaw("rank2");
}

TEST_F(ExecFailureTest, PeerThatIsCutOffWithoutAWord) {
  EXPECT_LT(SurvivorsRaise([&] {
              world_.network().BlackHole("rank0", "rank2");
              world_.network().BlackHole("rank1", "rank2");
              for (const char* name : {"rank0", "rank1", "rank2"}) {
                world_.network().IgnoreDials(name);
              }
            }),
            3 * kDeadAfter);
  // The one cut off learns it too. Not in operation 2, for which it may have all it needs.
  PendingCall two = StartAllReduce(2, 3);
  EXPECT_EQ(two.Wait().status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Text(two.Wait().status), HasSubstr(" on host host"));
}

TEST_F(ExecFailureTest, LostPeerDisturbsNobodyWhoDoesNotNeedIt) {
  Warm();
  world_.network().Kill("rank2");
  PendingCall gone = Start(*executors_[0], PointToPoint(true, 0, 1, kWorld, data_[0], 1));
  std::vector<float> got(1000);
  PendingCall recv = Start(*executors_[1], PointToPoint(false, 1, 0, kWorld, got, 1));
  EXPECT_TRUE(recv.Wait().status.ok()) << recv.Wait().status;
  EXPECT_TRUE(gone.Wait().status.ok()) << gone.Wait().status;
  EXPECT_EQ(got, data_[0]);
  // What needs it ends at once.
  PendingCall needs = StartAllReduce(0, 2);
  EXPECT_EQ(needs.Wait().status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Text(needs.Wait().status), HasSubstr("rank 2 on host host2 (region2)"));
}

TEST_F(ExecFailureTest, DeadlineNamesWhoIsMissingAndEndsAllRanks) {
  Warm();
  const absl::Time begin = absl::Now();
  PendingCall zero = StartAllReduce(0, 2, absl::Milliseconds(300));
  PendingCall one = StartAllReduce(1, 2);
  const absl::Status& status = zero.Wait().status;
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(299));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(
      Text(status),
      AllOf(
          HasSubstr("all_reduce(float32, 1000), sequence 2: not done within its timeout of 0.3 s"),
          HasSubstr("8000 of 8000 bytes sent, 4000 of 8000 received"),
          HasSubstr("waiting for 1 message from rank 2 on host host2 (region2), silent for 0.")));
  EXPECT_THAT(Text(status), Not(HasSubstr("from rank 1")));
  // The others are told, those that wait and those that have not come yet.
  const std::string told =
      "rank 0 on host host0 (region0) reported: all_reduce(float32, 1000), sequence 2: not done "
      "within its timeout";
  EXPECT_EQ(one.Wait().status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(Text(one.Wait().status), HasSubstr(told));
  ExpectRefused(0, absl::StatusCode::kDeadlineExceeded, "not done within its timeout");
  while (executors_[2]->health().ok() && absl::Now() - begin < absl::Seconds(30)) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  ExpectRefused(2, absl::StatusCode::kDeadlineExceeded, told);
}

TEST_F(ExecFailureTest, DeadlineInThePastAndQueuedOperations) {
  // The second shares memory with the first, so it has not begun when it expires.
  PendingCall first = StartAllReduce(0, 1);
  PendingCall second = StartAllReduce(0, 2, absl::Milliseconds(-5));
  EXPECT_EQ(second.Wait().status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(Text(second.Wait().status),
              HasSubstr("not begun, behind all_reduce(float32, 1000), sequence 1"));
  EXPECT_EQ(first.Wait().status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(Text(first.Wait().status),
              HasSubstr("all_reduce(float32, 1000), sequence 1: ended with its group, because of "
                        "all_reduce(float32, 1000), sequence 2: not done"));
}

TEST_F(ExecFailureTest, AbortEndsAllRanksAndTheFirstReasonStays) {
  Warm();
  PendingCall zero = StartAllReduce(0, 2), one = StartAllReduce(1, 2);
  executors_[0]->Abort(absl::AbortedError("the user pressed Ctrl-C"));
  executors_[0]->Abort(absl::InternalError("a later reason"));
  EXPECT_EQ(zero.Wait().status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(Text(zero.Wait().status),
              AllOf(HasSubstr("sequence 2"), HasSubstr("the user pressed Ctrl-C"),
                    HasSubstr("rank 2 on host host2 (region2)")));
  EXPECT_EQ(one.Wait().status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(Text(one.Wait().status),
              AllOf(HasSubstr("rank 0 on host host0 (region0) reported: the user pressed Ctrl-C"),
                    Not(HasSubstr("closed the channel"))));
  ExpectRefused(0, absl::StatusCode::kAborted, "the user pressed Ctrl-C");
}

// Everything that `done` frees is touched by a running task until then: AddressSanitizer sees a
// `done` that comes too early, ThreadSanitizer a race.
TEST_F(ExecFailureTest, AbortWaitsForRunningCompute) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t channel = 1000 + round;
    auto executor = world_.MakeExecutor(0, channel, {0});
    constexpr int64_t kElements = 1 << 20;
    constexpr uint32_t kBlocks = 8;
    auto memory = std::make_unique<std::vector<float>>(kElements * kBlocks, 1.0f);
    auto program = std::make_shared<plan::Program>();
    program->name = "a chain of copies";
    program->output_blocks = kBlocks;
    for (uint32_t i = 0; i + 1 < kBlocks; ++i) {
      plan::Step step;
      step.kind = plan::StepKind::kCopy;
      step.src = {plan::Buffer::kOutput, i};
      step.dst = {plan::Buffer::kOutput, i + 1};
      if (i > 0) step.after = {i - 1};
      program->steps.push_back(step);
    }
    Call call;
    call.program = program;
    for (uint32_t i = 0; i < kBlocks; ++i) {
      call.output.push_back(
          {reinterpret_cast<std::byte*>(memory->data() + i * kElements), kElements});
    }
    call.operation = "copies";
    std::promise<absl::Status> ended;
    call.done = [&](const absl::Status& status, const exec::Outcome&) {
      memory.reset();
      ended.set_value(status);
    };
    executor->Start(std::move(call));
    absl::SleepFor(absl::Microseconds(300 * round));
    executor->Abort(absl::CancelledError("enough"));
    const absl::Status status = ended.get_future().get();
    // The work may be over before the abort, but not where that follows at once.
    if (round == 0 || !status.ok()) {
      EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
    }
  }
}

TEST_F(ExecFailureTest, DestructionEndsWhatIsPending) {
  Warm();
  PendingCall zero = StartAllReduce(0, 2), one = StartAllReduce(1, 2);
  executors_[0].reset();
  ASSERT_TRUE(zero.ended());
  EXPECT_EQ(zero.Wait().status.code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(Text(zero.Wait().status), HasSubstr("destroyed with 1 operations pending"));
  EXPECT_EQ(one.Wait().status.code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(Text(one.Wait().status),
              HasSubstr("rank 0 on host host0 (region0) reported: the group was destroyed"));
}

TEST_F(ExecFailureTest, DestructionWithNothingPendingLeavesTheOthersInPeace) {
  Warm();
  executors_[2].reset();
  std::vector<float> got(1000);
  PendingCall send = Start(*executors_[0], PointToPoint(true, 0, 1, kWorld, data_[0], 1));
  PendingCall recv = Start(*executors_[1], PointToPoint(false, 1, 0, kWorld, got, 1));
  EXPECT_TRUE(send.Wait().status.ok()) << send.Wait().status;
  EXPECT_TRUE(recv.Wait().status.ok()) << recv.Wait().status;
}

TEST_F(ExecFailureTest, MessageOfAnotherSize) {
  Warm();
  data_[1].resize(500);
  PendingCall zero = StartAllReduce(0, 2), one = StartAllReduce(1, 2);
  EXPECT_EQ(zero.Wait().status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(one.Wait().status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Text(zero.Wait().status) + Text(one.Wait().status),
              AllOf(HasSubstr("2000"), HasSubstr("4000")));
}

TEST_F(ExecFailureTest, DifferentFingerprints) {
  Warm();
  std::vector<PendingCall> calls;
  for (int rank = 0; rank < kWorld; ++rank) {
    Call call = AllReduce(rank, kWorld, data_[rank], 2);
    call.fingerprint = rank == 2 ? 0xbeef : 0xcafe;
    calls.push_back(Start(*executors_[rank], std::move(call)));
  }
  for (PendingCall& call : calls) {
    EXPECT_EQ(call.Wait().status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(Text(call.Wait().status),
                AllOf(HasSubstr("sequence 2"), HasSubstr("cafe"), HasSubstr("beef")));
  }
}

TEST_F(ExecFailureTest, WrongCallsAreRefusedAloneAndTheGroupGoesOn) {
  const auto refused = [&](Call call, const std::string& why) {
    PendingCall pending = Start(*executors_[0], std::move(call));
    EXPECT_EQ(pending.Wait().status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(Text(pending.Wait().status), AllOf(HasSubstr("sequence 7"), HasSubstr(why)));
  };
  Call call = AllReduce(0, kWorld, data_[0], 7);
  call.dtype = DType::kI32;
  call.op = exec::ReduceOp::kAvg;
  refused(std::move(call), "AVG of int32");
  call = AllReduce(0, kWorld, data_[0], 7);
  call.op = exec::ReduceOp::kBxor;
  refused(std::move(call), "BXOR of float32");
  call = AllReduce(0, kWorld, data_[0], 7);
  call.output.clear();
  refused(std::move(call), "0 output blocks");
  call = AllReduce(1, kWorld, data_[0], 7);
  refused(std::move(call), "rank 1 of 3");
  call = AllReduce(0, kWorld, data_[0], 7);
  call.output[0].elements = -1;
  refused(std::move(call), "-1 elements");
  call = AllReduce(0, kWorld, data_[0], 7);
  call.program = nullptr;
  refused(std::move(call), "no program");
  EXPECT_TRUE(executors_[0]->health().ok());
  Warm();
}

}  // namespace
}  // namespace geomesh
