// What two engines say to each other: the header of each segment and the hello of each lane.
// Encoding, and parsing that trusts nothing. Knows no lane, peer or message; the layout is in
// docs/wire-format.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>
#include "absl/strings/string_view.h"

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/engine.h"
#include "transport/wire/wire.h"

namespace geomesh::transport {

inline constexpr uint16_t kProtocolVersion = 2;
inline constexpr size_t kSegmentHeaderBytes = 80;
inline constexpr size_t kMaxKeysPerSegment = 4096;           // of kWanted and kAnnounce
inline constexpr size_t kMaxTextBytes = 4096;                // of kReject, kClose and kRefused
inline constexpr uint64_t kMaxMessageBytes = 1ull << 46;     // far above any memory
inline constexpr int64_t kMinUnexpectedBytes = 1024 * 1024;  // below it, progress is not certain

// What a segment that arrives unasked for counts against the receiver's bound beside its payload,
// so that many small ones are bounded too.
inline constexpr uint64_t kSegmentChargeBytes = 128;

enum class SegmentType : uint8_t {
  kData = 1,        // a piece of a message
  kAck = 2,         // only the fields that every header has
  kHeartbeat = 3,   // the same, sent because nothing else was
  kWanted = 4,      // payload: keys with a receive posted; their rest may come without credit
  kAnnounce = 5,    // payload: keys that wait for credit
  kReject = 6,      // the receive of `key` failed; fingerprint: status code, payload: text
  kClose = 7,       // channel closed; fingerprint: status code (0: in order), payload: text
  kBye = 8,         // the process leaves; nothing follows on this lane
  kLaneLost = 9,    // id: the lane's name, offset: last sequence received on it
  kWelcome = 10,    // first segment of an accepted lane; total_bytes: unexpected bound
  kRefused = 11,    // the hello was refused; payload: text
  kReads = 12,      // its sender can read the receiver's memory
  kInPlace = 13,    // a whole message, left where it is; payload: InPlace
  kPulled = 14,     // payload: keys of kInPlace messages that were read
  kMoreLanes = 15,  // id: how many lanes its sender, which did not dial, can make use of
};

// Needs no acknowledgement of its own.
inline bool IsBare(SegmentType type) {
  return type == SegmentType::kAck || type == SegmentType::kHeartbeat;
}

// Set on kData: the receiver had said kWanted, the segment does not count against its bound.
inline constexpr uint8_t kSolicited = 1;
// Set on kHeartbeat: answer with a kAck at once.
inline constexpr uint8_t kAnswer = 2;

struct SegmentHeader {
  SegmentType type = SegmentType::kAck;
  uint8_t flags = 0;
  uint32_t source_check = 0;  // SourceCheck(sender, receiver)
  uint64_t sequence = 0;      // counts every segment of this lane and direction, from 1
  uint64_t ack = 0;           // last sequence received on this lane
  uint32_t ack_delay_us = 0;  // how long ago that was
  uint64_t released = 0;      // bytes charged to the peer's bound so far and free again
  MessageKey key;
  uint32_t fingerprint = 0;
  uint64_t total_bytes = 0;
  uint64_t offset = 0;
  uint32_t payload_bytes = 0;
};

using HeaderBytes = std::array<std::byte, kSegmentHeaderBytes>;

void EncodeHeader(const SegmentHeader& header, HeaderBytes* out);

// InvalidArgument with what is wrong. Checks all that can be checked without knowing the lane; a
// kData that passes lies inside its message, on a segment boundary, and has the one right length.
absl::StatusOr<SegmentHeader> ParseHeader(absl::Span<const std::byte> bytes, size_t payload_bytes);

// Ties a segment to the pair of processes it belongs to.
uint32_t SourceCheck(const ProcessUid& sender, const ProcessUid& receiver);

std::string EncodeKeys(absl::Span<const MessageKey> keys);
// `payload` is a multiple of 16 bytes (ParseHeader saw to it).
std::vector<MessageKey> DecodeKeys(absl::Span<const std::byte> payload);

// How many segments a message of that size has: at least one.
inline uint64_t SegmentCount(uint64_t total_bytes) {
  return total_bytes == 0 ? 1 : (total_bytes - 1) / kMaxSegmentPayloadBytes + 1;
}

// The first words on a lane, from the one who dials.
struct Hello {
  uint16_t version = kProtocolVersion;
  ProcessUid dialer;
  ProcessUid target;
  uint32_t attempt = 0;  // of Dial between these two: names the lanes with their index
  bool more = false;     // in addition to the lanes there are, not instead
  uint64_t unexpected_bytes = 0;
  std::string description;  // of the dialer, for errors

  std::string Serialize() const;
  // A hello of another version parses as far as `version`, so that the refusal can name it.
  static absl::StatusOr<Hello> Parse(absl::Span<const std::byte> bytes);
};

}  // namespace geomesh::transport
