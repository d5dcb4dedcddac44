#include "transport/inbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace geomesh::transport {
namespace {

// A message with more than this still to come is asked for as soon as it meets its receive.
constexpr uint64_t kWantAboveBytes = 4 * kMaxSegmentPayloadBytes;

// So much of a message in place is read before others have their turn: some 100 us.
constexpr uint64_t kPullBytes = 512 * 1024;

// A peer lends 1024 at a time; that it took some back may be on its way.
constexpr size_t kMaxEarlyInPlace = 16 * 1024;

// Of channels that are not open here, too.
constexpr size_t kMaxLeftChannels = 4096;

// A message that its owner took back, or freed: why, it says in a moment.
constexpr absl::Duration kWhyComes = absl::Seconds(1);

std::string Text(const MessageKey& key) {
  return absl::StrFormat("message %d of channel %016x", key.id, key.channel);
}

}  // namespace

absl::Status Inbox::Match(const Posted& posted, uint32_t fingerprint, uint64_t total_bytes) const {
  if (posted.fingerprint != 0 && fingerprint != 0 && posted.fingerprint != fingerprint) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s called a different operation: its message has fingerprint %08x, here %08x is expected",
        host_->Description(), fingerprint, posted.fingerprint));
  }
  if (total_bytes > posted.buffer.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s sent %d bytes, the receive posted here has room for %d",
                        host_->Description(), total_bytes, posted.buffer.size()));
  }
  return absl::OkStatus();
}

void Inbox::Start(Posted* posted, uint64_t total_bytes) {
  posted->started = true;
  posted->total_bytes = total_bytes;
  posted->segments_left = SegmentCount(total_bytes);
  if (posted->segments_left > 1) posted->received.resize(posted->segments_left);
}

absl::Status Inbox::Place(const MessageKey& key, Posted* posted, uint64_t offset,
                          absl::Span<const std::byte> payload) {
  if (!posted->received.empty()) {
    const uint64_t index = offset / kMaxSegmentPayloadBytes;
    if (posted->received[index]) {
      return absl::InvalidArgumentError(
          absl::StrCat("segment at offset ", offset, " of ", Text(key), " came twice"));
    }
    posted->received[index] = true;
  }
  if (!payload.empty()) {
    std::memcpy(posted->buffer.data() + offset, payload.data(), payload.size());
  }
  --posted->segments_left;
  return absl::OkStatus();
}

void Inbox::Finish(const MessageKey& key, absl::StatusOr<size_t> result) {
  host_->Received(key, result);
  auto node = posted_.extract(key);
  host_->Defer([done = std::move(node.mapped().done), result = std::move(result)]() mutable {
    std::move(done)(std::move(result));
  });
}

void Inbox::Fail(const MessageKey& key, const absl::Status& status, uint64_t segments_to_come) {
  if (segments_to_come > 0) {
    discarding_[key] = segments_to_come;
    host_->Want(key);  // its sender must not wait for credit that this message holds
  }
  host_->Reject(key, status);
  Finish(key, status);
}

void Inbox::Forget(Early* early) {
  for (auto& [offset, piece] : early->pieces) {
    stored_bytes_ -= Charge(piece.size);
    if (piece.charged) released_ += Charge(piece.size);
  }
  early->pieces.clear();
  if (early->in_place.has_value()) --early_in_place_;
  early->in_place.reset();
}

void Inbox::Pull(const MessageKey& key) {
  const auto it = posted_.find(key);
  if (it == posted_.end() || !it->second.in_place.has_value()) return;  // ended meanwhile
  Posted& posted = it->second;
  const uint64_t size = std::min(kPullBytes, posted.total_bytes - posted.pulled_bytes);
  const absl::Status status = host_->ReadInPlace(*posted.in_place, posted.pulled_bytes,
                                                 posted.buffer.subspan(posted.pulled_bytes, size));
  if (!status.ok()) {
    const absl::Status gone = absl::UnavailableError(
        absl::StrCat("what ", host_->Description(),
                     " sent could not be read in its memory: ", status.message()));
    // The channel's end, or the peer's, is most likely on its way: the better reason.
    host_->RunAfter(kWhyComes, [this, key, gone, lease = posted.in_place->lease] {
      const auto late = posted_.find(key);
      if (late == posted_.end() || !late->second.in_place.has_value()) return;
      if (late->second.in_place->lease == lease) Fail(key, gone, 0);
    });
    return;
  }
  posted.pulled_bytes += size;
  if (posted.pulled_bytes < posted.total_bytes) {
    host_->Defer([this, key] { Pull(key); });
    return;
  }
  host_->Pulled(key);
  Finish(key, posted.total_bytes);
}

void Inbox::Recv(const Envelope& envelope, absl::Span<std::byte> buffer, Engine::RecvDone done,
                 bool standing) {
  const MessageKey& key = envelope.key;
  const auto [it, inserted] = posted_.try_emplace(key);
  if (!inserted) {
    host_->Defer([done = std::move(done), key]() mutable {
      std::move(done)(absl::InvalidArgumentError(
          absl::StrCat("two receives posted for ", Text(key), " of one peer")));
    });
    return;
  }
  Posted& posted = it->second;
  posted.fingerprint = envelope.fingerprint;
  posted.buffer = buffer;
  posted.done = std::move(done);
  posted.standing = standing;

  const auto found = early_.find(key);
  if (found == early_.end()) {
    if (!lost_.ok()) {
      Finish(key, lost_);
    } else if (const auto left = left_.find(key.channel); left != left_.end()) {
      Finish(key, left->second);
    } else if (discarding_.contains(key)) {
      Finish(key, absl::InvalidArgumentError(
                      absl::StrCat("an earlier receive of ", Text(key), " failed")));
    } else if (peer_waits_ > 0) {
      host_->Want(key);
    }
    return;
  }
  Early early = std::move(found->second);
  early_.erase(found);
  const uint64_t to_come =
      early.in_place.has_value() ? 0 : SegmentCount(early.total_bytes) - early.pieces.size();
  if (absl::Status status = Match(posted, early.fingerprint, early.total_bytes); !status.ok()) {
    Forget(&early);
    Fail(key, status, to_come);
    return;
  }
  Start(&posted, early.total_bytes);
  if (early.in_place.has_value()) {
    posted.in_place = early.in_place;
    Forget(&early);
    Pull(key);
    return;
  }
  for (const auto& [offset, piece] : early.pieces) {
    Place(key, &posted, offset, absl::MakeConstSpan(piece.bytes.get(), piece.size)).IgnoreError();
  }
  Forget(&early);
  if (posted.segments_left == 0) {
    Finish(key, early.total_bytes);
  } else {
    host_->Want(key);
  }
}

absl::Status Inbox::OnData(const SegmentHeader& h, absl::Span<const std::byte> payload) {
  const bool charged = (h.flags & kSolicited) == 0;
  const MessageKey& key = h.key;

  if (const auto it = posted_.find(key); it != posted_.end()) {
    Posted& posted = it->second;
    if (charged) released_ += Charge(payload.size());
    if (!posted.started) {
      if (absl::Status status = Match(posted, h.fingerprint, h.total_bytes); !status.ok()) {
        Fail(key, status, SegmentCount(h.total_bytes) - 1);
        return absl::OkStatus();
      }
      Start(&posted, h.total_bytes);
      if (charged && h.total_bytes > kWantAboveBytes) host_->Want(key);
    } else if (posted.total_bytes != h.total_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(Text(key), " changed its size from ",
                                                     posted.total_bytes, " to ", h.total_bytes));
    }
    if (posted.in_place.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(Text(key), " came twice"));
    }
    GM_RETURN_IF_ERROR(Place(key, &posted, h.offset, payload));
    if (posted.segments_left == 0) Finish(key, h.total_bytes);
    return absl::OkStatus();
  }

  const auto discarded = discarding_.find(key);
  if (discarded != discarding_.end() || host_->ChannelClosed(key.channel)) {
    if (charged) released_ += Charge(payload.size());
    if (discarded != discarding_.end() && --discarded->second == 0) discarding_.erase(discarded);
    return absl::OkStatus();
  }

  if (stored_bytes_ + Charge(payload.size()) > bound_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("more than the agreed ", bound_bytes_, " bytes came before their receives"));
  }
  Early& early = early_[key];
  if (early.in_place.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(Text(key), " came twice"));
  }
  const bool first = early.pieces.empty();
  if (first) {
    early.fingerprint = h.fingerprint;
    early.total_bytes = h.total_bytes;
  } else if (early.total_bytes != h.total_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(Text(key), " changed its size from ",
                                                   early.total_bytes, " to ", h.total_bytes));
  }
  const auto [it, inserted] = early.pieces.try_emplace(h.offset);
  if (!inserted) {
    return absl::InvalidArgumentError(
        absl::StrCat("segment at offset ", h.offset, " of ", Text(key), " came twice"));
  }
  it->second.size = static_cast<uint32_t>(payload.size());
  it->second.charged = charged;
  if (!payload.empty()) {
    it->second.bytes = std::make_unique_for_overwrite<std::byte[]>(payload.size());
    std::memcpy(it->second.bytes.get(), payload.data(), payload.size());
  }
  stored_bytes_ += Charge(payload.size());
  if (first) host_->Unexpected(key);
  return absl::OkStatus();
}

absl::Status Inbox::OnInPlace(const SegmentHeader& h, const InPlace& place) {
  const MessageKey& key = h.key;
  if (const auto it = posted_.find(key); it != posted_.end()) {
    Posted& posted = it->second;
    if (posted.started) {
      return absl::InvalidArgumentError(absl::StrCat(Text(key), " came twice"));
    }
    if (absl::Status status = Match(posted, h.fingerprint, h.total_bytes); !status.ok()) {
      Fail(key, status, 0);
      return absl::OkStatus();
    }
    Start(&posted, h.total_bytes);
    posted.in_place = place;
    Pull(key);
    return absl::OkStatus();
  }
  if (host_->ChannelClosed(key.channel)) {
    host_->Pulled(key);
    return absl::OkStatus();
  }
  if (early_in_place_ >= kMaxEarlyInPlace) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "more than ", kMaxEarlyInPlace, " messages in place came before their receives"));
  }
  const auto [it, inserted] = early_.try_emplace(key);
  if (!inserted) return absl::InvalidArgumentError(absl::StrCat(Text(key), " came twice"));
  it->second.fingerprint = h.fingerprint;
  it->second.total_bytes = h.total_bytes;
  it->second.in_place = place;
  ++early_in_place_;
  host_->Unexpected(key);
  return absl::OkStatus();
}

void Inbox::OnAnnounce(absl::Span<const MessageKey> keys) {
  peer_waits_ = 3;
  std::vector<MessageKey> unexpected;
  for (const MessageKey& key : keys) {
    if (Expects(key)) {
      host_->Want(key);
    } else {
      unexpected.push_back(key);
    }
  }
  for (const MessageKey& key : unexpected) host_->Unexpected(key);
}

std::vector<MessageKey> Inbox::Unexpected(uint64_t channel) const {
  std::vector<MessageKey> keys;
  for (const auto& [key, early] : early_) {
    if (key.channel == channel) keys.push_back(key);
  }
  return keys;
}

void Inbox::CloseChannel(uint64_t channel, const absl::Status& reason) {
  std::vector<MessageKey> keys;
  for (const auto& [key, posted] : posted_) {
    if (key.channel != channel) continue;
    keys.push_back(key);
    if (posted.in_place.has_value()) host_->Pulled(key);
  }
  for (const MessageKey& key : keys) Finish(key, reason);
  absl::erase_if(early_, [&](auto& entry) {
    if (entry.first.channel != channel) return false;
    if (entry.second.in_place.has_value()) host_->Pulled(entry.first);
    Forget(&entry.second);
    return true;
  });
  absl::erase_if(discarding_, [&](const auto& entry) { return entry.first.channel == channel; });
  left_.erase(channel);
}

void Inbox::OnPeerLeft(uint64_t channel, const absl::Status& reason) {
  if (left_.size() >= kMaxLeftChannels) left_.erase(left_.begin());
  left_[channel] = reason;
  std::vector<MessageKey> keys;
  for (const auto& [key, posted] : posted_) {
    if (key.channel == channel && !posted.started) keys.push_back(key);
  }
  for (const MessageKey& key : keys) Finish(key, reason);
}

absl::Status Inbox::Left(uint64_t channel) const {
  const auto it = left_.find(channel);
  return it == left_.end() ? absl::OkStatus() : it->second;
}

void Inbox::OnPeerLost(const absl::Status& reason) {
  lost_ = reason;
  std::vector<MessageKey> keys;
  for (const auto& [key, posted] : posted_) keys.push_back(key);
  for (const MessageKey& key : keys) Finish(key, reason);
  absl::erase_if(early_, [&](auto& entry) {
    if (entry.second.pieces.size() == SegmentCount(entry.second.total_bytes)) return false;
    Forget(&entry.second);
    return true;
  });
  discarding_.clear();
}

void Inbox::CancelAll(const absl::Status& reason) {
  OnPeerLost(reason);
  for (auto& [key, early] : early_) Forget(&early);
  early_.clear();
}

}  // namespace geomesh::transport
