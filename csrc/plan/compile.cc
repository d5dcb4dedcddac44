// The candidates for each collective, and the choice among them.
#include "plan/compile.h"

#include <vector>

#include "absl/numeric/bits.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "plan/algorithms.h"

namespace geomesh::plan {
namespace {

absl::Status Check(const CallShape& shape, const Topology& topology, int rank) {
  const int world = topology.world();
  const char* name = Name(shape.collective);
  if (rank < 0 || rank >= world) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": rank ", rank, " is not in a topology of ", world, " ranks"));
  }
  if (shape.bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": ", shape.bytes, " bytes"));
  }
  if (HasRoot(shape.collective) && (shape.root < 0 || shape.root >= world)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": root ", shape.root, " is not in a group of ", world, " ranks"));
  }
  if (shape.collective == Collective::kSendRecv) {
    if (shape.root < 0 || shape.root >= world) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": peer ", shape.root, " is not in a group of ", world, " ranks"));
    }
    if (shape.root == rank) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": rank ", rank, " can't exchange messages with itself"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<Algorithm> Candidates(const CallShape& shape) {
  switch (shape.collective) {
    case Collective::kAllReduce:
      return {DirectAllReduce, RecursiveDoublingAllReduce, TreeAllReduce,
              SpreadAllReduce, SpreadAllReduceByRegion,    RingAllReduce};
    case Collective::kBroadcast:
      return {DirectBroadcast, TreeBroadcast, BroadcastByRegion, SpreadBroadcast,
              SpreadBroadcastByRegion};
    case Collective::kReduce:
      return {DirectReduce, TreeReduce, SpreadReduce, SpreadReduceByRegion};
    case Collective::kAllGather:
      return {DirectAllGather, AllGatherByRegion, RingAllGather};
    case Collective::kReduceScatter:
      return {DirectReduceScatter, ReduceScatterByRegion, RingReduceScatter};
    case Collective::kGather:
      return {DirectGather};
    case Collective::kScatter:
      return {DirectScatter};
    case Collective::kAllToAll:
      return {DirectAllToAll};
    case Collective::kBarrier:
      return {DirectBarrier, DisseminationBarrier};
    case Collective::kSendRecv:
      return {SendRecv};
    case Collective::kSignAllReduce:
      switch (shape.form) {
        case SignForm::kExchange:
          return {SignExchange, SignExchangeByRegion};
        case SignForm::kReduceAndRecode:
          return {SignReduceAndRecode};
        case SignForm::kChosen:
          return {SignExchange, SignExchangeByRegion, SignReduceAndRecode};
      }
  }
  return {};
}

std::vector<Program> ForAllRanks(Algorithm algorithm, const CallShape& shape,
                                 const Topology& topology) {
  std::vector<Program> programs;
  programs.reserve(topology.world());
  for (int rank = 0; rank < topology.world(); ++rank) {
    programs.push_back(algorithm(shape, topology, rank));
  }
  return programs;
}

int SizeClass(int64_t bytes) {
  return bytes <= 0 ? 0 : 1 + absl::bit_width(static_cast<uint64_t>(bytes) - 1);
}

absl::StatusOr<Program> Compile(const CallShape& shape, const Topology& topology, int rank) {
  GM_RETURN_IF_ERROR(Check(shape, topology, rank));
  const std::vector<Algorithm> candidates = Candidates(shape);
  if (candidates.empty()) {
    return absl::UnimplementedError(absl::StrCat(Name(shape.collective), ": no algorithm"));
  }
  return candidates.front()(shape, topology, rank);
}

}  // namespace geomesh::plan
