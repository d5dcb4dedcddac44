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
#include "transport/wire/ucx.h"

#include <ucp/api/ucp.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "transport/wire/ucx_address.h"
#include "transport/wire/ucx_config.h"
#include "transport/wire/ucx_log.h"
#include "transport/wire/ucx_sockets.h"
#include "transport/wire/ucx_worker.h"

namespace geomesh::transport {
namespace {

constexpr absl::string_view kComponent = "wire/ucx";

// Active message ids.
enum MessageId : unsigned { kDataMessage = 1, kGreetingMessage = 2, kAcceptedMessage = 3 };

// A dial whose greetings do not all arrive is forgotten after this; how many may be incomplete.
constexpr absl::Duration kGreetingTimeout = absl::Seconds(60);
constexpr size_t kMaxIncompleteDials = 4096;

// After a lane was closed its requests end within a few calls of Progress, without waking anybody;
// for this long at most Arm keeps the caller from sleeping.
constexpr absl::Duration kSettleTime = absl::Seconds(1);

uint64_t Random64() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

absl::string_view AsString(absl::Span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::array<struct sigaction, NSIG> SignalDispositions() {
  std::array<struct sigaction, NSIG> all = {};
  for (int s = 1; s < NSIG; ++s) sigaction(s, nullptr, &all[s]);
  return all;
}

class UcxWireImpl final : public UcxWire {
 public:
  explicit UcxWireImpl(UcxWireOptions options) : options_(std::move(options)) {}
  ~UcxWireImpl() override;

  absl::string_view name() const override { return "ucx"; }
  absl::StatusOr<std::string> Listen(WireEvents* events) override;
  absl::StatusOr<LaneId> Dial(absl::string_view address, absl::string_view peer, int lanes,
                              absl::Span<const std::byte> hello) override;
  absl::Status Post(LaneId lane, absl::Span<const std::byte> header,
                    absl::Span<const std::byte> payload, PostToken token) override;
  void Close(LaneId lane) override;
  int Progress() override;
  bool Arm() override;
  int fd() const override { return event_fd_; }

  const Device& device() const override { return device_; }
  uint16_t port() const override { return address_.listening.port(); }
  UcxWireStats stats() const override { return stats_; }

 private:
  enum class LaneState {
    kConnecting,  // dialled, not yet answered
    kUp,
    kClosed,
  };

  // Lives as long as the wire: UCX's callbacks hold pointers to it.
  struct Lane {
    UcxWireImpl* wire = nullptr;
    LaneId id{};
    UcxPrefix prefix;  // of what we send
    LaneState state = LaneState::kConnecting;
    bool reported = false;  // the engine knows it
    std::string peer;       // for errors
    ucp_ep_h endpoint = nullptr;
    SocketRef socket;  // its connection, where known
    int posts = 0;     // not yet completed by UCX
  };

  // One message handed to UCX, until UCX needs its memory no longer.
  struct Send {
    Lane* lane = nullptr;
    bool from_engine = false;
    PostToken token{};
    ucs_status_t status = UCS_OK;
    std::array<std::byte, UcxPrefix::kBytes + kMaxSegmentHeaderBytes> header;
    std::string body;  // of our own messages
  };

  // The lanes of one Dial, on either side.
  using LaneSet = std::vector<Lane*>;

  struct PendingDial {
    uint64_t nonce;
    UcxAddress target;
    std::string hello;
  };

  // Greetings of one Dial of somebody else's.
  struct IncomingDial {
    UcxGreeting greeting;  // of the first lane that came
    std::vector<std::optional<IpEndpoint>> sources;
    int arrived = 0;
    absl::Time since;
  };

  struct Failure {
    Lane* lane;
    absl::Status reason;
  };

  absl::Status RegisterHandlers();
  void WarnAboutPublicAddress() const;
  void WarnAboutEnvironment(const std::array<struct sigaction, NSIG>& before) const;

  Lane* NewLane(uint64_t nonce, int index, bool dialled, std::string peer);
  Lane* FindLane(LaneId id) const;
  Lane* FindLane(const UcxPrefix& received);
  absl::Status MakeEndpoint(Lane* lane, const UcxAddress& target);
  absl::Status SendMessage(MessageId id, Lane* lane, Send* send, size_t header_bytes,
                           absl::Span<const std::byte> body);
  absl::Status SendOwn(MessageId id, Lane* lane, std::string body);
  void CloseEndpoint(Lane* lane);
  void Retire(Lane* lane);
  void FailLane(Lane* lane, absl::Status reason);

  void ConnectDials();
  void Connect(const PendingDial& dial, const LaneSet& lanes);
  void FinishFailures();
  void AcceptDials();
  void Accept(uint64_t nonce, const IncomingDial& incoming);
  void RejectConnections(const std::vector<std::optional<IpEndpoint>>& sources);
  int DeliverCompletions();
  bool Settling();

  Send* TakeSend();
  void Complete(Send* send, ucs_status_t status);

  void OnData(const void* header, size_t header_bytes, const void* data, size_t bytes);
  void OnGreeting(const void* header, size_t header_bytes, const void* data, size_t bytes);
  void OnAccepted(const void* header, size_t header_bytes);
  void MarkUp(Lane* lane);

  template <void (UcxWireImpl::*handler)(const void*, size_t, const void*, size_t)>
  static ucs_status_t Receive(void* self, const void* header, size_t header_bytes, void* data,
                              size_t bytes, const ucp_am_recv_param_t* param);
  void OnAcceptedMessage(const void* header, size_t header_bytes, const void*, size_t) {
    OnAccepted(header, header_bytes);
  }
  static void OnEndpointError(void* lane, ucp_ep_h, ucs_status_t status);
  static void OnSent(void* request, ucs_status_t status, void* send);
  static void OnEndpointClosed(void* request, ucs_status_t status, void* self);

  const UcxWireOptions options_;
  const pid_t owner_ = getpid();
  WireEvents* events_ = nullptr;
  Device device_;
  UcxAddress address_;
  std::string address_blob_;
  std::unique_ptr<ForkGuard> fork_guard_;
  std::unique_ptr<UcxWorker> ucx_;
  ucp_worker_h worker_ = nullptr;  // ucx_'s
  int event_fd_ = -1;

  std::vector<std::unique_ptr<Lane>> lanes_;                   // by LaneId
  absl::flat_hash_map<uint64_t, LaneSet> dialled_, accepted_;  // by nonce
  absl::flat_hash_map<uint64_t, IncomingDial> incoming_;
  // Endpoints made so far to an address; both sides of a pair must count alike for UCX to match
  // their connections.
  absl::flat_hash_map<std::string, uint32_t> endpoints_made_;

  // What callbacks of UCX and calls of the engine leave for the next Progress, so that no endpoint
  // is made or closed inside a callback of UCX.
  std::vector<PendingDial> dials_;
  std::vector<uint64_t> complete_dials_;
  std::vector<Failure> failures_;
  std::vector<Lane*> closing_;
  std::vector<Send*> completed_;

  std::vector<std::unique_ptr<Send>> sends_;
  std::vector<Send*> free_sends_;
  int sends_of_closed_lanes_ = 0;
  int endpoints_closing_ = 0;
  absl::Time settle_until_ = absl::InfinitePast();
  UcxWireStats stats_;
};

// ---- opening

absl::StatusOr<std::string> UcxWireImpl::Listen(WireEvents* events) {
  if (ucx_ != nullptr) return absl::FailedPreconditionError("already listening");
  RouteUcxLog();
  GM_RETURN_IF_ERROR(CheckUcxVersion());
  GM_ASSIGN_OR_RETURN(device_, ChooseDevice(options_.device));
  events_ = events;
  fork_guard_ = std::make_unique<ForkGuard>();

  const auto signals_before = SignalDispositions();
  GM_ASSIGN_OR_RETURN(ucx_, UcxWorker::Open(device_, options_.ports));
  WarnAboutEnvironment(signals_before);
  worker_ = ucx_->get();
  event_fd_ = ucx_->event_fd();
  address_.listening = ucx_->listening();
  fork_guard_->Listening(address_.listening);
  GM_ASSIGN_OR_RETURN(address_.ucx, ucx_->Address());
  GM_RETURN_IF_ERROR(RegisterHandlers());
  address_.uid = Random64();
  address_.network = ThisNetwork();
  address_.ucx_version = UcxRuntimeVersion();
  address_.tx_segment_bytes = kUcxTxSegmentBytes;
  address_.rx_segment_bytes = kUcxRxSegmentBytes;
  address_blob_ = address_.Serialize();

  Log(LogLevel::kInfo, kComponent,
      absl::StrCat("UCX ", ucp_get_version_string(), " listens on ", address_.listening.ToString(),
                   " (", device_.interface, ")"));
  if (device_.address.is_public()) WarnAboutPublicAddress();
  return address_blob_;
}

void UcxWireImpl::WarnAboutPublicAddress() const {
  static const bool warned = [this] {
    Log(LogLevel::kWarning, kComponent,
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
      Log(LogLevel::kWarning, kComponent, absl::StrJoin(problems, "; "));
    }
    return true;
  }();
  (void)warned;
}

absl::Status UcxWireImpl::RegisterHandlers() {
  struct Handler {
    MessageId id;
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
  const absl::Time deadline = absl::Now() + kSettleTime;
  while ((endpoints_closing_ > 0 || free_sends_.size() + completed_.size() < sends_.size()) &&
         absl::Now() < deadline) {
    ucp_worker_progress(worker_);
  }
  ucx_.reset();  // while the lanes and sends that its callbacks may still name are there
}

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
    if (auto socket = DescribeTcpSocket(likely_fd);
        socket.has_value() && !socket->listening && socket->local.SameAddress(device_.address)) {
      lane->socket = socket->ref;
      greeting.source = socket->local;
      SetCloseOnExec(likely_fd);
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
  settle_until_ = absl::Now() + kSettleTime;
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

absl::Status UcxWireImpl::SendOwn(MessageId id, Lane* lane, std::string body) {
  Send* send = TakeSend();
  send->from_engine = false;
  send->body = std::move(body);
  return SendMessage(id, lane, send, 0,
                     {reinterpret_cast<const std::byte*>(send->body.data()), send->body.size()});
}

// On an error the send is taken back.
absl::Status UcxWireImpl::SendMessage(MessageId id, Lane* lane, Send* send, size_t header_bytes,
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
    Log(LogLevel::kInfo, kComponent,
        absl::StrCat("dropped a greeting: ",
                     greeting.ok() ? "lane out of range" : greeting.status().message()));
    return;
  }
  if (greeting->target_uid != address_.uid) {
    ++stats_.dropped_greetings;
    Log(LogLevel::kInfo, kComponent,
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

// ---- accepting

void UcxWireImpl::RejectConnections(const std::vector<std::optional<IpEndpoint>>& sources) {
  ForEachTcpSocket([&](const SocketInfo& s) {
    if (!s.remote.has_value() || !s.local.SameAddress(address_.listening) ||
        s.local.port() != address_.listening.port()) {
      return;
    }
    for (const auto& source : sources) {
      if (source.has_value() && s.remote->SameAddress(*source) &&
          s.remote->port() == source->port()) {
        ShutDown(s.ref);
      }
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
    Log(LogLevel::kInfo, kComponent,
        absl::StrCat("refused lanes from ", incoming.greeting.source.ToString(), ": ",
                     status.message()));
    RejectConnections(incoming.sources);
    return;
  }
  const std::string peer = dialler->listening.ToString();
  const uint32_t made = endpoints_made_[peer];
  if (made != incoming.greeting.endpoints_before) {
    Log(LogLevel::kDebug, kComponent,
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
    if (!s.remote.has_value() || !s.local.SameAddress(address_.listening) ||
        s.local.port() != address_.listening.port()) {
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
    Log(LogLevel::kInfo, kComponent,
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

}  // namespace

absl::StatusOr<std::unique_ptr<Wire>> MakeUcxWire(UcxWireOptions options) {
  return std::make_unique<UcxWireImpl>(std::move(options));
}

}  // namespace geomesh::transport
