// Binomial trees: log2(world) delays, each rank sends or receives everything a few times.
#include <utility>
#include <vector>

#include "plan/algorithms.h"

namespace geomesh::plan {
namespace {

// A binomial tree over positions 0 .. size - 1: the parent of a position has its lowest set bit
// cleared, so a position's subtree is the run of positions from it up to its lowest set bit.
int Parent(int position) { return position & (position - 1); }

// Nearest first, so smallest subtree first.
std::vector<int> Children(int position, int size) {
  std::vector<int> children;
  for (int bit = 1; (position == 0 || bit < (position & -position)) && position + bit < size;
       bit *= 2) {
    children.push_back(position + bit);
  }
  return children;
}

}  // namespace

void TreeBroadcast(ProgramBuilder& builder, const Chunk& chunk, const std::vector<int>& members,
                   size_t root_index) {
  const int size = static_cast<int>(members.size());
  for (int position = 0; position < size; ++position) {
    const auto member = [&](int p) { return members[(p + root_index) % size]; };
    if (member(position) != builder.rank()) continue;
    if (position > 0) builder.Recv(member(Parent(position)), chunk);
    const std::vector<int> children = Children(position, size);
    // Largest subtree first: it has the longest way to go.
    for (auto it = children.rbegin(); it != children.rend(); ++it) {
      builder.Send(chunk, member(*it));
    }
  }
}

// Bytes on the wire: (world - 1) x all in total, log2(world) x all at the root.
Program TreeBroadcast(const CallShape& shape, const Topology& topology, int rank) {
  ProgramBuilder builder(shape, "binomial-tree broadcast", rank, topology.world());
  std::vector<int> members(topology.world());
  for (int r = 0; r < topology.world(); ++r) members[r] = r;
  TreeBroadcast(builder, Output(), members, shape.root);
  return std::move(builder).Build();
}

namespace {

// Emits the reduction of all outputs to rank 0 of the tree whose position p is rank
// (p + root) mod world. `sum` is where this rank adds its subtree up.
// A subtree is a run of consecutive positions; children are added in ascending order.
void ReduceToRoot(ProgramBuilder& builder, const Chunk& sum, int root) {
  const int world = builder.world();
  const auto rank_of = [&](int position) { return (position + root) % world; };
  const int position = (builder.rank() - root + world) % world;
  std::vector<Chunk> parts = {Output()};
  for (const int child : Children(position, world)) {
    parts.push_back(builder.Plain(Output()));
    builder.Recv(rank_of(child), parts.back());
  }
  if (parts.size() > 1) builder.Reduce(sum, parts);
  if (position > 0) builder.Send(sum, rank_of(Parent(position)));
}

}  // namespace

Program TreeReduce(const CallShape& shape, const Topology& topology, int rank) {
  const int world = topology.world();
  ProgramBuilder builder(shape, "binomial-tree reduce", rank, world);
  Chunk sum = Output();
  const int position = (rank - shape.root + world) % world;
  if (position > 0 && !Children(position, world).empty()) {
    // The output of other ranks than the root stays as it is.
    sum = builder.Plain(Output());
  }
  ReduceToRoot(builder, sum, shape.root);
  return std::move(builder).Build();
}

// Reduce to rank 0, then broadcast: one owner, so the same bits everywhere.
Program TreeAllReduce(const CallShape& shape, const Topology& topology, int rank) {
  ProgramBuilder builder(shape, "binomial-tree all-reduce", rank, topology.world());
  ReduceToRoot(builder, Output(), 0);
  std::vector<int> members(topology.world());
  for (int r = 0; r < topology.world(); ++r) members[r] = r;
  TreeBroadcast(builder, Output(), members, 0);
  return std::move(builder).Build();
}

}  // namespace geomesh::plan
