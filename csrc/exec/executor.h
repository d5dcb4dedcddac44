// Runs programs: the one path by which bytes of any collective move.
//
// An executor belongs to one group (channel). Its state lives on the engine thread; short steps run
// there, long ones (reductions, copies and codec work above a threshold) on one compute thread of
// the process, so that heartbeats never wait for arithmetic. Operations start in the order of
// Start; one waits only for an earlier unfinished one of the same group whose memory it shares.
// Knows programs, bytes and dtypes; nothing of torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/dtype.h"
#include "codec/sign.h"
#include "plan/program.h"
#include "transport/engine.h"

namespace geomesh::exec {

enum class ReduceOp : uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor };

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
  uint64_t total_weight = 0;  // sign all-reduce
};

struct Call {
  std::shared_ptr<const plan::Program> program;
  std::vector<Block> input, output;
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;
  std::shared_ptr<SignCall> sign;  // kSignAllReduce only
  uint64_t sequence = 0;           // of the operation in its group, for errors
  uint64_t first_message_id =
      0;  // key id of the program's message 0, equal on the ranks concerned; message m has + m
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
  // `peers[r]` is group rank r's process (own rank included). Any thread but the engine's.
  Executor(transport::Engine* engine, uint64_t channel, int rank,
           std::vector<transport::PeerId> peers);
  // Ends what is pending with Cancelled.
  ~Executor();

  // Any thread. Never blocks. After Abort: ends at once with the first reason.
  void Start(Call call);

  // Any thread. Ends everything pending with `reason`, tells the group's other ranks, and refuses
  // what comes later.
  void Abort(absl::Status reason);

  // OK, or the first reason why this group can't go on.
  absl::Status health() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace geomesh::exec
