#include "group/rendezvous.h"

#include <chrono>
#include <random>
#include <string>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"

namespace geomesh::group {
namespace {

// The store lets 64 clients of a job wait at once; short waits let a rank say soon who is missing
// and obey Ctrl-C.
constexpr absl::Duration kWaitPiece = absl::Milliseconds(500);

uint64_t RandomNumber() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

// Mixes one rank's number into the channel; order matters.
uint64_t Mix(uint64_t channel, uint64_t number) {
  uint64_t x = channel * 0x9E3779B97F4A7C15ull + number;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

std::string RecordKey(int64_t meeting, int rank) {
  return absl::StrCat("geomesh/", meeting, "/rank", rank);
}
std::string ReadKey(int64_t meeting) { return absl::StrCat("geomesh/", meeting, "/read"); }

std::vector<int> Missing(c10d::Store& store, int64_t meeting, int size) {
  std::vector<int> missing;
  for (int rank = 0; rank < size; ++rank) {
    if (!store.check({RecordKey(meeting, rank)})) missing.push_back(rank);
  }
  return missing;
}

// The c10d store throws; everything above here must not.
template <typename F>
absl::Status Guarded(const char* step, F f) {
  try {
    f();
    return absl::OkStatus();
  } catch (const std::exception& e) {
    const std::string text = e.what();
    return absl::UnavailableError(absl::StrCat("the rendezvous store failed while ", step, ": ",
                                               text.substr(0, text.find('\n'))));
  }
}

}  // namespace

absl::StatusOr<Rendezvous> Meet(c10d::Store& store, const transport::PeerRecord& own, int size,
                                absl::Time deadline) {
  const absl::Time start = absl::Now();
  std::string value(sizeof(uint64_t), '\0');
  const uint64_t number = RandomNumber();
  for (size_t i = 0; i < sizeof(number); ++i) value[i] = static_cast<char>(number >> (8 * i));
  value += own.Serialize();

  int64_t meeting = 0;
  GM_RETURN_IF_ERROR(Guarded("publishing this rank's record", [&] {
    // Nobody can join meeting k + 1 before all have joined meeting k, since each waits for the
    // records of all.
    meeting = (store.add("geomesh/joined", 1) - 1) / size;
    store.set(RecordKey(meeting, own.rank), std::vector<uint8_t>(value.begin(), value.end()));
  }));

  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) keys.push_back(RecordKey(meeting, rank));
  for (;;) {
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) {
      std::vector<int> missing;
      GM_RETURN_IF_ERROR(
          Guarded("looking for missing ranks", [&] { missing = Missing(store, meeting, size); }));
      return absl::DeadlineExceededError(absl::StrCat(
          "rank ", own.rank, " waited ",
          absl::FormatDuration(absl::Trunc(absl::Now() - start, absl::Milliseconds(1))),
          " for the group to meet; missing: rank ", absl::StrJoin(missing, ", "), " of ", size,
          ". Are their processes running, and do they use the same store?"));
    }
    const auto piece = std::chrono::milliseconds(
        std::max<int64_t>(1, absl::ToInt64Milliseconds(std::min(left, kWaitPiece))));
    try {
      store.wait(keys, piece);
      break;
    } catch (const std::exception& e) {
      // A wait that ran out and a store that went away look alike: ask it something.
      GM_RETURN_IF_ERROR(
          Guarded("waiting for the other ranks", [&] { store.check({keys[own.rank]}); }));
    }
  }

  Rendezvous result;
  std::vector<std::vector<uint8_t>> values;
  GM_RETURN_IF_ERROR(Guarded("reading the other ranks' records", [&] {
    if (store.hasExtendedApi()) {
      values = store.multiGet(keys);
    } else {
      for (const std::string& key : keys) values.push_back(store.get(key));
    }
  }));
  for (int rank = 0; rank < size; ++rank) {
    const std::vector<uint8_t>& bytes = values[rank];
    if (bytes.size() < sizeof(uint64_t)) {
      return absl::DataLossError(absl::StrCat(
          "rank ", rank, "'s record in the store is damaged: ", bytes.size(), " bytes"));
    }
    uint64_t theirs = 0;
    for (size_t i = 0; i < sizeof(theirs); ++i) theirs |= uint64_t{bytes[i]} << (8 * i);
    absl::StatusOr<transport::PeerRecord> record = transport::PeerRecord::Parse(
        absl::string_view(reinterpret_cast<const char*>(bytes.data()) + sizeof(theirs),
                          bytes.size() - sizeof(theirs)));
    if (!record.ok()) {
      return absl::Status(
          record.status().code(),
          absl::StrCat("rank ", rank, "'s record in the store: ", record.status().message()));
    }
    if (record->rank != rank) {
      return absl::FailedPreconditionError(
          absl::StrCat("the record of rank ", rank, " says that it is rank ", record->rank,
                       ": two processes use the same store prefix"));
    }
    result.channel = Mix(result.channel, theirs);
    result.records.push_back(*std::move(record));
  }

  // Tidying up is no reason to fail: the store may be gone by now.
  (void)Guarded("removing the records", [&] {
    if (store.add(ReadKey(meeting), 1) == size) {
      for (const std::string& key : keys) store.deleteKey(key);
      store.deleteKey(ReadKey(meeting));
    }
  });
  return result;
}

}  // namespace geomesh::group
