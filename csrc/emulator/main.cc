// geomesh-wan: the process behind `geomesh emulate`. Two ways to call it, both by
// torch_geomesh/emulate.py:
//
//   geomesh-wan run --parent PID --folder DIR --region NAME... --tcp-buffer BYTES [--seed N]
//               [--ipv6]
//       Makes the regions, prints one line of JSON, and carries packets until told to quit (over
//       the socket DIR/control) or until the parent process ends. Then ends every process inside
//       the regions and removes DIR, which was made for this run. DIR/hosts, where it exists, is
//       the regions' /etc/hosts.
//   geomesh-wan enter SOCKET REGION COMMAND...
//       Becomes COMMAND inside the region.
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "emulator/control.h"
#include "emulator/forwarder.h"
#include "emulator/region.h"

namespace geomesh::emulator {
namespace {

constexpr int kKillDeadlineMs = 10'000;

struct Arguments {
  pid_t parent = 0;
  std::string folder;
  std::vector<std::string> regions;
  RegionOptions region;
  uint64_t seed = 1;
};

absl::StatusOr<Arguments> ParseArguments(const std::vector<std::string>& words) {
  Arguments arguments;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& name = words[i];
    if (name == "--ipv6") {
      arguments.region.ipv6 = true;
      continue;
    }
    if (i + 1 == words.size()) return absl::InvalidArgumentError(name + " needs a value");
    const std::string& value = words[++i];
    bool good = true;
    if (name == "--parent") {
      good = absl::SimpleAtoi(value, &arguments.parent);
    } else if (name == "--folder") {
      arguments.folder = value;
    } else if (name == "--region") {
      arguments.regions.push_back(value);
    } else if (name == "--tcp-buffer") {
      good = absl::SimpleAtoi(value, &arguments.region.tcp_buffer_bytes);
    } else if (name == "--seed") {
      good = absl::SimpleAtoi(value, &arguments.seed);
    } else {
      return absl::InvalidArgumentError("unknown argument " + name);
    }
    if (!good) return absl::InvalidArgumentError(absl::StrCat(name, " is not a number: ", value));
  }
  if (arguments.parent <= 0 || arguments.folder.empty() || arguments.regions.empty() ||
      arguments.region.tcp_buffer_bytes <= 0) {
    return absl::InvalidArgumentError("needs --parent, --folder, --tcp-buffer and --region");
  }
  if (arguments.regions.size() > kMaxRegions) {
    return absl::InvalidArgumentError(absl::StrCat("at most ", kMaxRegions, " regions"));
  }
  if (const std::string hosts = arguments.folder + "/hosts"; access(hosts.c_str(), R_OK) == 0) {
    arguments.region.hosts_file = hosts;
  }
  return arguments;
}

// Real-time scheduling keeps deliveries punctual while the regions' processes use all cores.
bool UseRealtime() {
  sched_param parameter = {};
  parameter.sched_priority = 1;
  if (sched_setscheduler(0, SCHED_RR | SCHED_RESET_ON_FORK, &parameter) == 0) return true;
  (void)setpriority(PRIO_PROCESS, 0, -20);
  prctl(PR_SET_TIMERSLACK, 1);
  return false;
}

absl::Status Run(const Arguments& arguments) {
  // The parent may be gone before its descriptor is opened: then this process was inherited.
  Fd parent(static_cast<int>(syscall(SYS_pidfd_open, arguments.parent, 0)));
  if (!parent.valid()) return SystemError("watching the parent process", errno);
  if (getppid() != arguments.parent) return absl::AbortedError("the parent process has ended");

  sigset_t ending;
  sigemptyset(&ending);
  sigaddset(&ending, SIGTERM);
  sigaddset(&ending, SIGINT);
  sigprocmask(SIG_BLOCK, &ending, nullptr);
  Fd signals(signalfd(-1, &ending, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals.valid()) return SystemError("signalfd", errno);

  const bool realtime = UseRealtime();
  Fd user_namespace;
  GM_ASSIGN_OR_RETURN(std::vector<Region> regions,
                      CreateRegions(arguments.regions, arguments.region, &user_namespace));
  std::string inodes, warning;
  for (const Region& region : regions) {
    absl::StrAppend(&inodes, inodes.empty() ? "" : ", ", region.net_inode);
    if (!region.sys_mounted) warning = "/sys inside the regions shows the host's devices";
  }
  Forwarder forwarder(std::move(regions));
  Control control(forwarder, user_namespace, arguments.seed, realtime);
  GM_RETURN_IF_ERROR(forwarder.Start());
  GM_RETURN_IF_ERROR(control.Listen(arguments.folder + "/control"));
  GM_RETURN_IF_ERROR(forwarder.Watch(parent.get(), [&] { forwarder.Stop(); }));
  GM_RETURN_IF_ERROR(forwarder.Watch(signals.get(), [&] { forwarder.Stop(); }));

  std::printf(
      "{\"ok\": true, \"net_inodes\": [%s], \"user_namespace\": %s, \"realtime\": %s, "
      "\"warning\": %s}\n",
      inodes.c_str(), user_namespace.valid() ? "true" : "false", realtime ? "true" : "false",
      JsonString(warning).c_str());
  std::fflush(stdout);

  const absl::Status ran = forwarder.Run();
  const int left = KillProcesses(forwarder.regions(), kKillDeadlineMs);
  std::error_code ignored;
  std::filesystem::remove_all(arguments.folder, ignored);
  if (ran.ok() && left > 0) {
    return absl::InternalError(absl::StrCat(left, " processes in the regions cannot be killed"));
  }
  return ran;
}

int Main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() >= 4 && words[0] == "enter") {
    if (const absl::Status entered = EnterRegion(words[1], words[2]); !entered.ok()) {
      std::fprintf(stderr, "geomesh-wan: %s\n", std::string(entered.message()).c_str());
      return 126;
    }
    execvp(argv[4], argv + 4);
    std::fprintf(stderr, "geomesh-wan: starting %s: %s\n", argv[4], std::strerror(errno));
    return 127;
  }
  if (words.empty() || words[0] != "run") {
    std::fprintf(stderr, "geomesh-wan is started by `geomesh emulate`\n");
    return 2;
  }
  absl::Status status;
  if (absl::StatusOr<Arguments> arguments = ParseArguments({words.begin() + 1, words.end()});
      arguments.ok()) {
    status = Run(*arguments);
  } else {
    status = arguments.status();
  }
  if (status.ok()) return 0;
  std::printf("{\"ok\": false, \"error\": %s}\n", JsonString(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace geomesh::emulator

int main(int argc, char** argv) { return geomesh::emulator::Main(argc, argv); }
