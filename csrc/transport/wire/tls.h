// The wire for networks that others share: TCP connections under TLS 1.3 (OpenSSL), both sides
// authenticated by a key that the job's processes share or by certificates. Knows sockets and
// OpenSSL (in the .cc); the engine above sees none of either.
//
// One listening port, one connection a lane, all on the engine thread, no thread of its own. What
// it protects and what it doesn't is in docs/security.md.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "base/options.h"
#include "transport/wire/device.h"
#include "transport/wire/wire.h"

namespace geomesh::transport {

// Who may join: the holders of a key, or of certificates that a CA issued. Exactly one of both.
struct TlsKeyFiles {
  std::string psk;                           // GEOMESH_PSK_FILE
  std::string certificate, private_key, ca;  // GEOMESH_TLS_CERT, _KEY, _CA

  bool any() const {
    return !psk.empty() || !certificate.empty() || !private_key.empty() || !ca.empty();
  }
};

struct TlsWireOptions {
  DeviceOptions device;
  PortRange ports;  // of the listening socket: the only port others need to reach
  TlsKeyFiles keys;
  // GEOMESH_ADVERTISE: "host" or "host:port" that others dial instead of the device's address. A
  // name is looked up once, by Listen.
  std::string advertise;
  std::optional<Dscp> dscp;  // of lanes that were marked
  absl::Duration unacknowledged_limit = kUnacknowledgedLimit;
  // A connection's keys are renewed after so many records of 16 KB; AES-GCM bears 2^24.5.
  uint64_t records_per_key = uint64_t{1} << 23;
};

struct TlsWireStats {
  uint64_t handshakes_failed = 0;  // of connections that came
  uint64_t strangers_dropped = 0;  // unfinished, to make room for newer ones
  uint64_t connections = 0;        // open now, on both sides of a handshake
  uint64_t unfinished = 0;         // of those: that came and have not been authenticated
};

// How many connections that are not authenticated are held, and for how long.
inline constexpr int kMaxTlsStrangers = 256;
inline constexpr absl::Duration kTlsHandshakeTimeout = absl::Seconds(10);

class TlsWire : public Wire {
 public:
  // After Listen.
  virtual const Device& device() const = 0;
  virtual uint16_t port() const = 0;
  virtual TlsWireStats stats() const = 0;
};

// Opens nothing yet: Listen does, and reads the files.
absl::StatusOr<std::unique_ptr<Wire>> MakeTlsWire(TlsWireOptions options);

}  // namespace geomesh::transport
