// Shared keys: read from a file, and what is derived from them. Knows files and hashes, nothing of
// TLS or sockets. docs/wire-format.md has the derivations.
//
// The file holds one key a line, base64 or hex (a line of nothing but hex digits), `#` begins a
// comment. The first key is used to dial and to seal; each of them is accepted.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace geomesh::transport {

inline constexpr size_t kMinKeyBytes = 32;

using Digest = std::array<uint8_t, 32>;
using KeyId = std::array<uint8_t, 8>;  // tells keys apart, and tells nothing about them

// A key and its uses. The secret is wiped from memory at the end.
class SharedKey {
 public:
  explicit SharedKey(std::string secret);
  ~SharedKey();
  SharedKey(SharedKey&&) = default;

  const KeyId& id() const { return id_; }
  // Of a connection that `identity` names.
  Digest LaneKey(absl::string_view identity) const;
  // Says that a holder of this key wrote `text`.
  Digest Seal(absl::string_view text) const;

 private:
  std::string secret_;
  KeyId id_;
  Digest seal_key_;
};

class KeyRing {
 public:
  // InvalidArgument names the file and what is wrong with it, and never shows a key.
  static absl::StatusOr<KeyRing> Load(const std::string& path);
  static absl::StatusOr<KeyRing> Parse(absl::string_view text);

  const SharedKey& first() const { return keys_.front(); }
  const SharedKey* Find(const KeyId& id) const;
  size_t size() const { return keys_.size(); }

 private:
  std::vector<SharedKey> keys_;
};

// The content of a file that holds a secret: refused where others than its owner can get at it.
// `what` names it in errors ("GEOMESH_PSK_FILE").
absl::StatusOr<std::string> ReadSecretFile(const std::string& path, absl::string_view what);

// In constant time.
bool SameDigest(const Digest& a, const Digest& b);

}  // namespace geomesh::transport
