// Direct algorithms: every message goes straight from its source to its destination. One delay, and
// every link at once; a rank sends and receives as often as there are peers.
#include <algorithm>
#include <utility>

#include "absl/time/time.h"
#include "plan/algorithms.h"

namespace geomesh::plan {

double NominalSeconds(const Link& link) {
  return absl::ToDoubleSeconds(link.delay) + (1 << 20) / link.bytes_per_s;
}

std::vector<int> PeersSlowestFirst(const Topology& topology, int rank) {
  const int world = topology.world();
  std::vector<std::pair<double, int>> order;
  for (int step = 1; step < world; ++step) {
    order.emplace_back(-NominalSeconds(topology.link(rank, (rank + step) % world)), step);
  }
  std::sort(order.begin(), order.end());
  std::vector<int> peers;
  for (const auto& [negative_seconds, step] : order) peers.push_back((rank + step) % world);
  return peers;
}

// Bytes on the wire, a rank: (world - 1) x all. Every rank reduces everything, in rank order.
Program DirectAllReduce(const CallShape& shape, const Topology& topology, int rank) {
  const int world = topology.world();
  ProgramBuilder builder(shape, "direct all-reduce", rank, world);
  std::vector<Chunk> contributions(world, Output());
  for (const int peer : PeersSlowestFirst(topology, rank)) {
    contributions[peer] = builder.Plain(Output());
    builder.Recv(peer, contributions[peer]);
  }
  for (const int peer : PeersSlowestFirst(topology, rank)) builder.Send(Output(), peer);
  if (world > 1) builder.Reduce(Output(), contributions);
  builder.SumsOnce();
  return std::move(builder).Build();
}

Program DirectBroadcast(const CallShape& shape, const Topology& topology, int rank) {
  ProgramBuilder builder(shape, "direct broadcast", rank, topology.world());
  if (rank == shape.root) {
    for (const int peer : PeersSlowestFirst(topology, rank)) builder.Send(Output(), peer);
  } else {
    builder.Recv(shape.root, Output());
  }
  return std::move(builder).Build();
}

Program DirectReduce(const CallShape& shape, const Topology& topology, int rank) {
  const int world = topology.world();
  ProgramBuilder builder(shape, "direct reduce", rank, world);
  builder.SumsOnce();
  if (rank != shape.root) {
    builder.Send(Output(), shape.root);
    return std::move(builder).Build();
  }
  std::vector<Chunk> contributions(world, Output());
  for (const int peer : PeersSlowestFirst(topology, rank)) {
    contributions[peer] = builder.Plain(Output());
    builder.Recv(peer, contributions[peer]);
  }
  if (world > 1) builder.Reduce(Output(), contributions);
  return std::move(builder).Build();
}

Program DirectAllGather(const CallShape& shape, const Topology& topology, int rank) {
  ProgramBuilder builder(shape, "direct all-gather", rank, topology.world());
  for (const int peer : PeersSlowestFirst(topology, rank)) builder.Recv(peer, Output(peer));
  for (const int peer : PeersSlowestFirst(topology, rank)) builder.Send(Input(), peer);
  builder.Copy(Output(rank), Input());
  return std::move(builder).Build();
}

Program DirectReduceScatter(const CallShape& shape, const Topology& topology, int rank) {
  const int world = topology.world();
  ProgramBuilder builder(shape, "direct reduce-scatter", rank, world);
  std::vector<Chunk> contributions(world, Input(rank));
  for (const int peer : PeersSlowestFirst(topology, rank)) {
    contributions[peer] = builder.Plain(Output());
    builder.Recv(peer, contributions[peer]);
  }
  for (const int peer : PeersSlowestFirst(topology, rank)) builder.Send(Input(peer), peer);
  if (world > 1) {
    builder.Reduce(Output(), contributions);
  } else {
    builder.Copy(Output(), Input(rank));
  }
  builder.SumsOnce();
  return std::move(builder).Build();
}

Program DirectGather(const CallShape& shape, const Topology& topology, int rank) {
  ProgramBuilder builder(shape, "direct gather", rank, topology.world());
  if (rank != shape.root) {
    builder.Send(Input(), shape.root);
    return std::move(builder).Build();
  }
  for (const int peer : PeersSlowestFirst(topology, rank)) builder.Recv(peer, Output(peer));
  builder.Copy(Output(rank), Input());
  return std::move(builder).Build();
}

Program DirectScatter(const CallShape& shape, const Topology& topology, int rank) {
  ProgramBuilder builder(shape, "direct scatter", rank, topology.world());
  if (rank != shape.root) {
    builder.Recv(shape.root, Output());
    return std::move(builder).Build();
  }
  for (const int peer : PeersSlowestFirst(topology, rank)) builder.Send(Input(peer), peer);
  builder.Copy(Output(), Input(rank));
  return std::move(builder).Build();
}

Program DirectAllToAll(const CallShape& shape, const Topology& topology, int rank) {
  ProgramBuilder builder(shape, "direct all-to-all", rank, topology.world());
  for (const int peer : PeersSlowestFirst(topology, rank)) builder.Recv(peer, Output(peer));
  for (const int peer : PeersSlowestFirst(topology, rank)) builder.Send(Input(peer), peer);
  builder.Copy(Output(rank), Input(rank));
  return std::move(builder).Build();
}

// One delay, world - 1 messages a rank.
Program DirectBarrier(const CallShape& shape, const Topology& topology, int rank) {
  ProgramBuilder builder(shape, "direct barrier", rank, topology.world());
  for (const int peer : PeersSlowestFirst(topology, rank)) builder.Recv(peer, kNothing);
  for (const int peer : PeersSlowestFirst(topology, rank)) builder.Send(kNothing, peer);
  return std::move(builder).Build();
}

// In round k a rank tells the one 2^k further on that it has heard from the 2^k - 1 before itself:
// log2(world) delays and messages a rank.
Program DisseminationBarrier(const CallShape& shape, const Topology& topology, int rank) {
  const int world = topology.world();
  ProgramBuilder builder(shape, "dissemination barrier", rank, world);
  std::vector<uint32_t> heard;
  for (int distance = 1; distance < world; distance *= 2) {
    builder.Send(kNothing, (rank + distance) % world, heard);
    heard.push_back(builder.Recv((rank - distance + world) % world, kNothing));
  }
  return std::move(builder).Build();
}

// `shape.root` is the peer.
Program SendRecv(const CallShape& shape, const Topology& topology, int rank) {
  ProgramBuilder builder(shape, shape.sending ? "send" : "receive", rank, topology.world());
  if (shape.sending) {
    builder.Send(Input(), shape.root);
  } else {
    builder.Recv(shape.root, Output());
  }
  return std::move(builder).Build();
}

}  // namespace geomesh::plan
