// Reading and writing of the sign code's framing.
#include "codec/code_format.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "codec/pieces.h"
#include "codec/random.h"

namespace geomesh::codec {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the codec copies words as they lie: it needs a little-endian machine");

constexpr uint8_t kMagic[2] = {'G', 'S'};
constexpr uint8_t kVersion = 1;
constexpr uint8_t kRotatedFlag = 1;
constexpr int kRowMapShift = 1;
constexpr uint8_t kKnownFlags = 7;

template <class T>
T Load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <class T>
void Store(T value, std::byte* to) {
  std::memcpy(to, &value, sizeof(T));
}

absl::Status Bad(std::string what) {
  return absl::InvalidArgumentError(absl::StrCat("sign code: ", what));
}

const uint8_t* BytesOf(absl::Span<const std::byte> code) {
  return reinterpret_cast<const uint8_t*>(code.data());
}

void AppendVarint(uint64_t value, std::vector<uint8_t>& out) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<uint8_t>(value | 0x80));
  out.push_back(static_cast<uint8_t>(value));
}

// Lengths of alternate runs of live and dead rows, beginning with live (perhaps 0).
std::vector<uint8_t> RowRuns(const RowBits& live, int64_t rows) {
  std::vector<uint8_t> out;
  bool want = true;
  for (int64_t row = 0; row < rows; want = !want) {
    const int64_t begin = row;
    while (row < rows && RowIsLive(live, row) == want) ++row;
    AppendVarint(static_cast<uint64_t>(row - begin), out);
  }
  return out;
}

size_t BitmapBytes(int64_t rows) { return static_cast<size_t>((rows + 7) / 8); }

// Reads the runs at the front of `bytes`; the number of bytes they take.
absl::StatusOr<size_t> ReadRowRuns(absl::Span<const uint8_t> bytes, int64_t rows, RowBits& live) {
  size_t at = 0;
  bool is_live = true;
  int64_t row = 0;
  while (row < rows) {
    uint64_t run = 0;
    for (int shift = 0;; shift += 7) {
      if (at == bytes.size()) return Bad("it ends inside the row map");
      if (shift > 56) return Bad("a run of rows is too long");
      const uint8_t byte = bytes[at++];
      run |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if ((byte & 0x80) == 0) {
        if (byte == 0 && shift > 0) return Bad("a run of rows has a needless byte");
        break;
      }
    }
    if (run == 0 && at > 1) return Bad("a run of rows is empty");
    if (run > static_cast<uint64_t>(rows - row)) return Bad("a run of rows is too long");
    const int64_t end = row + static_cast<int64_t>(run);
    for (; row < end; ++row) {
      if (is_live) SetRowLive(live, row);
    }
    is_live = !is_live;
  }
  return at;
}

// The row map behind the header; the number of bytes it takes.
absl::StatusOr<size_t> ReadRows(RowMap kind, absl::Span<const uint8_t> bytes, int64_t rows,
                                RowBits& live) {
  const size_t bitmap_bytes = BitmapBytes(rows);
  size_t used = bitmap_bytes;
  if (kind == RowMap::kRuns) {
    live.assign(bitmap_bytes, 0);
    GM_ASSIGN_OR_RETURN(used, ReadRowRuns(bytes, rows, live));
  } else {
    if (bytes.size() < bitmap_bytes) return Bad("it ends inside the row map");
    live.assign(bytes.begin(), bytes.begin() + bitmap_bytes);
    if (rows % 8 != 0 && (live.back() >> (rows % 8)) != 0) {
      return Bad("its row map goes on after the last row");
    }
  }
  // Both forms are unique: the shorter one, and none where no row is dead.
  const EncodedRows again = EncodeRows(live, rows);
  if (again.kind != kind || again.bytes.size() != used) {
    return Bad("its row map is not in the shortest form");
  }
  return used;
}

bool AnyBit(const uint8_t* bits, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if ((bits[i / 8] >> (i % 8)) & 1) return true;
  }
  return false;
}

// What ties rows, magnitudes and bits of a code together.
absl::Status CheckBlocks(const ParsedCode& code, absl::Span<const Piece> pieces, Range range) {
  const bool plain = !code.header.rotated;
  if (!plain && code.live_rows.empty()) return absl::OkStatus();
  RowCursor row(pieces, range);
  bool has_row = row.Next();
  BlockCursor blocks(range.elements);
  Block block;
  const uint8_t* bits = code.bits;
  for (size_t k = 0; blocks.Next(&block); ++k) {
    const bool present = code.magnitudes[k] != 0;
    if (plain && present && AnyBit(bits, block.elements, block.padded)) {
      return Bad(absl::StrFormat("block %d has signs in its padding", k));
    }
    if (!code.live_rows.empty()) {
      const int64_t block_end = block.begin + block.elements;
      bool any_live = false;
      while (has_row && row.begin() < block_end) {
        const bool live = RowIsLive(code.live_rows, row.index());
        any_live |= live;
        if (plain && present && !live &&
            AnyBit(bits, std::max(row.begin(), block.begin) - block.begin,
                   std::min(row.end(), block_end) - block.begin)) {
          return Bad(absl::StrFormat("row %d is zero, but has signs", row.index()));
        }
        if (row.end() > block_end) break;
        has_row = row.Next();
      }
      if (present && !any_live) {
        return Bad(absl::StrFormat("block %d is present, but all of its rows are zero", k));
      }
    }
    if (present) bits += block.padded / 8;
  }
  return absl::OkStatus();
}

}  // namespace

Header ExpectedHeader(absl::Span<const Piece> pieces, Range range, const SignParams& params) {
  Header header;
  header.rotated = params.rotate;
  header.row_mark = static_cast<uint16_t>(CountRows(pieces, range));
  header.elements = static_cast<uint64_t>(range.elements);
  header.first_block = static_cast<uint32_t>(range.begin / kBlockElements);
  header.seed_mark = WordStream(params.rotation_seed, kRotationDomain).Mark();
  return header;
}

void WriteHeader(const Header& header, absl::Span<std::byte> code) {
  std::byte* to = code.data();
  std::memcpy(to, kMagic, sizeof(kMagic));
  Store<uint8_t>(kVersion, to + 2);
  Store<uint8_t>(static_cast<uint8_t>((header.rotated ? kRotatedFlag : 0) |
                                      (static_cast<int>(header.row_map) << kRowMapShift)),
                 to + 3);
  Store<int16_t>(header.base, to + 4);
  Store<uint16_t>(header.row_mark, to + 6);
  Store<uint64_t>(header.weight, to + 8);
  Store<uint64_t>(header.elements, to + 16);
  Store<uint32_t>(header.first_block, to + 24);
  Store<uint32_t>(header.seed_mark, to + 28);
}

absl::StatusOr<Header> ReadHeader(absl::Span<const std::byte> code) {
  if (code.size() < kHeaderBytes) {
    return Bad(
        absl::StrFormat("%d bytes are fewer than its header's %d", code.size(), kHeaderBytes));
  }
  const uint8_t* from = BytesOf(code);
  if (from[0] != kMagic[0] || from[1] != kMagic[1]) {
    return Bad("it does not begin with \"GS\": these bytes are something else");
  }
  if (from[2] != kVersion) {
    return Bad(absl::StrFormat("it has version %d, this build reads %d", from[2], kVersion));
  }
  const uint8_t flags = from[3];
  Header header;
  header.rotated = (flags & kRotatedFlag) != 0;
  header.row_map = static_cast<RowMap>((flags & kKnownFlags) >> kRowMapShift);
  if ((flags & ~kKnownFlags) != 0 || header.row_map > RowMap::kRuns) {
    return Bad(absl::StrFormat("unknown flags 0x%02x", flags));
  }
  header.base = Load<int16_t>(from + 4);
  header.row_mark = Load<uint16_t>(from + 6);
  header.weight = Load<uint64_t>(from + 8);
  header.elements = Load<uint64_t>(from + 16);
  header.first_block = Load<uint32_t>(from + 24);
  header.seed_mark = Load<uint32_t>(from + 28);
  if (header.weight > kMaxWeight)
    return Bad(absl::StrFormat("weight %d is too large", header.weight));
  if (header.base > kMaxMagnitude - kLargestByte || header.base <= -kLargestByte) {
    return Bad(absl::StrFormat("magnitude base %d is out of range", header.base));
  }
  if (header.weight == 0 &&
      (code.size() != kHeaderBytes || header.base != 0 || header.row_map != RowMap::kNone)) {
    return Bad("its weight is 0, but it has more than a header");
  }
  return header;
}

EncodedRows EncodeRows(const RowBits& live, int64_t rows) {
  EncodedRows encoded;
  int64_t live_rows = 0;
  for (uint8_t byte : live) live_rows += std::popcount(byte);
  if (live_rows == rows) return encoded;
  encoded.bytes = RowRuns(live, rows);
  if (encoded.bytes.size() < BitmapBytes(rows)) {
    encoded.kind = RowMap::kRuns;
  } else {
    encoded.kind = RowMap::kBitmap;
    encoded.bytes.assign(live.begin(), live.end());
  }
  return encoded;
}

float MagnitudeOf(int value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << kDroppedBits);
}

absl::StatusOr<ParsedCode> ParseCode(absl::Span<const std::byte> code,
                                     absl::Span<const Piece> pieces, Range range,
                                     const SignParams& params) {
  ParsedCode parsed;
  GM_ASSIGN_OR_RETURN(parsed.header, ReadHeader(code));
  const Header& header = parsed.header;
  const Header expected = ExpectedHeader(pieces, range, params);
  if (header.elements != expected.elements || header.first_block != expected.first_block) {
    return Bad(absl::StrFormat("it has %d elements from block %d, expected %d from block %d",
                               header.elements, header.first_block, expected.elements,
                               expected.first_block));
  }
  if (header.rotated != expected.rotated) {
    return Bad(header.rotated ? "it is rotated, expected plain signs"
                              : "it has plain signs, expected a rotation");
  }
  if (header.seed_mark != expected.seed_mark) {
    return Bad("it was made with another rotation seed (another round?)");
  }
  if (header.row_mark != expected.row_mark) {
    return Bad(absl::StrFormat("its vector has other rows (count %d, expected %d, modulo 65536)",
                               header.row_mark, expected.row_mark));
  }
  if (header.weight == 0) return parsed;

  absl::Span<const uint8_t> rest(BytesOf(code) + kHeaderBytes, code.size() - kHeaderBytes);
  if (header.row_map != RowMap::kNone) {
    GM_ASSIGN_OR_RETURN(const size_t used,
                        ReadRows(header.row_map, rest, CountRows(pieces, range), parsed.live_rows));
    rest.remove_prefix(used);
  }
  const size_t blocks = static_cast<size_t>(CountBlocks(range.elements));
  if (rest.size() < blocks) return Bad("it ends inside the magnitudes");
  parsed.magnitudes = rest.first(blocks);
  rest.remove_prefix(blocks);
  parsed.bits = rest.data();

  int largest = 0;
  size_t bit_bytes = 0;
  BlockCursor cursor(range.elements);
  Block block;
  for (size_t k = 0; cursor.Next(&block); ++k) {
    const int byte = parsed.magnitudes[k];
    if (byte == 0) continue;
    if (header.base + byte <= 0) return Bad(absl::StrFormat("magnitude of block %d is zero", k));
    largest = std::max(largest, byte);
    bit_bytes += static_cast<size_t>(block.padded / 8);
  }
  if (largest != kLargestByte && (largest != 0 || header.base != 0)) {
    return Bad("its magnitudes do not fit their base");
  }
  if (rest.size() != bit_bytes) {
    return Bad(absl::StrFormat("it has %d bytes of signs, its magnitudes ask for %d", rest.size(),
                               bit_bytes));
  }
  GM_RETURN_IF_ERROR(CheckBlocks(parsed, pieces, range));
  return parsed;
}

void JoinRows(const ParsedCode& code, RowBits& live_rows, bool& all_rows_live) {
  if (code.live_rows.empty()) {
    all_rows_live = true;
    return;
  }
  live_rows.resize(code.live_rows.size(), 0);
  for (size_t i = 0; i < live_rows.size(); ++i) {
    live_rows[i] = static_cast<uint8_t>(live_rows[i] | code.live_rows[i]);
  }
}

}  // namespace geomesh::codec
