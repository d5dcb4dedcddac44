// Magnitude bytes, row map, and the places of everything in a code.
#include "codec/assemble.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "codec/float_env.h"
#include "codec/random.h"

namespace geomesh::codec {
namespace {

constexpr uint32_t kDitherMask = (1u << kDroppedBits) - 1;

// Live elements of each block; `live` covers the range's rows.
std::vector<int32_t> LiveElements(absl::Span<const Piece> pieces, Range range,
                                  const RowBits& live) {
  std::vector<int32_t> counts;
  counts.reserve(static_cast<size_t>(CountBlocks(range.elements)));
  RowCursor row(pieces, range);
  bool has_row = row.Next();
  BlockCursor blocks(range.elements);
  for (Block block; blocks.Next(&block);) {
    const int64_t block_end = block.begin + block.elements;
    int64_t count = 0;
    while (has_row && row.begin() < block_end) {
      if (RowIsLive(live, row.index())) {
        count += std::min(row.end(), block_end) - std::max(row.begin(), block.begin);
      }
      if (row.end() > block_end) break;
      has_row = row.Next();
    }
    counts.push_back(static_cast<int32_t>(count));
  }
  return counts;
}

struct CodedMagnitudes {
  int base = 0;
  std::vector<uint8_t> bytes;
};

// Rounds magnitudes to bytes at random, unbiased. A negative one stands for a block left out.
CodedMagnitudes CodeMagnitudes(absl::Span<const float> magnitudes, Range range,
                               uint64_t dither_seed) {
  CodedMagnitudes coded;
  coded.bytes.assign(magnitudes.size(), 0);
  const WordStream dither(dither_seed, kDitherDomain);
  std::vector<uint16_t> values(magnitudes.size(), 0);
  int largest = 0;
  BlockCursor blocks(range.elements);
  Block block;
  for (size_t k = 0; blocks.Next(&block); ++k) {
    if (magnitudes[k] < 0) continue;
    const uint64_t word = dither.Word(FirstWord(range, block));
    const uint32_t bits = std::bit_cast<uint32_t>(magnitudes[k]);
    values[k] = static_cast<uint16_t>((bits + (static_cast<uint32_t>(word >> 32) & kDitherMask)) >>
                                      kDroppedBits);
    largest = std::max<int>(largest, values[k]);
  }
  if (largest == 0) return coded;
  coded.base = largest - kLargestByte;
  // Only used where some value lies below the span of a byte, so where base + 1 is positive.
  const double smallest = MagnitudeOf(std::max(coded.base + 1, 0));
  blocks = BlockCursor(range.elements);
  for (size_t k = 0; blocks.Next(&block); ++k) {
    if (values[k] == 0) continue;
    if (values[k] > coded.base) {
      coded.bytes[k] = static_cast<uint8_t>(values[k] - coded.base);
      continue;
    }
    // Below the span: the smallest value or nothing, in proportion.
    const double draw = static_cast<double>(dither.Word(FirstWord(range, block)) & 0xFFFFFF);
    coded.bytes[k] = draw * smallest < 0x1p24 * MagnitudeOf(values[k]) ? 1 : 0;
  }
  return coded;
}

}  // namespace

absl::Status CheckEncode(absl::Span<const Piece> pieces, Range range, const EncodeOptions& options,
                         size_t code_bytes) {
  GM_RETURN_IF_ERROR(CheckRange(pieces, range, options.weight != 0));
  if (static_cast<int64_t>(code_bytes) < MaxEncodedBytes(pieces, range)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("sign codec: %d bytes for a code that may need %d", code_bytes,
                        MaxEncodedBytes(pieces, range)));
  }
  if (options.weight > kMaxWeight) {
    return absl::InvalidArgumentError(
        absl::StrFormat("sign codec: weight %d is not below 2^48", options.weight));
  }
  if (!options.residual.empty() &&
      static_cast<int64_t>(options.residual.size()) != range.elements) {
    return absl::InvalidArgumentError(
        absl::StrFormat("sign codec: the residual has %d elements, the range %d",
                        options.residual.size(), range.elements));
  }
  return absl::OkStatus();
}

AssembledCode AssembleCode(absl::Span<const Piece> pieces, Range range, const SignParams& params,
                           uint64_t weight, std::vector<float> magnitudes, const RowBits& live_rows,
                           absl::Span<std::byte> code) {
  const DefaultFloatEnvironment environment;
  const size_t block_count = magnitudes.size();
  const EncodedRows row_map = EncodeRows(live_rows, CountRows(pieces, range));
  if (!params.rotate) {
    const std::vector<int32_t> live = LiveElements(pieces, range, live_rows);
    for (size_t k = 0; k < block_count; ++k) {
      if (magnitudes[k] >= 0) magnitudes[k] /= static_cast<float>(live[k]);
    }
  }
  const CodedMagnitudes coded = CodeMagnitudes(magnitudes, range, params.dither_seed);

  // Close the gaps of blocks that are left out, and make room for the row map.
  uint8_t* const first_bits = reinterpret_cast<uint8_t*>(code.data()) + SignOffset(range, 0);
  uint8_t* kept = first_bits;
  BlockCursor blocks(range.elements);
  Block block;
  for (size_t k = 0; blocks.Next(&block); ++k) {
    if (coded.bytes[k] == 0) continue;
    const size_t bytes = static_cast<size_t>(block.padded / 8);
    const uint8_t* from = first_bits + block.begin / 8;
    if (kept != from) std::memmove(kept, from, bytes);
    kept += bytes;
  }
  const size_t bit_bytes = static_cast<size_t>(kept - first_bits);
  Header header = ExpectedHeader(pieces, range, params);
  header.weight = weight;
  header.row_map = row_map.kind;
  header.base = static_cast<int16_t>(coded.base);
  WriteHeader(header, code);
  auto* const after_header = reinterpret_cast<uint8_t*>(code.data()) + kHeaderBytes;
  uint8_t* const magnitude_bytes = after_header + row_map.bytes.size();
  if (!row_map.bytes.empty()) {
    std::memmove(magnitude_bytes + block_count, first_bits, bit_bytes);
    std::memcpy(after_header, row_map.bytes.data(), row_map.bytes.size());
  }
  std::copy(coded.bytes.begin(), coded.bytes.end(), magnitude_bytes);

  AssembledCode assembled;
  assembled.bytes = kHeaderBytes + row_map.bytes.size() + block_count + bit_bytes;
  assembled.parsed.header = header;
  if (row_map.kind != RowMap::kNone) assembled.parsed.live_rows = live_rows;
  assembled.parsed.magnitudes = absl::MakeConstSpan(magnitude_bytes, block_count);
  assembled.parsed.bits = magnitude_bytes + block_count;
  return assembled;
}

absl::Status NotFiniteError(absl::Span<const Piece> pieces, Range range, BadElement what,
                            int64_t element, float value) {
  const auto [piece, index] = Locate(pieces, range.begin + element);
  if (what == BadElement::kTooLarge) {
    return absl::InvalidArgumentError(
        absl::StrFormat("sign codec: the value of \"%s\" at element %d is %g, too large for the "
                        "transform: nothing was encoded",
                        piece->name, index, value));
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "sign codec: %s of \"%s\" at element %d is %f: nothing was encoded",
      what == BadElement::kResidual ? "the residual" : "the value", piece->name, index, value));
}

}  // namespace geomesh::codec
