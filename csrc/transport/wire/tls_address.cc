#include "transport/wire/tls_address.h"

#include <openssl/rand.h>

#include <cstdlib>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "transport/bytes.h"

namespace geomesh::transport {
namespace {

constexpr uint32_t kAddressMagic = 0x54584d47;   // "GMXT"
constexpr uint32_t kIdentityMagic = 0x494c4d47;  // "GMLI"
constexpr size_t kMaxCertificateBytes = 6 << 10;
constexpr size_t kMaxSealBytes = 1 << 10;

template <size_t size>
void Put(ByteWriter& writer, const std::array<uint8_t, size>& bytes) {
  writer.Raw({reinterpret_cast<const char*>(bytes.data()), size});
}

template <size_t size>
bool Take(ByteReader& reader, std::array<uint8_t, size>* bytes) {
  for (uint8_t& byte : *bytes) {
    if (!reader.Integer(&byte)) return false;
  }
  return true;
}

void PutEndpoint(ByteWriter& writer, const IpEndpoint& e) {
  std::array<uint8_t, 16> address{};
  const bool v6 = e.family() == AF_INET6;
  if (v6) {
    std::memcpy(address.data(), &reinterpret_cast<const sockaddr_in6&>(e.storage).sin6_addr, 16);
  } else {
    std::memcpy(address.data(), &reinterpret_cast<const sockaddr_in&>(e.storage).sin_addr, 4);
  }
  writer.Integer<uint8_t>(v6 ? 6 : 4);
  writer.Integer<uint16_t>(e.port());
  Put(writer, address);
}

bool TakeEndpoint(ByteReader& reader, IpEndpoint* e) {
  uint8_t version = 0;
  uint16_t port = 0;
  std::array<uint8_t, 16> address{};
  if (!reader.Integer(&version) || !reader.Integer(&port) || !Take(reader, &address)) return false;
  if (version == 6) {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(e->storage);
    v6.sin6_family = AF_INET6;
    std::memcpy(&v6.sin6_addr, address.data(), 16);
  } else if (version == 4) {
    auto& v4 = reinterpret_cast<sockaddr_in&>(e->storage);
    v4.sin_family = AF_INET;
    std::memcpy(&v4.sin_addr, address.data(), 4);
  } else {
    return false;
  }
  e->set_port(port);
  return port != 0;
}

absl::Status CheckVersion(uint16_t version, absl::string_view what) {
  if (version == kTlsWireVersion) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, " has wire version ", version,
                                                 ", this process speaks ", kTlsWireVersion,
                                                 ": the job mixes releases of torch_geomesh"));
}

}  // namespace

TlsId RandomTlsId() {
  TlsId id;
  if (RAND_bytes(id.data(), static_cast<int>(id.size())) != 1) std::abort();
  return id;
}

std::string ShortHex(absl::Span<const uint8_t> bytes) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(bytes.data()), 4});
}

absl::string_view TlsModeName(TlsMode mode) {
  return mode == TlsMode::kSharedKey ? "a shared key (GEOMESH_PSK_FILE)"
                                     : "certificates (GEOMESH_TLS_CERT)";
}

std::string TlsAddress::Body() const {
  ByteWriter writer;
  writer.Integer(kAddressMagic);
  writer.Integer(kTlsWireVersion);
  writer.Integer(static_cast<uint8_t>(mode));
  Put(writer, listener);
  writer.Integer(network);
  PutEndpoint(writer, endpoint);
  writer.Text(certificate, kMaxCertificateBytes);
  return writer.bytes();
}

std::string TlsAddress::Sealed(absl::string_view body, absl::string_view seal) {
  ByteWriter writer;
  writer.Raw(body);
  writer.Text(seal, kMaxSealBytes);
  return writer.bytes();
}

absl::StatusOr<TlsAddressParts> ParseTlsAddress(absl::string_view blob) {
  constexpr absl::string_view what = "the address";
  TlsAddressParts parts;
  ByteReader reader(blob);
  uint32_t magic = 0;
  uint16_t version = 0;
  uint8_t mode = 0;
  if (blob.size() > kMaxTlsAddressBytes || !reader.Integer(&magic) || magic != kAddressMagic) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is not one of wire/tls"));
  }
  if (!reader.Integer(&version)) version = 0;
  GM_RETURN_IF_ERROR(CheckVersion(version, what));
  TlsAddress& address = parts.address;
  if (!reader.Integer(&mode) || (mode != 1 && mode != 2) || !Take(reader, &address.listener) ||
      !reader.Integer(&address.network) || !TakeEndpoint(reader, &address.endpoint) ||
      !reader.Text(&address.certificate, kMaxCertificateBytes) ||
      !reader.Text(&parts.seal, kMaxSealBytes) || !reader.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(what, " of ", blob.size(), " bytes is damaged"));
  }
  address.mode = static_cast<TlsMode>(mode);
  parts.body = blob.substr(0, blob.size() - sizeof(uint16_t) - parts.seal.size());
  return parts;
}

std::string LaneIdentity::Serialize() const {
  ByteWriter writer;
  writer.Integer(kIdentityMagic);
  Put(writer, key);
  Put(writer, dialler);
  Put(writer, listener);
  Put(writer, dial);
  writer.Integer(lane);
  writer.Integer(lanes);
  return writer.bytes();
}

absl::StatusOr<LaneIdentity> LaneIdentity::Parse(absl::string_view bytes) {
  ByteReader reader(bytes);
  LaneIdentity identity;
  uint32_t magic = 0;
  if (!reader.Integer(&magic) || magic != kIdentityMagic || !Take(reader, &identity.key) ||
      !Take(reader, &identity.dialler) || !Take(reader, &identity.listener) ||
      !Take(reader, &identity.dial) || !reader.Integer(&identity.lane) ||
      !reader.Integer(&identity.lanes) || !reader.empty()) {
    return absl::InvalidArgumentError("an identity that is not one of wire/tls");
  }
  if (identity.lanes < 1 || identity.lanes > kMaxTlsLanesPerDial ||
      identity.lane >= identity.lanes) {
    return absl::InvalidArgumentError(
        absl::StrCat("an identity of lane ", identity.lane, " of ", identity.lanes));
  }
  return identity;
}

std::string TlsGreeting::Serialize() const {
  ByteWriter writer;
  writer.Integer(kTlsWireVersion);
  writer.Raw(identity.Serialize());
  writer.Text(hello, kMaxHelloBytes);
  return writer.bytes();
}

absl::StatusOr<TlsGreeting> TlsGreeting::Parse(absl::string_view bytes) {
  constexpr absl::string_view what = "the greeting";
  ByteReader reader(bytes);
  uint16_t version = 0;
  if (!reader.Integer(&version)) return absl::InvalidArgumentError("an empty greeting");
  GM_RETURN_IF_ERROR(CheckVersion(version, what));
  if (bytes.size() < 2 + LaneIdentity::kBytes) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is cut short"));
  }
  TlsGreeting greeting;
  GM_ASSIGN_OR_RETURN(greeting.identity,
                      LaneIdentity::Parse(bytes.substr(2, LaneIdentity::kBytes)));
  ByteReader rest(bytes.substr(2 + LaneIdentity::kBytes));
  if (!rest.Text(&greeting.hello, kMaxHelloBytes) || !rest.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(what, " has a wrong length"));
  }
  return greeting;
}

void FrameHeader::SerializeTo(std::byte* out) const {
  out[0] = static_cast<std::byte>(type);
  out[1] = std::byte{0};
  for (int i = 0; i < 2; ++i) out[2 + i] = static_cast<std::byte>(header_bytes >> (8 * i));
  for (int i = 0; i < 4; ++i) out[4 + i] = static_cast<std::byte>(payload_bytes >> (8 * i));
}

absl::StatusOr<FrameHeader> FrameHeader::Parse(const std::byte* bytes) {
  ByteReader reader(absl::MakeConstSpan(bytes, kBytes));
  uint8_t type = 0, zero = 0;
  FrameHeader header;
  reader.Integer(&type);
  reader.Integer(&zero);
  reader.Integer(&header.header_bytes);
  reader.Integer(&header.payload_bytes);
  if (type < 1 || type > 4 || zero != 0) {
    return absl::InvalidArgumentError(absl::StrCat("a frame of unknown type ", type));
  }
  if (header.header_bytes > kMaxSegmentHeaderBytes ||
      header.payload_bytes > kMaxSegmentPayloadBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a frame of ", header.header_bytes, " + ", header.payload_bytes, " bytes; at most ",
        kMaxSegmentHeaderBytes, " + ", kMaxSegmentPayloadBytes, " are allowed"));
  }
  header.type = static_cast<FrameType>(type);
  return header;
}

}  // namespace geomesh::transport
