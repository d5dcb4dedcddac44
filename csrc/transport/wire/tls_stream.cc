#include "transport/wire/tls_stream.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace geomesh::transport {
namespace {

// One send: enough records that the system call costs little, few enough to stay in the cache.
constexpr size_t kGatherBytes = 128 << 10;
// A record with its header, type and tag.
constexpr size_t kRecordBytes = TlsStream::kMaxRecordBytes + 256;
// Beside records of ours: alerts and answers to key updates. A peer that makes us write more
// without reading has no good reason.
constexpr size_t kMaxOutputBytes = kGatherBytes + (64 << 10);

bool CpuHasAes() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
#elif defined(__aarch64__)
  return (getauxval(AT_HWCAP) & HWCAP_AES) != 0;
#else
  return false;
#endif
}

}  // namespace

SslContextPtr MakeTlsContext() {
  // Other threads of the process may still use it when exit handlers run.
  OPENSSL_init_ssl(OPENSSL_INIT_NO_ATEXIT, nullptr);
  SslContextPtr context(SSL_CTX_new(TLS_method()));
  if (context == nullptr) return nullptr;
  SSL_CTX* c = context.get();
  const char* ciphers = CpuHasAes() ? "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256"
                                    : "TLS_CHACHA20_POLY1305_SHA256:TLS_AES_128_GCM_SHA256";
  if (SSL_CTX_set_min_proto_version(c, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_max_proto_version(c, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_ciphersuites(c, ciphers) != 1 ||
      SSL_CTX_set1_groups_list(c, "X25519:P-256") != 1 || SSL_CTX_set_num_tickets(c, 0) != 1) {
    return nullptr;
  }
  // A side without AES instructions gets ChaCha20, whichever side it is.
  SSL_CTX_set_options(c, SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION |
                             SSL_OP_CIPHER_SERVER_PREFERENCE | SSL_OP_PRIORITIZE_CHACHA);
  SSL_CTX_set_session_cache_mode(c, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_max_early_data(c, 0);
  SSL_CTX_set_recv_max_early_data(c, 0);
  SSL_CTX_set_quiet_shutdown(c, 1);
  SSL_CTX_set_max_cert_list(c, 32 << 10);
  SSL_CTX_set_mode(c, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  return context;
}

TlsStream::TlsStream(SslPtr ssl, int fd, bool dialler, uint64_t records_per_key)
    : ssl_(std::move(ssl)), fd_(fd), records_per_key_(records_per_key) {
  BIO* bio = BIO_new(BioMethod());
  if (bio == nullptr) std::abort();
  BIO_set_data(bio, this);
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl_.get(), bio, bio);
  if (dialler) {
    SSL_set_connect_state(ssl_.get());
  } else {
    SSL_set_accept_state(ssl_.get());
  }
}

TlsStream::~TlsStream() = default;

const BIO_METHOD* TlsStream::BioMethod() {
  static const BIO_METHOD* method = [] {
    BIO_METHOD* m =
        BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "torch_geomesh socket");
    if (m == nullptr || BIO_meth_set_read(m, &BioRead) != 1 ||
        BIO_meth_set_write(m, &BioWrite) != 1 || BIO_meth_set_ctrl(m, &BioControl) != 1) {
      std::abort();
    }
    return m;
  }();
  return method;
}

int TlsStream::BioRead(BIO* bio, char* out, int size) {
  auto* self = static_cast<TlsStream*>(BIO_get_data(bio));
  BIO_clear_retry_flags(bio);
  if (self->input_.empty()) {
    BIO_set_retry_read(bio);
    return -1;
  }
  const size_t taken = std::min(self->input_.size(), static_cast<size_t>(size));
  std::memcpy(out, self->input_.data(), taken);
  self->input_.remove_prefix(taken);
  return static_cast<int>(taken);
}

int TlsStream::BioWrite(BIO* bio, const char* bytes, int size) {
  auto* self = static_cast<TlsStream*>(BIO_get_data(bio));
  BIO_clear_retry_flags(bio);
  if (self->output_.size() - self->output_begin_ + static_cast<size_t>(size) > kMaxOutputBytes) {
    self->over_limit_ = true;
    return -1;
  }
  if (self->output_.size() + static_cast<size_t>(size) > self->output_.capacity()) {
    // What was sent makes room; without this a connection that is never idle would grow.
    self->output_.erase(self->output_.begin(), self->output_.begin() + self->output_begin_);
    self->output_begin_ = 0;
  }
  const auto* begin = reinterpret_cast<const std::byte*>(bytes);
  self->output_.insert(self->output_.end(), begin, begin + size);
  self->encrypted_ += static_cast<uint64_t>(size);
  return size;
}

long TlsStream::BioControl(BIO*, int command, long, void*) {
  return command == BIO_CTRL_FLUSH ? 1 : 0;
}

TlsStream::Result TlsStream::Fill(absl::Span<std::byte> buffer, bool* more) {
  *more = false;
  for (;;) {
    const ssize_t got = recv(fd_, buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got > 0) {
      input_ = buffer.first(static_cast<size_t>(got));
      *more = input_.size() == buffer.size();
      return Result::kDone;
    }
    if (got == 0) return Result::kClosed;
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return Result::kBlocked;
    errno_ = errno;
    return Result::kFailed;
  }
}

TlsStream::Result TlsStream::Outcome(int returned) {
  switch (SSL_get_error(ssl_.get(), returned)) {
    case SSL_ERROR_NONE:
      return Result::kDone;
    case SSL_ERROR_WANT_READ:
      return Result::kBlocked;
    case SSL_ERROR_ZERO_RETURN:
      return Result::kClosed;
    default:
      error_code_ = ERR_peek_error();
      ERR_clear_error();
      errno_ = over_limit_ ? ENOBUFS : 0;
      return Result::kFailed;
  }
}

TlsStream::Result TlsStream::Handshake() {
  ERR_clear_error();
  return Outcome(SSL_do_handshake(ssl_.get()));
}

TlsStream::Result TlsStream::Read(absl::Span<std::byte> out, size_t* got) {
  ERR_clear_error();
  *got = 0;
  return Outcome(SSL_read_ex(ssl_.get(), out.data(), out.size(), got) == 1 ? 1 : -1);
}

bool TlsStream::HasRoom() const {
  return output_.size() - output_begin_ + kRecordBytes <= kGatherBytes;
}

TlsStream::Result TlsStream::Write(absl::Span<const std::byte> bytes) {
  ERR_clear_error();
  if (output_.capacity() < kMaxOutputBytes) output_.reserve(kMaxOutputBytes);
  if (++records_ > records_per_key_) {
    records_ = 1;
    if (SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED) != 1) return Outcome(-1);
  }
  size_t written = 0;
  const int returned = SSL_write_ex(ssl_.get(), bytes.data(), bytes.size(), &written);
  return Outcome(returned == 1 ? 1 : -1);
}

TlsStream::Result TlsStream::Flush() {
  while (output_begin_ < output_.size()) {
    const ssize_t sent = send(fd_, output_.data() + output_begin_, output_.size() - output_begin_,
                              MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
      output_begin_ += static_cast<size_t>(sent);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return Result::kBlocked;
    errno_ = errno;
    return Result::kFailed;
  }
  output_.clear();
  output_begin_ = 0;
  return Result::kDone;
}

}  // namespace geomesh::transport
