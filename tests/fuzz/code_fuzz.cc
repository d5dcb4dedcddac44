// Sign codes: a code is refused and leaves the sum as it was, or is added. The first byte of an
// input says which vector it is for, the second whether the header is put right (all but the row
// map and the magnitudes' base), behind which rows, magnitudes and bits are reached.
#include <cmath>
#include <cstring>
#include <random>

#include "codec/code_format.h"
#include "codec/pieces.h"
#include "fuzz_target.h"

namespace geomesh::fuzz {
namespace {

using namespace codec;  // NOLINT

constexpr SignParams kParams = {.rotate = true, .rotation_seed = 5, .dither_seed = 6};

struct Shape {
  std::vector<std::pair<int64_t, int64_t>> pieces;  // elements, row elements
  Range range;
};

const std::vector<Shape>& Shapes() {
  static const auto* shapes = new std::vector<Shape>{
      {{{5000, 0}}, {0, 5000}},
      {{{4096, 64}, {1000, 10}}, {0, 5096}},
      {{{8192, 128}, {300, 7}}, {4096, 4396}},
      {{{1, 0}}, {0, 1}},
      {{{0, 0}}, {0, 0}},
      {{{20000, 1}}, {0, 20000}},
  };
  return *shapes;
}

std::vector<Piece> PiecesOf(const Shape& shape, const float* values) {
  std::vector<Piece> pieces;
  for (const auto& [elements, row_elements] : shape.pieces) {
    Piece piece;
    piece.current = values;
    piece.elements = elements;
    piece.row_elements = row_elements;
    pieces.push_back(piece);
    if (values != nullptr) values += elements;
  }
  return pieces;
}

std::string Encoded(const Shape& shape, int dead_rows_of, uint64_t weight) {
  int64_t elements = 0;
  for (const auto& piece : shape.pieces) elements += piece.first;
  std::vector<float> values(static_cast<size_t>(elements) + 1);
  std::mt19937 random(3);
  for (size_t i = 0; i < values.size(); ++i) {
    const bool dead = dead_rows_of > 0 && i / 64 % dead_rows_of != 0;
    values[i] = dead ? 0.0f : static_cast<float>(random() % 2001) / 1000 - 1;
  }
  const std::vector<Piece> pieces = PiecesOf(shape, values.data());
  std::vector<std::byte> code(static_cast<size_t>(MaxEncodedBytes(pieces, shape.range)));
  EncodeOptions options;
  options.weight = weight;
  const absl::StatusOr<size_t> bytes =
      Encode(pieces, shape.range, kParams, options, absl::MakeSpan(code));
  FUZZ_CHECK(bytes.ok());
  return {reinterpret_cast<const char*>(code.data()), *bytes};
}

}  // namespace

void TryInput(absl::string_view bytes) {
  Input input(bytes);
  const Shape& shape = Shapes()[input.Byte() % Shapes().size()];
  const bool right_header = input.Byte() % 2 == 1;
  const absl::string_view rest = input.Rest();
  // Of exactly its size, so that AddressSanitizer sees a read past the end.
  std::vector<std::byte> code(rest.size());
  if (!rest.empty()) std::memcpy(code.data(), rest.data(), rest.size());
  const std::vector<Piece> pieces = PiecesOf(shape, nullptr);
  if (right_header && code.size() >= kHeaderBytes) {
    if (absl::StatusOr<Header> given = ReadHeader(code); given.ok()) {
      Header header = ExpectedHeader(pieces, shape.range, kParams);
      header.row_map = given->row_map;
      header.base = given->base;
      header.weight = given->weight;
      WriteHeader(header, absl::MakeSpan(code));
    }
  }
  const absl::StatusOr<ParsedCode> parsed = ParseCode(code, pieces, shape.range, kParams);

  std::vector<float> sum(static_cast<size_t>(SignAccumulator::SumElements(shape.range)));
  SignAccumulator accumulator(pieces, shape.range, kParams, absl::MakeSpan(sum));
  const absl::Status added = accumulator.Add(code);
  FUZZ_CHECK(added.ok() == parsed.ok());
  if (!added.ok()) {
    for (const float value : sum) FUZZ_CHECK(value == 0);
    FUZZ_CHECK(accumulator.total_weight() == 0);
    return;
  }
  if (parsed->header.weight > 0) {
    size_t bit_bytes = 0;
    BlockCursor cursor(shape.range.elements);
    Block block;
    for (size_t k = 0; cursor.Next(&block); ++k) {
      if (parsed->magnitudes[k] == 0) continue;
      const float magnitude = MagnitudeOf(parsed->header.base + parsed->magnitudes[k]);
      FUZZ_CHECK(std::isfinite(magnitude) && magnitude > 0);
      bit_bytes += static_cast<size_t>(block.padded / 8);
    }
    FUZZ_CHECK(parsed->bits + bit_bytes ==
               reinterpret_cast<const uint8_t*>(code.data()) + code.size());
  }
  const absl::StatusOr<uint64_t> weight = WeightOf(code);
  FUZZ_CHECK(weight.ok() && *weight == accumulator.total_weight());
  std::vector<float> mean(static_cast<size_t>(shape.range.elements));
  accumulator.Finish(absl::MakeSpan(mean));
  for (const float value : mean)
    FUZZ_CHECK(std::isfinite(value) && (value != 0 || !std::signbit(value)));
}

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (size_t i = 0; i < Shapes().size(); ++i) {
    for (const char right : {'\0', '\1'}) {
      for (const int dead_rows_of : {0, 2, 30}) {
        seeds.push_back(std::string(1, static_cast<char>(i)) + right +
                        Encoded(Shapes()[i], dead_rows_of, 7));
      }
      seeds.push_back(std::string(1, static_cast<char>(i)) + right + Encoded(Shapes()[i], 0, 0));
    }
  }
  return seeds;
}

}  // namespace geomesh::fuzz
