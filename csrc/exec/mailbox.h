// Small messages between the ranks of a group, beside its collectives: what its services (census,
// monitored barrier, windows) tell each other.
//
// Messages from one rank are handed over in the order in which it sent them, on the engine thread:
// also while the rank's program computes, sleeps or waits elsewhere. Engine thread only. Knows no
// service's contents.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "transport/engine.h"

namespace geomesh::exec {

// Message ids with this bit, and without the highest one, are the mailbox's: a collective's
// (sequence << 24) never reach it.
inline constexpr uint64_t kMailMessages = uint64_t{1} << 62;

class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  // Who reads a message.
  enum class Service : uint8_t { kCensus, kMonitoredBarrier, kWindow };
  static constexpr size_t kServices = 3;
  // Of a message.
  static constexpr size_t kMaxBytes = 1024;

  struct Reader {
    // `rank` sent `text`, which is only valid during the call.
    std::function<void(size_t rank, absl::string_view text)> on_mail;
    // Nothing more comes from `rank`.
    std::function<void(size_t rank, const absl::Status& reason)> on_lost;
  };

  Mailbox(transport::Engine* engine, uint64_t channel, std::vector<transport::PeerId> peers);

  // Before Open. The reader is called until Close.
  void SetReader(Service service, Reader reader);
  // From now on reads. The channel is open.
  void Open();

  // From now on nothing is read.
  void Close() { readers_ = {}; }

  // To this rank itself too. `text` has at most kMaxBytes.
  void Send(size_t rank, Service service, absl::string_view text);

 private:
  using Buffer = std::array<std::byte, 1 + kMaxBytes>;
  struct Partner {
    uint64_t sent = 0;
    uint64_t received = 0;
  };

  void AwaitMail(size_t rank);

  transport::Engine* const engine_;
  const uint64_t channel_;
  const std::vector<transport::PeerId> peers_;
  std::vector<Partner> partners_;  // by rank
  std::array<Reader, kServices> readers_;
};

}  // namespace geomesh::exec
