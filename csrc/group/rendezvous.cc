#include "group/rendezvous.h"

#include <algorithm>
#include <random>
#include <string>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "group/work.h"

namespace geomesh::group {
namespace {

// The store is asked again and again rather than waited on: its waits can't be interrupted, and
// print a warning whenever they run out.
constexpr absl::Duration kShortestPause = absl::Milliseconds(2);
constexpr absl::Duration kLongestPause = absl::Milliseconds(200);

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

std::string List(const std::vector<int>& ranks) {
  constexpr size_t kMaxNamed = 16;
  if (ranks.size() <= kMaxNamed) return absl::StrCat("[", absl::StrJoin(ranks, ", "), "]");
  const std::vector<int> first(ranks.begin(), ranks.begin() + kMaxNamed);
  return absl::StrCat("[", absl::StrJoin(first, ", "), ", ... ", ranks.size(), " ranks]");
}

// Keys of one meeting.
struct Keys {
  std::string root;
  std::string wants;  // what group a rank waits for, while it does

  std::string Record(int rank) const { return absl::StrCat(root, "/rank", rank); }
  std::string Read() const { return absl::StrCat(root, "/read"); }
  std::string Wants(int job_rank) const { return absl::StrCat(wants, job_rank); }
};

// "missing: rank 1, 2 of 4; rank 2 waits for a group of [2, 3]".
std::string Missing(c10d::Store& store, const Keys& keys, const std::vector<int>& members) {
  std::vector<int> missing;
  std::string elsewhere;
  for (size_t rank = 0; rank < members.size(); ++rank) {
    if (store.check({keys.Record(static_cast<int>(rank))})) continue;
    missing.push_back(members[rank]);
    if (store.check({keys.Wants(members[rank])})) {
      absl::StrAppend(&elsewhere, "; rank ", members[rank], " waits for a group of ",
                      store.get_to_str(keys.Wants(members[rank])));
    }
  }
  const std::string text = absl::StrCat("missing: rank ", absl::StrJoin(missing, ", "), " of ",
                                        members.size(), elsewhere);
  if (elsewhere.empty()) {
    return absl::StrCat(text,
                        ". Are their processes running, do they use the same store, and do "
                        "they create this group too?");
  }
  return absl::StrCat(text,
                      ". All members of a group must create it with the same list of the "
                      "job's ranks, and their groups in the same order");
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

absl::StatusOr<Rendezvous> Meet(c10d::Store& store, const transport::PeerRecord& own,
                                const Meeting& meeting, absl::Time deadline) {
  const absl::Time start = absl::Now();
  const int size = static_cast<int>(meeting.members.size());
  const int job_rank = meeting.members[own.rank];
  std::string value(sizeof(uint64_t), '\0');
  const uint64_t number = RandomNumber();
  for (size_t i = 0; i < sizeof(number); ++i) value[i] = static_cast<char>(number >> (8 * i));
  value += own.Serialize();

  Keys keys;
  keys.wants = absl::StrCat("geomesh/", meeting.job, "/wants");
  GM_RETURN_IF_ERROR(Guarded("publishing this rank's record", [&] {
    const std::string job = absl::StrCat("geomesh/", meeting.job, "/");
    if (!meeting.name.empty()) {
      keys.root = absl::StrCat(job, meeting.name);
    } else {
      // Nobody can join meeting k + 1 before all have joined meeting k, since each waits for the
      // records of all.
      uint64_t members = 0;
      for (const int member : meeting.members) members = Mix(members, member);
      const std::string group = absl::StrCat(job, absl::Hex(members));
      keys.root = absl::StrCat(group, "/", (store.add(group + "/joined", 1) - 1) / size);
    }
    const std::string wanted = List(meeting.members);
    store.set(keys.Wants(job_rank), std::vector<uint8_t>(wanted.begin(), wanted.end()));
    store.set(keys.Record(own.rank), std::vector<uint8_t>(value.begin(), value.end()));
  }));

  std::vector<std::string> records;
  for (int rank = 0; rank < size; ++rank) records.push_back(keys.Record(rank));
  for (int rank = 0; rank < size;) {  // one key at a time: worlds are large
    bool there = false;
    GM_RETURN_IF_ERROR(
        Guarded("waiting for the other ranks", [&] { there = store.check({records[rank]}); }));
    if (there) {
      ++rank;
      continue;
    }
    const absl::Time now = absl::Now();
    if (now >= deadline) {
      std::string missing;
      GM_RETURN_IF_ERROR(Guarded("looking for missing ranks",
                                 [&] { missing = Missing(store, keys, meeting.members); }));
      return absl::DeadlineExceededError(
          absl::StrCat("rank ", job_rank, " waited ",
                       absl::FormatDuration(absl::Trunc(now - start, absl::Milliseconds(1))),
                       " for its group of ", List(meeting.members), " to meet; ", missing));
    }
    CheckInterrupt();
    absl::SleepFor(
        std::min(deadline - now, std::clamp((now - start) / 10, kShortestPause, kLongestPause)));
  }

  Rendezvous result;
  std::vector<std::vector<uint8_t>> values;
  GM_RETURN_IF_ERROR(Guarded("reading the other ranks' records", [&] {
    if (store.hasExtendedApi()) {
      values = store.multiGet(records);
    } else {
      for (const std::string& key : records) values.push_back(store.get(key));
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
    store.deleteKey(keys.Wants(job_rank));
    if (store.add(keys.Read(), 1) == size) {
      for (const std::string& key : records) store.deleteKey(key);
      store.deleteKey(keys.Read());
    }
  });
  return result;
}

}  // namespace geomesh::group
