// Credentials made of certificates: each process has one with its private key, all of them issued
// by one CA. A listener's address holds its certificate and is signed with its key; who dials it
// accepts no other certificate of that CA.
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "transport/wire/tls_credentials.h"
#include "transport/wire/tls_errors.h"
#include "transport/wire/tls_keys.h"

namespace geomesh::transport {
namespace {

constexpr absl::string_view kAddressUse = "torch_geomesh wire/tls address";

struct Delete {
  void operator()(X509* x) const { X509_free(x); }
  void operator()(EVP_MD_CTX* c) const { EVP_MD_CTX_free(c); }
  void operator()(EVP_PKEY* k) const { EVP_PKEY_free(k); }
  void operator()(X509_STORE_CTX* c) const { X509_STORE_CTX_free(c); }
  void operator()(BIO* b) const { BIO_free(b); }
};
template <typename T>
using Owned = std::unique_ptr<T, Delete>;

const unsigned char* Bytes(absl::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

std::string Der(X509* certificate) {
  unsigned char* der = nullptr;
  const int size = i2d_X509(certificate, &der);
  if (size < 0) return "";
  std::string out(reinterpret_cast<char*>(der), static_cast<size_t>(size));
  OPENSSL_free(der);
  return out;
}

std::string Printed(const Owned<BIO>& memory) {
  char* text = nullptr;
  const long size = BIO_get_mem_data(memory.get(), &text);
  return std::string(text, static_cast<size_t>(size));
}

std::string TimeText(const ASN1_TIME* time) {
  Owned<BIO> memory(BIO_new(BIO_s_mem()));
  ASN1_TIME_print(memory.get(), time);
  return Printed(memory);
}

std::string SubjectText(X509* certificate) {
  Owned<BIO> memory(BIO_new(BIO_s_mem()));
  X509_NAME_print_ex(memory.get(), X509_get_subject_name(certificate), 0,
                     XN_FLAG_ONELINE & ~ASN1_STRFLGS_ESC_MSB);
  return Printed(memory).substr(0, 128);
}

// "the certificate of CN = rank1 has expired (Jan 1 ...): issue a new one".
std::string VerifyText(X509_STORE_CTX* context) {
  const int error = X509_STORE_CTX_get_error(context);
  X509* certificate = X509_STORE_CTX_get_current_cert(context);
  const std::string whose = certificate == nullptr
                                ? "its certificate"
                                : absl::StrCat("the certificate of ", SubjectText(certificate));
  switch (error) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return absl::StrCat(whose, " has expired (", TimeText(X509_get0_notAfter(certificate)),
                          "): issue a new one, and check both clocks");
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return absl::StrCat(whose, " is not valid yet (", TimeText(X509_get0_notBefore(certificate)),
                          "): check both clocks");
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
      return absl::StrCat(whose,
                          " was not issued by the CA in GEOMESH_TLS_CA here: give all "
                          "sides certificates of one CA, and that CA");
    default:
      return absl::StrCat(whose, " is refused: ", X509_verify_cert_error_string(error));
  }
}

int OnVerify(int ok, X509_STORE_CTX* context) {
  if (ok == 1) return 1;
  auto* ssl =
      static_cast<SSL*>(X509_STORE_CTX_get_ex_data(context, SSL_get_ex_data_X509_STORE_CTX_idx()));
  auto* handshake = ssl == nullptr ? nullptr : static_cast<TlsHandshake*>(SSL_get_app_data(ssl));
  if (handshake != nullptr && handshake->problem.empty()) handshake->problem = VerifyText(context);
  return 0;
}

class CertificateCredentials final : public TlsCredentials {
 public:
  CertificateCredentials(SslContextPtr context, std::string der)
      : context_(std::move(context)), der_(std::move(der)) {}

  TlsMode mode() const override { return TlsMode::kCertificate; }
  std::string certificate() const override { return der_; }

  absl::StatusOr<std::string> Seal(absl::string_view body) const override {
    const std::string text = absl::StrCat(kAddressUse, body);
    Owned<EVP_MD_CTX> context(EVP_MD_CTX_new());
    size_t size = 0;
    std::string out;
    const bool ok = EVP_DigestSignInit(context.get(), nullptr, nullptr, nullptr,
                                       SSL_CTX_get0_privatekey(context_.get())) == 1 &&
                    EVP_DigestSign(context.get(), nullptr, &size, Bytes(text), text.size()) == 1;
    if (ok) out.resize(size);
    if (!ok || EVP_DigestSign(context.get(), reinterpret_cast<unsigned char*>(out.data()), &size,
                              Bytes(text), text.size()) != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("GEOMESH_TLS_KEY cannot sign: ", OpenSslErrors()));
    }
    out.resize(size);
    return out;
  }

  absl::Status CheckSeal(const TlsAddressParts& parts) const override {
    const std::string& der = parts.address.certificate;
    const unsigned char* at = Bytes(der);
    Owned<X509> certificate(d2i_X509(nullptr, &at, static_cast<long>(der.size())));
    if (certificate == nullptr || at != Bytes(der) + der.size()) {
      ERR_clear_error();
      return absl::InvalidArgumentError("its address holds no certificate that can be read");
    }
    Owned<X509_STORE_CTX> check(X509_STORE_CTX_new());
    if (X509_STORE_CTX_init(check.get(), SSL_CTX_get_cert_store(context_.get()), certificate.get(),
                            nullptr) != 1 ||
        X509_STORE_CTX_set_purpose(check.get(), X509_PURPOSE_SSL_SERVER) != 1) {
      return absl::ResourceExhaustedError(OpenSslErrors());
    }
    if (X509_verify_cert(check.get()) != 1) {
      std::string text = VerifyText(check.get());
      ERR_clear_error();
      return absl::InvalidArgumentError(text);
    }
    const std::string text = absl::StrCat(kAddressUse, parts.body);
    Owned<EVP_MD_CTX> context(EVP_MD_CTX_new());
    if (EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr,
                             X509_get0_pubkey(certificate.get())) != 1 ||
        EVP_DigestVerify(context.get(), Bytes(parts.seal), parts.seal.size(), Bytes(text),
                         text.size()) != 1) {
      ERR_clear_error();
      return absl::InvalidArgumentError(
          "its address was changed on the way: the signature does not fit it, so somebody else "
          "writes into the rendezvous store (see docs/security.md)");
    }
    return absl::OkStatus();
  }

  absl::StatusOr<SslPtr> NewConnection(TlsHandshake* handshake) const override {
    SslPtr ssl(SSL_new(context_.get()));
    if (ssl == nullptr) return absl::ResourceExhaustedError(OpenSslErrors());
    SSL_set_app_data(ssl.get(), handshake);
    return ssl;
  }

  absl::Status CheckPeer(SSL* ssl, const TlsHandshake& handshake) const override {
    Owned<X509> shown(SSL_get1_peer_certificate(ssl));
    if (shown == nullptr || SSL_get_verify_result(ssl) != X509_V_OK) {
      return absl::PermissionDeniedError("the TLS handshake showed no certificate of the CA");
    }
    if (handshake.dialler && Der(shown.get()) != handshake.certificate) {
      return absl::PermissionDeniedError(
          absl::StrCat("another process answered: it shows the certificate of ",
                       SubjectText(shown.get()), ", not the one in its address"));
    }
    return absl::OkStatus();
  }

 private:
  const SslContextPtr context_;
  const std::string der_;
};

absl::Status Refuse(absl::string_view variable, absl::string_view path, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(variable, "=", path, ": ", why));
}

}  // namespace

absl::StatusOr<std::unique_ptr<TlsCredentials>> LoadCertificate(const TlsKeyFiles& files) {
  if (files.certificate.empty() || files.private_key.empty() || files.ca.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "certificates need all of GEOMESH_TLS_CERT, GEOMESH_TLS_KEY and GEOMESH_TLS_CA; missing:",
        files.certificate.empty() ? " GEOMESH_TLS_CERT" : "",
        files.private_key.empty() ? " GEOMESH_TLS_KEY" : "",
        files.ca.empty() ? " GEOMESH_TLS_CA" : ""));
  }
  SslContextPtr context = MakeTlsContext();
  if (context == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("OpenSSL cannot do TLS 1.3 here: ", OpenSslErrors()));
  }
  SSL_CTX* c = context.get();
  if (SSL_CTX_use_certificate_chain_file(c, files.certificate.c_str()) != 1) {
    return Refuse("GEOMESH_TLS_CERT", files.certificate, OpenSslErrors());
  }
  GM_ASSIGN_OR_RETURN(std::string pem, ReadSecretFile(files.private_key, "GEOMESH_TLS_KEY"));
  Owned<BIO> memory(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  // An encrypted key would ask at the terminal; an empty password refuses it.
  Owned<EVP_PKEY> key(
      PEM_read_bio_PrivateKey(memory.get(), nullptr, nullptr, const_cast<char*>("")));
  OPENSSL_cleanse(pem.data(), pem.size());
  if (key == nullptr) return Refuse("GEOMESH_TLS_KEY", files.private_key, OpenSslErrors());
  if (SSL_CTX_use_PrivateKey(c, key.get()) != 1 || SSL_CTX_check_private_key(c) != 1) {
    return Refuse("GEOMESH_TLS_KEY", files.private_key,
                  absl::StrCat("not the key of GEOMESH_TLS_CERT: ", OpenSslErrors()));
  }
  if (SSL_CTX_load_verify_file(c, files.ca.c_str()) != 1) {
    return Refuse("GEOMESH_TLS_CA", files.ca, OpenSslErrors());
  }
  X509* own = SSL_CTX_get0_certificate(c);
  if (X509_cmp_current_time(X509_get0_notAfter(own)) < 0) {
    return Refuse("GEOMESH_TLS_CERT", files.certificate,
                  absl::StrCat("the certificate of ", SubjectText(own), " has expired (",
                               TimeText(X509_get0_notAfter(own)), "): issue a new one"));
  }
  SSL_CTX_set_verify(c, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, &OnVerify);
  return std::make_unique<CertificateCredentials>(std::move(context), Der(own));
}

}  // namespace geomesh::transport
