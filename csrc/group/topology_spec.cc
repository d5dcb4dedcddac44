#include "group/topology_spec.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "group/fingerprint.h"

namespace geomesh::group {

std::string TopologySpec::Fingerprint() const {
  if (regions.empty()) return "none";
  std::string text = absl::StrJoin(regions, ",");
  for (size_t i = 0; i < bytes_per_s.size(); ++i) {
    absl::StrAppend(&text, ";", bytes_per_s[i], "/", delay_s[i]);
  }
  group::Fingerprint hash;
  for (char c : text) hash.Add(static_cast<unsigned char>(c));
  // Short, because records have room for a name.
  return absl::StrCat(name.substr(0, 64), " (", absl::Hex(hash.value(), absl::kZeroPad8), ")");
}

absl::StatusOr<plan::Topology> MakeTopology(const TopologySpec& spec,
                                            absl::Span<const transport::PeerRecord> records) {
  std::vector<std::string> regions = spec.regions;
  if (regions.empty()) {
    for (const transport::PeerRecord& record : records) {
      if (std::find(regions.begin(), regions.end(), record.region) == regions.end())
        regions.push_back(record.region);
    }
  }
  std::vector<int> region_of;
  for (const transport::PeerRecord& record : records) {
    const auto found = std::find(regions.begin(), regions.end(), record.region);
    if (found == regions.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rank ", record.rank, " on host ", record.host,
          record.region.empty() ? std::string(" has no region: set GEOMESH_REGION")
                                : absl::StrCat(" says that its region is '", record.region, "'"),
          "; topology ", spec.name, " has ", absl::StrJoin(regions, ", ")));
    }
    region_of.push_back(static_cast<int>(found - regions.begin()));
  }
  const size_t count = regions.size();
  std::vector<plan::Link> links(count * count);
  for (size_t i = 0; i < links.size(); ++i) {
    const bool inside = i / count == i % count;
    if (!spec.regions.empty()) {
      links[i] = {spec.bytes_per_s[i], absl::Seconds(spec.delay_s[i])};
    } else if (!inside) {
      links[i] = {125e6, absl::Milliseconds(50)};  // a WAN that nobody described
    }
  }
  return plan::Topology::Create(std::move(regions), std::move(region_of), std::move(links));
}

}  // namespace geomesh::group
