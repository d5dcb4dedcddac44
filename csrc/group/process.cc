#include "group/process.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "transport/wire/choose.h"

namespace geomesh::group {
namespace {

// Some times what it takes to wake a thread.
constexpr absl::Duration kPatience = absl::Microseconds(250);
constexpr absl::Duration kLater = absl::Milliseconds(2);
constexpr size_t kMostLater = 64;

std::string Variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

// torchrun says how many of the job's ranks share this host.
transport::HostScope Scope() {
  const std::string local = Variable("LOCAL_WORLD_SIZE");
  const std::string world = Variable("WORLD_SIZE");
  if (local.empty() || world.empty()) return transport::HostScope::kUnknown;
  return local == world ? transport::HostScope::kSingleHost : transport::HostScope::kSeveralHosts;
}

absl::StatusOr<std::string> RecordFolder(const std::string& option) {
  if (option == "off") return "";
  std::error_code none;
  if (option.empty()) return std::filesystem::temp_directory_path(none).string();
  if (!std::filesystem::is_directory(option, none) || access(option.c_str(), W_OK) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("GEOMESH_RECORD_FOLDER: '", option, "' is no folder that can be written to"));
  }
  return option;
}

// Of what the user asked for a further group, all that differs from what the engine runs with.
absl::Status CheckAgreement(const Options& running, const Options& asked,
                            absl::Span<const std::string> given) {
  for (const std::string& name : given) {
    if (name == "topology" || asked.Get(name) == running.Get(name)) continue;  // a group's own
    const std::string was = running.Get(name);
    return absl::InvalidArgumentError(absl::StrCat(
        "pg_options of another group have ", name, "='", asked.Get(name), "', but the engine, one ",
        "for all groups of a process, runs with ", name, "='", was, "' since the first group: ",
        "leave ", name, " out here, or give it to init_process_group (or in GEOMESH_",
        absl::AsciiStrToUpper(name), ") so that all groups have it"));
  }
  return absl::OkStatus();
}

}  // namespace

std::string HostName() {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0) return "unknown host";
  return name;
}

void Process::Later(absl::AnyInvocable<void() &&> work) {
  later_.push_back(std::move(work));
  if (later_.size() >= kMostLater) return RunLater();
  if (std::exchange(later_timer_, true)) return;
  engine_->AddTimer(absl::Now() + kLater, [this] {
    later_timer_ = false;
    RunLater();
  });
}

void Process::RunLater() { completions_.PostAll(std::exchange(later_, {})); }

void Process::CountRanksHere(int ranks) {
  for (int most = ranks_here_; most < ranks && !ranks_here_.compare_exchange_weak(most, ranks);) {
  }
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return;
  patience_ns_ = ranks_here_ <= CPU_COUNT(&cores) ? absl::ToInt64Nanoseconds(kPatience) : 0;
}

OrderedThread& Process::gpu_reads() {
  std::call_once(gpu_reads_made_,
                 [this] { gpu_reads_ = std::make_unique<OrderedThread>("geomesh-gpu"); });
  return *gpu_reads_;
}

absl::StatusOr<std::shared_ptr<Process>> Process::Acquire(const Options& options,
                                                          absl::Span<const std::string> given) {
  static std::mutex* mutex = new std::mutex;
  static std::weak_ptr<Process>* running = new std::weak_ptr<Process>;
  std::lock_guard<std::mutex> lock(*mutex);
  // A fork has its parent's engine, but none of its threads.
  static pid_t owner = getpid();
  if (getpid() != owner) {
    new std::weak_ptr<Process>(std::move(*running));
    *running = {};
    owner = getpid();
  }
  if (std::shared_ptr<Process> process = running->lock()) {
    GM_RETURN_IF_ERROR(CheckAgreement(process->options(), options, given));
    return process;
  }

  std::shared_ptr<Process> process(new Process(options));
  transport::DeviceOptions device;
  device.master = Variable("MASTER_ADDR");
  device.scope = Scope();
  GM_ASSIGN_OR_RETURN(std::unique_ptr<transport::Wire> wire,
                      transport::MakeWire(options, std::move(device)));

  transport::EngineOptions engine_options;
  engine_options.host = HostName();
  engine_options.region = options.region;
  engine_options.lanes = static_cast<int>(options.lanes);
  // The options' own check has seen to it that these are the names.
  const std::map<absl::string_view, transport::SchedulePolicy> policies = {
      {"storm", transport::SchedulePolicy::kStorm},
      {"fifo", transport::SchedulePolicy::kFifo},
      {"fair", transport::SchedulePolicy::kFair}};
  const std::map<absl::string_view, transport::Balancer> balancers = {
      {"rate", transport::Balancer::kRateWeighted},
      {"backlog", transport::Balancer::kLeastBacklog},
      {"round-robin", transport::Balancer::kRoundRobin}};
  engine_options.policy = policies.at(options.scheduler);
  engine_options.balancer = balancers.at(options.balancer);
  engine_options.pin_bytes = static_cast<uint64_t>(options.pin_bytes);
  engine_options.urgent_lane = options.dscp.has_value();
  engine_options.unexpected_bytes = options.unexpected_bytes;
  engine_options.suspect_after = options.suspect_after;
  engine_options.dead_after = options.dead_after;
  GM_ASSIGN_OR_RETURN(engine_options.record_folder, RecordFolder(options.record_folder));
  // All ranks listen when they have met: one that can't be reached for so long will not be.
  engine_options.connect_timeout =
      std::min(engine_options.connect_timeout, std::max(options.dead_after, absl::Seconds(5)));
  GM_ASSIGN_OR_RETURN(process->engine_, transport::Engine::Create(engine_options, std::move(wire)));
  *running = process;
  return process;
}

}  // namespace geomesh::group
