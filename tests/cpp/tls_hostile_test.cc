// wire/tls against those who have no key or another one, who change, cut, record or replay what
// goes over the network, who only keep it busy, and against a peer that has the key and breaks the
// rules.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <fstream>

#include "tls_testing.h"
#include "transport/bytes.h"
#include "transport/wire/tls_address.h"
#include "transport/wire/tls_credentials.h"
#include "transport/wire/tls_sockets.h"
#include "transport/wire/tls_stream.h"

namespace geomesh::transport {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Result = TlsStream::Result;

// ---- keys and certificates that don't fit: one clear text on each side

TEST(TlsStrangers, AddressSealedWithAnotherKey) {
  Pair p(OnLoopback(SharedKeys(kKey1)), OnLoopback(SharedKeys(kKey2)));
  for (auto [from, to] : {std::pair(&p.a, &p.b), std::pair(&p.b, &p.a)}) {
    const absl::Status dial = from->wire->Dial(*to->address, "rank 1", 1, {}).status();
    EXPECT_EQ(dial.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(dial.message()),
                AllOf(HasSubstr("dialling rank 1: its address is sealed with a key ("),
                      HasSubstr("the other side has another key; give both the same file")));
    // What the side asks that does not dial.
    EXPECT_THAT(std::string(from->wire->CheckAddress(*to->address, "rank 1").message()),
                HasSubstr("the other side has another key"));
  }
}

TEST(TlsStrangers, DiallersKeyIsUnknownToTheListener) {
  LogLines log;
  Pair p(OnLoopback(SharedKeys(absl::StrCat(kKey2, "\n", kKey1))), OnLoopback(SharedKeys(kKey1)));
  auto lane = p.a.wire->Dial(*p.b.address, "rank 1", 1, {});
  ASSERT_TRUE(lane.ok()) << lane.status();
  ASSERT_TRUE(p.Run([&] { return p.a.events.lost.size() == 1 && log.size() == 1; }));
  EXPECT_EQ(p.a.LossOf(*lane),
            "lane 0 to rank 1: the TLS handshake failed: the other side has another key in "
            "GEOMESH_PSK_FILE, or none: give both the same file");
  EXPECT_THAT(log.Joined(),
              AllOf(HasSubstr("refused a connection from 127.0.0.1:"),
                    HasSubstr("it has another key ("), HasSubstr("give both sides the same file")));
  EXPECT_TRUE(p.b.events.accepted.empty());
  EXPECT_EQ(p.b.tls().stats().handshakes_failed, 1);
}

TEST(TlsStrangers, KeyAgainstCertificate) {
  const TestCa ca;
  Pair p(OnLoopback(SharedKeys(kKey1)), OnLoopback(ca.Issue("rank 1")));
  EXPECT_THAT(std::string(p.a.wire->Dial(*p.b.address, "rank 1", 1, {}).status().message()),
              HasSubstr("it uses certificates (GEOMESH_TLS_CERT), this process a shared key "
                        "(GEOMESH_PSK_FILE): set the same on all ranks"));
}

TEST(TlsStrangers, NotAnAddressOfTls) {
  Pair p;
  EXPECT_THAT(std::string(p.a.wire->Dial("GMXU and more", "rank 1", 1, {}).status().message()),
              HasSubstr("not one of wire/tls"));
}

// Plain bytes to a port with a key.
TEST(TlsStrangers, NoKeyAgainstAKey) {
  LogLines log;
  End end(OnLoopback(SharedKeys(kKey1)));
  const int fd = ConnectTo(end.tls().port());
  ASSERT_EQ(send(fd, "GMHI, without TLS\n", 18, 0), 18);
  ASSERT_TRUE(RunUntil({end.wire.get()}, [&] { return log.size() == 1; }));
  EXPECT_THAT(log.Joined(), HasSubstr("the other side has no key, or is something else"));
  close(fd);
}

// A key to a port that answers in plain bytes, as wire/ucx would.
TEST(TlsStrangers, KeyAgainstNoKey) {
  Relay relay([](int direction, std::string* bytes) {
    if (direction == 1) *bytes = "UCX says nothing of the kind";
    return true;
  });
  TlsWireOptions behind = OnLoopback(SharedKeys(kKey1));
  behind.advertise = absl::StrCat("127.0.0.1:", relay.port());
  Pair p(OnLoopback(SharedKeys(kKey1)), behind);
  relay.SetTarget(p.b.tls().port());
  auto lane = p.a.wire->Dial(*p.b.address, "rank 1", 1, {});
  ASSERT_TRUE(p.Run([&] { return p.a.events.lost.size() == 1; }));
  EXPECT_THAT(p.a.LossOf(*lane), AllOf(HasSubstr("lane 0 to rank 1: the TLS handshake failed"),
                                       HasSubstr("the other side has no key")));
}

TEST(TlsStrangers, WrongCa) {
  LogLines log;
  const TestCa ours, theirs;
  TlsKeyFiles mixed = ours.Issue("rank 1");
  mixed.ca = theirs.Issue("x").ca;  // a listener that trusts another CA than ours
  Pair p(OnLoopback(ours.Issue("rank 0")), OnLoopback(mixed));
  auto lane = p.a.wire->Dial(*p.b.address, "rank 1", 1, {});
  ASSERT_TRUE(lane.ok()) << lane.status();
  ASSERT_TRUE(p.Run([&] { return p.a.events.lost.size() == 1 && log.size() == 1; }));
  EXPECT_EQ(p.a.LossOf(*lane),
            "lane 0 to rank 1: the TLS handshake failed: the other side does not know the CA of "
            "this process's certificate: give all sides the same GEOMESH_TLS_CA");
  EXPECT_THAT(log.Joined(), HasSubstr("the certificate of CN = rank 0 was not issued by the CA in "
                                      "GEOMESH_TLS_CA here"));
  // The other way round it is seen before anything is dialled.
  EXPECT_THAT(std::string(p.b.wire->CheckAddress(*p.a.address, "rank 0").message()),
              HasSubstr("the certificate of CN = rank 0 was not issued by the CA"));
}

TEST(TlsStrangers, CertificateThatExpiresMeanwhile) {
  LogLines log;
  const TestCa ca;
  Pair p(OnLoopback(ca.Issue("rank 0", 1)), OnLoopback(ca.Issue("rank 1")));
  ASSERT_TRUE(p.a.address.ok()) << p.a.address.status();
  const absl::Time start = absl::Now();
  ASSERT_TRUE(p.Run([&] { return !p.b.wire->CheckAddress(*p.a.address, "rank 0").ok(); }));
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  EXPECT_THAT(std::string(p.b.wire->CheckAddress(*p.a.address, "rank 0").message()),
              AllOf(HasSubstr("rank 0: the certificate of CN = rank 0 has expired ("),
                    HasSubstr("issue a new one")));
  auto lane = p.a.wire->Dial(*p.b.address, "rank 1", 1, {});
  ASSERT_TRUE(lane.ok()) << lane.status();
  ASSERT_TRUE(p.Run([&] { return p.a.events.lost.size() == 1 && log.size() == 1; }));
  EXPECT_THAT(p.a.LossOf(*lane), HasSubstr("the other side says that this process's certificate "
                                           "(GEOMESH_TLS_CERT) has expired: issue a new one"));
  EXPECT_THAT(log.Joined(), HasSubstr("the certificate of CN = rank 0 has expired ("));
}

TEST(TlsStrangers, FilesOfCertificatesAreChecked) {
  const TestCa ca;
  const auto listen = [](const TlsKeyFiles& files) {
    return std::string(End(OnLoopback(files)).address.status().message());
  };
  EXPECT_THAT(listen(ca.Issue("old", -60)), HasSubstr("the certificate of CN = old has expired"));
  TlsKeyFiles files = ca.Issue("x");
  files.private_key = ca.Issue("y").private_key;
  EXPECT_THAT(listen(files), HasSubstr("not the key of GEOMESH_TLS_CERT"));
  files = ca.Issue("x");
  chmod(files.private_key.c_str(), 0644);
  EXPECT_THAT(listen(files), HasSubstr("others than its owner can read"));
  files.private_key.clear();
  EXPECT_THAT(listen(files), HasSubstr("missing: GEOMESH_TLS_KEY"));
  files = ca.Issue("x");
  files.psk = TestFiles().Write(kKey1);
  EXPECT_THAT(listen(files), HasSubstr("use a shared key or certificates"));
  EXPECT_THAT(listen({}), HasSubstr("wire/tls needs GEOMESH_PSK_FILE"));
}

// ---- on the path

// `b` behind a relay; `a` dials it.
struct Relayed {
  Relay relay;
  Pair p;

  explicit Relayed(Relay::OnBytes on_bytes)
      : relay(std::move(on_bytes)), p(OnLoopback(SharedKeys(kKey1)), Behind(relay.port())) {
    relay.SetTarget(p.b.tls().port());
  }
  static TlsWireOptions Behind(uint16_t port) {
    TlsWireOptions options = OnLoopback(SharedKeys(kKey1));
    options.advertise = absl::StrCat("127.0.0.1:", port);
    return options;
  }
};

TEST(TlsPath, FlippedBitEndsTheLane) {
  for (const int direction : {0, 1}) {
    std::atomic<bool> armed{false};
    Relayed r([&](int d, std::string* bytes) {
      if (armed && d == direction && bytes->size() > 1000) {
        (*bytes)[bytes->size() / 2] ^= 4;
        armed = false;
      }
      return true;
    });
    ASSERT_TRUE(r.p.Connect(1));
    const LaneId at_b = r.p.b.events.accepted[0].lane;
    End& from = direction == 0 ? r.p.a : r.p.b;
    End& to = direction == 0 ? r.p.b : r.p.a;
    const std::string payload = Pattern(kMaxSegmentPayloadBytes, 3);
    armed = true;
    for (uint64_t i = 0; i < 20; ++i) {
      ASSERT_TRUE(
          from.wire
              ->Post(direction == 0 ? r.p.Lane(0) : at_b, Span("h"), Span(payload), PostToken{i})
              .ok());
    }
    ASSERT_TRUE(r.p.Run([&] {
      return to.events.lost.size() == 1 && from.events.lost.size() == 1 &&
             from.events.posted.size() == 20;
    }));
    EXPECT_THAT(to.LossOf(direction == 0 ? at_b : r.p.Lane(0)),
                HasSubstr("what came was changed on the way"));
    for (const auto& segment : to.events.segments) EXPECT_TRUE(segment.payload == payload);
    for (const auto& [token, statuses] : from.events.posted) EXPECT_EQ(statuses.size(), 1);
  }
}

TEST(TlsPath, SegmentCutShortIsNotDelivered) {
  std::atomic<bool> armed{false};
  std::atomic<size_t> seen{0};
  Relayed r([&](int d, std::string* bytes) {
    if (!armed || d != 0) return true;
    if (seen + bytes->size() > 100000) bytes->resize(100000 - seen);
    seen += bytes->size();
    return seen < 100000;
  });
  ASSERT_TRUE(r.p.Connect(1));
  armed = true;
  const std::string payload = Pattern(kMaxSegmentPayloadBytes, 3);
  ASSERT_TRUE(r.p.a.wire->Post(r.p.Lane(0), Span("h"), Span(payload), PostToken{1}).ok());
  ASSERT_TRUE(r.p.Run([&] {
    return r.p.b.events.lost.size() == 1 && r.p.a.events.lost.size() == 1 &&
           r.p.a.events.posted.size() == 1;
  }));
  EXPECT_TRUE(r.p.b.events.segments.empty());
  EXPECT_EQ(seen, 100000);
}

// All that a dialler said in a good connection, said again: to the same listener and to another.
TEST(TlsPath, ReplayedBytesOpenNothing) {
  std::mutex mutex;
  std::string recorded;
  Relayed r([&](int d, std::string* bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    if (d == 0) recorded += *bytes;
    return true;
  });
  ASSERT_TRUE(r.p.Connect(1));
  ASSERT_TRUE(r.p.a.wire->Post(r.p.Lane(0), Span("h"), Span("a secret"), PostToken{1}).ok());
  ASSERT_TRUE(r.p.Run([&] { return r.p.b.events.segments.size() == 1; }));
  End other(OnLoopback(SharedKeys(kKey1)));
  for (End* end : {&r.p.b, &other}) {
    LogLines log;
    const int fd = ConnectTo(end->tls().port());
    {
      std::lock_guard<std::mutex> lock(mutex);
      ASSERT_EQ(send(fd, recorded.data(), recorded.size(), MSG_NOSIGNAL), recorded.size());
    }
    const uint64_t failed = end->tls().stats().handshakes_failed;
    ASSERT_TRUE(RunUntil({end->wire.get()},
                         [&] { return end->tls().stats().handshakes_failed == failed + 1; }));
    EXPECT_EQ(end->events.accepted.size(), end == &r.p.b ? 1 : 0);
    EXPECT_EQ(end->events.segments.size(), end == &r.p.b ? 1 : 0);
    if (end == &other) {
      EXPECT_THAT(log.Joined(), HasSubstr("it dialled the process that had this port before, or "
                                          "its address was replayed"));
    }
    close(fd);
  }
  // And nothing secret was there to be read.
  std::lock_guard<std::mutex> lock(mutex);
  EXPECT_EQ(recorded.find("a secret"), std::string::npos);
  EXPECT_EQ(recorded.find("hello"), std::string::npos);
}

// ---- at the door

TEST(TlsDoor, GarbageDoesNotDisturb) {
  Pair p;
  ASSERT_TRUE(p.Connect(1));
  const int before = CountSockets();
  std::vector<std::string> payloads = {
      "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "SSH-2.0-OpenSSH_9.2\r\n", std::string(64, '\0'),
      std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11),
      std::string("\x16\x03\x01\xff\xff", 5) + std::string(70000, 'x')};
  for (int i = 0; i < 100; ++i) {
    payloads.push_back(Pattern(1 + i * 7, i));
    payloads.push_back(std::string("\x16\x03\x01", 3) + Pattern(1 + i * 7, i));
  }
  size_t echoed = 0;
  LogLines log;
  for (const std::string& payload : payloads) {
    const int fd = ConnectTo(p.b.tls().port());
    (void)send(fd, payload.data(), payload.size(), MSG_NOSIGNAL);
    ASSERT_TRUE(p.a.wire->Post(p.Lane(0), Span("h"), Span("beside"), PostToken{1}).ok());
    ++echoed;
    ASSERT_TRUE(p.Run([&] { return p.b.events.segments.size() == echoed; }));
    close(fd);
  }
  ASSERT_TRUE(p.Run([&] { return CountSockets() == before; })) << CountSockets() - before;
  EXPECT_EQ(p.b.tls().stats().unfinished, 0);
  EXPECT_TRUE(p.b.events.lost.empty());
  EXPECT_EQ(p.b.events.accepted.size(), 1);
  EXPECT_LE(log.size(), 1);  // one line a minute
}

// 1,000 connections that say nothing, or begin and stop: at most 256 are held, for at most 10 s,
// and the lane beside them carries every byte.
TEST(TlsDoor, HalfOpenConnectionsAreBounded) {
  rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 4096);
  setrlimit(RLIMIT_NOFILE, &limit);
  LogLines log;
  Pair p;
  ASSERT_TRUE(p.Connect(1));
  const std::string payload = Pattern(100000, 4);
  std::vector<int> strangers;
  size_t most = 0, sent = 0;
  for (int i = 0; i < 1000; ++i) {
    strangers.push_back(ConnectTo(p.b.tls().port()));
    if (i % 2 == 0) (void)send(strangers.back(), "\x16\x03\x01\x02\x00\x01", 6, MSG_NOSIGNAL);
    if (i % 10 == 0) {
      ASSERT_TRUE(p.a.wire->Post(p.Lane(0), Span("h"), Span(payload), PostToken{sent++}).ok());
      ASSERT_TRUE(p.Run([&] { return p.b.events.segments.size() == sent; }));
    }
    p.b.wire->Progress();
    most = std::max<size_t>(most, p.b.tls().stats().unfinished);
  }
  EXPECT_EQ(most, kMaxTlsStrangers);
  ASSERT_TRUE(
      p.Run([&] { return p.b.tls().stats().strangers_dropped == 1000 - kMaxTlsStrangers; }));
  for (const auto& segment : p.b.events.segments) EXPECT_TRUE(segment.payload == payload);
  // A lane can still be made beside them.
  ASSERT_TRUE(p.Connect(2));
  const absl::Time start = absl::Now();
  ASSERT_TRUE(p.Run([&] { return p.b.tls().stats().unfinished == 0; }));
  EXPECT_LT(absl::Now() - start, absl::Seconds(11));
  EXPECT_TRUE(p.b.events.lost.empty());
  EXPECT_LE(log.size(), 1);
  for (const int fd : strangers) close(fd);
}

TEST(TlsDoor, WithoutDescriptorsItWaits) {
  LogLines log;
  Pair p;
  ASSERT_TRUE(p.Connect(1));
  const int stranger = socket(AF_INET, SOCK_STREAM, 0);
  rlimit before;
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit none = {static_cast<rlim_t>(stranger) + 1, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  std::vector<int> fillers;
  for (int fd = dup(stranger); fd >= 0; fd = dup(stranger)) fillers.push_back(fd);
  const sockaddr_in to = Loopback(p.b.tls().port());
  ASSERT_EQ(connect(stranger, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  ASSERT_TRUE(p.Run([&] { return log.size() == 1; }));
  EXPECT_THAT(log.Joined(), HasSubstr("cannot accept connections for a second: Too many open"));
  // It does not spin: nothing to do until the next tick.
  while (p.b.wire->Progress() != 0) {
  }
  EXPECT_TRUE(p.b.wire->Arm());
  ASSERT_TRUE(p.a.wire->Post(p.Lane(0), Span("h"), Span("on"), PostToken{1}).ok());
  ASSERT_TRUE(p.Run([&] { return p.b.events.segments.size() == 1; }));
  for (const int fd : fillers) close(fd);
  setrlimit(RLIMIT_NOFILE, &before);
  ASSERT_TRUE(p.Run([&] { return p.b.tls().stats().unfinished == 1; }));
  close(stranger);
}

// ---- peers with the key

uint64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  uint64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

// Nothing is queued beyond what was posted and the kernel's own buffers; after 10 s the kernel
// gives the connection up.
TEST(TlsPeer, WhoReadsNothingCostsNoMemory) {
  Pair p;
  ASSERT_TRUE(p.Connect(1));
  const std::string payload = Pattern(kMaxSegmentPayloadBytes, 3);
  constexpr uint64_t kCount = 2000;  // 500 MB
  const uint64_t before = ResidentBytes();
  for (uint64_t i = 0; i < kCount; ++i) {
    ASSERT_TRUE(p.a.wire->Post(p.Lane(0), Span("h"), Span(payload), PostToken{i}).ok());
  }
  const absl::Time start = absl::Now();
  ASSERT_TRUE(RunUntil(
      {p.a.wire.get()}, [&] { return p.a.events.lost.size() == 1; }, absl::Seconds(40)));
  EXPECT_GT(absl::Now() - start, absl::Seconds(5));
  EXPECT_LT(static_cast<int64_t>(ResidentBytes()) - static_cast<int64_t>(before), 4 << 20);
  ASSERT_TRUE(RunUntil({p.a.wire.get()}, [&] { return p.a.events.posted.size() == kCount; }));
  size_t sent = 0;
  for (const auto& [token, statuses] : p.a.events.posted) {
    ASSERT_EQ(statuses.size(), 1);
    sent += statuses[0].ok();
  }
  EXPECT_LT(sent, 100);
  EXPECT_EQ(p.a.LossOf(p.Lane(0)),
            "lane 0 to rank 1: connection lost: nothing was acknowledged for too long "
            "(Connection timed out)");
}

// A dialler of the test's own, with the key: says what it likes inside TLS.
class RawPeer {
 public:
  RawPeer(const TlsKeyFiles& keys, End& target) : target_(target) {
    credentials_ = *LoadTlsCredentials(keys);
    const TlsAddress address = ParseTlsAddress(*target.address)->address;
    handshake_.dialler = true;
    handshake_.identity = {
        credentials_->dial_key(), RandomTlsId(), address.listener, RandomTlsId(), 0, 1};
    fd_ = ConnectTo(target.tls().port());
    stream_ = std::make_unique<TlsStream>(*credentials_->NewConnection(&handshake_), fd_, true,
                                          uint64_t{1} << 23);
  }
  ~RawPeer() { close(fd_); }

  LaneIdentity& identity() { return handshake_.identity; }
  bool Handshake() {
    for (const absl::Time end = absl::Now() + absl::Seconds(10); absl::Now() < end;) {
      const Result r = stream_->Handshake();
      (void)stream_->Flush();
      if (r != Result::kBlocked) return r == Result::kDone;
      target_.wire->Progress();
      bool more;
      (void)stream_->Fill(absl::MakeSpan(buffer_), &more);
    }
    return false;
  }
  void Say(absl::string_view bytes) {
    for (; !bytes.empty(); bytes.remove_prefix(std::min<size_t>(bytes.size(), 16384))) {
      (void)stream_->Write(Span(bytes.substr(0, 16384)));
      (void)stream_->Flush();
    }
  }
  static std::string Frame(uint8_t type, uint16_t header, uint32_t payload, uint8_t zero = 0) {
    ByteWriter writer;
    writer.Integer(type);
    writer.Integer(zero);
    writer.Integer(header);
    writer.Integer(payload);
    return writer.bytes();
  }
  void Greet(const std::string& hello = "hi") {
    const std::string greeting = TlsGreeting{identity(), hello}.Serialize();
    Say(absl::StrCat(Frame(2, 0, static_cast<uint32_t>(greeting.size())), greeting));
  }

 private:
  End& target_;
  std::unique_ptr<TlsCredentials> credentials_;
  TlsHandshake handshake_;
  int fd_;
  std::vector<std::byte> buffer_ = std::vector<std::byte>(kTlsReceiveBytes);
  std::unique_ptr<TlsStream> stream_;
};

TEST(TlsPeer, LengthsBeyondTheBoundsEndTheLane) {
  const TlsKeyFiles keys = SharedKeys(kKey1);
  End end(OnLoopback(keys));
  const std::pair<std::string, std::string> breaches[] = {
      {RawPeer::Frame(1, 129, 0), "a frame of 129 + 0 bytes; at most 128 + 262144 are allowed"},
      {RawPeer::Frame(1, 0, 262145), "a frame of 0 + 262145 bytes"},
      {RawPeer::Frame(1, 65535, 0xffffffff), "a frame of 65535 + 4294967295 bytes"},
      {RawPeer::Frame(9, 0, 0), "a frame of unknown type 9"},
      {RawPeer::Frame(0, 0, 0), "a frame of unknown type 0"},
      {RawPeer::Frame(1, 0, 0, 7), "a frame of unknown type 1"},
      {RawPeer::Frame(2, 0, 4) + "what", "a frame of type 2 where it has no place"},
      {RawPeer::Frame(3, 0, 0), "a frame of type 3 where it has no place"}};
  size_t accepted = 0;
  for (const auto& [bytes, text] : breaches) {
    RawPeer peer(keys, end);
    ASSERT_TRUE(peer.Handshake());
    peer.Greet();
    ++accepted;
    ASSERT_TRUE(RunUntil({end.wire.get()}, [&] { return end.events.accepted.size() == accepted; }));
    peer.Say(bytes);
    ASSERT_TRUE(RunUntil({end.wire.get()}, [&] { return end.events.lost.size() == accepted; }))
        << text;
    const LaneId lane = end.events.accepted.back().lane;
    EXPECT_THAT(end.LossOf(lane),
                AllOf(HasSubstr("lane 0 from 127.0.0.1:"),
                      HasSubstr("broke the protocol of wire/tls: "), HasSubstr(text)));
  }
  EXPECT_TRUE(end.events.segments.empty());
}

TEST(TlsPeer, GreetingsAreChecked) {
  const TlsKeyFiles keys = SharedKeys(kKey1);
  End end(OnLoopback(keys));
  const auto refusal = [&](const std::function<void(RawPeer&)>& say) {
    LogLines log;
    End fresh(OnLoopback(keys));
    RawPeer peer(keys, fresh);
    EXPECT_TRUE(peer.Handshake());
    say(peer);
    EXPECT_TRUE(RunUntil({fresh.wire.get()}, [&] { return log.size() == 1; }));
    EXPECT_TRUE(fresh.events.accepted.empty());
    return log.Joined();
  };
  EXPECT_THAT(refusal([](RawPeer& p) {
                p.identity().dial[3] ^= 1;
                p.Greet();
              }),
              HasSubstr("the greeting is not of the connection that TLS authenticated"));
  EXPECT_THAT(refusal([](RawPeer& p) {
                p.identity().listener[3] ^= 1;
                p.Greet();
              }),
              HasSubstr("the process that was dialled is another one"));
  EXPECT_THAT(refusal([](RawPeer& p) { p.Say(RawPeer::Frame(1, 0, 0)); }),
              HasSubstr("a frame of type 1 where it has no place"));
  EXPECT_THAT(refusal([](RawPeer& p) { p.Say(RawPeer::Frame(2, 0, 3) + "abc"); }),
              HasSubstr("the greeting has wire version"));
  EXPECT_THAT(refusal([](RawPeer& p) { p.Say(RawPeer::Frame(2, 0, 2) + std::string("\1\0", 2)); }),
              HasSubstr("the greeting is cut short"));
}

// One lane of two: the other never comes, so neither is told to the engine.
TEST(TlsPeer, HalfADialIsNoDial) {
  LogLines log;
  const TlsKeyFiles keys = SharedKeys(kKey1);
  End end(OnLoopback(keys));
  RawPeer peer(keys, end);
  peer.identity().lanes = 2;
  ASSERT_TRUE(peer.Handshake());
  peer.Greet();
  ASSERT_TRUE(RunUntil({end.wire.get()}, [&] { return log.size() == 1; }));
  EXPECT_THAT(log.Joined(), HasSubstr("the dial's other lanes did not come in 10 s"));
  EXPECT_TRUE(end.events.accepted.empty());
}

}  // namespace
}  // namespace geomesh::transport
