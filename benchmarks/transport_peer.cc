// One process of a transport benchmark: an engine, whose peers it finds through files in a folder.
// benchmarks/transport.py starts several, in namespaces of their own.
//
//   transport_peer DIR RANK WORLD MODE [name=value ...]
//
//   stream   rank 0 sends messages to rank 1 without a pause     seconds=5 bytes=67108864 ahead=2
//   idle     all connect, then nothing happens                   seconds=10
//   plan     rank 0 sends what a plan says                       plan=storm|pin seconds=20 load=B/s
//   many     rank 0 sends many messages of mixed sizes           count=1000000
//
//   any: address=127.0.0.1 psk=FILE (wire/tls) lanes=0 scheduler=storm|fifo|fair
//   balancer=rate|backlog|robin
//        pin=65536 region=TEXT
//
// Prints one line of JSON. Times are CLOCK_MONOTONIC, the same for all processes of a machine.
#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "transport/engine.h"
#include "transport/wire/choose.h"

namespace {

using namespace geomesh::transport;

constexpr uint64_t kChannel = 7;

[[noreturn]] void Fail(absl::string_view why) {
  std::fprintf(stderr, "transport_peer: %s\n", std::string(why).c_str());
  std::_Exit(1);
}

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double CpuSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return absl::ToDoubleSeconds(absl::DurationFromTimeval(usage.ru_utime) +
                               absl::DurationFromTimeval(usage.ru_stime));
}

int64_t ResidentKb() {
  std::ifstream file("/proc/self/statm");
  int64_t pages = 0, resident = 0;
  file >> pages >> resident;
  return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

int Descriptors() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

class Arguments {
 public:
  Arguments(int count, char** values) {
    if (count < 5) Fail("usage: transport_peer DIR RANK WORLD MODE [name=value ...]");
    dir = values[1];
    rank = std::atoi(values[2]);
    world = std::atoi(values[3]);
    mode = values[4];
    for (int i = 5; i < count; ++i) {
      const std::pair<std::string, std::string> parts =
          absl::StrSplit(values[i], absl::MaxSplits('=', 1));
      named_[parts.first] = parts.second;
    }
  }
  std::string Text(const std::string& name, const std::string& otherwise) const {
    const auto it = named_.find(name);
    return it == named_.end() ? otherwise : it->second;
  }
  double Number(const std::string& name, double otherwise) const {
    return std::atof(Text(name, absl::StrCat(otherwise)).c_str());
  }

  std::string dir, mode;
  int rank = 0, world = 0;

 private:
  std::map<std::string, std::string> named_;
};

// Engine, peers, and a barrier over messages of a channel of its own.
class Node {
 public:
  explicit Node(const Arguments& arguments) : arguments_(arguments) {
    EngineOptions options;
    options.lanes = static_cast<int>(arguments.Number("lanes", 0));
    options.pin_bytes = static_cast<uint64_t>(arguments.Number("pin", 65536));
    const std::string scheduler = arguments.Text("scheduler", "storm");
    options.policy = scheduler == "fifo"   ? SchedulePolicy::kFifo
                     : scheduler == "fair" ? SchedulePolicy::kFair
                                           : SchedulePolicy::kStorm;
    const std::string balancer = arguments.Text("balancer", "rate");
    options.balancer = balancer == "robin"     ? Balancer::kRoundRobin
                       : balancer == "backlog" ? Balancer::kLeastBacklog
                                               : Balancer::kRateWeighted;
    options.host = absl::StrCat("host", arguments.rank);
    options.region = arguments.Text("region", absl::StrCat("region", arguments.rank));
    geomesh::Options wire_options;
    wire_options.interface = arguments.Text("address", "127.0.0.1");
    wire_options.psk_file = arguments.Text("psk", "");
    auto wire = MakeWire(wire_options, {});
    if (!wire.ok()) Fail(wire.status().ToString());
    auto created = Engine::Create(options, *std::move(wire));
    if (!created.ok()) Fail(created.status().ToString());
    engine = *std::move(created);

    PeerRecord own;
    own.uid = engine->uid();
    own.rank = arguments.rank;
    own.host = options.host;
    own.region = options.region;
    own.wire = std::string(engine->wire_name());
    own.address = engine->address();
    const std::string name = absl::StrCat(arguments.dir, "/", arguments.rank);
    std::ofstream(name + ".new", std::ios::binary) << own.Serialize();
    std::rename((name + ".new").c_str(), name.c_str());
    for (int rank = 0; rank < arguments.world; ++rank) {
      std::string bytes;
      for (const double limit = Now() + 30; bytes.empty();) {
        std::stringstream text;
        text << std::ifstream(absl::StrCat(arguments.dir, "/", rank), std::ios::binary).rdbuf();
        bytes = text.str();
        if (bytes.empty() && Now() > limit) Fail(absl::StrCat("rank ", rank, " does not come"));
        if (bytes.empty()) usleep(10000);
      }
      const absl::StatusOr<PeerRecord> record = PeerRecord::Parse(bytes);
      if (!record.ok()) Fail(record.status().ToString());
      peers.push_back(*engine->Call([&] { return engine->AddPeer(*record); }));
    }
    Barrier();
  }

  // Any thread.
  void Send(int to, uint64_t id, absl::Span<const std::byte> bytes, std::function<void()> done) {
    engine->Post([this, to, id, bytes, done = std::move(done)] {
      engine->Send(peers[to], {{kChannel, id}, 0}, bytes, [done](const absl::Status& status) {
        if (!status.ok()) Fail(status.ToString());
        if (done) done();
      });
    });
  }
  void Recv(int from, uint64_t id, absl::Span<std::byte> bytes, std::function<void()> done) {
    engine->Post([this, from, id, bytes, done = std::move(done)] {
      engine->Recv(peers[from], {{kChannel, id}, 0}, bytes, [done](absl::StatusOr<size_t> size) {
        if (!size.ok()) Fail(size.status().ToString());
        done();
      });
    });
  }

  void Barrier() {
    struct State {
      std::mutex mutex;
      std::condition_variable wake;
      int left;
    };
    auto state = std::make_shared<State>();
    state->left = 2 * (arguments_.world - 1);
    const uint64_t id = barriers_++;
    const auto arrived = [state](const absl::Status& status) {
      if (!status.ok()) Fail(status.ToString());
      std::lock_guard<std::mutex> lock(state->mutex);
      --state->left;
      state->wake.notify_all();
    };
    for (int rank = 0; rank < arguments_.world; ++rank) {
      if (rank == arguments_.rank) continue;
      engine->Post([this, rank, id, arrived] {
        engine->Recv(peers[rank], {{kChannel + 1, id}, 0}, {},
                     [arrived](absl::StatusOr<size_t> size) { arrived(size.status()); });
        engine->Send(peers[rank], {{kChannel + 1, id}, 0}, {}, arrived);
      });
    }
    std::unique_lock<std::mutex> lock(state->mutex);
    state->wake.wait(lock, [&] { return state->left == 0; });
  }

  PeerStats Stats(int rank) {
    return engine->Call([&] { return engine->Stats(); })[static_cast<size_t>(peers[rank])];
  }

  std::unique_ptr<Engine> engine;
  std::vector<PeerId> peers;

 private:
  const Arguments& arguments_;
  uint64_t barriers_ = 0;
};

// Counts down; waited for by the main thread.
class Countdown {
 public:
  explicit Countdown(int64_t count) : left_(count) {}
  void Down() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--left_ == 0) wake_.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this] { return left_ <= 0; });
  }
  bool over() {
    std::lock_guard<std::mutex> lock(mutex_);
    return left_ <= 0;
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  int64_t left_;
};

// ---- stream ----

// The receiver prints when each message's last byte came; an empty one ends it.
void Stream(Node& node, const Arguments& arguments) {
  const size_t bytes = static_cast<size_t>(arguments.Number("bytes", 64 << 20));
  const double seconds = arguments.Number("seconds", 5);
  const int ahead = static_cast<int>(arguments.Number("ahead", 2));
  auto& buffer = *new std::vector<std::byte>(bytes, std::byte{1});
  const double cpu = CpuSeconds(), begin = Now();
  if (arguments.rank == 0) {
    Countdown over(1);
    uint64_t next = 0;
    int under_way = 0;
    bool ended = false;
    std::function<void()> more;  // engine thread only
    more = [&] {
      for (; !ended && under_way < ahead && Now() < begin + seconds; ++under_way) {
        node.Send(1, next++, buffer, [&] {
          --under_way;
          more();
        });
      }
      if (!ended && under_way == 0) {
        ended = true;
        node.Send(1, next, {}, [&] { over.Down(); });
      }
    };
    node.engine->Post([&] { more(); });
    over.Wait();
    const PeerStats stats = node.Stats(1);
    node.Barrier();
    absl::PrintF(
        "{\"rank\": 0, \"begin\": %.6f, \"end\": %.6f, \"cpu_s\": %.4f, \"lanes\": %d, "
        "\"lanes_lost\": %d}\n",
        begin, Now(), CpuSeconds() - cpu, stats.lanes, stats.lanes_lost);
    return;
  }
  auto& received = *new std::vector<std::pair<double, uint64_t>>;  // when, bytes
  Countdown& over = *new Countdown(1);  // outlive this function: receives do
  std::function<void(uint64_t)>& take = *new std::function<void(uint64_t)>;
  take = [&](uint64_t id) {
    node.engine->Post([&, id] {
      node.engine->Recv(node.peers[0], {{kChannel, id}, 0}, absl::MakeSpan(buffer),
                        [&, id](absl::StatusOr<size_t> size) {
                          if (over.over() && !size.ok()) return;  // it was one too many
                          if (!size.ok()) Fail(size.status().ToString());
                          if (*size == 0 && bytes > 0) return over.Down();
                          received.emplace_back(Now(), *size);
                          take(id + static_cast<uint64_t>(ahead));
                        });
    });
  };
  for (int i = 0; i < ahead; ++i) take(static_cast<uint64_t>(i));
  // What had come by then is sampled while it comes: messages are long.
  std::vector<std::pair<double, uint64_t>> samples;
  std::thread sampler([&] {
    const double until = Now() + seconds;
    while (Now() < until) {
      samples.emplace_back(Now(), node.Stats(0).bytes_received);
      absl::SleepFor(absl::Milliseconds(50));
    }
  });
  over.Wait();
  sampler.join();
  node.Barrier();
  std::string text;
  for (const auto& [when, count] : samples) {
    absl::StrAppendFormat(&text, "%s[%.4f, %d]", text.empty() ? "" : ", ", when, count);
  }
  uint64_t total = 0;
  for (const auto& [when, count] : received) total += count;
  absl::PrintF(
      "{\"rank\": 1, \"begin\": %.6f, \"last\": %.6f, \"bytes\": %d, \"cpu_s\": %.4f, \"samples\": "
      "[%s]}\n",
      begin, received.empty() ? begin : received.back().first, total, CpuSeconds() - cpu, text);
}

// ---- plan ----

struct Planned {
  double at_s;
  int to;
  uint64_t bytes;
};

// The same in every process. storm: 16 sizes from 1 KB to 64 MB to all others, Poisson, `load`
// bytes a second in all, equally to each. pin: bulk of 16 MB messages at `load`, and 64 KB messages
// at 20/s.
std::vector<Planned> Plan(const Arguments& arguments) {
  const double seconds = arguments.Number("seconds", 20), load = arguments.Number("load", 10e6);
  std::vector<Planned> plan;
  std::mt19937_64 random(static_cast<uint64_t>(arguments.Number("seed", 1)));
  if (arguments.Text("plan", "storm") == "storm") {
    constexpr int kSizes = 16;
    const double most = arguments.Number("most", 64 << 20);
    std::vector<uint64_t> sizes;
    double mean = 0;
    for (int i = 0; i < kSizes; ++i) {
      sizes.push_back(
          static_cast<uint64_t>(std::llround(1024 * std::pow(most / 1024, i / (kSizes - 1.0)))));
      mean += static_cast<double>(sizes.back()) / kSizes;
    }
    // Each peer's own arrivals, their times stretched so that this sample, too, is of `load`.
    const double peer_load = load / (arguments.world - 1);
    std::exponential_distribution<double> gap(peer_load / mean);
    std::uniform_int_distribution<int> size(0, kSizes - 1);
    for (int to = 1; to < arguments.world; ++to) {
      const size_t first = plan.size();
      double at = 0, sent = 0;
      while (sent < peer_load * seconds) {
        plan.push_back({at += gap(random), to, sizes[size(random)]});
        sent += static_cast<double>(plan.back().bytes);
      }
      for (size_t i = first; i < plan.size(); ++i) plan[i].at_s *= sent / peer_load / at;
    }
    std::sort(plan.begin(), plan.end(),
              [](const Planned& a, const Planned& b) { return a.at_s < b.at_s; });
  } else {
    const double bulk = arguments.Number("bulk", 16 << 20);
    for (double at = 0; at < seconds; at += bulk / load) {
      plan.push_back({at, 1, static_cast<uint64_t>(bulk)});
    }
    std::exponential_distribution<double> gap(20);
    for (double at = gap(random); at < seconds; at += gap(random))
      plan.push_back({at, 1, 64 << 10});
    std::sort(plan.begin(), plan.end(),
              [](const Planned& a, const Planned& b) { return a.at_s < b.at_s; });
  }
  return plan;
}

void RunPlan(Node& node, const Arguments& arguments) {
  const std::vector<Planned> plan = Plan(arguments);
  uint64_t most = 0;
  for (const Planned& one : plan) most = std::max(most, one.bytes);
  std::vector<std::byte> buffer(most, std::byte{1});  // of all messages: contents do not matter
  std::vector<double> when(plan.size(), 0);
  if (arguments.rank != 0) {
    int64_t mine = 0;
    for (const Planned& one : plan) mine += one.to == arguments.rank;
    Countdown over(mine);
    for (uint64_t id = 0; id < plan.size(); ++id) {
      if (plan[id].to != arguments.rank) continue;
      node.Recv(0, id, absl::MakeSpan(buffer).first(plan[id].bytes), [&, id] {
        when[id] = Now();
        over.Down();
      });
    }
    node.Barrier();
    if (mine > 0) over.Wait();
    node.Barrier();
  } else {
    node.Barrier();
    const double begin = Now();
    for (uint64_t id = 0; id < plan.size(); ++id) {
      absl::SleepFor(absl::Seconds(begin + plan[id].at_s - Now()));
      when[id] = Now();
      node.Send(plan[id].to, id, absl::MakeConstSpan(buffer).first(plan[id].bytes), nullptr);
    }
    node.Barrier();
  }
  std::string text;
  for (uint64_t id = 0; id < plan.size(); ++id) {
    if (when[id] == 0) continue;
    absl::StrAppendFormat(&text, "%s[%d, %d, %.6f]", text.empty() ? "" : ", ", id, plan[id].bytes,
                          when[id]);
  }
  absl::PrintF("{\"rank\": %d, \"messages\": [%s], \"lanes\": %d}\n", arguments.rank, text,
               node.Stats(arguments.rank == 0 ? 1 : 0).lanes);
}

// ---- idle, many ----

void Idle(Node& node, const Arguments& arguments) {
  const double seconds = arguments.Number("seconds", 10), cpu = CpuSeconds();
  absl::SleepFor(absl::Seconds(seconds));
  absl::PrintF("{\"rank\": %d, \"seconds\": %.2f, \"cpu_s\": %.5f}\n", arguments.rank, seconds,
               CpuSeconds() - cpu);
  node.Barrier();
}

void Many(Node& node, const Arguments& arguments) {
  const uint64_t count = static_cast<uint64_t>(arguments.Number("count", 1e6));
  constexpr uint64_t kBlock = 1000, kMost = 1 << 20;
  std::vector<std::byte> buffer(kMost);
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> exponent(0, 20);
  std::string text;
  for (uint64_t first = 0; first < count; first += kBlock) {
    Countdown over(kBlock);
    for (uint64_t id = first; id < first + kBlock; ++id) {
      // Mostly small: 1 byte to 1 MB, each doubling as likely as the next, one in ten as drawn.
      const double drawn = exponent(random);
      const uint64_t bytes = static_cast<uint64_t>(std::exp2(id % 10 == 0 ? drawn : drawn / 2));
      if (arguments.rank == 0) {
        node.Send(1, id, absl::MakeConstSpan(buffer).first(bytes), [&] { over.Down(); });
      } else {
        node.Recv(0, id, absl::MakeSpan(buffer).first(bytes), [&] { over.Down(); });
      }
    }
    over.Wait();
    if (first % (count / 20 / kBlock * kBlock + kBlock) == 0 || first + kBlock >= count) {
      absl::StrAppendFormat(&text, "%s[%d, %d, %d]", text.empty() ? "" : ", ", first + kBlock,
                            ResidentKb(), Descriptors());
    }
  }
  node.Barrier();
  absl::PrintF("{\"rank\": %d, \"held\": [%s]}\n", arguments.rank, text);
}

}  // namespace

int main(int count, char** values) {
  // UCX reads these when it is loaded: this process starts itself again.
  if (getenv("UCX_MEM_EVENTS") == nullptr) {
    setenv("UCX_HANDLE_ERRORS", "none", 1);
    setenv("UCX_MEM_EVENTS", "n", 1);
    setenv("UCX_DEBUG_SIGNO", "0", 1);
    execv("/proc/self/exe", values);
  }
  const Arguments arguments(count, values);
  Node node(arguments);
  if (arguments.mode == "stream") {
    Stream(node, arguments);
  } else if (arguments.mode == "plan") {
    RunPlan(node, arguments);
  } else if (arguments.mode == "idle") {
    Idle(node, arguments);
  } else if (arguments.mode == "many") {
    Many(node, arguments);
  } else {
    Fail(absl::StrCat("no mode ", arguments.mode));
  }
  std::fflush(stdout);
  node.Barrier();
  return 0;
}
