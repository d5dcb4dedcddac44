#include "emulator/region.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

namespace geomesh::emulator {
namespace {

constexpr int kMtu = 1500;
// Super-packets that may wait for this process before the device drops.
constexpr int kDeviceQueuePackets = 8192;

absl::Status WriteFile(const std::string& path, const std::string& text) {
  Fd fd(open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (!fd.valid()) return SystemError(absl::StrCat("opening ", path), errno);
  if (write(fd.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    return SystemError(absl::StrCat("writing '", text, "' to ", path), errno);
  }
  return absl::OkStatus();
}

absl::StatusOr<Fd> OpenRead(const std::string& path) {
  Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return SystemError(absl::StrCat("opening ", path), errno);
  return fd;
}

// New user and mount namespaces, in which this user is root. The mount namespace is new as well
// because nobody inside may change the mounts of the one outside.
absl::Status EnterUserNamespace() {
  const uid_t uid = geteuid();
  const gid_t gid = getegid();
  if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) {
    return SystemError("creating a user namespace", errno);
  }
  GM_RETURN_IF_ERROR(WriteFile("/proc/self/setgroups", "deny"));
  GM_RETURN_IF_ERROR(WriteFile("/proc/self/uid_map", absl::StrCat("0 ", uid, " 1")));
  return WriteFile("/proc/self/gid_map", absl::StrCat("0 ", gid, " 1"));
}

absl::StatusOr<Fd> OpenTun() {
  Fd tun(open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC));
  if (!tun.valid()) return SystemError("opening /dev/net/tun", errno);
  return tun;
}

absl::Status MakeDevice(int tun) {
  ifreq request = {};
  std::strncpy(request.ifr_name, kDeviceName, IFNAMSIZ - 1);
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  if (ioctl(tun, TUNSETIFF, &request) != 0) return SystemError("creating a TUN device", errno);
  if (ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6) != 0) {
    return SystemError("switching the TUN device's segmentation offload on", errno);
  }
  return absl::OkStatus();
}

// The kernel's struct of <linux/ipv6.h>, which cannot be included beside <netinet/in.h>.
struct In6Ifreq {
  in6_addr address;
  uint32_t prefix_length;
  int interface;
};

absl::Status ConfigureNetwork(int index, const RegionOptions& options) {
  Fd control(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!control.valid()) return SystemError("opening a socket", errno);
  auto call = [&](unsigned long number, ifreq& request, const char* what) {
    if (ioctl(control.get(), number, &request) == 0) return absl::OkStatus();
    return SystemError(absl::StrCat(what, " of ", request.ifr_name), errno);
  };
  auto named = [](const char* name) {
    ifreq request = {};
    std::strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    return request;
  };

  ifreq loopback = named("lo");
  loopback.ifr_flags = IFF_UP | IFF_RUNNING;
  GM_RETURN_IF_ERROR(call(SIOCSIFFLAGS, loopback, "setting the flags"));

  ifreq mtu = named(kDeviceName);
  mtu.ifr_mtu = kMtu;
  GM_RETURN_IF_ERROR(call(SIOCSIFMTU, mtu, "setting the MTU"));
  ifreq queue = named(kDeviceName);
  queue.ifr_qlen = kDeviceQueuePackets;
  // Refused inside a user namespace: then the device's own 500 must do.
  (void)ioctl(control.get(), SIOCSIFTXQLEN, &queue);

  // 10.71.(i+1).1/16: the connected route covers all regions.
  ifreq address = named(kDeviceName);
  auto* in = reinterpret_cast<sockaddr_in*>(&address.ifr_addr);
  in->sin_family = AF_INET;
  in->sin_addr.s_addr = htonl(10u << 24 | 71u << 16 | static_cast<uint32_t>(index + 1) << 8 | 1u);
  GM_RETURN_IF_ERROR(call(SIOCSIFADDR, address, "setting the address"));
  in->sin_addr.s_addr = htonl(0xffff0000u);
  GM_RETURN_IF_ERROR(call(SIOCSIFNETMASK, address, "setting the netmask"));

  const std::string ipv6 = absl::StrCat("/proc/sys/net/ipv6/conf/", kDeviceName, "/");
  if (!options.ipv6) {
    // Not an error where the kernel has no IPv6 at all.
    (void)WriteFile(absl::StrCat(ipv6, "disable_ipv6"), "1");
  }
  ifreq up = named(kDeviceName);
  up.ifr_flags = IFF_UP | IFF_RUNNING;
  GM_RETURN_IF_ERROR(call(SIOCSIFFLAGS, up, "setting the flags"));
  if (options.ipv6) {
    Fd control6(socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!control6.valid()) return SystemError("opening an IPv6 socket", errno);
    In6Ifreq request = {};
    request.address.s6_addr[0] = 0xfd;
    request.address.s6_addr[1] = 0x71;
    request.address.s6_addr[12] = static_cast<uint8_t>((index + 1) >> 8);
    request.address.s6_addr[13] = static_cast<uint8_t>(index + 1);
    request.address.s6_addr[15] = 1;
    request.prefix_length = 64;
    request.interface = static_cast<int>(if_nametoindex(kDeviceName));
    if (ioctl(control6.get(), SIOCSIFADDR, &request) != 0) {
      return SystemError(absl::StrCat("setting the IPv6 address of ", kDeviceName), errno);
    }
  }

  // Autotuning may grow to what a long link needs; minimum and start are the kernel's defaults.
  const std::string most = absl::StrCat(options.tcp_buffer_bytes);
  GM_RETURN_IF_ERROR(WriteFile("/proc/sys/net/ipv4/tcp_rmem", absl::StrCat("4096 131072 ", most)));
  return WriteFile("/proc/sys/net/ipv4/tcp_wmem", absl::StrCat("4096 16384 ", most));
}

// The mounts of one region; the caller is in a mount namespace made for it.
absl::Status ConfigureMounts(const RegionOptions& options, Region& region) {
  if (mount("", "/", nullptr, MS_REC | MS_SLAVE, nullptr) != 0) {
    return SystemError("keeping the region's mounts to itself", errno);
  }
  // A container may forbid it (mounts over parts of /sys); then programs that look their devices
  // up in /sys see the host's.
  region.sys_mounted = mount("geomesh", "/sys", "sysfs", 0, nullptr) == 0;
  if (!options.hosts_file.empty() && access("/etc/hosts", F_OK) == 0 &&
      mount(options.hosts_file.c_str(), "/etc/hosts", nullptr, MS_BIND, nullptr) != 0) {
    return SystemError("mounting the region's /etc/hosts", errno);
  }
  return absl::OkStatus();
}

absl::StatusOr<Region> CreateRegion(const std::string& name, int index, const Fd& base_mounts,
                                    const RegionOptions& options) {
  Region region;
  region.name = name;
  if (setns(base_mounts.get(), CLONE_NEWNS) != 0)
    return SystemError("entering a mount namespace", errno);
  if (unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNS) != 0) {
    return SystemError(absl::StrCat("creating the namespaces of region ", name), errno);
  }
  if (sethostname(name.data(), name.size()) != 0) return SystemError("setting a host name", errno);
  GM_ASSIGN_OR_RETURN(region.tun, OpenTun());
  GM_RETURN_IF_ERROR(MakeDevice(region.tun.get()));
  GM_RETURN_IF_ERROR(ConfigureNetwork(index, options));
  GM_RETURN_IF_ERROR(ConfigureMounts(options, region));
  GM_ASSIGN_OR_RETURN(region.device_statistics, OpenRead("/proc/self/net/dev"));
  GM_ASSIGN_OR_RETURN(region.net, OpenRead("/proc/self/ns/net"));
  GM_ASSIGN_OR_RETURN(region.uts, OpenRead("/proc/self/ns/uts"));
  GM_ASSIGN_OR_RETURN(region.ipc, OpenRead("/proc/self/ns/ipc"));
  GM_ASSIGN_OR_RETURN(region.mnt, OpenRead("/proc/self/ns/mnt"));
  struct stat status;
  if (fstat(region.net.get(), &status) != 0) return SystemError("fstat of a namespace", errno);
  region.net_inode = status.st_ino;
  return region;
}

// Processes in one of the regions, except the caller.
std::vector<pid_t> FindProcesses(const std::vector<Region>& regions) {
  std::vector<pid_t> found;
  DIR* directory = opendir("/proc");
  if (directory == nullptr) return found;
  while (const dirent* entry = readdir(directory)) {
    pid_t pid = 0;
    if (!absl::SimpleAtoi(entry->d_name, &pid) || pid == getpid()) continue;
    struct stat status;
    const std::string path = absl::StrCat("/proc/", pid, "/ns/net");
    if (stat(path.c_str(), &status) != 0) continue;
    const bool inside = std::any_of(regions.begin(), regions.end(), [&](const Region& region) {
      return region.net_inode == status.st_ino;
    });
    if (inside) found.push_back(pid);
  }
  closedir(directory);
  return found;
}

}  // namespace

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) close(fd_);
    fd_ = other.Release();
  }
  return *this;
}

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

int Fd::Release() { return std::exchange(fd_, -1); }

absl::Status SystemError(const std::string& what, int error) {
  return absl::ErrnoToStatus(error, what);
}

absl::StatusOr<std::vector<Region>> CreateRegions(const std::vector<std::string>& names,
                                                  const RegionOptions& options,
                                                  Fd* user_namespace) {
  // Tried before anything is changed, so that its error is not mistaken for another.
  if (absl::StatusOr<Fd> tun = OpenTun(); !tun.ok()) return tun.status();
  if (unshare(CLONE_NEWNS) != 0) {
    if (errno != EPERM) return SystemError("creating a mount namespace", errno);
    GM_RETURN_IF_ERROR(EnterUserNamespace());
    GM_ASSIGN_OR_RETURN(*user_namespace, OpenRead("/proc/self/ns/user"));
  }
  if (mount("", "/", nullptr, MS_REC | MS_SLAVE, nullptr) != 0) {
    return SystemError("keeping mounts private", errno);
  }
  GM_ASSIGN_OR_RETURN(Fd base_mounts, OpenRead("/proc/self/ns/mnt"));
  std::vector<Region> regions;
  for (size_t i = 0; i < names.size(); ++i) {
    GM_ASSIGN_OR_RETURN(Region region,
                        CreateRegion(names[i], static_cast<int>(i), base_mounts, options));
    regions.push_back(std::move(region));
  }
  if (setns(base_mounts.get(), CLONE_NEWNS) != 0 || unshare(CLONE_NEWNET) != 0) {
    return SystemError("leaving the regions", errno);
  }
  return regions;
}

uint64_t DeviceDrops(const Region& region) {
  char text[4096];
  const ssize_t size = pread(region.device_statistics.get(), text, sizeof(text), 0);
  if (size <= 0) return 0;
  for (absl::string_view line : absl::StrSplit(absl::string_view(text, size), '\n')) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" :"), absl::SkipEmpty());
    // Eight receive columns, then transmitted bytes, packets, errors, dropped.
    uint64_t drops = 0;
    if (words.size() > 12 && words[0] == kDeviceName && absl::SimpleAtoi(words[12], &drops)) {
      return drops;
    }
  }
  return 0;
}

int KillProcesses(const std::vector<Region>& regions, int deadline_ms) {
  using std::chrono::milliseconds;
  const auto deadline = std::chrono::steady_clock::now() + milliseconds(deadline_ms);
  while (true) {
    // Again and again, since a process may fork while its parent is killed.
    const std::vector<pid_t> processes = FindProcesses(regions);
    if (processes.empty() || std::chrono::steady_clock::now() > deadline) {
      return static_cast<int>(processes.size());
    }
    for (pid_t pid : processes) kill(pid, SIGKILL);
    std::this_thread::sleep_for(milliseconds(5));
  }
}

absl::Status Enter(const Fd& user, const Fd& net, const Fd& uts, const Fd& ipc, const Fd& mnt) {
  char directory[4096];
  if (getcwd(directory, sizeof(directory)) == nullptr) {
    return SystemError("reading the working directory", errno);
  }
  if (user.valid()) {
    struct stat ours, theirs;
    if (stat("/proc/self/ns/user", &ours) != 0 || fstat(user.get(), &theirs) != 0) {
      return SystemError("comparing user namespaces", errno);
    }
    if (ours.st_ino != theirs.st_ino && setns(user.get(), CLONE_NEWUSER) != 0) {
      return SystemError("entering the user namespace", errno);
    }
  }
  const std::pair<const Fd*, int> namespaces[] = {
      {&net, CLONE_NEWNET}, {&uts, CLONE_NEWUTS}, {&ipc, CLONE_NEWIPC}, {&mnt, CLONE_NEWNS}};
  for (const auto& [fd, kind] : namespaces) {
    if (setns(fd->get(), kind) != 0) return SystemError("entering the region", errno);
  }
  if (chdir(directory) != 0) return SystemError(absl::StrCat("entering ", directory), errno);
  return absl::OkStatus();
}

}  // namespace geomesh::emulator
