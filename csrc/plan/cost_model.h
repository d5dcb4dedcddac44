// How long the programs of all ranks take on a described network. Deterministic: plain arithmetic
// over the arguments, so that all ranks come to the same figures.
//
// Model. A message takes its sender's port and its receiver's port for a fixed overhead and its
// bytes at the port's rate (the link inside the rank's region), and between regions the link of the
// ordered pair, which all ranks of the two regions share, for its bytes at the link's rate; each
// serves one message after the other, first come first served, and passes bytes on while it
// receives them. The link's delay comes on top. A rank has one compute thread. Reality differs
// (congestion control, shared hosts, bursts): the figures serve to compare programs.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "plan/compile.h"
#include "plan/program.h"
#include "plan/topology.h"

namespace geomesh::plan {

// Of one ordinary core; bytes are those of the call's elements (fp32 for codes).
struct CostConstants {
  double message_s = 10e-6;  // a message, on each side
  double step_s = 1e-6;      // a step that computes
  double copy_bytes_per_s = 8e9;
  double reduce_bytes_per_s = 5e9;
  double encode_bytes_per_s = 2e9;
  double decode_add_bytes_per_s = 4e9;
  double decode_finish_bytes_per_s = 2e9;
  double recode_bytes_per_s = 1e9;
};
inline constexpr CostConstants kCosts;

struct Timing {
  double total_s = 0;
  std::vector<double> rank_s;               // when each rank has finished
  std::vector<std::vector<double>> step_s;  // when each step was done, by rank
  int64_t events = 0;                       // what the estimate took to make
};

// `programs` are those of all ranks for `shape` and pass the verifier; every block has
// `shape.bytes`.
Timing EstimateTime(const CallShape& shape, const Topology& topology,
                    absl::Span<const Program> programs);

}  // namespace geomesh::plan
