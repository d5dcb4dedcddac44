#include "plan/routes.h"

#include <algorithm>
#include <queue>
#include <tuple>

#include "absl/time/time.h"

namespace geomesh::plan {
namespace {

// A hop costs its receiver this much before it can pass a piece on: a detour must be worth it.
constexpr double kHopSeconds = 200e-6;

class Trees {
 public:
  Trees(const Topology& topology, uint32_t slices, int64_t piece_bytes)
      : topology_(topology),
        world_(topology.world()),
        slices_(slices),
        bytes_(static_cast<double>(piece_bytes)),
        out_busy_s_(world_),
        in_busy_s_(world_),
        link_busy_s_(static_cast<size_t>(topology.regions()) * topology.regions()),
        held_s_(static_cast<size_t>(world_) * slices * world_, kNever) {}

  std::vector<Transfer> Grow() {
    for (uint32_t slice = 0; slice < slices_; ++slice) {
      for (int origin = 0; origin < world_; ++origin) {
        Held(origin, slice, origin) = 0;
        Propose(origin, slice, origin);
      }
    }
    std::vector<Transfer> transfers;
    while (!candidates_.empty()) {
      Candidate candidate = candidates_.top();
      candidates_.pop();
      const Transfer& transfer = candidate.transfer;
      if (Held(transfer.origin, transfer.slice, transfer.to) != kNever) continue;
      // What was carried since then can only have made it later.
      const double arrival_s = Arrival(transfer);
      if (arrival_s > candidate.arrival_s) {
        candidates_.push({arrival_s, transfer});
        continue;
      }
      Carry(transfer, arrival_s);
      transfers.push_back(transfer);
      Propose(transfer.origin, transfer.slice, transfer.to);
    }
    return transfers;
  }

 private:
  static constexpr double kNever = -1;

  struct Candidate {
    double arrival_s;
    Transfer transfer;
    bool operator<(const Candidate& other) const {  // the heap's top: earliest, then lowest
      const auto key = [](const Candidate& c) {
        return std::tie(c.arrival_s, c.transfer.slice, c.transfer.origin, c.transfer.from,
                        c.transfer.to);
      };
      return key(other) < key(*this);
    }
  };

  double& Held(int origin, uint32_t slice, int rank) {
    return held_s_[(static_cast<size_t>(origin) * slices_ + slice) * world_ + rank];
  }

  double& LinkBusy(int from, int to) {
    return link_busy_s_[static_cast<size_t>(topology_.region_of(from)) * topology_.regions() +
                        topology_.region_of(to)];
  }

  double PortSeconds(int rank) const { return bytes_ / topology_.link(rank, rank).bytes_per_s; }

  bool Crosses(const Transfer& t) const {
    return topology_.region_of(t.from) != topology_.region_of(t.to);
  }

  // Ports and links are taken to be busy from the start for what they carry in all: what is to come
  // later leaves no gap that an earlier piece could not use.
  double Arrival(const Transfer& t) {
    const Link& link = topology_.link(t.from, t.to);
    double start_s = std::max(Held(t.origin, t.slice, t.from), out_busy_s_[t.from]);
    if (Crosses(t)) start_s = std::max(start_s, LinkBusy(t.from, t.to));
    const double last_s = start_s + bytes_ / link.bytes_per_s + absl::ToDoubleSeconds(link.delay);
    return std::max(last_s, in_busy_s_[t.to] + PortSeconds(t.to)) + kHopSeconds;
  }

  void Carry(const Transfer& t, double arrival_s) {
    if (Crosses(t)) LinkBusy(t.from, t.to) += bytes_ / topology_.link(t.from, t.to).bytes_per_s;
    out_busy_s_[t.from] += PortSeconds(t.from);
    in_busy_s_[t.to] += PortSeconds(t.to);
    Held(t.origin, t.slice, t.to) = arrival_s;
  }

  void Propose(int origin, uint32_t slice, int from) {
    for (int to = 0; to < world_; ++to) {
      if (Held(origin, slice, to) != kNever) continue;
      const Transfer transfer{.from = from, .to = to, .origin = origin, .slice = slice};
      candidates_.push({Arrival(transfer), transfer});
    }
  }

  const Topology& topology_;
  const int world_;
  const uint32_t slices_;
  const double bytes_;
  // Time that what was carried so far takes.
  std::vector<double> out_busy_s_, in_busy_s_;  // by rank
  std::vector<double> link_busy_s_;             // by ordered pair of regions
  std::vector<double> held_s_;                  // by origin, slice, rank
  std::priority_queue<Candidate> candidates_;
};

}  // namespace

std::vector<Transfer> EarliestArrivals(const Topology& topology, uint32_t slices,
                                       int64_t piece_bytes) {
  return Trees(topology, slices, piece_bytes).Grow();
}

}  // namespace geomesh::plan
