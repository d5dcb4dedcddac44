// Recursive doubling: log2(world) rounds in which partners exchange all they have. For small sizes
// on networks without a far side.
#include <utility>

#include "plan/algorithms.h"

namespace geomesh::plan {

// Bytes on the wire, a rank: log2(world) x all. Ranks beyond a power of two (the odd ones of the
// first pairs) hand their part to their neighbour and get the result from it. Every active rank
// then holds the sum over a run of consecutive ranks; partners hold neighbouring runs of the same
// size, and both reduce lower op upper: the same operands on the same sides, so the same bits.
Program RecursiveDoublingAllReduce(const CallShape& shape, const Topology& topology, int rank) {
  const int world = topology.world();
  ProgramBuilder builder(shape, "recursive-doubling all-reduce", rank, world);
  int active = 1;
  while (active * 2 <= world) active *= 2;
  const int pairs = world - active;  // ranks 0 .. 2 x pairs - 1 are folded in twos
  const auto rank_of = [&](int index) { return index < pairs ? 2 * index : index + pairs; };

  if (rank < 2 * pairs && rank % 2 == 1) {
    builder.Send(Output(), rank - 1);
    builder.Recv(rank - 1, Output());
    return std::move(builder).Build();
  }
  Chunk sum = Output();
  if (rank < 2 * pairs) {
    const Chunk upper = builder.Plain(Output());
    builder.Recv(rank + 1, upper);
    builder.Reduce(sum, {sum, upper});
  }
  const int index = rank < 2 * pairs ? rank / 2 : rank - pairs;
  for (int distance = 1; distance < active; distance *= 2) {
    const int partner = rank_of(index ^ distance);
    const Chunk other = builder.Plain(Output());
    builder.Recv(partner, other);
    builder.Send(sum, partner);
    if (partner > rank) {
      builder.Reduce(sum, {sum, other});
    } else {
      builder.Reduce(other, {other, sum});
      sum = other;
    }
  }
  if (!(sum == Output())) builder.Copy(Output(), sum);
  if (rank < 2 * pairs) builder.Send(Output(), rank + 1);
  return std::move(builder).Build();
}

}  // namespace geomesh::plan
