// The second half of encoding: from each block's magnitude and signs to the finished code. Common
// to the encoders of CPU and GPU; knows which blocks and rows there are, and nothing of transforms.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "codec/code_format.h"
#include "codec/pieces.h"
#include "codec/sign.h"

namespace geomesh::codec {

// Below this a squared norm in fp32 may have lost digits to denormals.
inline constexpr float kSafeSquaredNorm = 0x1p-100f;

// What stands for the magnitude of a block whose values are all zero.
inline constexpr float kNoMagnitude = -1.0f;

// What Encode asks of its arguments, whichever processor does the work.
absl::Status CheckEncode(absl::Span<const Piece> pieces, Range range, const EncodeOptions& options,
                         size_t code_bytes);

// Where the encoders leave the signs of the block that begins at element `begin` of the range.
inline size_t SignOffset(Range range, int64_t begin) {
  return kHeaderBytes + static_cast<size_t>(CountBlocks(range.elements) + begin / 8);
}

struct AssembledCode {
  size_t bytes = 0;
  ParsedCode parsed;  // views into the code; its rows are empty where all are live
};

// Makes the code of a range whose signs lie in `code` at SignOffset (those of zero blocks are not
// read). `magnitudes` has a float a block: m in rotated codes, the sum of |x| in plain ones, or
// kNoMagnitude. `code` has MaxEncodedBytes.
AssembledCode AssembleCode(absl::Span<const Piece> pieces, Range range, const SignParams& params,
                           uint64_t weight, std::vector<float> magnitudes, const RowBits& live_rows,
                           absl::Span<std::byte> code);

// Why there is no code: the first block whose norms are not finite, as its encoder found it.
enum class BadElement : uint8_t { kValue, kResidual, kTooLarge };
absl::Status NotFiniteError(absl::Span<const Piece> pieces, Range range, BadElement what,
                            int64_t element, float value);

}  // namespace geomesh::codec
