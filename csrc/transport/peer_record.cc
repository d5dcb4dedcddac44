// PeerRecord's form in the rendezvous store: magic, version, length, fields, checksum.
#include "absl/strings/str_cat.h"
#include "transport/bytes.h"
#include "transport/engine.h"

namespace geomesh::transport {
namespace {

constexpr uint32_t kRecordMagic = 0x31524d47;  // "GMR1"
constexpr uint16_t kRecordVersion = 2;
constexpr size_t kMaxNameBytes = 256;
constexpr size_t kMaxAddressBytes = 16 * 1024;
constexpr size_t kMaxRecordBytes = 32 * 1024;

}  // namespace

std::string PeerRecord::Serialize() const {
  ByteWriter body;
  body.Integer(uid.high);
  body.Integer(uid.low);
  body.Integer(static_cast<int32_t>(rank));
  body.Text(host, kMaxNameBytes);
  body.Text(region, kMaxNameBytes);
  body.Text(wire, kMaxNameBytes);
  body.Text(address, kMaxAddressBytes);
  body.Text(topology_fingerprint, kMaxNameBytes);
  body.Text(memory, kMaxNameBytes);

  ByteWriter record;
  record.Integer(kRecordMagic);
  record.Integer(kRecordVersion);
  record.Integer(static_cast<uint32_t>(body.bytes().size()));
  record.Raw(body.bytes());
  record.Integer(Checksum(record.bytes()));
  return record.bytes();
}

absl::StatusOr<PeerRecord> PeerRecord::Parse(absl::string_view bytes) {
  constexpr size_t kAround = 4 + 2 + 4 + 8;
  ByteReader reader(bytes);
  uint32_t magic = 0, body_bytes = 0;
  uint16_t version = 0;
  if (bytes.size() > kMaxRecordBytes || !reader.Integer(&magic) || magic != kRecordMagic) {
    return absl::InvalidArgumentError("not a torch_geomesh peer record");
  }
  if (!reader.Integer(&version) || version != kRecordVersion) {
    return absl::InvalidArgumentError(absl::StrCat("peer record of version ", version,
                                                   ", this process speaks ", kRecordVersion,
                                                   ": install the same torch_geomesh everywhere"));
  }
  if (!reader.Integer(&body_bytes) || bytes.size() < kAround ||
      body_bytes != bytes.size() - kAround) {
    return absl::InvalidArgumentError(
        absl::StrCat("peer record is cut: ", bytes.size(), " bytes came"));
  }
  uint64_t checksum = 0;
  ByteReader(bytes.substr(bytes.size() - 8)).Integer(&checksum);
  if (checksum != Checksum(bytes.substr(0, bytes.size() - 8))) {
    return absl::InvalidArgumentError("peer record with a wrong checksum");
  }
  PeerRecord record;
  int32_t rank = 0;
  if (!reader.Integer(&record.uid.high) || !reader.Integer(&record.uid.low) ||
      !reader.Integer(&rank) || !reader.Text(&record.host, kMaxNameBytes) ||
      !reader.Text(&record.region, kMaxNameBytes) || !reader.Text(&record.wire, kMaxNameBytes) ||
      !reader.Text(&record.address, kMaxAddressBytes) ||
      !reader.Text(&record.topology_fingerprint, kMaxNameBytes) ||
      !reader.Text(&record.memory, kMaxNameBytes) || !reader.Integer(&checksum) ||
      !reader.empty()) {
    return absl::InvalidArgumentError("peer record with a field of a wrong length");
  }
  record.rank = rank;
  return record;
}

}  // namespace geomesh::transport
