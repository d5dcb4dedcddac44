// What one call of a c10d method is made of, on its way from the method to the executor.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "exec/executor.h"
#include "group/fingerprint.h"
#include "group/process_group.h"
#include "group/tensors.h"
#include "group/work.h"
#include "plan/compile.h"

namespace geomesh::group {

// Filled by the method, consumed by Launch.
struct ProcessGroupGeoMesh::Operation {
  WorkGeoMesh::Description work;
  plan::CallShape shape;
  exec::Call call;
  std::shared_ptr<Staging> staging;
  Fingerprint fingerprint;      // of what must be equal on all ranks concerned
  std::function<void()> after;  // on success, after CopyBack, on the completion thread
  std::shared_ptr<void> keep;
};

}  // namespace geomesh::group
