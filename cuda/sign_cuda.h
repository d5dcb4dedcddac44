// The sign codec and the outer step on a GPU: the same bytes and floats as csrc/codec and
// csrc/train.
//
// Everything is put on the caller's stream, in the order of the calls, and nothing waits for it:
// the caller records an event and knows itself when results are there. All pointers in pieces, sums
// and means are device memory; the device must be current. The caller lends the buffers: one on the
// device and one of equal size on the host, pinned (else copies make the calls wait), both
// untouched until the stream has passed the call. The code's framing is made on the host, by the
// CPU codec's own functions.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "codec/sign.h"
#include "cuda/sign_job.h"
#include "train/outer_step.h"

namespace geomesh::cuda {

// OK if this process can use a GPU; else FailedPrecondition with the reason.
absl::Status Available();

struct Buffers {
  absl::Span<std::byte> host, device;
};

// Encodes a range, in three calls:
//
//   GM_RETURN_IF_ERROR(encoder.Start(buffers, stream));
//   ... the caller waits until the stream has passed Start ...
//   GM_ASSIGN_OR_RETURN(size_t bytes, encoder.Finish(code));       // errors as codec::Encode
//   GM_RETURN_IF_ERROR(encoder.KeepResidual(stream));              // where there is a residual
//
// Arguments as in codec::Encode; they, and what they point to, outlive the encoder's last call.
class SignEncoder {
 public:
  SignEncoder(absl::Span<const codec::Piece> pieces, codec::Range range,
              const codec::SignParams& params, const codec::EncodeOptions& options)
      : job_(pieces, range, params, options), residual_(!options.residual.empty()) {}

  size_t buffer_bytes() const { return job_.buffer_bytes(); }
  absl::Status Start(const Buffers& buffers, cudaStream_t stream);
  absl::StatusOr<size_t> Finish(absl::Span<std::byte> code);
  // Reuses the buffers of Start.
  absl::Status KeepResidual(cudaStream_t stream);

 private:
  EncodeJob job_;
  bool residual_;
  bool started_ = false, finished_ = false;
  Buffers buffers_;
};

// codec::SignAccumulator on a GPU. `sum` has codec::SignAccumulator::SumElements floats.
class SignAccumulator {
 public:
  SignAccumulator(absl::Span<const codec::Piece> pieces, codec::Range range,
                  const codec::SignParams& params, absl::Span<float> sum)
      : job_(pieces, range, params), range_(range), sum_(sum) {}

  size_t buffer_bytes() const { return job_.max_buffer_bytes(); }
  uint64_t total_weight() const { return job_.total_weight(); }

  // Checks the code, then adds it. The first call zeroes the sum. Each call needs buffers of its
  // own until the stream has passed it.
  absl::Status Add(absl::Span<const std::byte> code, const Buffers& buffers, cudaStream_t stream);
  absl::Status Finish(absl::Span<float> mean, const Buffers& buffers, cudaStream_t stream);

 private:
  absl::Status Zero(cudaStream_t stream);

  DecodeJob job_;
  codec::Range range_;
  absl::Span<float> sum_;
  bool zeroed_ = false;
};

// train::OuterStep on a GPU.
absl::Status OuterStep(absl::Span<const train::OuterPiece> pieces, absl::Span<float> momentum,
                       absl::Span<const float> mean, const train::OuterParams& params,
                       cudaStream_t stream);

}  // namespace geomesh::cuda
