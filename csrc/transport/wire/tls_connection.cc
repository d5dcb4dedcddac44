#include "transport/wire/tls_connection.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/bytes.h"

namespace geomesh::transport {
namespace {

using Result = TlsStream::Result;

// Sent in one turn, so that a busy lane does not keep the others waiting.
constexpr uint64_t kTurnBytes = 512 << 10;

}  // namespace

absl::Span<const std::byte> TlsConnection::Outgoing::body() const {
  return owned.empty() ? payload : AsBytes(owned);
}

void TlsConnection::Queue(absl::Span<const std::byte> header, absl::Span<const std::byte> payload,
                          PostToken token) {
  Outgoing& frame = queue_.emplace_back();
  frame.header = header;
  frame.payload = payload;
  frame.token = token;
}

void TlsConnection::QueueOwn(FrameType type, std::string payload) {
  Outgoing& frame = queue_.emplace_back();
  frame.type = type;
  frame.owned = std::move(payload);
}

// The first record holds the headers and so much of the payload that whole records are left; those
// are encrypted where they are.
Result TlsConnection::Encrypt(Outgoing& frame) {
  constexpr size_t kRecord = TlsStream::kMaxRecordBytes;
  const absl::Span<const std::byte> body = frame.body();
  if (!begun_) {
    std::byte record[kRecord];
    const FrameHeader header{frame.type, static_cast<uint16_t>(frame.header.size()),
                             static_cast<uint32_t>(body.size())};
    header.SerializeTo(record);
    size_t size = FrameHeader::kBytes;
    if (!frame.header.empty()) std::memcpy(record + size, frame.header.data(), frame.header.size());
    size += frame.header.size();
    size_t part = body.size() % kRecord;
    if (size + part > kRecord) part = 0;
    if (part > 0) std::memcpy(record + size, body.data(), part);
    begun_ = true;
    next_offset_ = part;
    if (auto r = stream_.Write({record, size + part}); r != Result::kDone) return r;
  }
  while (next_offset_ < body.size()) {
    if (!stream_.HasRoom()) return Result::kBlocked;
    const auto record = body.subspan(next_offset_, kRecord);
    next_offset_ += record.size();
    if (auto r = stream_.Write(record); r != Result::kDone) return r;
  }
  frame.end = stream_.encrypted_bytes();
  begun_ = false;
  next_offset_ = 0;
  ++encrypted_frames_;
  return Result::kDone;
}

Result TlsConnection::Pump(std::vector<PostToken>* sent, bool* more) {
  *more = false;
  const uint64_t enough = stream_.sent_bytes() + kTurnBytes;
  for (;;) {
    while (encrypted_frames_ < queue_.size() && stream_.HasRoom()) {
      const Result r = Encrypt(queue_[encrypted_frames_]);
      if (r == Result::kBlocked) break;
      if (r != Result::kDone) return r;
    }
    const Result flushed = stream_.Flush();
    while (encrypted_frames_ > 0 && queue_.front().end <= stream_.sent_bytes()) {
      if (queue_.front().token.has_value()) sent->push_back(*queue_.front().token);
      queue_.pop_front();
      --encrypted_frames_;
    }
    if (flushed != Result::kDone || queue_.empty()) return flushed;
    if (stream_.sent_bytes() >= enough) {
      *more = true;
      return Result::kDone;
    }
  }
}

std::vector<PostToken> TlsConnection::TakeUnsent() {
  std::vector<PostToken> tokens;
  for (const Outgoing& frame : queue_) {
    if (frame.token.has_value()) tokens.push_back(*frame.token);
  }
  queue_.clear();
  encrypted_frames_ = 0;
  return tokens;
}

Result TlsConnection::ReadFully(std::byte* to, size_t size, size_t* have) {
  while (*have < size) {
    size_t got = 0;
    const Result r = stream_.Read({to + *have, size - *have}, &got);
    if (r != Result::kDone) return r;
    *have += got;
  }
  return Result::kDone;
}

Result TlsConnection::ReadFrame(Frame* frame) {
  if (!current_.has_value()) {
    if (auto r = ReadFully(head_, sizeof(head_), &have_); r != Result::kDone) return r;
    auto header = FrameHeader::Parse(head_);
    if (!header.ok()) {
      breach_ = std::string(header.status().message());
      return Result::kFailed;
    }
    current_ = *header;
    have_ = 0;
    // One size for all: what the peer wrote sizes nothing.
    if (buffer_ == nullptr) buffer_.reset(new std::byte[kBufferBytes]);
  }
  const size_t size = size_t{current_->header_bytes} + current_->payload_bytes;
  if (auto r = ReadFully(buffer_.get(), size, &have_); r != Result::kDone) return r;
  frame->type = current_->type;
  frame->header = {buffer_.get(), current_->header_bytes};
  frame->payload = {buffer_.get() + current_->header_bytes, current_->payload_bytes};
  current_.reset();
  have_ = 0;
  return Result::kDone;
}

}  // namespace geomesh::transport
