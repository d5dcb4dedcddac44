// Runs programs: the one path by which bytes of any collective move.
//
// An executor belongs to one group (channel). Its state lives on the engine thread; short steps run
// there, long ones (reductions, copies and codec work above a threshold) on one compute thread of
// the process, so that heartbeats never wait for arithmetic. Knows programs, bytes and dtypes;
// nothing of torch.
//
// Order. Operations start in the order of Start; one waits only for an earlier unfinished one of
// the same group whose memory it shares (and one of the two writes there), and for its turn: at
// most kMaxInFlight collectives of a group are at work. Sends and receives (programs of one step)
// take no turn, so that any order of posting them completes.
//
// Failure. What is wrong with a call itself (blocks that don't fit the program, a reduction that
// its dtype has not) ends that call alone, with InvalidArgument, before a byte leaves: ranks that
// call alike are refused alike. Everything later ends the group (also a message that no call here
// expects, where this rank has called what it belongs to): a deadline, a lost peer, a
// message of a wrong size, a NaN in a sign all-reduce, Abort. The first reason wins; every pending
// call ends with it, the group's other ranks are told and end theirs ("rank 2 on host b (eastasia)
// reported: ... (at 18:55:26.123 UTC)"), and later calls are refused with it. A new group must be
// made then: after a partial operation nobody knows which messages are still on their way. A lost
// peer ends the group when something is needed from it: ranks that left after the last operation
// disturb nobody.
// `done` runs when nothing reads or writes the call's memory any more, also after a failure.
//
// Sign all-reduce. Rank r encodes with the call's rotation seed s and dithers with Mix(s, r); what
// is recoded is rotated by Mix(s, kRecodeStream). The residual is written back when the whole
// operation has succeeded, never before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/dtype.h"
#include "codec/sign.h"
#include "exec/point_to_point.h"
#include "exec/reduce.h"
#include "exec/windows.h"
#include "plan/program.h"
#include "transport/engine.h"

namespace geomesh::exec {

// Collectives of a group at work at the same time; later ones queue.
inline constexpr int kMaxInFlight = 64;

// A collective's messages have the ids from sequence << kMessageBits on.
inline constexpr int kMessageBits = 24;

// A run of elements in the caller's memory.
struct Block {
  std::byte* data = nullptr;
  int64_t elements = 0;
};

// What a sign all-reduce needs besides blocks. The views must stay valid until the call is done.
struct SignCall {
  std::vector<codec::Piece> pieces;
  uint64_t weight = 1;         // this rank's token count
  uint64_t rotation_seed = 0;  // of the round: equal on all ranks
  bool rotate = true;
  absl::Span<float> residual = {};
  float residual_decay = 1.0f;
};

// What came of a finished call.
struct Outcome {
  uint64_t bytes_sent = 0, bytes_received = 0;
  uint64_t total_weight = 0;  // sign all-reduce: of all ranks; 0 too where there are no elements
  int source = kAnyRank;      // of a receive: the rank that sent
};

// What a send or receive is besides its program.
struct PointToPoint {
  int peer = 0;  // kAnyRank: whose message comes first (receives only)
  uint32_t tag = 0;
  bool sending = false;
  // Of a receive from any rank: its program when the message has come from `rank`.
  std::function<absl::StatusOr<std::shared_ptr<const plan::Program>>(int rank)> receive_from =
      nullptr;
};

struct Call {
  std::shared_ptr<const plan::Program> program;
  std::vector<Block> input, output;
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;    // of reducing collectives; the others leave it
  std::shared_ptr<SignCall> sign;  // kSignAllReduce only
  // Of the operation in its group. A collective has the same one on all ranks, one that no other
  // has, and larger ones have begun later; a send or receive has that of the last collective.
  uint64_t sequence = 0;
  // Set by the executor: key id of the program's message 0; message m has + m.
  uint64_t first_message_id = 0;
  std::optional<PointToPoint> point_to_point;
  bool after_all = false;  // begins when the group's earlier collectives have ended here
  uint32_t fingerprint =
      0;  // of op, dtype and sizes where these must be equal on all ranks; 0: not checked
  std::string operation;  // "all_reduce(float32, 1048576)", for errors
  absl::Time deadline = absl::InfiniteFuture();
  // Runs once, on the engine thread. The error text names operation, sequence, the ranks that are
  // missing with host and region, and bytes done of bytes due.
  absl::AnyInvocable<void(const absl::Status&, const Outcome&) &&> done;
};

class Executor {
 public:
  // `peers[r]` is group rank r's process (own rank included). Any thread but the engine's. The
  // engine outlives the executor.
  // `on_failed` runs once, on the engine thread, when the group can't go on any more for another
  // reason than its end here; before any call ends with that.
  Executor(transport::Engine* engine, uint64_t channel, int rank,
           std::vector<transport::PeerId> peers, absl::AnyInvocable<void() &&> on_failed = nullptr);
  // Ends what is pending with Cancelled (the other ranks are told then), and returns when every
  // `done` has run. Any thread but the engine's.
  ~Executor();

  // Any thread but the engine's. `on_failed` does not run any more when this has returned.
  void Disown();

  // Any thread. Never blocks. After Abort: ends at once with the first reason.
  void Start(Call call);
  // The same in two steps, as Engine::PostQuietly.
  void StartQuietly(Call call);

  // Any thread. Ends everything pending with `reason`, tells the group's other ranks, and refuses
  // what comes later.
  void Abort(absl::Status reason);

  // Any thread. Aborts where anything is pending; else the others are left in peace. Refuses what
  // comes later.
  void Leave(absl::Status reason);

  // Any thread. `done` runs on the engine thread; for the rest see monitored_barrier.h.
  void EnterMonitoredBarrier(absl::Time deadline, absl::Duration timeout, bool all,
                             std::function<void(const absl::Status&)> done);

  // Any thread. Runs `work` on the engine thread.
  void WithWindows(absl::AnyInvocable<void(Windows&) &&> work);

  // Any thread but the engine's, as MemoryStats.
  struct Memory {
    uint64_t used_bytes = 0;  // by operations under way
    uint64_t kept_bytes = 0;  // for the next ones
  };
  Memory MemoryStats() const;
  void ReleaseMemory();  // what is kept

  // OK, or the first reason why this group can't go on.
  absl::Status health() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace geomesh::exec
