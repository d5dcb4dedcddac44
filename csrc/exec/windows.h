// One-sided access to memory that ranks of a group have registered, by messages: the target's
// engine puts what comes into place, its program has no part in it.
//
// A put is announced by mail with where it goes, its bytes follow as a message of their own into
// their final place, and it is done when the target has said that they are there. A signal counts
// at the target when all puts that its origin began before are there. Puts of different origins
// into the same place, and reading while a put is under way, are the callers' affair.
//
// Registering and deregistering are collective: all ranks number their windows alike, and no rank
// puts into a window before all have it, or after the first has let it go. Engine thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "exec/mailbox.h"
#include "transport/engine.h"

namespace geomesh::exec {

// Message ids with this bit, and without the two higher ones, are puts'.
inline constexpr uint64_t kWindowMessages = uint64_t{1} << 61;

class Windows : public std::enable_shared_from_this<Windows> {
 public:
  using Done = std::function<void(const absl::Status&)>;
  // What breaks the group: a put that is not done at its deadline, or a target that has no such
  // memory.
  using Broken = std::function<void(absl::Status)>;

  // Becomes the mailbox's reader.
  Windows(transport::Engine* engine, Mailbox* mailbox, uint64_t channel,
          std::vector<transport::PeerId> peers, Broken broken);

  // `memory` keeps the bytes alive, also while a put into them is under way at Deregister.
  void Register(uint64_t window, absl::Span<std::byte> bytes, std::shared_ptr<void> memory);
  void Deregister(uint64_t window);

  // `bytes` stay valid until `done`, which runs once, and not within the call.
  void Put(uint64_t window, size_t rank, uint64_t offset, absl::Span<const std::byte> bytes,
           absl::Time deadline, Done done);
  // Done when it is on its way.
  void Signal(uint64_t window, size_t rank, Done done);
  // Takes one of the rank's signals, and waits for it if none is there. DeadlineExceeded leaves
  // the group as it was.
  void AwaitSignal(uint64_t window, size_t rank, absl::Time deadline, Done done);

  // The group ends, and with it what waits.
  void Close(const absl::Status& reason);

 private:
  struct Memory {
    absl::Span<std::byte> bytes;
    std::shared_ptr<void> keep;
  };
  struct PutUnderWay {
    bool sent = false;   // nothing reads its bytes any more
    bool there = false;  // the target has said so
    absl::Status status;
    uint64_t timer = 0;
    Done done;
  };
  // What one rank does to this one.
  struct Origin {
    uint64_t puts = 0;                                 // announced so far
    std::set<uint64_t> landing;                        // of these, still to come
    std::deque<std::pair<uint64_t, uint64_t>> held;    // signals: puts before, window
    std::map<uint64_t, uint64_t> signals;              // to be taken, by window
    std::map<uint64_t, std::deque<uint64_t>> waiting;  // calls that wait for one, by window
  };

  void OnMail(size_t rank, absl::string_view text);
  void OnPut(size_t rank, uint64_t window, uint64_t offset, uint64_t bytes);
  void OnLanded(size_t rank, uint64_t put, const absl::Status& status);
  void CountSignals(size_t rank);
  void EndPut(size_t rank, uint64_t put);
  void EndWait(uint64_t wait, const absl::Status& status);

  transport::Engine* const engine_;
  Mailbox* const mailbox_;
  const uint64_t channel_;
  const std::vector<transport::PeerId> peers_;
  const Broken broken_;

  std::map<uint64_t, Memory> windows_;
  std::vector<Origin> origins_;                                   // by rank
  std::vector<uint64_t> puts_;                                    // of this rank, by target
  std::map<std::pair<size_t, uint64_t>, PutUnderWay> under_way_;  // by target and number
  struct Wait {
    uint64_t timer = 0;
    Done done;
  };
  uint64_t next_wait_ = 0;
  std::map<uint64_t, Wait> waits_;
  absl::Status closed_;
};

}  // namespace geomesh::exec
