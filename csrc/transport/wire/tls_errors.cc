#include "transport/wire/tls_errors.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509_vfy.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace geomesh::transport {
namespace {

std::string Reason(unsigned long code) {
  const char* text = ERR_reason_error_string(code);
  return text != nullptr ? text : absl::StrCat("OpenSSL error ", code);
}

// OpenSSL gives an alert that came as 1000 + its number.
int AlertOf(unsigned long code) {
  const int reason = ERR_GET_REASON(code);
  return ERR_GET_LIB(code) == ERR_LIB_SSL && reason >= SSL_AD_REASON_OFFSET
             ? reason - SSL_AD_REASON_OFFSET
             : -1;
}

// What the other side's last word means.
std::string AlertText(int alert, TlsMode mode) {
  const bool keys = mode == TlsMode::kSharedKey;
  switch (alert) {
    case SSL_AD_HANDSHAKE_FAILURE:
      return keys ? "the other side has another key in GEOMESH_PSK_FILE, or none: give both the "
                    "same file"
                  : "the other side has no certificate (GEOMESH_TLS_CERT), or uses a shared key";
    case SSL_AD_ILLEGAL_PARAMETER:
    case SSL_AD_DECRYPT_ERROR:
      if (keys) return "the other side has another key under the same name in GEOMESH_PSK_FILE";
      [[fallthrough]];  // a CA of the same name with another key
    case SSL_AD_UNKNOWN_CA:
      return "the other side does not know the CA of this process's certificate: give all sides "
             "the same GEOMESH_TLS_CA";
    case SSL_AD_INTERNAL_ERROR:
      if (keys) {
        return "the process there is not the one whose address was read: it was started again, or "
               "the address was replayed";
      }
      break;
    case SSL_AD_CERTIFICATE_EXPIRED:
      return "the other side says that this process's certificate (GEOMESH_TLS_CERT) has expired: "
             "issue a new one, and check both clocks";
    case SSL_AD_CERTIFICATE_REVOKED:
    case SSL_AD_BAD_CERTIFICATE:
    case SSL_AD_UNSUPPORTED_CERTIFICATE:
    case SSL_AD_CERTIFICATE_UNKNOWN:
      return "the other side refuses this process's certificate (GEOMESH_TLS_CERT); its log says "
             "why";
    case SSL_AD_CERTIFICATE_REQUIRED:
      return "the other side asks for a certificate, and this process showed none";
    case SSL_AD_PROTOCOL_VERSION:
      return "the other side does not speak TLS 1.3";
    default:
      break;
  }
  return absl::StrCat("the other side ended it (alert ", alert, ", ",
                      SSL_alert_desc_string_long(alert), ")");
}

// What OpenSSL found here.
std::string LocalText(unsigned long code, TlsMode mode) {
  if (ERR_GET_LIB(code) != ERR_LIB_SSL) return Reason(code);
  switch (ERR_GET_REASON(code)) {
    case SSL_R_WRONG_VERSION_NUMBER:
    case SSL_R_HTTP_REQUEST:
    case SSL_R_HTTPS_PROXY_REQUEST:
    case SSL_R_UNKNOWN_PROTOCOL:
    case SSL_R_PACKET_LENGTH_TOO_LONG:
    case SSL_R_BAD_PACKET:
    case SSL_R_UNEXPECTED_MESSAGE:
    case SSL_R_UNEXPECTED_RECORD:
    case SSL_R_BAD_RECORD_TYPE:
    case SSL_R_RECORD_LENGTH_MISMATCH:
    case SSL_R_RECORD_TOO_SMALL:
      return absl::StrCat("what came is not TLS (", Reason(code),
                          "): the other side has no key, or is something else");
    case SSL_R_UNSUPPORTED_PROTOCOL:
    case SSL_R_VERSION_TOO_LOW:
      return "the other side does not speak TLS 1.3";
    case SSL_R_NO_SUITABLE_SIGNATURE_ALGORITHM:
    case SSL_R_NO_SHARED_CIPHER:
    case SSL_R_NO_CERTIFICATE_SET:
      if (mode == TlsMode::kSharedKey) {
        return "it offered no key of ours: it has none, or uses certificates";
      }
      break;
    case SSL_R_BINDER_DOES_NOT_VERIFY:
      return "it does not have the key that it names";
    case SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE:
      return "it showed no certificate";
    case SSL_R_DECRYPTION_FAILED_OR_BAD_RECORD_MAC:
      return "what came was changed on the way, or was recorded from another connection";
    default:
      break;
  }
  return Reason(code);
}

std::string SystemText(int error) {
  switch (error) {
    case ENOBUFS:
      return "it makes this process answer without reading the answers";
    case ETIMEDOUT:
      return "nothing was acknowledged for too long (Connection timed out)";
    default:
      return std::strerror(error);
  }
}

}  // namespace

std::string OpenSslErrors() {
  std::string all;
  while (const unsigned long code = ERR_get_error()) {
    absl::StrAppend(&all, all.empty() ? "" : "; ", Reason(code));
  }
  return all.empty() ? "OpenSSL gives no reason" : all;
}

std::string TlsFailureText(const TlsStream& stream, TlsMode mode, bool dialler, bool closed,
                           absl::string_view problem) {
  constexpr absl::string_view kFailed = "the TLS handshake failed: ";
  const unsigned long code = stream.error_code();
  const int alert = AlertOf(code);
  if (!problem.empty()) return absl::StrCat(kFailed, problem);
  if (closed) {
    return absl::StrCat(kFailed, "the other side closed the connection",
                        dialler ? "; its log says why, if it is torch_geomesh with a key" : "");
  }
  if (code == 0) return absl::StrCat(kFailed, SystemText(stream.system_error()));
  if (alert >= 0) return absl::StrCat(kFailed, AlertText(alert, mode));
  return absl::StrCat(kFailed, LocalText(code, mode));
}

std::string TlsLossText(const TlsStream& stream, bool closed) {
  if (closed) return "connection lost: the other side closed it";
  const unsigned long code = stream.error_code();
  if (code == 0) return absl::StrCat("connection lost: ", SystemText(stream.system_error()));
  if (ERR_GET_LIB(code) == ERR_LIB_SSL &&
      ERR_GET_REASON(code) == SSL_R_DECRYPTION_FAILED_OR_BAD_RECORD_MAC) {
    return "connection lost: what came was changed on the way (a record's authentication failed)";
  }
  return absl::StrCat("connection lost: TLS: ", Reason(code));
}

}  // namespace geomesh::transport
