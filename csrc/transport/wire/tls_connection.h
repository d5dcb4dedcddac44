// Frames over one TLS connection: what is queued is cut into records and sent, what comes is put
// together in a buffer of fixed size. Knows TlsStream and frames, nothing of lanes or of who waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "transport/wire/tls_address.h"
#include "transport/wire/tls_stream.h"
#include "transport/wire/wire.h"

namespace geomesh::transport {

class TlsConnection {
 public:
  explicit TlsConnection(SslPtr ssl, int fd, bool dialler, uint64_t records_per_key)
      : stream_(std::move(ssl), fd, dialler, records_per_key) {}

  TlsStream& stream() { return stream_; }

  // ---- sending. Nothing is copied but what is encrypted: the spans stay valid until the token is
  // reported by Pump or TakeUnsent.

  void Queue(absl::Span<const std::byte> header, absl::Span<const std::byte> payload,
             PostToken token);
  // A frame of the wire's own, which has no token.
  void QueueOwn(FrameType type, std::string payload);
  // Encrypts and sends what is queued; adds tokens of frames that the kernel has taken in whole.
  // Done when nothing is left, or when so much was sent that others should have their turn
  // (`more`).
  TlsStream::Result Pump(std::vector<PostToken>* sent, bool* more);
  // The tokens that Pump has not reported; nothing is sent any more.
  std::vector<PostToken> TakeUnsent();

  // ---- receiving

  struct Frame {
    FrameType type = FrameType::kSegment;
    absl::Span<const std::byte> header, payload;  // valid until the next ReadFrame
  };
  // Done with a frame in `frame`. Failed with breach() not empty where the peer broke the rules.
  TlsStream::Result ReadFrame(Frame* frame);
  const std::string& breach() const { return breach_; }

 private:
  struct Outgoing {
    FrameType type = FrameType::kSegment;
    absl::Span<const std::byte> header, payload;
    std::string owned;  // the payload of our own frames
    std::optional<PostToken> token;
    uint64_t end = 0;  // in encrypted bytes, once all of it is

    absl::Span<const std::byte> body() const;
  };

  TlsStream::Result Encrypt(Outgoing& frame);
  TlsStream::Result ReadFully(std::byte* to, size_t size, size_t* have);

  TlsStream stream_;

  std::deque<Outgoing> queue_;
  size_t encrypted_frames_ = 0;  // of the queue's front, in whole
  size_t next_offset_ = 0;       // into the payload of the first one that is not
  bool begun_ = false;           // its first record is written

  static constexpr size_t kBufferBytes = kMaxSegmentHeaderBytes + kMaxSegmentPayloadBytes;
  std::unique_ptr<std::byte[]> buffer_;  // from the first frame on
  std::byte head_[FrameHeader::kBytes];
  size_t have_ = 0;  // of the header, then of the frame
  std::optional<FrameHeader> current_;
  std::string breach_;
};

}  // namespace geomesh::transport
