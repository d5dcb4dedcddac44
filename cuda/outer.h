// The outer optimizer's step on one element: csrc/train/outer_step.h, with the same bits.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "cuda/element.h"
#include "cuda/host_device.h"

namespace geomesh::cuda {

struct OuterArgs {
  float* anchor;
  void* current;  // may be `anchor`
  DType dtype;
  int64_t elements;
  float* momentum;
  const float* mean;
  float lr, mu;
  bool nesterov;
};

GEOMESH_HD inline void OuterElement(const OuterArgs& args, int64_t i) {
  const float g = args.mean[i];
  const float m = Product(args.mu, args.momentum[i]) + g;
  const float step = args.nesterov ? g + Product(args.mu, m) : m;
  const float x = args.anchor[i] - Product(args.lr, step);
  args.momentum[i] = m;
  args.anchor[i] = x;
  StoreElement(x, args.current, args.dtype, i);
}

}  // namespace geomesh::cuda
