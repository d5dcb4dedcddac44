// The candidates for each collective, and the choice among them.
#include "plan/compile.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/numeric/bits.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "plan/algorithms.h"
#include "plan/cost_model.h"

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

const char* Name(SignForm form) {
  switch (form) {
    case SignForm::kChosen:
      return "auto";
    case SignForm::kExchange:
      return "exchange";
    case SignForm::kReduceAndRecode:
      return "recode";
  }
  return "";
}

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
      return {DirectBarrier, DisseminationBarrier, BarrierByRegion};
    case Collective::kSendRecv:
      return {SendRecv};
    case Collective::kSignAllReduce:
      switch (shape.form) {
        case SignForm::kExchange:
          return {SignExchange, SignExchangeByRegion, SignExchangeByTrees};
        case SignForm::kReduceAndRecode:
          return {SignReduceAndRecode};
        case SignForm::kChosen:
          return {SignExchange, SignExchangeByRegion, SignExchangeByTrees, SignReduceAndRecode};
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

namespace {

// Candidates are timed with at most this many ranks. A larger world is timed as a smaller one of
// the same shape, and without the algorithms whose messages, or trees, grow with the square of the
// world.
constexpr int kTimedRanks = 32;

// Steps are shown with times up to this world: it takes the programs of all ranks.
constexpr int kExplainedRanks = 256;

// The size that stands for a class: its largest.
int64_t ClassBytes(int64_t bytes) {
  constexpr int64_t kMost = int64_t{1} << 62;
  if (bytes <= 0) return 0;
  return bytes >= kMost ? kMost
                        : static_cast<int64_t>(absl::bit_ceil(static_cast<uint64_t>(bytes)));
}

// Every region keeps its share of ranks, and at least one; a root stays a root in its region.
Topology Folded(const Topology& topology, CallShape& shape) {
  const int world = topology.world();
  std::vector<int> kept(topology.regions()), seen(topology.regions()), region_of;
  for (int rank = 0; rank < world; ++rank) ++kept[topology.region_of(rank)];
  for (int& count : kept) {
    count = count == 0 ? 0 : std::max<int>(1, int64_t{count} * kTimedRanks / world);
  }
  const int root_region = HasRoot(shape.collective) ? topology.region_of(shape.root) : -1;
  for (int rank = 0; rank < world; ++rank) {
    const int region = topology.region_of(rank);
    if (seen[region]++ >= kept[region]) continue;
    if (region == root_region && seen[region] == 1) shape.root = region_of.size();
    region_of.push_back(region);
  }
  // Where every rank has a block, the blocks together stay as large as they were.
  switch (shape.collective) {
    case Collective::kAllGather:
    case Collective::kReduceScatter:
    case Collective::kGather:
    case Collective::kScatter:
    case Collective::kAllToAll:
      shape.bytes = shape.bytes / static_cast<int64_t>(region_of.size()) * world;
      break;
    default:
      break;
  }
  return topology.WithRanks(std::move(region_of));
}

// Coding the mean again costs accuracy, which does not average out over ranks: it must save a fifth
// of the time.
constexpr double kRecodeMargin = 1.25;

// Rounds partial results on their way, other than once for each region.
bool RoundsOnTheWay(Algorithm algorithm) {
  return algorithm == RecursiveDoublingAllReduce || algorithm == RingAllReduce ||
         algorithm == RingReduceScatter || algorithm == TreeAllReduce || algorithm == TreeReduce;
}

struct Choice {
  Algorithm algorithm;
  double seconds;
};

// What may be taken, with its time; the times are 0 where there is nothing to compare.
std::vector<Choice> Compare(CallShape shape, const Topology& topology) {
  std::vector<Choice> choices;
  const bool large = topology.world() > kTimedRanks;
  for (const Algorithm algorithm : Candidates(shape)) {
    if (large && (algorithm == DirectAllReduce || algorithm == DirectBarrier ||
                  algorithm == SignExchangeByTrees)) {
      continue;
    }
    if (shape.sums_halves && !large && RoundsOnTheWay(algorithm)) continue;
    choices.push_back({algorithm, 0});
  }
  const bool sized = shape.bytes > 0 || shape.collective == Collective::kBarrier;
  if (choices.size() < 2 || !sized || topology.world() == 1) return choices;
  const Topology timed = large ? Folded(topology, shape) : topology;
  for (Choice& choice : choices) {
    choice.seconds =
        EstimateTime(shape, timed, ForAllRanks(choice.algorithm, shape, timed)).total_s;
  }
  return choices;
}

const Choice& Cheapest(const std::vector<Choice>& choices) {
  const auto price = [](const Choice& choice) {
    return choice.seconds * (choice.algorithm == SignReduceAndRecode ? kRecodeMargin : 1);
  };
  return *std::min_element(choices.begin(), choices.end(),
                           [&](const Choice& a, const Choice& b) { return price(a) < price(b); });
}

}  // namespace

int SizeClass(int64_t bytes) {
  return bytes <= 0 ? 0 : absl::bit_width(static_cast<uint64_t>(ClassBytes(bytes)));
}

absl::StatusOr<Program> Compile(const CallShape& call, const Topology& topology, int rank) {
  GM_RETURN_IF_ERROR(Check(call, topology, rank));
  CallShape shape = call;
  shape.bytes = ClassBytes(call.bytes);
  return Cheapest(Compare(shape, topology)).algorithm(shape, topology, rank);
}

absl::StatusOr<std::string> Explain(const CallShape& call, const Topology& topology, int rank) {
  GM_RETURN_IF_ERROR(Check(call, topology, rank));
  if (call.collective == Collective::kSendRecv) {
    GM_ASSIGN_OR_RETURN(const Program program, Compile(call, topology, rank));
    return ToString(program);
  }
  CallShape shape = call;
  shape.bytes = ClassBytes(call.bytes);
  const std::vector<Choice> choices = Compare(shape, topology);
  const Algorithm chosen = Cheapest(choices).algorithm;
  std::string text =
      absl::StrFormat("%s of up to %d bytes, %d ranks in %d regions\n", Name(shape.collective),
                      shape.bytes, topology.world(), topology.regions());
  for (const Choice& choice : choices) {
    absl::StrAppendFormat(&text, "  %c %-32s %10.3f ms\n", choice.algorithm == chosen ? '*' : ' ',
                          choice.algorithm(shape, topology, rank).name, choice.seconds * 1e3);
  }
  if (topology.world() > kExplainedRanks) {
    return text + ToString(chosen(shape, topology, rank));
  }
  const std::vector<Program> programs = ForAllRanks(chosen, shape, topology);
  const Timing timing = EstimateTime(shape, topology, programs);
  const Program& program = programs[rank];
  absl::StrAppendFormat(&text, "%s, rank %d of %d: done after %.3f ms\n", program.name, rank,
                        program.world, timing.rank_s[rank] * 1e3);
  for (size_t i = 0; i < program.steps.size(); ++i) {
    absl::StrAppendFormat(&text, "%10.3f ms %4d  %s\n", timing.step_s[rank][i] * 1e3, i,
                          ToString(program.steps[i]));
  }
  return text;
}

}  // namespace geomesh::plan
