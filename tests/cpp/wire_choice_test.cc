// Which wire the options choose, and what they can't be.
#include "transport/wire/choose.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace geomesh::transport {
namespace {

using ::testing::HasSubstr;

std::string Choice(const std::vector<std::pair<std::string, std::string>>& set) {
  Options options;
  for (const auto& [name, text] : set) {
    if (auto status = options.Set(name, text); !status.ok()) return std::string(status.message());
  }
  auto wire = MakeWire(options, {});
  return std::string(wire.ok() ? (*wire)->name() : wire.status().message());
}

TEST(WireChoice, AKeyMeansTls) {
  EXPECT_EQ(Choice({}), "ucx");
  EXPECT_EQ(Choice({{"wire", "ucx"}}), "ucx");
  EXPECT_EQ(Choice({{"psk_file", "/k"}}), "tls");
  EXPECT_EQ(Choice({{"psk_file", "/k"}, {"wire", "tls"}, {"advertise", "a.example:1"}}), "tls");
  EXPECT_EQ(Choice({{"tls_cert", "/c"}, {"tls_key", "/k"}, {"tls_ca", "/a"}}), "tls");
}

TEST(WireChoice, ContradictionsAreRefused) {
  EXPECT_THAT(Choice({{"psk_file", "/k"}, {"wire", "ucx"}}),
              HasSubstr("can't be secured from inside"));
  EXPECT_THAT(Choice({{"tls_cert", "/c"}, {"wire", "ucx"}}),
              HasSubstr("can't be secured from inside"));
  EXPECT_THAT(Choice({{"wire", "tls"}}), HasSubstr("GEOMESH_WIRE=tls needs GEOMESH_PSK_FILE"));
  EXPECT_THAT(Choice({{"advertise", "1.2.3.4"}}), HasSubstr("GEOMESH_ADVERTISE is for wire/tls"));
  EXPECT_EQ(Choice({{"psk_file", "/k"}, {"dscp", "46,10"}}), "tls");
  EXPECT_THAT(Choice({{"dscp", "46,10"}}), HasSubstr("GEOMESH_DSCP is for wire/tls"));
  for (const char* wrong : {"46", "46,64", "46,10,1", "a,b", ",", "-1,0"}) {
    EXPECT_EQ(Choice({{"dscp", wrong}}),
              absl::StrCat("dscp='", wrong, "': takes two numbers from 0 to 63, such as 46,10"));
  }
  EXPECT_EQ(Choice({{"wire", "tcp"}}), "wire='tcp': takes ucx or tls");
}

}  // namespace
}  // namespace geomesh::transport
