// The bytes of a sign code: header, row map, magnitudes. Writes them, and reads them back with
// every check that docs/wire-format.md asks for. Knows nothing of transforms.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "codec/sign.h"

namespace geomesh::codec {

inline constexpr size_t kHeaderBytes = 32;
inline constexpr uint64_t kMaxWeight = (uint64_t{1} << 48) - 1;
inline constexpr int kLargestByte = 255;
// A magnitude's value is its fp32 bits without the 19 lowest.
inline constexpr int kDroppedBits = 19;
// Values stay below 2^64.
inline constexpr int kMaxMagnitude = ((127 + 64) << 4) - 1;

enum class RowMap : uint8_t { kNone = 0, kBitmap = 1, kRuns = 2 };

struct Header {
  bool rotated = true;
  RowMap row_map = RowMap::kNone;
  int16_t base = 0;
  uint16_t row_mark = 0;
  uint64_t weight = 0;
  uint64_t elements = 0;
  uint32_t first_block = 0;
  uint32_t seed_mark = 0;
};

// What a code for this range and these parameters has in its header, before the data is known.
Header ExpectedHeader(absl::Span<const Piece> pieces, Range range, const SignParams& params);

void WriteHeader(const Header& header, absl::Span<std::byte> code);

// Checks whatever the header alone can show.
absl::StatusOr<Header> ReadHeader(absl::Span<const std::byte> code);

// One bit a row, lowest first; bits beyond the last row are zero.
using RowBits = std::vector<uint8_t>;

inline bool RowIsLive(const RowBits& rows, int64_t row) { return (rows[row / 8] >> (row % 8)) & 1; }
inline void SetRowLive(RowBits& rows, int64_t row) {
  rows[row / 8] = static_cast<uint8_t>(rows[row / 8] | (1u << (row % 8)));
}

// The shorter of bitmap and runs; nothing where all rows are live.
struct EncodedRows {
  RowMap kind = RowMap::kNone;
  std::vector<uint8_t> bytes;
};
EncodedRows EncodeRows(const RowBits& live, int64_t rows);

// The magnitude that `value` (fp32 bits above the dropped ones) stands for.
float MagnitudeOf(int value);

// A checked code: views into its bytes.
struct ParsedCode {
  Header header;
  RowBits live_rows;  // empty: all rows are live
  absl::Span<const uint8_t> magnitudes;
  const uint8_t* bits = nullptr;  // of the blocks that are present, one after the other
};

// Checks everything in `code` against the range and parameters.
absl::StatusOr<ParsedCode> ParseCode(absl::Span<const std::byte> code,
                                     absl::Span<const Piece> pieces, Range range,
                                     const SignParams& params);

// Adds the rows that `code` has to those of a sum: one bit a row, or all of them.
void JoinRows(const ParsedCode& code, RowBits& live_rows, bool& all_rows_live);

}  // namespace geomesh::codec
