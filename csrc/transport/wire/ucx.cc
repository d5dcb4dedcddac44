// wire/ucx: opening, sending, receiving and running. How lanes come to be and end is in
// ucx_connect.cc.
#include "transport/wire/ucx.h"

#include <ucp/api/ucp.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "transport/wire/ucx_config.h"
#include "transport/wire/ucx_log.h"
#include "transport/wire/ucx_wire.h"

namespace geomesh::transport {
namespace {

std::array<struct sigaction, NSIG> SignalDispositions() {
  std::array<struct sigaction, NSIG> all = {};
  for (int s = 1; s < NSIG; ++s) sigaction(s, nullptr, &all[s]);
  return all;
}

}  // namespace

// ---- opening

absl::StatusOr<std::string> UcxWireImpl::Listen(WireEvents* events) {
  if (ucx_ != nullptr) return absl::FailedPreconditionError("already listening");
  RouteUcxLog();
  GM_RETURN_IF_ERROR(CheckUcxVersion());
  GM_ASSIGN_OR_RETURN(device_, ChooseDevice(options_.device));
  events_ = events;
  fork_guard_ = std::make_unique<ForkGuard>();

  const auto signals_before = SignalDispositions();
  GM_ASSIGN_OR_RETURN(ucx_,
                      UcxWorker::Open(device_, options_.ports, options_.unacknowledged_limit));
  WarnAboutEnvironment(signals_before);
  worker_ = ucx_->get();
  event_fd_ = ucx_->event_fd();
  address_.listening = ucx_->listening();
  fork_guard_->Listening(address_.listening);
  GM_ASSIGN_OR_RETURN(address_.ucx, ucx_->Address());
  GM_RETURN_IF_ERROR(RegisterHandlers());
  address_.uid = Random64();
  address_.network = ThisPlace({"net"});
  address_.ucx_version = UcxRuntimeVersion();
  address_.tx_segment_bytes = kUcxTxSegmentBytes;
  address_.rx_segment_bytes = kUcxRxSegmentBytes;
  address_blob_ = address_.Serialize();

  Log(LogLevel::kInfo, kUcxComponent,
      absl::StrCat("UCX ", ucp_get_version_string(), " listens on ", address_.listening.ToString(),
                   " (", device_.interface, ")"));
  if (device_.address.is_public()) WarnAboutPublicAddress();
  return address_blob_;
}

void UcxWireImpl::WarnAboutPublicAddress() const {
  static const bool warned = [this] {
    Log(LogLevel::kWarning, kUcxComponent,
        absl::StrCat("listening on ", address_.listening.ToString(),
                     ", a public address, without a key: UCX checks nobody, and whoever reaches "
                     "this port can write into this process. Choose a private or VPN device "
                     "(GEOMESH_INTERFACE), or let only the job's hosts reach the port "
                     "(GEOMESH_PORTS and a firewall)"));
    return true;
  }();
  (void)warned;
}

void UcxWireImpl::WarnAboutEnvironment(const std::array<struct sigaction, NSIG>& before) const {
  static const bool warned = [&] {
    std::vector<std::string> problems = UcxLoadTimeProblems();
    const auto after = SignalDispositions();
    for (int s = 1; s < NSIG; ++s) {
      if (before[s].sa_handler != after[s].sa_handler) {
        problems.push_back(absl::StrCat("UCX changed the handling of signal ", s));
      }
    }
    if (!problems.empty()) {
      Log(LogLevel::kWarning, kUcxComponent, absl::StrJoin(problems, "; "));
    }
    return true;
  }();
  (void)warned;
}

absl::Status UcxWireImpl::RegisterHandlers() {
  struct Handler {
    UcxMessageId id;
    ucp_am_recv_callback_t call;
  };
  for (Handler handler : {Handler{kDataMessage, &Receive<&UcxWireImpl::OnData>},
                          Handler{kGreetingMessage, &Receive<&UcxWireImpl::OnGreeting>},
                          Handler{kAcceptedMessage, &Receive<&UcxWireImpl::OnAcceptedMessage>}}) {
    ucp_am_handler_param_t am = {};
    am.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                    UCP_AM_HANDLER_PARAM_FIELD_ARG;
    am.id = handler.id;
    am.cb = handler.call;
    am.arg = this;
    if (auto status = ucp_worker_set_am_recv_handler(worker_, &am); status != UCS_OK) {
      return UcxStatus(status, "registering a message handler");
    }
  }
  return absl::OkStatus();
}

UcxWireImpl::~UcxWireImpl() {
  if (getpid() != owner_) {
    (void)ucx_.release();  // a forked child must not call UCX
    return;
  }
  if (worker_ == nullptr) return;
  for (const auto& lane : lanes_) {
    if (lane->state != LaneState::kClosed) Retire(lane.get());
  }
  for (Lane* lane : closing_) CloseEndpoint(lane);
  // The memory of what was posted is free again once this returns.
  const absl::Time deadline = absl::Now() + kUcxSettleTime;
  while ((endpoints_closing_ > 0 || free_sends_.size() + completed_.size() < sends_.size()) &&
         absl::Now() < deadline) {
    ucp_worker_progress(worker_);
  }
  ucx_.reset();  // while the lanes and sends that its callbacks may still name are there
}

// ---- sending

UcxWireImpl::Send* UcxWireImpl::TakeSend() {
  if (free_sends_.empty()) {
    sends_.push_back(std::make_unique<Send>());
    return sends_.back().get();
  }
  Send* send = free_sends_.back();
  free_sends_.pop_back();
  return send;
}

absl::Status UcxWireImpl::Post(LaneId id, absl::Span<const std::byte> header,
                               absl::Span<const std::byte> payload, PostToken token) {
  Lane* lane = FindLane(id);
  if (lane == nullptr || lane->state != LaneState::kUp) {
    return absl::FailedPreconditionError(absl::StrCat("lane ", static_cast<uint32_t>(id),
                                                      lane == nullptr ? " does not exist"
                                                      : lane->state == LaneState::kClosed
                                                          ? " is closed"
                                                          : " is not up yet"));
  }
  if (header.size() > kMaxSegmentHeaderBytes || payload.size() > kMaxSegmentPayloadBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("segment of ", header.size(), " + ", payload.size(), " bytes; at most ",
                     kMaxSegmentHeaderBytes, " + ", kMaxSegmentPayloadBytes, " fit"));
  }
  Send* send = TakeSend();
  send->from_engine = true;
  send->token = token;
  if (!header.empty()) {
    std::memcpy(send->header.data() + UcxPrefix::kBytes, header.data(), header.size());
  }
  return SendMessage(kDataMessage, lane, send, header.size(), payload);
}

absl::Status UcxWireImpl::SendOwn(UcxMessageId id, Lane* lane, std::string body) {
  Send* send = TakeSend();
  send->from_engine = false;
  send->body = std::move(body);
  return SendMessage(id, lane, send, 0,
                     {reinterpret_cast<const std::byte*>(send->body.data()), send->body.size()});
}

// On an error the send is taken back.
absl::Status UcxWireImpl::SendMessage(UcxMessageId id, Lane* lane, Send* send, size_t header_bytes,
                                      absl::Span<const std::byte> body) {
  send->lane = lane;
  lane->prefix.SerializeTo(send->header.data());
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                       UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.send = &OnSent;
  param.user_data = send;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  ++lane->posts;
  ucs_status_ptr_t request =
      ucp_am_send_nbx(lane->endpoint, id, send->header.data(), UcxPrefix::kBytes + header_bytes,
                      body.data(), body.size(), &param);
  if (request == nullptr) {
    Complete(send, UCS_OK);
    return absl::OkStatus();
  }
  if (UCS_PTR_IS_PTR(request)) return absl::OkStatus();
  --lane->posts;
  send->body.clear();
  free_sends_.push_back(send);
  return UcxStatus(UCS_PTR_STATUS(request),
                   absl::StrCat("sending to ", lane->peer, " on lane ", lane->prefix.lane));
}

void UcxWireImpl::OnSent(void* request, ucs_status_t status, void* send_pointer) {
  auto* send = static_cast<Send*>(send_pointer);
  send->lane->wire->Complete(send, status);
  ucp_request_free(request);
}

// The engine is told in the next Progress: Post calls nobody back.
void UcxWireImpl::Complete(Send* send, ucs_status_t status) {
  send->status = status;
  --send->lane->posts;
  if (send->lane->state == LaneState::kClosed) --sends_of_closed_lanes_;
  completed_.push_back(send);
}

int UcxWireImpl::DeliverCompletions() {
  const std::vector<Send*> completed = std::exchange(completed_, {});
  for (Send* send : completed) {
    const Lane* lane = send->lane;
    const PostToken token = send->token;
    const bool from_engine = send->from_engine;
    const ucs_status_t status = send->status;
    send->body.clear();
    free_sends_.push_back(send);
    if (!from_engine) continue;
    events_->OnPosted(lane->id, token,
                      status == UCS_OK
                          ? absl::OkStatus()
                          : UcxStatus(status, absl::StrCat("sending to ", lane->peer, " on lane ",
                                                           lane->prefix.lane)));
  }
  return static_cast<int>(completed.size());
}

// ---- receiving

template <void (UcxWireImpl::*handler)(const void*, size_t, const void*, size_t)>
ucs_status_t UcxWireImpl::Receive(void* self, const void* header, size_t header_bytes, void* data,
                                  size_t bytes, const ucp_am_recv_param_t* param) {
  auto* wire = static_cast<UcxWireImpl*>(self);
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
    ++wire->stats_.dropped_malformed;  // nobody of ours announces data instead of sending it
    return UCS_OK;
  }
  (wire->*handler)(header, header_bytes, data, bytes);
  return UCS_OK;  // nothing is kept
}

void UcxWireImpl::OnData(const void* header, size_t header_bytes, const void* data, size_t bytes) {
  UcxPrefix prefix;
  if (!UcxPrefix::Parse(header, header_bytes, &prefix) ||
      header_bytes > UcxPrefix::kBytes + kMaxSegmentHeaderBytes ||
      bytes > kMaxSegmentPayloadBytes) {
    ++stats_.dropped_malformed;
    return;
  }
  Lane* lane = FindLane(prefix);
  if (lane == nullptr || lane->state == LaneState::kClosed) {
    ++stats_.dropped_unknown_lane;
    return;
  }
  MarkUp(lane);
  if (lane->state != LaneState::kUp) return;  // closed by the engine just now
  events_->OnSegment(
      lane->id,
      {static_cast<const std::byte*>(header) + UcxPrefix::kBytes, header_bytes - UcxPrefix::kBytes},
      {static_cast<const std::byte*>(data), bytes});
}

void UcxWireImpl::MarkUp(Lane* lane) {
  if (lane->state != LaneState::kConnecting) return;
  lane->state = LaneState::kUp;
  events_->OnLaneUp(lane->id);
}

void UcxWireImpl::OnAccepted(const void* header, size_t header_bytes) {
  UcxPrefix prefix;
  if (!UcxPrefix::Parse(header, header_bytes, &prefix) || prefix.from_dialler) {
    ++stats_.dropped_malformed;
    return;
  }
  Lane* lane = FindLane(prefix);
  if (lane == nullptr || lane->state == LaneState::kClosed) {
    ++stats_.dropped_unknown_lane;
    return;
  }
  MarkUp(lane);
}

// ---- running

int UcxWireImpl::Progress() {
  if (worker_ == nullptr) return 0;
  int done = static_cast<int>(dials_.size() + closing_.size());
  ConnectDials();
  for (Lane* lane : std::exchange(closing_, {})) CloseEndpoint(lane);
  done += static_cast<int>(ucp_worker_progress(worker_));
  done += static_cast<int>(failures_.size() + complete_dials_.size());
  FinishFailures();
  AcceptDials();
  done += DeliverCompletions();
  return done;
}

bool UcxWireImpl::Settling() {
  return (endpoints_closing_ > 0 || sends_of_closed_lanes_ > 0) && absl::Now() < settle_until_;
}

bool UcxWireImpl::Arm() {
  if (worker_ == nullptr || !dials_.empty() || !closing_.empty() || !failures_.empty() ||
      !complete_dials_.empty() || !completed_.empty() || Settling()) {
    return false;
  }
  return ucp_worker_arm(worker_) == UCS_OK;
}

absl::StatusOr<std::unique_ptr<Wire>> MakeUcxWire(UcxWireOptions options) {
  return std::make_unique<UcxWireImpl>(std::move(options));
}

}  // namespace geomesh::transport
