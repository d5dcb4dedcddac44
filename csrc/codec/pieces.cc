// Walking a range by blocks, rows and pieces.
#include "codec/pieces.h"

#include <algorithm>
#include <bit>

#include "absl/strings/str_format.h"
#include "codec/kernels.h"

namespace geomesh::codec {

bool BlockCursor::Next(Block* block) {
  if (left_ == 0) return false;
  const int64_t padded = left_ >= kBlockElements
                             ? kBlockElements
                             : static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(left_)));
  block->begin = begin_;
  block->padded = static_cast<int32_t>(padded);
  block->elements = static_cast<int32_t>(std::min(padded, elements_ - begin_));
  begin_ += padded;
  left_ -= padded;
  return true;
}

int64_t CountBlocks(int64_t elements) {
  const int64_t padded = PaddedElements(elements);
  return padded / kBlockElements + std::popcount(static_cast<uint64_t>(padded % kBlockElements));
}

absl::Status CheckRange(absl::Span<const Piece> pieces, Range range, bool read) {
  int64_t total = 0;
  for (const Piece& piece : pieces) {
    if (piece.elements < 0 || piece.row_elements < 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "sign codec: piece \"%s\" has %d elements in rows of %d; neither may be negative",
          piece.name, piece.elements, piece.row_elements));
    }
    if (piece.dtype != DType::kF32 && piece.dtype != DType::kBF16 && piece.dtype != DType::kF16) {
      return absl::InvalidArgumentError(
          absl::StrFormat("sign codec: piece \"%s\" is %s; it takes float32, bfloat16 and float16",
                          piece.name, Name(piece.dtype)));
    }
    if (read && piece.elements > 0 && piece.current == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrFormat("sign codec: piece \"%s\" has no memory", piece.name));
    }
    total += piece.elements;
  }
  if (range.begin < 0 || range.elements < 0 || range.begin > total ||
      range.elements > total - range.begin) {
    return absl::InvalidArgumentError(
        absl::StrFormat("sign codec: range of %d elements at %d is outside the vector's %d",
                        range.elements, range.begin, total));
  }
  if (range.elements == 0) return absl::OkStatus();
  if (range.begin % kBlockElements != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "sign codec: range begins at %d, which is no multiple of %d", range.begin, kBlockElements));
  }
  if (range.elements % kBlockElements != 0 && range.begin + range.elements != total) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "sign codec: range of %d elements at %d ends inside a block, and not with the vector (%d)",
        range.elements, range.begin, total));
  }
  if (range.begin / kBlockElements >= (int64_t{1} << 32)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("sign codec: range begins at %d, beyond 2^44", range.begin));
  }
  return absl::OkStatus();
}

bool RowCursor::Next() {
  const int64_t position = range_.begin + end_;  // in the vector: where the next row (part) begins
  if (end_ >= range_.elements) return false;
  while (position >= piece_begin_ + pieces_[piece_].elements) {
    piece_begin_ += pieces_[piece_].elements;
    ++piece_;
  }
  const Piece& piece = pieces_[piece_];
  const int64_t in_piece = position - piece_begin_;
  const int64_t row_end =
      piece.row_elements == 0
          ? piece.elements
          : std::min(piece.elements, (in_piece / piece.row_elements + 1) * piece.row_elements);
  begin_ = end_;
  end_ = std::min(range_.elements, piece_begin_ + row_end - range_.begin);
  ++index_;
  return true;
}

int64_t CountRows(absl::Span<const Piece> pieces, Range range) {
  int64_t rows = 0;
  int64_t begin = 0;
  for (const Piece& piece : pieces) {
    const int64_t low = std::max(range.begin - begin, int64_t{0});
    const int64_t high = std::min(range.begin + range.elements - begin, piece.elements);
    if (low < high) {
      rows += piece.row_elements == 0
                  ? 1
                  : (high - 1) / piece.row_elements - low / piece.row_elements + 1;
    }
    begin += piece.elements;
  }
  return rows;
}

PieceReader::PieceReader(absl::Span<const Piece> pieces, Range range)
    : pieces_(pieces), offset_(range.begin) {
  while (piece_ < pieces_.size() && offset_ >= pieces_[piece_].elements) {
    offset_ -= pieces_[piece_].elements;
    ++piece_;
  }
}

void PieceReader::Read(int64_t elements, float* out) {
  while (elements > 0) {
    const Piece& piece = pieces_[piece_];
    const int64_t run = std::min(elements, piece.elements - offset_);
    const auto* current =
        static_cast<const std::byte*>(piece.current) + offset_ * SizeOf(piece.dtype);
    Gather(piece.anchor == nullptr ? nullptr : piece.anchor + offset_, current, piece.dtype,
           static_cast<size_t>(run), out);
    out += run;
    elements -= run;
    offset_ += run;
    if (offset_ == piece.elements) {
      offset_ = 0;
      ++piece_;
    }
  }
}

std::pair<const Piece*, int64_t> Locate(absl::Span<const Piece> pieces, int64_t element) {
  for (const Piece& piece : pieces) {
    if (element < piece.elements) return {&piece, element};
    element -= piece.elements;
  }
  return {nullptr, element};
}

}  // namespace geomesh::codec
