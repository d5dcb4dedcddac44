// The outer optimizer's step, fused into one pass over memory: momentum, parameters, and their copy
// in the model. Knows nothing of rounds, ranks or torch.
//
// Equal inputs give equal bits on every CPU: no multiplication and addition are rounded as one.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "base/dtype.h"

namespace geomesh::train {

// A run of consecutive parameters. The vector is the concatenation of its pieces.
struct OuterPiece {
  float* anchor = nullptr;  // x, as all ranks held it when the round began
  void* current = nullptr;  // the model's copy, of `dtype`: kF32, kBF16 or kF16; may be `anchor`
  DType dtype = DType::kF32;
  int64_t elements = 0;
};

struct OuterParams {
  float lr = 0.7f;
  float momentum = 0.9f;
  bool nesterov = true;
};

// With g = mean[i], the mean pseudo-gradient (x - y), m = momentum[i] and x = anchor[i]:
//
//   m = mu * m + g
//   x = x - lr * (g + mu * m)    (nesterov)    or    x = x - lr * m
//
// and current = x, rounded to nearest even: torch.optim.SGD with momentum, where g is the gradient.
// Where g and m are 0, x keeps its bits. `momentum` and `mean` have the sum of the pieces'
// elements.
void OuterStep(absl::Span<const OuterPiece> pieces, absl::Span<float> momentum,
               absl::Span<const float> mean, const OuterParams& params);

}  // namespace geomesh::train
