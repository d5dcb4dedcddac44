// The kernels: one thread block for each block of the codec, and a grid of threads for the outer
// step. All arithmetic is in block.h and outer.h.
#include "cuda/kernels.h"

namespace geomesh::cuda {
namespace {

// The threads of a thread block, as block.h wants them.
struct DeviceThreads {
  template <class Phase>
  __device__ void Run(const Phase& phase) const {
    phase(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
};

__global__ void __launch_bounds__(kThreads) EncodeKernel(EncodeArgs args) {
  __shared__ BlockMemory memory;
  EncodeBlock(args, blockIdx.x, memory, DeviceThreads());
}

__global__ void __launch_bounds__(kThreads) AddKernel(AddArgs args) {
  __shared__ BlockMemory memory;
  AddBlock(args, blockIdx.x, memory, DeviceThreads());
}

__global__ void __launch_bounds__(kThreads) FinishKernel(FinishArgs args) {
  __shared__ BlockMemory memory;
  FinishBlock(args, blockIdx.x, memory, DeviceThreads());
}

__global__ void __launch_bounds__(kThreads) KeepResidualKernel(ResidualArgs args) {
  __shared__ BlockMemory memory;
  KeepResidualBlock(args, blockIdx.x, memory, DeviceThreads());
}

__global__ void __launch_bounds__(kThreads) OuterKernel(OuterArgs args) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < args.elements;
       i += step) {
    OuterElement(args, i);
  }
}

unsigned Grid(int64_t blocks) { return static_cast<unsigned>(blocks); }

}  // namespace

cudaError_t LaunchEncode(const EncodeArgs& args, int64_t blocks, cudaStream_t stream) {
  EncodeKernel<<<Grid(blocks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchAdd(const AddArgs& args, int64_t blocks, cudaStream_t stream) {
  AddKernel<<<Grid(blocks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchFinish(const FinishArgs& args, int64_t blocks, cudaStream_t stream) {
  FinishKernel<<<Grid(blocks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchKeepResidual(const ResidualArgs& args, int64_t blocks, cudaStream_t stream) {
  KeepResidualKernel<<<Grid(blocks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchOuter(const OuterArgs& args, cudaStream_t stream) {
  // Enough threads for any GPU; more elements are taken in turns.
  const int64_t blocks = (args.elements + kThreads - 1) / kThreads;
  OuterKernel<<<Grid(blocks < 65536 ? blocks : 65536), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace geomesh::cuda
