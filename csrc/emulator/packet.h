// One packet as a TUN device with vnet headers hands it over: an IP packet, or a TCP super-packet
// of up to 64 KB that stands for many wire segments. Splits super-packets by rewriting headers.
// Knows IP, TCP and the vnet header; nothing of links, devices or time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace geomesh::emulator {

// Addresses are arithmetic: region i owns 10.71.(i+1).0/24 and fd71::(i+1):0/112.
inline constexpr int kMaxRegions = 250;
inline constexpr size_t kMaxPacketBytes = 65536 + 256;
// IP header with options or extensions, plus the longest TCP header.
inline constexpr size_t kMaxHeaderBytes = 256;

// struct virtio_net_hdr of <linux/virtio_net.h>, which is not C++ (it has a member named class).
struct VnetHeader {
  static constexpr uint8_t kNeedsChecksum = 1;  // flags
  static constexpr uint8_t kGsoNone = 0;        // gso_type
  static constexpr uint8_t kGsoTcpV4 = 1;
  static constexpr uint8_t kGsoTcpV6 = 4;
  static constexpr uint8_t kGsoEcn = 0x80;

  uint8_t flags = 0;
  uint8_t gso_type = 0;
  uint16_t header_bytes = 0;
  uint16_t gso_size = 0;
  uint16_t checksum_start = 0;
  uint16_t checksum_offset = 0;
};
static_assert(sizeof(VnetHeader) == 10);

class Packet {
 public:
  // Reads the headers of `bytes`. Nothing if they are not IP, are cut short, contradict the vnet
  // header, or carry a kind of segmentation that this device never offered.
  static std::optional<Packet> Parse(const VnetHeader& vnet, std::vector<uint8_t> bytes);

  // The region that owns the destination address, -1 if none can.
  int destination() const { return destination_; }
  // Equal for all packets of one flow (addresses, protocol, ports); not the same both ways.
  uint64_t flow_hash() const { return flow_hash_; }

  // Wire segments this packet stands for, at least 1.
  uint32_t segments() const { return segments_; }
  // IP bytes of segment `index`, headers included.
  uint32_t SegmentBytes(uint32_t index) const;
  // IP bytes of all segments.
  uint64_t WireBytes() const;

  const std::vector<uint8_t>& bytes() const { return bytes_; }
  const VnetHeader& vnet() const { return vnet_; }

 private:
  friend class Piece;
  Packet() = default;
  bool ReadAddresses();
  bool ReadSegmentation();

  VnetHeader vnet_;
  std::vector<uint8_t> bytes_;
  int destination_ = -1;
  uint64_t flow_hash_ = 0;
  uint32_t segments_ = 1;
  uint32_t header_bytes_ = 0;     // of each segment; only for super-packets
  uint32_t segment_payload_ = 0;  // of each segment but the last; 0: not a super-packet
};

// Consecutive segments of one packet, delivered as one (smaller) super-packet.
class Piece {
 public:
  // What goes into one writev(): the vnet header, the rewritten headers, the untouched payload.
  struct Image {
    VnetHeader vnet;
    std::array<uint8_t, kMaxHeaderBytes> headers;
    size_t header_bytes = 0;
    std::span<const uint8_t> payload;
  };

  Piece(std::shared_ptr<const Packet> packet, uint32_t first, uint32_t count)
      : packet_(std::move(packet)), first_(first), count_(count) {}

  const Packet& packet() const { return *packet_; }
  uint32_t first() const { return first_; }
  uint32_t count() const { return count_; }
  bool whole() const { return first_ == 0 && count_ == packet_->segments(); }

  // Fills `image` (which stays valid while this piece lives).
  void Render(Image& image) const;

 private:
  std::shared_ptr<const Packet> packet_;
  uint32_t first_;
  uint32_t count_;
};

// The one's complement sum of big-endian 16-bit words, folded to 16 bits and not inverted.
uint16_t OnesComplementSum(std::span<const uint8_t> bytes, uint32_t start = 0);

}  // namespace geomesh::emulator
