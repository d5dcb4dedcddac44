// Groups made of groups: split, shrink and merge; and a group that is given its ranks anew.
//
// A split or shrunk group needs neither store nor messages: the processes know each other, and all
// members come to the same channel by themselves. So it can be made when the store's host is gone.
#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "group/fingerprint.h"
#include "group/operation.h"
#include "group/process_group.h"

#include <c10/util/Exception.h>

namespace geomesh::group {
namespace {

// Must not meet a channel made of random numbers, nor one of another kind or turn.
uint64_t Derived(uint64_t parent, absl::string_view kind, const std::vector<int>& members,
                 uint64_t turn) {
  WideFingerprint fingerprint;
  fingerprint.Add(parent).Add(turn);
  for (const char c : kind) fingerprint.Add(static_cast<uint8_t>(c));
  for (const int member : members) fingerprint.Add(static_cast<uint64_t>(member));
  return fingerprint.value();
}

}  // namespace

c10::intrusive_ptr<ProcessGroupGeoMesh::Options> ProcessGroupGeoMesh::ChildOptions(
    const c10::intrusive_ptr<c10d::Backend::Options>& given) const {
  auto options = c10::make_intrusive<Options>(*options_);
  if (given != nullptr) {
    if (const auto* ours = dynamic_cast<const Options*>(given.get()); ours != nullptr) {
      options = c10::make_intrusive<Options>(*ours);
    }
    options->timeout = given->timeout;
    options->group_name = given->group_name;
    options->group_desc = given->group_desc;
    options->global_ranks_in_group = given->global_ranks_in_group;
  }
  if (options->topology.regions.empty()) options->topology = options_->topology;
  options->enable_reconfigure = false;
  options->meeting = {};
  return options;
}

uint64_t ProcessGroupGeoMesh::ChildChannel(const char* kind, const std::vector<int>& members) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!records_.empty(), "geomesh: the group has no ranks yet: call reconfigure() first");
  const uint64_t turn = children_[{kind, members}]++;
  return Derived(channel_, kind, members, turn);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupGeoMesh::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  CheckOwner();
  std::vector<int> members = ranks;
  std::sort(members.begin(), members.end());
  TORCH_CHECK_VALUE(std::adjacent_find(members.begin(), members.end()) == members.end(),
                    "geomesh, split: a rank is listed twice");
  for (const int member : members) {
    TORCH_CHECK_VALUE(member >= 0 && member < size_, "geomesh, split: rank ", member,
                      " is not one of the group's, 0 to ", size_ - 1);
  }
  if (!std::binary_search(members.begin(), members.end(), rank_)) return nullptr;
  const uint64_t channel = ChildChannel("split", ranks);
  return c10::make_intrusive<ProcessGroupGeoMesh>(*this, ranks, channel, ChildOptions(opts));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupGeoMesh::merge(
    const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts, const int& rank, const int& size) {
  CheckOwner();
  return c10::make_intrusive<ProcessGroupGeoMesh>(store, rank, size, ChildOptions(opts));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupGeoMesh::shrink(
    const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts_override) {
  CheckOwner();
  std::vector<int> members;
  for (int rank = 0; rank < size_; ++rank) members.push_back(rank);
  for (const int64_t rank : ranks_to_exclude) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "geomesh, shrink: rank ", rank,
                      " is not one of the group's, 0 to ", size_ - 1);
    TORCH_CHECK(rank != rank_, "geomesh, shrink: rank ", rank_,
                " excludes itself; only ranks that stay call shrink");
    std::erase(members, static_cast<int>(rank));
  }
  constexpr int kShrinkAbort = 1;
  if ((shrink_flags & kShrinkAbort) != 0) abort();
  const uint64_t channel = ChildChannel("shrink", members);
  return c10::make_intrusive<ProcessGroupGeoMesh>(*this, members, channel,
                                                  ChildOptions(opts_override));
}

#if defined(C10D_BACKEND_HAS_RECONFIGURE)

c10d::ReconfigureHandle ProcessGroupGeoMesh::get_reconfigure_handle() const {
  CheckOwner();
  TORCH_CHECK(process_ != nullptr, "geomesh: the group was destroyed");
  transport::PeerRecord own = OwnRecord();
  own.rank = 0;  // not yet known, and the handle is the same whatever it was
  return absl::Base64Escape(own.Serialize());
}

ProcessGroupGeoMesh::Work ProcessGroupGeoMesh::reconfigure(const c10d::ReconfigureOptions& opts) {
  CheckOwner();
  const auto refuse = [](const auto&... what) {
    Throw(absl::InvalidArgumentError(absl::StrCat("geomesh, reconfigure: ", what...)));
  };
  std::vector<transport::PeerRecord> records;
  const auto add = [&](const std::string& handle) {
    std::string bytes;
    absl::StatusOr<transport::PeerRecord> record =
        absl::Base64Unescape(handle, &bytes)
            ? transport::PeerRecord::Parse(bytes)
            : absl::StatusOr<transport::PeerRecord>(absl::DataLossError("it is not base64"));
    if (!record.ok()) {
      refuse("handle ", records.size(),
             " is not one that get_reconfigure_handle() gave: ", record.status().message());
    }
    records.push_back(*std::move(record));
  };
  if (const auto* ordered = std::get_if<std::vector<c10d::ReconfigureHandle>>(&opts.handles)) {
    for (const std::string& handle : *ordered) add(handle);
  } else {
    for (const std::string& handle :
         std::get<std::unordered_set<c10d::ReconfigureHandle>>(opts.handles)) {
      add(handle);
    }
    // Ring neighbours should be neighbours: by region, in the topology's order, then by host.
    const std::vector<std::string>& regions = options_->topology.regions;
    const auto key = [&](const transport::PeerRecord& record) {
      const auto region = std::find(regions.begin(), regions.end(), record.region);
      return std::make_tuple(region - regions.begin(), record.region, record.host, record.uid.high,
                             record.uid.low);
    };
    std::sort(records.begin(), records.end(),
              [&](const auto& a, const auto& b) { return key(a) < key(b); });
  }
  const transport::ProcessUid own = process_->engine().uid();
  WideFingerprint channel;
  channel.Add(static_cast<uint64_t>(opts.uuid));
  int rank = -1;
  for (size_t i = 0; i < records.size(); ++i) {
    records[i].rank = static_cast<int>(i);
    if (records[i].uid == own) {
      if (rank >= 0) refuse("this rank's handle is given twice, as rank ", rank, " and ", i);
      rank = static_cast<int>(i);
    }
    channel.Add(records[i].uid.high).Add(records[i].uid.low);
  }
  if (rank < 0) refuse("this rank's own handle is not one of the ", records.size(), " given");

  std::shared_ptr<Process> process;  // the group may end meanwhile
  std::shared_ptr<exec::Executor> before;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (shut_) Throw(Usable());
    if (!reconfigured_.insert(opts.uuid).second) {
      refuse("uuid ", opts.uuid, " was used before on this group; each time takes a new one");
    }
    process = process_;
    before = std::move(executor_);
  }
  if (before != nullptr) {
    before->Leave(absl::CancelledError(
        absl::StrCat("rank ", rank_, " has left the group to be configured anew")));
    pending_->AwaitOwn(absl::InfiniteFuture());
    before->Disown();
    before.reset();  // returns when nothing of it is left
    pending_->AwaitIdle(absl::Now() + kHooksLimit);
    WarnOfHooks();
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    rank_ = rank;
    size_ = static_cast<int>(records.size());
    sequence_ = 0;
    windows_ = 0;
  }
  Connect(std::move(records), channel.value());
  // Done when all ranks have come.
  c10d::BarrierOptions all;
  if (opts.timeout.has_value()) all.timeout = *opts.timeout;
  return barrier(all);
}

#endif

}  // namespace geomesh::group
