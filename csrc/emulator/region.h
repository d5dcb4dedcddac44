// One emulated region: its own network, host name, IPC and mounts, with a TUN device whose other
// end this process holds. Needs the rights of an administrator over the namespaces it makes, which
// an ordinary user has inside a user namespace. Nothing is left in the file system: a region ends
// with the last process and descriptor in it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace geomesh::emulator {

// A file descriptor with one owner.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.Release()) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd();
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release();

 private:
  int fd_ = -1;
};

// What the kernel said, with what was tried.
absl::Status SystemError(const std::string& what, int error);

struct RegionOptions {
  bool ipv6 = false;
  // Upper bound of TCP's buffer autotuning, in bytes.
  int64_t tcp_buffer_bytes = 0;
  // Replaces /etc/hosts inside; empty: the host's stays.
  std::string hosts_file;
};

struct Region {
  std::string name;
  Fd tun;                 // non-blocking
  Fd net, uts, ipc, mnt;  // the namespaces
  Fd device_statistics;   // /proc/net/dev of this network
  uint64_t net_inode = 0;
  bool sys_mounted = false;  // /sys shows this network's devices
};

// Name of the device inside every region.
inline constexpr char kDeviceName[] = "wan0";

// Makes the namespaces of all regions, in order. Leaves the caller in an empty network of its own,
// in a user namespace if it had not the rights without one (`*user_namespace` is then open).
// Single-threaded callers only.
absl::StatusOr<std::vector<Region>> CreateRegions(const std::vector<std::string>& names,
                                                  const RegionOptions& options, Fd* user_namespace);

// Packets that the region's device dropped because this process read too slowly.
uint64_t DeviceDrops(const Region& region);

// Ends every process inside the regions; returns how many were still there after `deadline_ms`.
int KillProcesses(const std::vector<Region>& regions, int deadline_ms);

// Moves the caller into the namespaces (`user` invalid: none), keeping its working directory.
absl::Status Enter(const Fd& user, const Fd& net, const Fd& uts, const Fd& ipc, const Fd& mnt);

}  // namespace geomesh::emulator
