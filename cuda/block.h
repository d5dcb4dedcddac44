// The sign codec's work on one block by one thread block: encode, add, rotate back, keep what was
// lost. docs/wire-format.md says what is computed; the bits are those of csrc/codec.
//
// Each function is a sequence of phases. `threads.Run(phase)` calls phase(t) for every thread t of
// kThreads and returns when all are done: on a GPU the threads run it and meet at a barrier, in
// tests one CPU thread runs it for each t in any order. So within a phase no thread reads what
// another writes (several may write the same constant), and nothing but the block's memory outlives
// a phase.
#pragma once

#include <cstdint>

#include "codec/random.h"
#include "cuda/host_device.h"
#include "cuda/range_view.h"

namespace geomesh::cuda {

inline constexpr int kNormLanes = 16;
inline constexpr int kNormColumn = 256;

// A thread block's shared memory. Entry e lies at Slot(e): one unused slot after 16 keeps threads
// that walk the entries 1, 16 or 256 apart out of each other's banks.
struct BlockMemory {
  float z[4096 + 4096 / 16];
  float l1[kNormLanes], l2[kNormLanes];
  int piece;     // of the block's first element
  int any_live;  // whether some value is not zero
};
GEOMESH_HD inline int Slot(int e) { return e + e / 16; }

// What happened in the first block whose norms are not finite, as one number: the smallest wins.
// The value itself is in that block's magnitude.
inline constexpr unsigned long long kNoFailure = ~0ull;
GEOMESH_HD inline unsigned long long Failure(int64_t element, int what) {
  return static_cast<unsigned long long>(element) * 4 + static_cast<unsigned>(what);
}

struct EncodeArgs {
  RangeView range;
  codec::WordStream rotation;
  bool rotate;
  const float* residual;  // or null
  // Results. Signs of the block that begins at element b are at b / 8; those of zero blocks are not
  // written. Rows with a value other than 0 get a 1; the others are as before.
  uint8_t* bits;
  float* magnitudes;  // m, or in plain codes the sum of |x|; -1: a block of zeros
  uint8_t* live_rows;
  unsigned long long* failure;
};

struct AddArgs {
  RangeView range;
  const float* scales;         // of each block: weight * magnitude; 0: absent
  const int64_t* bit_offsets;  // of each block's signs in `bits`
  const uint8_t* bits;
  const uint8_t* live_rows;  // plain codes with dead rows; else null
  float* sum;
};

struct FinishArgs {
  RangeView range;
  codec::WordStream rotation;
  bool rotate;
  float scale;
  const float* sum;
  const uint8_t* live_rows;  // null: all are live
  float* mean;
};

struct ResidualArgs {
  EncodeArgs encoded;       // as it was encoded
  const float* magnitudes;  // of the finished code; 0: absent
  float decay;
  float* residual;
};

GEOMESH_HD inline bool BitAt(const uint8_t* bits, int i) { return (bits[i / 8] >> (i % 8)) & 1; }

// Whether the rotation negates entry e of the block.
GEOMESH_HD inline bool Negated(const codec::WordStream& rotation, uint64_t first_word, int e) {
  return (rotation.Word(first_word + static_cast<uint64_t>(e / 64)) >> (e % 64)) & 1;
}

GEOMESH_HD inline uint64_t FirstWord(const RangeView& range, const BlockView& block) {
  return range.first_word + static_cast<uint64_t>(block.begin / 64);
}

// kStrides strides at once, from `stride` on, in registers. The order is the same as one by one.
template <int kStrides>
GEOMESH_HD inline void Butterflies(float* z, int padded, int stride, int t) {
  constexpr int kEntries = 1 << kStrides;
  for (int task = t; task < padded / kEntries; task += kThreads) {
    const int low = task & (stride - 1);
    const int base = (task - low) * kEntries + low;
    float r[kEntries];
    GEOMESH_UNROLL
    for (int i = 0; i < kEntries; ++i) r[i] = z[Slot(base + i * stride)];
    GEOMESH_UNROLL
    for (int half = 1; half < kEntries; half *= 2) {
      GEOMESH_UNROLL
      for (int i = 0; i < kEntries; ++i) {
        if ((i & half) != 0) continue;
        const float a = r[i], b = r[i + half];
        r[i] = a + b;
        r[i + half] = a - b;
      }
    }
    GEOMESH_UNROLL
    for (int i = 0; i < kEntries; ++i) z[Slot(base + i * stride)] = r[i];
  }
}

// The Walsh-Hadamard transform of memory.z, strides rising.
template <class Threads>
GEOMESH_HD void Transform(BlockMemory& memory, int padded, const Threads& threads) {
  int stride = 1;
  for (; stride * 16 <= padded; stride *= 16) {
    threads.Run([&](int t) { Butterflies<4>(memory.z, padded, stride, t); });
  }
  if (stride * 8 == padded) {
    threads.Run([&](int t) { Butterflies<3>(memory.z, padded, stride, t); });
  } else if (stride * 4 == padded) {
    threads.Run([&](int t) { Butterflies<2>(memory.z, padded, stride, t); });
  } else if (stride * 2 == padded) {
    threads.Run([&](int t) { Butterflies<1>(memory.z, padded, stride, t); });
  }
}

template <class Threads>
GEOMESH_HD void FindBlock(const RangeView& range, const BlockView& block, BlockMemory& memory,
                          const Threads& threads) {
  threads.Run([&](int t) {
    if (t != 0) return;
    memory.piece = FindPiece(range, block.begin);
    memory.any_live = 0;
  });
}

// Why a block's norms are not finite: its first bad element, or else its largest. One thread.
GEOMESH_HD inline void Fail(const EncodeArgs& args, const BlockView& block, int first_piece,
                            float* magnitude) {
  ElementCursor cursor(args.range, first_piece);
  int64_t found = block.begin;
  int what = 2;  // codec::BadElement::kTooLarge
  float value = 0;
  for (int i = 0; i < block.elements; ++i) {
    const int64_t element = block.begin + i;
    cursor.Seek(element);
    const float x = cursor.Value();
    const bool bad_value = !IsFinite(x);
    if (bad_value || (args.residual != nullptr && !IsFinite(args.residual[element]))) {
      found = element;
      what = bad_value ? 0 : 1;
      value = bad_value ? x : args.residual[element];
      break;
    }
    if (i == 0 || Magnitude(x) > Magnitude(value)) {
      found = element;
      value = x;
    }
  }
  *magnitude = value;
  KeepSmallest(Failure(found, what), args.failure);
}

template <class Threads>
GEOMESH_HD void EncodeBlock(const EncodeArgs& args, int64_t k, BlockMemory& memory,
                            const Threads& threads) {
  const BlockView block = BlockAt(args.range.elements, k);
  const int padded = block.padded;
  const uint64_t first_word = FirstWord(args.range, block);
  FindBlock(args.range, block, memory, threads);

  threads.Run([&](int t) {
    ElementCursor cursor(args.range, memory.piece);
    for (int e = t; e < padded; e += kThreads) {
      float value = 0;
      if (e < block.elements) {
        cursor.Seek(block.begin + e);
        value = cursor.Value();
        if (args.residual != nullptr) value += args.residual[block.begin + e];
        if (value != 0) {  // true for a NaN
          args.live_rows[cursor.Row()] = 1;
          memory.any_live = 1;
        }
      }
      memory.z[Slot(e)] =
          args.rotate ? NegateIf(Negated(args.rotation, first_word, e), value) : value;
    }
  });
  if (memory.any_live == 0) {
    threads.Run([&](int t) {
      if (t == 0) args.magnitudes[k] = -1;
    });
    return;
  }
  if (args.rotate) Transform(memory, padded, threads);

  threads.Run([&](int t) {
    uint8_t* const bits = args.bits + block.begin / 8;
    for (int byte = t; byte < padded / 8; byte += kThreads) {
      unsigned packed = 0;
      for (int i = 0; i < 8; ++i) {
        packed |= static_cast<unsigned>(memory.z[Slot(8 * byte + i)] < 0) << i;
      }
      bits[byte] = static_cast<uint8_t>(packed);
    }
    // The order of these sums is the wire format's: one lane, one thread.
    if (t >= 2 * kNormLanes) return;
    const int lane = t % kNormLanes;
    const bool squares = t >= kNormLanes;
    float norm = 0;
    for (int column = lane; column < kNormColumn && column < padded; column += kNormLanes) {
      for (int e = column; e < padded; e += kNormColumn) {
        const float z = memory.z[Slot(e)];
        norm += squares ? Product(z, z) : Magnitude(z);
      }
    }
    (squares ? memory.l2 : memory.l1)[lane] = norm;
  });
  threads.Run([&](int t) {
    if (t != 0) return;
    for (int half = kNormLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) {
        memory.l1[lane] += memory.l1[lane + half];
        memory.l2[lane] += memory.l2[lane + half];
      }
    }
    const float l1 = memory.l1[0], l2 = memory.l2[0];
    if (!IsFinite(l1) || !IsFinite(l2)) {
      Fail(args, block, memory.piece, &args.magnitudes[k]);
    } else if (!args.rotate) {
      args.magnitudes[k] = l1;
    } else if (l2 < 0x1p-100f) {  // codec::kSafeSquaredNorm: squares may have lost digits
      double sum = 0, sum_of_squares = 0;
      for (int e = 0; e < padded; ++e) {
        const double z = memory.z[Slot(e)];
        sum += z < 0 ? -z : z;
        sum_of_squares += z * z;  // the product is exact, so fused or not is the same
      }
      args.magnitudes[k] = static_cast<float>(sum_of_squares / sum);
    } else {
      args.magnitudes[k] = l2 / l1;
    }
  });
}

template <class Threads>
GEOMESH_HD void AddBlock(const AddArgs& args, int64_t k, BlockMemory& memory,
                         const Threads& threads) {
  const float scale = args.scales[k];
  if (scale == 0) return;
  const BlockView block = BlockAt(args.range.elements, k);
  const uint8_t* const bits = args.bits + args.bit_offsets[k];
  float* const sum = args.sum + block.begin;
  if (args.live_rows == nullptr) {
    threads.Run([&](int t) {
      for (int e = t; e < block.padded; e += kThreads) sum[e] += BitAt(bits, e) ? -scale : scale;
    });
    return;
  }
  FindBlock(args.range, block, memory, threads);
  threads.Run([&](int t) {
    ElementCursor cursor(args.range, memory.piece);
    for (int e = t; e < block.elements; e += kThreads) {
      cursor.Seek(block.begin + e);
      if (args.live_rows[cursor.Row()]) sum[e] += BitAt(bits, e) ? -scale : scale;
    }
  });
}

template <class Threads>
GEOMESH_HD void FinishBlock(const FinishArgs& args, int64_t k, BlockMemory& memory,
                            const Threads& threads) {
  const BlockView block = BlockAt(args.range.elements, k);
  const uint64_t first_word = FirstWord(args.range, block);
  if (args.live_rows != nullptr) FindBlock(args.range, block, memory, threads);
  if (args.rotate) {
    const float inverse = 1.0f / static_cast<float>(block.padded);
    threads.Run([&](int t) {
      for (int e = t; e < block.padded; e += kThreads) {
        memory.z[Slot(e)] = Product(args.sum[block.begin + e], inverse);
      }
    });
    Transform(memory, block.padded, threads);
  }
  threads.Run([&](int t) {
    ElementCursor cursor(args.range, args.live_rows == nullptr ? 0 : memory.piece);
    for (int e = t; e < block.elements; e += kThreads) {
      float value = args.rotate ? NegateIf(Negated(args.rotation, first_word, e), memory.z[Slot(e)])
                                : args.sum[block.begin + e];
      value = Product(value, args.scale) + 0.0f;  // -0 + 0 is +0
      if (args.live_rows != nullptr) {
        cursor.Seek(block.begin + e);
        if (!args.live_rows[cursor.Row()]) value = 0;
      }
      args.mean[block.begin + e] = value;
    }
  });
}

// residual = (value - what the code says of it) * decay.
template <class Threads>
GEOMESH_HD void KeepResidualBlock(const ResidualArgs& args, int64_t k, BlockMemory& memory,
                                  const Threads& threads) {
  const EncodeArgs& encoded = args.encoded;
  const BlockView block = BlockAt(encoded.range.elements, k);
  const uint64_t first_word = FirstWord(encoded.range, block);
  const uint8_t* const bits = encoded.bits + block.begin / 8;
  const float m = args.magnitudes[k];
  const bool transformed = encoded.rotate && m != 0;
  FindBlock(encoded.range, block, memory, threads);
  if (transformed) {
    const float entry = Product(m, 1.0f / static_cast<float>(block.padded));
    threads.Run([&](int t) {
      for (int e = t; e < block.padded; e += kThreads) {
        memory.z[Slot(e)] = BitAt(bits, e) ? -entry : entry;
      }
    });
    Transform(memory, block.padded, threads);
  }
  threads.Run([&](int t) {
    ElementCursor cursor(encoded.range, memory.piece);
    for (int e = t; e < block.elements; e += kThreads) {
      const int64_t element = block.begin + e;
      cursor.Seek(element);
      const float value = cursor.Value() + args.residual[element];
      float estimate = 0;
      if (transformed) {
        estimate = NegateIf(Negated(encoded.rotation, first_word, e), memory.z[Slot(e)]) + 0.0f;
      } else if (m != 0) {
        estimate = BitAt(bits, e) ? -m : m;
      }
      args.residual[element] =
          encoded.live_rows[cursor.Row()] ? Product(value - estimate, args.decay) : 0.0f;
    }
  });
}

}  // namespace geomesh::cuda
