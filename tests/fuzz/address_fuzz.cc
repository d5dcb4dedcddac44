// Address blobs, greetings and prefixes of wire/ucx. The first byte of an input says which, and
// whether the checksum at its end is put right.
#include "base/identity.h"
#include "fuzz_target.h"
#include "transport/bytes.h"
#include "transport/wire/ucx_address.h"

namespace geomesh::fuzz {
namespace {

using namespace transport;  // NOLINT

enum Kind : char { kAddress, kRightAddress, kGreeting, kRightGreeting, kPrefix, kKinds };

std::string Checked(absl::string_view body) {
  ByteWriter writer;
  writer.Raw(body);
  writer.Integer(Fnv1a(body));
  return writer.bytes();
}

UcxAddress SomeAddress(absl::string_view ip) {
  UcxAddress address;
  address.uid = 1;
  address.network = 2;
  address.ucx_version = 1 << 16 | 22 << 8;
  address.tx_segment_bytes = 8192;
  address.rx_segment_bytes = 270336;
  address.listening = *IpEndpoint::Parse(ip);
  address.listening.set_port(23000);
  address.ucx = std::string(48, 'u');
  return address;
}

void TryAddress(const std::string& bytes) {
  const absl::StatusOr<UcxAddress> parsed = UcxAddress::Parse(bytes);
  if (!parsed.ok()) return;
  const std::string again = parsed->Serialize();
  const absl::StatusOr<UcxAddress> second = UcxAddress::Parse(again);
  FUZZ_CHECK(second.ok() && second->Serialize() == again);
  FUZZ_CHECK(again.size() == bytes.size());
  FUZZ_CHECK(IpEndpoint::Parse(parsed->listening.AddressString()).has_value());
  CheckCompatible(SomeAddress("10.0.0.1"), *parsed).IgnoreError();
}

void TryGreeting(const std::string& bytes) {
  const absl::StatusOr<UcxGreeting> parsed = UcxGreeting::Parse(bytes);
  if (!parsed.ok()) return;
  FUZZ_CHECK(parsed->lanes > 0 && parsed->lanes <= kMaxLanesPerDial);
  const std::string again = parsed->Serialize();
  const absl::StatusOr<UcxGreeting> second = UcxGreeting::Parse(again);
  FUZZ_CHECK(second.ok() && second->Serialize() == again);
  TryAddress(parsed->address);
}

}  // namespace

void TryInput(absl::string_view bytes) {
  Input input(bytes);
  const auto kind = static_cast<Kind>(input.Byte() % kKinds);
  const std::string rest(input.Rest());
  switch (kind) {
    case kAddress:
      return TryAddress(rest);
    case kRightAddress:
      return TryAddress(Checked(rest));
    case kGreeting:
      return TryGreeting(rest);
    case kRightGreeting:
      return TryGreeting(Checked(rest));
    default: {
      UcxPrefix prefix;
      if (!UcxPrefix::Parse(rest.data(), rest.size(), &prefix)) return;
      std::byte again[UcxPrefix::kBytes];
      prefix.SerializeTo(again);
      FUZZ_CHECK(AsText(again) == rest.substr(0, UcxPrefix::kBytes));
    }
  }
}

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (const char* ip : {"10.0.0.1", "fd00::1"}) {
    const std::string address = SomeAddress(ip).Serialize();
    UcxGreeting greeting;
    greeting.target_uid = 1;
    greeting.lanes = 4;
    greeting.source = *IpEndpoint::Parse(ip);
    greeting.hello = std::string(60, 'h');
    greeting.address = address;
    const std::string greeted = greeting.Serialize();
    seeds.push_back(std::string(1, kAddress) + address);
    seeds.push_back(std::string(1, kRightAddress) + address.substr(0, address.size() - 8));
    seeds.push_back(std::string(1, kGreeting) + greeted);
    seeds.push_back(std::string(1, kRightGreeting) + greeted.substr(0, greeted.size() - 8));
  }
  std::byte prefix[UcxPrefix::kBytes];
  UcxPrefix{.nonce = 1, .lane = 2, .from_dialler = true}.SerializeTo(prefix);
  seeds.push_back(std::string(1, kPrefix) + std::string(AsText(prefix)));
  return seeds;
}

}  // namespace geomesh::fuzz
