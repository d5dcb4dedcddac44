// Symbolic execution of all ranks' programs, after the checks of program_checks.h.
#include "plan/verifier.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "plan/builder.h"
#include "plan/program_checks.h"
#include "plan/symbolic.h"

namespace geomesh::plan {
namespace {

struct StepRef {
  int rank;
  uint32_t index;
};
using MessageKey = std::tuple<int, int, uint32_t>;  // from, to, message

class Execution {
 public:
  // `share`: the caller passes the same memory where program.h allows it.
  Execution(const CallShape& shape, absl::Span<const Program> programs,
            const std::vector<RankView>& views, bool share)
      : shape_(shape), programs_(programs), views_(views), share_(share), ranks_(programs.size()) {
    for (const Program& program : programs) Prepare(program);
  }

  absl::Status RunAll() {
    for (const Program& program : programs_) {
      for (uint32_t i = 0; i < program.steps.size(); ++i) {
        if (program.steps[i].after.empty()) ready_.push_back({program.rank, i});
      }
    }
    while (!ready_.empty()) {
      const StepRef next = ready_.front();
      ready_.pop_front();
      GM_RETURN_IF_ERROR(Start(next));
    }
    GM_RETURN_IF_ERROR(CheckFinished());
    return shape_.collective == Collective::kBarrier ? CheckBarrier() : CheckOutputs();
  }

 private:
  struct Rank {
    absl::flat_hash_map<BlockId, Memory> memory;
    std::vector<uint32_t> waits_for;              // steps not done yet, by step
    std::vector<std::vector<uint32_t>> wakes;     // steps that wait for it, by step
    std::vector<bool> done;                       // by step
    std::vector<std::vector<bool>> heard_before;  // ranks known to have begun, by step
    std::vector<bool> heard;
  };

  void Prepare(const Program& program) {
    Rank& rank = ranks_[program.rank];
    const size_t steps = program.steps.size();
    rank.waits_for.resize(steps);
    rank.wakes.resize(steps);
    rank.done.resize(steps);
    rank.heard.resize(ranks_.size());
    rank.heard[program.rank] = true;
    rank.heard_before.assign(steps, rank.heard);
    for (uint32_t i = 0; i < steps; ++i) {
      rank.waits_for[i] = program.steps[i].after.size();
      for (const uint32_t earlier : program.steps[i].after) rank.wakes[earlier].push_back(i);
    }
    const auto fill = [&](BlockId id) {
      const int64_t elements = views_[program.rank].BlockElements(id);
      MemoryOf(program.rank, id)
          .Write({0, elements}, {{0, elements, expressions_.Leaf(program.rank), id.block, 0}});
    };
    for (uint32_t b = 0; b < program.input_blocks; ++b) fill({Buffer::kInput, b});
    const bool in_place =
        shape_.collective == Collective::kAllReduce || shape_.collective == Collective::kReduce ||
        (shape_.collective == Collective::kBroadcast && program.rank == shape_.root);
    if (in_place) fill({Buffer::kOutput, 0});
  }

  Memory& MemoryOf(int rank, BlockId id) {
    if (share_ && id.buffer == Buffer::kInput) {
      id = SharedWith(shape_.collective, rank, id).value_or(id);
    }
    return ranks_[rank].memory[id];
  }

  absl::Status Start(StepRef at) {
    const Step& step = programs_[at.rank].steps[at.index];
    if (step.kind != StepKind::kSend && step.kind != StepKind::kRecv) {
      GM_RETURN_IF_ERROR(RunLocal(at, step));
      Finish(at);
      return absl::OkStatus();
    }
    const MessageKey key = step.kind == StepKind::kSend
                               ? MessageKey{at.rank, step.peer, step.message}
                               : MessageKey{step.peer, at.rank, step.message};
    const auto it = posted_.find(key);
    if (it == posted_.end()) {
      posted_.emplace(key, at);
      return absl::OkStatus();
    }
    const StepRef from = step.kind == StepKind::kSend ? at : it->second;
    const StepRef to = step.kind == StepKind::kSend ? it->second : at;
    return Deliver(from, to);
  }

  absl::Status Deliver(StepRef from, StepRef to) {
    const Step& send = programs_[from.rank].steps[from.index];
    const Step& receive = programs_[to.rank].steps[to.index];
    if (send.src.block != kNoBlock) {
      std::vector<Run> runs;
      GM_RETURN_IF_ERROR(Fetch(from, send, send.src, runs));
      Store(to.rank, receive.dst, runs);
    }
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[from.rank].heard_before[from.index][r]) {
        ranks_[to.rank].heard_before[to.index][r] = true;
      }
    }
    Finish(from);
    Finish(to);
    return absl::OkStatus();
  }

  absl::Status Fetch(StepRef at, const Step& step, const Chunk& chunk, std::vector<Run>& runs) {
    auto found = MemoryOf(at.rank, IdOf(chunk)).Read(views_[at.rank].Range(chunk));
    if (!found.has_value()) {
      return Wrong(at.rank, at.index, step,
                   absl::StrCat("reads ", ToString(chunk), " before it was written"));
    }
    runs = *std::move(found);
    return absl::OkStatus();
  }

  void Store(int rank, const Chunk& chunk, const std::vector<Run>& runs) {
    MemoryOf(rank, IdOf(chunk)).Write(views_[rank].Range(chunk), runs);
  }

  absl::Status RunLocal(StepRef at, const Step& step) {
    const RankView& view = views_[at.rank];
    if (share_ && IsSelfCopy(shape_.collective, at.rank, step)) return absl::OkStatus();
    for (const Chunk& source : SourcesOf(step)) {
      if (view.Elements(source) == view.Elements(step.dst)) continue;
      return Wrong(at.rank, at.index, step,
                   absl::StrCat("operands of ", view.Elements(step.dst), " and ",
                                view.Elements(source), " elements"));
    }
    std::vector<Run> src;
    GM_RETURN_IF_ERROR(Fetch(at, step, SourcesOf(step)[0], src));
    switch (step.kind) {
      case StepKind::kCopy:
        Store(at.rank, step.dst, src);
        return absl::OkStatus();
      case StepKind::kReduce: {
        for (size_t i = 1; i < step.operands.size(); ++i) {
          std::vector<Run> operand;
          GM_RETURN_IF_ERROR(Fetch(at, step, step.operands[i], operand));
          GM_RETURN_IF_ERROR(Combine(at, step, Form::kElement, src, operand));
        }
        GM_RETURN_IF_ERROR(CheckWhole(at, step, src));
        Store(at.rank, step.dst, src);
        return absl::OkStatus();
      }
      case StepKind::kEncode:
        GM_RETURN_IF_ERROR(CheckCoded(at, step, step.dst, src));
        return Rewrap(at, step, Form::kElement, Form::kCode, src);
      case StepKind::kDecodeAdd: {
        const bool recoded = view.ScratchOf(step.src)->recoded != 0;
        const Form code = recoded ? Form::kRecoded : Form::kCode;
        const Form sum = recoded ? Form::kRecodedSum : Form::kSum;
        GM_RETURN_IF_ERROR(CheckCoded(at, step, step.dst, src));
        auto dst = MemoryOf(at.rank, IdOf(step.dst)).Read(view.Range(step.dst));
        if (!dst.has_value()) return Rewrap(at, step, code, sum, src);  // the first to be added
        GM_RETURN_IF_ERROR(Combine(at, step, sum, *dst, src));
        Store(at.rank, step.dst, *dst);
        return absl::OkStatus();
      }
      case StepKind::kDecodeFinish: {
        const bool recoded = view.ScratchOf(step.src)->recoded != 0;
        MemoryOf(at.rank, IdOf(step.src)).Erase(view.Range(step.src));
        return Rewrap(at, step, recoded ? Form::kRecodedSum : Form::kSum, Form::kMean, src);
      }
      case StepKind::kRecode:
        GM_RETURN_IF_ERROR(CheckCoded(at, step, step.dst, src));
        MemoryOf(at.rank, IdOf(step.src)).Erase(view.Range(step.src));
        return Rewrap(at, step, Form::kSum, Form::kRecoded, src);
      default:
        return absl::InternalError("not a local step");
    }
  }

  // Where the program says so, a reduction is of each rank's own contribution.
  absl::Status CheckWhole(StepRef at, const Step& step, const std::vector<Run>& sum) {
    const size_t world = programs_.size();
    if (!programs_[at.rank].sums_once) return absl::OkStatus();
    for (const Run& run : sum) {
      if (expressions_[run.id].sources.size() == world && step.operands.size() == world) continue;
      return Wrong(at.rank, at.index, step,
                   "adds up some contributions only, in a program that adds up all in one step");
    }
    return absl::OkStatus();
  }

  // A code stands for the very elements that its scratch block is made for.
  absl::Status CheckCoded(StepRef at, const Step& step, const Chunk& dst,
                          const std::vector<Run>& src) {
    const int64_t begin = views_[at.rank].Range(views_[at.rank].ScratchOf(dst)->like).begin;
    for (const Run& run : src) {
      if (run.source != begin + run.begin) {
        return Wrong(at.rank, at.index, step, "the code is of other elements than its destination");
      }
    }
    return absl::OkStatus();
  }

  // dst = `to` of each run of src, all of which must be of form `from`.
  absl::Status Rewrap(StepRef at, const Step& step, Form from, Form to, std::vector<Run>& src) {
    for (Run& run : src) {
      if (expressions_[run.id].form != from) {
        return Wrong(
            at.rank, at.index, step,
            absl::StrCat("needs ", Describe(from), ", got ", Describe(expressions_[run.id].form)));
      }
      run.id = expressions_.Wrap(to, run.id);
    }
    Store(at.rank, step.dst, src);
    return absl::OkStatus();
  }

  // dst = dst and src, run by run. `form` is that of dst before and after.
  absl::Status Combine(StepRef at, const Step& step, Form form, std::vector<Run>& dst,
                       const std::vector<Run>& src) {
    std::vector<Run> out;
    size_t i = 0, j = 0;
    for (int64_t begin = 0; i < dst.size() && j < src.size();) {
      const struct Run &a = dst[i], &b = src[j];
      const int64_t end = std::min(a.end, b.end);
      if (expressions_[a.id].form != form) {
        return Wrong(
            at.rank, at.index, step,
            absl::StrCat("needs ", Describe(form), ", got ", Describe(expressions_[a.id].form)));
      }
      if (a.source_block != b.source_block || a.source - a.begin != b.source - b.begin) {
        return Wrong(at.rank, at.index, step, "combines different elements");
      }
      const std::optional<int> id = expressions_.Join(form, a.id, b.id);
      if (!id.has_value()) {
        return Wrong(at.rank, at.index, step,
                     absl::StrCat("counts a contribution twice: those of ranks ",
                                  absl::StrJoin(expressions_[a.id].sources, ","), " and ",
                                  absl::StrJoin(expressions_[b.id].sources, ",")));
      }
      out.push_back({begin, end, *id, a.source_block, a.source + (begin - a.begin)});
      if (a.end == end) ++i;
      if (b.end == end) ++j;
      begin = end;
    }
    dst = std::move(out);
    return absl::OkStatus();
  }

  void Finish(StepRef at) {
    Rank& rank = ranks_[at.rank];
    rank.done[at.index] = true;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (rank.heard_before[at.index][r]) rank.heard[r] = true;
    }
    for (const uint32_t later : rank.wakes[at.index]) {
      for (size_t r = 0; r < ranks_.size(); ++r) {
        if (rank.heard_before[at.index][r]) rank.heard_before[later][r] = true;
      }
      if (--rank.waits_for[later] == 0) ready_.push_back({at.rank, later});
    }
  }

  absl::Status CheckFinished() const {
    for (const Program& program : programs_) {
      for (uint32_t i = 0; i < program.steps.size(); ++i) {
        if (ranks_[program.rank].done[i] || ranks_[program.rank].waits_for[i] > 0) continue;
        return Wrong(program.rank, i, program.steps[i],
                     "deadlock: its counterpart on the peer never starts");
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckBarrier() const {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      for (size_t other = 0; other < ranks_.size(); ++other) {
        if (!ranks_[rank].heard[other]) {
          return absl::FailedPreconditionError(
              absl::StrCat("rank ", rank, " leaves the barrier without rank ", other));
        }
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckOutputs() {
    std::vector<int> all(ranks_.size());
    for (size_t r = 0; r < all.size(); ++r) all[r] = static_cast<int>(r);
    int sender = -1;
    for (const Program& program : programs_) {
      if (shape_.collective == Collective::kSendRecv && program.input_blocks == 1) {
        sender = program.rank;
      }
    }
    for (const Program& program : programs_) {
      for (uint32_t block = 0; block < program.output_blocks; ++block) {
        const int rank = program.rank;
        std::vector<int> sources{static_cast<int>(block)};
        uint32_t source_block = 0;
        Form form = Form::kElement;
        bool same_on_all = false;
        switch (shape_.collective) {
          case Collective::kAllReduce:
            sources = all;
            same_on_all = true;
            break;
          case Collective::kSignAllReduce:
            sources = all;
            same_on_all = true;
            form = Form::kMean;
            break;
          case Collective::kReduce:
            sources = rank == shape_.root ? all : std::vector<int>{rank};
            break;
          case Collective::kReduceScatter:
            sources = all;
            source_block = rank;
            break;
          case Collective::kBroadcast:
            sources = {shape_.root};
            break;
          case Collective::kScatter:
            sources = {shape_.root};
            source_block = rank;
            break;
          case Collective::kSendRecv:
            sources = {sender};
            break;
          case Collective::kAllToAll:
            source_block = rank;
            break;
          case Collective::kAllGather:
          case Collective::kGather:
          case Collective::kBarrier:
            break;
        }
        GM_RETURN_IF_ERROR(CheckOutput(rank, block, sources, source_block, form, same_on_all));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckOutput(int rank, uint32_t block, const std::vector<int>& sources,
                           uint32_t source_block, Form form, bool same_on_all) {
    const auto wrong = [&](const std::string& what) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", rank, ", output ", block, ": ", what));
    };
    const BlockId id{Buffer::kOutput, block};
    const SliceRange whole{0, views_[rank].BlockElements(id)};
    const auto runs = MemoryOf(rank, id).Read(whole);
    if (!runs.has_value()) return wrong("not all elements were written");
    for (const Run& run : *runs) {
      const Expressions::Expression& value = expressions_[run.id];
      const std::string where = absl::StrCat("elements ", run.begin, " to ", run.end);
      if (run.source_block != source_block || run.source != run.begin) {
        return wrong(absl::StrCat(where, " are elements from ", run.source, " of block ",
                                  run.source_block, "; expected those of block ", source_block));
      }
      if (value.form != form) return wrong(absl::StrCat(where, " hold ", Describe(value.form)));
      if (value.sources != sources) {
        return wrong(absl::StrCat(where, " hold the contributions of ranks ",
                                  absl::StrJoin(value.sources, ","), "; expected ",
                                  absl::StrJoin(sources, ",")));
      }
    }
    if (!same_on_all || rank == 0) return absl::OkStatus();
    const auto first = MemoryOf(0, id).Read(whole);
    for (size_t i = 0, j = 0; first.has_value() && i < runs->size() && j < first->size();) {
      if ((*runs)[i].id != (*first)[j].id) {
        return wrong(absl::StrCat("elements from ", std::max((*runs)[i].begin, (*first)[j].begin),
                                  " are reduced in another order than on rank 0"));
      }
      const int64_t end = std::min((*runs)[i].end, (*first)[j].end);
      if ((*runs)[i].end == end) ++i;
      if ((*first)[j].end == end) ++j;
    }
    return absl::OkStatus();
  }

  const CallShape& shape_;
  const absl::Span<const Program> programs_;
  const std::vector<RankView>& views_;
  const bool share_;
  Expressions expressions_;
  std::vector<Rank> ranks_;
  std::deque<StepRef> ready_;
  std::map<MessageKey, StepRef> posted_;
};

}  // namespace

absl::Status Verify(const CallShape& shape, absl::Span<const Program> programs,
                    const VerifySizes& verify_sizes) {
  const int world = static_cast<int>(programs.size());
  const Sizes sizes(shape, world, verify_sizes);
  std::vector<RankView> views;
  for (int rank = 0; rank < world; ++rank) {
    const Program& program = programs[rank];
    GM_RETURN_IF_ERROR(CheckProgram(program, rank, world));
    CallShape own = shape;
    own.sending = program.input_blocks > 0;
    const bool bystander = shape.collective == Collective::kSendRecv && program.steps.empty();
    if (!bystander && (program.input_blocks != InputBlocks(own, rank, world) ||
                       program.output_blocks != OutputBlocks(own, rank, world))) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", rank, ": ", program.input_blocks, " input and ", program.output_blocks,
          " output blocks do not fit ", Name(shape.collective)));
    }
    views.emplace_back(program, sizes);
  }
  GM_RETURN_IF_ERROR(CheckMessages(programs, views));
  for (const Program& program : programs) {
    GM_RETURN_IF_ERROR(CheckRaces(shape.collective, program));
  }
  GM_RETURN_IF_ERROR(Execution(shape, programs, views, /*share=*/false).RunAll());
  const bool can_share = std::any_of(programs.begin(), programs.end(), [&](const Program& program) {
    return program.output_blocks > 0 &&
           (SharedWith(shape.collective, program.rank, {Buffer::kOutput, 0}).has_value() ||
            SharedWith(shape.collective, program.rank,
                       {Buffer::kOutput, static_cast<uint32_t>(program.rank)})
                .has_value());
  });
  if (!can_share) return absl::OkStatus();
  return Execution(shape, programs, views, /*share=*/true).RunAll();
}

}  // namespace geomesh::plan
