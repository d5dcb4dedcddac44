// OrderedThread: order, one at a time, passing a closure that waits, and how many threads are left.
#include "base/ordered_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace geomesh {
namespace {

using std::chrono::milliseconds;

// Counting the entries of /proc/self/task misses some while threads end.
int Threads() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (int count = 0; std::sscanf(line.c_str(), "Threads: %d", &count) == 1) return count;
  }
  return -1;
}

TEST(OrderedThread, KeepsTheOrderOfEachPosterAndRunsOneAtATime) {
  constexpr int kPosters = 3, kEach = 5000;
  std::vector<std::pair<int, int>> ran;
  std::atomic<int> inside = 0;
  {
    OrderedThread ordered("test");
    std::vector<std::thread> posters;
    for (int poster = 0; poster < kPosters; ++poster) {
      posters.emplace_back([&, poster] {
        for (int i = 0; i < kEach; ++i) {
          ordered.Post([&, poster, i] {
            EXPECT_EQ(inside.fetch_add(1), 0);
            ran.emplace_back(poster, i);
            inside.fetch_sub(1);
            if (i % 2 == 0) ordered.LetOthersPass(milliseconds(10000));
          });
        }
      });
    }
    for (std::thread& poster : posters) poster.join();
  }
  ASSERT_EQ(ran.size(), kPosters * kEach);
  int next[kPosters] = {};
  for (const auto& [poster, i] : ran) EXPECT_EQ(i, next[poster]++);
}

TEST(OrderedThread, AClosureMayWaitForALaterOne) {
  OrderedThread ordered("test");
  std::promise<void> later, done;
  ordered.Post([&] {
    ordered.LetOthersPass(milliseconds(0));
    later.get_future().wait();
    done.set_value();
  });
  ordered.Post([&] { later.set_value(); });
  EXPECT_EQ(done.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
}

TEST(OrderedThread, NothingPassesAClosureThatDidNotLetIt) {
  std::promise<void> go;
  std::vector<int> ran;
  {
    OrderedThread ordered("test");
    ordered.Post([&] {
      go.get_future().wait();
      ran.push_back(1);
    });
    ordered.Post([&] {
      ordered.LetOthersPass(milliseconds(60000));  // longer than it takes
      ran.push_back(2);
    });
    ordered.Post([&] { ran.push_back(3); });
    go.set_value();
  }
  EXPECT_EQ(ran, (std::vector<int>{1, 2, 3}));
}

TEST(OrderedThread, ThreadsThatSlowClosuresNeededEnd) {
  constexpr int kSlow = 12;
  const int before = Threads();
  OrderedThread ordered("test");
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  std::vector<std::promise<void>> begun(kSlow);
  for (int i = 0; i < kSlow; ++i) {
    ordered.Post([&, i] {
      ordered.LetOthersPass(milliseconds(0));
      begun[i].set_value();
      released.wait();
    });
  }
  for (std::promise<void>& one : begun) one.get_future().wait();
  EXPECT_GE(Threads(), before + kSlow);
  release.set_value();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (Threads() > before + 2 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_EQ(Threads(), before + 2);
  // And those that are left still run things.
  std::promise<void> done;
  ordered.Post([&] { done.set_value(); });
  EXPECT_EQ(done.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
}

TEST(OrderedThread, RunsAllThatWasPostedBeforeItEnds) {
  int ran = 0;
  {
    OrderedThread ordered("test");
    for (int i = 0; i < 1000; ++i) ordered.Post([&] { ++ran; });
  }
  EXPECT_EQ(ran, 1000);
}

TEST(OrderedThread, MayBeDestroyedByAClosureOfItsOwn) {
  auto ordered = std::make_unique<OrderedThread>("test");
  std::promise<void> done;
  ordered->Post([&] {
    ordered.reset();
    done.set_value();
  });
  ASSERT_EQ(done.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_EQ(ordered, nullptr);
}

TEST(OrderedThread, AClosureThatHangsIsLeftBehindAtTheEnd) {
  for (const bool passed : {false, true}) {
    auto ordered = std::make_unique<OrderedThread>("test");
    std::promise<void> inside, release, back;
    std::atomic<int> later = 0;
    ordered->Post([&, &thread = *ordered] {
      thread.LetOthersPass(milliseconds(20));
      inside.set_value();
      release.get_future().wait();
      back.set_value();
    });
    if (passed) ordered->Post([&] { ++later; });
    inside.get_future().wait();
    ordered.reset();  // hangs where it waits for the closure
    EXPECT_EQ(later, passed ? 1 : 0);
    release.set_value();
    EXPECT_EQ(back.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  }
}

}  // namespace
}  // namespace geomesh
