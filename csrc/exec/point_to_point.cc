#include "exec/point_to_point.h"

#include <algorithm>

namespace geomesh::exec {

std::vector<PointToPointCounts::Matched> PointToPointCounts::Post(uint64_t receive, int from,
                                                                  uint32_t tag) {
  tags_[tag].waiting.push_back({receive, from});
  return Match(tag);
}

std::vector<PointToPointCounts::Matched> PointToPointCounts::OnUnexpected(int from,
                                                                          uint64_t message_id) {
  if ((message_id & kPointToPointMessages) == 0) return {};
  const uint32_t tag = static_cast<uint32_t>((message_id & ~kPointToPointMessages) >> 32);
  const uint32_t count = static_cast<uint32_t>(message_id);
  if (count < received_[{from, tag}]) return {};  // its receive was posted meanwhile
  auto& come = tags_[tag].come;
  const std::pair<int, uint32_t> message(from, count);
  if (std::find(come.begin(), come.end(), message) == come.end()) come.push_back(message);
  return Match(tag);
}

std::vector<PointToPointCounts::Matched> PointToPointCounts::Match(uint32_t tag_number) {
  std::vector<Matched> matched;
  Tag& tag = tags_[tag_number];
  while (!tag.waiting.empty()) {
    const Waiting first = tag.waiting.front();
    int from = first.from;
    if (from == kAnyRank) {
      // Of several messages of one rank, the first one that was sent.
      const auto next = std::find_if(tag.come.begin(), tag.come.end(), [&](const auto& message) {
        return message.second == received_[{message.first, tag_number}];
      });
      if (next == tag.come.end()) break;
      from = next->first;
    }
    const uint32_t count = received_[{from, tag_number}]++;
    std::erase(tag.come, std::pair<int, uint32_t>(from, count));
    tag.waiting.pop_front();
    matched.push_back({first.receive, from, Id(tag_number, count)});
  }
  if (tag.waiting.empty() && tag.come.empty()) tags_.erase(tag_number);
  return matched;
}

}  // namespace geomesh::exec
