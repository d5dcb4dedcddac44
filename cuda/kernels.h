// Launching the kernels: plain functions between nvcc's world and the rest. Each puts one launch on
// the stream and returns what the launch itself reports; none waits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/block.h"
#include "cuda/outer.h"

namespace geomesh::cuda {

// `blocks` is above 0 and at most kMaxGrid.
inline constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;
cudaError_t LaunchEncode(const EncodeArgs& args, int64_t blocks, cudaStream_t stream);
cudaError_t LaunchAdd(const AddArgs& args, int64_t blocks, cudaStream_t stream);
cudaError_t LaunchFinish(const FinishArgs& args, int64_t blocks, cudaStream_t stream);
cudaError_t LaunchKeepResidual(const ResidualArgs& args, int64_t blocks, cudaStream_t stream);

// args.elements is above 0.
cudaError_t LaunchOuter(const OuterArgs& args, cudaStream_t stream);

}  // namespace geomesh::cuda
