// What the verifier computes with: expressions over contributions, and memory that holds them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iterator>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "plan/program.h"

namespace geomesh::plan {

enum class Form : uint8_t { kElement, kCode, kSum, kMean, kRecoded, kRecodedSum };

// Expressions over contributions, each stored once: equal ids are equal expressions.
class Expressions {
 public:
  struct Expression {
    Form form;
    int left, right;           // ids, or -1
    std::vector<int> sources;  // ranks whose contribution is in it, sorted
  };

  int Leaf(int rank) { return Intern({Form::kElement, -1 - rank, -1, {rank}}); }
  int Wrap(Form form, int id) { return Intern({form, id, -1, all_[id].sources}); }
  // nullopt where a contribution would count twice.
  std::optional<int> Join(Form form, int left, int right) {
    Expression joined{form, left, right, {}};
    const std::vector<int>&a = all_[left].sources, &b = all_[right].sources;
    std::merge(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(joined.sources));
    if (std::adjacent_find(joined.sources.begin(), joined.sources.end()) != joined.sources.end()) {
      return std::nullopt;
    }
    return Intern(std::move(joined));
  }
  const Expression& operator[](int id) const { return all_[id]; }

 private:
  int Intern(Expression expression) {
    const auto key = std::make_tuple(expression.form, expression.left, expression.right);
    const auto [it, fresh] = ids_.try_emplace(key, static_cast<int>(all_.size()));
    if (fresh) all_.push_back(std::move(expression));
    return it->second;
  }
  std::deque<Expression> all_;
  absl::flat_hash_map<std::tuple<Form, int, int>, int> ids_;
};

inline const char* Describe(Form form) {
  switch (form) {
    case Form::kElement:
      return "elements";
    case Form::kCode:
      return "a code";
    case Form::kSum:
      return "a sum of codes";
    case Form::kMean:
      return "a decoded mean";
    case Form::kRecoded:
      return "a recoded code";
    case Form::kRecodedSum:
      return "a sum of recoded codes";
  }
  return "?";
}

// Elements [begin, end) of a block, which are `id` over the contributions' elements
// [source, source + end - begin) of block `source_block`.
struct Run {
  int64_t begin = 0, end = 0;
  int id = 0;
  uint32_t source_block = 0;
  int64_t source = 0;
};

// One block's contents: disjoint runs in ascending order; what no run covers was never written.
class Memory {
 public:
  // The runs in [range), moved to begin at 0; nullopt where something was never written.
  std::optional<std::vector<Run>> Read(SliceRange range) const {
    std::vector<Run> found;
    int64_t at = range.begin;
    for (const Run& run : runs_) {
      if (run.end <= at) continue;
      if (at >= range.end) break;
      if (run.begin > at) return std::nullopt;
      const int64_t end = std::min(run.end, range.end);
      found.push_back({at - range.begin, end - range.begin, run.id, run.source_block,
                       run.source + (at - run.begin)});
      at = end;
    }
    if (at < range.end) return std::nullopt;
    return found;
  }

  void Erase(SliceRange range) {
    std::vector<Run> kept;
    for (const Run& run : runs_) {
      if (run.begin < range.begin) {
        Run left = run;
        left.end = std::min(run.end, range.begin);
        if (left.begin < left.end) kept.push_back(left);
      }
      if (run.end > range.end) {
        Run right = run;
        right.begin = std::max(run.begin, range.end);
        right.source += right.begin - run.begin;
        if (right.begin < right.end) kept.push_back(right);
      }
    }
    runs_ = std::move(kept);
  }

  // `runs` begin at 0, for the start of `range`.
  void Write(SliceRange range, const std::vector<Run>& runs) {
    Erase(range);
    for (Run run : runs) {
      run.begin += range.begin;
      run.end += range.begin;
      if (run.begin < run.end) runs_.push_back(run);
    }
    std::sort(runs_.begin(), runs_.end(),
              [](const Run& a, const Run& b) { return a.begin < b.begin; });
  }

 private:
  std::vector<Run> runs_;
};

}  // namespace geomesh::plan
