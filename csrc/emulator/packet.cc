#include "emulator/packet.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace geomesh::emulator {
namespace {

constexpr uint8_t kTcp = 6;
constexpr uint8_t kUdp = 17;
constexpr size_t kIpv4Header = 20;
constexpr size_t kIpv6Header = 40;
constexpr size_t kTcpHeader = 20;
constexpr size_t kTcpFlags = 13;
constexpr size_t kTcpChecksum = 16;
constexpr uint8_t kFin = 0x01;
constexpr uint8_t kPsh = 0x08;
constexpr uint8_t kCwr = 0x80;

uint16_t Load16(const uint8_t* p) { return static_cast<uint16_t>(p[0] << 8 | p[1]); }
uint32_t Load32(const uint8_t* p) { return static_cast<uint32_t>(Load16(p)) << 16 | Load16(p + 2); }
void Store16(uint8_t* p, uint32_t v) {
  p[0] = static_cast<uint8_t>(v >> 8);
  p[1] = static_cast<uint8_t>(v);
}
void Store32(uint8_t* p, uint32_t v) {
  Store16(p, v >> 16);
  Store16(p + 2, v & 0xffff);
}

uint16_t Fold(uint64_t sum) {
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  return static_cast<uint16_t>(sum);
}

// Finaliser of splitmix64: every input bit reaches every output bit.
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

uint16_t OnesComplementSum(std::span<const uint8_t> bytes, uint32_t start) {
  uint64_t sum = start;
  size_t i = 0;
  for (; i + 1 < bytes.size(); i += 2) sum += Load16(&bytes[i]);
  if (i < bytes.size()) sum += static_cast<uint32_t>(bytes[i]) << 8;
  return Fold(sum);
}

std::optional<Packet> Packet::Parse(const VnetHeader& vnet, std::vector<uint8_t> bytes) {
  Packet packet;
  packet.vnet_ = vnet;
  packet.bytes_ = std::move(bytes);
  if (!packet.ReadAddresses() || !packet.ReadSegmentation()) return std::nullopt;
  return packet;
}

bool Packet::ReadAddresses() {
  const uint8_t* ip = bytes_.data();
  const size_t size = bytes_.size();
  if (size < kIpv4Header) return false;
  size_t l4 = 0;
  uint8_t protocol = 0;
  bool fragment = false;
  uint64_t hash = 0;
  if (ip[0] >> 4 == 4) {
    l4 = (ip[0] & 15) * 4;
    if (l4 < kIpv4Header || l4 > size) return false;
    protocol = ip[9];
    fragment = (Load16(ip + 6) & 0x3fff) != 0;
    if (ip[16] == 10 && ip[17] == 71 && ip[18] >= 1 && ip[18] <= kMaxRegions) {
      destination_ = ip[18] - 1;
    }
    hash = Mix(static_cast<uint64_t>(Load32(ip + 12)) << 32 | Load32(ip + 16));
  } else if (ip[0] >> 4 == 6) {
    if (size < kIpv6Header) return false;
    l4 = kIpv6Header;
    protocol = ip[6];  // an extension header is hashed as a protocol without ports
    static constexpr uint8_t kPrefix[12] = {0xfd, 0x71};
    const uint32_t owner = Load16(ip + 36);
    if (std::memcmp(ip + 24, kPrefix, sizeof(kPrefix)) == 0 && owner >= 1 && owner <= kMaxRegions) {
      destination_ = static_cast<int>(owner) - 1;
    }
    for (size_t i = 8; i < kIpv6Header; i += 4) hash = Mix(hash * 31 + Load32(ip + i));
  } else {
    return false;
  }
  uint32_t ports = 0;
  if (!fragment && (protocol == kTcp || protocol == kUdp) && l4 + 4 <= size)
    ports = Load32(ip + l4);
  flow_hash_ = Mix(hash ^ (static_cast<uint64_t>(protocol) << 32 | ports));
  return true;
}

bool Packet::ReadSegmentation() {
  const int gso = vnet_.gso_type & ~VnetHeader::kGsoEcn;
  if (gso == VnetHeader::kGsoNone) return true;
  const bool v4 = bytes_[0] >> 4 == 4;
  if (gso != (v4 ? VnetHeader::kGsoTcpV4 : VnetHeader::kGsoTcpV6)) return false;
  // TSO implies a partial checksum, whose start is the TCP header.
  if (!(vnet_.flags & VnetHeader::kNeedsChecksum) || vnet_.gso_size == 0) return false;
  const size_t tcp = vnet_.checksum_start;
  if (tcp < (v4 ? kIpv4Header : kIpv6Header) || tcp + kTcpHeader > bytes_.size()) return false;
  const size_t tcp_bytes = (bytes_[tcp + 12] >> 4) * 4;
  const size_t header = tcp + tcp_bytes;
  if (tcp_bytes < kTcpHeader || header > kMaxHeaderBytes || header > bytes_.size()) return false;
  const size_t payload = bytes_.size() - header;
  header_bytes_ = static_cast<uint32_t>(header);
  segment_payload_ = vnet_.gso_size;
  segments_ = std::max<uint32_t>(
      1, static_cast<uint32_t>((payload + segment_payload_ - 1) / segment_payload_));
  return true;
}

uint32_t Packet::SegmentBytes(uint32_t index) const {
  if (segment_payload_ == 0) return static_cast<uint32_t>(bytes_.size());
  if (index + 1 < segments_) return header_bytes_ + segment_payload_;
  return static_cast<uint32_t>(bytes_.size()) - index * segment_payload_;
}

uint64_t Packet::WireBytes() const {
  return bytes_.size() + static_cast<uint64_t>(segments_ - 1) * header_bytes_;
}

void Piece::Render(Image& image) const {
  const Packet& packet = *packet_;
  const std::vector<uint8_t>& bytes = packet.bytes_;
  image.vnet = packet.vnet_;
  if (whole()) {
    image.header_bytes = 0;
    image.payload = bytes;
    return;
  }
  const size_t header = packet.header_bytes_;
  const size_t tcp = packet.vnet_.checksum_start;
  const size_t begin = header + static_cast<size_t>(first_) * packet.segment_payload_;
  const size_t end =
      std::min(bytes.size(), begin + static_cast<size_t>(count_) * packet.segment_payload_);
  image.header_bytes = header;
  image.payload = std::span(bytes).subspan(begin, end - begin);
  uint8_t* ip = image.headers.data();
  std::memcpy(ip, bytes.data(), header);

  const uint32_t ip_bytes = static_cast<uint32_t>(header + image.payload.size());
  if (ip[0] >> 4 == 4) {
    Store16(ip + 2, ip_bytes);
    Store16(ip + 4, (Load16(ip + 4) + first_) & 0xffff);
    Store16(ip + 10, 0);
    const size_t ip_header = (ip[0] & 15) * 4;
    Store16(ip + 10, static_cast<uint16_t>(~OnesComplementSum({ip, ip_header})));
  } else {
    Store16(ip + 4, ip_bytes - kIpv6Header);
  }

  Store32(ip + tcp + 4, Load32(ip + tcp + 4) + first_ * packet.segment_payload_);
  uint8_t flags = ip[tcp + kTcpFlags];
  if (first_ > 0) flags &= static_cast<uint8_t>(~kCwr);
  if (first_ + count_ < packet.segments_) flags &= static_cast<uint8_t>(~(kFin | kPsh));
  ip[tcp + kTcpFlags] = flags;

  // The checksum field holds the sum of the pseudo header, in which the TCP length is one word
  // (IPv6: two, but lengths stay below 2^17 and the fold is the same).
  const uint32_t old_length = static_cast<uint32_t>(bytes.size() - tcp);
  const uint32_t new_length = static_cast<uint32_t>(ip_bytes - tcp);
  const uint64_t partial = Load16(ip + tcp + kTcpChecksum);
  const uint64_t without_old = partial + static_cast<uint16_t>(~Fold(old_length));
  Store16(ip + tcp + kTcpChecksum, Fold(without_old + Fold(new_length)));

  if (count_ == 1) {
    image.vnet.gso_type = VnetHeader::kGsoNone;
    image.vnet.gso_size = 0;
  }
  image.vnet.header_bytes = static_cast<uint16_t>(header);
}

}  // namespace geomesh::emulator
