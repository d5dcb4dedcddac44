// Event-driven timing: ports, links and compute threads are queues.
#include "plan/cost_model.h"

#include <algorithm>
#include <queue>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "codec/sign.h"

namespace geomesh::plan {
namespace {

constexpr int64_t kCodeHeaderBytes = 64;

struct Message {
  int from = -1, to = -1;
  uint32_t send = 0, receive = 0;  // steps
  int64_t bytes = 0;
  double first_byte_s = 0, last_byte_s = 0;  // at the receiver's port
  double arrived_s = -1, posted_s = -1;      // -1: not yet
};

enum class Kind : uint8_t { kReady, kLink, kArrival, kDone };

struct Event {
  double time_s;
  int64_t sequence;  // ties go by the order in which events were made
  Kind kind;
  int rank;       // kReady, kDone
  uint32_t step;  // kReady, kDone; for the others the message
  bool operator<(const Event& other) const {
    return std::tie(other.time_s, other.sequence) < std::tie(time_s, sequence);
  }
};

class Simulation {
 public:
  Simulation(const CallShape& shape, const Topology& topology, absl::Span<const Program> programs)
      : topology_(topology),
        programs_(programs),
        code_(shape.collective == Collective::kSignAllReduce),
        elements_(code_ ? shape.bytes / 4 : shape.bytes),
        ranks_(programs.size()) {
    timing_.rank_s.resize(programs.size());
    timing_.step_s.resize(programs.size());
    link_free_s_.resize(static_cast<size_t>(topology.regions()) * topology.regions());
    for (const Program& program : programs) Prepare(program);
  }

  Timing Run() {
    for (const Program& program : programs_) {
      for (uint32_t i = 0; i < program.steps.size(); ++i) {
        if (program.steps[i].after.empty()) Push(0, Kind::kReady, program.rank, i);
      }
    }
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      ++timing_.events;
      switch (event.kind) {
        case Kind::kReady:
          Ready(event.time_s, event.rank, event.step);
          break;
        case Kind::kLink:
          EnterLink(event.time_s, event.step);
          break;
        case Kind::kArrival:
          Arrive(event.time_s, event.step);
          break;
        case Kind::kDone:
          Done(event.time_s, event.rank, event.step);
          break;
      }
    }
    timing_.total_s = *std::max_element(timing_.rank_s.begin(), timing_.rank_s.end());
    return std::move(timing_);
  }

 private:
  struct Rank {
    double port_rate = 0;
    double out_free_s = 0, in_free_s = 0, compute_free_s = 0;
    std::vector<uint32_t> waits_for;
    std::vector<std::vector<uint32_t>> wakes;
    std::vector<uint32_t> message;  // of kSend and kRecv steps
  };

  void Prepare(const Program& program) {
    Rank& rank = ranks_[program.rank];
    rank.port_rate = topology_.link(program.rank, program.rank).bytes_per_s;
    const size_t steps = program.steps.size();
    timing_.step_s[program.rank].resize(steps);
    rank.waits_for.resize(steps);
    rank.wakes.resize(steps);
    rank.message.resize(steps);
    for (uint32_t i = 0; i < steps; ++i) {
      const Step& step = program.steps[i];
      rank.waits_for[i] = step.after.size();
      for (const uint32_t earlier : step.after) rank.wakes[earlier].push_back(i);
      if (step.kind != StepKind::kSend && step.kind != StepKind::kRecv) continue;
      const bool send = step.kind == StepKind::kSend;
      const int from = send ? program.rank : step.peer, to = send ? step.peer : program.rank;
      const auto [it, fresh] =
          message_of_.try_emplace(std::make_tuple(from, to, step.message), messages_.size());
      if (fresh) messages_.emplace_back();
      Message& message = messages_[it->second];
      message.from = from;
      message.to = to;
      (send ? message.send : message.receive) = i;
      if (send) message.bytes = WireBytes(program, step.src);
      rank.message[i] = it->second;
    }
  }

  int64_t Elements(const Program& program, const Chunk& chunk) const {
    if (chunk.block == kNoBlock) return 0;
    int64_t block = elements_;
    if (chunk.buffer == Buffer::kScratch) {
      block = Elements(program, program.scratch[chunk.block].like);
    }
    const SliceRange range = SliceBounds(block, chunk.slice, chunk.slices, program.granule);
    return range.end - range.begin;
  }

  int64_t WireBytes(const Program& program, const Chunk& chunk) const {
    const int64_t elements = Elements(program, chunk);
    if (!code_) return elements;
    return kCodeHeaderBytes + elements / 8 + elements / codec::kBlockElements;
  }

  double ComputeSeconds(const Program& program, const Step& step) const {
    const double bytes = static_cast<double>(Elements(program, step.dst)) * (code_ ? 4 : 1);
    const auto at = [&](double bytes_per_s) { return kCosts.step_s + bytes / bytes_per_s; };
    switch (step.kind) {
      case StepKind::kReduce:
        return kCosts.step_s +
               static_cast<double>(step.operands.size() - 1) * bytes / kCosts.reduce_bytes_per_s;
      case StepKind::kCopy:
        return at(kCosts.copy_bytes_per_s);
      case StepKind::kEncode:
        return at(kCosts.encode_bytes_per_s);
      case StepKind::kDecodeAdd:
        return at(kCosts.decode_add_bytes_per_s);
      case StepKind::kDecodeFinish:
        return at(kCosts.decode_finish_bytes_per_s);
      case StepKind::kRecode:
        return at(kCosts.recode_bytes_per_s);
      case StepKind::kSend:
      case StepKind::kRecv:
        break;
    }
    return 0;
  }

  void Push(double time_s, Kind kind, int rank, uint32_t step) {
    events_.push({time_s, sequence_++, kind, rank, step});
  }

  void Ready(double now_s, int rank_index, uint32_t index) {
    Rank& rank = ranks_[rank_index];
    const Step& step = programs_[rank_index].steps[index];
    if (step.kind == StepKind::kRecv) {
      Message& message = messages_[rank.message[index]];
      message.posted_s = now_s;
      if (message.arrived_s >= 0) {
        Push(std::max(now_s, message.arrived_s), Kind::kDone, rank_index, index);
      }
      return;
    }
    if (step.kind == StepKind::kSend) {
      const Message& message = messages_[rank.message[index]];
      const double start_s = std::max(now_s, rank.out_free_s) + kCosts.message_s;
      rank.out_free_s = start_s + message.bytes / rank.port_rate;
      Push(start_s, Kind::kLink, rank_index, rank.message[index]);
      return;
    }
    rank.compute_free_s =
        std::max(now_s, rank.compute_free_s) + ComputeSeconds(programs_[rank_index], step);
    Push(rank.compute_free_s, Kind::kDone, rank_index, index);
  }

  void EnterLink(double now_s, uint32_t index) {
    Message& message = messages_[index];
    const Link& link = topology_.link(message.from, message.to);
    const int from = topology_.region_of(message.from), to = topology_.region_of(message.to);
    double first_s = now_s;
    double last_s = now_s + message.bytes / ranks_[message.from].port_rate;
    if (from != to) {
      double& free_s = link_free_s_[static_cast<size_t>(from) * topology_.regions() + to];
      first_s = std::max(now_s, free_s);
      free_s = first_s + message.bytes / link.bytes_per_s;
      last_s = std::max(last_s, free_s);
    }
    const double delay_s = absl::ToDoubleSeconds(link.delay);
    message.first_byte_s = first_s + delay_s;
    message.last_byte_s = last_s + delay_s;
    Push(last_s, Kind::kDone, message.from, message.send);
    Push(message.first_byte_s, Kind::kArrival, message.to, index);
  }

  void Arrive(double now_s, uint32_t index) {
    Message& message = messages_[index];
    Rank& rank = ranks_[message.to];
    rank.in_free_s =
        std::max(now_s, rank.in_free_s) + kCosts.message_s + message.bytes / rank.port_rate;
    message.arrived_s = std::max(message.last_byte_s + kCosts.message_s, rank.in_free_s);
    if (message.posted_s >= 0) {
      Push(message.arrived_s, Kind::kDone, message.to, message.receive);
    }
  }

  void Done(double now_s, int rank_index, uint32_t index) {
    Rank& rank = ranks_[rank_index];
    timing_.step_s[rank_index][index] = now_s;
    timing_.rank_s[rank_index] = std::max(timing_.rank_s[rank_index], now_s);
    for (const uint32_t later : rank.wakes[index]) {
      if (--rank.waits_for[later] == 0) Push(now_s, Kind::kReady, rank_index, later);
    }
  }

  const Topology& topology_;
  const absl::Span<const Program> programs_;
  const bool code_;
  const int64_t elements_;  // of every block
  std::vector<Rank> ranks_;
  std::vector<double> link_free_s_;  // by ordered pair of regions
  absl::flat_hash_map<std::tuple<int, int, uint32_t>, uint32_t> message_of_;
  std::vector<Message> messages_;
  std::priority_queue<Event> events_;
  int64_t sequence_ = 0;
  Timing timing_;
};

}  // namespace

Timing EstimateTime(const CallShape& shape, const Topology& topology,
                    absl::Span<const Program> programs) {
  return Simulation(shape, topology, programs).Run();
}

}  // namespace geomesh::plan
