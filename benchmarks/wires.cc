// What one lane of wire/ucx and of wire/tls carries between two processes: 256 KB segments, a
// bounded number outstanding, the receiver copying each into place, as the engine would. The two
// alternate in one run; `openssl speed` is measured beside them.
//
//   wires [seconds=2] [repeats=5] [lanes=1] [outstanding=16] [place=loopback|namespaces]
//
// Prints Gbit/s and, per side, Gbit moved per second of CPU time; minimum, median and maximum over
// the repeats. `namespaces` (as root) puts the two into network namespaces of their own, joined by
// a veth pair. Knows the wires and nothing above them.
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/mount.h>
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

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "transport/wire/tls.h"
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
  std::fprintf(stderr, "wires: %s\n", status.ToString().c_str());
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

// Where the two processes are.
struct Place {
  std::string sender_namespace, receiver_namespace;  // empty: this one, over loopback
  std::string key_file;
};

// Into a namespace, with its own /sys: UCX looks for devices there.
void Enter(const std::string& name) {
  if (name.empty()) return;
  const int fd = open(absl::StrCat("/run/netns/", name).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0 || setns(fd, CLONE_NEWNET) != 0 || unshare(CLONE_NEWNS) != 0 ||
      mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("sysfs", "/sys", "sysfs", 0, nullptr) != 0) {
    std::perror("entering a namespace");
    _exit(1);
  }
}

std::unique_ptr<Wire> MakeWire(const std::string& name, const Place& place) {
  DeviceOptions device;
  device.interface = place.sender_namespace.empty() ? "lo" : "veth0";
  absl::StatusOr<std::unique_ptr<Wire>> wire;
  if (name == "tls") {
    TlsWireOptions options;
    options.device = device;
    options.keys.psk = place.key_file;
    wire = MakeTlsWire(options);
  } else {
    UcxWireOptions options;
    options.device = device;
    wire = MakeUcxWire(options);
  }
  Check(wire.status());
  return *std::move(wire);
}

// Bytes received and CPU time used, over a pipe, when the lanes are gone.
void RunReceiver(const std::string& name, const Place& place, int out) {
  Enter(place.receiver_namespace);
  Receiver events;
  auto wire = MakeWire(name, place);
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

// Sends for `seconds`; the bytes posted, the time taken and the CPU time used, over a pipe.
void RunSender(const std::string& name, const Place& place, const std::string& address,
               double seconds, int lanes, int outstanding, int out) {
  Enter(place.sender_namespace);
  Sender events;
  auto wire = MakeWire(name, place);
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
  const double result[3] = {static_cast<double>(events.posted_bytes),
                            absl::ToDoubleSeconds(absl::Now() - start), CpuSeconds() - cpu};
  wire.reset();
  if (write(out, result, sizeof(result)) < 0) return;
}

// A process of this one's own that runs `work` with the writing end of a pipe; its reading end.
template <typename Work>
int Spawn(pid_t* child, Work work) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) std::exit(1);
  *child = fork();
  if (*child == 0) {
    work(ends[1]);
    _exit(0);
  }
  close(ends[1]);
  return ends[0];
}

Figures Measure(const std::string& name, const Place& place, double seconds, int lanes,
                int outstanding) {
  pid_t receiver = 0, sender = 0;
  const int from_receiver = Spawn(&receiver, [&](int out) { RunReceiver(name, place, out); });
  uint32_t size = 0;
  Read(from_receiver, &size, sizeof(size));
  std::string address(size, '\0');
  Read(from_receiver, address.data(), size);
  const int from_sender = Spawn(
      &sender, [&](int out) { RunSender(name, place, address, seconds, lanes, outstanding, out); });
  double sent[3], received[2];
  Read(from_sender, sent, sizeof(sent));
  Read(from_receiver, received, sizeof(received));
  for (const int fd : {from_sender, from_receiver}) close(fd);
  for (const pid_t child : {sender, receiver}) waitpid(child, nullptr, 0);
  return {sent[0] * 8e-9 / sent[1], sent[0] * 8e-9 / sent[2], received[0] * 8e-9 / received[1]};
}

bool Shell(const std::string& command) { return std::system(command.c_str()) == 0; }

// Two namespaces with a veth pair between them, for as long as this lives.
class Namespaces {
 public:
  Namespaces() {
    const std::string a = name("a"), b = name("b");
    if (!Shell(absl::StrCat("set -e; ip netns add ", a, "; ip netns add ", b, "; ip -n ", a,
                            " link add veth0 type veth peer name veth0 netns ", b, "; ip -n ", a,
                            " addr add 10.211.0.1/24 dev veth0; ip -n ", b,
                            " addr add 10.211.0.2/24 dev veth0; ip -n ", a,
                            " link set veth0 up; ip -n ", b, " link set veth0 up; ",
                            // The kernel takes a moment to call a device running.
                            "for n in ", a, " ", b,
                            "; do timeout 5 sh -c \"until ip -n $n link show veth0 | "
                            "grep -q 'state UP'; do sleep 0.02; done\"; done"))) {
      std::fprintf(stderr, "wires: namespaces need root and iproute2\n");
      failed_ = true;
    }
  }
  ~Namespaces() {
    if (getpid() != owner_) return;
    for (const char* side : {"a", "b"}) (void)Shell(absl::StrCat("ip netns del ", name(side)));
  }
  bool failed() const { return failed_; }
  std::string name(const char* side) const { return absl::StrCat("gm-wires-", getpid(), side); }

 private:
  const pid_t owner_ = getpid();
  bool failed_ = false;
};

double OpensslGbit() {
  FILE* pipe = popen("openssl speed -evp aes-128-gcm -bytes 16384 -seconds 1 2>/dev/null", "r");
  double kilobytes = 0;
  char line[256];
  while (pipe != nullptr && std::fgets(line, sizeof(line), pipe) != nullptr) {
    std::sscanf(line, "AES-128-GCM %lf", &kilobytes);
  }
  if (pipe != nullptr) pclose(pipe);
  return kilobytes * 8e-6;
}

double Print(const char* what, const std::vector<Figures>& all, double Figures::*field) {
  std::vector<double> values;
  for (const Figures& f : all) values.push_back(f.*field);
  std::sort(values.begin(), values.end());
  const double median = values[values.size() / 2];
  std::printf("  %-26s min %6.2f  median %6.2f  max %6.2f\n", what, values.front(), median,
              values.back());
  return median;
}

int Run(const Place& place, double seconds, int repeats, int lanes, int outstanding) {
  const char* names[] = {"ucx", "tls"};
  std::vector<Figures> all[2];
  for (int i = -1; i < repeats; ++i) {  // the first is a warm-up
    for (int side = 0; side < 2; ++side) {
      const Figures f = Measure(names[side], place, i < 0 ? 0.3 : seconds, lanes, outstanding);
      if (i >= 0) all[side].push_back(f);
    }
  }
  std::printf("%s, %d lane(s), %zu KB segments, %d outstanding a lane, %d x %.1f s each in turn\n",
              place.sender_namespace.empty() ? "loopback" : "veth between namespaces", lanes,
              kMaxSegmentPayloadBytes >> 10, outstanding, repeats, seconds);
  double rate[2];
  for (int side = 0; side < 2; ++side) {
    std::printf("wire/%s\n", names[side]);
    rate[side] = Print("Gbit/s", all[side], &Figures::gbit_per_s);
    Print("Gbit per CPU s, sender", all[side], &Figures::sender_gbit_per_cpu_s);
    Print("Gbit per CPU s, receiver", all[side], &Figures::receiver_gbit_per_cpu_s);
  }
  const double openssl = OpensslGbit();
  std::printf("tls / ucx %.2f; openssl speed, aes-128-gcm, 16 KB: %.1f Gbit/s, tls / that %.2f\n",
              rate[1] / rate[0], openssl, rate[1] / openssl);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  // Read by UCX when it is loaded: set, and start again.
  if (std::getenv("UCX_MEM_EVENTS") == nullptr) {
    setenv("UCX_MEM_EVENTS", "n", 1);
    setenv("UCX_DEBUG_SIGNO", "0", 1);
    setenv("UCX_HANDLE_ERRORS", "none", 1);
    execv("/proc/self/exe", argv);
  }
  auto argument = [&](int i, double otherwise) {
    return argc > i ? std::atof(argv[i]) : otherwise;
  };
  Place place;
  char key_file[] = "/tmp/geomesh-wires-XXXXXX";
  const int fd = mkstemp(key_file);
  const std::string key = "1f2e3d4c5b6a79881f2e3d4c5b6a79881f2e3d4c5b6a79881f2e3d4c5b6a7988\n";
  if (fd < 0 || write(fd, key.data(), key.size()) < 0) return 1;
  close(fd);
  place.key_file = key_file;
  static std::unique_ptr<Namespaces> namespaces;  // gone also where a failure ends the program
  if (argc > 5 && std::string(argv[5]) == "namespaces") {
    namespaces = std::make_unique<Namespaces>();
    place.sender_namespace = namespaces->name("a");
    place.receiver_namespace = namespaces->name("b");
  }
  const bool ready = namespaces == nullptr || !namespaces->failed();
  const int result = ready
                         ? Run(place, argument(1, 2), static_cast<int>(argument(2, 5)),
                               static_cast<int>(argument(3, 1)), static_cast<int>(argument(4, 16)))
                         : 1;
  unlink(key_file);
  return result;
}
