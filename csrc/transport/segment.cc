#include "transport/segment.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "transport/bytes.h"
#include "transport/local_memory.h"

namespace geomesh::transport {
namespace {

constexpr uint32_t kSegmentMagic = 0x31534d47;  // "GMS1"
constexpr uint32_t kHelloMagic = 0x31484d47;    // "GMH1"
constexpr size_t kMaxDescriptionBytes = 120;

template <typename T>
void Store(std::byte* at, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    at[i] = static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i));
  }
}

template <typename T>
T Load(const std::byte* at) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<uint64_t>(at[i]) << (8 * i);
  return static_cast<T>(value);
}

absl::Status CheckData(const SegmentHeader& h) {
  if (h.total_bytes > kMaxMessageBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("message of ", h.total_bytes, " bytes: above the limit"));
  }
  if (h.offset % kMaxSegmentPayloadBytes != 0 ||
      (h.offset >= h.total_bytes && !(h.total_bytes == 0 && h.offset == 0))) {
    return absl::InvalidArgumentError(
        absl::StrCat("segment at offset ", h.offset, " of a message of ", h.total_bytes, " bytes"));
  }
  const uint64_t due = std::min<uint64_t>(kMaxSegmentPayloadBytes, h.total_bytes - h.offset);
  if (h.payload_bytes != due) {
    return absl::InvalidArgumentError(absl::StrCat("segment at offset ", h.offset, " of ",
                                                   h.total_bytes, " bytes has ", h.payload_bytes,
                                                   " bytes instead of ", due));
  }
  return absl::OkStatus();
}

}  // namespace

void EncodeHeader(const SegmentHeader& h, HeaderBytes* out) {
  std::byte* at = out->data();
  Store(at + 0, kSegmentMagic);
  Store(at + 4, static_cast<uint8_t>(h.type));
  Store(at + 5, h.flags);
  Store(at + 6, uint16_t{0});
  Store(at + 8, h.source_check);
  Store(at + 12, h.ack_delay_us);
  Store(at + 16, h.sequence);
  Store(at + 24, h.ack);
  Store(at + 32, h.released);
  Store(at + 40, h.key.channel);
  Store(at + 48, h.key.id);
  Store(at + 56, h.total_bytes);
  Store(at + 64, h.offset);
  Store(at + 72, h.fingerprint);
  Store(at + 76, h.payload_bytes);
}

absl::StatusOr<SegmentHeader> ParseHeader(absl::Span<const std::byte> bytes, size_t payload_bytes) {
  if (bytes.size() != kSegmentHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat("segment header of ", bytes.size(),
                                                   " bytes instead of ", kSegmentHeaderBytes));
  }
  const std::byte* at = bytes.data();
  if (Load<uint32_t>(at) != kSegmentMagic) {
    return absl::InvalidArgumentError("segment header without its magic number");
  }
  const uint8_t type = Load<uint8_t>(at + 4);
  if (type < static_cast<uint8_t>(SegmentType::kData) ||
      type > static_cast<uint8_t>(SegmentType::kMoreLanes)) {
    return absl::InvalidArgumentError(absl::StrCat("segment of unknown type ", type));
  }
  SegmentHeader h;
  h.type = static_cast<SegmentType>(type);
  h.flags = Load<uint8_t>(at + 5);
  h.source_check = Load<uint32_t>(at + 8);
  h.ack_delay_us = Load<uint32_t>(at + 12);
  h.sequence = Load<uint64_t>(at + 16);
  h.ack = Load<uint64_t>(at + 24);
  h.released = Load<uint64_t>(at + 32);
  h.key.channel = Load<uint64_t>(at + 40);
  h.key.id = Load<uint64_t>(at + 48);
  h.total_bytes = Load<uint64_t>(at + 56);
  h.offset = Load<uint64_t>(at + 64);
  h.fingerprint = Load<uint32_t>(at + 72);
  h.payload_bytes = Load<uint32_t>(at + 76);
  if (h.payload_bytes != payload_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("segment header announces ", h.payload_bytes,
                                                   " bytes, ", payload_bytes, " came"));
  }
  const uint8_t known = h.type == SegmentType::kData        ? kSolicited
                        : h.type == SegmentType::kHeartbeat ? kAnswer
                                                            : 0;
  if (Load<uint16_t>(at + 6) != 0 || (h.flags & ~known) != 0) {
    return absl::InvalidArgumentError("segment header with unknown flags");
  }
  switch (h.type) {
    case SegmentType::kData: {
      if (absl::Status status = CheckData(h); !status.ok()) return status;
      break;
    }
    case SegmentType::kInPlace:
      if (payload_bytes != InPlace::kBytes || h.total_bytes == 0 ||
          h.total_bytes > kMaxMessageBytes || h.offset != 0) {
        return absl::InvalidArgumentError(absl::StrCat("message in place of ", h.total_bytes,
                                                       " bytes, described in ", payload_bytes));
      }
      break;
    case SegmentType::kWanted:
    case SegmentType::kAnnounce:
    case SegmentType::kPulled:
      if (payload_bytes == 0 || payload_bytes % 16 != 0 ||
          payload_bytes / 16 > kMaxKeysPerSegment) {
        return absl::InvalidArgumentError(
            absl::StrCat("list of message keys of ", payload_bytes, " bytes"));
      }
      break;
    case SegmentType::kReject:
    case SegmentType::kClose:
    case SegmentType::kRefused:
      if (payload_bytes > kMaxTextBytes) {
        return absl::InvalidArgumentError(absl::StrCat("text of ", payload_bytes, " bytes"));
      }
      break;
    case SegmentType::kAck:
    case SegmentType::kHeartbeat:
    case SegmentType::kBye:
    case SegmentType::kLaneLost:
    case SegmentType::kWelcome:
    case SegmentType::kReads:
    case SegmentType::kMoreLanes:
      if (payload_bytes != 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("segment of type ", type, " with ", payload_bytes, " bytes of payload"));
      }
      break;
  }
  return h;
}

uint32_t SourceCheck(const ProcessUid& sender, const ProcessUid& receiver) {
  ByteWriter writer;
  writer.Integer(sender.high);
  writer.Integer(sender.low);
  writer.Integer(receiver.high);
  writer.Integer(receiver.low);
  const uint64_t sum = Checksum(writer.bytes());
  return static_cast<uint32_t>(sum ^ (sum >> 32));
}

std::string EncodeKeys(absl::Span<const MessageKey> keys) {
  ByteWriter writer;
  for (const MessageKey& key : keys) {
    writer.Integer(key.channel);
    writer.Integer(key.id);
  }
  return writer.bytes();
}

std::vector<MessageKey> DecodeKeys(absl::Span<const std::byte> payload) {
  std::vector<MessageKey> keys(payload.size() / 16);
  ByteReader reader(payload);
  for (MessageKey& key : keys) {
    if (!reader.Integer(&key.channel) || !reader.Integer(&key.id)) break;
  }
  return keys;
}

std::string Hello::Serialize() const {
  ByteWriter writer;
  writer.Integer(kHelloMagic);
  writer.Integer(version);
  writer.Integer(dialer.high);
  writer.Integer(dialer.low);
  writer.Integer(target.high);
  writer.Integer(target.low);
  writer.Integer(attempt);
  writer.Integer(static_cast<uint8_t>(more));
  writer.Integer(unexpected_bytes);
  writer.Text(description, kMaxDescriptionBytes);
  writer.Integer(Checksum(writer.bytes()));
  return writer.bytes();
}

absl::StatusOr<Hello> Hello::Parse(absl::Span<const std::byte> bytes) {
  ByteReader reader(bytes);
  uint32_t magic = 0;
  Hello hello;
  if (bytes.size() > kMaxHelloBytes || !reader.Integer(&magic) || magic != kHelloMagic ||
      !reader.Integer(&hello.version)) {
    return absl::InvalidArgumentError("not a torch_geomesh hello");
  }
  if (hello.version != kProtocolVersion) return hello;
  uint64_t checksum = 0;
  uint8_t more = 0;
  if (!reader.Integer(&hello.dialer.high) || !reader.Integer(&hello.dialer.low) ||
      !reader.Integer(&hello.target.high) || !reader.Integer(&hello.target.low) ||
      !reader.Integer(&hello.attempt) || !reader.Integer(&more) ||
      !reader.Integer(&hello.unexpected_bytes) ||
      !reader.Text(&hello.description, kMaxDescriptionBytes) || !reader.Integer(&checksum) ||
      !reader.empty()) {
    return absl::InvalidArgumentError("hello of a wrong length");
  }
  if (checksum != Checksum(AsText(bytes.first(bytes.size() - 8)))) {
    return absl::InvalidArgumentError("hello with a wrong checksum");
  }
  if (more > 1) return absl::InvalidArgumentError("hello with a flag that is neither 0 nor 1");
  hello.more = more == 1;
  return hello;
}

}  // namespace geomesh::transport
