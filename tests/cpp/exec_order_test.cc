// The order of operations: many at once, of one group and of several; those that share memory one
// after the other; sends and receives in any order.
#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "exec/compute.h"
#include "exec/scratch.h"
#include "fake_world.h"
#include "plan/algorithms.h"
#include "plan/compile.h"

namespace geomesh {
namespace {

using exec::Call;
using plan::Collective;
using testing::FakeWorld;
using testing::PendingCall;
using testing::Start;

// An in-place collective of int64 on `data`.
Call InPlace(Collective collective, int rank, int world, std::vector<int64_t>& data,
             uint64_t sequence, int root = 0) {
  plan::CallShape shape;
  shape.collective = collective;
  shape.root = root;
  shape.bytes = static_cast<int64_t>(data.size() * sizeof(int64_t));
  Call call;
  call.program =
      std::make_shared<plan::Program>(*plan::Compile(shape, plan::Topology::Flat(world), rank));
  call.output = {{reinterpret_cast<std::byte*>(data.data()), static_cast<int64_t>(data.size())}};
  call.dtype = DType::kI64;
  call.sequence = sequence;
  call.operation = plan::Name(collective);
  return call;
}

Call PointToPoint(bool sending, int rank, int peer, int world, std::vector<int64_t>& data,
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
  call.dtype = DType::kI64;
  call.sequence = id;
  call.point_to_point = {.peer = peer, .tag = static_cast<uint32_t>(id), .sending = sending};
  call.operation = sending ? "send" : "recv";
  return call;
}

void ExpectAllOk(std::vector<PendingCall>& calls) {
  for (PendingCall& call : calls) ASSERT_TRUE(call.Wait().status.ok()) << call.Wait().status;
}

TEST(ExecOrder, ManyOperationsOfOneGroupAtOnce) {
  constexpr int kWorld = 3, kCalls = 3 * exec::kMaxInFlight;
  FakeWorld world(kWorld);
  auto executors = world.MakeExecutors(1);
  std::vector<std::vector<std::vector<int64_t>>> data(kWorld);
  std::vector<PendingCall> calls;
  for (int rank = 0; rank < kWorld; ++rank) {
    data[rank].resize(kCalls);
    for (int i = 0; i < kCalls; ++i) {
      data[rank][i].assign(1 + i * 37, rank + i);
      calls.push_back(Start(*executors[rank],
                            InPlace(Collective::kAllReduce, rank, kWorld, data[rank][i], i + 1)));
    }
  }
  ExpectAllOk(calls);
  for (int rank = 0; rank < kWorld; ++rank) {
    for (int i = 0; i < kCalls; ++i) {
      EXPECT_EQ(data[rank][i], std::vector<int64_t>(1 + i * 37, 0 + 1 + 2 + 3 * i))
          << rank << " " << i;
    }
  }
}

TEST(ExecOrder, GroupsAreIndependent) {
  constexpr int kWorld = 4;
  FakeWorld world(kWorld);
  // Group {0,1} waits for rank 1, which comes last; all others must be able to finish before.
  const std::vector<std::vector<int>> groups = {{0, 1}, {0, 1, 2, 3}, {2, 0}, {3}, {3, 2, 1}};
  std::vector<std::vector<std::unique_ptr<exec::Executor>>> executors(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const int member : groups[g]) {
      executors[g].push_back(world.MakeExecutor(member, 100 + g, groups[g]));
    }
  }
  std::vector<std::vector<std::vector<int64_t>>> data(groups.size());
  const auto start = [&](size_t g, size_t rank) {
    return Start(*executors[g][rank],
                 InPlace(Collective::kAllReduce, static_cast<int>(rank),
                         static_cast<int>(groups[g].size()), data[g][rank], 1));
  };
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t rank = 0; rank < groups[g].size(); ++rank) {
      data[g].push_back(std::vector<int64_t>(20000, static_cast<int64_t>(rank + 1)));
    }
  }
  PendingCall waiting = start(0, 0);
  std::vector<PendingCall> others;
  for (size_t g = 1; g < groups.size(); ++g) {
    for (size_t rank = 0; rank < groups[g].size(); ++rank) others.push_back(start(g, rank));
  }
  ExpectAllOk(others);
  EXPECT_FALSE(waiting.ended());
  PendingCall last = start(0, 1);
  EXPECT_TRUE(waiting.Wait().status.ok());
  EXPECT_TRUE(last.Wait().status.ok());
  for (size_t g = 0; g < groups.size(); ++g) {
    const int64_t n = static_cast<int64_t>(groups[g].size());
    for (const auto& result : data[g]) {
      EXPECT_EQ(result, std::vector<int64_t>(result.size(), n * (n + 1) / 2));
    }
  }
}

// Both sizes: short work on the engine thread, and long work on the compute thread.
TEST(ExecOrder, OperationsOnTheSameMemoryRunInIssueOrder) {
  constexpr int kWorld = 3;
  FakeWorld world(kWorld);
  auto executors = world.MakeExecutors(1);
  uint64_t sequence = 0;
  for (const int64_t elements : {5, 40000}) {
    std::vector<std::vector<int64_t>> data;
    for (int rank = 0; rank < kWorld; ++rank) {
      data.push_back(std::vector<int64_t>(elements, rank + 1));
    }
    std::vector<PendingCall> calls;
    for (int rank = 0; rank < kWorld; ++rank) {
      uint64_t s = sequence;
      for (int i = 0; i < 12; ++i) {
        calls.push_back(Start(*executors[rank],
                              InPlace(Collective::kAllReduce, rank, kWorld, data[rank], ++s)));
        calls.push_back(Start(*executors[rank], InPlace(Collective::kReduce, rank, kWorld,
                                                        data[rank], ++s, i % kWorld)));
        calls.push_back(Start(*executors[rank], InPlace(Collective::kBroadcast, rank, kWorld,
                                                        data[rank], ++s, i % kWorld)));
      }
    }
    sequence += 36;
    ExpectAllOk(calls);
    int64_t expected = 1 + 2 + 3;
    for (int i = 0; i < 12; ++i) expected *= i == 0 ? kWorld : kWorld * kWorld;
    for (const auto& result : data) EXPECT_EQ(result, std::vector<int64_t>(elements, expected));
  }
}

TEST(ExecOrder, SendsAndReceivesInAnyOrder) {
  constexpr int kWorld = 2, kMessages = 200;
  FakeWorld world(kWorld);
  auto executors = world.MakeExecutors(1);
  std::vector<int> order(kMessages);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(3));
  std::vector<std::vector<int64_t>> there(kMessages), back(kMessages), got(kMessages),
      got_back(kMessages);
  for (int i = 0; i < kMessages; ++i) {
    // Half of them are more than the receiver keeps unasked, all together.
    const size_t elements = i % 2 == 0 ? 3 : 40000;
    there[i].assign(elements, i);
    back[i].assign(elements, -i);
    got[i].assign(elements, 0);
    got_back[i].assign(elements, 0);
  }
  std::vector<PendingCall> calls;
  for (int i = 0; i < kMessages; ++i) {
    // Rank 0 sends all, then receives in order; rank 1 sends in random order before it receives.
    calls.push_back(Start(*executors[0], PointToPoint(true, 0, 1, kWorld, there[i], i)));
    calls.push_back(
        Start(*executors[1], PointToPoint(true, 1, 0, kWorld, back[order[i]], order[i])));
  }
  for (int i = kMessages - 1; i >= 0; --i) {
    calls.push_back(Start(*executors[0], PointToPoint(false, 0, 1, kWorld, got_back[i], i)));
    calls.push_back(Start(*executors[1], PointToPoint(false, 1, 0, kWorld, got[i], i)));
  }
  ExpectAllOk(calls);
  for (int i = 0; i < kMessages; ++i) {
    EXPECT_EQ(got[i], there[i]) << i;
    EXPECT_EQ(got_back[i], back[i]) << i;
  }
}

TEST(ExecOrder, DoneRunsOnTheEngineThreadAndMayStartMore) {
  FakeWorld world(1);
  auto executors = world.MakeExecutors(1);
  std::thread::id engine_thread = world.engine(0).Call([] { return std::this_thread::get_id(); });
  std::vector<int64_t> data = {7};
  std::promise<std::thread::id> where;
  std::promise<absl::Status> second;
  Call call = InPlace(Collective::kAllReduce, 0, 1, data, 1);
  call.done = [&](const absl::Status&, const exec::Outcome&) {
    where.set_value(std::this_thread::get_id());
    Call next = InPlace(Collective::kAllReduce, 0, 1, data, 2);
    next.done = [&](const absl::Status& status, const exec::Outcome&) { second.set_value(status); };
    executors[0]->Start(std::move(next));
  };
  executors[0]->Start(std::move(call));
  EXPECT_EQ(where.get_future().get(), engine_thread);
  EXPECT_TRUE(second.get_future().get().ok());
  EXPECT_EQ(data[0], 7);
}

TEST(ComputeThread, RunsInOrderAndStopsWithItsLastHolder) {
  std::vector<int> ran;
  std::thread::id id;
  {
    auto compute = exec::ComputeThread::Shared();
    EXPECT_EQ(exec::ComputeThread::Shared(), compute);
    for (int i = 0; i < 1000; ++i) {
      compute->Submit([&ran, &id, i] {
        ran.push_back(i);
        id = std::this_thread::get_id();
      });
    }
  }  // joined here, with everything done
  std::vector<int> expected(1000);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(ran, expected);
  EXPECT_NE(id, std::this_thread::get_id());
}

TEST(ScratchPool, KeepsWithinItsBoundAndReuses) {
  exec::ScratchPool pool;
  EXPECT_EQ(pool.Take(0).bytes, 0u);
  exec::ScratchMemory memory = pool.Take(1000);
  std::byte* const address = memory.data.get();
  EXPECT_GE(memory.bytes, 1000u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(address) % exec::kScratchAlignmentBytes, 0u);
  pool.Give(std::move(memory));
  memory = pool.Take(900);
  EXPECT_EQ(memory.data.get(), address);
  pool.Give(std::move(memory));
  EXPECT_NE(pool.Take(10).data.get(), address);  // too large to be spent on so little
  std::vector<exec::ScratchMemory> many;
  for (int i = 0; i < 5; ++i) many.push_back(pool.Take(exec::ScratchPool::kMaxKeptBytes / 4));
  for (exec::ScratchMemory& m : many) pool.Give(std::move(m));
  EXPECT_LE(pool.kept_bytes(), exec::ScratchPool::kMaxKeptBytes);
  EXPECT_GT(pool.kept_bytes(), 0u);
  pool.Give(pool.Take(exec::ScratchPool::kMaxKeptBytes + 1));
  EXPECT_LE(pool.kept_bytes(), exec::ScratchPool::kMaxKeptBytes);
}

}  // namespace
}  // namespace geomesh
