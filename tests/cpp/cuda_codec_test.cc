// The kernels' own functions, run on the CPU thread by thread, against csrc/codec and csrc/train.
// Needs neither nvcc nor a GPU. Each phase runs its threads forwards, backwards and shuffled: a
// thread that reads what another writes in the same phase shows.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "base/status_macros.h"
#include "cuda/block.h"
#include "cuda/outer.h"
#include "cuda/sign_job.h"
#include "cuda_codec_cases.h"

namespace geomesh::cuda {
namespace {

using cuda_cases::Processor;

enum class Order { kForwards, kBackwards, kShuffled };

std::string Name(Order order) {
  if (order == Order::kForwards) return "Forwards";
  return order == Order::kBackwards ? "Backwards" : "Shuffled";
}

class HostThreads {
 public:
  explicit HostThreads(Order order) : threads_(kThreads) {
    std::iota(threads_.begin(), threads_.end(), 0);
    if (order == Order::kBackwards) std::reverse(threads_.begin(), threads_.end());
    std::mt19937 random(1);
    if (order == Order::kShuffled) std::shuffle(threads_.begin(), threads_.end(), random);
  }
  template <class Phase>
  void Run(const Phase& phase) const {
    for (int t : threads_) phase(t);
  }

 private:
  std::vector<int> threads_;
};

// Memory as a GPU gives it: with anything in it.
std::vector<std::byte> Dirty(size_t bytes) {
  return std::vector<std::byte>(bytes, std::byte{0xA5});
}

class HostProcessor : public Processor {
 public:
  explicit HostProcessor(Order order) : threads_(order) {}

  absl::StatusOr<std::vector<std::byte>> Encode(absl::Span<const codec::Piece> pieces,
                                                codec::Range range, const codec::SignParams& params,
                                                const codec::EncodeOptions& options) override {
    EncodeJob job(pieces, range, params, options);
    GM_RETURN_IF_ERROR(job.Check());
    std::vector<std::byte> buffer = Start(job);
    std::vector<std::byte> code(static_cast<size_t>(codec::MaxEncodedBytes(pieces, range)));
    GM_ASSIGN_OR_RETURN(const size_t bytes, job.Finish(buffer.data(), absl::MakeSpan(code)));
    code.resize(bytes);
    if (!options.residual.empty() && job.blocks() > 0) {
      std::memcpy(buffer.data() + job.magnitudes().offset, job.coded_magnitudes().data(),
                  job.magnitudes().bytes);
      const ResidualArgs args = job.Residual(buffer.data());
      ForEachBlock(job.blocks(), [&](int64_t k, BlockMemory& memory) {
        KeepResidualBlock(args, k, memory, threads_);
      });
    }
    return code;
  }

  std::vector<float> Magnitudes(absl::Span<const codec::Piece> pieces, codec::Range range,
                                const codec::SignParams& params) override {
    const EncodeJob job(pieces, range, params, {});
    const std::vector<std::byte> buffer = Start(job);
    std::vector<float> magnitudes(static_cast<size_t>(job.blocks()));
    std::memcpy(magnitudes.data(), buffer.data() + job.magnitudes().offset, job.magnitudes().bytes);
    return magnitudes;
  }

  absl::StatusOr<std::vector<float>> Mean(
      absl::Span<const codec::Piece> pieces, codec::Range range, const codec::SignParams& params,
      const std::vector<std::vector<std::byte>>& codes) override {
    DecodeJob job(pieces, range, params);
    std::vector<float> sum(static_cast<size_t>(codec::SignAccumulator::SumElements(range)));
    for (const auto& code : codes) {
      std::vector<std::byte> buffer = Dirty(job.max_buffer_bytes());
      GM_ASSIGN_OR_RETURN(const DecodeJob::Addition addition,
                          job.Add(code, absl::MakeSpan(buffer)));
      EXPECT_LE(addition.buffer_bytes, buffer.size());
      if (!addition.any) continue;
      const AddArgs args = job.Args(addition, buffer.data(), sum.data());
      ForEachBlock(job.blocks(),
                   [&](int64_t k, BlockMemory& memory) { AddBlock(args, k, memory, threads_); });
    }
    std::vector<float> mean(static_cast<size_t>(range.elements), 0.0f);
    if (job.total_weight() == 0) return mean;
    std::fill(mean.begin(), mean.end(), 7.0f);
    std::vector<std::byte> buffer = Dirty(job.max_buffer_bytes());
    EXPECT_LE(job.FillFinish(buffer.data()), buffer.size());
    const FinishArgs args = job.Finish(buffer.data(), sum.data(), mean.data());
    ForEachBlock(job.blocks(),
                 [&](int64_t k, BlockMemory& memory) { FinishBlock(args, k, memory, threads_); });
    return mean;
  }

  absl::Status OuterStep(absl::Span<const train::OuterPiece> pieces, absl::Span<float> momentum,
                         absl::Span<const float> mean, const train::OuterParams& params) override {
    int64_t begin = 0;
    for (const train::OuterPiece& piece : pieces) {
      const OuterArgs args{piece.anchor,   piece.current,           piece.dtype,
                           piece.elements, momentum.data() + begin, mean.data() + begin,
                           params.lr,      params.momentum,         params.nesterov};
      for (int64_t i = 0; i < piece.elements; ++i) OuterElement(args, i);
      begin += piece.elements;
    }
    return absl::OkStatus();
  }

 private:
  // SignEncoder::Start.
  std::vector<std::byte> Start(const EncodeJob& job) {
    std::vector<std::byte> buffer = Dirty(job.buffer_bytes());
    if (job.blocks() == 0) return buffer;
    job.Fill(buffer.data());
    std::memset(buffer.data() + job.failure().offset, 0xFF, job.failure().bytes);
    std::memset(buffer.data() + job.live_rows().offset, 0, job.live_rows().bytes);
    const EncodeArgs args = job.Args(buffer.data());
    ForEachBlock(job.blocks(),
                 [&](int64_t k, BlockMemory& memory) { EncodeBlock(args, k, memory, threads_); });
    return buffer;
  }

  template <class Body>
  void ForEachBlock(int64_t blocks, const Body& body) {
    const auto memory = std::make_unique<BlockMemory>();
    for (int64_t k = 0; k < blocks; ++k) {
      std::memset(static_cast<void*>(memory.get()), 0xA5, sizeof(BlockMemory));
      body(k, *memory);
    }
  }

  HostThreads threads_;
};

class CudaCodec : public ::testing::TestWithParam<Order> {
 protected:
  HostProcessor processor_{GetParam()};
};

INSTANTIATE_TEST_SUITE_P(Orders, CudaCodec,
                         ::testing::Values(Order::kForwards, Order::kBackwards, Order::kShuffled),
                         [](const auto& info) { return Name(info.param); });

TEST_P(CudaCodec, SizesAndData) { cuda_cases::CheckSizesAndData(processor_); }
TEST_P(CudaCodec, Magnitudes) { cuda_cases::CheckMagnitudes(processor_); }
TEST_P(CudaCodec, Ranges) { cuda_cases::CheckRanges(processor_); }
TEST_P(CudaCodec, TypesAndAnchors) { cuda_cases::CheckTypesAndAnchors(processor_); }
TEST_P(CudaCodec, Residual) { cuda_cases::CheckResidual(processor_); }
TEST_P(CudaCodec, NonFinite) { cuda_cases::CheckNonFinite(processor_); }
TEST_P(CudaCodec, Refusals) { cuda_cases::CheckRefusals(processor_); }

TEST(CudaOuterStep, EqualsTheCpu) {
  HostProcessor processor(Order::kForwards);
  cuda_cases::CheckOuterSteps(processor);
}

TEST(CudaBlocks, AreThoseOfTheCodec) {
  for (int64_t n = 0; n < 13000; n += 1 + n / 97) {
    codec::BlockCursor blocks(n);
    codec::Block block;
    for (int64_t k = 0; blocks.Next(&block); ++k) {
      const BlockView view = BlockAt(n, k);
      ASSERT_EQ(view.begin, block.begin) << n << " " << k;
      ASSERT_EQ(view.padded, block.padded) << n << " " << k;
      ASSERT_EQ(view.elements, block.elements) << n << " " << k;
    }
  }
}

}  // namespace
}  // namespace geomesh::cuda
