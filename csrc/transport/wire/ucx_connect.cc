// How a lane comes to be (UCX matches connections by the order of endpoints between two addresses,
// and an active message does not say on which endpoint it came):
//
//   dialler                                   acceptor
//   makes N endpoints, sends a greeting on
//   each: nonce, lane index, hello, address   collects greetings; when all N are there, makes its
//                                             N endpoints in order: UCX reuses the N connections
//                                             sends "accepted" on each; OnLaneAccepted
//   "accepted" (or data) comes: OnLaneUp
//
// From then on each message starts with a UcxPrefix that names its lane.
#include <ucp/api/ucp.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/identity.h"
#include "base/log.h"
#include "transport/wire/knock.h"
#include "transport/wire/ucx_config.h"
#include "transport/wire/ucx_wire.h"

namespace geomesh::transport {
namespace {

// A dial whose greetings do not all arrive is forgotten after this; how many may be incomplete.
constexpr absl::Duration kGreetingTimeout = absl::Seconds(60);
constexpr size_t kMaxIncompleteDials = 4096;

absl::string_view AsString(absl::Span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

// ---- lanes

UcxWireImpl::Lane* UcxWireImpl::NewLane(uint64_t nonce, int index, bool dialled, std::string peer) {
  auto lane = std::make_unique<Lane>();
  lane->wire = this;
  lane->id = LaneId{static_cast<uint32_t>(lanes_.size())};
  lane->prefix = {nonce, static_cast<uint16_t>(index), dialled};
  lane->peer = std::move(peer);
  lanes_.push_back(std::move(lane));
  return lanes_.back().get();
}

UcxWireImpl::Lane* UcxWireImpl::FindLane(LaneId id) const {
  const auto index = static_cast<size_t>(id);
  return index < lanes_.size() ? lanes_[index].get() : nullptr;
}

UcxWireImpl::Lane* UcxWireImpl::FindLane(const UcxPrefix& received) {
  auto& sets = received.from_dialler ? accepted_ : dialled_;
  auto it = sets.find(received.nonce);
  if (it == sets.end() || received.lane >= it->second.size()) return nullptr;
  return it->second[received.lane];
}

absl::StatusOr<LaneId> UcxWireImpl::Dial(absl::string_view address, absl::string_view peer,
                                         int lanes, absl::Span<const std::byte> hello) {
  if (worker_ == nullptr) return absl::FailedPreconditionError("Dial before Listen");
  if (lanes < 1 || lanes > kMaxLanesPerDial || hello.size() > kMaxHelloBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "dialling ", peer, ": ", lanes, " lanes (1 to ", kMaxLanesPerDial, " are possible), ",
        hello.size(), " bytes of hello (at most ", kMaxHelloBytes, ")"));
  }
  auto target = UcxAddress::Parse(address);
  absl::Status status = target.ok() ? CheckCompatible(address_, *target) : target.status();
  if (status.ok() && target->uid == address_.uid) {
    status = absl::InvalidArgumentError("the address is this process's own");
  }
  if (!status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("dialling ", peer, ": ", status.message()));
  }
  PendingDial dial{Random64(), *std::move(target), std::string(AsString(hello))};
  LaneSet& set = dialled_[dial.nonce];
  for (int i = 0; i < lanes; ++i) {
    set.push_back(NewLane(dial.nonce, i, /*dialled=*/true, std::string(peer)));
    set.back()->reported = true;
  }
  const LaneId first = set.front()->id;
  dials_.push_back(std::move(dial));
  return first;
}

std::unique_ptr<Knock> UcxWireImpl::KnockAt(absl::string_view address) const {
  const auto target = UcxAddress::Parse(address);
  return target.ok() ? KnockByTcp(target->listening) : nullptr;
}

void UcxWireImpl::ConnectDials() {
  for (const PendingDial& dial : std::exchange(dials_, {})) {
    auto it = dialled_.find(dial.nonce);
    if (it != dialled_.end()) Connect(dial, LaneSet(it->second));
  }
}

void UcxWireImpl::Connect(const PendingDial& dial, const LaneSet& lanes) {
  const uint32_t endpoints_before = endpoints_made_[dial.target.listening.ToString()];
  fork_guard_->Dialled(dial.target.listening);
  for (Lane* lane : lanes) {
    // Endpoints are made also for lanes closed meanwhile: both sides count them.
    const int likely_fd = LikelyNextFd();
    absl::Status status = MakeEndpoint(lane, dial.target);
    if (!status.ok()) {
      FailLane(lane, std::move(status));
      continue;
    }
    UcxGreeting greeting;
    greeting.source = device_.address;
    if (const auto socket = DialledSocket(likely_fd, dial.target.listening); socket.has_value()) {
      lane->socket = socket->ref;
      greeting.source = socket->local;
      SetCloseOnExec(socket->ref.fd);
      fork_guard_->Add(socket->ref);
    }
    greeting.target_uid = dial.target.uid;
    greeting.endpoints_before = endpoints_before;
    greeting.lanes = static_cast<uint16_t>(lanes.size());
    greeting.hello = dial.hello;
    greeting.address = address_blob_;
    status = SendOwn(kGreetingMessage, lane, greeting.Serialize());
    if (!status.ok()) FailLane(lane, std::move(status));
  }
}

// The socket of the endpoint just made: most likely `likely_fd`, unless UCX's own thread has
// accepted a connection just then and got that number. Accepted sockets have another far end, or
// our port.
std::optional<SocketInfo> UcxWireImpl::DialledSocket(int likely_fd,
                                                     const IpEndpoint& target) const {
  const auto fits = [&](const SocketInfo& s) {
    return !s.listening && s.local.SameAddress(device_.address) &&
           s.local.port() != address_.listening.port() &&
           (!s.remote.has_value() || SameEndpoint(*s.remote, target));
  };
  if (auto likely = DescribeTcpSocket(likely_fd); likely.has_value() && fits(*likely)) {
    return likely;
  }
  std::optional<SocketInfo> found;
  ForEachTcpSocket([&](const SocketInfo& s) {
    const bool taken = std::any_of(lanes_.begin(), lanes_.end(), [&](const auto& lane) {
      return lane != nullptr && lane->socket == s.ref;
    });
    if (!taken && fits(s)) found = s;
  });
  return found;
}

absl::Status UcxWireImpl::MakeEndpoint(Lane* lane, const UcxAddress& target) {
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(target.ucx.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &OnEndpointError;
  params.err_handler.arg = lane;
  ++endpoints_made_[target.listening.ToString()];
  const ucs_status_t status = ucp_ep_create(worker_, &params, &lane->endpoint);
  if (status == UCS_OK) {
    ++stats_.endpoints;
    return absl::OkStatus();
  }
  lane->endpoint = nullptr;
  std::string route;
  if (status == UCS_ERR_UNREACHABLE) {
    route = absl::StrCat(" (no route from ", device_.interface, "?)");
  }
  return UcxStatus(status, absl::StrCat("connecting from ", device_.address.AddressString(), " to ",
                                        target.listening.ToString(), route));
}

void UcxWireImpl::OnEndpointError(void* lane_pointer, ucp_ep_h, ucs_status_t status) {
  auto* lane = static_cast<Lane*>(lane_pointer);
  lane->wire->failures_.push_back(
      {lane,
       UcxStatus(status, lane->state == LaneState::kUp ? "connection lost" : "cannot connect")});
}

void UcxWireImpl::FailLane(Lane* lane, absl::Status reason) {
  failures_.push_back({lane, std::move(reason)});
}

// Takes a lane out of everything but the completion of what it has posted.
void UcxWireImpl::Retire(Lane* lane) {
  lane->state = LaneState::kClosed;
  sends_of_closed_lanes_ += lane->posts;
  auto& sets = lane->prefix.from_dialler ? dialled_ : accepted_;
  auto it = sets.find(lane->prefix.nonce);
  if (it != sets.end()) {
    bool all_closed = true;
    for (Lane* other : it->second) all_closed &= other->state == LaneState::kClosed;
    if (all_closed) sets.erase(it);
  }
  closing_.push_back(lane);
}

void UcxWireImpl::CloseEndpoint(Lane* lane) {
  if (lane->endpoint == nullptr) return;
  // Closing an endpoint leaves its connection open until the other side closes too, and a segment
  // cut off halfway in it; so end the connection itself.
  ShutDown(lane->socket);
  ucp_request_param_t param = {};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.cb.send = &OnEndpointClosed;
  param.user_data = this;
  ucs_status_ptr_t request = ucp_ep_close_nbx(std::exchange(lane->endpoint, nullptr), &param);
  --stats_.endpoints;
  if (UCS_PTR_IS_PTR(request)) ++endpoints_closing_;
  settle_until_ = absl::Now() + kUcxSettleTime;
}

void UcxWireImpl::OnEndpointClosed(void* request, ucs_status_t, void* self) {
  --static_cast<UcxWireImpl*>(self)->endpoints_closing_;
  ucp_request_free(request);
}

void UcxWireImpl::Close(LaneId id) {
  Lane* lane = FindLane(id);
  if (lane != nullptr && lane->state != LaneState::kClosed) Retire(lane);
}

void UcxWireImpl::FinishFailures() {
  for (Failure& failure : std::exchange(failures_, {})) {
    Lane* lane = failure.lane;
    if (lane->state == LaneState::kClosed) continue;
    Retire(lane);
    if (!lane->reported) continue;
    events_->OnLaneLost(
        lane->id, absl::Status(failure.reason.code(),
                               absl::StrCat("lane ", lane->prefix.lane, " to ", lane->peer, ": ",
                                            failure.reason.message())));
  }
}

// ---- accepting

void UcxWireImpl::OnGreeting(const void* header, size_t header_bytes, const void* data,
                             size_t bytes) {
  UcxPrefix prefix;
  if (!UcxPrefix::Parse(header, header_bytes, &prefix) || !prefix.from_dialler) {
    ++stats_.dropped_malformed;
    return;
  }
  auto greeting = UcxGreeting::Parse({static_cast<const char*>(data), bytes});
  if (!greeting.ok() || prefix.lane >= greeting->lanes) {
    ++stats_.dropped_malformed;
    Log(LogLevel::kInfo, kUcxComponent,
        absl::StrCat("dropped a greeting: ",
                     greeting.ok() ? "lane out of range" : greeting.status().message()));
    return;
  }
  if (greeting->target_uid != address_.uid) {
    ++stats_.dropped_greetings;
    Log(LogLevel::kInfo, kUcxComponent,
        absl::StrCat(greeting->source.ToString(), " dialled the process that had ",
                     address_.listening.ToString(), " before this one"));
    RejectConnections({greeting->source});
    return;
  }
  const absl::Time now = absl::Now();
  if (!incoming_.contains(prefix.nonce)) {
    absl::erase_if(incoming_, [&](const auto& entry) {
      return entry.second.since + kGreetingTimeout < now &&
             entry.second.arrived < entry.second.greeting.lanes;
    });
    if (incoming_.size() >= kMaxIncompleteDials || accepted_.contains(prefix.nonce)) {
      ++stats_.dropped_greetings;
      return;
    }
    IncomingDial fresh;
    fresh.sources.resize(greeting->lanes);
    fresh.since = now;
    fresh.greeting = *greeting;
    incoming_.emplace(prefix.nonce, std::move(fresh));
  }
  IncomingDial& incoming = incoming_.at(prefix.nonce);
  if (greeting->lanes != incoming.greeting.lanes || greeting->hello != incoming.greeting.hello ||
      greeting->address != incoming.greeting.address || incoming.sources[prefix.lane].has_value()) {
    ++stats_.dropped_greetings;
    return;
  }
  incoming.sources[prefix.lane] = greeting->source;
  if (++incoming.arrived == greeting->lanes) complete_dials_.push_back(prefix.nonce);
}

void UcxWireImpl::RejectConnections(const std::vector<std::optional<IpEndpoint>>& sources) {
  ForEachTcpSocket([&](const SocketInfo& s) {
    if (!s.remote.has_value() || !SameEndpoint(s.local, address_.listening)) {
      return;
    }
    for (const auto& source : sources) {
      if (source.has_value() && SameEndpoint(*s.remote, *source)) ShutDown(s.ref);
    }
  });
}

void UcxWireImpl::AcceptDials() {
  for (uint64_t nonce : std::exchange(complete_dials_, {})) {
    auto it = incoming_.find(nonce);
    if (it == incoming_.end()) continue;
    IncomingDial incoming = std::move(it->second);
    incoming_.erase(it);
    Accept(nonce, incoming);
  }
}

void UcxWireImpl::Accept(uint64_t nonce, const IncomingDial& incoming) {
  auto dialler = UcxAddress::Parse(incoming.greeting.address);
  absl::Status status = dialler.ok() ? CheckCompatible(address_, *dialler) : dialler.status();
  if (!status.ok()) {
    ++stats_.dropped_greetings;
    Log(LogLevel::kInfo, kUcxComponent,
        absl::StrCat("refused lanes from ", incoming.greeting.source.ToString(), ": ",
                     status.message()));
    RejectConnections(incoming.sources);
    return;
  }
  const std::string peer = dialler->listening.ToString();
  const uint32_t made = endpoints_made_[peer];
  if (made != incoming.greeting.endpoints_before) {
    Log(LogLevel::kDebug, kUcxComponent,
        absl::StrCat("endpoints to ", peer, ": ", made, " here, ",
                     incoming.greeting.endpoints_before,
                     " there; this side dials back instead of sharing connections"));
  }
  // Endpoints first, all of them: then UCX finds the connections of the greetings in order.
  LaneSet set;
  for (int i = 0; i < incoming.greeting.lanes; ++i) {
    Lane* lane = NewLane(nonce, i, /*dialled=*/false, peer);
    set.push_back(lane);
    if (status.ok()) status = MakeEndpoint(lane, *dialler);
    if (status.ok()) lane->state = LaneState::kUp;
  }
  accepted_.emplace(nonce, set);
  absl::flat_hash_map<std::string, SocketRef> by_source;
  ForEachTcpSocket([&](const SocketInfo& s) {
    if (!s.remote.has_value() || !SameEndpoint(s.local, address_.listening)) {
      return;
    }
    SetCloseOnExec(s.ref.fd);
    by_source.emplace(s.remote->ToString(), s.ref);
  });
  for (size_t i = 0; i < set.size(); ++i) {
    auto it = by_source.find(incoming.sources[i]->ToString());
    if (it != by_source.end()) set[i]->socket = it->second;
    if (status.ok()) status = SendOwn(kAcceptedMessage, set[i], {});
  }
  if (!status.ok()) {
    Log(LogLevel::kInfo, kUcxComponent,
        absl::StrCat("could not accept lanes from ", peer, ": ", status.message()));
    for (Lane* lane : set) Retire(lane);
    return;
  }
  for (size_t i = 0; i < set.size(); ++i) {
    Lane* lane = set[i];
    lane->reported = true;
    const bool keep =
        events_->OnLaneAccepted(lane->id, static_cast<int>(i), static_cast<int>(set.size()),
                                {reinterpret_cast<const std::byte*>(incoming.greeting.hello.data()),
                                 incoming.greeting.hello.size()});
    if (!keep && lane->state != LaneState::kClosed) Retire(lane);
  }
}

}  // namespace geomesh::transport
