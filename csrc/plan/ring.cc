// Rings: each rank sends to its successor only. Fewest bytes on each link, most delays.
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "plan/algorithms.h"

namespace geomesh::plan {
namespace {

constexpr size_t kExhaustiveRegions = 8;

// The time of a ring over regions: a piece goes round all links once, and `rounds` pieces pass the
// slowest. Links inside regions are the same in every order.
class RingCost {
 public:
  RingCost(const Topology& topology, const Groups& groups, double piece_bytes, double rounds)
      : topology_(topology), groups_(groups), piece_bytes_(piece_bytes), rounds_(rounds) {}

  double operator()(const std::vector<size_t>& order) const {
    double sum = 0, slowest = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      const Link& link = topology_.link(groups_.members(order[i])[0],
                                        groups_.members(order[(i + 1) % order.size()])[0]);
      const double transfer = piece_bytes_ / link.bytes_per_s;
      sum += absl::ToDoubleSeconds(link.delay) + transfer;
      slowest = std::max(slowest, transfer);
    }
    return sum + rounds_ * slowest;
  }

 private:
  const Topology& topology_;
  const Groups& groups_;
  const double piece_bytes_, rounds_;
};

// Region 0 stays first: a ring has no beginning. Ties go to the first order in lexical sequence.
std::vector<size_t> BestOrder(size_t regions, const RingCost& cost) {
  std::vector<size_t> order(regions);
  for (size_t i = 0; i < regions; ++i) order[i] = i;
  if (regions < 3) return order;
  std::vector<size_t> best = order;
  double best_cost = cost(order);
  if (regions <= kExhaustiveRegions) {
    while (std::next_permutation(order.begin() + 1, order.end())) {
      if (const double c = cost(order); c < best_cost) {
        best_cost = c;
        best = order;
      }
    }
    return best;
  }
  // Exchanges and reversals of stretches (2-opt) until none helps.
  for (bool improved = true; improved;) {
    improved = false;
    for (size_t i = 1; i < regions; ++i) {
      for (size_t j = i + 1; j < regions; ++j) {
        for (const bool reverse : {false, true}) {
          order = best;
          if (reverse) {
            std::reverse(order.begin() + i, order.begin() + j + 1);
          } else {
            std::swap(order[i], order[j]);
          }
          if (const double c = cost(order); c < best_cost) {
            best_cost = c;
            best = order;
            improved = true;
          }
        }
      }
    }
  }
  return best;
}

// This rank's place in the ring of RingOrder.
struct Ring {
  Ring(const Topology& topology, int64_t bytes_in_ring, int rank)
      : order(RingOrder(topology, bytes_in_ring)), world(topology.world()) {
    position = static_cast<int>(std::find(order.begin(), order.end(), rank) - order.begin());
  }
  int at(int p) const { return order[((p % world) + world) % world]; }
  int next() const { return at(position + 1); }
  int previous() const { return at(position - 1); }

  std::vector<int> order;
  int world;
  int position;
};

}  // namespace

std::vector<int> RingOrder(const Topology& topology, int64_t bytes_in_ring) {
  const Groups groups = Groups::ByRegion(topology);
  const RingCost cost(topology, groups, static_cast<double>(bytes_in_ring) / topology.world(),
                      topology.world() - 1);
  std::vector<int> order;
  for (const size_t region : BestOrder(groups.size(), cost)) {
    order.insert(order.end(), groups.members(region).begin(), groups.members(region).end());
  }
  return order;
}

// Reduce-scatter round the ring, then all-gather round it. Bytes on the wire, a rank:
// 2 (world - 1) / world x all; 2 (world - 1) delays. A slice is summed up along the ring, one rank
// after the other, and its last rank is its owner.
Program RingAllReduce(const CallShape& shape, const Topology& topology, int rank) {
  const Ring ring(topology, shape.bytes, rank);
  const int world = ring.world;
  ProgramBuilder builder(shape, "ring all-reduce", rank, world);
  const auto slice = [&](int s) { return Output(0, ((s % world) + world) % world, world); };
  const int i = ring.position;
  for (int t = 0; t < world - 1; ++t) {
    builder.Send(slice(i - t), ring.next());
    const Chunk partial = builder.Plain(slice(i - t - 1));
    builder.Recv(ring.previous(), partial);
    builder.Reduce(slice(i - t - 1), {slice(i - t - 1), partial});
  }
  for (int t = 0; t < world - 1; ++t) {
    builder.Send(slice(i + 1 - t), ring.next());
    builder.Recv(ring.previous(), slice(i - t));
  }
  return std::move(builder).Build();
}

Program RingAllGather(const CallShape& shape, const Topology& topology, int rank) {
  const Ring ring(topology, shape.bytes * topology.world(), rank);
  ProgramBuilder builder(shape, "ring all-gather", rank, ring.world);
  builder.Copy(Output(rank), Input());
  for (int t = 0; t < ring.world - 1; ++t) {
    const Chunk block = t == 0 ? Input() : Output(ring.at(ring.position - t));
    builder.Send(block, ring.next());
    builder.Recv(ring.previous(), Output(ring.at(ring.position - t - 1)));
  }
  return std::move(builder).Build();
}

// The block of the rank at position q starts at q + 1, and comes to q last.
Program RingReduceScatter(const CallShape& shape, const Topology& topology, int rank) {
  const Ring ring(topology, shape.bytes * topology.world(), rank);
  ProgramBuilder builder(shape, "ring reduce-scatter", rank, ring.world);
  if (ring.world == 1) builder.Copy(Output(), Input(rank));
  Chunk partial = Input(ring.at(ring.position - 1));
  for (int t = 0; t < ring.world - 1; ++t) {
    builder.Send(partial, ring.next());
    const int target = ring.at(ring.position - t - 2);
    partial = builder.Plain(Input(target));
    builder.Recv(ring.previous(), partial);
    if (target == rank) {
      builder.Reduce(Output(), {Input(rank), partial});
    } else {
      builder.Reduce(partial, {partial, Input(target)});
    }
  }
  return std::move(builder).Build();
}

}  // namespace geomesh::plan
