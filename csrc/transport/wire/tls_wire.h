// The inside of wire/tls, shared by its rooms: tls.cc (opening, posting, running) and tls_accept.cc
// (how lanes come to be and end). For nobody else.
#pragma once

#include <unistd.h>

#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "transport/wire/sockets.h"
#include "transport/wire/tls.h"
#include "transport/wire/tls_address.h"
#include "transport/wire/tls_connection.h"
#include "transport/wire/tls_credentials.h"

namespace geomesh::transport {

inline constexpr absl::string_view kTlsComponent = "wire/tls";

class TlsWireImpl final : public TlsWire {
 public:
  explicit TlsWireImpl(TlsWireOptions options) : options_(std::move(options)) {}
  ~TlsWireImpl() override;

  absl::string_view name() const override { return "tls"; }
  absl::StatusOr<std::string> Listen(WireEvents* events) override;
  std::unique_ptr<Knock> KnockAt(absl::string_view address) const override;
  absl::Status CheckAddress(absl::string_view address, absl::string_view peer) const override;
  absl::StatusOr<LaneId> Dial(absl::string_view address, absl::string_view peer, int lanes,
                              absl::Span<const std::byte> hello) override;
  absl::Status Post(LaneId lane, absl::Span<const std::byte> header,
                    absl::Span<const std::byte> payload, PostToken token) override;
  void Mark(LaneId lane, Traffic traffic) override;
  void Close(LaneId lane) override;
  int Progress() override;
  bool Arm() override;
  int fd() const override { return epoll_; }

  const Device& device() const override { return device_; }
  uint16_t port() const override { return listener_.port(); }
  TlsWireStats stats() const override;

 private:
  enum class State {
    kDialling,   // to be connected, or connecting
    kHandshake,  // TLS
    kGreeting,   // the dialler waits for an answer, the acceptor for the greeting
    kGathering,  // the acceptor waits for the dial's other lanes
    kUp,
    kEnding,  // no lane any more: the last words are on their way
    kClosed,  // deleted at the end of Progress
  };

  // One connection. The epoll instance knows it by its serial number.
  struct Link {
    uint64_t serial = 0;
    State state = State::kDialling;
    bool dialled = false;
    bool stranger = false;  // counted as such: came, and has not been authenticated
    bool has_lane = false;  // the engine knows it as `id`
    LaneId id{};
    std::string peer;  // "rank 1 ..." or the source address, for errors
    IpEndpoint target;
    std::string greeting;  // the dialler's
    TlsHandshake handshake;
    int fd = -1;
    std::unique_ptr<TlsConnection> connection;
    absl::Time deadline = absl::InfiniteFuture();
    // What the kernel said last, until a call finds otherwise.
    bool readable = false, writable = false, hung_up = false;
    bool ready = false;  // in ready_
  };

  // The lanes of one Dial of somebody else's.
  struct IncomingDial {
    std::string hello;
    std::vector<Link*> lanes;
    size_t arrived = 0;
  };

  struct Posted {
    LaneId lane;
    PostToken token;
    absl::Status status;
  };
  struct Lost {
    LaneId lane;
    absl::Status reason;
  };

  absl::Status OpenDescriptors();
  absl::StatusOr<TlsAddress> CheckedAddress(absl::string_view address,
                                            absl::string_view peer) const;

  Link* NewLink(bool dialled, std::string peer);
  Link* FindLane(LaneId id) const;
  std::string NameOf(const Link& link) const;
  void MarkReady(Link* link);
  absl::Status Watch(Link* link);
  absl::Status StartTls(Link* link);
  void ArmTicks(bool on);
  void Tick();

  void StartDials();
  void Accept();
  void FinishConnect(Link* link);
  void MakeRoomForStranger();
  void Drive(Link* link);
  bool TakeInput(Link* link);
  void PumpOutput(Link* link);
  void OnHandshakeDone(Link* link);
  void OnFrame(Link* link, const TlsConnection::Frame& frame);
  void OnGreeting(Link* link, absl::Span<const std::byte> payload);
  void AcceptDial(const std::string& key);

  void StreamFailed(Link* link, TlsStream::Result result);
  void Fail(Link* link, absl::StatusCode code, std::string why);
  void Refuse(Link* link, const std::string& why);
  void LeaveDial(Link* link);
  void Retire(Link* link, const absl::Status& pending);
  void End(Link* link);
  void CloseSocket(Link* link);
  void LogRefusal(const Link& link, absl::string_view why);
  int Deliver();

  const TlsWireOptions options_;
  const pid_t owner_ = getpid();
  WireEvents* events_ = nullptr;
  std::unique_ptr<TlsCredentials> credentials_;
  Device device_;
  TlsAddress address_;
  IpEndpoint listener_;
  std::unique_ptr<ForkGuard> fork_guard_;
  int listen_fd_ = -1, epoll_ = -1, timer_ = -1;
  bool ticking_ = false;
  absl::Time accept_again_ = absl::InfiniteFuture();  // after a lack of descriptors

  uint64_t next_serial_ = 2;  // 0 and 1 are the listener and the timer
  uint32_t next_lane_ = 0;
  absl::flat_hash_map<uint64_t, std::unique_ptr<Link>> links_;
  absl::flat_hash_map<uint32_t, Link*> lanes_;  // open ones
  std::list<Link*> strangers_;                  // oldest first
  absl::flat_hash_set<Link*> timed_;            // that have a deadline
  absl::flat_hash_map<std::string, IncomingDial> incoming_;
  std::vector<Link*> dials_, ready_, closed_;
  std::vector<Posted> posted_;
  std::vector<Lost> lost_;
  std::unique_ptr<std::byte[]> input_;
  std::vector<PostToken> sent_;  // scratch

  absl::Time refusal_logged_ = absl::InfinitePast();
  uint64_t refusals_unlogged_ = 0;
  TlsWireStats stats_;
};

}  // namespace geomesh::transport
