// What carries one lane's segments. The engine above knows peers, messages and order; a wire knows
// connections.
//
// A wire has one owner, the engine thread, and every call and every callback happens on it; a
// callback may call Post, Close and Dial. A lane
// is one connection, reliable and in order, until it is lost; a lost lane never comes back under
// the same id. Three implementations: wire/ucx (default), wire/tls (untrusted networks), wire/fake
// (one process, tests).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace geomesh::transport {

// Names a lane within one wire. Never reused.
enum class LaneId : uint32_t {};

// Names a posted segment until OnPosted reports it. Chosen by the engine.
enum class PostToken : uint64_t {};

// Largest payload of a segment; the knee measured for UCX over TCP. All processes of a job use the
// same.
inline constexpr size_t kMaxSegmentPayloadBytes = 256 * 1024;
inline constexpr size_t kMaxSegmentHeaderBytes = 128;
inline constexpr size_t kMaxHelloBytes = 256;

// For how long a lane may go without any of it being acknowledged: then TCP gives it up. The
// engine's heartbeats are sooner where a process is told so, and alone see one that stands still.
inline constexpr absl::Duration kUnacknowledgedLimit = absl::Seconds(10);

// What a lane carries, for networks that treat packets by their marks.
enum class Traffic : uint8_t { kBulk, kUrgent };

class WireEvents {
 public:
  virtual ~WireEvents() = default;

  // A lane that this process dialled is usable.
  virtual void OnLaneUp(LaneId lane) = 0;

  // Somebody dialled us: lane `index` of the `lanes` of one Dial call, with that call's `hello`.
  // The lanes of a call are reported in order, all of them or none. The engine checks the hello and
  // answers true to keep the lane or false to have it closed.
  virtual bool OnLaneAccepted(LaneId lane, int index, int lanes,
                              absl::Span<const std::byte> hello) = 0;

  // A segment arrived. Both spans are valid during the call only. Sizes are within the limits
  // above; the bytes are whatever the peer sent.
  virtual void OnSegment(LaneId lane, absl::Span<const std::byte> header,
                         absl::Span<const std::byte> payload) = 0;

  // The wire needs the posted segment's memory no longer: it is on its way (not: delivered), or
  // `status` says why not. Exactly one call for each successful Post, also after the lane was lost.
  virtual void OnPosted(LaneId lane, PostToken token, const absl::Status& status) = 0;

  // The lane is gone: the peer's process ended, the path broke, or nothing was acknowledged for too
  // long.
  virtual void OnLaneLost(LaneId lane, const absl::Status& reason) = 0;
};

// A question that becomes no lane: does anybody still listen there? The end of it takes it back.
class Knock {
 public:
  enum class Answer : uint8_t { kNone, kSomebody, kNobody };  // kNone: not yet, or it can't be told
  virtual ~Knock() = default;
  virtual Answer answer() = 0;
  virtual const std::string& where() const = 0;  // for errors
};

class Wire {
 public:
  virtual ~Wire() = default;

  // "ucx", "tls", "fake": peers must use the same.
  virtual absl::string_view name() const = 0;

  // Starts listening. Returns the address blob that peers dial, with length and checksum inside; it
  // also holds what both sides must have equal (segment sizes, version), which Dial compares.
  // Errors name the device, address or port range that did not work and those present.
  virtual absl::StatusOr<std::string> Listen(WireEvents* events) = 0;

  // Whether an address that somebody gave as `peer`'s is one that Dial would take: what both sides
  // of a connection ask, so that both learn of different keys. InvalidArgument says why not.
  virtual absl::Status CheckAddress(absl::string_view address, absl::string_view peer) const {
    return absl::OkStatus();
  }

  // Opens `lanes` connections to the process behind `address`; `peer` names it in errors. Returns
  // the first of `lanes` consecutive ids at once; OnLaneUp or OnLaneLost follows for each. `hello`
  // (at most kMaxHelloBytes, copied) is what the other side's OnLaneAccepted sees. InvalidArgument
  // when the blob is damaged or its wire settings differ from ours.
  virtual absl::StatusOr<LaneId> Dial(absl::string_view address, absl::string_view peer, int lanes,
                                      absl::Span<const std::byte> hello) = 0;

  // Whether a dial that takes long, for a path that is gone, leaves the lanes that are there alone.
  virtual bool DialsApart() const { return true; }

  // Asks at an address that Dial would take. Null where the wire has no such question.
  virtual std::unique_ptr<Knock> KnockAt(absl::string_view address) const { return nullptr; }

  // Sends one segment. The spans stay valid and unchanged until OnPosted. Never blocks.
  virtual absl::Status Post(LaneId lane, absl::Span<const std::byte> header,
                            absl::Span<const std::byte> payload, PostToken token) = 0;

  // Marks what this side sends on a lane from now on, where the wire can.
  virtual void Mark(LaneId lane, Traffic traffic) {}

  // Closes a lane at once. Pending segments still get their OnPosted; OnLaneLost is not called.
  virtual void Close(LaneId lane) = 0;

  // Handles what is ready and calls the events. Returns how many things it did: 0 means nothing to
  // do now.
  virtual int Progress() = 0;

  // Prepares to sleep: true if the caller may now sleep on fd() and will be woken by the next
  // event, false if Progress must be called again first.
  virtual bool Arm() = 0;

  // Becomes readable when there is something to Progress. Owned by the wire.
  virtual int fd() const = 0;
};

}  // namespace geomesh::transport
