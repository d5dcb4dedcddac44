// wire/tls between network namespaces behind a router that is a one-to-one NAT to both and lets new
// connections through to one port only. Needs root, iproute2 and nftables; skipped without.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>

#include <cstdlib>

#include "tls_testing.h"

namespace geomesh::transport {
namespace {

using ::testing::HasSubstr;

constexpr char kPort[] = "23000";
// Of the sites a and b: their own addresses, and what the router makes of them.
constexpr char kRules[] = R"(
table ip geomesh {
  chain before {
    type nat hook prerouting priority dstnat;
    ip daddr 198.51.100.1 dnat to 10.198.1.2
    ip daddr 203.0.113.2 tcp dport 4443 dnat to 10.198.2.2:23000
    ip daddr 203.0.113.2 dnat to 10.198.2.2
  }
  chain after {
    type nat hook postrouting priority srcnat;
    ip saddr 10.198.1.2 snat to 198.51.100.1
    ip saddr 10.198.2.2 snat to 203.0.113.2
  }
  chain through {
    type filter hook forward priority filter; policy drop;
    ct state established,related accept
    ct status dnat tcp dport 23000 accept
  }
})";

bool Shell(const std::string& command) {
  return std::system(absl::StrCat("{ ", command, "; } >/dev/null 2>&1").c_str()) == 0;
}

class Sites {
 public:
  Sites() {
    const std::string a = Name("a"), b = Name("b"), r = Name("r");
    std::string command = absl::StrCat("set -e; for n in ", a, " ", b, " ", r,
                                       "; do ip netns add $n; ip -n $n link set lo up; done; ");
    for (const auto& [site, number] : {std::pair("a", 1), std::pair("b", 2)}) {
      const std::string n = Name(site), net = absl::StrCat("10.198.", number, ".");
      absl::StrAppend(&command, "ip -n ", n, " link add wan type veth peer name ", site, " netns ",
                      r, "; ip -n ", n, " addr add ", net, "2/24 dev wan; ip -n ", r, " addr add ",
                      net, "1/24 dev ", site, "; ip -n ", n, " link set wan up; ip -n ", r,
                      " link set dev ", site, " up; ip -n ", n, " route add default via ", net,
                      "1; ",
                      // The kernel takes a moment to call a device running.
                      "timeout 5 sh -c \"until ip -n ", n,
                      " link show wan | grep -q 'state UP'; do sleep 0.02; done\"; ");
    }
    absl::StrAppend(&command, "ip netns exec ", r, " sysctl -qw net.ipv4.ip_forward=1; ",
                    "ip netns exec ", r, " nft -f ", TestFiles().Write(kRules));
    made_ = Shell(command);
  }
  ~Sites() {
    for (const char* site : {"a", "b", "r"}) Shell(absl::StrCat("ip netns del ", Name(site)));
  }
  bool made() const { return made_; }
  std::vector<std::string> In(const char* site) const {
    return {"ip", "netns", "exec", Name(site)};
  }

 private:
  static std::string Name(const char* site) { return absl::StrCat("gm-tls-", getpid(), site); }

  bool made_ = false;
};

TlsWireOptions AtSite(const std::string& key_file, const std::string& advertise) {
  TlsWireOptions options;
  options.device.interface = "wan";
  options.ports = {23000, 23000};
  options.keys.psk = key_file;
  options.advertise = advertise == "-" ? "" : advertise;
  return options;
}

int RunAcceptorAt(const std::string& key_file, const std::string& advertise) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  End end(AtSite(key_file, advertise));
  return RunAcceptor(end, [] {});
}

// Dials what it hears; says what came back on two lanes, or why one was lost.
int RunDiallerAt(const std::string& key_file, const std::string& advertise) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  End end(AtSite(key_file, advertise));
  if (!end.address.ok()) {
    Process::WriteLine(1, end.address.status().ToString());
    return 1;
  }
  auto lane = end.wire->Dial(*Process::ReadLine(0), "rank 1", 2, Span("hi"));
  if (!lane.ok()) {
    Process::WriteLine(1, lane.status().ToString());
    return 1;
  }
  const auto& events = end.events;
  RunUntil({end.wire.get()}, [&] { return events.up.size() == 2 || !events.lost.empty(); });
  const std::string bulk = Pattern(kMaxSegmentPayloadBytes, 6);
  for (uint32_t i = 0; i < 20 && events.lost.empty(); ++i) {
    (void)end.wire->Post(LaneId{static_cast<uint32_t>(*lane) + i % 2}, Span("h"), Span(bulk),
                         PostToken{i});
  }
  RunUntil({end.wire.get()}, [&] { return events.segments.size() == 20 || !events.lost.empty(); });
  int same = 0;
  for (const auto& segment : events.segments) same += segment.payload == bulk;
  Process::WriteLine(1, events.lost.empty() ? absl::StrCat(same, " came back") : end.LossOf(*lane));
  return 0;
}

// What the dialler at `from` says of an acceptor at `to`.
std::string Talk(const Sites& sites, const char* from, const char* to,
                 const std::string& advertise) {
  const std::string key_file = TestFiles().Write(kKey1);
  Process acceptor("acceptor", {key_file, advertise}, sites.In(to));
  Process dialler("dialler", {key_file, "-"}, sites.In(from));
  const auto address = acceptor.Hear();
  if (!address.has_value()) return "the acceptor said nothing";
  dialler.Tell(*address);
  return dialler.Hear().value_or("the dialler said nothing");
}

TEST(TlsNamespaces, OnePortThroughNatOnBothSides) {
  Sites sites;
  if (!sites.made()) GTEST_SKIP() << "no namespaces with NAT here";
  EXPECT_EQ(Talk(sites, "a", "b", "203.0.113.2"), "20 came back");
  EXPECT_EQ(Talk(sites, "b", "a", "198.51.100.1"), "20 came back");
  // A port forward to another port than the listener's own.
  EXPECT_EQ(Talk(sites, "a", "b", "203.0.113.2:4443"), "20 came back");
  // What makes it work is the address, and a port that is not open is said to be the trouble.
  EXPECT_EQ(Talk(sites, "a", "b", "-"),
            absl::StrCat("lane 0 to rank 1: cannot connect to 10.198.2.2:", kPort,
                         ": no answer within 10 s"));
  EXPECT_THAT(Talk(sites, "a", "b", "203.0.113.2:23001"), HasSubstr("no answer within 10 s"));
}

}  // namespace

int RunAs(const std::string& mode, const std::string& key_file, const std::string& advertise) {
  if (mode == "--as=acceptor") return RunAcceptorAt(key_file, advertise);
  if (mode == "--as=dialler") return RunDiallerAt(key_file, advertise);
  return 2;
}

}  // namespace geomesh::transport

int main(int argc, char** argv) {
  if (argc == 4) return geomesh::transport::RunAs(argv[1], argv[2], argv[3]);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
