// What a fuzz target is: a function that takes any bytes and aborts on a finding, and inputs to
// start from, made by our own serializers. With libFuzzer (libfuzzer.cc) bytes are searched for;
// without it (replay.cc) seeds and files are tried, and mutated at random with a fixed seed.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace geomesh::fuzz {

// Each target defines both.
void TryInput(absl::string_view input);
std::vector<std::string> Seeds();

// Not an assertion: builds without those must see findings too.
#define FUZZ_CHECK(condition)                                                             \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)

// Takes an input apart. Past its end everything is zero.
class Input {
 public:
  explicit Input(absl::string_view bytes) : left_(bytes) {}

  bool empty() const { return left_.empty(); }
  uint8_t Byte() {
    if (left_.empty()) return 0;
    const auto byte = static_cast<uint8_t>(left_.front());
    left_.remove_prefix(1);
    return byte;
  }
  // Little-endian, of that many bytes.
  uint64_t Integer(int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) value |= uint64_t{Byte()} << (8 * i);
    return value;
  }
  absl::string_view Take(size_t bytes) {
    const absl::string_view taken = left_.substr(0, bytes);
    left_.remove_prefix(taken.size());
    return taken;
  }
  absl::string_view Rest() { return Take(left_.size()); }

 private:
  absl::string_view left_;
};

}  // namespace geomesh::fuzz
