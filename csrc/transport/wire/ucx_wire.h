// The inside of wire/ucx, shared by its two rooms: ucx.cc (opening, sending, receiving, running)
// and ucx_connect.cc (how lanes come to be and end). For nobody else.
#pragma once

#include <ucp/api/ucp.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "transport/wire/sockets.h"
#include "transport/wire/ucx.h"
#include "transport/wire/ucx_address.h"
#include "transport/wire/ucx_worker.h"

namespace geomesh::transport {

inline constexpr absl::string_view kUcxComponent = "wire/ucx";

// After a lane was closed its requests end within a few calls of Progress, without waking anybody;
// for this long at most Arm keeps the caller from sleeping.
inline constexpr absl::Duration kUcxSettleTime = absl::Seconds(1);

// Active message ids.
enum UcxMessageId : unsigned { kDataMessage = 1, kGreetingMessage = 2, kAcceptedMessage = 3 };

class UcxWireImpl final : public UcxWire {
 public:
  explicit UcxWireImpl(UcxWireOptions options) : options_(std::move(options)) {}
  ~UcxWireImpl() override;

  absl::string_view name() const override { return "ucx"; }
  // UCX finds connections by their order: of several that come late, the wrong ones were closed.
  bool DialsApart() const override { return false; }
  absl::StatusOr<std::string> Listen(WireEvents* events) override;
  std::unique_ptr<Knock> KnockAt(absl::string_view address) const override;
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
  std::optional<SocketInfo> DialledSocket(int likely_fd, const IpEndpoint& target) const;
  absl::Status SendMessage(UcxMessageId id, Lane* lane, Send* send, size_t header_bytes,
                           absl::Span<const std::byte> body);
  absl::Status SendOwn(UcxMessageId id, Lane* lane, std::string body);
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

}  // namespace geomesh::transport
