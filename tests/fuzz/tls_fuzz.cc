// What wire/tls parses of its own: address blobs, lane identities, greetings, frame headers, and
// key files. The first byte of an input says which.
#include "fuzz_target.h"
#include "transport/bytes.h"
#include "transport/wire/tls_address.h"
#include "transport/wire/tls_keys.h"

namespace geomesh::fuzz {
namespace {

using namespace transport;  // NOLINT

enum Kind : char { kAddress, kIdentity, kGreeting, kFrame, kKeys, kKinds };

void TryAddress(const std::string& bytes) {
  const absl::StatusOr<TlsAddressParts> parts = ParseTlsAddress(bytes);
  if (!parts.ok()) return;
  FUZZ_CHECK(bytes.size() <= kMaxTlsAddressBytes);
  FUZZ_CHECK(TlsAddress::Sealed(parts->body, parts->seal) == bytes);  // the seal covers the rest
  const std::string body = parts->address.Body();
  const absl::StatusOr<TlsAddressParts> again =
      ParseTlsAddress(TlsAddress::Sealed(body, parts->seal));
  FUZZ_CHECK(again.ok() && again->address.Body() == body && again->seal == parts->seal);
  FUZZ_CHECK(IpEndpoint::Parse(parts->address.endpoint.AddressString()).has_value());
}

void TryIdentity(const std::string& bytes) {
  const absl::StatusOr<LaneIdentity> parsed = LaneIdentity::Parse(bytes);
  if (!parsed.ok()) return;
  FUZZ_CHECK(parsed->lane < parsed->lanes && parsed->lanes <= kMaxTlsLanesPerDial);
  FUZZ_CHECK(parsed->Serialize() == bytes);
}

void TryGreeting(const std::string& bytes) {
  const absl::StatusOr<TlsGreeting> parsed = TlsGreeting::Parse(bytes);
  if (!parsed.ok()) return;
  FUZZ_CHECK(bytes.size() <= kMaxTlsGreetingBytes);
  FUZZ_CHECK(parsed->Serialize() == bytes);
}

void TryFrame(std::string bytes) {
  bytes.resize(FrameHeader::kBytes);
  const absl::StatusOr<FrameHeader> parsed = FrameHeader::Parse(AsBytes(bytes).data());
  if (!parsed.ok()) return;
  FUZZ_CHECK(parsed->header_bytes <= kMaxSegmentHeaderBytes);
  FUZZ_CHECK(parsed->payload_bytes <= kMaxSegmentPayloadBytes);
  std::byte again[FrameHeader::kBytes];
  parsed->SerializeTo(again);
  FUZZ_CHECK(AsText(again) == bytes);
}

void TryKeys(const std::string& bytes) {
  const absl::StatusOr<KeyRing> ring = KeyRing::Parse(bytes);
  if (!ring.ok()) return;
  FUZZ_CHECK(ring->size() > 0);
  FUZZ_CHECK(ring->Find(ring->first().id()) != nullptr);
}

TlsAddress SomeAddress(absl::string_view ip, TlsMode mode) {
  TlsAddress address;
  address.mode = mode;
  address.listener.fill(7);
  address.network = 2;
  address.endpoint = *IpEndpoint::Parse(ip);
  address.endpoint.set_port(23000);
  if (mode == TlsMode::kCertificate) address.certificate = std::string(90, 'c');
  return address;
}

}  // namespace

void TryInput(absl::string_view bytes) {
  Input input(bytes);
  const auto kind = static_cast<Kind>(input.Byte() % kKinds);
  // A copy of its own, so that AddressSanitizer sees a read past its end.
  const std::string rest(input.Rest());
  switch (kind) {
    case kAddress:
      return TryAddress(rest);
    case kIdentity:
      return TryIdentity(rest);
    case kGreeting:
      return TryGreeting(rest);
    case kFrame:
      return TryFrame(rest);
    default:
      return TryKeys(rest);
  }
}

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (const char* ip : {"10.0.0.1", "fd00::1"}) {
    for (const TlsMode mode : {TlsMode::kSharedKey, TlsMode::kCertificate}) {
      seeds.push_back(std::string(1, kAddress) +
                      TlsAddress::Sealed(SomeAddress(ip, mode).Body(), std::string(32, 's')));
    }
  }
  LaneIdentity identity;
  identity.lane = 1;
  identity.lanes = 4;
  seeds.push_back(std::string(1, kIdentity) + identity.Serialize());
  seeds.push_back(std::string(1, kGreeting) +
                  TlsGreeting{identity, std::string(60, 'h')}.Serialize());
  std::byte frame[FrameHeader::kBytes];
  FrameHeader{FrameType::kSegment, 64, 262144}.SerializeTo(frame);
  seeds.push_back(std::string(1, kFrame) + std::string(AsText(frame)));
  // The same key twice, and another one, as while a key is replaced.
  const std::string key = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=\n";
  seeds.push_back(std::string(1, kKeys) + "# old\n" + key + key);
  seeds.push_back(std::string(1, kKeys) + key + "ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA=\n\n");
  return seeds;
}

}  // namespace geomesh::fuzz
