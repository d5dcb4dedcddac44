// The transport engine: one a process, one thread, the one owner of all lanes.
//
// It moves messages (bytes with a key) between the processes of a job. It knows peers, lanes, sizes
// and priorities, and nothing of tensors, collectives or torch. Anybody may Post work to its
// thread; everything else is called on that thread ("engine thread only"), and so are all
// callbacks, which must not block: no GIL, no disk, no lock that is held for long, because
// heartbeats and every peer's traffic wait meanwhile.
//
// A message is matched by (source, channel, id). Receives land in their final buffer. What arrives
// before its receive is kept, up to a bound a peer; senders know the bound and hold back (credit),
// so nothing is dropped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "transport/call.h"
#include "transport/wire/wire.h"

namespace geomesh::transport {

class Core;

// A process known to this engine. Dense from 0 in the order of AddPeer; never reused.
enum class PeerId : uint32_t {};

// Names this run of a process: random, so that an old incarnation is never taken for the new one.
struct ProcessUid {
  uint64_t high = 0;
  uint64_t low = 0;
  friend bool operator==(const ProcessUid&, const ProcessUid&) = default;
};

// What a process tells the others about itself, through the rendezvous store. Serialized with a
// version, a length and a checksum; Parse trusts nothing.
struct PeerRecord {
  ProcessUid uid;
  int rank = -1;        // in the group whose rendezvous this is
  std::string host;     // for errors
  std::string region;   // GEOMESH_REGION; may be empty
  std::string wire;     // Wire::name()
  std::string address;  // Wire::Listen()
  std::string
      topology_fingerprint;  // of the plan's topology: equal on all ranks, or no common plan exists
  std::string memory;        // Engine::memory_offer(); empty: it is not to be read in place

  std::string Serialize() const;
  static absl::StatusOr<PeerRecord> Parse(absl::string_view bytes);
};

// Which message: `channel` is a group's nonce, `id` counts within it (exec lays out operation and
// step in it).
struct MessageKey {
  uint64_t channel = 0;
  uint64_t id = 0;
  friend bool operator==(const MessageKey&, const MessageKey&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const MessageKey& k) {
    return H::combine(std::move(h), k.channel, k.id);
  }
};

// One message's envelope. `fingerprint` is compared with the receiver's at the match (0 on either
// side: not compared); a difference means that the two sides call different operations, and ends
// both with FailedPrecondition naming both.
struct Envelope {
  MessageKey key;
  uint32_t fingerprint = 0;
};

// Which message's segment goes next; see scheduler.h.
enum class SchedulePolicy : uint8_t { kStorm, kFifo, kFair };

// Which lane a segment of a sprayed message takes; see balancer.h.
enum class Balancer : uint8_t { kRateWeighted, kLeastBacklog, kRoundRobin };

struct EngineOptions {
  // A peer. 0: one on the same host and in the same region; else two, and more while throughput
  // grows by it.
  int lanes = 0;
  SchedulePolicy policy = SchedulePolicy::kStorm;
  Balancer balancer = Balancer::kRateWeighted;
  // Messages up to this size stay on one lane each, and so in order. 0: none; very large: all, for
  // paths that must not reorder.
  uint64_t pin_bytes = 64 * 1024;
  // Where there are several lanes, control and small messages have one of their own, and the wire
  // is told (Wire::Mark).
  bool urgent_lane = false;
  // Of this process, for that choice. Empty host: the machine's name.
  std::string host, region;
  // A peer: what it may send before the receive is posted. At least 1 MB.
  int64_t unexpected_bytes = 32 << 20;
  absl::Duration heartbeat = absl::Seconds(2);  // where nothing else was sent
  // Silent that long while something of it is waited for, and asked in vain: logged and named.
  absl::Duration suspect_after = absl::Seconds(3);
  absl::Duration dead_after = absl::Seconds(20);  // silent that long: given up
  absl::Duration connect_timeout = absl::Seconds(30);
  // Where the last events are written down at a failure. Empty: nowhere.
  std::string record_folder;
};

struct SendOptions {
  int urgency = 0;  // refines the scheduler's order: smaller goes first among equals
  // The peer may read the bytes where they are, if it can: quicker for much, and done only when the
  // receive is.
  bool in_place = false;
};

struct RecvOptions {
  // Posted in case something comes; nobody waits for it.
  bool standing = false;
};

struct LaneStats {
  uint32_t name = 0;  // the same on both sides
  uint64_t bytes_sent = 0, segments_sent = 0;
  uint64_t in_flight_bytes = 0, window_bytes = 0;  // posted and not acknowledged; how much may be
  double delivery_bytes_per_s = 0;
  absl::Duration rtt = absl::ZeroDuration(), min_rtt = absl::ZeroDuration();
};

struct PeerStats {
  std::string description;  // "rank 2 on host b (eastasia)"
  int lanes = 0;
  std::vector<LaneStats> lane_stats;
  uint64_t lanes_lost = 0;                           // and replaced
  absl::Duration queue_wait = absl::ZeroDuration();  // of all segments together, for a lane
  uint64_t bytes_sent = 0, bytes_received = 0;       // payload
  uint64_t segments_sent = 0, segments_received = 0;
  uint64_t unexpected_bytes = 0;                 // now
  double delivery_bytes_per_s = 0;               // measured from acks; 0: not yet known
  absl::Duration rtt = absl::ZeroDuration();     // from acks; 0: not yet known
  absl::Duration silent = absl::ZeroDuration();  // since anything was heard; while connected
  // Why nothing can be heard: "not connected yet: ..." or "lost". Empty while connected.
  std::string trouble;
};

class Engine {
 public:
  using SendDone = absl::AnyInvocable<void(const absl::Status&) &&>;
  // Bytes received: at most the buffer's size, less where the sender's message was shorter.
  using RecvDone = absl::AnyInvocable<void(absl::StatusOr<size_t>) &&>;

  // Starts listening and the engine thread.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(EngineOptions options,
                                                        std::unique_ptr<Wire> wire);

  // Stops the thread; pending operations end with Cancelled first. Callable from any thread but the
  // engine's.
  ~Engine();

  // ---- any thread ----

  const ProcessUid& uid() const;
  absl::string_view wire_name() const;
  const std::string& address() const;  // of this process, for PeerRecord
  // For PeerRecord::memory: processes of this host, network and region read large messages from
  // this one's memory.
  std::string memory_offer() const;

  // Runs `work` on the engine thread, in the order of the calls of one thread. After destruction
  // has begun: dropped.
  void Post(absl::AnyInvocable<void() &&> work);

  // Post in two steps, for who is about to wait: Nudge sees to it that what was posted is run, and
  // with `here` by the calling thread, if it can be at once. The caller holds no lock that a
  // callback of the engine takes.
  void PostQuietly(absl::AnyInvocable<void() &&> work);
  void Nudge(bool here);

  // Runs the engine on the calling thread instead of having it woken by another one, until `done`,
  // or nothing has happened for `patience`, or for some 20 ms. False: it runs already, or has
  // ended, and nothing was done. The caller holds no lock that a callback of the engine takes.
  bool Help(absl::FunctionRef<bool()> done, absl::Duration patience);

  // Posts and waits for the result. Not from the engine thread.
  template <typename F>
  std::invoke_result_t<F&> Call(F f) {
    using R = std::invoke_result_t<F&>;
    // A call without a result waits for one all the same.
    using Waited = std::conditional_t<std::is_void_v<R>, bool, R>;
    auto state = std::make_shared<internal::CallState<Waited>>();
    Post([f = std::move(f), finisher = internal::Finisher<Waited>(state)]() mutable {
      if constexpr (std::is_void_v<R>) {
        f();
        finisher.Finish(true);
      } else {
        finisher.Finish(f());
      }
    });
    if constexpr (std::is_void_v<R>) {
      state->Wait();
    } else {
      return state->Wait();
    }
  }

  // Waits until every peer that is alive has received all that was sent to it; DeadlineExceeded
  // with the bytes and peers that are missing. Not from the engine thread.
  absl::Status Drain(absl::Time deadline);

  // How long the engine's end may wait for the peers' goodbyes from now on; 3 s by default.
  void LimitGoodbye(absl::Duration limit);

  // ---- engine thread only ----

  // Makes a process known and starts connecting in the background: the one with the smaller uid
  // dials. A process known already gives its first id again. This process itself may be added:
  // messages to self are copied.
  absl::StatusOr<PeerId> AddPeer(const PeerRecord& record);

  // `bytes` stay valid and unchanged until `done`, which runs once the bytes are on their way, or
  // with the reason why not. Never calls `done` before it returns.
  void Send(PeerId peer, Envelope envelope, absl::Span<const std::byte> bytes, SendDone done,
            SendOptions options = {});

  // One receive for one message. A longer message than the buffer is an error on this side
  // (InvalidArgument with both sizes), not an overrun. Zero-byte messages are allowed. Never calls
  // `done` before it returns.
  void Recv(PeerId peer, Envelope envelope, absl::Span<std::byte> buffer, RecvDone done,
            RecvOptions options = {});

  // Ends everything pending in a channel with `reason`, drops what arrived unexpectedly, and
  // refuses what comes later. Memory of pending requests is free for reuse when their `done` has
  // run. Tells every peer in `tell` (with the text), whose engines then call their on_closed
  // handler: how an error on one rank ends the operation on the others.
  // An OK reason: in order, once everything sent was delivered (Drain). Peers go on among
  // themselves; what they still want of this process, or have for it, ends with Unavailable.
  void CloseChannel(uint64_t channel, const absl::Status& reason, absl::Span<const PeerId> tell);

  // `on_peer_lost` runs for each peer of the channel when it is given up, `on_peer_left` when it
  // closed the channel in order, `on_closed` when it did with an error; `on_unexpected` when a
  // message for which no receive is posted has begun to come, or waits at its sender for room: once
  // or more often for each. Also for what happened before the channel was opened.
  struct ChannelEvents {
    absl::AnyInvocable<void(PeerId, const absl::Status&)> on_peer_lost;
    absl::AnyInvocable<void(PeerId, const absl::Status&)> on_peer_left;
    absl::AnyInvocable<void(PeerId, const absl::Status&)> on_closed;
    absl::AnyInvocable<void(PeerId, const MessageKey&)> on_unexpected;
  };
  void OpenChannel(uint64_t channel, std::vector<PeerId> peers, ChannelEvents events);

  // Something of this message has come from the peer, and no receive has been posted for it.
  bool IsUnexpected(PeerId peer, const MessageKey& key) const;

  // Runs `work` on the engine thread at `when` (deadlines). Returns an id for CancelTimer; a timer
  // that ran is forgotten.
  uint64_t AddTimer(absl::Time when, absl::AnyInvocable<void() &&> work);
  void CancelTimer(uint64_t timer);

  // Writes down the last events, in a file of this process that the next failure overwrites, and
  // returns its path; empty where nothing is written. The loss of a peer does it by itself, and its
  // reason names the file.
  std::string WriteRecord();

  // Bytes not yet handed to the wire, over all peers or for one: what a graceful end waits for.
  int64_t unsent_bytes() const;

  std::vector<PeerStats> Stats() const;
  std::string DescribePeer(PeerId peer) const;

 private:
  explicit Engine(std::unique_ptr<Core> core);

  std::unique_ptr<Core> core_;
};

}  // namespace geomesh::transport
