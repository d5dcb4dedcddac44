#include "transport/wire/tls_keys.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/kdf.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

namespace geomesh::transport {
namespace {

constexpr absl::string_view kSalt = "torch_geomesh wire/tls 1";
constexpr absl::string_view kHowToMake =
    "make one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE)";
constexpr size_t kMaxSecretFileBytes = 64 << 10;

unsigned char* Bytes(absl::string_view text) {  // OpenSSL's parameters are not const
  return reinterpret_cast<unsigned char*>(const_cast<char*>(text.data()));
}

Digest Derive(absl::string_view secret, absl::string_view info) {
  Digest out;
  size_t size = out.size();
  EVP_PKEY_CTX* context = EVP_PKEY_CTX_new_id(EVP_PKEY_HKDF, nullptr);
  const bool ok =
      context != nullptr && EVP_PKEY_derive_init(context) == 1 &&
      EVP_PKEY_CTX_set_hkdf_md(context, EVP_sha256()) == 1 &&
      EVP_PKEY_CTX_set1_hkdf_salt(context, Bytes(kSalt), static_cast<int>(kSalt.size())) == 1 &&
      EVP_PKEY_CTX_set1_hkdf_key(context, Bytes(secret), static_cast<int>(secret.size())) == 1 &&
      EVP_PKEY_CTX_add1_hkdf_info(context, Bytes(info), static_cast<int>(info.size())) == 1 &&
      EVP_PKEY_derive(context, out.data(), &size) == 1;
  EVP_PKEY_CTX_free(context);
  if (!ok)
    std::abort();  // no memory, or an OpenSSL without SHA-256: no key is better than a weak one
  return out;
}

bool AllHex(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return absl::ascii_isxdigit(c); });
}

absl::StatusOr<std::string> DecodeKey(absl::string_view text) {
  std::string secret;
  if (AllHex(text)) {
    if (text.size() % 2 != 0) {
      return absl::InvalidArgumentError("has an odd number of hex digits");
    }
    secret = absl::HexStringToBytes(text);
  } else if (!absl::Base64Unescape(text, &secret)) {
    return absl::InvalidArgumentError("is neither base64 nor hex");
  }
  if (secret.size() < kMinKeyBytes) {
    return absl::InvalidArgumentError(absl::StrCat("holds ", secret.size(),
                                                   " bytes of key, and a key has at least ",
                                                   kMinKeyBytes, ": ", kHowToMake));
  }
  if (std::all_of(secret.begin(), secret.end(), [&](char c) { return c == secret[0]; })) {
    return absl::InvalidArgumentError(
        absl::StrCat("is one byte over and over, which anybody guesses: ", kHowToMake));
  }
  return secret;
}

}  // namespace

SharedKey::SharedKey(std::string secret) : secret_(std::move(secret)) {
  const Digest id = Derive(secret_, "key id");
  std::copy_n(id.begin(), id_.size(), id_.begin());
  seal_key_ = Derive(secret_, "seal");
}

SharedKey::~SharedKey() {
  OPENSSL_cleanse(secret_.data(), secret_.size());
  OPENSSL_cleanse(seal_key_.data(), seal_key_.size());
}

Digest SharedKey::LaneKey(absl::string_view identity) const {
  return Derive(secret_, absl::StrCat("lane", identity));
}

Digest SharedKey::Seal(absl::string_view text) const {
  Digest out;
  if (HMAC(EVP_sha256(), seal_key_.data(), static_cast<int>(seal_key_.size()), Bytes(text),
           text.size(), out.data(), nullptr) == nullptr) {
    std::abort();
  }
  return out;
}

absl::StatusOr<KeyRing> KeyRing::Load(const std::string& path) {
  GM_ASSIGN_OR_RETURN(std::string text, ReadSecretFile(path, "GEOMESH_PSK_FILE"));
  absl::StatusOr<KeyRing> ring = Parse(text);
  OPENSSL_cleanse(text.data(), text.size());
  if (ring.ok()) return ring;
  return absl::InvalidArgumentError(
      absl::StrCat("GEOMESH_PSK_FILE=", path, ": ", ring.status().message()));
}

absl::StatusOr<KeyRing> KeyRing::Parse(absl::string_view text) {
  KeyRing ring;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line.substr(0, line.find('#')));
    if (line.empty()) continue;
    absl::StatusOr<std::string> secret = DecodeKey(line);
    if (!secret.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the key in line ", number, " ", secret.status().message()));
    }
    SharedKey key(*std::move(secret));
    if (ring.Find(key.id()) == nullptr) ring.keys_.push_back(std::move(key));
  }
  if (ring.keys_.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("there is no key in it: ", kHowToMake));
  }
  return ring;
}

const SharedKey* KeyRing::Find(const KeyId& id) const {
  for (const SharedKey& key : keys_) {
    if (key.id() == id) return &key;
  }
  return nullptr;
}

absl::StatusOr<std::string> ReadSecretFile(const std::string& path, absl::string_view what) {
  const auto refuse = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat(what, "=", path, ": ", why));
  };
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (fd < 0) return refuse(std::strerror(errno));
  std::string text;
  struct stat status = {};
  absl::Status result;
  if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
    result = refuse("not a file");
  } else if (status.st_uid != geteuid() && status.st_uid != 0) {
    result = refuse("it belongs to another user, who can read and change it");
  } else if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    result = refuse(absl::StrCat("others than its owner can read or change it (mode ",
                                 absl::StrFormat("%04o", status.st_mode & 07777), "): chmod 600 ",
                                 path));
  } else if (static_cast<size_t>(status.st_size) > kMaxSecretFileBytes) {
    result =
        refuse(absl::StrCat("of ", status.st_size, " bytes; it may have ", kMaxSecretFileBytes));
  } else {
    text.resize(status.st_size);
    size_t at = 0;
    while (at < text.size()) {
      const ssize_t got = read(fd, text.data() + at, text.size() - at);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) break;
      at += static_cast<size_t>(got);
    }
    if (at < text.size()) result = refuse("it could not be read to its end");
  }
  close(fd);
  if (!result.ok()) return result;
  return text;
}

bool SameDigest(const Digest& a, const Digest& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace geomesh::transport
