// Checks, look-up and fingerprint of a topology.
#include "plan/topology.h"

#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace geomesh::plan {
namespace {

// FNV-1a over a canonical text: the same on every machine.
class Fnv {
 public:
  void Add(const std::string& text) {
    for (const char c : text) AddByte(static_cast<uint8_t>(c));
    AddByte(0);  // so that ("a", "bc") and ("ab", "c") differ
  }
  std::string Hex() const { return absl::StrFormat("%016x", hash_); }

 private:
  void AddByte(uint8_t byte) { hash_ = (hash_ ^ byte) * 0x100000001b3ULL; }
  uint64_t hash_ = 0xcbf29ce484222325ULL;
};

}  // namespace

absl::StatusOr<Topology> Topology::Create(std::vector<std::string> regions,
                                          std::vector<int> region_of, std::vector<Link> links) {
  const int count = static_cast<int>(regions.size());
  if (count == 0) return absl::InvalidArgumentError("topology has no region");
  if (region_of.empty()) return absl::InvalidArgumentError("topology has no rank");
  if (links.size() != static_cast<size_t>(count) * count) {
    return absl::InvalidArgumentError(
        absl::StrCat("topology of ", count, " regions has ", links.size(), " links; ",
                     static_cast<size_t>(count) * count, " are needed, one an ordered pair"));
  }
  for (int a = 0; a < count; ++a) {
    for (int b = 0; b < a; ++b) {
      if (regions[a] == regions[b]) {
        return absl::InvalidArgumentError(
            absl::StrCat("topology names region '", regions[a], "' twice"));
      }
    }
  }
  for (size_t rank = 0; rank < region_of.size(); ++rank) {
    if (region_of[rank] < 0 || region_of[rank] >= count) {
      return absl::InvalidArgumentError(absl::StrCat("topology puts rank ", rank, " in region ",
                                                     region_of[rank], "; there are ", count));
    }
  }
  for (int a = 0; a < count; ++a) {
    for (int b = 0; b < count; ++b) {
      const Link& link = links[static_cast<size_t>(a) * count + b];
      if (!std::isfinite(link.bytes_per_s) || link.bytes_per_s <= 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("link from '", regions[a], "' to '", regions[b], "' has a rate of ",
                         link.bytes_per_s, " bytes/s; it must be above 0"));
      }
      if (link.delay < absl::ZeroDuration() || link.delay == absl::InfiniteDuration()) {
        return absl::InvalidArgumentError(
            absl::StrCat("link from '", regions[a], "' to '", regions[b], "' has a delay of ",
                         absl::FormatDuration(link.delay), "; it must be finite and not negative"));
      }
    }
  }
  Topology topology;
  topology.regions_ = std::move(regions);
  topology.region_of_ = std::move(region_of);
  topology.links_ = std::move(links);
  return topology;
}

Topology Topology::Flat(int world, Link link) {
  Topology topology;
  topology.regions_ = {"flat"};
  topology.region_of_.assign(world, 0);
  topology.links_ = {link};
  return topology;
}

const Link& Topology::link(int from_rank, int to_rank) const {
  return links_[static_cast<size_t>(region_of_[from_rank]) * regions_.size() + region_of_[to_rank]];
}

Topology Topology::WithRanks(std::vector<int> region_of) const {
  Topology other = *this;
  other.region_of_ = std::move(region_of);
  return other;
}

std::string Topology::Fingerprint() const {
  Fnv fnv;
  for (const std::string& region : regions_) fnv.Add(region);
  fnv.Add("/");
  for (const int region : region_of_) fnv.Add(absl::StrCat(region));
  fnv.Add("/");
  for (const Link& link : links_) {
    // 17 digits name a double exactly.
    fnv.Add(absl::StrFormat("%.17g", link.bytes_per_s));
    fnv.Add(absl::StrCat(absl::ToInt64Nanoseconds(link.delay)));
  }
  return fnv.Hex();
}

}  // namespace geomesh::plan
