// The geometry of a range: its blocks, its rows, and the reading of its elements from the pieces.
// Knows where things lie; knows nothing of signs, magnitudes or bytes on the wire.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "codec/sign.h"

namespace geomesh::codec {

// Blocks of the tail are at least this long; padding fills up to it.
inline constexpr int64_t kMinBlockElements = 64;

// Elements with padding: what is rotated, sent and summed.
constexpr int64_t PaddedElements(int64_t elements) {
  return (elements + kMinBlockElements - 1) / kMinBlockElements * kMinBlockElements;
}

// One block of a range. `begin` counts from the start of the range.
struct Block {
  int64_t begin = 0;
  int32_t padded = 0;    // a power of two from 64 to 4,096
  int32_t elements = 0;  // `padded` less the padding; padding is only in a range's last block
};

// The number of a block's first 64 elements in the vector: what its random words count from.
inline uint64_t FirstWord(Range range, const Block& block) {
  return static_cast<uint64_t>(range.begin + block.begin) / 64;
}

// The blocks of a range in order: full ones, then the tail cut into falling powers of two.
class BlockCursor {
 public:
  explicit BlockCursor(int64_t elements) : elements_(elements), left_(PaddedElements(elements)) {}
  bool Next(Block* block);

 private:
  int64_t elements_;
  int64_t begin_ = 0;
  int64_t left_;
};

int64_t CountBlocks(int64_t elements);

// Checks that the pieces are well formed and that the range lies in them as sign.h asks.
// `read`: their memory will be read too.
absl::Status CheckRange(absl::Span<const Piece> pieces, Range range, bool read);

// The rows that overlap a range, in order, each cut to its part in the range.
class RowCursor {
 public:
  RowCursor(absl::Span<const Piece> pieces, Range range) : pieces_(pieces), range_(range) {}

  // Goes to the next (at first: the first) row. False when there is none.
  bool Next();

  // The current row's part, counted from the start of the range, and its number there.
  int64_t begin() const { return begin_; }
  int64_t end() const { return end_; }
  int64_t index() const { return index_; }

 private:
  absl::Span<const Piece> pieces_;
  Range range_;
  size_t piece_ = 0;
  int64_t piece_begin_ = 0;  // in the vector
  int64_t index_ = -1;
  int64_t begin_ = 0, end_ = 0;
};

int64_t CountRows(absl::Span<const Piece> pieces, Range range);

// Reads the range's values in order, as fp32.
class PieceReader {
 public:
  PieceReader(absl::Span<const Piece> pieces, Range range);

  // The next `elements` values: anchor - current, or current.
  void Read(int64_t elements, float* out);

 private:
  absl::Span<const Piece> pieces_;
  size_t piece_ = 0;
  int64_t offset_ = 0;  // in the current piece
};

// The piece and the index in it of an element of the vector.
std::pair<const Piece*, int64_t> Locate(absl::Span<const Piece> pieces, int64_t element);

}  // namespace geomesh::codec
