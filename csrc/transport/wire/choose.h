// Which wire a process uses, from its options. Knows the wires' options and opens nothing.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "base/options.h"
#include "transport/wire/device.h"
#include "transport/wire/wire.h"

namespace geomesh::transport {

// wire/tls where a key or certificates are configured, else wire/ucx. InvalidArgument where the
// options contradict each other: a key is never left unused in silence. `device` without an
// interface gets the options'.
absl::StatusOr<std::unique_ptr<Wire>> MakeWire(const Options& options, DeviceOptions device);

}  // namespace geomesh::transport
