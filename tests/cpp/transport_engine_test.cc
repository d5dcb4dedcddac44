// Engines over wire/fake: messages of every kind of size arrive whole.
#include "transport/engine.h"

#include <gtest/gtest.h>

#include "transport_test_util.h"

namespace geomesh::transport {
namespace {

constexpr size_t kSegment = kMaxSegmentPayloadBytes;

TEST(EngineTest, EverySizeArrivesExactly) {
  FakeNetwork network;
  Pair pair(&network);
  uint64_t id = 0;
  for (size_t size : {size_t{0}, size_t{1}, size_t{8}, kSegment - 1, kSegment, kSegment + 1,
                      3 * kSegment + 5, size_t{64} << 20}) {
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
}

}  // namespace
}  // namespace geomesh::transport
