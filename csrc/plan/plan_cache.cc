// Compiled programs by call shape: constant time after the first call of a size class.
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "plan/compile.h"

namespace geomesh::plan {
namespace {

// A call shape with bytes as a size class.
struct Key {
  Collective collective;
  SignForm form;
  bool sending;
  int root;
  int size_class;
  bool sums_halves;
  friend bool operator==(const Key&, const Key&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const Key& k) {
    return H::combine(std::move(h), k.collective, k.form, k.sending, k.root, k.size_class,
                      k.sums_halves);
  }
};

// What a collective ignores is the same in all its keys.
Key KeyOf(const CallShape& shape) {
  Key key{shape.collective, SignForm::kChosen, false, 0, 0, shape.sums_halves};
  switch (shape.collective) {
    case Collective::kBarrier:
      break;
    case Collective::kSendRecv:
      key.root = shape.root;
      key.sending = shape.sending;
      break;
    case Collective::kSignAllReduce:
      key.form = shape.form;
      key.size_class = SizeClass(shape.bytes);
      break;
    default:
      key.root = HasRoot(shape.collective) ? shape.root : 0;
      key.size_class = SizeClass(shape.bytes);
  }
  return key;
}

}  // namespace

struct PlanCache::State {
  State(Topology t, int r) : topology(std::move(t)), rank(r) {}
  const Topology topology;
  const int rank;
  std::shared_mutex mutex;
  absl::flat_hash_map<Key, std::shared_ptr<const Program>> programs;  // guarded by mutex
};

PlanCache::PlanCache(Topology topology, int rank)
    : state_(std::make_unique<State>(std::move(topology), rank)) {}

PlanCache::~PlanCache() = default;

const Topology& PlanCache::topology() const { return state_->topology; }

absl::StatusOr<std::shared_ptr<const Program>> PlanCache::Get(const CallShape& shape) {
  const Key key = KeyOf(shape);
  if (shape.bytes >= 0) {
    const std::shared_lock lock(state_->mutex);
    if (const auto it = state_->programs.find(key); it != state_->programs.end()) {
      return it->second;
    }
  }
  // Outside the lock: other calls go on meanwhile. Two threads may compile the same program; the
  // first one's is kept.
  absl::StatusOr<Program> program = Compile(shape, state_->topology, state_->rank);
  if (!program.ok()) return program.status();
  const std::unique_lock lock(state_->mutex);
  return state_->programs.try_emplace(key, std::make_shared<const Program>(*std::move(program)))
      .first->second;
}

}  // namespace geomesh::plan
