// Segment headers and lists of keys: any bytes are refused, or are what EncodeHeader makes again.
#include <cstring>

#include "fuzz_target.h"
#include "transport/bytes.h"
#include "transport/segment.h"

namespace geomesh::fuzz {
namespace {

using namespace transport;  // NOLINT

std::string WithPayloadSize(uint32_t payload_bytes, const SegmentHeader& header) {
  HeaderBytes bytes;
  EncodeHeader(header, &bytes);
  ByteWriter input;
  input.Integer(payload_bytes);
  input.Raw(AsText(bytes));
  return input.bytes();
}

}  // namespace

// 32 bits of payload size, then the header.
void TryInput(absl::string_view bytes) {
  Input input(bytes);
  const size_t payload_bytes = input.Integer(4);
  // A copy of its own, so that AddressSanitizer sees a read past its end.
  const std::string header(input.Rest());
  const absl::StatusOr<SegmentHeader> parsed = ParseHeader(AsBytes(header), payload_bytes);
  if (!parsed.ok()) return;
  FUZZ_CHECK(parsed->payload_bytes == payload_bytes);
  FUZZ_CHECK(payload_bytes <= kMaxSegmentPayloadBytes);
  HeaderBytes again;
  EncodeHeader(*parsed, &again);
  FUZZ_CHECK(AsText(again) == header);
  if (parsed->type == SegmentType::kData) {
    FUZZ_CHECK(parsed->total_bytes <= kMaxMessageBytes);
    FUZZ_CHECK(parsed->offset + payload_bytes <= parsed->total_bytes);
    FUZZ_CHECK(parsed->offset / kMaxSegmentPayloadBytes < SegmentCount(parsed->total_bytes));
  }
  if (parsed->type == SegmentType::kWanted || parsed->type == SegmentType::kAnnounce ||
      parsed->type == SegmentType::kPulled) {
    const std::string payload(payload_bytes, '\x5a');
    const std::vector<MessageKey> keys = DecodeKeys(AsBytes(payload));
    FUZZ_CHECK(!keys.empty() && keys.size() <= kMaxKeysPerSegment);
    FUZZ_CHECK(EncodeKeys(keys) == payload);
  }
}

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (int type = 1; type <= 15; ++type) {
    SegmentHeader header;
    header.type = static_cast<SegmentType>(type);
    header.sequence = 3;
    header.ack = 2;
    header.key = {7, 9};
    if (header.type == SegmentType::kData) {
      header.total_bytes = kMaxSegmentPayloadBytes + 100;
      header.offset = kMaxSegmentPayloadBytes;
      header.payload_bytes = 100;
    } else if (header.type == SegmentType::kWanted || header.type == SegmentType::kAnnounce ||
               header.type == SegmentType::kPulled) {
      header.payload_bytes = 32;
    } else if (header.type == SegmentType::kInPlace) {
      header.payload_bytes = 24;
      header.total_bytes = 1 << 20;
    }
    seeds.push_back(WithPayloadSize(header.payload_bytes, header));
  }
  return seeds;
}

}  // namespace geomesh::fuzz
