// Which device and address: the rules alone, then whole hosts as network namespaces (needs root, as
// all tests of the emulator do).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>

#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/log.h"
#include "transport/wire/device.h"
#include "transport/wire/sockets.h"
#include "ucx_testing.h"

namespace geomesh::transport {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// ---- the rules

TEST(Device, ParsesAddresses) {
  for (const char* text : {"10.0.0.1", "255.255.255.255", "fd00::1", "::1", "2001:db8::5"}) {
    auto address = IpEndpoint::Parse(text);
    ASSERT_TRUE(address.has_value()) << text;
    EXPECT_EQ(address->AddressString(), text);
  }
  EXPECT_EQ(IpEndpoint::Parse("[fd00::1]")->AddressString(), "fd00::1");
  EXPECT_EQ(IpEndpoint::Parse("fe80::1%lo")->AddressString(), "fe80::1%lo");
  auto with_port = *IpEndpoint::Parse("fd00::1");
  with_port.set_port(5000);
  EXPECT_EQ(with_port.ToString(), "[fd00::1]:5000");
  for (const char* text : {"", "10.0.0", "10.0.0.256", "eth0", "fe80::1%none", "fd00::1%", "::g"}) {
    EXPECT_TRUE(!IpEndpoint::Parse(text).has_value() || std::string(text) == "fd00::1%") << text;
  }
}

TEST(Device, KnowsPublicAddresses) {
  for (const char* text : {"8.8.8.8", "172.15.255.255", "172.32.0.0", "100.63.0.1", "100.128.0.1",
                           "192.167.0.1", "2a00::1", "2001:4860::8"}) {
    EXPECT_TRUE(IpEndpoint::Parse(text)->is_public()) << text;
  }
  for (const char* text :
       {"10.255.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "100.127.0.1",
        "127.0.0.1", "169.254.1.1", "203.0.113.9", "fd00::1", "fe80::1", "::1", "2001:db8::1"}) {
    EXPECT_FALSE(IpEndpoint::Parse(text)->is_public()) << text;
  }
}

TEST(Device, BadInterfaceValuesListThosePresent) {
  for (const char* text : {"^lo,docker", "eth99", "eth0,eth1", "", "10.99.99.99", "fd99::1",
                           "10.99.0.0/16", "10.0.0.0/99", "lo ", "fe80::1%lo", "lo*"}) {
    DeviceOptions options;
    options.interface = text;
    auto device = ChooseDevice(options);
    ASSERT_EQ(device.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(device.status().message()),
                AllOf(StartsWith("GEOMESH_INTERFACE: "), HasSubstr("interfaces present: "),
                      HasSubstr("lo (127.0.0.1")))
        << text;
    EXPECT_THAT(std::string(device.status().message()), HasSubstr(text));
  }
}

TEST(Device, LoopbackOnlyForOneHost) {
  DeviceOptions options;
  options.master = "127.0.0.1";
  EXPECT_EQ(ChooseDevice(options)->interface, "lo");
  options.scope = HostScope::kSingleHost;
  EXPECT_EQ(ChooseDevice(options)->interface, "lo");
  options.master = "127.0.1.1";  // as /etc/hosts of Debian has it for the host's own name
  EXPECT_EQ(ChooseDevice(options)->interface, "lo");
  options.master = "localhost";
  EXPECT_EQ(ChooseDevice(options)->interface, "lo");
  options.scope = HostScope::kSeveralHosts;
  options.interface = "lo";
  auto device = ChooseDevice(options);
  EXPECT_EQ(device.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(device.status().message()), HasSubstr("other hosts cannot reach"));
}

// ---- hosts

bool Shell(const std::string& command) {
  const int status = std::system((command + " >/dev/null 2>&1").c_str());
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Two namespaces "a" and "b", joined by eth0 of each.
class Hosts : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(geteuid(), 0) << "network namespaces need root";
    for (const char* host : {"a", "b"}) ASSERT_TRUE(Shell("ip netns add " + Name(host)));
    ASSERT_TRUE(
        Shell("ip -n " + Name("a") + " link add eth0 type veth peer name eth0 netns " + Name("b")));
    for (const char* host : {"a", "b"}) {
      Ip(host, "link set lo up");
      Ip(host, "link set eth0 up");
    }
  }
  void TearDown() override {
    for (const char* host : {"a", "b"}) Shell("ip netns del " + Name(host));
  }

  std::string Name(const std::string& host) const {
    return absl::StrCat("gm-ucx-", getpid(), "-", host);
  }
  void Ip(const std::string& host, const std::string& command) const {
    ASSERT_TRUE(Shell("ip -n " + Name(host) + " " + command)) << command;
  }
  std::vector<std::string> In(const std::string& host) const {
    return {"ip", "netns", "exec", Name(host)};
  }
  // "eth0 10.0.0.1", or "error: ...".
  std::string Choice(const std::string& host, std::vector<std::string> options) const {
    Process process("choose", std::move(options), In(host));
    return process.Hear().value_or("nothing");
  }
  // Two lanes from b to a, some segments echoed; "ok sockets=N" (b's) or what went wrong.
  std::string Talk(std::vector<std::string> options) const {
    Process a("acceptor", options, In("a"));
    const std::string address = a.Hear().value_or("error: nothing heard");
    if (absl::StartsWith(address, "error")) return address;
    Process b("talker", options, In("b"));
    b.Tell(address);
    return b.Hear().value_or("error: nothing heard");
  }
};

// Both hosts have docker's bridge with the same address, as hosts do.
TEST_F(Hosts, DuplicateBridgeIsLeftAlone) {
  for (const char* host : {"a", "b"}) {
    Ip(host, "link add docker0 type bridge");
    Ip(host, "addr add 172.17.0.1/16 dev docker0");
    Ip(host, "link add veth9 type veth peer name veth9p");  // a container's, so that it runs
    Ip(host, "link set veth9 master docker0");
    for (const char* link : {"docker0", "veth9", "veth9p"}) {
      Ip(host, absl::StrCat("link set ", link, " up"));
    }
  }
  Ip("a", "addr add 10.77.0.1/24 dev eth0");
  Ip("b", "addr add 10.77.0.2/24 dev eth0");
  for (const char* scope : {"scope=several", "scope=unknown"}) {
    EXPECT_EQ(Choice("a", {"master=10.77.0.1", scope}), "eth0 10.77.0.1");
    EXPECT_EQ(Choice("b", {"master=10.77.0.1", scope}), "eth0 10.77.0.2");
    EXPECT_EQ(Choice("a", {scope}), "eth0 10.77.0.1");  // no master, no default route
  }
  EXPECT_EQ(Choice("a", {"master=10.77.0.1", "scope=single"}), "lo 127.0.0.1");
  EXPECT_EQ(Choice("a", {"master=127.0.1.1", "scope=several"}), "eth0 10.77.0.1");
  EXPECT_EQ(Choice("a", {"master=172.17.0.1", "scope=several"}), "eth0 10.77.0.1");
  EXPECT_EQ(Choice("a", {"interface=10.77.0.1"}), "eth0 10.77.0.1");
  EXPECT_EQ(Choice("a", {"interface=10.77.0.0/16"}), "eth0 10.77.0.1");
  EXPECT_EQ(Choice("a", {"interface=docker0"}), "docker0 172.17.0.1");  // asked for by name
  EXPECT_THAT(Choice("a", {"interface=eth9"}),
              AllOf(HasSubstr("'eth9' is not present"), HasSubstr("docker0 (172.17.0.1"),
                    HasSubstr("eth0 (10.77.0.1")));
  EXPECT_THAT(Choice("a", {"master=10.99.0.1", "scope=several"}),
              AllOf(HasSubstr("no route to the master '10.99.0.1'"), HasSubstr("eth0 (10.77.0.1")));
  EXPECT_EQ(Talk({"master=10.77.0.1", "scope=several"}), "ok sockets=3");
}

TEST_F(Hosts, DefaultRouteDecidesWithoutMaster) {
  Ip("a", "link add eth1 type veth peer name eth1p");
  for (const char* link : {"eth1", "eth1p"}) Ip("a", absl::StrCat("link set ", link, " up"));
  Ip("a", "addr add 10.78.0.1/24 dev eth1");
  Ip("a", "addr add 10.77.0.1/24 dev eth0");
  Ip("a", "route add default via 10.78.0.254");
  EXPECT_EQ(Choice("a", {}), "eth1 10.78.0.1");
  EXPECT_EQ(Choice("a", {"master=10.77.0.2"}), "eth0 10.77.0.1");
  EXPECT_EQ(Choice("a", {"master=1.2.3.4"}), "eth1 10.78.0.1");
  EXPECT_THAT(Choice("a", {"interface=10.0.0.0/8"}), HasSubstr("several interfaces"));
  Ip("a", "addr add 10.77.1.1/24 dev eth0");
  EXPECT_THAT(Choice("a", {"interface=10.77.1.1"}), HasSubstr("only the first address"));
}

TEST_F(Hosts, Ipv6Only) {
  Ip("a", "addr add fd00::1/64 dev eth0 nodad");
  Ip("b", "addr add fd00::2/64 dev eth0 nodad");
  for (const char* master : {"master=fd00::1", "master=[fd00::1]"}) {
    EXPECT_EQ(Choice("a", {master, "scope=several"}), "eth0 fd00::1");
    EXPECT_EQ(Choice("b", {master, "scope=several"}), "eth0 fd00::2");
    EXPECT_EQ(Talk({master, "scope=several"}), "ok sockets=3");
  }
  EXPECT_EQ(Talk({"interface=eth0"}), "ok sockets=3");
  EXPECT_THAT(Choice("b", {"master=fe80::1%eth0", "scope=several"}), HasSubstr("link-local"));
  EXPECT_THAT(Choice("b", {"master=fe80::1%eth7"}), HasSubstr("names a scope"));
  Ip("a", "addr del fd00::1/64 dev eth0");
  EXPECT_THAT(Choice("a", {"interface=eth0"}), HasSubstr("link-local"));
}

// Several ranks of a host in a job of several hosts: both on the host's own address.
TEST_F(Hosts, TwoOnOneHostOverItsAddress) {
  Ip("a", "addr add 10.77.0.1/24 dev eth0");
  Process acceptor("acceptor", {"master=10.77.0.1", "scope=several"}, In("a"));
  Process talker("talker", {"master=10.77.0.1", "scope=several"}, In("a"));
  talker.Tell(*acceptor.Hear());
  EXPECT_EQ(talker.Hear(), "ok sockets=3");
}

TEST_F(Hosts, LoopbackOfAnotherHostIsRefused) {
  Ip("a", "addr add 10.77.0.1/24 dev eth0");
  Ip("b", "addr add 10.77.0.2/24 dev eth0");
  Process acceptor("acceptor", {"interface=lo"}, In("a"));
  const std::string address = *acceptor.Hear();
  for (const char* interface : {"interface=eth0", "interface=lo"}) {
    Process talker("talker", {interface}, In("b"));
    talker.Tell(address);
    EXPECT_THAT(*talker.Hear(), HasSubstr("a loopback address cannot be reached from another"));
  }
}

// Nothing comes back any more, and nobody says so: the kernel's probes find out.
TEST_F(Hosts, CutLinkIsSeenByProbes) {
  Ip("a", "addr add 10.77.0.1/24 dev eth0");
  Ip("b", "addr add 10.77.0.2/24 dev eth0");
  Process acceptor("acceptor", {"interface=eth0"}, In("a"));
  Process talker("talker", {"interface=eth0", "until=lost"}, In("b"));
  talker.Tell(*acceptor.Hear());
  ASSERT_EQ(talker.Hear(), "ok sockets=3");
  const absl::Time start = absl::Now();
  Ip("a", "link set eth0 down");
  EXPECT_THAT(*talker.Hear(), HasSubstr("connection lost"));
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
}

TEST_F(Hosts, ForeignSysIsExplained) {
  Ip("a", "link set eth0 name gm-odd0");
  Ip("a", "link set gm-odd0 up");
  Ip("a", "addr add 10.77.0.1/24 dev gm-odd0");
  Process process("acceptor", {"interface=gm-odd0"}, {"nsenter", "--net=/run/netns/" + Name("a")});
  EXPECT_THAT(*process.Hear(), AllOf(HasSubstr("gm-odd0"), HasSubstr("/sys/class/net")));
}

TEST_F(Hosts, PublicAddressIsWarnedAboutOnce) {
  Ip("a", "addr add 51.15.0.1/24 dev eth0");
  Process process("warnings", {"interface=eth0"}, In("a"));
  const std::string warnings = *process.Hear();
  EXPECT_THAT(warnings, HasSubstr("a public address, without a key"));
  EXPECT_EQ(std::vector<std::string>(absl::StrSplit(warnings, '\n')).size(), 1) << warnings;
}

// ---- the processes

UcxWireOptions ParseOptions(int argc, char** argv) {
  UcxWireOptions options;
  for (int i = 2; i < argc; ++i) {
    absl::string_view word = argv[i];
    if (absl::ConsumePrefix(&word, "interface=")) options.device.interface = std::string(word);
    if (absl::ConsumePrefix(&word, "master=")) options.device.master = std::string(word);
    if (word == "scope=several") options.device.scope = HostScope::kSeveralHosts;
    if (word == "scope=single") options.device.scope = HostScope::kSingleHost;
  }
  return options;
}

int RunChoose(const UcxWireOptions& options) {
  auto device = ChooseDevice(options.device);
  Process::WriteLine(1, device.ok()
                            ? absl::StrCat(device->interface, " ", device->address.AddressString())
                            : absl::StrCat("error: ", device.status().ToString()));
  return 0;
}

// Hears an address, has 100 segments echoed over two lanes, tells how that went; with
// `until_lost`, tells the loss of a lane as well.
int RunTalker(const UcxWireOptions& options, bool until_lost) {
  auto tell = [](const std::string& words) {
    Process::WriteLine(1, words);
    return 0;
  };
  auto address = Process::ReadLine(0);
  End end(options);
  if (!end.address.ok()) return tell(absl::StrCat("error: ", end.address.status().ToString()));
  auto lane = end.wire->Dial(*address, "the other", 2, {});
  if (!lane.ok()) return tell(absl::StrCat("error: ", lane.status().ToString()));
  auto lost = [&] {
    return end.events.lost.empty()
               ? "nothing lost"
               : absl::StrCat("error: ", end.events.lost.begin()->second[0].ToString());
  };
  std::vector<Wire*> wires = {end.wire.get()};
  RunUntil(wires, [&] { return end.events.up.size() == 2 || !end.events.lost.empty(); });
  if (end.events.up.size() < 2) return tell(absl::StrCat("not up, ", lost()));
  const std::string payload(100000, 'p');
  for (int i = 0; i < 100; ++i) {
    const LaneId to{static_cast<uint32_t>(*lane) + i % 2};
    if (!end.wire->Post(to, Span("h"), Span(payload), PostToken{0}).ok()) return tell("no post");
  }
  RunUntil(wires, [&] { return end.events.segments.size() == 100; });
  for (const auto& segment : end.events.segments) {
    if (segment.payload != payload) return tell("error: wrong bytes");
  }
  if (end.events.segments.size() != 100) return tell(absl::StrCat("no echo, ", lost()));
  int sockets = 0;
  ForEachTcpSocket([&](const SocketInfo&) { ++sockets; });
  tell(absl::StrCat("ok sockets=", sockets));
  if (!until_lost) return 0;
  RunUntil(
      wires, [&] { return end.events.lost.size() == 2; }, absl::Seconds(30));
  return tell(lost());
}

int RunWarnings(const UcxWireOptions& options) {
  std::vector<std::string> warnings;
  SetLogSink([&](LogLevel level, absl::string_view line) {
    if (level <= LogLevel::kWarning) warnings.push_back(std::string(line));
  });
  End first(options), second(options);
  Process::WriteLine(1, absl::StrJoin(warnings, "\n"));
  return 0;
}

}  // namespace

int RunAs(int argc, char** argv) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const std::string mode = argv[1];
  const UcxWireOptions options = ParseOptions(argc, argv);
  if (mode == "--as=choose") return RunChoose(options);
  if (mode == "--as=acceptor") return RunAcceptor(options, [] {});
  if (mode == "--as=talker") return RunTalker(options, argv[argc - 1] == std::string("until=lost"));
  if (mode == "--as=warnings") return RunWarnings(options);
  return 2;
}

}  // namespace geomesh::transport

int main(int argc, char** argv) {
  geomesh::transport::EnsureUcxEnvironment(argv);
  if (argc >= 2 && std::string(argv[1]).rfind("--as=", 0) == 0) {
    return geomesh::transport::RunAs(argc, argv);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
