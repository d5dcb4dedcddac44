// What the host does around the codec's kernels: the tables they read, the layout of the memory
// that is copied between host and device, and the finished code. Knows no CUDA call, so that tests
// run the kernels' functions on the CPU from the same tables.
//
// A job's buffer has one layout on host and device. Each *Buffer function makes the arguments of a
// kernel from the buffer's address on the side that will run it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "codec/assemble.h"
#include "codec/code_format.h"
#include "codec/pieces.h"
#include "codec/sign.h"
#include "cuda/block.h"

namespace geomesh::cuda {

// A run of bytes in a buffer.
struct Part {
  size_t offset = 0, bytes = 0;
};

// Pieces as kernels see them: those that overlap the range.
std::vector<PieceView> ViewPieces(absl::Span<const codec::Piece> pieces, codec::Range range);

// Encoding a range. Parts lie in the order of their members: `pieces` goes up, `failure` to
// `signs` come down.
class EncodeJob {
 public:
  EncodeJob(absl::Span<const codec::Piece> pieces, codec::Range range,
            const codec::SignParams& params, const codec::EncodeOptions& options);

  // What codec::Encode would refuse, apart from what only the values show.
  absl::Status Check() const;

  int64_t blocks() const { return blocks_; }  // 0: there is nothing to launch
  Part pieces() const { return pieces_part_; }
  Part failure() const { return failure_; }
  Part live_rows() const { return live_rows_; }
  Part magnitudes() const { return magnitudes_; }
  // From failure() to the end.
  Part results() const { return {failure_.offset, bytes_ - failure_.offset}; }
  size_t buffer_bytes() const { return bytes_; }

  // Writes what goes up.
  void Fill(std::byte* buffer) const;
  EncodeArgs Args(std::byte* buffer) const;
  // For the residual, with coded_magnitudes() in the part that held the encoder's.
  ResidualArgs Residual(std::byte* buffer) const;

  // Makes the code from results that have come down. `code` as in codec::Encode.
  absl::StatusOr<size_t> Finish(const std::byte* buffer, absl::Span<std::byte> code);

  // The magnitude of each block as the finished code has it, 0 where it is absent.
  absl::Span<const float> coded_magnitudes() const { return coded_magnitudes_; }

 private:
  absl::Span<const codec::Piece> vector_;
  codec::Range range_;
  codec::SignParams params_;
  codec::EncodeOptions options_;
  std::vector<PieceView> pieces_;
  int64_t blocks_, rows_;
  Part pieces_part_, failure_, live_rows_, magnitudes_, signs_;
  size_t bytes_ = 0;
  std::vector<float> coded_magnitudes_;
};

// Adding codes of a range and rotating back: codec::SignAccumulator's bookkeeping.
class DecodeJob {
 public:
  DecodeJob(absl::Span<const codec::Piece> pieces, codec::Range range,
            const codec::SignParams& params);

  // Bytes that any of this range's buffers needs at most.
  size_t max_buffer_bytes() const { return max_bytes_; }
  int64_t blocks() const { return blocks_; }
  uint64_t total_weight() const { return total_weight_; }

  struct Addition {
    bool any = false;  // false: the code adds nothing
    size_t buffer_bytes = 0;
    Part scales, bit_offsets, live_rows, bits;  // live_rows is empty where it is not looked at
  };
  // Checks the code as codec::SignAccumulator::Add does and writes what goes up.
  absl::StatusOr<Addition> Add(absl::Span<const std::byte> code, absl::Span<std::byte> buffer);
  AddArgs Args(const Addition& addition, std::byte* buffer, float* sum) const;

  // Writes what the last step needs; the bytes of it, 0 if it needs nothing.
  size_t FillFinish(std::byte* buffer) const;
  FinishArgs Finish(std::byte* buffer, const float* sum, float* mean) const;

 private:
  RangeView View(std::byte* buffer) const;

  absl::Span<const codec::Piece> vector_;
  codec::Range range_;
  codec::SignParams params_;
  std::vector<PieceView> pieces_;
  int64_t blocks_, rows_;
  size_t max_bytes_ = 0;
  uint64_t total_weight_ = 0;
  codec::RowBits live_rows_;
  bool all_rows_live_ = false;
};

}  // namespace geomesh::cuda
