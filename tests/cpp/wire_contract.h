// What every wire over sockets must do, whatever carries its bytes: tests for any WirePair.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "wire_testing.h"

namespace geomesh::transport {

template <typename Pair>
void SeveralDialsBetweenTheSameTwo() {
  Pair p;
  for (int dial = 0; dial < 3; ++dial) {
    const int before = CountSockets();
    ASSERT_TRUE(p.Connect(3, absl::StrCat("dial ", dial)));
    EXPECT_EQ(CountSockets() - before, 6) << dial;
    EXPECT_EQ(p.b.events.accepted.back().hello, absl::StrCat("dial ", dial));
    ASSERT_TRUE(p.a.wire->Post(p.Lane(2), Span("x"), Span("y"), PostToken{1}).ok());
    ASSERT_TRUE(p.Run([&] { return p.b.events.segments.size() == dial + 1; }));
    EXPECT_EQ(p.b.events.segments.back().lane, p.b.events.accepted.back().lane);
  }
}

template <typename Pair>
void CloseIsSeenByTheOtherSideAndFreesItsSockets() {
  for (bool dialler_closes : {true, false}) {
    for (bool with_traffic : {false, true}) {
      const int before = CountSockets();
      Pair p;
      ASSERT_TRUE(p.Connect(2));
      const LaneId b0 = p.b.events.accepted[0].lane;
      auto& closer = dialler_closes ? p.a : p.b;
      auto& other = dialler_closes ? p.b : p.a;
      const LaneId lane = dialler_closes ? p.Lane(0) : b0;
      const LaneId other_lane = dialler_closes ? b0 : p.Lane(0);
      const std::string bulk = Pattern(kMaxSegmentPayloadBytes, 3);
      size_t posts = 0;
      if (with_traffic) {
        for (; posts < 100; ++posts) {
          ASSERT_TRUE(closer.wire->Post(lane, Span("h"), Span(bulk), PostToken{posts}).ok());
        }
        closer.wire->Progress();
      }
      closer.wire->Close(lane);
      EXPECT_FALSE(closer.wire->Post(lane, Span("h"), Span("p"), PostToken{1000}).ok());
      ASSERT_TRUE(p.Run([&] {
        return !other.events.lost.empty() && closer.events.posted.size() == posts;
      })) << dialler_closes
          << with_traffic << " posted " << closer.events.posted.size();
      EXPECT_EQ(other.events.lost.size(), 1);
      EXPECT_EQ(other.events.lost[static_cast<uint32_t>(other_lane)].size(), 1);
      EXPECT_TRUE(closer.events.lost.empty());
      for (auto& [token, statuses] : closer.events.posted) EXPECT_EQ(statuses.size(), 1) << token;
      ASSERT_TRUE(p.Run([&] { return CountSockets() - before == 2 + 2; }))
          << CountSockets() - before;
      // The lane beside it goes on.
      const size_t segments = other.events.segments.size();
      ASSERT_TRUE(closer.wire
                      ->Post(dialler_closes ? p.Lane(1) : p.b.events.accepted[1].lane, Span("on"),
                             Span("and on"), PostToken{2000})
                      .ok());
      ASSERT_TRUE(p.Run([&] { return other.events.segments.size() > segments; }));
      EXPECT_EQ(other.events.segments.back().header, "on");
    }
  }
}

}  // namespace geomesh::transport
