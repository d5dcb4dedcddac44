// Algorithms over groups of ranks: what crosses between groups crosses once, to a gate, which sums
// up or passes on inside its group; and large vectors are cut in slices that go different ways, so
// that all links work at once. With every rank a group of its own these are the scatter-and-gather
// forms of a network without a far side.
#include <algorithm>
#include <utility>
#include <vector>

#include "plan/algorithms.h"

namespace geomesh::plan {
namespace {

constexpr int64_t kBytesPerSlice = 4 << 20;
constexpr size_t kMostSlices = 64;

// Slices a group: enough to spread over the members of the largest group, more for large vectors
// (later phases of one slice overlap with earlier ones of the next).
size_t SlicesPerGroup(const Groups& groups, int64_t bytes) {
  size_t members = 1;
  for (size_t g = 0; g < groups.size(); ++g) members = std::max(members, groups.members(g).size());
  const int64_t pieces = std::max<int64_t>(members * groups.size(), 1);
  const size_t pipelined = std::clamp<int64_t>(bytes / pieces / kBytesPerSlice, 1, 4);
  return std::clamp<size_t>(members * pipelined, 1,
                            std::max<size_t>(kMostSlices / groups.size(), 1));
}

size_t IndexOf(const std::vector<int>& members, int rank) {
  return std::find(members.begin(), members.end(), rank) - members.begin();
}

// All groups but `own`, those behind the slowest links first. Depends on the group only: messages
// that the members of a group exchange among themselves are in this order on both sides.
std::vector<size_t> FarGroups(const Topology& topology, const Groups& groups, size_t own) {
  std::vector<std::pair<double, size_t>> order;
  for (size_t step = 1; step < groups.size(); ++step) {
    const size_t group = (own + step) % groups.size();
    order.emplace_back(
        -NominalSeconds(topology.link(groups.members(own)[0], groups.members(group)[0])), step);
  }
  std::sort(order.begin(), order.end());
  std::vector<size_t> far;
  for (const auto& [negative_seconds, step] : order) far.push_back((own + step) % groups.size());
  return far;
}

// All-reduce, or reduce to shape.root. Slice (turn, home) is summed up inside each group by the
// group's gate for that turn, across groups by the gate of group `home`, and goes back the same way
// (or to the root). All four phases of a slice go through the same ranks, so every element has one
// owner. Bytes between groups, a group: 2 (groups - 1) / groups x all.
Program SpreadReduce(const CallShape& shape, const Topology& topology, int rank,
                     const Groups& groups, const char* name) {
  const bool to_all = shape.collective == Collective::kAllReduce;
  const size_t turns = SlicesPerGroup(groups, shape.bytes);
  const size_t homes = groups.size();
  ProgramBuilder builder(shape, name, rank, topology.world());
  const size_t own_group = groups.group_of(rank);
  const std::vector<int>& mates = groups.members(own_group);
  const std::vector<size_t> far = FarGroups(topology, groups, own_group);
  std::vector<size_t> slowest_first = far;  // of homes
  slowest_first.push_back(own_group);

  const auto output = [&](size_t turn, size_t home) {
    return Output(0, turn * homes + home, turns * homes);
  };
  if (homes == 1 || homes == static_cast<size_t>(topology.world())) builder.SumsOnce();
  // The sum so far of each slice; a reduction leaves the outputs of other ranks than the root
  // alone.
  std::vector<Chunk> sums;
  for (size_t s = 0; s < turns * homes; ++s) sums.push_back(output(s / homes, s % homes));
  const auto sum = [&](size_t turn, size_t home) -> Chunk& { return sums[turn * homes + home]; };
  const auto add_up = [&](size_t turn, size_t home, const std::vector<Chunk>& parts) {
    if (parts.size() < 2) return;
    Chunk& total = sum(turn, home);
    if (!to_all && rank != shape.root && total == output(turn, home)) {
      total = builder.Plain(output(turn, home));
    }
    builder.Reduce(total, parts);
  };

  // Inside the group, to the gate.
  for (size_t turn = 0; turn < turns; ++turn) {
    const int gate = groups.gate(own_group, turn);
    for (const size_t home : slowest_first) {
      if (gate != rank) builder.Send(output(turn, home), gate);
    }
    for (const size_t home : slowest_first) {
      if (gate != rank) continue;
      std::vector<Chunk> parts(mates.size(), output(turn, home));
      for (size_t m = 0; m < mates.size(); ++m) {
        if (mates[m] == rank) continue;
        parts[m] = builder.Plain(output(turn, home));
        builder.Recv(mates[m], parts[m]);
      }
      add_up(turn, home, parts);
    }
  }
  // Across groups, to the home.
  for (size_t turn = 0; turn < turns; ++turn) {
    if (groups.gate(own_group, turn) != rank) continue;
    for (const size_t home : far) builder.Send(sum(turn, home), groups.gate(home, turn));
    std::vector<Chunk> parts(homes, sum(turn, own_group));
    for (const size_t group : far) {
      parts[group] = builder.Plain(output(turn, own_group));
      builder.Recv(groups.gate(group, turn), parts[group]);
    }
    add_up(turn, own_group, parts);
  }
  if (!to_all) {
    for (size_t turn = 0; turn < turns; ++turn) {
      for (size_t home = 0; home < homes; ++home) {
        const int owner = groups.gate(home, turn);
        if (owner == rank && rank != shape.root) builder.Send(sum(turn, home), shape.root);
        if (owner != rank && rank == shape.root) builder.Recv(owner, output(turn, home));
      }
    }
    return std::move(builder).Build();
  }
  // Back across.
  for (size_t turn = 0; turn < turns; ++turn) {
    if (groups.gate(own_group, turn) != rank) continue;
    for (const size_t group : far) {
      builder.Send(output(turn, own_group), groups.gate(group, turn));
    }
    for (const size_t home : far) builder.Recv(groups.gate(home, turn), output(turn, home));
  }
  // Back inside.
  for (size_t turn = 0; turn < turns; ++turn) {
    const int gate = groups.gate(own_group, turn);
    for (size_t home = 0; home < homes; ++home) {
      if (gate != rank) {
        builder.Recv(gate, output(turn, home));
        continue;
      }
      for (const int mate : mates) {
        if (mate != rank) builder.Send(output(turn, home), mate);
      }
    }
  }
  return std::move(builder).Build();
}

// Slice (turn, home) goes from the root to the gate of group `home`, from there to the gates of the
// other groups, and inside each group to its members. So it reaches a group behind a thin link also
// by way of the others. In the root's group the root is the gate.
Program SpreadBroadcast(const CallShape& shape, const Topology& topology, int rank,
                        const Groups& groups, const char* name) {
  const size_t turns = SlicesPerGroup(groups, shape.bytes);
  const size_t homes = groups.size();
  ProgramBuilder builder(shape, name, rank, topology.world());
  const size_t own_group = groups.group_of(rank);
  const size_t root_group = groups.group_of(shape.root);
  const auto gate = [&](size_t group, size_t turn) {
    return group == root_group ? shape.root : groups.gate(group, turn);
  };
  const auto slice = [&](size_t turn, size_t home) {
    return Output(0, turn * homes + home, turns * homes);
  };
  const std::vector<size_t> far = FarGroups(topology, groups, own_group);
  for (size_t turn = 0; turn < turns; ++turn) {
    const bool at_gate = gate(own_group, turn) == rank;
    // From the root to the homes.
    if (rank == shape.root) {
      for (const size_t home : far) builder.Send(slice(turn, home), gate(home, turn));
    } else if (at_gate) {
      builder.Recv(shape.root, slice(turn, own_group));
    }
    // From the homes to the other gates.
    if (at_gate) {
      for (const size_t group : far) {
        if (group != root_group) builder.Send(slice(turn, own_group), gate(group, turn));
      }
      for (const size_t home : far) {
        if (rank != shape.root) builder.Recv(gate(home, turn), slice(turn, home));
      }
    }
    // Inside.
    for (size_t home = 0; home < homes; ++home) {
      if (!at_gate) {
        builder.Recv(gate(own_group, turn), slice(turn, home));
        continue;
      }
      for (const int mate : groups.members(own_group)) {
        if (mate != rank) builder.Send(slice(turn, home), mate);
      }
    }
  }
  return std::move(builder).Build();
}

}  // namespace

Program SpreadAllReduce(const CallShape& shape, const Topology& topology, int rank) {
  return SpreadReduce(shape, topology, rank, Groups::EachAlone(topology), "spread all-reduce");
}

Program SpreadAllReduceByRegion(const CallShape& shape, const Topology& topology, int rank) {
  return SpreadReduce(shape, topology, rank, Groups::ByRegion(topology),
                      "spread all-reduce by region");
}

Program SpreadReduce(const CallShape& shape, const Topology& topology, int rank) {
  return SpreadReduce(shape, topology, rank, Groups::EachAlone(topology), "spread reduce");
}

Program SpreadReduceByRegion(const CallShape& shape, const Topology& topology, int rank) {
  return SpreadReduce(shape, topology, rank, Groups::ByRegion(topology), "spread reduce by region");
}

Program SpreadBroadcast(const CallShape& shape, const Topology& topology, int rank) {
  return SpreadBroadcast(shape, topology, rank, Groups::EachAlone(topology), "spread broadcast");
}

Program SpreadBroadcastByRegion(const CallShape& shape, const Topology& topology, int rank) {
  return SpreadBroadcast(shape, topology, rank, Groups::ByRegion(topology),
                         "spread broadcast by region");
}

// One copy to each region, straight from the root, then a tree inside.
Program BroadcastByRegion(const CallShape& shape, const Topology& topology, int rank) {
  const Groups groups = Groups::ByRegion(topology);
  const uint32_t slices = std::clamp<int64_t>(shape.bytes / kBytesPerSlice, 1, 8);
  ProgramBuilder builder(shape, "broadcast by region", rank, topology.world());
  const size_t own_group = groups.group_of(rank);
  const size_t root_group = groups.group_of(shape.root);
  const std::vector<int>& mates = groups.members(own_group);
  const std::vector<size_t> far = FarGroups(topology, groups, own_group);
  for (uint32_t s = 0; s < slices; ++s) {
    const Chunk slice = Output(0, s, slices);
    if (rank == shape.root) {
      for (const size_t group : far) builder.Send(slice, groups.gate(group, s));
    }
    const int gate = own_group == root_group ? shape.root : groups.gate(own_group, s);
    if (gate == rank && rank != shape.root) builder.Recv(shape.root, slice);
    TreeBroadcast(builder, slice, mates, IndexOf(mates, gate));
  }
  return std::move(builder).Build();
}

// A block goes to its own group and to a gate of each other group, which passes it on.
Program AllGatherByRegion(const CallShape& shape, const Topology& topology, int rank) {
  const Groups groups = Groups::ByRegion(topology);
  const int world = topology.world();
  ProgramBuilder builder(shape, "all-gather by region", rank, world);
  const size_t own_group = groups.group_of(rank);
  const auto near = [&](int other) { return groups.group_of(other) == own_group; };
  for (int origin = 0; origin < world; ++origin) {
    if (origin == rank) continue;
    const int gate = groups.gate(own_group, origin);
    if (near(origin) || gate == rank) builder.Recv(origin, Output(origin));
  }
  for (const int peer : PeersSlowestFirst(topology, rank)) {
    if (near(peer) || groups.gate(groups.group_of(peer), rank) == peer) {
      builder.Send(Input(), peer);
    }
  }
  builder.Copy(Output(rank), Input());
  for (int origin = 0; origin < world; ++origin) {
    if (near(origin)) continue;
    const int gate = groups.gate(own_group, origin);
    if (gate != rank) {
      builder.Recv(gate, Output(origin));
      continue;
    }
    for (const int mate : groups.members(own_group)) {
      if (mate != rank) builder.Send(Output(origin), mate);
    }
  }
  return std::move(builder).Build();
}

// What is due to a rank is summed up inside each other region first.
Program ReduceScatterByRegion(const CallShape& shape, const Topology& topology, int rank) {
  const Groups groups = Groups::ByRegion(topology);
  const int world = topology.world();
  ProgramBuilder builder(shape, "reduce-scatter by region", rank, world);
  const size_t own_group = groups.group_of(rank);
  const std::vector<int>& mates = groups.members(own_group);
  if (world == 1) builder.Copy(Output(), Input(rank));
  if (groups.size() == 1 || groups.size() == static_cast<size_t>(world)) builder.SumsOnce();
  // For other regions, through a gate, before what stays inside: the order of a pair's messages.
  std::vector<int> far_targets;
  for (const size_t group : FarGroups(topology, groups, own_group)) {
    far_targets.insert(far_targets.end(), groups.members(group).begin(),
                       groups.members(group).end());
  }
  for (const int target : far_targets) {
    const int gate = groups.gate(own_group, target);
    if (gate != rank) builder.Send(Input(target), gate);
  }
  for (const int mate : mates) {
    if (mate != rank) builder.Send(Input(mate), mate);
  }
  for (const int target : far_targets) {
    if (groups.gate(own_group, target) != rank) continue;
    std::vector<Chunk> parts;
    for (const int mate : mates) {
      parts.push_back(mate == rank ? Input(target) : builder.Plain(Input(target)));
      if (mate != rank) builder.Recv(mate, parts.back());
    }
    Chunk sum = Input(target);
    if (parts.size() > 1) {
      sum = builder.Plain(Input(target));
      builder.Reduce(sum, parts);
    }
    builder.Send(sum, target);
  }
  // At the target: sums of the groups before, members of the own group, sums of those after.
  std::vector<Chunk> parts;
  for (size_t group = 0; group < groups.size(); ++group) {
    const std::vector<int> sources =
        group == own_group ? mates : std::vector<int>{groups.gate(group, rank)};
    for (const int source : sources) {
      parts.push_back(source == rank ? Input(rank) : builder.Plain(Output()));
      if (source != rank) builder.Recv(source, parts.back());
    }
  }
  if (parts.size() > 1) builder.Reduce(Output(), parts);
  return std::move(builder).Build();
}

// Inside each region to its first rank, among the first ranks, and back.
Program BarrierByRegion(const CallShape& shape, const Topology& topology, int rank) {
  const Groups groups = Groups::ByRegion(topology);
  ProgramBuilder builder(shape, "barrier by region", rank, topology.world());
  const size_t own_group = groups.group_of(rank);
  const std::vector<int>& mates = groups.members(own_group);
  if (rank != mates[0]) {
    builder.Send(kNothing, mates[0]);
    builder.Recv(mates[0], kNothing);
    return std::move(builder).Build();
  }
  std::vector<uint32_t> mates_here, all_here;
  for (const int mate : mates) {
    if (mate != rank) mates_here.push_back(builder.Recv(mate, kNothing));
  }
  for (const size_t group : FarGroups(topology, groups, own_group)) {
    builder.Send(kNothing, groups.members(group)[0], mates_here);
    all_here.push_back(builder.Recv(groups.members(group)[0], kNothing));
  }
  all_here.insert(all_here.end(), mates_here.begin(), mates_here.end());
  for (const int mate : mates) {
    if (mate != rank) builder.Send(kNothing, mate, all_here);
  }
  return std::move(builder).Build();
}

}  // namespace geomesh::plan
