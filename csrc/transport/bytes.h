// Little-endian reading and writing with bounds, for what crosses the wire or the store: segment
// headers, hellos and peer records. Knows no format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include "absl/strings/string_view.h"

#include "absl/types/span.h"
#include "base/identity.h"

namespace geomesh::transport {

// Appends to a string. Never fails.
class ByteWriter {
 public:
  template <typename T>
  void Integer(T value) {
    for (size_t i = 0; i < sizeof(T); ++i) {
      bytes_.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
    }
  }
  void Raw(absl::string_view text) { bytes_.append(text.data(), text.size()); }
  // A 16-bit length, then at most `limit` bytes of `text`.
  void Text(absl::string_view text, size_t limit) {
    text = text.substr(0, limit);
    Integer<uint16_t>(static_cast<uint16_t>(text.size()));
    Raw(text);
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Reads what is left of a view. Each call returns false, and reads nothing, past the end.
class ByteReader {
 public:
  explicit ByteReader(absl::string_view bytes) : left_(bytes) {}
  explicit ByteReader(absl::Span<const std::byte> bytes)
      : left_(reinterpret_cast<const char*>(bytes.data()), bytes.size()) {}

  template <typename T>
  bool Integer(T* value) {
    if (left_.size() < sizeof(T)) return false;
    uint64_t v = 0;
    for (size_t i = 0; i < sizeof(T); ++i) {
      v |= static_cast<uint64_t>(static_cast<uint8_t>(left_[i])) << (8 * i);
    }
    *value = static_cast<T>(v);
    left_.remove_prefix(sizeof(T));
    return true;
  }
  bool Text(std::string* text, size_t limit) {
    uint16_t size = 0;
    if (!Integer(&size) || size > limit || size > left_.size()) return false;
    text->assign(left_.data(), size);
    left_.remove_prefix(size);
    return true;
  }
  bool empty() const { return left_.empty(); }

 private:
  absl::string_view left_;
};

// Of records: against damage, not forgery.
inline uint64_t Checksum(absl::string_view bytes) { return Fnv1a(bytes); }

inline absl::Span<const std::byte> AsBytes(absl::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}
inline absl::string_view AsText(absl::Span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace geomesh::transport
