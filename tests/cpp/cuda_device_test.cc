// The kernels on a GPU against csrc/codec and csrc/train; on a machine without one, that the
// library says so in a status and nothing crashes.
#include <cuda_runtime_api.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/status_macros.h"
#include "cuda/sign_cuda.h"
#include "cuda_codec_cases.h"
#include "gmock/gmock.h"

namespace geomesh::cuda {
namespace {

using ::testing::HasSubstr;

void Must(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

// Device memory that begins as a copy of host memory, or dirty.
class DeviceMemory {
 public:
  DeviceMemory(const void* from, size_t bytes, cudaStream_t stream) : DeviceMemory(bytes, stream) {
    if (bytes > 0) Must(cudaMemcpyAsync(data_, from, bytes, cudaMemcpyHostToDevice, stream));
  }
  DeviceMemory(size_t bytes, cudaStream_t stream) : bytes_(bytes) {
    Must(cudaMalloc(&data_, bytes + 1));  // never null
    Must(cudaMemsetAsync(data_, 0xA5, bytes + 1, stream));
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;

  void CopyTo(void* to, cudaStream_t stream) const {
    if (bytes_ == 0) return;
    Must(cudaMemcpyAsync(to, data_, bytes_, cudaMemcpyDeviceToHost, stream));
    Must(cudaStreamSynchronize(stream));
  }
  template <class T>
  T* As() const {
    return static_cast<T*>(data_);
  }
  absl::Span<std::byte> bytes() const { return {As<std::byte>(), bytes_}; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// A pair of buffers, the host's pinned.
class PinnedAndDevice {
 public:
  PinnedAndDevice(size_t bytes, cudaStream_t stream) : bytes_(bytes), device_(bytes, stream) {
    Must(cudaMallocHost(&host_, bytes + 1));
  }
  ~PinnedAndDevice() { cudaFreeHost(host_); }
  PinnedAndDevice(const PinnedAndDevice&) = delete;
  Buffers buffers() const {
    return {.host = {static_cast<std::byte*>(host_), bytes_}, .device = device_.bytes()};
  }

 private:
  size_t bytes_;
  void* host_ = nullptr;
  DeviceMemory device_;
};

class DeviceProcessor : public cuda_cases::Processor {
 public:
  DeviceProcessor() { Must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~DeviceProcessor() override { cudaStreamDestroy(stream_); }

  absl::StatusOr<std::vector<std::byte>> Encode(absl::Span<const codec::Piece> pieces,
                                                codec::Range range, const codec::SignParams& params,
                                                const codec::EncodeOptions& options) override {
    Memory memory;
    const std::vector<codec::Piece> on_device = ToDevice(memory, pieces);
    codec::EncodeOptions own = options;
    const DeviceMemory residual(options.residual.data(), options.residual.size() * sizeof(float),
                                stream_);
    own.residual = {residual.As<float>(), options.residual.size()};
    SignEncoder encoder(on_device, range, params, own);
    const PinnedAndDevice buffers(encoder.buffer_bytes(), stream_);
    GM_RETURN_IF_ERROR(encoder.Start(buffers.buffers(), stream_));
    Must(cudaStreamSynchronize(stream_));
    std::vector<std::byte> code(static_cast<size_t>(codec::MaxEncodedBytes(pieces, range)));
    GM_ASSIGN_OR_RETURN(const size_t bytes, encoder.Finish(absl::MakeSpan(code)));
    code.resize(bytes);
    GM_RETURN_IF_ERROR(encoder.KeepResidual(stream_));
    residual.CopyTo(options.residual.data(), stream_);
    Must(cudaStreamSynchronize(stream_));
    return code;
  }

  std::vector<float> Magnitudes(absl::Span<const codec::Piece> pieces, codec::Range range,
                                const codec::SignParams& params) override {
    Memory memory;
    const std::vector<codec::Piece> on_device = ToDevice(memory, pieces);
    SignEncoder encoder(on_device, range, params, {});
    const PinnedAndDevice pair(encoder.buffer_bytes(), stream_);
    const absl::Status status = encoder.Start(pair.buffers(), stream_);
    EXPECT_TRUE(status.ok()) << status;
    Must(cudaStreamSynchronize(stream_));
    const EncodeJob job(on_device, range, params, {});  // the same layout
    std::vector<float> magnitudes(static_cast<size_t>(job.blocks()));
    std::memcpy(magnitudes.data(), pair.buffers().host.data() + job.magnitudes().offset,
                job.magnitudes().bytes);
    return magnitudes;
  }

  absl::StatusOr<std::vector<float>> Mean(
      absl::Span<const codec::Piece> pieces, codec::Range range, const codec::SignParams& params,
      const std::vector<std::vector<std::byte>>& codes) override {
    const auto elements = static_cast<size_t>(codec::SignAccumulator::SumElements(range));
    const DeviceMemory sum(elements * sizeof(float), stream_);
    SignAccumulator accumulator(pieces, range, params, {sum.As<float>(), elements});
    std::vector<std::unique_ptr<PinnedAndDevice>> kept;  // nothing waits between the calls
    const auto buffers = [&] {
      kept.push_back(std::make_unique<PinnedAndDevice>(accumulator.buffer_bytes(), stream_));
      return kept.back()->buffers();
    };
    for (const auto& code : codes) {
      GM_RETURN_IF_ERROR(accumulator.Add(code, buffers(), stream_));
    }
    std::vector<float> mean(static_cast<size_t>(range.elements));
    const DeviceMemory on_device(mean.size() * sizeof(float), stream_);
    GM_RETURN_IF_ERROR(
        accumulator.Finish({on_device.As<float>(), mean.size()}, buffers(), stream_));
    on_device.CopyTo(mean.data(), stream_);
    Must(cudaStreamSynchronize(stream_));
    return mean;
  }

  absl::Status OuterStep(absl::Span<const train::OuterPiece> pieces, absl::Span<float> momentum,
                         absl::Span<const float> mean, const train::OuterParams& params) override {
    Memory memory;
    const DeviceMemory m(momentum.data(), momentum.size() * sizeof(float), stream_);
    const DeviceMemory g(mean.data(), mean.size() * sizeof(float), stream_);
    std::vector<train::OuterPiece> on_device(pieces.begin(), pieces.end());
    for (train::OuterPiece& piece : on_device) {
      const auto n = static_cast<size_t>(piece.elements);
      piece.anchor = static_cast<float*>(Keep(memory, piece.anchor, n * sizeof(float)));
      piece.current = Keep(memory, piece.current, n * SizeOf(piece.dtype));
    }
    GM_RETURN_IF_ERROR(cuda::OuterStep(on_device, {m.As<float>(), momentum.size()},
                                       {g.As<float>(), mean.size()}, params, stream_));
    for (size_t i = 0; i < pieces.size(); ++i) {
      memory[2 * i]->CopyTo(pieces[i].anchor, stream_);
      memory[2 * i + 1]->CopyTo(pieces[i].current, stream_);
    }
    m.CopyTo(momentum.data(), stream_);
    return absl::OkStatus();
  }

 private:
  using Memory = std::vector<std::unique_ptr<DeviceMemory>>;

  std::vector<codec::Piece> ToDevice(Memory& memory, absl::Span<const codec::Piece> pieces) {
    std::vector<codec::Piece> on_device(pieces.begin(), pieces.end());
    for (codec::Piece& piece : on_device) {
      if (piece.elements == 0) continue;
      const auto n = static_cast<size_t>(piece.elements);
      piece.current = Keep(memory, piece.current, n * SizeOf(piece.dtype));
      if (piece.anchor != nullptr) {
        piece.anchor = static_cast<float*>(Keep(memory, piece.anchor, n * sizeof(float)));
      }
    }
    return on_device;
  }

  void* Keep(Memory& memory, const void* from, size_t bytes) {
    memory.push_back(std::make_unique<DeviceMemory>(from, bytes, stream_));
    return memory.back()->As<void>();
  }

  cudaStream_t stream_ = nullptr;
};

class CudaDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    const absl::Status available = Available();
    if (!available.ok()) GTEST_SKIP() << available;
    processor_ = std::make_unique<DeviceProcessor>();
  }
  std::unique_ptr<DeviceProcessor> processor_;
};

TEST_F(CudaDevice, SizesAndData) { cuda_cases::CheckSizesAndData(*processor_); }
TEST_F(CudaDevice, Magnitudes) { cuda_cases::CheckMagnitudes(*processor_); }
TEST_F(CudaDevice, Ranges) { cuda_cases::CheckRanges(*processor_); }
TEST_F(CudaDevice, TypesAndAnchors) { cuda_cases::CheckTypesAndAnchors(*processor_); }
TEST_F(CudaDevice, Residual) { cuda_cases::CheckResidual(*processor_); }
TEST_F(CudaDevice, NonFinite) { cuda_cases::CheckNonFinite(*processor_); }
TEST_F(CudaDevice, Refusals) { cuda_cases::CheckRefusals(*processor_); }
TEST_F(CudaDevice, OuterStep) { cuda_cases::CheckOuterSteps(*processor_); }

TEST(CudaWithoutDevice, SaysSoAndWhatToDo) {
  const absl::Status available = Available();
  if (available.ok()) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_EQ(available.code(), absl::StatusCode::kFailedPrecondition) << available;
  EXPECT_THAT(std::string(available.message()), HasSubstr("no GPU can be used"));
  EXPECT_THAT(std::string(available.message()), HasSubstr("Use tensors on the CPU"));

  // The same from every call that would need one, before it looks at device memory.
  std::vector<float> values(100, 1.0f);
  const std::vector<codec::Piece> pieces = {
      {.current = values.data(), .elements = 100, .name = "w"}};
  const codec::Range range{0, 100};
  SignEncoder encoder(pieces, range, {}, {});
  std::vector<std::byte> host(encoder.buffer_bytes()), device(encoder.buffer_bytes());
  const Buffers buffers{absl::MakeSpan(host), absl::MakeSpan(device)};
  EXPECT_EQ(encoder.Start(buffers, nullptr).code(), absl::StatusCode::kFailedPrecondition);

  std::vector<std::byte> code(static_cast<size_t>(codec::MaxEncodedBytes(pieces, range)));
  const auto bytes = codec::Encode(pieces, range, {}, {}, absl::MakeSpan(code));
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  code.resize(*bytes);
  std::vector<float> sum(128), mean(100);
  SignAccumulator accumulator(pieces, range, {}, absl::MakeSpan(sum));
  std::vector<std::byte> host2(accumulator.buffer_bytes()), device2(accumulator.buffer_bytes());
  const Buffers buffers2{absl::MakeSpan(host2), absl::MakeSpan(device2)};
  EXPECT_EQ(accumulator.Add(code, buffers2, nullptr).code(), absl::StatusCode::kFailedPrecondition);

  std::vector<float> momentum(100);
  const std::vector<train::OuterPiece> outer = {{values.data(), values.data(), DType::kF32, 100}};
  EXPECT_EQ(OuterStep(outer, absl::MakeSpan(momentum), mean, {}, nullptr).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(CudaArguments, ShortBuffersAndWrongOrderAreRefused) {
  std::vector<float> values(100, 1.0f);
  const std::vector<codec::Piece> pieces = {
      {.current = values.data(), .elements = 100, .name = "w"}};
  SignEncoder encoder(pieces, {0, 100}, {}, {});
  std::vector<std::byte> code(1000), shorter(encoder.buffer_bytes() - 1);
  EXPECT_EQ(encoder.Finish(absl::MakeSpan(code)).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(encoder.KeepResidual(nullptr).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(encoder.Start({absl::MakeSpan(shorter), absl::MakeSpan(shorter)}, nullptr).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace geomesh::cuda
