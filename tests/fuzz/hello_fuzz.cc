// The hello of a lane: any bytes are refused, or are what Serialize makes again. The first byte of
// an input says whether its checksum is put right.
#include "fuzz_target.h"
#include "transport/bytes.h"
#include "transport/segment.h"

namespace geomesh::fuzz {

using namespace transport;  // NOLINT

void TryInput(absl::string_view bytes) {
  Input input(bytes);
  const bool right_checksum = input.Byte() % 2 == 1;
  std::string text(input.Rest());
  if (right_checksum) {
    ByteWriter writer;
    writer.Raw(text);
    writer.Integer(Checksum(text));
    text = writer.bytes();
  }
  const absl::StatusOr<Hello> hello = Hello::Parse(AsBytes(text));
  if (!hello.ok() || hello->version != kProtocolVersion) return;
  FUZZ_CHECK(text.size() <= kMaxHelloBytes);
  FUZZ_CHECK(hello->Serialize() == text);
}

std::vector<std::string> Seeds() {
  Hello hello;
  hello.dialer = {1, 2};
  hello.target = {3, 4};
  hello.attempt = 5;
  hello.unexpected_bytes = 32 << 20;
  std::vector<std::string> hellos = {hello.Serialize()};
  hello.description = "rank 2 on host b (eastasia)";
  hello.more = true;
  hellos.push_back(hello.Serialize());
  hello.version = kProtocolVersion + 1;
  hellos.push_back(hello.Serialize());
  std::vector<std::string> seeds;
  for (const std::string& text : hellos) {
    seeds.push_back(std::string(1, '\0') + text);
    seeds.push_back("\1" + text.substr(0, text.size() - sizeof(uint64_t)));
  }
  return seeds;
}

}  // namespace geomesh::fuzz
