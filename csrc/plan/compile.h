// From a call and a topology to this rank's program: candidates are built, the cheapest by the cost
// model wins, ties go to the first listed. A function of its arguments only, so that all ranks
// choose alike without talking.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "plan/program.h"
#include "plan/topology.h"

namespace geomesh::plan {

enum class SignForm : uint8_t {
  kChosen,          // by the cost model
  kExchange,        // every rank sends its code to every other
  kReduceAndRecode  // slices are decoded, averaged and coded again by their owners: fewer bytes,
                    // one more delay
};

// As users name it: "auto", "exchange", "recode".
const char* Name(SignForm form);

// What a call is to the compiler. `bytes` must be equal on all ranks: it is that of the largest
// block where blocks are equal on all ranks by c10d's contract, and 0 where ranks may disagree
// (uneven all-gather and all-to-all, send and receive), which makes the choice independent of
// sizes.
struct CallShape {
  Collective collective = Collective::kAllReduce;
  int64_t bytes = 0;
  int root = 0;          // kBroadcast, kReduce, kGather, kScatter; for kSendRecv: the peer
  bool sending = false;  // kSendRecv
  SignForm form = SignForm::kChosen;
  // The call adds up (or multiplies) 16-bit floats, so each rounding of a partial result on its way
  // costs accuracy: algorithms that sum once in each region are taken (up to 32 ranks).
  bool sums_halves = false;
};

// Calls of the same size class get the same program: bytes up to the next power of two, or 0.
int SizeClass(int64_t bytes);

// For people: the candidates with their times by the cost model, and this rank's steps of the one
// that is taken, each with the time when it is done.
absl::StatusOr<std::string> Explain(const CallShape& shape, const Topology& topology, int rank);

absl::StatusOr<Program> Compile(const CallShape& shape, const Topology& topology, int rank);

// Remembers compiled programs by call shape, with bytes as a size class. Thread-safe.
class PlanCache {
 public:
  PlanCache(Topology topology, int rank);
  ~PlanCache();
  absl::StatusOr<std::shared_ptr<const Program>> Get(const CallShape& shape);
  const Topology& topology() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace geomesh::plan
