// The sign codec: one bit an element, one magnitude a block of 4,096, unbiased by a rotation.
//
// Source: DRIVE (Vargaftik et al., NeurIPS 2021), EDEN (ICML 2022). A block x of P elements is
// multiplied by random signs d and the unnormalised Walsh-Hadamard transform H: z = H (d * x). What
// travels is sign(z), one bit an element, and one magnitude m = ||z||^2 / ||z||_1, coded in a byte.
// The decoder's estimate d * (H (m * sign(z))) / P is unbiased over the choice of d. All ranks of a
// round share d, so contributions are added as m * sign(z) and rotated back once, whatever their
// number.
//
// Blocks lie at fixed places of the vector: P = 4,096, and what is left at the end is padded with
// zeros to a multiple of 64 and cut into blocks of falling powers of two (so padding costs 63 bits
// at most). Blocks that are entirely zero are left out. Rows that are entirely zero on a rank are
// listed in its code, and rows that no code had come out as exactly +0.
//
// Pure functions over spans: no thread, no allocation visible to the caller, no knowledge of ranks
// or networks. docs/wire-format.md is normative for the bytes; every vector target gives the same
// bytes and the same floats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/dtype.h"

namespace geomesh::codec {

inline constexpr int64_t kBlockElements = 4096;

// A run of consecutive elements of the vector that is encoded, as it lies in memory. The vector is
// the concatenation of its pieces. The encoded value of element i is anchor[i] - current[i],
// computed in fp32, or current[i] where `anchor` is null.
struct Piece {
  const float* anchor = nullptr;
  const void* current = nullptr;
  DType dtype = DType::kF32;  // of `current`: kF32, kBF16 or kF16
  int64_t elements = 0;
  int64_t row_elements =
      0;                   // rows that are entirely zero stay exactly zero; 0: the piece is one row
  absl::string_view name;  // for errors ("transformer.h.0.attn.weight")
};

// What both sides must agree on besides the bytes.
struct SignParams {
  bool rotate = true;  // false: plain sign with the block's mean magnitude (biased; for comparison)
  uint64_t rotation_seed = 0;  // same on all ranks of a round, new each round
  // Of this rank: rounds magnitudes up or down at random, so that they stay unbiased.
  uint64_t dither_seed = 0;
};

// A slice of a vector in elements. `begin` is a multiple of kBlockElements; only the vector's last
// slice may have an `elements` that is not. An empty range may begin anywhere. A row that lies only
// partly in a range counts by that part.
struct Range {
  int64_t begin = 0;
  int64_t elements = 0;
};

// Upper bound of the code's size. The true size is smaller where blocks are entirely zero, and by
// the row bitmap (one bit a row) where no row is zero: then it is at most 1/31.9 of the fp32 bytes
// from 303,000 elements on. Dead rows cost a bit each at most, less where they lie together.
int64_t MaxEncodedBytes(absl::Span<const Piece> pieces, Range range);

// Encodes `range` of the vector into `code` (at least MaxEncodedBytes long). Returns the bytes
// used. `weight` (a token count below 2^48) travels in the header; weight 0 makes a code of the
// header alone that adds nothing, and reads neither pieces nor residual. `residual` (optional, one
// float an element of the range): is added to the value before coding and receives what the code
// lost, times `residual_decay`; it is left untouched on error. Errors: InvalidArgument naming the
// piece and the element's index in it for a NaN or infinity, or for values so large that the
// squared norm of a rotated block is beyond fp32 (about 2^58); nothing useful is in `code` then.
struct EncodeOptions {
  uint64_t weight = 1;
  absl::Span<float> residual = {};
  float residual_decay = 1.0f;
};
absl::StatusOr<size_t> Encode(absl::Span<const Piece> pieces, Range range, const SignParams& params,
                              const EncodeOptions& options, absl::Span<std::byte> code);

// Sums codes of the same range in the rotated domain, in the order of the Add calls, and rotates
// back once. The caller owns the memory and the order; equal calls give equal bits on every CPU.
class SignAccumulator {
 public:
  // Floats that `sum` needs: the range's elements, padded to a multiple of 64.
  static int64_t SumElements(Range range);

  // The pieces give only the row structure here; their pointers are not read. `sum` has
  // SumElements(range) floats and is zeroed. It and `pieces` must outlive the accumulator. A range
  // that does not lie in the pieces is reported by Add.
  SignAccumulator(absl::Span<const Piece> pieces, Range range, const SignParams& params,
                  absl::Span<float> sum);

  // Adds weight * magnitude * sign. Everything in `code` is checked first: a wrong size, version,
  // range, seed, or a bit pattern that Encode can't have made is an InvalidArgument error that says
  // which, and `sum` is as before.
  absl::Status Add(absl::Span<const std::byte> code);

  // The sum of the weights added so far.
  uint64_t total_weight() const { return total_weight_; }

  // Writes the weighted mean, rotated back, to `mean` (range.elements floats); rows that were zero
  // in every code are exactly +0, and no -0 comes out. With total weight 0 everything is +0. `mean`
  // must not overlap `sum`, which is undefined afterwards.
  void Finish(absl::Span<float> mean);

 private:
  absl::Span<const Piece> pieces_;
  Range range_;
  SignParams params_;
  absl::Span<float> sum_;
  uint64_t total_weight_ = 0;
  std::vector<uint8_t> live_rows_;  // one bit a row of the range: set where some code had it
  bool all_rows_live_ = false;      // some code had all of them
};

// The weight in a code's header; InvalidArgument for anything that is no code.
absl::StatusOr<uint64_t> WeightOf(absl::Span<const std::byte> code);

}  // namespace geomesh::codec
