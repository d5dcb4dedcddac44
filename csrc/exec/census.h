// Who is behind: what each rank of a group has called, asked when an operation does not end.
//
// The ranks that a stalled operation waits for may themselves wait for somebody else; only asking
// all of them shows who did not call it, or called something else. Questions and answers go by
// mailbox: also a rank whose program computes, sleeps or waits elsewhere answers. Engine thread
// only. Knows sequences, fingerprints and the operations' names.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "exec/mailbox.h"
#include "transport/engine.h"

namespace geomesh::exec {

class Census {
 public:
  // Becomes the mailbox's reader; does not outlive it.
  Census(transport::Engine* engine, Mailbox* mailbox, int rank,
         std::vector<transport::PeerId> peers);

  // A collective was called here.
  void Note(uint64_t sequence, uint32_t fingerprint, absl::string_view operation);

  // Asks all others about `sequence`, unless another question is open. `done` runs, at most once,
  // when all have answered.
  void Ask(uint64_t sequence, std::function<void()> done = nullptr);
  // The operation has ended after all: its question is closed.
  void Forget(uint64_t sequence);
  // What is known by now, to follow an error's text: "; not called by rank 0 on host a (its last:
  // barrier(), sequence 11)". Empty where nothing was asked about `sequence`.
  std::string Report(uint64_t sequence) const;

 private:
  struct Posted {
    uint64_t sequence = 0;
    uint32_t fingerprint = 0;
    std::string operation;
  };
  struct Answer {
    Posted last;   // sequence 0: nothing yet
    Posted asked;  // sequence 0: not called, or too long ago
  };
  static constexpr size_t kRemembered = 64;
  static constexpr size_t kMaxNameBytes = 200;
  static_assert(1 + 8 + 2 * (8 + 4 + 2 + kMaxNameBytes) <= Mailbox::kMaxBytes);

  Posted Find(uint64_t sequence) const;
  void OnMail(size_t rank, absl::string_view text);

  transport::Engine* const engine_;
  Mailbox* const mailbox_;
  const size_t rank_;
  const std::vector<transport::PeerId> peers_;

  std::array<Posted, kRemembered> posted_;  // a ring, by sequence
  uint64_t last_ = 0;
  uint64_t asked_ = 0;  // own questions so far

  uint64_t sequence_ = 0;  // that the open question is about; 0: none
  std::vector<std::optional<Answer>> answers_;
  size_t unanswered_ = 0;
  std::function<void()> done_;
};

}  // namespace geomesh::exec
