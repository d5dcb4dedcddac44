// What is written before a lane exists and around each segment: the address blob, the identity that
// names a connection, the greeting, and a frame's header. All are parsed as hostile bytes. Knows
// layouts only; docs/wire-format.md has them for other readers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "transport/wire/device.h"
#include "transport/wire/tls_keys.h"
#include "transport/wire/wire.h"

namespace geomesh::transport {

inline constexpr uint16_t kTlsWireVersion = 1;
inline constexpr size_t kMaxTlsAddressBytes = 8 << 10;
inline constexpr int kMaxTlsLanesPerDial = 256;

// Random: of a wire that listens, or of one dial.
using TlsId = std::array<uint8_t, 16>;
TlsId RandomTlsId();
std::string ShortHex(absl::Span<const uint8_t> bytes);  // its first four bytes, for logs

enum class TlsMode : uint8_t { kSharedKey = 1, kCertificate = 2 };
absl::string_view TlsModeName(TlsMode mode);  // "a shared key (GEOMESH_PSK_FILE)", ...

struct TlsAddress {
  TlsMode mode = TlsMode::kSharedKey;
  TlsId listener{};
  // Host and network namespace where the endpoint is good only there (loopback), else 0.
  uint64_t network = 0;
  IpEndpoint endpoint;      // to dial
  std::string certificate;  // DER; empty with a shared key

  // All but the seal, which covers exactly this.
  std::string Body() const;
  static std::string Sealed(absl::string_view body, absl::string_view seal);
};

// A blob taken apart. Nothing of it may be believed before its seal was checked.
struct TlsAddressParts {
  TlsAddress address;
  absl::string_view body;  // of the blob
  std::string seal;
};
// InvalidArgument when damaged, of another wire or of another version.
absl::StatusOr<TlsAddressParts> ParseTlsAddress(absl::string_view blob);

// Names one connection: who dials whom, for which dial, as which lane. With a shared key it is the
// identity in TLS (in clear text) and the connection's key is made from it.
struct LaneIdentity {
  KeyId key{};  // zero with certificates
  TlsId dialler{}, listener{}, dial{};
  uint16_t lane = 0, lanes = 0;

  static constexpr size_t kBytes = 4 + 8 + 3 * 16 + 4;
  std::string Serialize() const;
  static absl::StatusOr<LaneIdentity> Parse(absl::string_view bytes);
  friend bool operator==(const LaneIdentity&, const LaneIdentity&) = default;
};

// The first thing a dialler says inside TLS.
struct TlsGreeting {
  LaneIdentity identity;
  std::string hello;  // the engine's

  std::string Serialize() const;
  static absl::StatusOr<TlsGreeting> Parse(absl::string_view bytes);
};
inline constexpr size_t kMaxTlsGreetingBytes = 2 + LaneIdentity::kBytes + 2 + kMaxHelloBytes;

enum class FrameType : uint8_t {
  kSegment = 1,
  kGreeting = 2,  // dialler, first
  kAccepted = 3,  // acceptor, first
  kRefused = 4,   // acceptor, first and last: the payload says why
};

// Before each frame: type, zero, length of the header, length of the payload.
struct FrameHeader {
  FrameType type = FrameType::kSegment;
  uint16_t header_bytes = 0;
  uint32_t payload_bytes = 0;

  static constexpr size_t kBytes = 8;
  void SerializeTo(std::byte* out) const;
  // InvalidArgument with the breach: whatever passes fits a lane's buffer.
  static absl::StatusOr<FrameHeader> Parse(const std::byte* bytes);  // `kBytes` of them
};

}  // namespace geomesh::transport
