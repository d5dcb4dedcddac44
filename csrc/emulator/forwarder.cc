#include "emulator/forwarder.h"

#include <sys/epoll.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

namespace geomesh::emulator {
namespace {

// Packets read from one device before the others and the deliveries have their turn.
constexpr int kReadBatch = 16;
// Pieces due this soon go out with those that are due: saves wake-ups, costs no visible accuracy.
constexpr int64_t kDeliverAheadNs = 20'000;
// Watched descriptors follow the regions' indices in epoll's data.
constexpr uint64_t kWatched = uint64_t{1} << 32;

}  // namespace

int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void LatenessHistogram::Add(int64_t ns) {
  const uint64_t value = static_cast<uint64_t>(std::max<int64_t>(ns, 0));
  // Values below 8 have a bucket each; above, three bits after the leading one choose.
  size_t bucket = value;
  if (value >= 8) {
    const int exponent = std::bit_width(value) - 1;
    bucket = static_cast<size_t>(exponent - 2) * 8 + ((value >> (exponent - 3)) & 7);
  }
  ++buckets_[bucket];
  ++count_;
  max_ns_ = std::max(max_ns_, ns);
}

int64_t LatenessHistogram::Quantile(double q) const {
  if (count_ == 0) return 0;
  const uint64_t wanted = std::max<uint64_t>(1, static_cast<uint64_t>(std::ceil(q * count_)));
  uint64_t seen = 0;
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    seen += buckets_[bucket];
    if (seen < wanted) continue;
    if (bucket < 8) return static_cast<int64_t>(bucket);
    const int exponent = static_cast<int>(bucket / 8) + 2;
    const int64_t width = int64_t{1} << (exponent - 3);
    const int64_t upper =
        (int64_t{1} << exponent) + static_cast<int64_t>(bucket % 8 + 1) * width - 1;
    return std::min(upper, max_ns_);
  }
  return max_ns_;
}

Forwarder::Forwarder(std::vector<Region> regions)
    : regions_(std::move(regions)),
      links_(regions_.size() * regions_.size()),
      read_buffer_(sizeof(VnetHeader) + kMaxPacketBytes) {}

absl::Status Forwarder::Start() {
  epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_.valid()) return SystemError("epoll_create1", errno);
  for (size_t i = 0; i < regions_.size(); ++i) {
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.u64 = i;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, regions_[i].tun.get(), &event) != 0) {
      return SystemError("watching a TUN device", errno);
    }
  }
  return absl::OkStatus();
}

absl::Status Forwarder::Watch(int fd, std::function<void()> callback) {
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = kWatched | static_cast<uint64_t>(fd);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return SystemError("watching a descriptor", errno);
  }
  watched_.emplace_back(fd, std::move(callback));
  return absl::OkStatus();
}

void Forwarder::Unwatch(int fd) {
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  std::erase_if(watched_, [fd](const auto& entry) { return entry.first == fd; });
}

int Forwarder::Find(const std::string& name) const {
  for (size_t i = 0; i < regions_.size(); ++i) {
    if (regions_[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

uint64_t Forwarder::device_drops() const {
  uint64_t drops = 0;
  for (const Region& region : regions_) drops += DeviceDrops(region);
  return drops - device_drops_before_;
}

void Forwarder::ResetCounters() {
  for (Link& link : links_) link.ResetCounters();
  lateness_ = {};
  unroutable_ = 0;
  undelivered_ = 0;
  device_drops_before_ += device_drops();
}

absl::Status Forwarder::Run() {
  epoll_event events[64];
  while (running_) {
    Deliver(NowNs());
    timespec timeout;
    timespec* wait = nullptr;
    if (!due_.empty()) {
      const int64_t wait_ns = std::max<int64_t>(0, due_.top().due_ns - NowNs());
      timeout = {.tv_sec = wait_ns / 1'000'000'000, .tv_nsec = wait_ns % 1'000'000'000};
      wait = &timeout;
    }
    const int ready = epoll_pwait2(epoll_.get(), events, std::size(events), wait, nullptr);
    if (ready < 0 && errno != EINTR) return SystemError("epoll_pwait2", errno);
    for (int i = 0; i < ready; ++i) {
      const uint64_t data = events[i].data.u64;
      if (data < kWatched) {
        ReadDevice(static_cast<int>(data));
        continue;
      }
      const int fd = static_cast<int>(data & (kWatched - 1));
      const auto entry = std::find_if(watched_.begin(), watched_.end(),
                                      [fd](const auto& watched) { return watched.first == fd; });
      if (entry == watched_.end()) continue;
      const std::function<void()> callback = entry->second;  // it may unwatch itself
      callback();
    }
  }
  return absl::OkStatus();
}

void Forwarder::ReadDevice(int region) {
  for (int i = 0; i < kReadBatch; ++i) {
    const ssize_t size = read(regions_[region].tun.get(), read_buffer_.data(), read_buffer_.size());
    if (size < static_cast<ssize_t>(sizeof(VnetHeader))) return;
    VnetHeader vnet;
    std::memcpy(&vnet, read_buffer_.data(), sizeof(vnet));
    std::optional<Packet> packet = Packet::Parse(
        vnet,
        std::vector<uint8_t>(read_buffer_.begin() + sizeof(vnet), read_buffer_.begin() + size));
    if (!packet || packet->destination() < 0 || packet->destination() == region ||
        packet->destination() >= static_cast<int>(regions_.size())) {
      ++unroutable_;
      continue;
    }
    const int to = packet->destination();
    Link& link = this->link(region, to);
    const int index = link.Route(*packet);
    if (index < 0) continue;
    Path& path = *link.paths()[index];
    const bool idle = path.empty();
    path.Admit(std::make_shared<const Packet>(*std::move(packet)), NowNs());
    if (idle && !path.empty()) due_.push({path.next_due_ns(), path.ticket(), region, to, index});
  }
}

void Forwarder::Deliver(int64_t now_ns) {
  while (!due_.empty() && due_.top().due_ns <= now_ns + kDeliverAheadNs) {
    const Due due = due_.top();
    due_.pop();
    const Link& link = this->link(due.from, due.to);
    if (due.path >= static_cast<int>(link.paths().size())) continue;
    Path& path = *link.paths()[due.path];
    if (path.ticket() != due.ticket) continue;
    lateness_.Add(now_ns - due.due_ns);
    Write(due.to, path.Pop());
    if (!path.empty()) {
      due_.push({path.next_due_ns(), path.ticket(), due.from, due.to, due.path});
    }
  }
}

void Forwarder::Write(int region, const Piece& piece) {
  Piece::Image image;
  piece.Render(image);
  iovec parts[3] = {{&image.vnet, sizeof(image.vnet)},
                    {image.headers.data(), image.header_bytes},
                    {const_cast<uint8_t*>(image.payload.data()), image.payload.size()}};
  if (writev(regions_[region].tun.get(), parts, 3) < 0) ++undelivered_;
}

}  // namespace geomesh::emulator
