// How a lane of wire/tls comes to be and ends:
//
//   dialler                                acceptor
//   connects, TLS handshake                accepts; within 10 s, and among at most 256 at a time:
//   greeting: who, whom, lane, hello       collects greetings; when all lanes of the dial are
//   there: "accepted" comes: OnLaneUp             sends "accepted" on each; OnLaneAccepted
//
// Until TLS has authenticated the other side, nothing that it sent is looked at but by TLS.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "transport/bytes.h"
#include "transport/wire/knock.h"
#include "transport/wire/tls_errors.h"
#include "transport/wire/tls_sockets.h"
#include "transport/wire/tls_wire.h"

namespace geomesh::transport {
namespace {

using Result = TlsStream::Result;

// In one turn: strangers at the door do not keep lanes waiting.
constexpr int kAcceptsAProgress = 16;
// Without descriptors there is no use in trying again at once.
constexpr absl::Duration kAcceptPause = absl::Seconds(1);
// For last words (an alert, a refusal) to be read before the socket goes.
constexpr absl::Duration kEndingTime = absl::Seconds(2);
constexpr absl::Duration kRefusalLogPause = absl::Minutes(1);

std::string DialKey(const LaneIdentity& identity) {
  std::string key(identity.dialler.begin(), identity.dialler.end());
  key.append(identity.dial.begin(), identity.dial.end());
  return key;
}

}  // namespace

// ---- dialling

absl::StatusOr<TlsAddress> TlsWireImpl::CheckedAddress(absl::string_view address,
                                                       absl::string_view peer) const {
  const auto check = [&]() -> absl::StatusOr<TlsAddress> {
    GM_ASSIGN_OR_RETURN(TlsAddressParts parts, ParseTlsAddress(address));
    if (parts.address.mode != address_.mode) {
      return absl::InvalidArgumentError(absl::StrCat("it uses ", TlsModeName(parts.address.mode),
                                                     ", this process ", TlsModeName(address_.mode),
                                                     ": set the same on all ranks"));
    }
    GM_RETURN_IF_ERROR(credentials_->CheckSeal(parts));
    if (parts.address.network != 0 && parts.address.network != ThisPlace({"net"})) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a loopback address cannot be reached from another host (",
          parts.address.endpoint.ToString(),
          "): set GEOMESH_INTERFACE or GEOMESH_ADVERTISE on the host that uses loopback"));
    }
    return std::move(parts.address);
  };
  absl::StatusOr<TlsAddress> checked = check();
  if (checked.ok()) return checked;
  return absl::InvalidArgumentError(absl::StrCat(peer, ": ", checked.status().message()));
}

absl::Status TlsWireImpl::CheckAddress(absl::string_view address, absl::string_view peer) const {
  return CheckedAddress(address, peer).status();
}

std::unique_ptr<Knock> TlsWireImpl::KnockAt(absl::string_view address) const {
  const auto target = CheckedAddress(address, "");
  return target.ok() ? KnockByTcp(target->endpoint) : nullptr;
}

absl::StatusOr<LaneId> TlsWireImpl::Dial(absl::string_view address, absl::string_view peer,
                                         int lanes, absl::Span<const std::byte> hello) {
  if (epoll_ < 0) return absl::FailedPreconditionError("Dial before Listen");
  if (lanes < 1 || lanes > kMaxTlsLanesPerDial || hello.size() > kMaxHelloBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "dialling ", peer, ": ", lanes, " lanes (1 to ", kMaxTlsLanesPerDial, " are possible), ",
        hello.size(), " bytes of hello (at most ", kMaxHelloBytes, ")"));
  }
  GM_ASSIGN_OR_RETURN(const TlsAddress target,
                      CheckedAddress(address, absl::StrCat("dialling ", peer)));
  if (target.listener == address_.listener) {
    return absl::InvalidArgumentError(
        absl::StrCat("dialling ", peer, ": the address is this process's own"));
  }
  LaneIdentity identity{
      credentials_->dial_key(),    address_.listener, target.listener, RandomTlsId(), 0,
      static_cast<uint16_t>(lanes)};
  const LaneId first{next_lane_};
  for (; identity.lane < lanes; ++identity.lane) {
    Link* link = NewLink(/*dialled=*/true, std::string(peer));
    link->has_lane = true;
    link->id = LaneId{next_lane_++};
    lanes_.emplace(static_cast<uint32_t>(link->id), link);
    link->target = target.endpoint;
    link->handshake.identity = identity;
    link->handshake.certificate = target.certificate;
    link->greeting = TlsGreeting{identity, std::string(AsText(hello))}.Serialize();
    dials_.push_back(link);
  }
  return first;
}

void TlsWireImpl::StartDials() {
  for (Link* link : std::exchange(dials_, {})) {
    if (link->state != State::kDialling) continue;  // closed again
    auto fd = StartConnect(device_, link->target, options_.unacknowledged_limit);
    absl::Status status = fd.status();
    if (fd.ok()) {
      link->fd = *fd;
      if (auto socket = DescribeTcpSocket(link->fd)) fork_guard_->Add(socket->ref);
      status = Watch(link);
    }
    if (!status.ok()) {
      Fail(link, status.code(),
           absl::StrCat("cannot connect to ", link->target.ToString(), ": ", status.message()));
    }
  }
}

void TlsWireImpl::FinishConnect(Link* link) {
  if (!link->writable || link->fd < 0) return;
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(link->fd, SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) {
    Fail(link, absl::StatusCode::kUnavailable,
         absl::StrCat("cannot connect to ", link->target.ToString(), ": ", std::strerror(error)));
    return;
  }
  if (auto status = StartTls(link); !status.ok()) {
    Fail(link, status.code(), std::string(status.message()));
  }
}

// ---- accepting

void TlsWireImpl::Accept() {
  for (int i = 0; i < kAcceptsAProgress; ++i) {
    IpEndpoint source;
    socklen_t size = sizeof(source.storage);
    const int fd = accept4(listen_fd_, reinterpret_cast<sockaddr*>(&source.storage), &size,
                           SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      // EMFILE, ENFILE, ENOBUFS, ENOMEM: the connection stays in the queue and would be told of
      // again and again.
      Log(LogLevel::kWarning, kTlsComponent,
          absl::StrCat("cannot accept connections for a second: ", std::strerror(errno)));
      epoll_event event = {0, {.u64 = 0}};
      epoll_ctl(epoll_, EPOLL_CTL_MOD, listen_fd_, &event);
      accept_again_ = absl::Now() + kAcceptPause;
      ArmTicks(true);
      return;
    }
    SetLaneOptions(fd, options_.unacknowledged_limit);
    MakeRoomForStranger();
    Link* link = NewLink(/*dialled=*/false, source.ToString());
    link->fd = fd;
    link->stranger = true;
    strangers_.push_back(link);
    absl::Status status = Watch(link);
    if (status.ok()) status = StartTls(link);
    if (!status.ok()) Fail(link, status.code(), std::string(status.message()));
  }
}

void TlsWireImpl::MakeRoomForStranger() {
  if (strangers_.size() < kMaxTlsStrangers) return;
  ++stats_.strangers_dropped;
  Link* oldest = strangers_.front();
  LogRefusal(*oldest, absl::StrCat(kMaxTlsStrangers,
                                   " connections that have not finished their TLS handshake are "
                                   "open; the oldest goes"));
  End(oldest);
}

void TlsWireImpl::OnHandshakeDone(Link* link) {
  const absl::Status peer =
      credentials_->CheckPeer(link->connection->stream().ssl(), link->handshake);
  if (!peer.ok()) {
    Fail(link, peer.code(), std::string(peer.message()));
    return;
  }
  link->state = State::kGreeting;
  if (link->dialled) {
    link->connection->QueueOwn(FrameType::kGreeting, std::move(link->greeting));
    return;
  }
  strangers_.remove(link);
  link->stranger = false;
}

void TlsWireImpl::OnFrame(Link* link, const TlsConnection::Frame& frame) {
  const bool own = frame.header.empty();
  if (link->state == State::kUp && frame.type == FrameType::kSegment) {
    events_->OnSegment(link->id, frame.header, frame.payload);
  } else if (link->state == State::kGreeting && !link->dialled && own &&
             frame.type == FrameType::kGreeting) {
    OnGreeting(link, frame.payload);
  } else if (link->state == State::kGreeting && link->dialled && own &&
             frame.type == FrameType::kAccepted && frame.payload.empty()) {
    link->state = State::kUp;
    link->deadline = absl::InfiniteFuture();
    timed_.erase(link);
    events_->OnLaneUp(link->id);
  } else if (link->state == State::kGreeting && link->dialled && own &&
             frame.type == FrameType::kRefused) {
    Fail(link, absl::StatusCode::kPermissionDenied,
         absl::StrCat("the other side refused: ", AsText(frame.payload).substr(0, 512)));
  } else {
    Fail(link, absl::StatusCode::kInvalidArgument,
         absl::StrCat("broke the protocol of wire/tls: a frame of type ",
                      static_cast<int>(frame.type), " where it has no place"));
  }
}

void TlsWireImpl::OnGreeting(Link* link, absl::Span<const std::byte> payload) {
  auto greeting = TlsGreeting::Parse(AsText(payload));
  if (!greeting.ok()) return Refuse(link, std::string(greeting.status().message()));
  const LaneIdentity& identity = greeting->identity;
  if (identity.listener != address_.listener) {
    return Refuse(link, "the process that was dialled is another one: it had this port before");
  }
  if (address_.mode == TlsMode::kSharedKey && identity != link->handshake.identity) {
    return Refuse(link, "the greeting is not of the connection that TLS authenticated");
  }
  link->handshake.identity = identity;
  IncomingDial& dial = incoming_[DialKey(identity)];
  if (dial.lanes.empty()) {
    dial.lanes.resize(identity.lanes);
    dial.hello = greeting->hello;
  }
  if (dial.lanes.size() != identity.lanes || dial.hello != greeting->hello ||
      dial.lanes[identity.lane] != nullptr) {
    return Refuse(link, absl::StrCat("lane ", identity.lane,
                                     " of this dial came twice, or differs "
                                     "from its other lanes"));
  }
  dial.lanes[identity.lane] = link;
  link->state = State::kGathering;
  if (++dial.arrived == dial.lanes.size()) AcceptDial(DialKey(identity));
}

void TlsWireImpl::AcceptDial(const std::string& key) {
  const auto it = incoming_.find(key);
  const IncomingDial dial = std::move(it->second);
  incoming_.erase(it);
  const int lanes = static_cast<int>(dial.lanes.size());
  std::vector<LaneId> ids;
  for (Link* link : dial.lanes) {
    link->state = State::kUp;
    link->deadline = absl::InfiniteFuture();
    timed_.erase(link);
    link->has_lane = true;
    link->id = LaneId{next_lane_++};
    ids.push_back(link->id);
    lanes_.emplace(static_cast<uint32_t>(link->id), link);
    link->connection->QueueOwn(FrameType::kAccepted, "");
    PumpOutput(link);  // before the engine may close it: then the dialler knows that it was there
  }
  Log(LogLevel::kDebug, kTlsComponent,
      absl::StrCat("accepted ", lanes, " lanes from ", dial.lanes[0]->peer));
  for (int i = 0; i < lanes; ++i) {
    // One that the engine closed in an earlier call was never its own.
    if (FindLane(ids[i]) == nullptr) continue;
    if (!events_->OnLaneAccepted(ids[i], i, lanes, AsBytes(dial.hello))) Close(ids[i]);
  }
}

// ---- ending

void TlsWireImpl::StreamFailed(Link* link, Result result) {
  const TlsStream& stream = link->connection->stream();
  const bool closed = result == Result::kClosed;
  if (link->state == State::kEnding) return End(link);
  if (const std::string& breach = link->connection->breach(); !breach.empty()) {
    return Fail(link, absl::StatusCode::kInvalidArgument,
                absl::StrCat("broke the protocol of wire/tls: ", breach));
  }
  if (link->state == State::kUp || link->state == State::kGathering) {
    return Fail(link, absl::StatusCode::kUnavailable, TlsLossText(stream, closed));
  }
  if (closed && link->dialled && link->state == State::kGreeting) {
    return Fail(link, absl::StatusCode::kUnavailable,
                "the other side ended it while it was greeted");
  }
  // Somebody who connects and says nothing is a probe, and no news.
  const bool probe = closed && !link->dialled && stream.encrypted_bytes() == 0;
  Fail(link, closed ? absl::StatusCode::kUnavailable : absl::StatusCode::kPermissionDenied,
       probe
           ? ""
           : TlsFailureText(stream, address_.mode, link->dialled, closed, link->handshake.problem));
}

// The lane is lost, or the connection refused; its last words (an alert) still go out.
void TlsWireImpl::Fail(Link* link, absl::StatusCode code, std::string why) {
  const absl::Status reason(code, absl::StrCat(NameOf(*link), ": ", why));
  if (!link->has_lane) {
    if (link->state == State::kHandshake) ++stats_.handshakes_failed;
    if (!why.empty()) LogRefusal(*link, why);
  } else if (FindLane(link->id) == link) {
    lost_.push_back({link->id, reason});
  }
  LeaveDial(link);
  Retire(link, reason);
}

// In words to the other side, which is authenticated.
void TlsWireImpl::Refuse(Link* link, const std::string& why) {
  link->connection->QueueOwn(FrameType::kRefused, why);
  std::vector<PostToken> none;
  bool more = false;
  (void)link->connection->Pump(&none, &more);
  Fail(link, absl::StatusCode::kPermissionDenied, why);
}

// All lanes of a dial or none.
void TlsWireImpl::LeaveDial(Link* link) {
  if (link->state != State::kGathering) return;
  const auto it = incoming_.find(DialKey(link->handshake.identity));
  if (it == incoming_.end()) return;
  const IncomingDial dial = std::move(it->second);
  incoming_.erase(it);
  for (Link* other : dial.lanes) {
    if (other == nullptr || other == link) continue;
    LogRefusal(*other, "another lane of the same dial was lost");
    Retire(other, absl::OkStatus());
  }
}

// Takes a link out of everything but the sending of its last words.
void TlsWireImpl::Retire(Link* link, const absl::Status& pending) {
  if (link->connection == nullptr || link->hung_up) return End(link);
  for (const PostToken token : link->connection->TakeUnsent()) {
    posted_.push_back({link->id, token, pending});
  }
  TlsStream& stream = link->connection->stream();
  if (stream.Flush() == Result::kFailed || shutdown(link->fd, SHUT_WR) != 0) return End(link);
  link->state = State::kEnding;
  link->deadline = absl::Now() + kEndingTime;
  timed_.insert(link);
  ArmTicks(true);
  link->readable = true;
  MarkReady(link);
}

void TlsWireImpl::Close(LaneId id) {
  Link* link = FindLane(id);
  if (link == nullptr) return;
  lanes_.erase(static_cast<uint32_t>(id));
  if (link->state == State::kEnding || link->state == State::kClosed) return;  // lost, not yet told
  Retire(link, absl::CancelledError(absl::StrCat(NameOf(*link), ": closed")));
}

void TlsWireImpl::End(Link* link) {
  if (link->state == State::kClosed) return;
  if (link->connection != nullptr) {
    for (const PostToken token : link->connection->TakeUnsent()) {
      posted_.push_back(
          {link->id, token, absl::UnavailableError(absl::StrCat(NameOf(*link), ": lost"))});
    }
  }
  CloseSocket(link);
  if (link->stranger) strangers_.remove(link);
  timed_.erase(link);
  link->state = State::kClosed;
  closed_.push_back(link);
}

void TlsWireImpl::CloseSocket(Link* link) {
  if (link->fd < 0) return;
  // Closing with bytes unread would reset the connection, and what was sent last might not arrive.
  shutdown(link->fd, SHUT_WR);
  (void)recv(link->fd, nullptr, size_t{1} << 20, MSG_DONTWAIT | MSG_TRUNC);
  close(std::exchange(link->fd, -1));
}

void TlsWireImpl::LogRefusal(const Link& link, absl::string_view why) {
  const absl::Time now = absl::Now();
  if (now - refusal_logged_ < kRefusalLogPause) {
    ++refusals_unlogged_;
    return;
  }
  refusal_logged_ = now;
  const uint64_t more = std::exchange(refusals_unlogged_, 0);
  Log(LogLevel::kWarning, kTlsComponent,
      absl::StrCat(
          "refused a connection from ", link.peer, ": ", why,
          more == 0 ? "" : absl::StrCat(" (and ", more, " more since the last such line)")));
}

}  // namespace geomesh::transport
