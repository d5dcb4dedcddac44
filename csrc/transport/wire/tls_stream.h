// One TLS connection over a non-blocking socket: handshake, encrypting, decrypting. Knows OpenSSL
// and a descriptor, nothing of lanes, frames or who the peer is.
//
// OpenSSL gets no socket of its own: it would make two system calls to read a record of 16 KB, and
// one to write it. What it writes is gathered and goes out with one send; what one recv brought is
// decrypted record by record. (So the kernel's TLS is not used: OpenSSL hands keys to it only
// through its own socket BIO.)
#pragma once

#include <openssl/ssl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace geomesh::transport {

struct SslDelete {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
};
using SslPtr = std::unique_ptr<SSL, SslDelete>;
using SslContextPtr = std::unique_ptr<SSL_CTX, SslDelete>;

// TLS 1.3 and nothing older, no tickets, no early data. The same for both modes and both sides.
SslContextPtr MakeTlsContext();

// What one recv takes; one such buffer serves all connections of a wire.
inline constexpr size_t kTlsReceiveBytes = 256 << 10;

class TlsStream {
 public:
  // As long as a record's content may be.
  static constexpr size_t kMaxRecordBytes = 16 << 10;

  enum class Result {
    kDone,
    kBlocked,  // nothing more to do before the socket is ready (or filled) again
    kClosed,   // the other side ended it
    kFailed,   // error() says why
  };

  TlsStream(SslPtr ssl, int fd, bool dialler, uint64_t records_per_key);
  ~TlsStream();
  TlsStream(const TlsStream&) = delete;

  // Reads once from the socket into `buffer`, which must stay until the bytes are taken: by
  // Handshake and Read until they are blocked. `more` says that the socket may have more.
  Result Fill(absl::Span<std::byte> buffer, bool* more);
  // Forgets what was filled and not taken.
  void DropInput() { input_ = {}; }

  Result Handshake();
  // At most one record. Blocked when everything filled was taken.
  Result Read(absl::Span<std::byte> out, size_t* got);

  // Whether one more record fits before Flush.
  bool HasRoom() const;
  // Encrypts one record of at most kMaxRecordBytes; only while HasRoom.
  Result Write(absl::Span<const std::byte> bytes);
  // Hands what is encrypted to the kernel. Blocked while some is left.
  Result Flush();
  // Encrypted so far, and given to the kernel of it.
  uint64_t encrypted_bytes() const { return encrypted_; }
  uint64_t sent_bytes() const { return encrypted_ - (output_.size() - output_begin_); }

  SSL* ssl() const { return ssl_.get(); }
  // OpenSSL's own code of the last failure (ERR_get_error), 0 if it has none, and errno.
  unsigned long error_code() const { return error_code_; }
  int system_error() const { return errno_; }

 private:
  static const BIO_METHOD* BioMethod();
  static int BioRead(BIO* bio, char* out, int size);
  static int BioWrite(BIO* bio, const char* bytes, int size);
  static long BioControl(BIO* bio, int command, long, void*);
  Result Outcome(int returned);

  SslPtr ssl_;
  const int fd_;
  const uint64_t records_per_key_;
  uint64_t records_ = 0;  // since the last new key
  absl::Span<const std::byte> input_;
  std::vector<std::byte> output_;
  size_t output_begin_ = 0;
  uint64_t encrypted_ = 0;
  bool over_limit_ = false;
  unsigned long error_code_ = 0;
  int errno_ = 0;
};

}  // namespace geomesh::transport
