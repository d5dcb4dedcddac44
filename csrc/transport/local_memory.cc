#include "transport/local_memory.h"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/identity.h"
#include "transport/bytes.h"

namespace geomesh::transport {
namespace {

constexpr uint16_t kOfferVersion = 1;

// Processes that share it reach each other's memory by process id, and are not held apart by an
// emulated or real network.
uint64_t Neighbourhood() { return ThisPlace({"net", "pid"}); }

// Where Yama lets only ancestors read (1), the launcher and so its other children may too.
void AllowLauncher() {
  std::ifstream file("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  if (!(file >> scope) || scope != 1) return;
  const pid_t launcher = getppid();
  if (launcher > 1) prctl(PR_SET_PTRACER, launcher, 0, 0, 0);
}

absl::Status Copy(pid_t pid, absl::Span<const iovec> into, absl::Span<const iovec> from,
                  size_t bytes) {
  const ssize_t copied =
      process_vm_readv(pid, into.data(), into.size(), from.data(), from.size(), 0);
  if (copied == static_cast<ssize_t>(bytes)) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("process ", pid, "'s memory can't be read: ",
                   copied < 0 ? std::strerror(errno) : "only a part of it is there"));
}

void* Pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

std::string InPlace::Serialize() const {
  ByteWriter writer;
  writer.Integer(address);
  writer.Integer(lease_address);
  writer.Integer(lease);
  return writer.bytes();
}

InPlace InPlace::Parse(absl::Span<const std::byte> bytes) {
  InPlace place;
  ByteReader reader(bytes);
  reader.Integer(&place.address);
  reader.Integer(&place.lease_address);
  reader.Integer(&place.lease);
  return place;
}

std::string LocalMemory::Offer(absl::Span<const std::byte> proof) {
  AllowLauncher();
  ByteWriter offer;
  offer.Integer(kOfferVersion);
  offer.Integer(static_cast<uint32_t>(getpid()));
  offer.Integer(Neighbourhood());
  offer.Integer(reinterpret_cast<uint64_t>(proof.data()));
  return offer.bytes();
}

absl::StatusOr<LocalMemory> LocalMemory::Open(absl::string_view offer,
                                              absl::Span<const std::byte> proof) {
  ByteReader reader(offer);
  uint16_t version = 0;
  uint32_t pid = 0;
  uint64_t place = 0, address = 0;
  if (!reader.Integer(&version) || version != kOfferVersion || !reader.Integer(&pid) ||
      !reader.Integer(&place) || !reader.Integer(&address) || !reader.empty()) {
    return absl::InvalidArgumentError("an offer of memory of another version, or none");
  }
  if (place != Neighbourhood()) {
    return absl::FailedPreconditionError("it is on another host or in another namespace");
  }
  std::vector<std::byte> found(proof.size());
  const iovec into{found.data(), found.size()}, from{Pointer(address), found.size()};
  if (absl::Status status = Copy(static_cast<pid_t>(pid), {&into, 1}, {&from, 1}, found.size());
      !status.ok()) {
    return status;
  }
  if (!std::equal(found.begin(), found.end(), proof.begin())) {
    return absl::FailedPreconditionError(absl::StrCat("process ", pid, " is another one"));
  }
  return LocalMemory(static_cast<pid_t>(pid));
}

absl::Status LocalMemory::Read(const InPlace& place, uint64_t offset,
                               absl::Span<std::byte> into) const {
  uint64_t lease = 0;
  const iovec local[2] = {{into.data(), into.size()}, {&lease, sizeof(lease)}};
  // The kernel copies them in this order: what was read before the word was still there is good.
  const iovec remote[2] = {{Pointer(place.address + offset), into.size()},
                           {Pointer(place.lease_address), sizeof(lease)}};
  absl::Status status = Copy(pid_, local, remote, into.size() + sizeof(lease));
  if (status.ok() && lease != place.lease) {
    return absl::CancelledError("its bytes were taken back before they were read");
  }
  return status;
}

InPlace Leases::Lend(absl::Span<const std::byte> bytes) {
  if (free_.empty()) free_.push_back(&words_.emplace_back(0));
  std::atomic<uint64_t>* word = free_.back();
  free_.pop_back();
  word->store(++next_);
  return {reinterpret_cast<uint64_t>(bytes.data()), reinterpret_cast<uint64_t>(word), next_};
}

void Leases::TakeBack(const InPlace& place) {
  auto* word = reinterpret_cast<std::atomic<uint64_t>*>(place.lease_address);
  word->store(++next_);
  // Whatever the owner writes into its memory now comes after that.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  free_.push_back(word);
}

}  // namespace geomesh::transport
