// The slow reference, section by section in the order of docs/wire-format.md.
#include "codec_reference.h"

#include <bit>
#include <cmath>

namespace geomesh::codec_reference {
namespace {

uint64_t Mix(uint64_t z) {
  z ^= z >> 30;
  z *= 0xBF58476D1CE4E5B9u;
  z ^= z >> 27;
  z *= 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}
uint64_t Stream(uint64_t seed, uint64_t domain) { return Mix(Mix(seed + domain) + domain); }
uint64_t Word(uint64_t stream, uint64_t index) {
  return Mix(stream + (index + 1) * 0x9E3779B97F4A7C15u);
}
constexpr uint64_t kRotation = 0x726F746174696F6Eu;
constexpr uint64_t kDither = 0x6469746865722020u;

void Negate(std::vector<float>& x, uint64_t stream, uint64_t first_element) {
  for (size_t i = 0; i < x.size(); ++i) {
    const uint64_t e = first_element + i;
    if ((Word(stream, e / 64) >> (e % 64)) & 1) x[i] = -x[i];
  }
}

void Hadamard(std::vector<float>& x) {
  for (size_t h = 1; h < x.size(); h *= 2) {
    for (size_t i = 0; i < x.size(); ++i) {
      if (i & h) continue;
      const float a = x[i], b = x[i + h];
      x[i] = a + b;
      x[i + h] = a - b;
    }
  }
}

float LaneSum(const std::vector<float>& terms) {
  float lane[16] = {};
  for (size_t column = 0; column < 256; ++column) {
    for (size_t i = column; i < terms.size(); i += 256) lane[i % 16] += terms[i];
  }
  for (int half : {8, 4, 2, 1}) {
    for (int k = 0; k < half; ++k) lane[k] += lane[k + half];
  }
  return lane[0];
}

float RotatedMagnitude(const std::vector<float>& z) {
  std::vector<float> absolute, square;
  for (float v : z) {
    absolute.push_back(std::fabs(v));
    square.push_back(v * v);
  }
  const float a = LaneSum(absolute), q = LaneSum(square);
  if (q >= 0x1p-100f) return q / a;
  double a64 = 0, q64 = 0;
  for (float v : z) {
    a64 += std::fabs(static_cast<double>(v));
    q64 += static_cast<double>(v) * static_cast<double>(v);
  }
  return static_cast<float>(q64 / a64);
}

float Value(int64_t v) { return std::bit_cast<float>(static_cast<uint32_t>(v) << 19); }

template <class T>
void Append(std::vector<uint8_t>& out, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) out.push_back(static_cast<uint8_t>(value >> (8 * i)));
}

std::vector<bool> LiveRows(const Slice& slice) {
  std::vector<bool> live;
  int64_t i = 0;
  for (int64_t end : slice.row_ends) {
    bool any = false;
    for (; i < end; ++i) any = any || slice.values[i] != 0;
    live.push_back(any);
  }
  return live;
}

std::vector<bool> ByElement(const std::vector<bool>& live_rows, const Slice& slice) {
  std::vector<bool> live;
  for (size_t r = 0; r < live_rows.size(); ++r) {
    while (static_cast<int64_t>(live.size()) < slice.row_ends[r]) live.push_back(live_rows[r]);
  }
  return live;
}

std::vector<uint8_t> Bitmap(const std::vector<bool>& live) {
  std::vector<uint8_t> out((live.size() + 7) / 8);
  for (size_t r = 0; r < live.size(); ++r) out[r / 8] |= static_cast<uint8_t>(live[r] << (r % 8));
  return out;
}

std::vector<uint8_t> Runs(const std::vector<bool>& live) {
  std::vector<uint8_t> out;
  bool state = true;
  for (size_t r = 0; r < live.size(); state = !state) {
    uint64_t run = 0;
    for (; r < live.size() && live[r] == state; ++r) ++run;
    do {
      out.push_back(static_cast<uint8_t>((run & 127) | (run > 127 ? 128 : 0)));
      run >>= 7;
    } while (run > 0);
  }
  return out;
}

}  // namespace

std::vector<int64_t> Blocks(int64_t n) {
  const int64_t padded = (n + 63) / 64 * 64;
  std::vector<int64_t> blocks(padded / 4096, 4096);
  for (int64_t p = 2048; p >= 64; p /= 2) {
    if (padded & p) blocks.push_back(p);
  }
  return blocks;
}

std::vector<uint8_t> Encode(const Slice& slice, const Settings& settings, uint64_t weight) {
  const uint64_t rotation = Stream(settings.rotation_seed, kRotation);
  const uint64_t dither = Stream(settings.dither_seed, kDither);
  const int64_t n = static_cast<int64_t>(slice.values.size());
  const std::vector<bool> live_rows = LiveRows(slice);
  const std::vector<bool> live = ByElement(live_rows, slice);

  struct BlockCode {
    int64_t v = 0;
    uint64_t word = 0;
    std::vector<uint8_t> bits;
  };
  std::vector<BlockCode> blocks;
  int64_t largest = 0;
  int64_t begin = 0;
  for (int64_t p : weight == 0 ? std::vector<int64_t>{} : Blocks(n)) {
    BlockCode block;
    std::vector<float> z;
    int64_t live_elements = 0;
    bool any = false;
    for (int64_t i = begin; i < begin + p; ++i) {
      z.push_back(i < n ? slice.values[i] : 0.0f);
      any = any || z.back() != 0;
      live_elements += i < n && live[i];
    }
    block.word = Word(dither, (slice.begin + begin) / 64);
    if (any) {
      float m;
      if (settings.rotate) {
        Negate(z, rotation, slice.begin + begin);
        Hadamard(z);
        m = RotatedMagnitude(z);
      } else {
        std::vector<float> absolute;
        for (float v : z) absolute.push_back(std::fabs(v));
        m = LaneSum(absolute) / static_cast<float>(live_elements);
      }
      block.v = (std::bit_cast<uint32_t>(m) + ((block.word >> 32) % (1u << 19))) >> 19;
      block.bits.resize(p / 8);
      for (int64_t i = 0; i < p; ++i) block.bits[i / 8] |= (z[i] < 0) << (i % 8);
    }
    largest = std::max(largest, block.v);
    blocks.push_back(block);
    begin += p;
  }
  const int64_t base = largest == 0 ? 0 : largest - 255;

  int row_map = 0;
  std::vector<uint8_t> rows;
  bool all_live = true;
  for (bool row : live_rows) all_live = all_live && row;
  if (!all_live && weight != 0) {
    const std::vector<uint8_t> bitmap = Bitmap(live_rows), runs = Runs(live_rows);
    row_map = runs.size() < bitmap.size() ? 2 : 1;
    rows = row_map == 2 ? runs : bitmap;
  }
  std::vector<uint8_t> out = {'G', 'S', 1,
                              static_cast<uint8_t>((settings.rotate ? 1 : 0) + 2 * row_map)};
  Append(out, static_cast<uint16_t>(base));
  Append(out, static_cast<uint16_t>(live_rows.size() % 65536));
  Append(out, weight);
  Append(out, static_cast<uint64_t>(n));
  Append(out, static_cast<uint32_t>(slice.begin / 4096));
  Append(out, static_cast<uint32_t>(Mix(~rotation) >> 32));
  out.insert(out.end(), rows.begin(), rows.end());
  std::vector<uint8_t> bits;
  for (const BlockCode& block : blocks) {
    int64_t byte = 0;
    if (block.v > base) {
      byte = block.v - base;
    } else if (block.v > 0) {
      const double left = static_cast<double>(block.word % (1u << 24)) * Value(base + 1);
      byte = left < std::ldexp(static_cast<double>(Value(block.v)), 24) ? 1 : 0;
    }
    if (block.v == 0) byte = 0;
    out.push_back(static_cast<uint8_t>(byte));
    if (byte != 0) bits.insert(bits.end(), block.bits.begin(), block.bits.end());
  }
  out.insert(out.end(), bits.begin(), bits.end());
  return out;
}

std::vector<float> DecodeMean(const std::vector<std::vector<uint8_t>>& codes, const Slice& geometry,
                              const Settings& settings) {
  const int64_t n = geometry.row_ends.empty() ? 0 : geometry.row_ends.back();
  const std::vector<int64_t> blocks = Blocks(n);
  std::vector<float> sum((n + 63) / 64 * 64);
  std::vector<bool> live_rows(geometry.row_ends.size(), false);
  uint64_t total_weight = 0;
  for (const std::vector<uint8_t>& code : codes) {
    uint64_t weight = 0;
    for (int i = 7; i >= 0; --i) weight = weight << 8 | code[8 + i];
    if (weight == 0) continue;
    total_weight += weight;
    const int base = static_cast<int16_t>(code[4] | code[5] << 8);
    const int row_map = code[3] >> 1;
    size_t at = 32;
    std::vector<bool> rows(live_rows.size(), true);
    if (row_map == 1) {
      for (size_t r = 0; r < rows.size(); ++r) rows[r] = code[at + r / 8] >> (r % 8) & 1;
      at += (rows.size() + 7) / 8;
    } else if (row_map == 2) {
      bool state = true;
      for (size_t r = 0; r < rows.size(); state = !state) {
        uint64_t run = 0;
        for (int shift = 0;; shift += 7) {
          run |= static_cast<uint64_t>(code[at] & 127) << shift;
          if (code[at++] < 128) break;
        }
        for (; run > 0; --run) rows[r++] = state;
      }
    }
    for (size_t r = 0; r < rows.size(); ++r) live_rows[r] = live_rows[r] || rows[r];
    const std::vector<bool> live = ByElement(rows, geometry);
    size_t bits = at + blocks.size();
    int64_t begin = 0;
    for (size_t k = 0; k < blocks.size(); ++k) {
      if (code[at + k] != 0) {
        const float s = static_cast<float>(static_cast<double>(weight) *
                                           static_cast<double>(Value(base + code[at + k])));
        for (int64_t i = 0; i < blocks[k]; ++i) {
          const bool counts = settings.rotate || (begin + i < n && live[begin + i]);
          const bool negative = code[bits + i / 8] >> (i % 8) & 1;
          if (counts) sum[begin + i] += negative ? -s : s;
        }
        bits += blocks[k] / 8;
      }
      begin += blocks[k];
    }
  }
  std::vector<float> mean(n, 0.0f);
  if (total_weight == 0) return mean;
  const float c = static_cast<float>(1.0 / static_cast<double>(total_weight));
  int64_t begin = 0;
  for (int64_t p : blocks) {
    std::vector<float> block(sum.begin() + begin, sum.begin() + begin + p);
    if (settings.rotate) {
      for (float& v : block) v *= 1.0f / static_cast<float>(p);
      Hadamard(block);
      Negate(block, Stream(settings.rotation_seed, kRotation), geometry.begin + begin);
    }
    for (int64_t i = 0; i < p && begin + i < n; ++i) mean[begin + i] = block[i] * c + 0.0f;
    begin += p;
  }
  const std::vector<bool> live = ByElement(live_rows, geometry);
  for (int64_t i = 0; i < n; ++i) {
    if (!live[i]) mean[i] = 0.0f;
  }
  return mean;
}

}  // namespace geomesh::codec_reference
