// Element-wise reductions of several buffers, and the rule of AVG. Pure functions over memory:
// nothing of ranks' order, messages or threads.
//
// Every vector target gives the same bits (the payload and the sign of a NaN that SUM or PRODUCT
// makes in float32 and float64 are the one exception: they are the processor's).
//
// - float16, bfloat16: SUM and PRODUCT of all operands in float32, rounded once, to nearest even.
// - Integers: SUM and PRODUCT wrap around.
// - bool: any byte but 0 is true; results are 0 or 1. SUM, MAX, BOR are "or"; PRODUCT, MIN, BAND
//   are "and"; BXOR is "exclusive or".
// - MIN, MAX: a NaN is the result (of several: the leftmost); of equal values (+0 and -0) the
//   leftmost is kept.
// - BAND, BOR, BXOR: integers and bool. AVG: floating point only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/dtype.h"

namespace geomesh::exec {

enum class ReduceOp : uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor };

// The name PyTorch users know ("SUM", "AVG", ...).
absl::string_view Name(ReduceOp op);

// OK, or InvalidArgument naming both: what the group layer asks before a byte leaves.
absl::Status Supported(ReduceOp op, DType dtype);

// dst[i] = operands[0][i] (op) operands[1][i] (op) ..., from left to right; one or more operands.
// kAvg adds, like kSum, and divides by `mean_of`: the number of operands where these are all there
// are, 1 where the rules below do the rest; the mean of finite float16 or bfloat16 values is
// finite. `dst` may be one of the operands; else nothing overlaps it. All are aligned for the type;
// the pair is Supported.
void Reduce(ReduceOp op, DType dtype, std::byte* dst, absl::Span<const std::byte* const> operands,
            int64_t elements, int mean_of = 1);

// AVG over `world` contributions where partial sums are rounded on their way, without overflow in
// between:
//   float16, bfloat16: every contribution is multiplied by 2^-k before the first addition, k =
//     ceil(log2(world)), which is exact (but for results below the smallest normal number); the sum
//     is multiplied by 2^k / world at the end, rounded once, where that is not 1: four times 30000
//     in float16 is 30000. A finite sum has a finite mean.
//   float32, float64: the sum is divided at the end.
// Each rank finishes its own copy of the same sum, so all end with the same bits.
bool AverageScalesContributions(DType dtype, int world);
bool AverageFinishesSum(DType dtype, int world);

// dst = src * 2^-k. `dst` may be `src`. float16 and bfloat16 only.
void ScaleContribution(DType dtype, int world, std::byte* dst, const std::byte* src,
                       int64_t elements);

// data = data * 2^k / world (float16, bfloat16) or data / world (float32, float64).
void FinishAverage(DType dtype, int world, std::byte* data, int64_t elements);

}  // namespace geomesh::exec
