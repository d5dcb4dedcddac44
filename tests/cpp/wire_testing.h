// Shared by the tests of wires: a recorder of a wire's events, a loop that runs wires until
// something holds, and processes of the test's own binary.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "transport/wire/sockets.h"
#include "transport/wire/wire.h"

namespace geomesh::transport {

inline std::string Bytes(absl::Span<const std::byte> span) {
  return {reinterpret_cast<const char*>(span.data()), span.size()};
}
inline absl::Span<const std::byte> Span(absl::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

struct Recorder : WireEvents {
  struct Segment {
    LaneId lane;
    std::string header, payload;
  };
  struct Accepted {
    LaneId lane;
    int index, lanes;
    std::string hello;
  };
  std::vector<LaneId> up;
  std::vector<Accepted> accepted;
  std::vector<Segment> segments;
  std::map<uint64_t, std::vector<absl::Status>> posted;  // by token
  std::map<uint32_t, std::vector<absl::Status>> lost;    // by lane
  std::function<bool(int index)> keep;
  // Replaces recording where a test has its own checks.
  std::function<void(LaneId, absl::Span<const std::byte>, absl::Span<const std::byte>)> on_segment;

  void OnLaneUp(LaneId lane) override { up.push_back(lane); }
  bool OnLaneAccepted(LaneId lane, int index, int lanes,
                      absl::Span<const std::byte> hello) override {
    accepted.push_back({lane, index, lanes, Bytes(hello)});
    return keep == nullptr || keep(index);
  }
  void OnSegment(LaneId lane, absl::Span<const std::byte> header,
                 absl::Span<const std::byte> payload) override {
    if (on_segment) return on_segment(lane, header, payload);
    segments.push_back({lane, Bytes(header), Bytes(payload)});
  }
  void OnPosted(LaneId, PostToken token, const absl::Status& status) override {
    posted[static_cast<uint64_t>(token)].push_back(status);
  }
  void OnLaneLost(LaneId lane, const absl::Status& reason) override {
    lost[static_cast<uint32_t>(lane)].push_back(reason);
  }
};

// A wire, its events and its blob.
struct WireEnd {
  Recorder events;
  std::unique_ptr<Wire> wire;
  absl::StatusOr<std::string> address = absl::UnknownError("not listening");

  explicit WireEnd(absl::StatusOr<std::unique_ptr<Wire>> made) {
    wire = *std::move(made);
    address = wire->Listen(&events);
  }
};

// Runs the wires until `done`; false if that takes longer than `limit`.
inline bool RunUntil(std::vector<Wire*> wires, const std::function<bool()>& done,
                     absl::Duration limit = absl::Seconds(20)) {
  const absl::Time end = absl::Now() + limit;
  while (!done()) {
    if (absl::Now() > end) return false;
    for (Wire* wire : wires) wire->Progress();
  }
  return true;
}

// This binary again, as `mode`, with a pipe to its stdin and one from its stdout. Killed and
// reaped at the end, with all the processes of its group. `through` are the words of a command
// that starts it ("ip netns exec x").
class Process {
 public:
  Process(absl::string_view mode, std::vector<std::string> arguments,
          std::vector<std::string> through = {}) {
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) abort();
    char self[4096] = {};
    if (readlink("/proc/self/exe", self, sizeof(self) - 1) < 0) abort();
    std::vector<std::string> words = std::move(through);
    words.insert(words.end(), {self, absl::StrCat("--as=", mode)});
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      setpgid(0, 0);
      dup2(in[0], 0);
      dup2(out[1], 1);
      execvp(argv[0], argv.data());
      _exit(127);
    }
    setpgid(pid_, pid_);
    close(in[0]);
    close(out[1]);
    to_ = in[1];
    from_ = out[0];
  }
  ~Process() {
    close(to_);
    close(from_);
    kill(-pid_, SIGKILL);
    kill(-pid_, SIGCONT);
    waitpid(pid_, nullptr, 0);
  }
  Process(const Process&) = delete;

  pid_t pid() const { return pid_; }
  void Kill(int signal) const { kill(pid_, signal); }

  // Blobs and words travel as lines of hex digits.
  void Tell(absl::string_view bytes) const { WriteLine(to_, bytes); }
  std::optional<std::string> Hear() { return ReadLine(from_); }

  static void WriteLine(int fd, absl::string_view bytes) {
    std::string line;
    for (unsigned char c : bytes) absl::StrAppend(&line, absl::Hex(c, absl::kZeroPad2));
    line.push_back('\n');
    if (write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size())) abort();
  }
  static std::optional<std::string> ReadLine(int fd) {
    std::string bytes, digits;
    char c;
    while (read(fd, &c, 1) == 1) {
      if (c == '\n') return bytes;
      digits.push_back(c);
      if (digits.size() == 2) {
        bytes.push_back(static_cast<char>(std::stoi(digits, nullptr, 16)));
        digits.clear();
      }
    }
    return std::nullopt;
  }

 private:
  pid_t pid_ = -1;
  int to_ = -1, from_ = -1;
};

// What the other process mostly does: listens, tells its address (or "error: ..."), says "accepted"
// when all lanes of a dial are there, echoes segments, until it is killed.
inline int RunAcceptor(WireEnd& end, const std::function<void()>& after_accept) {
  if (!end.address.ok()) {
    Process::WriteLine(1, absl::StrCat("error: ", end.address.status().ToString()));
    return 1;
  }
  Process::WriteLine(1, *end.address);
  std::vector<std::unique_ptr<std::string>> echoes;
  end.events.on_segment = [&](LaneId lane, absl::Span<const std::byte> header,
                              absl::Span<const std::byte> payload) {
    echoes.push_back(std::make_unique<std::string>(Bytes(payload)));
    (void)end.wire->Post(lane, header, Span(*echoes.back()), PostToken{0});
  };
  size_t told = 0;
  for (;;) {
    if (end.wire->Progress() == 0 && end.wire->Arm()) {
      pollfd p = {end.wire->fd(), POLLIN, 0};
      poll(&p, 1, 100);
    }
    const auto& accepted = end.events.accepted;
    if (accepted.size() > told && accepted.back().index == accepted.back().lanes - 1) {
      told = accepted.size();
      after_accept();
      Process::WriteLine(1, "accepted");
    }
  }
}

// Bytes to send and compare.
inline std::string Pattern(size_t size, uint64_t seed) {
  std::string bytes(size, '\0');
  uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  for (char& c : bytes) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    c = static_cast<char>(state >> 32);
  }
  return bytes;
}

inline int CountSockets() {
  int count = 0;
  ForEachTcpSocket([&](const SocketInfo&) { ++count; });
  return count;
}

// Two wires; `a` dials `b` with `lanes` lanes. Lane i is `dialled + i` at a, accepted[i] at b.
template <typename End>
struct WirePair {
  End a, b;
  LaneId dialled{};

  bool Connect(int lanes, absl::string_view hello = "hello") {
    EXPECT_TRUE(a.address.ok()) << a.address.status();
    EXPECT_TRUE(b.address.ok()) << b.address.status();
    auto first = a.wire->Dial(*b.address, "rank 1", lanes, Span(hello));
    EXPECT_TRUE(first.ok()) << first.status();
    if (!first.ok()) return false;
    dialled = *first;
    const size_t up = a.events.up.size() + lanes, accepted = b.events.accepted.size() + lanes;
    return Run([&] { return a.events.up.size() == up && b.events.accepted.size() == accepted; });
  }
  LaneId Lane(int i) const { return LaneId{static_cast<uint32_t>(dialled) + i}; }
  bool Run(const std::function<bool()>& done, absl::Duration limit = absl::Seconds(20)) {
    return RunUntil({a.wire.get(), b.wire.get()}, done, limit);
  }
};

}  // namespace geomesh::transport
