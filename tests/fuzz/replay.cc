// A fuzz target without libFuzzer: tries its seeds, the files and folders that are named, and
// `-runs=N` mutations of them (`-seed=S`), the same ones each time. An input that fails is left in
// the file fuzz-failed, for the debugger and for libFuzzer.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "fuzz_target.h"

namespace {

using Random = std::mt19937_64;

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string Mutated(const std::vector<std::string>& inputs, Random& random) {
  std::string bytes = inputs[random() % inputs.size()];
  for (uint64_t n = 1 + random() % 4; n > 0; --n) {
    const size_t at = bytes.empty() ? 0 : random() % bytes.size();
    switch (bytes.empty() ? 4 : random() % 7) {
      case 0:  // a bit
        bytes[at] ^= static_cast<char>(1 << random() % 8);
        break;
      case 1:  // a byte
        bytes[at] = static_cast<char>(random());
        break;
      case 2:  // an edge, of one to eight bytes
        for (size_t i = at, end = at + (size_t{1} << random() % 4); i < end && i < bytes.size();
             ++i)
          bytes[i] = random() % 2 == 0 ? '\xff' : '\0';
        break;
      case 3:  // less
        bytes.erase(at, 1 + random() % 16);
        break;
      case 4:  // more
        bytes.insert(at, std::string(1 + random() % 16, static_cast<char>(random())));
        break;
      case 5:  // cut
        bytes.resize(at);
        break;
      case 6: {  // a piece of another one
        const std::string& other = inputs[random() % inputs.size()];
        if (other.empty()) break;
        const size_t from = random() % other.size();
        bytes.insert(at, other, from, 1 + random() % (other.size() - from));
        break;
      }
    }
  }
  return bytes;
}

void Try(const std::string& input) {
  // Written before, since a finding ends the process.
  static const bool keeps = std::getenv("GEOMESH_FUZZ_KEEP") != nullptr;
  if (keeps) std::ofstream("fuzz-failed", std::ios::binary) << input;
  geomesh::fuzz::TryInput(input);
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t runs = 0, seed = 1;
  std::vector<std::string> inputs = geomesh::fuzz::Seeds();
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.rfind("-runs=", 0) == 0) {
      runs = std::stoull(word.substr(6));
    } else if (word.rfind("-seed=", 0) == 0) {
      seed = std::stoull(word.substr(6));
    } else if (std::filesystem::is_directory(word)) {
      for (const auto& entry : std::filesystem::directory_iterator(word))
        inputs.push_back(ReadFile(entry.path()));
    } else if (std::filesystem::exists(word)) {
      inputs.push_back(ReadFile(word));
    } else {
      std::fprintf(stderr, "%s: no such file\n", word.c_str());
      return 2;
    }
  }
  for (const std::string& input : inputs) Try(input);
  Random random(seed);
  for (uint64_t run = 0; run < runs; ++run) Try(Mutated(inputs, random));
  std::printf("%zu inputs and %llu mutations: nothing found\n", inputs.size(),
              static_cast<unsigned long long>(runs));
  return 0;
}
