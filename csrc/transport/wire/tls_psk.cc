// Credentials made of a shared key: TLS 1.3 with an external key (psk_dhe_ke). Each connection has
// a key of its own, derived from the shared one and from who dials whom, when and as which lane:
// what is recorded of one fits no other.
#include <openssl/ssl.h>

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "transport/wire/tls_credentials.h"
#include "transport/wire/tls_errors.h"
#include "transport/wire/tls_keys.h"

namespace geomesh::transport {
namespace {

// Separates the uses of the seal.
constexpr absl::string_view kAddressUse = "torch_geomesh wire/tls address";

SSL_SESSION* NewSession(SSL* ssl, const Digest& key) {
  SSL_SESSION* session = SSL_SESSION_new();
  // Any of the suites with SHA-256 may be chosen; this one stands for the hash.
  constexpr unsigned char kAes128GcmSha256[] = {0x13, 0x01};
  const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl, kAes128GcmSha256);
  if (session != nullptr && cipher != nullptr &&
      SSL_SESSION_set1_master_key(session, key.data(), key.size()) == 1 &&
      SSL_SESSION_set_cipher(session, cipher) == 1 &&
      SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1) {
    return session;
  }
  SSL_SESSION_free(session);
  return nullptr;
}

class PskCredentials final : public TlsCredentials {
 public:
  PskCredentials(KeyRing keys, SslContextPtr context)
      : keys_(std::move(keys)), context_(std::move(context)) {
    SSL_CTX_set_app_data(context_.get(), this);
    SSL_CTX_set_psk_use_session_callback(context_.get(), &UseKey);
    SSL_CTX_set_psk_find_session_callback(context_.get(), &FindKey);
  }

  TlsMode mode() const override { return TlsMode::kSharedKey; }
  KeyId dial_key() const override { return keys_.first().id(); }

  absl::StatusOr<std::string> Seal(absl::string_view body) const override {
    const SharedKey& key = keys_.first();
    const Digest seal = key.Seal(absl::StrCat(kAddressUse, body));
    std::string out(key.id().begin(), key.id().end());
    out.append(seal.begin(), seal.end());
    return out;
  }

  absl::Status CheckSeal(const TlsAddressParts& parts) const override {
    KeyId id;
    Digest seal;
    if (parts.seal.size() != id.size() + seal.size()) {
      return absl::InvalidArgumentError("its address has a seal of a wrong length");
    }
    std::copy_n(parts.seal.begin(), id.size(), id.begin());
    std::copy_n(parts.seal.begin() + id.size(), seal.size(), seal.begin());
    const SharedKey* key = keys_.Find(id);
    if (key == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("its address is sealed with a key (", ShortHex(id),
                       ") that GEOMESH_PSK_FILE does not hold here (", ShortHex(keys_.first().id()),
                       keys_.size() > 1 ? ", ..." : "",
                       "): the other side has another key; give both the same file"));
    }
    if (!SameDigest(key->Seal(absl::StrCat(kAddressUse, parts.body)), seal)) {
      return absl::InvalidArgumentError(
          "its address was changed on the way: the seal does not fit it, so somebody else writes "
          "into the rendezvous store (see docs/security.md)");
    }
    return absl::OkStatus();
  }

  absl::StatusOr<SslPtr> NewConnection(TlsHandshake* handshake) const override {
    SslPtr ssl(SSL_new(context_.get()));
    if (ssl == nullptr) return absl::ResourceExhaustedError(OpenSslErrors());
    SSL_set_app_data(ssl.get(), handshake);
    // Who answers may not leave the key aside: without a CA no certificate passes.
    if (handshake->dialler) SSL_set_verify(ssl.get(), SSL_VERIFY_PEER, nullptr);
    return ssl;
  }

  // A handshake without the key cannot end; all that could be left is one by certificate, and
  // there are none.
  absl::Status CheckPeer(SSL* ssl, const TlsHandshake&) const override {
    if (SSL_session_reused(ssl) == 1) return absl::OkStatus();
    return absl::PermissionDeniedError("the TLS handshake used no shared key");
  }

 private:
  static const PskCredentials& Of(SSL* ssl) {
    return *static_cast<PskCredentials*>(SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl)));
  }

  // Dialler: the identity outlives the handshake, in it.
  static int UseKey(SSL* ssl, const EVP_MD* hash, const unsigned char** id, size_t* id_bytes,
                    SSL_SESSION** session) {
    auto* handshake = static_cast<TlsHandshake*>(SSL_get_app_data(ssl));
    *session = nullptr;
    *id = nullptr;
    *id_bytes = 0;
    if (hash != nullptr && EVP_MD_get_type(hash) != NID_sha256) return 1;  // no suite of ours
    handshake->identity_bytes = handshake->identity.Serialize();
    *session = NewSession(ssl, Of(ssl).keys_.first().LaneKey(handshake->identity_bytes));
    *id = reinterpret_cast<const unsigned char*>(handshake->identity_bytes.data());
    *id_bytes = handshake->identity_bytes.size();
    return *session != nullptr;
  }

  // Acceptor. 0 tells the other side "internal error", and no session "handshake failure": its
  // TlsFailureText takes the first for "not this process" and the second for "not this key".
  static int FindKey(SSL* ssl, const unsigned char* id, size_t id_bytes, SSL_SESSION** session) {
    auto* handshake = static_cast<TlsHandshake*>(SSL_get_app_data(ssl));
    *session = nullptr;
    const absl::string_view bytes(reinterpret_cast<const char*>(id), id_bytes);
    auto identity = LaneIdentity::Parse(bytes);
    if (!identity.ok()) {
      handshake->problem = absl::StrCat("it is no process of torch_geomesh: it offers ",
                                        identity.status().message());
      return 1;
    }
    if (identity->listener != handshake->own_listener) {
      handshake->problem =
          "it dialled the process that had this port before, or its address was replayed";
      return 0;
    }
    const SharedKey* key = Of(ssl).keys_.Find(identity->key);
    if (key == nullptr) {
      handshake->problem =
          absl::StrCat("it has another key (", ShortHex(identity->key),
                       ") than those in GEOMESH_PSK_FILE here: give both sides the same file");
      return 1;
    }
    handshake->identity = *std::move(identity);
    *session = NewSession(ssl, key->LaneKey(bytes));
    return *session != nullptr;
  }

  const KeyRing keys_;
  const SslContextPtr context_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TlsCredentials>> LoadSharedKey(const std::string& path) {
  GM_ASSIGN_OR_RETURN(KeyRing keys, KeyRing::Load(path));
  SslContextPtr context = MakeTlsContext();
  if (context == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("OpenSSL cannot do TLS 1.3 here: ", OpenSslErrors()));
  }
  return std::make_unique<PskCredentials>(std::move(keys), std::move(context));
}

absl::StatusOr<std::unique_ptr<TlsCredentials>> LoadTlsCredentials(const TlsKeyFiles& files) {
  const bool certificates =
      !files.certificate.empty() || !files.private_key.empty() || !files.ca.empty();
  if (!files.psk.empty() && certificates) {
    return absl::InvalidArgumentError(
        "both GEOMESH_PSK_FILE and GEOMESH_TLS_* are set: use a shared key or certificates");
  }
  if (!files.psk.empty()) return LoadSharedKey(files.psk);
  if (certificates) return LoadCertificate(files);
  return absl::InvalidArgumentError(
      "wire/tls needs GEOMESH_PSK_FILE, or GEOMESH_TLS_CERT, GEOMESH_TLS_KEY and GEOMESH_TLS_CA");
}

}  // namespace geomesh::transport
