// Tables, layouts and bookkeeping of the codec's jobs on a GPU.
#include "cuda/sign_job.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "codec/random.h"

namespace geomesh::cuda {
namespace {

using codec::Block;
using codec::BlockCursor;

// Lays parts one after the other, each aligned for any type and for wide loads.
class Layout {
 public:
  Part Take(size_t bytes) {
    const Part part{end_, bytes};
    end_ += (bytes + 15) / 16 * 16;
    return part;
  }
  size_t end() const { return end_; }

 private:
  size_t end_ = 0;
};

template <class T>
T* At(std::byte* buffer, Part part) {
  return reinterpret_cast<T*>(buffer + part.offset);
}

template <class T>
const T* At(const std::byte* buffer, Part part) {
  return reinterpret_cast<const T*>(buffer + part.offset);
}

codec::WordStream Rotation(const codec::SignParams& params) {
  return codec::WordStream(params.rotation_seed, codec::kRotationDomain);
}

RangeView MakeView(const PieceView* pieces, size_t count, codec::Range range) {
  return {pieces, static_cast<int32_t>(count), range.elements,
          static_cast<uint64_t>(range.begin) / 64};
}

// A byte a row, for kernels.
void SpreadRows(const codec::RowBits& live, int64_t rows, uint8_t* out) {
  for (int64_t row = 0; row < rows; ++row) out[row] = codec::RowIsLive(live, row) ? 1 : 0;
}

static_assert(static_cast<int>(codec::BadElement::kValue) == 0 &&
                  static_cast<int>(codec::BadElement::kResidual) == 1 &&
                  static_cast<int>(codec::BadElement::kTooLarge) == 2,
              "Fail in block.h writes these numbers");

}  // namespace

std::vector<PieceView> ViewPieces(absl::Span<const codec::Piece> pieces, codec::Range range) {
  std::vector<PieceView> views;
  int64_t begin = -range.begin;
  int64_t rows = 0;
  for (const codec::Piece& piece : pieces) {
    const int64_t end = begin + piece.elements;
    if (begin < range.elements && end > 0 && piece.elements > 0) {
      PieceView view;
      view.anchor = piece.anchor;
      view.current = piece.current;
      view.begin = begin;
      view.end = end;
      view.row_elements = piece.row_elements == 0 ? piece.elements : piece.row_elements;
      view.first_row = rows - std::max<int64_t>(-begin, 0) / view.row_elements;
      view.dtype = piece.dtype;
      const int64_t last = std::min(end, range.elements) - 1 - begin;
      rows = view.first_row + last / view.row_elements + 1;
      views.push_back(view);
    }
    begin = end;
  }
  return views;
}

EncodeJob::EncodeJob(absl::Span<const codec::Piece> pieces, codec::Range range,
                     const codec::SignParams& params, const codec::EncodeOptions& options)
    : vector_(pieces),
      range_(range),
      params_(params),
      options_(options),
      blocks_(options.weight == 0 ? 0 : codec::CountBlocks(range.elements)),
      rows_(0) {
  if (!Check().ok()) {
    blocks_ = 0;
    return;
  }
  pieces_ = ViewPieces(pieces, range);
  rows_ = codec::CountRows(pieces, range);
  Layout layout;
  pieces_part_ = layout.Take(pieces_.size() * sizeof(PieceView));
  failure_ = layout.Take(sizeof(unsigned long long));
  live_rows_ = layout.Take(static_cast<size_t>(rows_));
  magnitudes_ = layout.Take(static_cast<size_t>(blocks_) * sizeof(float));
  signs_ = layout.Take(static_cast<size_t>(codec::PaddedElements(range.elements) / 8));
  bytes_ = layout.end();
}

absl::Status EncodeJob::Check() const {
  return codec::CheckEncode(vector_, range_, options_,
                            static_cast<size_t>(codec::MaxEncodedBytes(vector_, range_)));
}

void EncodeJob::Fill(std::byte* buffer) const {
  std::memcpy(buffer + pieces_part_.offset, pieces_.data(), pieces_part_.bytes);
}

EncodeArgs EncodeJob::Args(std::byte* buffer) const {
  return {.range = MakeView(At<PieceView>(buffer, pieces_part_), pieces_.size(), range_),
          .rotation = Rotation(params_),
          .rotate = params_.rotate,
          .residual = options_.residual.empty() ? nullptr : options_.residual.data(),
          .bits = At<uint8_t>(buffer, signs_),
          .magnitudes = At<float>(buffer, magnitudes_),
          .live_rows = At<uint8_t>(buffer, live_rows_),
          .failure = At<unsigned long long>(buffer, failure_)};
}

ResidualArgs EncodeJob::Residual(std::byte* buffer) const {
  return {.encoded = Args(buffer),
          .magnitudes = At<float>(buffer, magnitudes_),
          .decay = options_.residual_decay,
          .residual = options_.residual.data()};
}

absl::StatusOr<size_t> EncodeJob::Finish(const std::byte* buffer, absl::Span<std::byte> code) {
  GM_RETURN_IF_ERROR(codec::CheckEncode(vector_, range_, options_, code.size()));
  if (options_.weight == 0) {
    codec::Header header = codec::ExpectedHeader(vector_, range_, params_);
    header.weight = 0;
    codec::WriteHeader(header, code);
    return codec::kHeaderBytes;
  }
  const float* const magnitudes = At<float>(buffer, magnitudes_);
  const unsigned long long failure =
      blocks_ == 0 ? kNoFailure : *At<unsigned long long>(buffer, failure_);
  BlockCursor blocks(range_.elements);
  Block block;
  if (failure != kNoFailure) {
    const auto element = static_cast<int64_t>(failure / 4);
    size_t k = 0;
    while (blocks.Next(&block) && element >= block.begin + block.padded) ++k;
    return codec::NotFiniteError(vector_, range_, static_cast<codec::BadElement>(failure % 4),
                                 element, magnitudes[k]);
  }
  codec::RowBits live(static_cast<size_t>((rows_ + 7) / 8), 0);
  for (int64_t row = 0; row < rows_; ++row) {
    if (At<uint8_t>(buffer, live_rows_)[row] != 0) codec::SetRowLive(live, row);
  }
  std::memcpy(code.data() + codec::SignOffset(range_, 0), buffer + signs_.offset, signs_.bytes);
  const codec::AssembledCode assembled =
      codec::AssembleCode(vector_, range_, params_, options_.weight,
                          std::vector<float>(magnitudes, magnitudes + blocks_), live, code);
  coded_magnitudes_.clear();
  for (const uint8_t byte : assembled.parsed.magnitudes) {
    coded_magnitudes_.push_back(
        byte == 0 ? 0.0f : codec::MagnitudeOf(assembled.parsed.header.base + byte));
  }
  return assembled.bytes;
}

DecodeJob::DecodeJob(absl::Span<const codec::Piece> pieces, codec::Range range,
                     const codec::SignParams& params)
    : vector_(pieces), range_(range), params_(params), blocks_(0), rows_(0) {
  if (!codec::CheckRange(pieces, range, false).ok()) return;  // Add says so
  blocks_ = codec::CountBlocks(range.elements);
  pieces_ = ViewPieces(pieces, range);
  rows_ = codec::CountRows(pieces, range);
  Layout layout;
  layout.Take(pieces_.size() * sizeof(PieceView));
  layout.Take(static_cast<size_t>(blocks_) * sizeof(float));
  layout.Take(static_cast<size_t>(blocks_) * sizeof(int64_t));
  layout.Take(static_cast<size_t>(rows_));
  layout.Take(static_cast<size_t>(codec::PaddedElements(range.elements) / 8));
  max_bytes_ = layout.end();
}

absl::StatusOr<DecodeJob::Addition> DecodeJob::Add(absl::Span<const std::byte> code,
                                                   absl::Span<std::byte> buffer) {
  GM_RETURN_IF_ERROR(codec::CheckRange(vector_, range_, false));
  if (buffer.size() < max_bytes_) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "sign codec: the buffer has %d bytes, %d are needed", buffer.size(), max_bytes_));
  }
  GM_ASSIGN_OR_RETURN(const codec::ParsedCode parsed,
                      codec::ParseCode(code, vector_, range_, params_));
  Addition addition;
  const uint64_t weight = parsed.header.weight;
  if (weight == 0) return addition;
  total_weight_ += weight;
  const bool some_rows_dead = !parsed.live_rows.empty();
  codec::JoinRows(parsed, live_rows_, all_rows_live_);

  addition.any = blocks_ > 0;
  Layout layout;
  const Part pieces = layout.Take(pieces_.size() * sizeof(PieceView));
  addition.scales = layout.Take(static_cast<size_t>(blocks_) * sizeof(float));
  addition.bit_offsets = layout.Take(static_cast<size_t>(blocks_) * sizeof(int64_t));
  if (some_rows_dead && !params_.rotate) {
    addition.live_rows = layout.Take(static_cast<size_t>(rows_));
    SpreadRows(parsed.live_rows, rows_, At<uint8_t>(buffer.data(), addition.live_rows));
  }
  std::memcpy(buffer.data() + pieces.offset, pieces_.data(), pieces.bytes);
  float* const scales = At<float>(buffer.data(), addition.scales);
  int64_t* const bit_offsets = At<int64_t>(buffer.data(), addition.bit_offsets);
  int64_t offset = 0;
  BlockCursor blocks(range_.elements);
  Block block;
  for (size_t k = 0; blocks.Next(&block); ++k) {
    const int byte = parsed.magnitudes[k];
    bit_offsets[k] = offset;
    scales[k] = 0;
    if (byte == 0) continue;
    scales[k] =
        static_cast<float>(static_cast<double>(weight) *
                           static_cast<double>(codec::MagnitudeOf(parsed.header.base + byte)));
    offset += block.padded / 8;
  }
  addition.bits = layout.Take(static_cast<size_t>(offset));
  if (offset > 0) {
    std::memcpy(buffer.data() + addition.bits.offset, parsed.bits, addition.bits.bytes);
  }
  addition.buffer_bytes = layout.end();
  return addition;
}

RangeView DecodeJob::View(std::byte* buffer) const {
  return MakeView(At<PieceView>(buffer, Part{}), pieces_.size(), range_);
}

AddArgs DecodeJob::Args(const Addition& addition, std::byte* buffer, float* sum) const {
  return {.range = View(buffer),
          .scales = At<float>(buffer, addition.scales),
          .bit_offsets = At<int64_t>(buffer, addition.bit_offsets),
          .bits = At<uint8_t>(buffer, addition.bits),
          .live_rows =
              addition.live_rows.bytes == 0 ? nullptr : At<uint8_t>(buffer, addition.live_rows),
          .sum = sum};
}

size_t DecodeJob::FillFinish(std::byte* buffer) const {
  if (all_rows_live_ || total_weight_ == 0) return 0;
  Layout layout;
  const Part pieces = layout.Take(pieces_.size() * sizeof(PieceView));
  const Part live_rows = layout.Take(static_cast<size_t>(rows_));
  std::memcpy(buffer + pieces.offset, pieces_.data(), pieces.bytes);
  SpreadRows(live_rows_, rows_, At<uint8_t>(buffer, live_rows));
  return layout.end();
}

FinishArgs DecodeJob::Finish(std::byte* buffer, const float* sum, float* mean) const {
  Layout layout;
  layout.Take(pieces_.size() * sizeof(PieceView));
  const Part live_rows = layout.Take(static_cast<size_t>(rows_));
  return {.range = View(buffer),
          .rotation = Rotation(params_),
          .rotate = params_.rotate,
          .scale = static_cast<float>(1.0 / static_cast<double>(total_weight_)),
          .sum = sum,
          .live_rows = all_rows_live_ ? nullptr : At<uint8_t>(buffer, live_rows),
          .mean = mean};
}

}  // namespace geomesh::cuda
