#include "transport/wire/ucx_address.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/identity.h"
#include "base/status_macros.h"
#include "transport/wire/wire.h"

namespace geomesh::transport {
namespace {

constexpr uint32_t kAddressMagic = 0x55584d47;   // "GMXU"
constexpr uint32_t kGreetingMagic = 0x49484d47;  // "GMHI"
constexpr uint8_t kPrefixMagic = 0xa7;

class Writer {
 public:
  template <typename T>
  Writer& Int(T value) {
    for (size_t i = 0; i < sizeof(T); ++i) {
      out_.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
    }
    return *this;
  }
  Writer& Endpoint(const IpEndpoint& e) {
    const bool v6 = e.family() == AF_INET6;
    char address[16] = {};
    if (v6) {
      std::memcpy(address, &reinterpret_cast<const sockaddr_in6&>(e.storage).sin6_addr, 16);
    } else {
      std::memcpy(address, &reinterpret_cast<const sockaddr_in&>(e.storage).sin_addr, 4);
    }
    Int<uint8_t>(v6 ? 6 : 4).Int<uint16_t>(e.port());
    out_.append(address, sizeof(address));
    return *this;
  }
  Writer& Bytes(absl::string_view bytes) {
    Int<uint16_t>(bytes.size());
    out_.append(bytes.data(), bytes.size());
    return *this;
  }
  // The checksum of all before it ends every record.
  std::string Finish() {
    Int<uint64_t>(Fnv1a(out_));
    return std::move(out_);
  }

 private:
  std::string out_;
};

// Never reads past the end: after a short read everything reads as zero and ok() is false.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : rest_(bytes) {}

  template <typename T>
  T Int() {
    const absl::string_view bytes = Take(sizeof(T));
    uint64_t value = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
      value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
    }
    return static_cast<T>(value);
  }
  IpEndpoint Endpoint() {
    IpEndpoint e;
    const uint8_t version = Int<uint8_t>();
    const uint16_t port = Int<uint16_t>();
    const absl::string_view address = Take(16);
    if (!ok_) return e;
    if (version == 6) {
      auto& v6 = reinterpret_cast<sockaddr_in6&>(e.storage);
      v6.sin6_family = AF_INET6;
      std::memcpy(&v6.sin6_addr, address.data(), 16);
    } else if (version == 4) {
      auto& v4 = reinterpret_cast<sockaddr_in&>(e.storage);
      v4.sin_family = AF_INET;
      std::memcpy(&v4.sin_addr, address.data(), 4);
    } else {
      ok_ = false;
      return e;
    }
    e.set_port(port);
    return e;
  }
  std::string Bytes() { return std::string(Take(Int<uint16_t>())); }
  bool ok() const { return ok_; }
  bool AtEnd() const { return ok_ && rest_.empty(); }

 private:
  absl::string_view Take(size_t size) {
    if (size > rest_.size()) {
      ok_ = false;
      rest_ = {};
      return {};
    }
    const absl::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

  absl::string_view rest_;
  bool ok_ = true;
};

// The body of a record whose checksum is right.
absl::StatusOr<absl::string_view> Checked(absl::string_view bytes, size_t limit,
                                          absl::string_view what) {
  if (bytes.size() < sizeof(uint64_t) || bytes.size() > limit) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " of ", bytes.size(), " bytes: too short or too long"));
  }
  const absl::string_view body = bytes.substr(0, bytes.size() - sizeof(uint64_t));
  if (Reader(bytes.substr(body.size())).Int<uint64_t>() != Fnv1a(body)) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is damaged: its checksum is wrong"));
  }
  return body;
}

absl::Status CheckMagic(Reader& reader, uint32_t magic, absl::string_view what) {
  if (reader.Int<uint32_t>() != magic) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is not one of wire/ucx"));
  }
  if (const auto version = reader.Int<uint16_t>(); version != kUcxWireVersion) {
    return absl::InvalidArgumentError(absl::StrCat(what, " has wire version ", version,
                                                   ", this process speaks ", kUcxWireVersion,
                                                   ": the job mixes releases of torch_geomesh"));
  }
  return absl::OkStatus();
}

std::string VersionString(uint32_t v) {
  return absl::StrFormat("%d.%d.%d", v >> 16, (v >> 8) & 0xff, v & 0xff);
}

}  // namespace

std::string UcxAddress::Serialize() const {
  return Writer()
      .Int<uint32_t>(kAddressMagic)
      .Int<uint16_t>(kUcxWireVersion)
      .Int<uint64_t>(uid)
      .Int<uint64_t>(network)
      .Int<uint32_t>(ucx_version)
      .Int<uint32_t>(tx_segment_bytes)
      .Int<uint32_t>(rx_segment_bytes)
      .Endpoint(listening)
      .Bytes(ucx)
      .Finish();
}

absl::StatusOr<UcxAddress> UcxAddress::Parse(absl::string_view bytes) {
  constexpr absl::string_view what = "the address blob";
  GM_ASSIGN_OR_RETURN(absl::string_view body, Checked(bytes, kMaxUcxAddressBytes, what));
  Reader reader(body);
  GM_RETURN_IF_ERROR(CheckMagic(reader, kAddressMagic, what));
  UcxAddress address;
  address.uid = reader.Int<uint64_t>();
  address.network = reader.Int<uint64_t>();
  address.ucx_version = reader.Int<uint32_t>();
  address.tx_segment_bytes = reader.Int<uint32_t>();
  address.rx_segment_bytes = reader.Int<uint32_t>();
  address.listening = reader.Endpoint();
  address.ucx = reader.Bytes();
  if (!reader.AtEnd() || address.ucx.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is damaged: its length is wrong"));
  }
  return address;
}

absl::Status CheckCompatible(const UcxAddress& ours, const UcxAddress& theirs) {
  if (ours.tx_segment_bytes != theirs.tx_segment_bytes ||
      ours.rx_segment_bytes != theirs.rx_segment_bytes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "segment sizes differ: %d/%d bytes (send/receive) there, %d/%d here, and UCX would write "
        "past its buffers",
        theirs.tx_segment_bytes, theirs.rx_segment_bytes, ours.tx_segment_bytes,
        ours.rx_segment_bytes));
  }
  if (ours.ucx_version >> 16 != theirs.ucx_version >> 16) {
    return absl::InvalidArgumentError(absl::StrCat("UCX ", VersionString(theirs.ucx_version),
                                                   " there, ", VersionString(ours.ucx_version),
                                                   " here: the major versions must be equal"));
  }
  const std::string addresses = absl::StrCat(theirs.listening.ToString(), " there, ",
                                             ours.listening.AddressString(), " here");
  if (ours.listening.family() != theirs.listening.family()) {
    return absl::InvalidArgumentError(
        absl::StrCat("one side uses IPv4, the other IPv6 (", addresses,
                     "): set GEOMESH_INTERFACE to an address of the same family on all hosts"));
  }
  const bool there = theirs.listening.is_loopback(), here = ours.listening.is_loopback();
  if (there != here || (there && ours.network != theirs.network)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a loopback address cannot be reached from another host (", addresses,
                     "): set GEOMESH_INTERFACE on the host that uses loopback"));
  }
  return absl::OkStatus();
}

void UcxPrefix::SerializeTo(std::byte* out) const {
  for (int i = 0; i < 8; ++i) out[i] = static_cast<std::byte>(nonce >> (8 * i));
  out[8] = static_cast<std::byte>(lane);
  out[9] = static_cast<std::byte>(lane >> 8);
  out[10] = static_cast<std::byte>(from_dialler);
  out[11] = static_cast<std::byte>(kPrefixMagic);
  out[12] = static_cast<std::byte>(kUcxWireVersion);
  out[13] = static_cast<std::byte>(kUcxWireVersion >> 8);
  out[14] = out[15] = std::byte{0};
}

bool UcxPrefix::Parse(const void* bytes, size_t size, UcxPrefix* out) {
  if (size < kBytes) return false;
  Reader reader(absl::string_view(static_cast<const char*>(bytes), kBytes));
  out->nonce = reader.Int<uint64_t>();
  out->lane = reader.Int<uint16_t>();
  const auto direction = reader.Int<uint8_t>();
  out->from_dialler = direction == 1;
  return direction <= 1 && reader.Int<uint8_t>() == kPrefixMagic &&
         reader.Int<uint16_t>() == kUcxWireVersion && reader.Int<uint16_t>() == 0;
}

std::string UcxGreeting::Serialize() const {
  return Writer()
      .Int<uint32_t>(kGreetingMagic)
      .Int<uint16_t>(kUcxWireVersion)
      .Int<uint64_t>(target_uid)
      .Int<uint32_t>(endpoints_before)
      .Int<uint16_t>(lanes)
      .Endpoint(source)
      .Bytes(hello)
      .Bytes(address)
      .Finish();
}

absl::StatusOr<UcxGreeting> UcxGreeting::Parse(absl::string_view bytes) {
  constexpr absl::string_view what = "a lane's greeting";
  GM_ASSIGN_OR_RETURN(absl::string_view body,
                      Checked(bytes, kMaxUcxAddressBytes + kMaxHelloBytes + 128, what));
  Reader reader(body);
  GM_RETURN_IF_ERROR(CheckMagic(reader, kGreetingMagic, what));
  UcxGreeting greeting;
  greeting.target_uid = reader.Int<uint64_t>();
  greeting.endpoints_before = reader.Int<uint32_t>();
  greeting.lanes = reader.Int<uint16_t>();
  greeting.source = reader.Endpoint();
  greeting.hello = reader.Bytes();
  greeting.address = reader.Bytes();
  if (!reader.AtEnd() || greeting.lanes == 0 || greeting.lanes > kMaxLanesPerDial ||
      greeting.hello.size() > kMaxHelloBytes) {
    return absl::InvalidArgumentError(absl::StrCat(what, " has a wrong length or count"));
  }
  return greeting;
}

}  // namespace geomesh::transport
