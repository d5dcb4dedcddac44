// Copies and launches of the codec's jobs, with errors in absl's terms.
#include "cuda/sign_cuda.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "codec/pieces.h"
#include "cuda/kernels.h"

namespace geomesh::cuda {
namespace {

absl::Status ToStatus(cudaError_t error, absl::string_view what) {
  switch (error) {
    case cudaSuccess:
      return absl::OkStatus();
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
      return absl::FailedPreconditionError(
          absl::StrCat("cuda: ", what, " failed, no GPU can be used: ", cudaGetErrorString(error),
                       " (", cudaGetErrorName(error),
                       "). Use tensors on the CPU, or install a recent NVIDIA driver and check "
                       "with nvidia-smi"));
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return absl::FailedPreconditionError(absl::StrCat(
          "cuda: ", what, " has no code for this GPU: ", cudaGetErrorString(error), " (",
          cudaGetErrorName(error),
          "). Build torch_geomesh with -DGEOMESH_CUDA_ARCHITECTURES=<its compute capability>"));
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(absl::StrCat("cuda: no memory for ", what));
    default:
      return absl::InternalError(absl::StrCat(
          "cuda: ", what, " failed: ", cudaGetErrorString(error), " (", cudaGetErrorName(error),
          "). It may stem from an earlier kernel; CUDA_LAUNCH_BLOCKING=1 shows which"));
  }
}

absl::Status CheckBuffers(const Buffers& buffers, size_t needed) {
  if (buffers.host.size() >= needed && buffers.device.size() >= needed) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "sign codec: buffers of %d bytes on the host and %d on the GPU, %d are needed",
      buffers.host.size(), buffers.device.size(), needed));
}

absl::Status CheckBlocks(int64_t blocks) {
  if (blocks <= kMaxGrid) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "sign codec: a range of %d blocks is more than one launch can do (%d)", blocks, kMaxGrid));
}

absl::Status Up(const Buffers& buffers, Part part, absl::string_view what, cudaStream_t stream) {
  if (part.bytes == 0) return absl::OkStatus();
  return ToStatus(
      cudaMemcpyAsync(buffers.device.data() + part.offset, buffers.host.data() + part.offset,
                      part.bytes, cudaMemcpyHostToDevice, stream),
      what);
}

absl::Status Fill(const Buffers& buffers, Part part, int byte, absl::string_view what,
                  cudaStream_t stream) {
  return ToStatus(cudaMemsetAsync(buffers.device.data() + part.offset, byte, part.bytes, stream),
                  what);
}

}  // namespace

absl::Status Available() {
  int devices = 0;
  GM_RETURN_IF_ERROR(ToStatus(cudaGetDeviceCount(&devices), "a look for GPUs"));
  return devices > 0 ? absl::OkStatus() : ToStatus(cudaErrorNoDevice, "a look for GPUs");
}

absl::Status SignEncoder::Start(const Buffers& buffers, cudaStream_t stream) {
  GM_RETURN_IF_ERROR(job_.Check());
  GM_RETURN_IF_ERROR(CheckBlocks(job_.blocks()));
  GM_RETURN_IF_ERROR(CheckBuffers(buffers, job_.buffer_bytes()));
  buffers_ = buffers;
  started_ = true;
  if (job_.blocks() == 0) return absl::OkStatus();
  job_.Fill(buffers.host.data());
  GM_RETURN_IF_ERROR(Up(buffers, job_.pieces(), "the copy of the list of pieces", stream));
  // All ones is kNoFailure.
  GM_RETURN_IF_ERROR(Fill(buffers, job_.failure(), 0xFF, "preparing an encode", stream));
  GM_RETURN_IF_ERROR(Fill(buffers, job_.live_rows(), 0, "preparing an encode", stream));
  GM_RETURN_IF_ERROR(ToStatus(LaunchEncode(job_.Args(buffers.device.data()), job_.blocks(), stream),
                              "the sign encoder"));
  const Part results = job_.results();
  return ToStatus(
      cudaMemcpyAsync(buffers.host.data() + results.offset, buffers.device.data() + results.offset,
                      results.bytes, cudaMemcpyDeviceToHost, stream),
      "the copy of a sign code to the host");
}

absl::StatusOr<size_t> SignEncoder::Finish(absl::Span<std::byte> code) {
  if (!started_) return absl::FailedPreconditionError("sign codec: Finish came before Start");
  GM_ASSIGN_OR_RETURN(const size_t bytes, job_.Finish(buffers_.host.data(), code));
  finished_ = true;
  return bytes;
}

absl::Status SignEncoder::KeepResidual(cudaStream_t stream) {
  if (!finished_) {
    return absl::FailedPreconditionError(
        "sign codec: KeepResidual came before a Finish that was OK");
  }
  if (!residual_ || job_.blocks() == 0) return absl::OkStatus();
  const Part magnitudes = job_.magnitudes();
  std::copy(job_.coded_magnitudes().begin(), job_.coded_magnitudes().end(),
            reinterpret_cast<float*>(buffers_.host.data() + magnitudes.offset));
  GM_RETURN_IF_ERROR(Up(buffers_, magnitudes, "the copy of a code's magnitudes", stream));
  return ToStatus(LaunchKeepResidual(job_.Residual(buffers_.device.data()), job_.blocks(), stream),
                  "the residual of a sign code");
}

absl::Status SignAccumulator::Zero(cudaStream_t stream) {
  const auto needed = static_cast<size_t>(codec::SignAccumulator::SumElements(range_));
  if (sum_.size() < needed) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "sign codec: the sum has room for %d floats, %d are needed", sum_.size(), needed));
  }
  if (!zeroed_ && needed > 0) {
    GM_RETURN_IF_ERROR(ToStatus(cudaMemsetAsync(sum_.data(), 0, needed * sizeof(float), stream),
                                "zeroing a sum of sign codes"));
  }
  zeroed_ = true;
  return absl::OkStatus();
}

absl::Status SignAccumulator::Add(absl::Span<const std::byte> code, const Buffers& buffers,
                                  cudaStream_t stream) {
  GM_RETURN_IF_ERROR(CheckBuffers(buffers, job_.max_buffer_bytes()));
  GM_RETURN_IF_ERROR(CheckBlocks(job_.blocks()));
  GM_ASSIGN_OR_RETURN(const DecodeJob::Addition addition, job_.Add(code, buffers.host));
  GM_RETURN_IF_ERROR(Zero(stream));
  if (!addition.any) return absl::OkStatus();
  GM_RETURN_IF_ERROR(
      Up(buffers, {0, addition.buffer_bytes}, "the copy of a sign code to the GPU", stream));
  return ToStatus(
      LaunchAdd(job_.Args(addition, buffers.device.data(), sum_.data()), job_.blocks(), stream),
      "adding a sign code");
}

absl::Status SignAccumulator::Finish(absl::Span<float> mean, const Buffers& buffers,
                                     cudaStream_t stream) {
  const auto elements = static_cast<size_t>(range_.elements);
  if (mean.size() < elements) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "sign codec: the mean has room for %d floats, %d are needed", mean.size(), elements));
  }
  if (elements == 0) return absl::OkStatus();
  if (job_.total_weight() == 0) {
    return ToStatus(cudaMemsetAsync(mean.data(), 0, elements * sizeof(float), stream),
                    "zeroing a mean of sign codes");
  }
  GM_RETURN_IF_ERROR(CheckBuffers(buffers, job_.max_buffer_bytes()));
  const size_t bytes = job_.FillFinish(buffers.host.data());
  GM_RETURN_IF_ERROR(Up(buffers, {0, bytes}, "the copy of the list of rows", stream));
  return ToStatus(LaunchFinish(job_.Finish(buffers.device.data(), sum_.data(), mean.data()),
                               job_.blocks(), stream),
                  "the mean of sign codes");
}

absl::Status OuterStep(absl::Span<const train::OuterPiece> pieces, absl::Span<float> momentum,
                       absl::Span<const float> mean, const train::OuterParams& params,
                       cudaStream_t stream) {
  int64_t begin = 0;
  for (const train::OuterPiece& piece : pieces) {
    if (piece.elements > 0) {
      GM_RETURN_IF_ERROR(ToStatus(LaunchOuter({.anchor = piece.anchor,
                                               .current = piece.current,
                                               .dtype = piece.dtype,
                                               .elements = piece.elements,
                                               .momentum = momentum.data() + begin,
                                               .mean = mean.data() + begin,
                                               .lr = params.lr,
                                               .mu = params.momentum,
                                               .nesterov = params.nesterov},
                                              stream),
                                  "the outer step"));
    }
    begin += piece.elements;
  }
  return absl::OkStatus();
}

}  // namespace geomesh::cuda
