// wire/tls: opening, posting and running. How lanes come to be and end is in tls_accept.cc.
#include "transport/wire/tls.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "transport/wire/tls_errors.h"
#include "transport/wire/tls_sockets.h"
#include "transport/wire/tls_wire.h"

namespace geomesh::transport {
namespace {

using Result = TlsStream::Result;

constexpr uint64_t kListenerEvent = 0, kTimerEvent = 1;
constexpr int kEventsAProgress = 64;
constexpr absl::Duration kTick = absl::Milliseconds(250);

}  // namespace

// ---- opening

absl::StatusOr<std::string> TlsWireImpl::Listen(WireEvents* events) {
  if (epoll_ >= 0) return absl::FailedPreconditionError("already listening");
  GM_ASSIGN_OR_RETURN(credentials_, LoadTlsCredentials(options_.keys));
  GM_ASSIGN_OR_RETURN(device_, ChooseDevice(options_.device));
  events_ = events;
  fork_guard_ = std::make_unique<ForkGuard>();
  GM_RETURN_IF_ERROR(OpenDescriptors());

  address_.mode = credentials_->mode();
  address_.listener = RandomTlsId();
  address_.certificate = credentials_->certificate();
  address_.endpoint = listener_;
  if (!options_.advertise.empty()) {
    GM_ASSIGN_OR_RETURN(address_.endpoint, ResolveAdvertised(options_.advertise, listener_));
  } else if (listener_.is_loopback()) {
    address_.network = ThisPlace({"net"});
  }
  input_.reset(new std::byte[kTlsReceiveBytes]);

  const std::string body = address_.Body();
  GM_ASSIGN_OR_RETURN(const std::string seal, credentials_->Seal(body));
  Log(LogLevel::kInfo, kTlsComponent,
      absl::StrCat("listens on ", listener_.ToString(), " (", device_.interface, ") with ",
                   TlsModeName(address_.mode),
                   options_.advertise.empty()
                       ? ""
                       : absl::StrCat(", known to others as ", address_.endpoint.ToString())));
  return TlsAddress::Sealed(body, seal);
}

absl::Status TlsWireImpl::OpenDescriptors() {
  GM_ASSIGN_OR_RETURN(const Listener listener, OpenListener(device_, options_.ports));
  listen_fd_ = listener.fd;
  listener_ = listener.local;
  fork_guard_->Listening(listener_);
  timer_ = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  epoll_event listening = {EPOLLIN, {.u64 = kListenerEvent}},
              timer = {EPOLLIN, {.u64 = kTimerEvent}};
  if (timer_ < 0 || epoll_ < 0 || epoll_ctl(epoll_, EPOLL_CTL_ADD, listen_fd_, &listening) != 0 ||
      epoll_ctl(epoll_, EPOLL_CTL_ADD, timer_, &timer) != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no descriptor to wait on: ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

TlsWireImpl::~TlsWireImpl() {
  for (const int fd : {timer_, epoll_}) {
    if (fd >= 0) close(fd);
  }
  // In a forked child: its copies of the sockets are closed, and their numbers may be others' by
  // now.
  if (getpid() != owner_) return;
  for (auto& [serial, link] : links_) {
    if (link->connection != nullptr) (void)link->connection->stream().Flush();
    CloseSocket(link.get());
  }
  if (listen_fd_ >= 0) close(listen_fd_);
}

TlsWireStats TlsWireImpl::stats() const {
  TlsWireStats stats = stats_;
  stats.connections = links_.size();
  stats.unfinished = strangers_.size();
  return stats;
}

// ---- links

TlsWireImpl::Link* TlsWireImpl::NewLink(bool dialled, std::string peer) {
  auto link = std::make_unique<Link>();
  link->serial = next_serial_++;
  link->dialled = link->handshake.dialler = dialled;
  link->peer = std::move(peer);
  link->handshake.own_listener = address_.listener;
  link->deadline = absl::Now() + kTlsHandshakeTimeout;
  timed_.insert(link.get());
  ArmTicks(true);
  return links_.emplace(link->serial, std::move(link)).first->second.get();
}

TlsWireImpl::Link* TlsWireImpl::FindLane(LaneId id) const {
  const auto it = lanes_.find(static_cast<uint32_t>(id));
  return it == lanes_.end() ? nullptr : it->second;
}

// "lane 0 to rank 1 on host b", "lane 2 from 10.0.0.5:40000".
std::string TlsWireImpl::NameOf(const Link& link) const {
  return absl::StrCat("lane ", link.handshake.identity.lane, link.dialled ? " to " : " from ",
                      link.peer);
}

void TlsWireImpl::MarkReady(Link* link) {
  if (std::exchange(link->ready, true)) return;
  ready_.push_back(link);
}

// Edge-triggered, both ways, once: no further call for a link however busy it is.
absl::Status TlsWireImpl::Watch(Link* link) {
  epoll_event event = {EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, {.u64 = link->serial}};
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, link->fd, &event) == 0) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("epoll: ", std::strerror(errno)));
}

absl::Status TlsWireImpl::StartTls(Link* link) {
  GM_ASSIGN_OR_RETURN(SslPtr ssl, credentials_->NewConnection(&link->handshake));
  link->connection = std::make_unique<TlsConnection>(std::move(ssl), link->fd, link->dialled,
                                                     options_.records_per_key);
  link->state = State::kHandshake;
  MarkReady(link);
  return absl::OkStatus();
}

// Wakes the owner now and then while something has a deadline.
void TlsWireImpl::ArmTicks(bool on) {
  if (ticking_ == on) return;
  ticking_ = on;
  itimerspec spec = {};
  if (on) spec.it_interval = spec.it_value = absl::ToTimespec(kTick);
  timerfd_settime(timer_, 0, &spec, nullptr);
}

void TlsWireImpl::Tick() {
  uint64_t ticks = 0;
  [[maybe_unused]] const ssize_t n = read(timer_, &ticks, sizeof(ticks));
  const absl::Time now = absl::Now();
  std::vector<Link*> late;
  for (Link* link : timed_) {
    if (link->deadline <= now) late.push_back(link);
  }
  for (Link* link : late) {
    const char* why = "the lane was not greeted within 10 s";
    switch (link->state) {
      case State::kClosed:
        break;
      case State::kEnding:
        End(link);
        break;
      case State::kDialling:
        Fail(
            link, absl::StatusCode::kUnavailable,
            absl::StrCat("cannot connect to ", link->target.ToString(), ": no answer within 10 s"));
        break;
      case State::kHandshake:
        why = "the TLS handshake was not finished within 10 s";
        if (!link->stranger) {
          Fail(link, absl::StatusCode::kUnavailable, why);
          break;
        }
        ++stats_.handshakes_failed;
        LogRefusal(*link, why);
        End(link);  // no last words for a stranger
        break;
      default:
        if (link->state == State::kGathering) why = "the dial's other lanes did not come in 10 s";
        Fail(link, absl::StatusCode::kUnavailable, why);
    }
  }
  if (accept_again_ <= now) {
    accept_again_ = absl::InfiniteFuture();
    epoll_event event = {EPOLLIN, {.u64 = kListenerEvent}};
    epoll_ctl(epoll_, EPOLL_CTL_MOD, listen_fd_, &event);
  }
  ArmTicks(!timed_.empty() || accept_again_ != absl::InfiniteFuture());
}

// ---- posting

absl::Status TlsWireImpl::Post(LaneId id, absl::Span<const std::byte> header,
                               absl::Span<const std::byte> payload, PostToken token) {
  Link* link = FindLane(id);
  if (link == nullptr || link->state != State::kUp) {
    return absl::FailedPreconditionError(
        absl::StrCat("lane ", static_cast<uint32_t>(id),
                     link != nullptr && link->state < State::kUp ? " is not up yet"
                     : static_cast<uint32_t>(id) < next_lane_    ? " is closed"
                                                                 : " does not exist"));
  }
  if (header.size() > kMaxSegmentHeaderBytes || payload.size() > kMaxSegmentPayloadBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("segment of ", header.size(), " + ", payload.size(), " bytes; at most ",
                     kMaxSegmentHeaderBytes, " + ", kMaxSegmentPayloadBytes, " fit"));
  }
  link->connection->Queue(header, payload, token);
  MarkReady(link);
  return absl::OkStatus();
}

void TlsWireImpl::Mark(LaneId id, Traffic traffic) {
  Link* link = FindLane(id);
  if (link == nullptr || link->fd < 0 || !options_.dscp.has_value()) return;
  SetDscp(link->fd, traffic == Traffic::kUrgent ? options_.dscp->urgent : options_.dscp->bulk);
}

// ---- running

void TlsWireImpl::PumpOutput(Link* link) {
  if (!link->writable) return;
  bool more = false;
  sent_.clear();
  const Result result = link->connection->Pump(&sent_, &more);
  for (const PostToken token : sent_) posted_.push_back({link->id, token, absl::OkStatus()});
  if (result == Result::kBlocked) link->writable = false;
  if (result == Result::kFailed) StreamFailed(link, result);
  if (more) MarkReady(link);
}

// Decrypts and handles one buffer of what came. False if nothing is left of the link.
bool TlsWireImpl::TakeInput(Link* link) {
  TlsStream& stream = link->connection->stream();
  bool more = false;
  Result result = Result::kBlocked;
  if (!link->readable && link->state != State::kHandshake) return true;
  if (link->readable) {
    result = stream.Fill({input_.get(), kTlsReceiveBytes}, &more);
    // A short read means that the socket is empty, and the next bytes will be told; its end was
    // told already.
    link->readable = result == Result::kDone && (more || link->hung_up);
    if (result == Result::kClosed || result == Result::kFailed) {
      StreamFailed(link, result);
      return link->state != State::kClosed;
    }
  }
  for (;;) {
    if (link->state == State::kHandshake) {
      result = stream.Handshake();
      if (result == Result::kDone) {
        OnHandshakeDone(link);
        continue;
      }
    } else if (link->state == State::kEnding || link->state == State::kClosed) {
      stream.DropInput();
      return link->state != State::kClosed;
    } else {
      TlsConnection::Frame frame;
      result = link->connection->ReadFrame(&frame);
      if (result == Result::kDone) {
        OnFrame(link, frame);
        continue;
      }
    }
    if (result == Result::kBlocked) return true;
    stream.DropInput();
    StreamFailed(link, result);
    return link->state != State::kClosed;
  }
}

void TlsWireImpl::Drive(Link* link) {
  if (link->state == State::kClosed) return;
  if (link->state == State::kDialling) {
    FinishConnect(link);
    if (link->connection == nullptr) return;
  }
  if (!TakeInput(link)) return;
  PumpOutput(link);
  if (link->state != State::kClosed && link->readable) MarkReady(link);
}

int TlsWireImpl::Progress() {
  if (epoll_ < 0) return 0;
  int done = static_cast<int>(dials_.size());
  StartDials();
  epoll_event events[kEventsAProgress];
  const int count = epoll_wait(epoll_, events, kEventsAProgress, 0);
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u64 == kListenerEvent) {
      Accept();
    } else if (events[i].data.u64 == kTimerEvent) {
      Tick();
    } else if (const auto it = links_.find(events[i].data.u64); it != links_.end()) {
      Link* link = it->second.get();
      const uint32_t what = events[i].events;
      link->hung_up |= (what & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
      link->readable |= link->hung_up || (what & EPOLLIN) != 0;
      link->writable |= (what & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0;
      MarkReady(link);
    }
  }
  done += std::max(count, 0) + static_cast<int>(ready_.size());
  for (Link* link : std::exchange(ready_, {})) {
    link->ready = false;
    Drive(link);
  }
  done += Deliver();
  return done;
}

// Tells the engine what has happened since, and forgets the links that are gone.
int TlsWireImpl::Deliver() {
  const auto posted = std::exchange(posted_, {});
  for (const Posted& p : posted) events_->OnPosted(p.lane, p.token, p.status);
  const auto lost = std::exchange(lost_, {});
  int told = static_cast<int>(posted.size());
  for (const Lost& l : lost) {
    if (FindLane(l.lane) == nullptr) continue;  // closed by the engine meanwhile
    lanes_.erase(static_cast<uint32_t>(l.lane));
    ++told;
    events_->OnLaneLost(l.lane, l.reason);
  }
  // Callbacks may have closed more, and marked what is closed.
  for (Link* link : std::exchange(closed_, {})) {
    if (link->ready) ready_.erase(std::find(ready_.begin(), ready_.end(), link));
    dials_.erase(std::remove(dials_.begin(), dials_.end(), link), dials_.end());
    links_.erase(link->serial);
  }
  return told;
}

bool TlsWireImpl::Arm() {
  return dials_.empty() && ready_.empty() && posted_.empty() && lost_.empty() && closed_.empty();
}

absl::StatusOr<std::unique_ptr<Wire>> MakeTlsWire(TlsWireOptions options) {
  return std::make_unique<TlsWireImpl>(std::move(options));
}

}  // namespace geomesh::transport
