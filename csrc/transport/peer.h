// One peer: its lanes, connecting, acks, heartbeats and credit, and how it is lost. Joins Inbox
// (receiving) and Outbox (what goes next) to the wire. Engine thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "transport/balancer.h"
#include "transport/engine.h"
#include "transport/inbox.h"
#include "transport/lane.h"
#include "transport/lane_tuner.h"
#include "transport/local_memory.h"
#include "transport/loop.h"
#include "transport/recorder.h"
#include "transport/scheduler.h"
#include "transport/segment.h"

namespace geomesh::transport {

class Peer;

// What the engine's core does for its peers.
class PeerHost {
 public:
  virtual ~PeerHost() = default;
  virtual Wire& wire() = 0;
  virtual const EngineOptions& options() const = 0;
  virtual const ProcessUid& self_uid() const = 0;
  virtual std::string SelfDescription() const = 0;
  virtual void Defer(absl::AnyInvocable<void() &&> work) = 0;
  virtual void RunAt(Instant when, absl::AnyInvocable<void() &&> work) = 0;
  virtual void Record(const RecordedEvent& event) = 0;
  virtual std::string WriteRecord() = 0;
  // Calls Pump before the engine sleeps.
  virtual void MarkDirty(Peer* peer) = 0;
  // Calls FlushAcks in a moment.
  virtual void AckSoon() = 0;
  virtual void AddLane(LaneId lane, Peer* peer) = 0;
  virtual void ForgetLane(LaneId lane) = 0;
  // `out` is on the wire until its OnPosted; the wire's token is looked up there.
  virtual void Track(Outgoing* out, Peer* peer) = 0;
  virtual void Untrack(Outgoing* out) = 0;
  virtual bool ChannelClosed(uint64_t channel) const = 0;
  virtual void OnPeerLost(Peer* peer, const absl::Status& reason) = 0;
  virtual void OnPeerClosedChannel(Peer* peer, uint64_t channel, const absl::Status& reason) = 0;
  virtual void OnPeerLeftChannel(Peer* peer, uint64_t channel, const absl::Status& reason) = 0;
  virtual void OnUnexpected(Peer* peer, const MessageKey& key) = 0;
};

class Peer : private Inbox::Host {
 public:
  Peer(PeerHost* host, PeerId id, PeerRecord record);
  ~Peer() override;

  PeerId id() const { return id_; }
  const PeerRecord& record() const { return record_; }
  std::string Description() const override;
  bool is_self() const { return is_self_; }
  bool lost() const { return state_ == State::kLost; }
  const absl::Status& lost_reason() const { return lost_reason_; }
  bool connected() const { return state_ == State::kConnected; }
  bool connecting() const { return state_ == State::kConnecting; }

  // Begins to connect, or to wait for it.
  void Connect();
  // While connecting: what came of a knock at its address.
  void OnKnock(Knock& knock);
  // A lane that the peer dialled. False: not wanted.
  bool Accept(LaneId lane, int index, const Hello& hello);

  void Send(const Envelope& envelope, absl::Span<const std::byte> bytes, Engine::SendDone done,
            const SendOptions& options);
  void Recv(const Envelope& envelope, absl::Span<std::byte> buffer, Engine::RecvDone done,
            const RecvOptions& options);
  std::vector<MessageKey> Unexpected(uint64_t channel) const { return inbox_.Unexpected(channel); }
  bool IsUnexpected(const MessageKey& key) const { return inbox_.IsUnexpected(key); }
  void CloseChannel(uint64_t channel, const absl::Status& reason);
  // OK: in order, nothing is due to anybody.
  void TellClosed(uint64_t channel, const absl::Status& reason);
  // OK unless the peer has left the channel in order.
  absl::Status Left(uint64_t channel) const { return inbox_.Left(channel); }

  // Of the wire, for a lane of this peer.
  void OnLaneUp(LaneId lane);
  void OnSegment(LaneId lane, absl::Span<const std::byte> header,
                 absl::Span<const std::byte> payload);
  void OnLaneLost(LaneId lane, const absl::Status& reason);
  void OnPosted(Outgoing* out, const absl::Status& status);

  // Posts what may be posted.
  void Pump();
  void FlushAcks(bool all);
  // Every heartbeat interval. `late`: the engine itself was stopped for that long before.
  void Tick(Instant now, absl::Duration late, bool announce);
  // Gives the peer up. `left`: it said goodbye.
  void Lose(const absl::Status& why, bool left = false);
  // Ends everything pending and says bye; then delivered() tells when the peer knows.
  void Leave(const absl::Status& reason);
  void CloseLanes();
  bool delivered() const;

  int64_t unsent_bytes() const;
  // Messages and bytes that the peer, if alive, has not acknowledged.
  struct Undelivered {
    int64_t messages = 0, bytes = 0;
  };
  Undelivered undelivered() const;
  PeerStats Stats(Instant now) const;

 private:
  enum class State { kConnecting, kConnected, kLost };
  struct Control {
    SegmentHeader header;
    std::string payload;
  };

  // ---- Inbox::Host ----
  void Defer(absl::AnyInvocable<void() &&> work) override { host_->Defer(std::move(work)); }
  void Want(const MessageKey& key) override;
  void Reject(const MessageKey& key, const absl::Status& status) override;
  absl::Status ReadInPlace(const InPlace& place, uint64_t offset,
                           absl::Span<std::byte> into) override;
  void Pulled(const MessageKey& key) override;
  void RunAfter(absl::Duration time, absl::AnyInvocable<void() &&> work) override {
    host_->RunAt(std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(time),
                 std::move(work));
  }
  void Received(const MessageKey& key, const absl::StatusOr<size_t>& bytes) override;
  bool ChannelClosed(uint64_t channel) const override { return host_->ChannelClosed(channel); }
  void Unexpected(const MessageKey& key) override { host_->OnUnexpected(this, key); }

  void Record(RecordedEvent event);

  void Dial(int lanes, bool more);
  // Lanes that are missing, or that were added to the number.
  void DialMore(Instant now);
  void TuneLanes(Instant now, bool limited);
  // A fresh connection to a peer that is silent: it may be there sooner than those that are open.
  void DialWhileSilent(Instant now);
  // Once a silent peer is heard again: those of its lanes that stay silent.
  void CloseLeftSilent(Instant now);
  // Until none is left, or the peer is lost by it.
  void CloseLanesThat(absl::FunctionRef<bool(const Lane&)> which, absl::string_view why);
  void CloseStalled(Instant now);
  bool DelayLooksInflated() const;
  bool MeasuresDelay(Instant now);
  void RetryDial(const absl::Status& reason);
  void Welcome(Lane* lane);
  void BecomeConnected();
  Lane* FindLane(LaneId id);
  int ReadyLanes() const;
  void AskIfSilent(Instant now, absl::Duration silent);

  absl::Status HandleSegment(Lane* lane, const SegmentHeader& header,
                             absl::Span<const std::byte> payload);
  absl::Status HandleAck(Lane* lane, const SegmentHeader& header);
  absl::Status HandleLaneLost(const SegmentHeader& header);
  absl::Status ResolveLost(uint32_t name, uint64_t received);
  void SendDueCloses();
  void HandleBye(Lane* lane);
  void OnLeft(uint64_t channel);
  void HandleReject(const SegmentHeader& header, absl::Span<const std::byte> payload);

  void QueueControl(SegmentHeader header, std::string payload = "");
  // For a connection that begins anew: closed channels are told all the same.
  void KeepOnlyCloses();
  void FlushKeyLists();
  void PostControl(Lane* lane, Control control);
  void MarkLane(Lane* lane, Traffic traffic);
  void PostBare(Lane* lane, SegmentType type, uint8_t flags = 0);
  void PostSegment(Lane* lane, Outgoing* out);
  void Settle(Outgoing* out);
  void MaybeFinish(const OutMessagePtr& message);
  void FailMessage(const OutMessagePtr& message, const absl::Status& reason);

  // Its memory is about to be the caller's again: what was not acknowledged is copied, so that
  // nothing is lost when its lane is lost or replaced.
  void KeepUnacknowledged(const OutMessage* message);
  bool FeedSelf(const OutMessagePtr& message);

  // A message that stays where it is until the peer has read it.
  struct Lent {
    OutMessagePtr message;
    InPlace place;
  };
  void Lend(OutMessagePtr message);
  void EndLent(const MessageKey& key, const absl::Status& status);
  void EndAllLent(const absl::Status& reason, std::optional<uint64_t> channel = std::nullopt);
  void OpenMemory();

  PeerHost* host_;  // owns this object
  const PeerId id_;
  const PeerRecord record_;
  const bool is_self_;
  const bool dials_;
  const uint32_t send_check_, receive_check_;

  State state_ = State::kConnecting;
  absl::Status lost_reason_;
  bool said_bye_ = false;  // the peer, on some lane
  bool leaving_ = false;   // we said bye
  bool suspected_ = false;
  Instant heard_at_;                 // when anything came last, over any lane
  std::optional<Instant> asked_at_;  // when first, since it was heard: it should answer
  std::optional<Instant> back_at_;   // it is heard again, but perhaps not on all lanes

  uint32_t attempt_ = 0;
  int next_index_ = 0;  // of the lane of this attempt that is to be accepted next
  LaneTuner tuner_;
  uint64_t delivered_on_lost_lanes_ = 0;
  Instant dial_more_at_;
  absl::Duration dial_more_in_ = absl::Seconds(1);
  Instant dial_silent_at_;
  uint32_t given_up_ = 0;  // the dialer's newest attempt that it gave up before it came here
  absl::Duration retry_in_ = absl::Milliseconds(100);
  bool retry_pending_ = false;
  Instant connect_deadline_;
  int refused_ = 0;              // knocks in a row
  std::string connect_trouble_;  // the last one, for the error

  std::vector<std::unique_ptr<Lane>> lanes_;
  // Delay without queues is being measured; bulk waits.
  struct DelayProbe {
    Instant since;
    bool asked = false;
  };
  std::optional<DelayProbe> delay_probe_;
  // Segments of lost lanes of which the peer has not yet said how many came, by lane name.
  absl::flat_hash_map<uint32_t, std::deque<Outgoing*>> in_doubt_;

  Inbox inbox_;
  Outbox outbox_;
  LanePicker picker_;
  std::deque<Control> control_;
  // Channels closed in order, whose end is told once all that was sent before has arrived: by
  // lane, the last segment of that.
  struct Closing {
    uint64_t channel = 0;
    absl::flat_hash_map<uint32_t, uint64_t> after;
  };
  std::deque<Closing> closing_;
  std::vector<MessageKey> wanted_, pulled_;
  std::optional<LocalMemory> memory_;  // the peer's, where it can be read
  bool peer_reads_ = false;            // ours
  Leases leases_;
  absl::flat_hash_map<MessageKey, Lent> lent_;
  std::vector<OutMessagePtr> self_waiting_;  // to self, above the bound, before their receive
  absl::Status self_reject_;

  int64_t unposted_bytes_ = 0;
  uint64_t bytes_sent_ = 0, bytes_received_ = 0;
  uint64_t segments_sent_ = 0, segments_received_ = 0;
  uint64_t lanes_lost_ = 0;
  absl::Duration queue_wait_;
};

}  // namespace geomesh::transport
