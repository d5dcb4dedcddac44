// Speed of the sign codec on one core (CPU time), for each vector target of this machine: GB/s of
// fp32 input (encode, with and without an anchor) or output (add, finish), each beside a memcpy of
// the same bytes that alternates with it.
//
//   codec_benchmark [elements]        default 16,777,216
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#define HWY_COMPILE_ALL_ATTAINABLE
#include "codec/sign.h"
#include "hwy/targets.h"

namespace geomesh {
namespace {

// CPU time of this thread: other load on the machine distorts it less than wall time.
double CpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double Seconds(const std::function<void()>& work) {
  const double begin = CpuSeconds();
  work();
  return CpuSeconds() - begin;
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

struct Buffers {
  explicit Buffers(int64_t elements)
      : anchor(elements), current(elements), mean(elements), copy(elements) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < elements; ++i) {
      anchor[i] = normal(random);
      current[i] = anchor[i] - 0.01f * normal(random);
    }
  }
  std::vector<float> anchor, current, mean, copy;
};

void Run(Buffers& buffers, int64_t elements) {
  const codec::Range range{0, elements};
  const codec::SignParams params{.rotation_seed = 1, .dither_seed = 2};
  const std::vector<codec::Piece> plain = {
      {nullptr, buffers.current.data(), DType::kF32, elements, 1024, "x"}};
  const std::vector<codec::Piece> difference = {
      {buffers.anchor.data(), buffers.current.data(), DType::kF32, elements, 1024, "x"}};
  std::vector<std::byte> code(static_cast<size_t>(codec::MaxEncodedBytes(plain, range)));
  std::vector<float> sum(static_cast<size_t>(codec::SignAccumulator::SumElements(range)));
  codec::SignAccumulator accumulator(plain, range, params, absl::MakeSpan(sum));

  size_t used = 0;
  const auto encode = [&](const std::vector<codec::Piece>& pieces) {
    used = codec::Encode(pieces, range, params, {}, absl::MakeSpan(code)).value();
  };
  const auto copy = [&] {
    std::memcpy(buffers.copy.data(), buffers.current.data(), 4 * buffers.copy.size());
  };
  const std::pair<const char*, std::function<void()>> rows[] = {
      {"encode x", [&] { encode(plain); }},
      {"encode anchor - x", [&] { encode(difference); }},
      {"add", [&] { (void)accumulator.Add(absl::MakeConstSpan(code).first(used)); }},
      {"finish", [&] { accumulator.Finish(absl::MakeSpan(buffers.mean)); }},
  };
  const double gigabytes = 4e-9 * static_cast<double>(elements);
  for (const auto& [name, work] : rows) {
    std::vector<double> seconds, copy_seconds;
    work(), copy();
    for (int i = 0; i < 9; ++i) {
      seconds.push_back(Seconds(work));
      copy_seconds.push_back(Seconds(copy));
    }
    const double speed = gigabytes / Median(seconds), copied = gigabytes / Median(copy_seconds);
    std::printf("  %-18s %7.2f GB/s   memcpy %7.2f GB/s   ratio %.2f\n", name, speed, copied,
                speed / copied);
  }
  std::printf("  code: %zu bytes, 1/%.3f of fp32\n", used,
              4.0 * static_cast<double>(elements) / static_cast<double>(used));
}

}  // namespace
}  // namespace geomesh

int main(int argc, char** argv) {
  const int64_t elements = argc > 1 ? std::atoll(argv[1]) : int64_t{1} << 24;
  if (elements <= 0) {
    std::fprintf(stderr, "usage: %s [elements > 0]\n", argv[0]);
    return 2;
  }
  geomesh::Buffers buffers(elements);
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::GetChosenTarget().DeInit();
    hwy::SetSupportedTargetsForTest(target);
    std::printf("%s, %lld elements\n", hwy::TargetName(target), static_cast<long long>(elements));
    geomesh::Run(buffers, elements);
  }
}
