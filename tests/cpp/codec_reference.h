// An independent, slow sign codec, written from docs/wire-format.md alone: what the tests compare
// the library with. Works on values in a plain vector; knows nothing of pieces.
#pragma once

#include <cstdint>
#include <vector>

namespace geomesh::codec_reference {

struct Slice {
  std::vector<float> values;
  std::vector<int64_t> row_ends;  // in the slice, ascending; the last is values.size()
  uint64_t begin = 0;             // in the vector
};

struct Settings {
  bool rotate = true;
  uint64_t rotation_seed = 0;
  uint64_t dither_seed = 0;
};

std::vector<uint8_t> Encode(const Slice& slice, const Settings& settings, uint64_t weight);

// The weighted mean of valid codes of slices with this geometry (its values are not read).
std::vector<float> DecodeMean(const std::vector<std::vector<uint8_t>>& codes, const Slice& geometry,
                              const Settings& settings);

// Sizes of the blocks of n elements.
std::vector<int64_t> Blocks(int64_t n);

}  // namespace geomesh::codec_reference
