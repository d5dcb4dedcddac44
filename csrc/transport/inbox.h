// One peer's receiving side: matches what arrives with posted receives, and keeps what came early,
// within the bound. Knows messages and segments, and neither lanes nor the wire.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "transport/engine.h"
#include "transport/local_memory.h"
#include "transport/segment.h"

namespace geomesh::transport {

class Inbox {
 public:
  class Host {
   public:
    virtual ~Host() = default;
    // Runs `work` later on the engine thread, never within this call.
    virtual void Defer(absl::AnyInvocable<void() &&> work) = 0;
    // The peer should send this message's rest without waiting for credit.
    virtual void Want(const MessageKey& key) = 0;
    // The receive of this message failed here; its sender should learn why.
    virtual void Reject(const MessageKey& key, const absl::Status& status) = 0;
    // Copies a piece of a message from the peer's memory.
    virtual absl::Status ReadInPlace(const InPlace& place, uint64_t offset,
                                     absl::Span<std::byte> into) = 0;
    // A message in place needs its sender's memory no longer.
    virtual void Pulled(const MessageKey& key) = 0;
    // A receive has ended.
    virtual void Received(const MessageKey& key, const absl::StatusOr<size_t>& bytes) = 0;
    virtual void RunAfter(absl::Duration time, absl::AnyInvocable<void() &&> work) = 0;
    virtual std::string Description() const = 0;
    virtual bool ChannelClosed(uint64_t channel) const = 0;
    // There is a message without a receive. The last thing that a call of this class does: it may
    // be called again from here.
    virtual void Unexpected(const MessageKey& key) = 0;
  };

  // `host` owns this object.
  Inbox(Host* host, uint64_t bound_bytes) : host_(host), bound_bytes_(bound_bytes) {}

  // `standing`: nobody waits for it.
  void Recv(const Envelope& envelope, absl::Span<std::byte> buffer, Engine::RecvDone done,
            bool standing = false);

  // A kData segment. An error means that the peer broke the protocol.
  absl::Status OnData(const SegmentHeader& header, absl::Span<const std::byte> payload);

  // A kInPlace segment. As OnData.
  absl::Status OnInPlace(const SegmentHeader& header, const InPlace& place);

  // The peer has messages that wait for credit.
  void OnAnnounce(absl::Span<const MessageKey> keys);
  // Called now and then: a peer that still waits has announced again since the last two calls.
  void AgeAnnouncements() { peer_waits_ = std::max(peer_waits_ - 1, 0); }

  // What came for the channel and has no receive.
  std::vector<MessageKey> Unexpected(uint64_t channel) const;
  bool IsUnexpected(const MessageKey& key) const { return early_.contains(key); }

  // Ends pending receives of the channel and forgets what came for it.
  void CloseChannel(uint64_t channel, const absl::Status& reason);

  // The peer sends nothing more in the channel: ends the receives for which nothing has come, also
  // those posted later.
  void OnPeerLeft(uint64_t channel, const absl::Status& reason);
  // OK unless it has left the channel.
  absl::Status Left(uint64_t channel) const;

  // The peer is gone: ends pending receives. Whole messages that came early stay, and can still be
  // received; anything else ends with `reason` at once.
  void OnPeerLost(const absl::Status& reason);

  // Ends everything, keeps nothing.
  void CancelAll(const absl::Status& reason);

  // Cumulative: what the peer sent against its credit and is not held here any more.
  uint64_t released() const { return released_; }
  uint64_t stored_bytes() const { return stored_bytes_; }
  uint64_t bound_bytes() const { return bound_bytes_; }
  // A receive is posted for it, or its data is to be thrown away.
  bool Expects(const MessageKey& key) const {
    return posted_.contains(key) || discarding_.contains(key) || host_->ChannelClosed(key.channel);
  }
  // Somebody waits for something of the peer.
  bool awaits() const {
    return std::any_of(posted_.begin(), posted_.end(),
                       [](const auto& entry) { return !entry.second.standing; });
  }

 private:
  struct Posted {
    uint32_t fingerprint = 0;
    absl::Span<std::byte> buffer;
    Engine::RecvDone done;
    bool standing = false;
    bool started = false;  // the fields below are known
    uint64_t total_bytes = 0;
    uint64_t segments_left = 0;
    std::vector<bool> received;  // by segment; sized by a total that fits the buffer
    std::optional<InPlace> in_place;
    uint64_t pulled_bytes = 0;  // of a message in place
  };
  // A message that came before its receive.
  struct Early {
    uint32_t fingerprint = 0;
    uint64_t total_bytes = 0;
    struct Piece {
      std::unique_ptr<std::byte[]> bytes;
      uint32_t size = 0;
      bool charged = false;
    };
    std::map<uint64_t, Piece> pieces;  // by offset
    std::optional<InPlace> in_place;   // instead of pieces
  };

  // Checks envelope and size of a message that meets its receive.
  absl::Status Match(const Posted& posted, uint32_t fingerprint, uint64_t total_bytes) const;
  absl::Status Place(const MessageKey& key, Posted* posted, uint64_t offset,
                     absl::Span<const std::byte> payload);
  void Start(Posted* posted, uint64_t total_bytes);
  // Reads the next piece of a message in place, and comes back for the one after it.
  void Pull(const MessageKey& key);
  void Finish(const MessageKey& key, absl::StatusOr<size_t> result);
  // The receive failed: what is still to come of its message is thrown away.
  void Fail(const MessageKey& key, const absl::Status& status, uint64_t segments_to_come);
  void Forget(Early* early);
  static uint64_t Charge(uint64_t payload_bytes) { return payload_bytes + kSegmentChargeBytes; }

  Host* host_;
  uint64_t bound_bytes_;
  absl::flat_hash_map<MessageKey, Posted> posted_;
  absl::flat_hash_map<MessageKey, Early> early_;
  absl::flat_hash_map<MessageKey, uint64_t> discarding_;  // segments still to come
  uint64_t released_ = 0;
  uint64_t stored_bytes_ = 0;
  size_t early_in_place_ = 0;  // no credit is spent on them: bounded for themselves
  int peer_waits_ = 0;         // above 0: it announced; say so when a receive is posted
  absl::Status lost_;          // not OK once the peer is gone
  absl::flat_hash_map<uint64_t, absl::Status> left_;  // channels that the peer has left; bounded
};

}  // namespace geomesh::transport
