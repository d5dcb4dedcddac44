// All-reduce of sign codes: every rank encodes its vector, and all decode the weighted mean. Codes
// are added in the rotated domain in ascending rank order, so all ranks end with identical bits.
#include <algorithm>
#include <utility>

#include "codec/sign.h"
#include "plan/algorithms.h"
#include "plan/routes.h"

namespace geomesh::plan {
namespace {

// A slice's decoding overlaps with the arrival of the next: one slice for each of these many bytes
// of the fp32 vector, up to a bound.
constexpr int64_t kBytesPerSlice = 4 << 20;

// Trees divide a code into pieces of at least half of this size (sizes stand for a class, up to
// twice the real one): with smaller ones, headers would make a code larger than 1/31.9 of its
// vector.
constexpr int64_t kLeastPieceBytes = 80 << 10;

uint32_t PipelineSlices(int64_t bytes, uint32_t most) {
  return static_cast<uint32_t>(
      std::clamp<int64_t>(bytes / kBytesPerSlice, 1, static_cast<int64_t>(most)));
}

// [origin][slice]
std::vector<std::vector<Chunk>> CodesOfAll(ProgramBuilder& builder, uint32_t slices) {
  std::vector<std::vector<Chunk>> codes(builder.world());
  for (std::vector<Chunk>& code : codes) {
    for (uint32_t j = 0; j < slices; ++j) code.push_back(builder.Code(Input(0, j, slices), false));
  }
  return codes;
}

// The mean of all ranks' codes, in ascending rank order.
void Decode(ProgramBuilder& builder, const std::vector<std::vector<Chunk>>& codes,
            uint32_t slices) {
  for (uint32_t j = 0; j < slices; ++j) {
    const Chunk sum = builder.Accumulator(Output(0, j, slices), false);
    for (const std::vector<Chunk>& code : codes) builder.DecodeAdd(sum, code[j]);
    builder.DecodeFinish(Output(0, j, slices), sum);
  }
}

// Every code goes to every rank: once to each other group, and on from there. Bytes on the wire, a
// rank: (world - 1) codes where each is alone. One delay between groups.
Program Exchange(const CallShape& shape, const Topology& topology, int rank, const Groups& groups,
                 const char* name) {
  const int world = topology.world();
  const uint32_t slices = PipelineSlices(shape.bytes, std::clamp(64 / world, 1, 8));
  ProgramBuilder builder(shape, name, rank, world, codec::kBlockElements);
  const size_t own_group = groups.group_of(rank);
  const std::vector<int>& mates = groups.members(own_group);
  const auto straight_from = [&](int origin) {
    return groups.group_of(origin) == own_group || groups.gate(own_group, origin) == rank;
  };

  const std::vector<std::vector<Chunk>> codes = CodesOfAll(builder, slices);
  // A pair's own codes come before those that are passed on: the order of messages on both sides.
  for (const bool straight : {true, false}) {
    for (uint32_t j = 0; j < slices; ++j) {
      for (int origin = 0; origin < world; ++origin) {
        if (origin == rank || straight_from(origin) != straight) continue;
        builder.Recv(straight ? origin : groups.gate(own_group, origin), codes[origin][j]);
      }
    }
  }
  const std::vector<int> peers = PeersSlowestFirst(topology, rank);
  for (uint32_t j = 0; j < slices; ++j) {
    builder.Encode(codes[rank][j], Input(0, j, slices));
    for (const int peer : peers) {
      const size_t group = groups.group_of(peer);
      if (group == own_group || groups.gate(group, rank) == peer) {
        builder.Send(codes[rank][j], peer);
      }
    }
  }
  for (uint32_t j = 0; j < slices; ++j) {
    for (int origin = 0; origin < world; ++origin) {
      if (groups.group_of(origin) == own_group || groups.gate(own_group, origin) != rank) continue;
      for (const int mate : mates) {
        if (mate != rank) builder.Send(codes[origin][j], mate);
      }
    }
  }
  Decode(builder, codes, slices);
  return std::move(builder).Build();
}

}  // namespace

Program SignExchange(const CallShape& shape, const Topology& topology, int rank) {
  return Exchange(shape, topology, rank, Groups::EachAlone(topology), "sign exchange");
}

Program SignExchangeByRegion(const CallShape& shape, const Topology& topology, int rank) {
  return Exchange(shape, topology, rank, Groups::ByRegion(topology), "sign exchange by region");
}

// Every slice of every code goes to all ranks by a tree of its own, so that what a slow link cannot
// carry in time takes a way around it. Bytes on the wire, in all: world x (world - 1) codes, as in
// the plain exchange.
Program SignExchangeByTrees(const CallShape& shape, const Topology& topology, int rank) {
  const int world = topology.world();
  const int64_t elements = shape.bytes / 4;
  const auto slices = static_cast<uint32_t>(
      std::clamp<int64_t>(elements / 8 / kLeastPieceBytes, 1, std::clamp(64 / world, 1, 8)));
  ProgramBuilder builder(shape, "sign exchange by trees", rank, world, codec::kBlockElements);
  const std::vector<std::vector<Chunk>> codes = CodesOfAll(builder, slices);
  for (uint32_t j = 0; j < slices; ++j) builder.Encode(codes[rank][j], Input(0, j, slices));
  for (const Transfer& transfer : EarliestArrivals(topology, slices, elements / 8 / slices)) {
    const Chunk& code = codes[transfer.origin][transfer.slice];
    if (transfer.to == rank) builder.Recv(transfer.from, code);
    if (transfer.from == rank) builder.Send(code, transfer.to);
  }
  Decode(builder, codes, slices);
  return std::move(builder).Build();
}

// Slice j goes to its owner, rank j mod world, as a code of each rank; the owner adds them, codes
// the mean again, and sends that to all. Bytes on the wire, a rank: 2 (world - 1) / world codes.
// Two delays. The owner, too, takes the mean from the code, so that it has what the others have.
Program SignReduceAndRecode(const CallShape& shape, const Topology& topology, int rank) {
  const uint32_t world = topology.world();
  const uint32_t own = rank;
  const uint32_t slices =
      world * PipelineSlices(shape.bytes / world, std::clamp(32u / world, 1u, 4u));
  ProgramBuilder builder(shape, "sign reduce-and-recode", rank, topology.world(),
                         codec::kBlockElements);
  const std::vector<int> peers = PeersSlowestFirst(topology, rank);

  std::vector<Chunk> mine(slices), mean(slices);  // this rank's codes, and those of the mean
  for (uint32_t j = 0; j < slices; ++j) {
    mine[j] = builder.Code(Input(0, j, slices), false);
    mean[j] = builder.Code(Output(0, j, slices), true);
  }
  // Contributions before means: the order of a pair's messages on both sides.
  std::vector<std::vector<Chunk>> received(slices);  // [owned slice][origin]
  for (uint32_t j = own; j < slices; j += world) {
    for (uint32_t origin = 0; origin < world; ++origin) {
      received[j].push_back(origin == own ? mine[j] : builder.Code(Input(0, j, slices), false));
      if (origin != own) builder.Recv(origin, received[j][origin]);
    }
  }
  for (uint32_t j = 0; j < slices; ++j) {
    if (j % world != own) builder.Recv(j % world, mean[j]);
  }
  for (uint32_t first = 0; first < slices; first += world) {
    for (const int owner : peers) {
      builder.Encode(mine[first + owner], Input(0, first + owner, slices));
      builder.Send(mine[first + owner], owner);
    }
    builder.Encode(mine[first + own], Input(0, first + own, slices));
  }
  for (uint32_t j = own; j < slices; j += world) {
    const Chunk sum = builder.Accumulator(Output(0, j, slices), false);
    for (const Chunk& code : received[j]) builder.DecodeAdd(sum, code);
    builder.Recode(mean[j], sum);
    for (const int peer : peers) builder.Send(mean[j], peer);
  }
  for (uint32_t j = 0; j < slices; ++j) {
    const Chunk sum = builder.Accumulator(Output(0, j, slices), true);
    builder.DecodeAdd(sum, mean[j]);
    builder.DecodeFinish(Output(0, j, slices), sum);
  }
  return std::move(builder).Build();
}

}  // namespace geomesh::plan
