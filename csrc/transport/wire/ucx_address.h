// What two processes tell each other before a lane exists: the address blob that Listen returns,
// and the greeting that each dialled lane sends first. Both are parsed as hostile bytes. Knows
// layouts only; docs/wire-format.md has them for other readers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include "absl/strings/string_view.h"

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/wire/device.h"

namespace geomesh::transport {

inline constexpr uint16_t kUcxWireVersion = 1;
inline constexpr size_t kMaxUcxAddressBytes = 2048;
inline constexpr int kMaxLanesPerDial = 256;

struct UcxAddress {
  uint64_t uid = 0;          // of the wire, random
  uint64_t network = 0;      // host and network namespace: a loopback address is good only inside
  uint32_t ucx_version = 0;  // major << 16 | minor << 8 | patch
  uint32_t tx_segment_bytes = 0;
  uint32_t rx_segment_bytes = 0;
  IpEndpoint listening;
  std::string ucx;  // UCX's own worker address

  std::string Serialize() const;
  // InvalidArgument when damaged or of another version.
  static absl::StatusOr<UcxAddress> Parse(absl::string_view bytes);
};

// InvalidArgument naming what a dial from `ours` to `theirs` needs equal and is not.
absl::Status CheckCompatible(const UcxAddress& ours, const UcxAddress& theirs);

// Stands before every message: which lane it is for, because UCX does not say. The dialler draws
// the nonce. (Little-endian, as all of this wire's integers.)
struct UcxPrefix {
  uint64_t nonce = 0;
  uint16_t lane = 0;
  bool from_dialler = false;

  static constexpr size_t kBytes = 16;
  void SerializeTo(std::byte* out) const;
  // False if these are not `kBytes` of this version.
  static bool Parse(const void* bytes, size_t size, UcxPrefix* out);
};

struct UcxGreeting {
  uint64_t target_uid = 0;        // the wire that is meant; another may have its port by now
  uint32_t endpoints_before = 0;  // that the dialler made to this address before this dial
  uint16_t lanes = 0;
  IpEndpoint source;    // of this lane's connection, as the dialler sees it
  std::string hello;    // the engine's
  std::string address;  // the dialler's UcxAddress, serialized

  std::string Serialize() const;
  static absl::StatusOr<UcxGreeting> Parse(absl::string_view bytes);
};

}  // namespace geomesh::transport
