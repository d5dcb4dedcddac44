// Checks the programs of all ranks together, symbolically: no byte is moved, each element stands
// for the contributions it is made of.
//
// What is proved, for the given block sizes: every reference is in bounds; every message has one
// sender and one receiver and the same size on both sides; no step reads what was not written; no
// two steps that may run at the same time touch the same elements, one of them writing, also where
// the caller shares memory between buffers (program.h); all ranks finish, even if a send ends only
// when its receive is posted; every output element holds each contribution exactly once, as the
// collective demands; and where all ranks end with the same element, they have evaluated the same
// expression, so that their bits are equal.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "plan/compile.h"
#include "plan/program.h"

namespace geomesh::plan {

// Block sizes to verify with. In all-gather, gather, reduce-scatter, scatter and all-to-all,
// blocks of different ranks may differ.
struct VerifySizes {
  int64_t elements = 1000;  // of the largest block
  bool uneven = false;      // later blocks are smaller, down to 0
};

// `programs[r]` is rank r's. kSendRecv: `shape.root` is the receiver; the sender is the rank whose
// program has an input block, and bystanders have programs without steps. The error names rank,
// step and what is wrong.
absl::Status Verify(const CallShape& shape, absl::Span<const Program> programs,
                    const VerifySizes& sizes);

}  // namespace geomesh::plan
