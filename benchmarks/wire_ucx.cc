// What one UCX lane carries between two processes over loopback: 256 KB segments, a bounded number
// outstanding, the receiver copying each into place, as the engine would.
//
//   wire_ucx [seconds=2] [repeats=5] [lanes=1] [outstanding=16]
//
// Prints Gbit/s and, per side, Gbit moved per second of CPU time; minimum, median and maximum over
// the repeats. Knows the wire and nothing above it.
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "transport/wire/ucx.h"

namespace {

using namespace geomesh::transport;

double CpuSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return absl::ToDoubleSeconds(absl::DurationFromTimeval(usage.ru_utime) +
                               absl::DurationFromTimeval(usage.ru_stime));
}

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "wire_ucx: %s\n", status.ToString().c_str());
  std::exit(1);
}

// Progress once, or sleep until there is something to do (at most 100 ms).
void RunOnce(Wire& wire) {
  if (wire.Progress() != 0 || !wire.Arm()) return;
  pollfd descriptor = {wire.fd(), POLLIN, 0};
  poll(&descriptor, 1, 100);
}

struct Receiver : WireEvents {
  std::vector<std::byte> buffer = std::vector<std::byte>(64 << 20);
  size_t at = 0;
  uint64_t bytes = 0;
  size_t lost = 0, lanes = 0;

  void OnLaneUp(LaneId) override {}
  bool OnLaneAccepted(LaneId, int, int count, absl::Span<const std::byte>) override {
    lanes = count;
    return true;
  }
  void OnSegment(LaneId, absl::Span<const std::byte>,
                 absl::Span<const std::byte> payload) override {
    if (at + payload.size() > buffer.size()) at = 0;
    std::memcpy(buffer.data() + at, payload.data(), payload.size());
    at += payload.size();
    bytes += payload.size();
  }
  void OnPosted(LaneId, PostToken, const absl::Status&) override {}
  void OnLaneLost(LaneId, const absl::Status&) override { ++lost; }
};

struct Sender : WireEvents {
  size_t up = 0;
  std::vector<uint32_t> free_lanes;  // one entry a slot
  uint64_t posted_bytes = 0;

  void OnLaneUp(LaneId) override { ++up; }
  bool OnLaneAccepted(LaneId, int, int, absl::Span<const std::byte>) override { return false; }
  void OnSegment(LaneId, absl::Span<const std::byte>, absl::Span<const std::byte>) override {}
  void OnPosted(LaneId lane, PostToken, const absl::Status& status) override {
    Check(status);
    posted_bytes += kMaxSegmentPayloadBytes;
    free_lanes.push_back(static_cast<uint32_t>(lane));
  }
  void OnLaneLost(LaneId, const absl::Status& reason) override { Check(reason); }
};

std::unique_ptr<Wire> MakeWire() {
  UcxWireOptions options;
  options.device.interface = "lo";
  auto wire = MakeUcxWire(options);
  Check(wire.status());
  return *std::move(wire);
}

// Bytes received and CPU time used, over a pipe, when the lanes are gone.
void RunReceiver(int out) {
  Receiver events;
  auto wire = MakeWire();
  auto address = wire->Listen(&events);
  Check(address.status());
  const uint32_t size = address->size();
  if (write(out, &size, sizeof(size)) < 0 || write(out, address->data(), size) < 0) return;
  double cpu = 0;
  while (events.lanes == 0 || events.lost < events.lanes) {
    if (cpu == 0 && events.bytes > 0) cpu = CpuSeconds();
    RunOnce(*wire);
  }
  const double result[2] = {static_cast<double>(events.bytes), CpuSeconds() - cpu};
  if (write(out, result, sizeof(result)) < 0) return;
}

void Read(int fd, void* out, size_t size) {
  auto* at = static_cast<char*>(out);
  while (size > 0) {
    const ssize_t got = read(fd, at, size);
    if (got <= 0) std::exit(1);
    at += got;
    size -= got;
  }
}

struct Figures {
  double gbit_per_s, sender_gbit_per_cpu_s, receiver_gbit_per_cpu_s;
};

Figures Measure(double seconds, int lanes, int outstanding) {
  int pipe_ends[2];
  if (pipe2(pipe_ends, O_CLOEXEC) != 0) std::exit(1);
  const pid_t child = fork();
  if (child == 0) {
    RunReceiver(pipe_ends[1]);
    _exit(0);
  }
  close(pipe_ends[1]);
  uint32_t size = 0;
  Read(pipe_ends[0], &size, sizeof(size));
  std::string address(size, '\0');
  Read(pipe_ends[0], address.data(), size);

  Sender events;
  auto wire = MakeWire();
  Check(wire->Listen(&events).status());
  auto first = wire->Dial(address, "receiver", lanes, {});
  Check(first.status());
  while (events.up < lanes) RunOnce(*wire);

  std::vector<std::byte> source(64 << 20, std::byte{0x5a});
  const std::byte header[64] = {};
  for (int i = 0; i < outstanding; ++i) {
    for (int lane = 0; lane < lanes; ++lane) {
      events.free_lanes.push_back(static_cast<uint32_t>(*first) + lane);
    }
  }
  size_t at = 0;
  const double cpu = CpuSeconds();
  const absl::Time start = absl::Now();
  while (absl::Now() - start < absl::Seconds(seconds)) {
    while (!events.free_lanes.empty()) {
      const LaneId lane{events.free_lanes.back()};
      events.free_lanes.pop_back();
      if (at + kMaxSegmentPayloadBytes > source.size()) at = 0;
      Check(wire->Post(lane, header, {source.data() + at, kMaxSegmentPayloadBytes}, PostToken{0}));
      at += kMaxSegmentPayloadBytes;
    }
    RunOnce(*wire);
  }
  const double elapsed = absl::ToDoubleSeconds(absl::Now() - start);
  const double sender_cpu = CpuSeconds() - cpu;
  const double sent = events.posted_bytes;
  wire.reset();
  double received[2];
  Read(pipe_ends[0], received, sizeof(received));
  close(pipe_ends[0]);
  waitpid(child, nullptr, 0);
  return {sent * 8e-9 / elapsed, sent * 8e-9 / sender_cpu, received[0] * 8e-9 / received[1]};
}

}  // namespace

int main(int argc, char** argv) {
  // Read by UCX when it is loaded: set, and start again.
  if (std::getenv("UCX_MEM_EVENTS") == nullptr) {
    setenv("UCX_MEM_EVENTS", "n", 1);
    setenv("UCX_DEBUG_SIGNO", "0", 1);
    execv("/proc/self/exe", argv);
  }
  auto argument = [&](int i, double otherwise) {
    return argc > i ? std::atof(argv[i]) : otherwise;
  };
  const double seconds = argument(1, 2);
  const int repeats = argument(2, 5), lanes = argument(3, 1), outstanding = argument(4, 16);
  std::vector<Figures> all;
  Measure(0.3, lanes, outstanding);  // warm-up
  for (int i = 0; i < repeats; ++i) all.push_back(Measure(seconds, lanes, outstanding));
  std::printf("%d lane(s), %zu KB segments, %d outstanding a lane, %d x %.1f s\n", lanes,
              kMaxSegmentPayloadBytes >> 10, outstanding, repeats, seconds);
  auto print = [&](const char* name, double Figures::*field) {
    std::vector<double> values;
    for (const Figures& f : all) values.push_back(f.*field);
    std::sort(values.begin(), values.end());
    std::printf("%-28s min %6.2f  median %6.2f  max %6.2f\n", name, values.front(),
                values[values.size() / 2], values.back());
  };
  print("Gbit/s", &Figures::gbit_per_s);
  print("Gbit per CPU s, sender", &Figures::sender_gbit_per_cpu_s);
  print("Gbit per CPU s, receiver", &Figures::receiver_gbit_per_cpu_s);
}
