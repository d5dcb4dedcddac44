// Shared by the tests of wire/tls: files with keys and certificates, ends, pairs, and a TCP relay
// that can record, change or cut what goes through it.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "transport/wire/sockets.h"
#include "transport/wire/tls.h"
#include "wire_testing.h"

namespace geomesh::transport {

inline constexpr char kKey1[] = "1111111111111111111111111111111111111111111111111111111111111122";
inline constexpr char kKey2[] = "2222222222222222222222222222222222222222222222222222222222222233";

// A folder of files for this process, gone at its end.
class Files {
 public:
  Files() {
    char name[] = "/tmp/geomesh-tls-XXXXXX";
    if (mkdtemp(name) == nullptr) abort();
    folder_ = name;
  }
  ~Files() {
    for (const std::string& path : paths_) unlink(path.c_str());
    rmdir(folder_.c_str());
  }
  std::string Write(absl::string_view content, mode_t mode = 0600) {
    paths_.push_back(absl::StrCat(folder_, "/", paths_.size()));
    std::ofstream(paths_.back()) << content;
    chmod(paths_.back().c_str(), mode);
    return paths_.back();
  }

 private:
  std::string folder_;
  std::vector<std::string> paths_;
};

inline Files& TestFiles() {
  static auto* files = new std::unique_ptr<Files>(new Files);
  static const int at_exit = std::atexit([] { files->reset(); });
  (void)at_exit;
  return **files;
}

inline TlsKeyFiles SharedKeys(absl::string_view content) {
  TlsKeyFiles keys;
  keys.psk = TestFiles().Write(content);
  return keys;
}

// A certificate authority that lives in this process.
class TestCa {
 public:
  TestCa() : key_(EVP_EC_gen("P-256")), certificate_(Make("test CA", key_, 3600, true)) {
    ca_file_ = TestFiles().Write(Pem(certificate_));
  }
  ~TestCa() {
    X509_free(certificate_);
    EVP_PKEY_free(key_);
  }
  // Valid until `seconds` from now.
  TlsKeyFiles Issue(const std::string& name, long seconds = 3600) const {
    EVP_PKEY* key = EVP_EC_gen("P-256");
    X509* certificate = Make(name, key, seconds, false);
    TlsKeyFiles files;
    files.certificate = TestFiles().Write(Pem(certificate));
    BIO* memory = BIO_new(BIO_s_mem());
    PEM_write_bio_PrivateKey(memory, key, nullptr, nullptr, 0, nullptr, nullptr);
    files.private_key = TestFiles().Write(Content(memory));
    files.ca = ca_file_;
    X509_free(certificate);
    EVP_PKEY_free(key);
    return files;
  }

 private:
  X509* Make(const std::string& name, EVP_PKEY* key, long seconds, bool ca) const {
    static long serial = 1;
    X509* x = X509_new();
    X509_set_version(x, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(x), serial++);
    X509_gmtime_adj(X509_getm_notBefore(x), -3600);
    X509_gmtime_adj(X509_getm_notAfter(x), seconds);
    X509_set_pubkey(x, key);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(x), "CN", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
    X509_set_issuer_name(x, ca ? X509_get_subject_name(x) : X509_get_subject_name(certificate_));
    X509V3_CTX context;
    X509V3_set_ctx_nodb(&context);
    X509V3_set_ctx(&context, ca ? x : certificate_, x, nullptr, nullptr, 0);
    X509_EXTENSION* e = X509V3_EXT_conf_nid(nullptr, &context, NID_basic_constraints,
                                            ca ? "critical,CA:TRUE" : "critical,CA:FALSE");
    X509_add_ext(x, e, -1);
    X509_EXTENSION_free(e);
    X509_sign(x, key_, EVP_sha256());
    return x;
  }
  static std::string Content(BIO* memory) {
    char* text = nullptr;
    const long size = BIO_get_mem_data(memory, &text);
    std::string out(text, static_cast<size_t>(size));
    BIO_free(memory);
    return out;
  }
  static std::string Pem(X509* certificate) {
    BIO* memory = BIO_new(BIO_s_mem());
    PEM_write_bio_X509(memory, certificate);
    return Content(memory);
  }

  EVP_PKEY* key_;
  X509* certificate_;
  std::string ca_file_;
};

inline TlsWireOptions OnLoopback(TlsKeyFiles keys) {
  TlsWireOptions options;
  options.device.interface = "127.0.0.1";
  options.keys = std::move(keys);
  return options;
}

struct End : WireEnd {
  explicit End(TlsWireOptions options) : WireEnd(MakeTlsWire(std::move(options))) {}
  const TlsWire& tls() const { return static_cast<const TlsWire&>(*wire); }
  // The one reason for which a lane was lost.
  std::string LossOf(LaneId lane) const {
    const auto it = events.lost.find(static_cast<uint32_t>(lane));
    if (it == events.lost.end() || it->second.size() != 1) return "not lost once";
    return std::string(it->second[0].message());
  }
};

struct Pair : WirePair<End> {
  Pair(TlsWireOptions for_a, TlsWireOptions for_b)
      : WirePair{End(std::move(for_a)), End(std::move(for_b))} {}
  explicit Pair(const TlsKeyFiles& keys) : Pair(OnLoopback(keys), OnLoopback(keys)) {}
  Pair() : Pair(SharedKeys(kKey1)) {}
};

// The log's lines of warning level while it lives.
class LogLines {
 public:
  LogLines() {
    SetLogSink([this](LogLevel level, absl::string_view line) {
      if (level <= LogLevel::kWarning) lines_.push_back(std::string(line));
    });
  }
  ~LogLines() { SetLogSink(nullptr); }
  std::string Joined() const {
    std::string all;
    for (const std::string& line : lines_) absl::StrAppend(&all, line, "\n");
    return all;
  }
  size_t size() const { return lines_.size(); }

 private:
  std::vector<std::string> lines_;
};

inline sockaddr_in Loopback(uint16_t port) {
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return to;
}

inline int ConnectTo(uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in to = Loopback(port);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0) abort();
  return fd;
}

// Carries one connection after another to a port, on a thread of its own. `on_bytes` sees, and may
// change, all that goes to the target (0) or back (1); false ends the connection behind the bytes.
class Relay {
 public:
  using OnBytes = std::function<bool(int direction, std::string* bytes)>;

  explicit Relay(OnBytes on_bytes) : on_bytes_(std::move(on_bytes)) {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in at = Loopback(0);
    socklen_t size = sizeof(at);
    if (bind(listener_, reinterpret_cast<sockaddr*>(&at), size) != 0 || listen(listener_, 64) ||
        getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &size) != 0) {
      abort();
    }
    port_ = ntohs(at.sin_port);
    thread_ = std::thread([this] { Serve(); });
  }
  ~Relay() {
    over_ = true;
    thread_.join();
    close(listener_);
  }
  uint16_t port() const { return port_; }
  void SetTarget(uint16_t port) { target_ = port; }

 private:
  void Serve() {
    while (!over_) {
      if (!Readable(listener_)) continue;
      const int near = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      const int far = ConnectTo(target_);
      const int ends[2] = {near, far};
      for (bool open = true; open && !over_;) {
        pollfd polls[2] = {{near, POLLIN, 0}, {far, POLLIN, 0}};
        if (poll(polls, 2, 20) <= 0) continue;
        for (int i = 0; i < 2 && open; ++i) {
          if (polls[i].revents == 0) continue;
          std::string bytes(65536, '\0');
          const ssize_t got = recv(ends[i], bytes.data(), bytes.size(), 0);
          if (got <= 0) {
            open = false;
            break;
          }
          bytes.resize(got);
          open = on_bytes_(i, &bytes);
          for (size_t at = 0; at < bytes.size();) {
            const ssize_t n = send(ends[1 - i], bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
            if (n <= 0) break;
            at += n;
          }
        }
      }
      close(near);
      close(far);
    }
  }
  static bool Readable(int fd) {
    pollfd p = {fd, POLLIN, 0};
    return poll(&p, 1, 20) == 1;
  }

  const OnBytes on_bytes_;
  int listener_ = -1;
  uint16_t port_ = 0;
  std::atomic<uint16_t> target_{0};
  std::atomic<bool> over_{false};
  std::thread thread_;
};

}  // namespace geomesh::transport
