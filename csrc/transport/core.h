// The engine's inside: owns wire, peers and channels, and runs the loop. Everything here happens on
// the engine thread, except where said: whoever has the turn, which is the engine's own thread
// unless that sleeps and a caller goes on in its place (Nudge, Help).
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "transport/engine.h"
#include "transport/loop.h"
#include "transport/peer.h"
#include "transport/recorder.h"
#include "transport/wire/wire.h"

namespace geomesh::transport {

class Core : private WireEvents, public PeerHost {
 public:
  Core(EngineOptions options, std::unique_ptr<Wire> wire, std::unique_ptr<EventLoop> loop);
  ~Core() override;

  // ---- any thread ----
  // Starts the thread and listening; waits for the result.
  absl::Status Start();
  // Ends everything and joins the thread.
  void Stop();
  void Post(EventLoop::Work work);
  void PostQuietly(EventLoop::Work work);
  void Nudge(bool here);
  bool Help(absl::FunctionRef<bool()> done, absl::Duration patience);
  const ProcessUid& uid() const { return uid_; }
  const std::string& wire_name() const { return wire_name_; }
  const std::string& address() const { return address_; }  // constant after Start
  std::string memory_offer() const;
  // In a forked child: from now on every call does nothing.
  void AbandonAfterFork();
  bool abandoned() const { return abandoned_.load(std::memory_order_relaxed); }

  // ---- engine thread ----
  absl::StatusOr<PeerId> AddPeer(const PeerRecord& record);
  Peer* FindPeer(PeerId peer) const;
  // Why a request to `peer` in `channel` cannot be taken; OK if it can.
  absl::Status Refusal(const Peer* peer, uint64_t channel) const;
  void Send(PeerId peer, const Envelope& envelope, absl::Span<const std::byte> bytes,
            Engine::SendDone done, const SendOptions& options);
  void Recv(PeerId peer, const Envelope& envelope, absl::Span<std::byte> buffer,
            Engine::RecvDone done, const RecvOptions& options);
  void CloseChannel(uint64_t channel, const absl::Status& reason, absl::Span<const PeerId> tell);
  void OpenChannel(uint64_t channel, std::vector<PeerId> peers, Engine::ChannelEvents events);
  uint64_t AddTimer(absl::Time when, EventLoop::Work work);
  void CancelTimer(uint64_t timer) { loop_->CancelTimer(timer); }
  void LimitGoodbye(absl::Duration limit) { goodbye_limit_ = limit; }
  // Runs `work` once every peer has everything, or at the deadline with what is missing.
  void WhenDelivered(Instant deadline, absl::AnyInvocable<void(absl::Status) &&> done);
  std::string WriteRecord() override;
  int64_t unsent_bytes() const;
  std::vector<PeerStats> Stats() const;

 private:
  struct Channel {
    std::vector<PeerId> peers;
    Engine::ChannelEvents events;
  };
  // A lane of somebody who was not added yet.
  struct Stranger {
    LaneId lane{};
    int index = 0;
    Hello hello;
    Instant since;
  };

  // ---- WireEvents ----
  void OnLaneUp(LaneId lane) override;
  bool OnLaneAccepted(LaneId lane, int index, int lanes,
                      absl::Span<const std::byte> hello) override;
  void OnSegment(LaneId lane, absl::Span<const std::byte> header,
                 absl::Span<const std::byte> payload) override;
  void OnPosted(LaneId lane, PostToken token, const absl::Status& status) override;
  void OnLaneLost(LaneId lane, const absl::Status& reason) override;

  // ---- PeerHost ----
  Wire& wire() override { return *wire_; }
  const EngineOptions& options() const override { return options_; }
  const ProcessUid& self_uid() const override { return uid_; }
  std::string SelfDescription() const override;
  void Defer(EventLoop::Work work) override { deferred_.push_back(std::move(work)); }
  void RunAt(Instant when, EventLoop::Work work) override {
    loop_->AddTimer(when, std::move(work));
  }
  void Record(const RecordedEvent& event) override { recorder_.Add(event); }
  void MarkDirty(Peer* peer) override;
  void AckSoon() override;
  void AddLane(LaneId lane, Peer* peer) override { lanes_[lane] = peer; }
  void ForgetLane(LaneId lane) override { lanes_.erase(lane); }
  void Track(Outgoing* out, Peer* peer) override { on_wire_[out] = peer; }
  void Untrack(Outgoing* out) override { on_wire_.erase(out); }
  bool ChannelClosed(uint64_t channel) const override { return closed_.contains(channel); }
  void OnPeerLost(Peer* peer, const absl::Status& reason) override;
  void OnPeerClosedChannel(Peer* peer, uint64_t channel, const absl::Status& reason) override;
  void OnPeerLeftChannel(Peer* peer, uint64_t channel, const absl::Status& reason) override;
  void OnUnexpected(Peer* peer, const MessageKey& key) override;

  void Run();
  // One round of everything that is ready. False: nothing was.
  bool Turn();
  void RunDeferred();
  // Ends a turn of another thread than the engine's own: what may sleep meanwhile will wake.
  void LeaveTurn();
  void Sleep(std::unique_lock<std::mutex>& turn);
  void PumpDirty();
  void Tick();
  void ScheduleTick(Instant at);
  void Refuse(LaneId lane, const Hello& hello, absl::string_view why);
  // While peers take long to connect, knocks at one after the other's door: at one at a time, since
  // each knock is a connection to somebody who may have few descriptors left.
  void KnockLater();
  void KnockAtNext();
  void RememberClosed(uint64_t channel, const absl::Status& reason);
  void Finish(std::unique_lock<std::mutex>& turn);

  EngineOptions options_;
  const ProcessUid uid_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<Wire> wire_;
  std::string wire_name_, address_;
  std::thread thread_;
  // Who has it is the engine thread for the moment: its own thread, but while that sleeps, or a
  // caller's that waits for something or has just asked for it.
  std::mutex turn_;
  std::atomic<bool> helping_{false};
  std::atomic<int64_t> helped_at_ns_{0};  // on Instant's clock
  std::atomic<bool> stopping_{false};
  std::atomic<bool> abandoned_{false};

  absl::Duration goodbye_limit_ = absl::Seconds(3);  // peers may be short of processor time

  std::deque<EventLoop::Work> deferred_;
  std::vector<std::unique_ptr<Peer>> peers_;
  absl::flat_hash_map<std::pair<uint64_t, uint64_t>, PeerId> peer_ids_;  // by uid
  absl::flat_hash_map<LaneId, Peer*> lanes_;
  absl::flat_hash_map<LaneId, Stranger> strangers_;
  absl::flat_hash_set<LaneId> refused_;
  absl::flat_hash_map<Outgoing*, Peer*> on_wire_;
  absl::flat_hash_map<uint64_t, std::shared_ptr<Channel>> channels_;
  // Bounded memories of closed channels: ours, and those that a peer closed before we opened them.
  absl::flat_hash_map<uint64_t, absl::Status> closed_;
  std::deque<uint64_t> closed_order_;
  absl::flat_hash_map<uint64_t, std::pair<PeerId, absl::Status>> closed_early_;
  std::deque<uint64_t> closed_early_order_;

  std::unique_ptr<Knock> knock_;
  size_t knocked_at_ = 0;  // which peer
  Instant knocked_when_;
  bool knock_timer_armed_ = false;

  Recorder recorder_;
  Instant record_written_;
  std::vector<Peer*> dirty_;
  absl::flat_hash_set<Peer*> dirty_set_;
  bool ack_timer_armed_ = false;
  Instant next_tick_;
  int ticks_ = 0;
};

}  // namespace geomesh::transport
