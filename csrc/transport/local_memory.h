// The memory of another process on this host, read in place: one copy, where a socket takes three
// and the kernel's work besides. Knows processes and addresses; nothing of messages or peers.
//
// The kernel lets a process read another's memory (process_vm_readv) where a debugger might be
// attached: the same user, the same container, and where Yama guards it the same launcher. Open
// tries it, so that what is not allowed is found out before anybody counts on it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/identity.h"

namespace geomesh::transport {

// Bytes that their owner left where they are, and the word that says whether they are still there.
struct InPlace {
  uint64_t address = 0;
  uint64_t lease_address = 0;
  uint64_t lease = 0;

  static constexpr size_t kBytes = 24;
  std::string Serialize() const;
  static InPlace Parse(absl::Span<const std::byte> bytes);  // of kBytes
};

class LocalMemory {
 public:
  // What a process tells others so that they can find its memory and be sure that it is its:
  // process id, host and network namespace, and where `proof` is kept for as long as the process
  // may be read. Lets the other processes of its launcher read it.
  static std::string Offer(absl::Span<const std::byte> proof);

  // The memory of the process that made `offer`; `proof` is what must be found there. An error says
  // why it can't be read from here: another host, another network namespace, not allowed.
  static absl::StatusOr<LocalMemory> Open(absl::string_view offer,
                                          absl::Span<const std::byte> proof);

  // Copies what lies `offset` bytes after the beginning, and then looks whether the lease still
  // held: Cancelled where its owner had taken the bytes back.
  absl::Status Read(const InPlace& place, uint64_t offset, absl::Span<std::byte> into) const;

 private:
  explicit LocalMemory(pid_t pid) : pid_(pid) {}
  pid_t pid_;
};

// The owner's side: words that hold a value of their own for each time they are lent. They begin at
// a random number, so that memory that holds something else by now is not taken for one.
class Leases {
 public:
  // Lends `bytes`, until TakeBack with the result.
  InPlace Lend(absl::Span<const std::byte> bytes);
  // From now on a reader finds out that it came too late.
  void TakeBack(const InPlace& place);

 private:
  std::deque<std::atomic<uint64_t>> words_;  // never move
  std::vector<std::atomic<uint64_t>*> free_;
  uint64_t next_ = Random64();
};

}  // namespace geomesh::transport
