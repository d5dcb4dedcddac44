// Where the elements of a range lie, in a form that kernels can read: its pieces and its blocks.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "cuda/element.h"
#include "cuda/host_device.h"

namespace geomesh::cuda {

// A piece of the vector that overlaps the range (codec::Piece). Places count from the start of the
// range, so a piece may begin before 0.
struct PieceView {
  const float* anchor;
  const void* current;
  int64_t begin, end;
  int64_t row_elements;  // at least 1
  int64_t first_row;  // number in the range of the piece's row 0; negative if that lies before it
  DType dtype;
};

struct RangeView {
  const PieceView* pieces;
  int32_t piece_count;
  int64_t elements;
  uint64_t first_word;  // of the range in the vector: element / 64
};

// codec::Block.
struct BlockView {
  int64_t begin;
  int32_t padded, elements;
};

// Block k of a range: full ones, then the tail cut into falling powers of two.
GEOMESH_HD inline BlockView BlockAt(int64_t elements, int64_t k) {
  const int64_t padded = (elements + 63) / 64 * 64;
  const int64_t full = padded / 4096;
  BlockView block{k * 4096, 4096, 4096};
  if (k >= full) {
    block.begin = full * 4096;
    int64_t left = k - full;
    for (block.padded = 2048;; block.padded /= 2) {
      if (((padded - full * 4096) & block.padded) == 0) continue;
      if (left-- == 0) break;
      block.begin += block.padded;
    }
  }
  const int64_t rest = elements - block.begin;
  block.elements = rest < block.padded ? static_cast<int32_t>(rest) : block.padded;
  return block;
}

// Walks through elements of a range in rising order.
class ElementCursor {
 public:
  // `piece`: none of the elements to come is in one before it.
  GEOMESH_HD ElementCursor(const RangeView& range, int piece) : pieces_(range.pieces + piece) {}

  GEOMESH_HD void Seek(int64_t element) {
    while (element >= pieces_->end) {
      ++pieces_;
      row_end_ = 0;
    }
    index_ = element - pieces_->begin;
  }

  // The value: anchor - current, or current.
  GEOMESH_HD float Value() const {
    const float current = LoadElement(pieces_->current, pieces_->dtype, index_);
    return pieces_->anchor == nullptr ? current : pieces_->anchor[index_] - current;
  }

  // The number of the element's row in the range.
  GEOMESH_HD int64_t Row() {
    if (index_ >= row_end_) {  // divides only where a new row begins
      row_ = index_ / pieces_->row_elements;
      row_end_ = (row_ + 1) * pieces_->row_elements;
    }
    return pieces_->first_row + row_;
  }

 private:
  const PieceView* pieces_;
  int64_t index_ = 0;  // in the piece
  int64_t row_ = 0, row_end_ = 0;
};

// The piece of an element of the range.
GEOMESH_HD inline int FindPiece(const RangeView& range, int64_t element) {
  int low = 0, high = range.piece_count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (element < range.pieces[middle].end) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace geomesh::cuda
