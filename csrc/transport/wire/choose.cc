#include "transport/wire/choose.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "transport/wire/tls.h"
#include "transport/wire/ucx.h"

namespace geomesh::transport {

absl::StatusOr<std::unique_ptr<Wire>> MakeWire(const Options& options, DeviceOptions device) {
  if (!device.interface.has_value() && !options.interface.empty()) {
    device.interface = options.interface;
  }
  // Heartbeats decide about who is silent.
  const absl::Duration unacknowledged_limit =
      std::clamp(options.dead_after + absl::Seconds(5), kUnacknowledgedLimit, absl::Hours(24));
  TlsKeyFiles keys{options.psk_file, options.tls_cert, options.tls_key, options.tls_ca};
  if (options.wire == "ucx" && keys.any()) {
    return absl::InvalidArgumentError(
        "GEOMESH_WIRE=ucx with a key or certificate: UCX's port checks nobody and can't be secured "
        "from inside, so the key would protect nothing; leave GEOMESH_WIRE out (wire/tls), or the "
        "key, where only the job's hosts can reach the ports");
  }
  if (options.wire == "tls" && !keys.any()) {
    return absl::InvalidArgumentError(
        "GEOMESH_WIRE=tls needs GEOMESH_PSK_FILE, or GEOMESH_TLS_CERT, GEOMESH_TLS_KEY and "
        "GEOMESH_TLS_CA");
  }
  if (keys.any()) {
    TlsWireOptions tls;
    tls.device = std::move(device);
    tls.ports = options.ports;
    tls.keys = std::move(keys);
    tls.advertise = options.advertise;
    tls.dscp = options.dscp;
    tls.unacknowledged_limit = unacknowledged_limit;
    return MakeTlsWire(std::move(tls));
  }
  if (!options.advertise.empty()) {
    return absl::InvalidArgumentError(
        "GEOMESH_ADVERTISE is for wire/tls, and there is no key or certificate: UCX's port must "
        "not be reachable through a NAT or a port forward");
  }
  if (options.dscp.has_value()) {
    return absl::InvalidArgumentError(
        "GEOMESH_DSCP is for wire/tls, and there is no key or certificate: UCX opens its sockets "
        "itself, and does not mark them");
  }
  UcxWireOptions ucx;
  ucx.device = std::move(device);
  ucx.ports = options.ports;
  ucx.unacknowledged_limit = unacknowledged_limit;
  return MakeUcxWire(std::move(ucx));
}

}  // namespace geomesh::transport
