// Peer records, as they come from the rendezvous store. The first byte of an input says whether its
// checksum and length are put right, behind which the fields' parser is reached.
#include "fuzz_target.h"
#include "transport/bytes.h"
#include "transport/engine.h"

namespace geomesh::fuzz {

using namespace transport;  // NOLINT

void TryInput(absl::string_view bytes) {
  Input input(bytes);
  std::string record;
  if (input.Byte() % 2 == 0) {
    record = std::string(input.Rest());
  } else {
    const absl::string_view head = absl::string_view("GMR1\2", 6);
    const absl::string_view body = input.Rest();
    ByteWriter writer;
    writer.Raw(head);
    writer.Integer(static_cast<uint32_t>(body.size()));
    writer.Raw(body);
    writer.Integer(Checksum(writer.bytes()));
    record = writer.bytes();
  }
  const absl::StatusOr<PeerRecord> parsed = PeerRecord::Parse(record);
  if (parsed.ok()) FUZZ_CHECK(parsed->Serialize() == record);
}

std::vector<std::string> Seeds() {
  PeerRecord record;
  record.uid = {1, 2};
  record.rank = 3;
  std::vector<std::string> seeds = {std::string(1, '\0') + record.Serialize()};
  record.host = "b";
  record.region = "eastasia";
  record.wire = "ucx";
  record.address = std::string(100, 'a');
  record.topology_fingerprint = "0123456789abcdef";
  record.memory = std::string(40, 'm');
  const std::string bytes = record.Serialize();
  seeds.push_back(std::string(1, '\0') + bytes);
  constexpr size_t kHead = 10, kChecksum = 8;
  seeds.push_back("\1" + bytes.substr(kHead, bytes.size() - kHead - kChecksum));
  return seeds;
}

}  // namespace geomesh::fuzz
