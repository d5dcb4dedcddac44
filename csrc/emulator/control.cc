#include "emulator/control.h"

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

namespace geomesh::emulator {
namespace {

constexpr size_t kMaxLineBytes = 64 * 1024;
constexpr int kKillDeadlineMs = 10'000;
constexpr int kMaxNamespaces = 5;
// Below this a queue could not hold one segment at the usual MTU.
constexpr double kMinQueueBytes = 2000;

absl::StatusOr<sockaddr_un> SocketAddress(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("the control socket's path is longer than ",
                                                   sizeof(address.sun_path) - 1, " bytes: ", path));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

// Replies are short and clients read them at once; one that does not is not waited for.
void SendLine(int fd, std::string line) {
  line += '\n';
  (void)send(fd, line.data(), line.size(), MSG_NOSIGNAL);
}

std::string Failure(const absl::Status& status) {
  return absl::StrCat("{\"ok\": false, \"error\": ", JsonString(status.message()), "}");
}

absl::Status SetNumber(PathSettings& path, absl::string_view key, absl::string_view text) {
  double value = 0;
  if (!absl::SimpleAtod(text, &value) || !std::isfinite(value) || value < 0) {
    return absl::InvalidArgumentError(absl::StrCat(key, " is not a number >= 0: ", text));
  }
  if (key == "bytes_per_s" && value > 0) {
    path.bytes_per_s = value;
  } else if (key == "delay_s" && value <= 60) {
    path.delay_ns = std::llround(value * 1e9);
  } else if (key == "jitter_s" && value <= 60) {
    path.jitter_ns = std::llround(value * 1e9);
  } else if (key == "loss" && value <= 1) {
    path.loss = value;
  } else if (key == "queue_bytes" && value >= kMinQueueBytes) {
    path.queue_bytes = std::llround(std::min(value, 1e15));
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown key or value out of range: ", key, "=", text));
  }
  return absl::OkStatus();
}

std::string TallyFields(absl::string_view prefix, const Tally& tally) {
  return absl::StrFormat("\"%sbytes\": %d, \"%spackets\": %d", prefix, tally.bytes, prefix,
                         tally.packets);
}

std::string CounterFields(const PathCounters& counters) {
  return absl::StrCat(TallyFields("", counters.sent), ", ", TallyFields("lost_", counters.lost),
                      ", ", TallyFields("queue_dropped_", counters.dropped));
}

}  // namespace

std::string JsonString(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&out, "\\u%04x", c);
    } else {
      out += c;
    }
  }
  return out + "\"";
}

absl::Status Control::Listen(const std::string& path) {
  GM_ASSIGN_OR_RETURN(const sockaddr_un address, SocketAddress(path));
  listener_ = Fd(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!listener_.valid()) return SystemError("opening the control socket", errno);
  if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(listener_.get(), 16) != 0) {
    return SystemError(absl::StrCat("listening at ", path), errno);
  }
  return forwarder_.Watch(listener_.get(), [this] { Accept(); });
}

void Control::Accept() {
  Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!fd.valid()) return;
  const int number = fd.get();
  if (!forwarder_.Watch(number, [this, number] { Read(number); }).ok()) return;
  clients_[number] = Client{std::move(fd), ""};
}

void Control::Read(int fd) {
  Client& client = clients_[fd];
  char buffer[4096];
  const ssize_t size = recv(fd, buffer, sizeof(buffer), 0);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (size > 0) client.input.append(buffer, static_cast<size_t>(size));
  if (size <= 0 || client.input.size() > kMaxLineBytes) {
    forwarder_.Unwatch(fd);
    clients_.erase(fd);
    return;
  }
  size_t end;
  while ((end = client.input.find('\n')) != std::string::npos) {
    const std::string line = client.input.substr(0, end);
    client.input.erase(0, end + 1);
    if (absl::string_view rest = line; absl::ConsumePrefix(&rest, "enter ")) {
      const absl::Status sent = SendNamespaces(fd, rest);
      if (!sent.ok()) SendLine(fd, Failure(sent));
    } else {
      SendLine(fd, Answer(line));
    }
  }
}

absl::Status Control::SendNamespaces(int fd, absl::string_view name) {
  const int index = forwarder_.Find(std::string(name));
  if (index < 0) return absl::NotFoundError(absl::StrCat("no region named ", name));
  const Region& region = forwarder_.regions()[index];
  std::vector<int> fds = {region.net.get(), region.uts.get(), region.ipc.get(), region.mnt.get()};
  if (user_namespace_.valid()) fds.push_back(user_namespace_.get());
  char ok[] = "{\"ok\": true}\n";
  iovec part = {ok, sizeof(ok) - 1};
  alignas(cmsghdr) char space[CMSG_SPACE(kMaxNamespaces * sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = space;
  message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  if (sendmsg(fd, &message, MSG_NOSIGNAL) < 0) return SystemError("sending namespaces", errno);
  return absl::OkStatus();
}

std::string Control::Answer(absl::string_view line) {
  const absl::StatusOr<std::string> fields = Execute(line);
  if (!fields.ok()) return Failure(fields.status());
  return absl::StrCat("{\"ok\": true", fields->empty() ? "" : ", ", *fields, "}");
}

absl::StatusOr<std::string> Control::Execute(absl::string_view line) {
  const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
  if (words.empty()) return absl::InvalidArgumentError("empty command");
  const std::string& command = words[0];
  if (command == "link") {
    GM_RETURN_IF_ERROR(SetLink(words));
    return "";
  }
  if (command == "cut" || command == "restore") {
    if (words.size() != 3) return absl::InvalidArgumentError(command + " takes FROM and TO");
    GM_ASSIGN_OR_RETURN(Link * link, FindLink(words[1], words[2]));
    if (command == "cut") {
      link->Cut(NowNs());
    } else {
      link->Restore();
    }
    return "";
  }
  if (words.size() != 1)
    return absl::InvalidArgumentError("unknown command or arguments: " + command);
  if (command == "counters") return Counters();
  if (command == "status") return StatusFields();
  if (command == "reset") {
    forwarder_.ResetCounters();
    return "";
  }
  if (command == "kill") {
    return absl::StrCat("\"left\": ", KillProcesses(forwarder_.regions(), kKillDeadlineMs));
  }
  if (command == "quit") {
    forwarder_.Stop();
    return "";
  }
  return absl::InvalidArgumentError("unknown command: " + command);
}

absl::StatusOr<Link*> Control::FindLink(absl::string_view from, absl::string_view to) {
  const int a = forwarder_.Find(std::string(from));
  const int b = forwarder_.Find(std::string(to));
  if (a < 0 || b < 0) {
    return absl::NotFoundError(absl::StrCat("no region named ", a < 0 ? from : to));
  }
  if (a == b) return absl::InvalidArgumentError(absl::StrCat(from, " has no link to itself"));
  return &forwarder_.link(a, b);
}

absl::Status Control::SetLink(const std::vector<std::string>& words) {
  if (words.size() < 4 || words[3] != "path") {
    return absl::InvalidArgumentError("link takes FROM TO path key=value...");
  }
  GM_ASSIGN_OR_RETURN(Link * link, FindLink(words[1], words[2]));
  std::vector<PathSettings> paths;
  for (size_t i = 3; i < words.size(); ++i) {
    if (words[i] == "path") {
      paths.emplace_back();
      continue;
    }
    const std::pair<std::string, std::string> item =
        absl::StrSplit(words[i], absl::MaxSplits('=', 1));
    GM_RETURN_IF_ERROR(SetNumber(paths.back(), item.first, item.second));
  }
  for (const PathSettings& path : paths) {
    if (path.bytes_per_s <= 0 || path.queue_bytes <= 0) {
      return absl::InvalidArgumentError("a path needs bytes_per_s and queue_bytes");
    }
  }
  // Different dice for each link, the same in each run.
  const uint64_t seed = seed_ * 0x9e3779b97f4a7c15ULL +
                        1000 * static_cast<uint64_t>(forwarder_.Find(words[1]) * kMaxRegions +
                                                     forwarder_.Find(words[2]));
  link->Configure(paths, seed, NowNs());
  return absl::OkStatus();
}

std::string Control::Counters() {
  std::vector<std::string> pairs;
  const std::vector<Region>& regions = forwarder_.regions();
  const int64_t now_ns = NowNs();
  for (size_t from = 0; from < regions.size(); ++from) {
    for (size_t to = 0; to < regions.size(); ++to) {
      if (from == to) continue;
      const Link& link = forwarder_.link(static_cast<int>(from), static_cast<int>(to));
      std::vector<std::string> paths;
      int64_t backlog = 0;
      for (const auto& path : link.paths()) {
        paths.push_back(absl::StrCat("{", CounterFields(path->counters()), "}"));
        backlog += path->BacklogBytes(now_ns);
      }
      pairs.push_back(absl::StrCat(
          "{\"from\": ", JsonString(regions[from].name), ", \"to\": ", JsonString(regions[to].name),
          ", ", CounterFields(link.Counters()), ", ", TallyFields("cut_dropped_", link.cut_drops()),
          ", \"backlog_bytes\": ", backlog, ", \"cut\": ", link.is_cut() ? "true" : "false",
          ", \"paths\": [", absl::StrJoin(paths, ", "), "]}"));
    }
  }
  return absl::StrCat("\"pairs\": [", absl::StrJoin(pairs, ", "), "]");
}

std::string Control::StatusFields() {
  const LatenessHistogram& lateness = forwarder_.lateness();
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return t.tv_sec + t.tv_usec * 1e-6; };
  return absl::StrFormat(
      "\"deliveries\": %d, \"lateness_p50_s\": %.9f, \"lateness_p99_s\": %.9f, "
      "\"lateness_max_s\": %.9f, \"device_drops\": %d, \"undelivered\": %d, \"unroutable\": %d, "
      "\"cpu_s\": %.6f, \"realtime\": %s",
      lateness.count(), lateness.Quantile(0.5) * 1e-9, lateness.Quantile(0.99) * 1e-9,
      lateness.max_ns() * 1e-9, forwarder_.device_drops(), forwarder_.undelivered(),
      forwarder_.unroutable(), seconds(usage.ru_utime) + seconds(usage.ru_stime),
      realtime_ ? "true" : "false");
}

absl::Status EnterRegion(const std::string& path, const std::string& region) {
  GM_ASSIGN_OR_RETURN(const sockaddr_un address, SocketAddress(path));
  Fd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return SystemError("opening a socket", errno);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return SystemError(absl::StrCat("connecting to geomesh-wan at ", path), errno);
  }
  SendLine(fd.get(), absl::StrCat("enter ", region));
  char reply[4096];
  iovec part = {reply, sizeof(reply)};
  alignas(cmsghdr) char space[CMSG_SPACE(kMaxNamespaces * sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = space;
  message.msg_controllen = sizeof(space);
  const ssize_t size = recvmsg(fd.get(), &message, MSG_CMSG_CLOEXEC);
  if (size <= 0) return SystemError("reading geomesh-wan's reply", size < 0 ? errno : ECONNRESET);
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) {
    return absl::NotFoundError(
        absl::StrCat("geomesh-wan answered ", absl::string_view(reply, size)));
  }
  const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
  int numbers[kMaxNamespaces];
  std::memcpy(numbers, CMSG_DATA(header), count * sizeof(int));
  std::vector<Fd> fds;
  for (size_t i = 0; i < count; ++i) fds.emplace_back(numbers[i]);
  if (count < 4) return absl::InternalError("geomesh-wan sent too few namespaces");
  const Fd none;
  return Enter(count > 4 ? fds[4] : none, fds[0], fds[1], fds[2], fds[3]);
}

}  // namespace geomesh::emulator
