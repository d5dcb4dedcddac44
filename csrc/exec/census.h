// Who is behind: what each rank of a group has called, asked when an operation does not end.
//
// The ranks that a stalled operation waits for may themselves wait for somebody else; only asking
// all of them shows who did not call it, or called something else. Questions and answers are
// messages of the group's own channel, answered on the engine thread: also by a rank whose program
// computes, sleeps or waits elsewhere. Engine thread only. Knows sequences, fingerprints and the
// operations' names.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "transport/engine.h"

namespace geomesh::exec {

// Message ids with this bit, and without the highest one, belong to the census: a collective's
// (sequence << 24) never reach it.
inline constexpr uint64_t kCensusMessages = uint64_t{1} << 62;

class Census : public std::enable_shared_from_this<Census> {
 public:
  Census(transport::Engine* engine, uint64_t channel, int rank,
         std::vector<transport::PeerId> peers);

  // From now on answers the others. The channel is open.
  void Open();
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
  static constexpr size_t kMaxAnswerBytes = 2 * (8 + 4 + 2 + kMaxNameBytes);

  Posted Find(uint64_t sequence) const;
  void AwaitQuestion(size_t rank);
  void SendTo(size_t rank, uint64_t id, std::string bytes);
  static std::string Serialize(const Answer& answer);
  static std::optional<Answer> Parse(absl::string_view bytes);

  transport::Engine* const engine_;
  const uint64_t channel_;
  const size_t rank_;
  const std::vector<transport::PeerId> peers_;

  std::array<Posted, kRemembered> posted_;  // a ring, by sequence
  uint64_t last_ = 0;
  std::vector<uint64_t> questions_;  // by rank: received so far
  uint64_t asked_ = 0;               // own questions so far

  uint64_t sequence_ = 0;  // that the open question is about; 0: none
  std::vector<std::optional<Answer>> answers_;
  size_t unanswered_ = 0;
  std::function<void()> done_;
};

}  // namespace geomesh::exec
