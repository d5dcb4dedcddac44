// Encoding, adding and rotating back: the codec's passes over blocks. docs/wire-format.md says what
// each byte means; kernels.h does the arithmetic of a block.
#include "codec/sign.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "codec/assemble.h"
#include "codec/code_format.h"
#include "codec/float_env.h"
#include "codec/kernels.h"
#include "codec/pieces.h"
#include "codec/random.h"

namespace geomesh::codec {
namespace {

// What a block needs in memory while it is worked on; stays in the L1 cache.
struct Workspace {
  alignas(64) float values[kBlockElements];
  alignas(64) uint8_t signs[kBlockElements / 8 + kBitPadding];
  alignas(64) uint8_t bits[kBlockElements / 8 + kBitPadding];
};

void FillSigns(const WordStream& rotation, uint64_t first_word, const Block& block,
               uint8_t* signs) {
  for (int i = 0; i < block.padded / 64; ++i) {
    const uint64_t word = rotation.Word(first_word + static_cast<uint64_t>(i));
    std::memcpy(signs + 8 * i, &word, 8);
  }
}

// Reads blocks of a range in order, residual added, padded with zeros.
class BlockReader {
 public:
  BlockReader(absl::Span<const Piece> pieces, Range range, absl::Span<const float> residual)
      : reader_(pieces, range), residual_(residual) {}

  void Read(const Block& block, float* out) {
    reader_.Read(block.elements, out);
    if (!residual_.empty()) {
      const float* residual = residual_.data() + block.begin;
      for (int i = 0; i < block.elements; ++i) out[i] += residual[i];
    }
    std::fill(out + block.elements, out + block.padded, 0.0f);
  }

 private:
  PieceReader reader_;
  absl::Span<const float> residual_;
};

// Finds out which rows of a range are live, from its blocks in order.
class RowMarker {
 public:
  RowMarker(absl::Span<const Piece> pieces, Range range)
      : row_(pieces, range), rows_(CountRows(pieces, range)), has_row_(row_.Next()) {
    live_.assign(static_cast<size_t>((rows_ + 7) / 8), 0);
  }

  // Marks the rows that have an element other than +-0 in this block. True if there is any.
  bool Mark(const Block& block, const float* values) {
    bool any = false;
    const int64_t block_end = block.begin + block.elements;
    while (has_row_ && row_.begin() < block_end) {
      const float* begin = values + (std::max(row_.begin(), block.begin) - block.begin);
      const float* end = values + (std::min(row_.end(), block_end) - block.begin);
      // Nearly always ends at the first element.
      if (std::find_if(begin, end, [](float v) { return v != 0.0f; }) != end) {
        SetRowLive(live_, row_.index());
        any = true;
      }
      if (row_.end() > block_end) break;
      has_row_ = row_.Next();
    }
    return any;
  }

  const RowBits& live() const { return live_; }
  int64_t rows() const { return rows_; }

 private:
  RowCursor row_;
  int64_t rows_;
  bool has_row_;
  RowBits live_;
};

// m = ||z||^2 / ||z||_1 of a block where fp32 sums of squares are too small to trust. Reads and
// rotates the block again.
float MagnitudeInDouble(absl::Span<const Piece> pieces, Range range, const Block& block,
                        absl::Span<const float> residual, const uint8_t* signs) {
  alignas(64) float z[kBlockElements];
  const auto elements = static_cast<size_t>(block.elements);
  if (!residual.empty()) residual = residual.subspan(static_cast<size_t>(block.begin), elements);
  BlockReader reader(pieces, {range.begin + block.begin, block.elements}, residual);
  reader.Read({0, block.padded, block.elements}, z);
  Rotate(z, static_cast<size_t>(block.padded), signs);
  double l1 = 0, l2 = 0;
  for (int i = 0; i < block.padded; ++i) {
    const double value = z[i];
    l1 += std::abs(value);
    l2 += value * value;
  }
  return static_cast<float>(l2 / l1);
}

// Why the block's norms are not finite: the first bad element, or else the largest.
absl::Status NotFinite(absl::Span<const Piece> pieces, Range range, const Block& block,
                       absl::Span<const float> residual) {
  Workspace work;
  PieceReader reader(pieces, {range.begin + block.begin, static_cast<int64_t>(block.elements)});
  reader.Read(block.elements, work.values);
  const float* values = work.values;
  int worst = 0;
  for (int i = 0; i < block.elements; ++i) {
    if (!std::isfinite(values[i])) {
      return NotFiniteError(pieces, range, BadElement::kValue, block.begin + i, values[i]);
    }
    if (!residual.empty() && !std::isfinite(residual[block.begin + i])) {
      return NotFiniteError(pieces, range, BadElement::kResidual, block.begin + i,
                            residual[block.begin + i]);
    }
    if (std::abs(values[i]) > std::abs(values[worst])) worst = i;
  }
  return NotFiniteError(pieces, range, BadElement::kTooLarge, block.begin + worst, values[worst]);
}

void KeepWhatWasLost(absl::Span<const Piece> pieces, Range range, const SignParams& params,
                     const ParsedCode& code, float decay, absl::Span<float> residual) {
  Workspace work;
  alignas(64) float sum[kBlockElements];
  alignas(64) float estimate[kBlockElements];
  const WordStream rotation(params.rotation_seed, kRotationDomain);
  BlockReader reader(pieces, range, residual);
  const uint8_t* bits = code.bits;
  BlockCursor blocks(range.elements);
  Block block;
  for (size_t k = 0; blocks.Next(&block); ++k) {
    reader.Read(block, work.values);
    std::fill(estimate, estimate + block.padded, 0.0f);
    if (code.magnitudes[k] != 0) {
      const size_t padded = static_cast<size_t>(block.padded);
      std::memcpy(work.bits, bits, padded / 8);
      bits += padded / 8;
      std::fill(sum, sum + padded, 0.0f);
      AddSigned(work.bits, padded, MagnitudeOf(code.header.base + code.magnitudes[k]), sum);
      if (params.rotate) {
        FillSigns(rotation, FirstWord(range, block), block, work.signs);
        RotateBack(sum, padded, work.signs, 1.0f, estimate);
      } else {
        std::copy(sum, sum + padded, estimate);
      }
    }
    for (int i = 0; i < block.elements; ++i) {
      residual[block.begin + i] = (work.values[i] - estimate[i]) * decay;
    }
  }
  if (code.live_rows.empty()) return;
  for (RowCursor row(pieces, range); row.Next();) {
    if (!RowIsLive(code.live_rows, row.index())) {
      std::fill(residual.begin() + row.begin(), residual.begin() + row.end(), 0.0f);
    }
  }
}

}  // namespace

int64_t MaxEncodedBytes(absl::Span<const Piece> pieces, Range range) {
  return static_cast<int64_t>(kHeaderBytes) + (CountRows(pieces, range) + 7) / 8 +
         CountBlocks(range.elements) + PaddedElements(range.elements) / 8;
}

absl::StatusOr<size_t> Encode(absl::Span<const Piece> pieces, Range range, const SignParams& params,
                              const EncodeOptions& options, absl::Span<std::byte> code) {
  GM_RETURN_IF_ERROR(CheckEncode(pieces, range, options, code.size()));
  if (options.weight == 0) {
    Header header = ExpectedHeader(pieces, range, params);
    header.weight = 0;
    WriteHeader(header, code);
    return kHeaderBytes;
  }

  const DefaultFloatEnvironment environment;
  Workspace work;
  const size_t block_count = static_cast<size_t>(CountBlocks(range.elements));
  // Signs go where they belong if there is no row map and no block is left out; else they are
  // moved.
  auto* const first_bits = reinterpret_cast<uint8_t*>(code.data()) + SignOffset(range, 0);
  std::vector<float> magnitudes(block_count, kNoMagnitude);
  const WordStream rotation(params.rotation_seed, kRotationDomain);
  BlockReader reader(pieces, range, options.residual);
  RowMarker rows(pieces, range);
  BlockCursor blocks(range.elements);
  Block block;
  for (size_t k = 0; blocks.Next(&block); ++k) {
    reader.Read(block, work.values);
    if (!rows.Mark(block, work.values)) continue;
    const size_t padded = static_cast<size_t>(block.padded);
    Norms norms;
    if (params.rotate) {
      FillSigns(rotation, FirstWord(range, block), block, work.signs);
      norms = RotateAndSign(work.values, padded, work.signs, work.bits);
    } else {
      norms = PlainSign(work.values, padded, work.bits);
    }
    // A NaN or infinity anywhere reaches every sum.
    if (!std::isfinite(norms.l1) || !std::isfinite(norms.l2_squared)) {
      return NotFinite(pieces, range, block, options.residual);
    }
    if (!params.rotate) {
      magnitudes[k] = norms.l1;
    } else if (norms.l2_squared < kSafeSquaredNorm) {
      magnitudes[k] = MagnitudeInDouble(pieces, range, block, options.residual, work.signs);
    } else {
      magnitudes[k] = norms.l2_squared / norms.l1;
    }
    std::memcpy(first_bits + block.begin / 8, work.bits, padded / 8);
  }

  const AssembledCode assembled =
      AssembleCode(pieces, range, params, options.weight, std::move(magnitudes), rows.live(), code);
  if (!options.residual.empty()) {
    KeepWhatWasLost(pieces, range, params, assembled.parsed, options.residual_decay,
                    options.residual);
  }
  return assembled.bytes;
}

int64_t SignAccumulator::SumElements(Range range) { return PaddedElements(range.elements); }

SignAccumulator::SignAccumulator(absl::Span<const Piece> pieces, Range range,
                                 const SignParams& params, absl::Span<float> sum)
    : pieces_(pieces), range_(range), params_(params), sum_(sum) {
  std::fill(sum_.begin(), sum_.end(), 0.0f);
}

absl::Status SignAccumulator::Add(absl::Span<const std::byte> code) {
  GM_RETURN_IF_ERROR(CheckRange(pieces_, range_, false));
  if (static_cast<int64_t>(sum_.size()) < SumElements(range_)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("sign codec: the sum has room for %d floats, %d are needed", sum_.size(),
                        SumElements(range_)));
  }
  GM_ASSIGN_OR_RETURN(const ParsedCode parsed, ParseCode(code, pieces_, range_, params_));
  const uint64_t weight = parsed.header.weight;
  if (weight == 0) return absl::OkStatus();

  const DefaultFloatEnvironment environment;
  total_weight_ += weight;
  const bool some_rows_dead = !parsed.live_rows.empty();
  JoinRows(parsed, live_rows_, all_rows_live_);

  Workspace work;
  const uint8_t* bits = parsed.bits;
  RowCursor row(pieces_, range_);
  bool has_row = row.Next();
  BlockCursor blocks(range_.elements);
  Block block;
  for (size_t k = 0; blocks.Next(&block); ++k) {
    float* const sum = sum_.data() + block.begin;
    const int byte = parsed.magnitudes[k];
    const size_t padded = static_cast<size_t>(block.padded);
    float scaled = 0.0f;
    if (byte != 0) {
      scaled = static_cast<float>(static_cast<double>(weight) *
                                  static_cast<double>(MagnitudeOf(parsed.header.base + byte)));
      std::memcpy(work.bits, bits, padded / 8);
      bits += padded / 8;
    }
    if (params_.rotate || !some_rows_dead) {
      if (byte != 0) AddSigned(work.bits, padded, scaled, sum);
      continue;
    }
    // Plain signs of rows that this code does not have are no contribution.
    if (byte != 0) {
      std::fill(work.values, work.values + padded, 0.0f);
      AddSigned(work.bits, padded, scaled, work.values);
    }
    const int64_t block_end = block.begin + block.elements;
    while (has_row && row.begin() < block_end) {
      if (byte != 0 && RowIsLive(parsed.live_rows, row.index())) {
        const int64_t end = std::min(row.end(), block_end);
        for (int64_t i = std::max(row.begin(), block.begin); i < end; ++i) {
          sum_[i] += work.values[i - block.begin];
        }
      }
      if (row.end() > block_end) break;
      has_row = row.Next();
    }
  }
  return absl::OkStatus();
}

void SignAccumulator::Finish(absl::Span<float> mean) {
  const size_t elements = std::min(mean.size(), static_cast<size_t>(range_.elements));
  if (total_weight_ == 0) {
    std::fill(mean.begin(), mean.begin() + elements, 0.0f);
    return;
  }
  const DefaultFloatEnvironment environment;
  const float scale = static_cast<float>(1.0 / static_cast<double>(total_weight_));
  if (params_.rotate) {
    Workspace work;
    const WordStream rotation(params_.rotation_seed, kRotationDomain);
    BlockCursor blocks(range_.elements);
    for (Block block; blocks.Next(&block);) {
      FillSigns(rotation, FirstWord(range_, block), block, work.signs);
      RotateBack(sum_.data() + block.begin, static_cast<size_t>(block.padded), work.signs, scale,
                 work.values);
      std::copy(work.values, work.values + block.elements, mean.data() + block.begin);
    }
  } else {
    for (size_t i = 0; i < elements; ++i) mean[i] = sum_[i] * scale + 0.0f;
  }
  if (all_rows_live_) return;
  for (RowCursor row(pieces_, range_); row.Next();) {
    if (!RowIsLive(live_rows_, row.index())) {
      std::fill(mean.begin() + row.begin(), mean.begin() + row.end(), 0.0f);
    }
  }
}

absl::StatusOr<uint64_t> WeightOf(absl::Span<const std::byte> code) {
  GM_ASSIGN_OR_RETURN(const Header header, ReadHeader(code));
  return header.weight;
}

}  // namespace geomesh::codec
