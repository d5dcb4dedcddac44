#include "base/identity.h"

#include <sys/random.h>
#include <sys/stat.h>

#include <fstream>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"

namespace geomesh {

uint64_t Fnv1a(absl::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : bytes) {
    hash ^= static_cast<uint8_t>(c);
    hash *= 0x100000001b3u;
  }
  return hash;
}

uint64_t Random64() {
  uint64_t value = 0;
  if (getrandom(&value, sizeof(value), 0) != sizeof(value)) {
    std::random_device random;
    value = static_cast<uint64_t>(random()) << 32 | random();
  }
  return value;
}

uint64_t ThisPlace(absl::Span<const absl::string_view> namespaces) {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string place;
  std::getline(file, place);
  for (const absl::string_view kind : namespaces) {
    struct stat status = {};
    stat(absl::StrCat("/proc/self/ns/", kind).c_str(), &status);
    absl::StrAppend(&place, "/", status.st_dev, "/", status.st_ino);
  }
  return Fnv1a(place);
}

}  // namespace geomesh
