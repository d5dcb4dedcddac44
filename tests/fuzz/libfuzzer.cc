// A fuzz target under libFuzzer. GEOMESH_FUZZ_SEEDS=FOLDER: writes the target's seeds there as
// files, and ends.
#include <filesystem>
#include <fstream>

#include "fuzz_target.h"

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  const char* folder = std::getenv("GEOMESH_FUZZ_SEEDS");
  if (folder == nullptr) return 0;
  std::filesystem::create_directories(folder);
  int number = 0;
  for (const std::string& seed : geomesh::fuzz::Seeds()) {
    std::ofstream(std::filesystem::path(folder) / ("seed-" + std::to_string(number++)),
                  std::ios::binary)
        << seed;
  }
  std::exit(0);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  geomesh::fuzz::TryInput({reinterpret_cast<const char*>(data), size});
  return 0;
}
