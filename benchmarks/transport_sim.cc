// The engine's own scheduler, balancer and lane bookkeeping, driven by a simulated fabric: what
// STORM and PIN are worth without this machine's noise, and at sizes that it does not have.
//
//   transport_sim storm [peers=3] [lanes=1] [seconds=2000] [load=0.8] [uplink=0|1]
//   transport_sim pin [lanes=4] [seconds=200] [peers=1]
//
// A lane is a path: a first-in-first-out queue with a rate, then a delay; acknowledgements come
// back after the delay. With uplink=1 all segments pass one more queue first, whose rate is what
// the paths of all peers have together at `load`. Time is virtual. Knows no wire and no thread.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <vector>

#include "transport/balancer.h"
#include "transport/lane.h"
#include "transport/scheduler.h"

namespace {

using namespace geomesh::transport;

const std::byte kNothing{};  // messages have sizes only: no byte is ever read

struct Path {
  double bytes_per_s;
  double delay_s;
  double free_at_s = 0;
};

// A simulation's clock and events.
class Clock {
 public:
  double now_s() const { return now_s_; }
  Instant now() const { return Instant{} + absl::Seconds(1) + absl::Seconds(now_s_); }
  void At(double when_s, std::function<void()> work) {
    events_.push({when_s, next_++, std::move(work)});
  }
  void Run(double until_s) {
    while (!events_.empty() && events_.top().when_s <= until_s) {
      Event event = events_.top();
      events_.pop();
      now_s_ = event.when_s;
      event.work();
    }
    now_s_ = until_s;
  }

 private:
  struct Event {
    double when_s;
    uint64_t order;
    std::function<void()> work;
    bool operator<(const Event& other) const {
      return when_s != other.when_s ? when_s > other.when_s : order > other.order;
    }
  };
  double now_s_ = 0;
  uint64_t next_ = 0;
  std::priority_queue<Event> events_;
};

struct Options {
  SchedulePolicy policy = SchedulePolicy::kStorm;
  Balancer balancer = Balancer::kRateWeighted;
  uint64_t pin_bytes = kSmallBytes;
};

// One peer's sending side, as transport/peer.cc has it.
class Sender {
 public:
  // `uplink`: shared with other senders, or null. `done` gets a message's id when all of it has
  // arrived.
  Sender(Clock* clock, Path* uplink, std::vector<Path> paths, const Options& options,
         std::function<void(uint64_t id)> done)
      : clock_(clock),
        uplink_(uplink),
        paths_(std::move(paths)),
        outbox_(options.policy),
        picker_(options.balancer, options.pin_bytes),
        done_(std::move(done)) {
    outbox_.SetBound(uint64_t{1} << 60);
    for (size_t i = 0; i < paths_.size(); ++i) {
      auto lane = std::make_unique<Lane>();
      lane->name = static_cast<uint32_t>(i);
      lane->state = Lane::State::kReady;
      lanes_.push_back(std::move(lane));
    }
  }

  void Send(uint64_t id, uint64_t bytes) {
    auto message = std::make_shared<OutMessage>();
    message->envelope.key = {1, id};
    message->bytes = absl::MakeConstSpan(&kNothing, bytes);
    left_[id] = SegmentCount(bytes);
    outbox_.Add(std::move(message), clock_->now());
    Pump();
  }

  double longest_wait_s() const { return longest_wait_s_; }

 private:
  void Pump() {
    std::vector<LaneView> views;
    for (const auto& lane : lanes_) views.push_back(lane->View(static_cast<int>(lanes_.size())));
    while (auto segment = outbox_.Take(clock_->now(), [&](OutMessage& message, Level level) {
      return picker_.Pick(views, message, level);
    })) {
      longest_wait_s_ = std::max(
          longest_wait_s_, absl::ToDoubleSeconds(Between(segment->waited_since, clock_->now())));
      Lane* lane = lanes_[segment->lane].get();
      Path& path = paths_[segment->lane];
      auto* out = new Outgoing;
      out->payload = absl::MakeConstSpan(&kNothing, segment->size);
      out->message = segment->message;
      lane->OnSend(out, clock_->now(), static_cast<int>(lanes_.size()));
      views[segment->lane].in_flight_bytes = lane->in_flight_bytes;
      const double size = static_cast<double>(out->bytes());
      double at_s = clock_->now_s();
      if (uplink_ != nullptr) {
        at_s = uplink_->free_at_s =
            std::max(at_s, uplink_->free_at_s) + size / uplink_->bytes_per_s;
      }
      path.free_at_s = std::max(at_s, path.free_at_s) + size / path.bytes_per_s;
      const uint64_t id = segment->message->envelope.key.id;
      clock_->At(path.free_at_s + path.delay_s, [this, id] {
        if (--left_[id] == 0) {
          left_.erase(id);
          done_(id);
        }
      });
      clock_->At(path.free_at_s + 2 * path.delay_s, [this, lane] { Acknowledge(lane); });
      if (out->message->all_handed_out()) outbox_.Remove(out->message);
    }
  }

  void Acknowledge(Lane* lane) {
    Outgoing* out = lane->in_flight.front();
    lane->in_flight.pop_front();
    lane->in_flight_bytes -= out->bytes();
    lane->delivered_bytes += out->bytes();
    lane->OnAck(*out, absl::ZeroDuration(), clock_->now());
    delete out;
    Pump();
  }

  Clock* const clock_;
  Path* const uplink_;
  std::vector<Path> paths_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  Outbox outbox_;
  LanePicker picker_;
  std::function<void(uint64_t)> done_;
  std::map<uint64_t, uint64_t> left_;  // segments that have not arrived, by message
  double longest_wait_s_ = 0;
};

double Mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

double Percentile(std::vector<double> values, double part) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1,
                         static_cast<size_t>(part * static_cast<double>(values.size())))];
}

// ---- STORM: 16 sizes from 1 KB to 64 MB, Poisson arrivals ----

constexpr int kSizes = 16;

uint64_t SizeOf(int index) {
  return static_cast<uint64_t>(std::llround(1024 * std::pow(65536.0, index / (kSizes - 1.0))));
}

struct StormResult {
  double mean_s, largest_s, longest_wait_s;
};

StormResult Storm(SchedulePolicy policy, int peers, int lanes, double seconds, double load,
                  bool shared) {
  constexpr double kPeerBytesPerSecond = 100e6;
  Clock clock;
  Path uplink{kPeerBytesPerSecond * peers, 0};
  if (shared) uplink.bytes_per_s = kPeerBytesPerSecond;
  double mean_bytes = 0;
  for (int i = 0; i < kSizes; ++i) mean_bytes += static_cast<double>(SizeOf(i)) / kSizes;

  struct Message {
    double begin_s;
    int size;
  };
  std::vector<std::map<uint64_t, Message>> open(peers);
  std::vector<double> all, largest;
  std::vector<std::unique_ptr<Sender>> senders;
  Options options;
  options.policy = policy;
  for (int p = 0; p < peers; ++p) {
    std::vector<Path> paths;
    for (int i = 0; i < lanes; ++i) {
      paths.push_back({kPeerBytesPerSecond / lanes, 0.005 * (1 + i % 4)});
    }
    senders.push_back(std::make_unique<Sender>(&clock, shared ? &uplink : nullptr, std::move(paths),
                                               options, [&, p](uint64_t id) {
                                                 const Message message = open[p].at(id);
                                                 open[p].erase(id);
                                                 all.push_back(clock.now_s() - message.begin_s);
                                                 if (message.size == kSizes - 1)
                                                   largest.push_back(all.back());
                                               }));
  }
  // The same arrivals whatever the policy.
  const double capacity = shared ? uplink.bytes_per_s / peers : kPeerBytesPerSecond;
  for (int p = 0; p < peers; ++p) {
    std::mt19937_64 random(1000 + p);
    std::exponential_distribution<double> gap(load * capacity / mean_bytes);
    std::uniform_int_distribution<int> size(0, kSizes - 1);
    uint64_t id = 0;
    for (double at = gap(random); at < seconds; at += gap(random)) {
      const int index = size(random);
      clock.At(at, [&, p, index, id = ++id] {
        open[p][id] = {clock.now_s(), index};
        senders[p]->Send(id, SizeOf(index));
      });
    }
  }
  clock.Run(seconds * 100);
  StormResult result{Mean(all), Mean(largest), 0};
  for (const auto& sender : senders) {
    result.longest_wait_s = std::max(result.longest_wait_s, sender->longest_wait_s());
  }
  return result;
}

int RunStorm(int peers, int lanes, double seconds, double load, bool shared) {
  std::printf("%d peers of 100 MB/s over %d lanes%s, load %.2f, %.0f s\n", peers, lanes,
              shared ? ", one uplink of 100 MB/s for all" : "", load, seconds);
  std::printf("%-7s %12s %16s %14s\n", "", "mean (ms)", "64 MB (ms)", "longest wait");
  std::map<std::string, StormResult> results;
  for (const auto& [name, policy] :
       {std::pair("storm", SchedulePolicy::kStorm), std::pair("fifo", SchedulePolicy::kFifo),
        std::pair("fair", SchedulePolicy::kFair)}) {
    const StormResult result = Storm(policy, peers, lanes, seconds, load, shared);
    results[name] = result;
    std::printf("%-7s %12.1f %16.1f %12.2f s\n", name, 1e3 * result.mean_s, 1e3 * result.largest_s,
                result.longest_wait_s);
  }
  for (const char* other : {"fifo", "fair"}) {
    std::printf("storm against %s: mean %.2fx quicker, 64 MB messages %.2fx as long\n", other,
                results[other].mean_s / results["storm"].mean_s,
                results["storm"].largest_s / results[other].largest_s);
  }
  return 0;
}

// ---- PIN: 64 KB messages under bulk, over paths of unequal delay ----

struct PinResult {
  double mean_s, p99_s, bulk_bytes_per_s;
};

PinResult Pin(const Options& options, int lanes, double seconds, int peers) {
  constexpr double kPathBytesPerSecond = 12.5e6;
  Clock clock;
  std::vector<double> times;
  double bulk_bytes = 0;
  constexpr uint64_t kBulk = 64 << 20, kFirstBulkId = uint64_t{1} << 32;
  std::vector<std::unique_ptr<Sender>> senders(peers);
  std::vector<std::map<uint64_t, double>> open(peers);
  std::vector<uint64_t> next_bulk(peers, kFirstBulkId);
  for (int p = 0; p < peers; ++p) {
    std::vector<Path> paths;
    // 10, 30, 60 and 100 ms one way, in turn.
    for (int i = 0; i < lanes; ++i) {
      constexpr double kDelays[] = {0.01, 0.03, 0.06, 0.1};
      paths.push_back({kPathBytesPerSecond, kDelays[i % 4]});
    }
    senders[p] =
        std::make_unique<Sender>(&clock, nullptr, std::move(paths), options, [&, p](uint64_t id) {
          if (id >= kFirstBulkId) {
            if (clock.now_s() > seconds / 10) bulk_bytes += kBulk;
            senders[p]->Send(++next_bulk[p], kBulk);
          } else {
            if (clock.now_s() > seconds / 10) times.push_back(clock.now_s() - open[p].at(id));
            open[p].erase(id);
          }
        });
    for (int i = 0; i < 4; ++i) {
      clock.At(0, [&, p] { senders[p]->Send(++next_bulk[p], kBulk); });
    }
    std::mt19937_64 random(77 + p);
    std::exponential_distribution<double> gap(20);
    uint64_t id = 0;
    for (double at = gap(random); at < seconds; at += gap(random)) {
      clock.At(at, [&, p, id = ++id] {
        open[p][id] = clock.now_s();
        senders[p]->Send(id, 64 << 10);
      });
    }
  }
  clock.Run(seconds);
  return {Mean(times), Percentile(times, 0.99), bulk_bytes / (0.9 * seconds)};
}

int RunPin(int lanes, double seconds, int peers) {
  std::printf(
      "%d peer(s), %d paths of 100 Mbit/s, 10, 30, 60 and 100 ms one way; bulk of 64 MB "
      "messages, 64 KB messages at 20/s; %.0f s\n",
      peers, lanes, seconds);
  std::printf("%-28s %10s %10s %12s\n", "", "mean (ms)", "p99 (ms)", "bulk (MB/s)");
  Options pinned, sprayed, robin;
  sprayed.pin_bytes = robin.pin_bytes = 0;
  robin.balancer = Balancer::kRoundRobin;
  PinResult results[3];
  int at = 0;
  for (const auto& [name, options] :
       {std::pair("pin over rate-weighted", pinned), std::pair("spraying, rate-weighted", sprayed),
        std::pair("spraying, round-robin", robin)}) {
    const PinResult result = Pin(options, lanes, seconds, peers);
    results[at++] = result;
    std::printf("%-28s %10.1f %10.1f %12.2f\n", name, 1e3 * result.mean_s, 1e3 * result.p99_s,
                result.bulk_bytes_per_s / 1e6);
  }
  for (int i = 1; i < 3; ++i) {
    std::printf("pin against %s: mean %.2fx, p99 %.2fx quicker, bulk %.3f of it\n",
                i == 1 ? "rate-weighted" : "round-robin", results[i].mean_s / results[0].mean_s,
                results[i].p99_s / results[0].p99_s,
                results[0].bulk_bytes_per_s / results[i].bulk_bytes_per_s);
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  const auto number = [&](int index, double otherwise) {
    return count > index ? std::atof(arguments[index]) : otherwise;
  };
  const std::string what = count > 1 ? arguments[1] : "";
  if (what == "storm") {
    return RunStorm(static_cast<int>(number(2, 3)), static_cast<int>(number(3, 1)), number(4, 2000),
                    number(5, 0.8), number(6, 0) != 0);
  }
  if (what == "pin") {
    return RunPin(static_cast<int>(number(2, 4)), number(3, 200), static_cast<int>(number(4, 1)));
  }
  std::fprintf(stderr, "usage: transport_sim storm|pin [...]; see its first lines\n");
  return 2;
}
