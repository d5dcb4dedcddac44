// The outer step's loop for every vector target (foreach_target compiles this file once for each).
#include "train/outer_step.h"

#include <cstddef>
#include <cstring>

#include "codec/float_env.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "train/outer_step.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which defines the target.
#include "codec/convert-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace geomesh::train {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace convert = codec::HWY_NAMESPACE;
using convert::F32;
using V = hn::Vec<F32>;

struct Constants {
  V lr, mu;
  bool nesterov;
};

// One vector: updates momentum and anchor, and gives the new parameters.
HWY_INLINE V StepVector(const Constants& constants, float* anchor, float* momentum,
                        const float* mean) {
  const F32 d;
  const V g = hn::LoadU(d, mean);
  const V m = hn::Add(hn::Mul(constants.mu, hn::LoadU(d, momentum)), g);
  const V step = constants.nesterov ? hn::Add(g, hn::Mul(constants.mu, m)) : m;
  const V x = hn::Sub(hn::LoadU(d, anchor), hn::Mul(constants.lr, step));
  hn::StoreU(m, d, momentum);
  hn::StoreU(x, d, anchor);
  return x;
}

template <class StoreAs>
HWY_INLINE void StepAs(const OuterParams& params, float* anchor, void* current, size_t elements,
                       float* momentum, const float* mean) {
  using Element = typename StoreAs::Element;
  const F32 d;
  const StoreAs store;
  const Constants constants{hn::Set(d, params.lr), hn::Set(d, params.momentum), params.nesterov};
  auto* const to = static_cast<Element*>(current);
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= elements; i += lanes) {
    store(StepVector(constants, anchor + i, momentum + i, mean + i), to + i);
  }
  if (i == elements) return;
  const size_t rest = elements - i;
  float rest_anchor[16] = {}, rest_momentum[16] = {}, rest_mean[16] = {};
  Element rest_current[16];
  std::memcpy(rest_anchor, anchor + i, rest * sizeof(float));
  std::memcpy(rest_momentum, momentum + i, rest * sizeof(float));
  std::memcpy(rest_mean, mean + i, rest * sizeof(float));
  store(StepVector(constants, rest_anchor, rest_momentum, rest_mean), rest_current);
  std::memcpy(anchor + i, rest_anchor, rest * sizeof(float));
  std::memcpy(momentum + i, rest_momentum, rest * sizeof(float));
  std::memcpy(to + i, rest_current, rest * sizeof(Element));
}

void StepF32(const OuterParams& params, float* anchor, void* current, size_t elements,
             float* momentum, const float* mean) {
  StepAs<convert::StoreF32>(params, anchor, current, elements, momentum, mean);
}
void StepBF16(const OuterParams& params, float* anchor, void* current, size_t elements,
              float* momentum, const float* mean) {
  StepAs<convert::StoreBF16>(params, anchor, current, elements, momentum, mean);
}
void StepF16(const OuterParams& params, float* anchor, void* current, size_t elements,
             float* momentum, const float* mean) {
  StepAs<convert::StoreF16>(params, anchor, current, elements, momentum, mean);
}

}  // namespace HWY_NAMESPACE
}  // namespace geomesh::train
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace geomesh::train {

HWY_EXPORT(StepF32);
HWY_EXPORT(StepBF16);
HWY_EXPORT(StepF16);

void OuterStep(absl::Span<const OuterPiece> pieces, absl::Span<float> momentum,
               absl::Span<const float> mean, const OuterParams& params) {
  const codec::DefaultFloatEnvironment environment;
  float* m = momentum.data();
  const float* g = mean.data();
  for (const OuterPiece& piece : pieces) {
    const auto elements = static_cast<size_t>(piece.elements);
    switch (piece.dtype) {
      case DType::kF16:
        HWY_DYNAMIC_DISPATCH(StepF16)(params, piece.anchor, piece.current, elements, m, g);
        break;
      case DType::kBF16:
        HWY_DYNAMIC_DISPATCH(StepBF16)(params, piece.anchor, piece.current, elements, m, g);
        break;
      default:
        HWY_DYNAMIC_DISPATCH(StepF32)(params, piece.anchor, piece.current, elements, m, g);
    }
    m += elements;
    g += elements;
  }
}

}  // namespace geomesh::train
#endif  // HWY_ONCE
