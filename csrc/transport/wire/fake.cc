#include "transport/wire/fake.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace geomesh::transport {
namespace {

using Clock = std::chrono::steady_clock;
using Instant = Clock::time_point;

constexpr absl::string_view kScheme = "fake:";
constexpr int kEventsAProgress = 64;

struct Connection;

// What a wire's Progress has to do, and when.
struct Event {
  enum class Kind { kUp, kAccepted, kDepart, kSegment, kLost };
  Event(Kind kind, std::shared_ptr<Connection> connection, int end)
      : kind(kind), connection(std::move(connection)), end(end) {}

  Kind kind;
  std::shared_ptr<Connection> connection;
  int end;  // of the connection, this wire's
  // kDepart: the poster's memory, valid until OnPosted. kSegment: copies.
  absl::Span<const std::byte> header, payload;
  std::vector<std::byte> header_copy, payload_copy;
  PostToken token{};
  absl::Status status;
  std::vector<std::shared_ptr<Connection>> call;  // kAccepted: all lanes of the Dial
};

class FakeWire;

// One lane; end 0 is the dialer's.
struct Connection {
  int index = 0;
  std::string hello;
  FakeNetwork::Link link;
  bool black_hole = false;
  struct End {
    FakeWire* wire = nullptr;
    LaneId id{};
    bool open = true;
    Instant busy_until{};    // until then its line is busy sending
    Instant last_arrival{};  // of what was sent from here
  } ends[2];
};

}  // namespace

class FakeNetwork::State {
 public:
  std::mutex mutex;  // guards all of this and the parts of FakeWire marked so
  Link link;
  std::map<std::string, FakeWire*, std::less<>> wires;
  std::vector<std::weak_ptr<Connection>> connections;
  std::map<std::string, int, std::less<>> refuse_dials;
  std::map<std::string, bool, std::less<>> ignore_dials;
  struct Corruption {
    size_t byte;
    int change;
  };
  std::map<std::string, Corruption, std::less<>> corrupt_next;

  template <typename F>
  void ForLanes(absl::string_view a, absl::string_view b, int index, F f);
  // Both sides see the lane lost at `at`.
  void Break(const std::shared_ptr<Connection>& connection, const absl::Status& reason);
};

namespace {

class FakeWire : public Wire {
 public:
  FakeWire(std::shared_ptr<FakeNetwork::State> network, std::string name)
      : network_(std::move(network)),
        name_(std::move(name)),
        timer_fd_(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)) {}

  ~FakeWire() override {
    std::lock_guard<std::mutex> lock(network_->mutex);
    for (auto& [id, lane] : lanes_) CloseEnd(lane.first, lane.second);
    const auto it = network_->wires.find(name_);
    if (it != network_->wires.end() && it->second == this) network_->wires.erase(it);
    for (const auto& weak : network_->connections) {
      if (const auto connection = weak.lock(); connection != nullptr) {
        for (auto& end : connection->ends) {
          if (end.wire == this) end.wire = nullptr;
        }
      }
    }
    close(timer_fd_);
  }

  absl::string_view name() const override { return "fake"; }

  absl::StatusOr<std::string> Listen(WireEvents* events) override {
    std::lock_guard<std::mutex> lock(network_->mutex);
    events_ = events;
    if (!network_->wires.emplace(name_, this).second) {
      return absl::UnavailableError(absl::StrCat("another wire listens as ", name_));
    }
    return absl::StrCat(kScheme, name_);
  }

  absl::StatusOr<LaneId> Dial(absl::string_view address, absl::string_view peer, int lanes,
                              absl::Span<const std::byte> hello) override {
    if (!absl::StartsWith(address, kScheme) || lanes < 1 || hello.size() > kMaxHelloBytes) {
      return absl::InvalidArgumentError(absl::StrCat("not an address of wire/fake: ", address));
    }
    const std::string to(address.substr(kScheme.size()));
    std::lock_guard<std::mutex> lock(network_->mutex);
    const auto first = static_cast<LaneId>(next_id_);
    const auto target = network_->wires.find(to);
    int& refuse = network_->refuse_dials[to];
    const bool refused = target == network_->wires.end() || refuse > 0;
    if (refuse > 0) --refuse;
    std::vector<std::shared_ptr<Connection>> call;
    for (int i = 0; i < lanes; ++i) {
      auto connection = std::make_shared<Connection>();
      connection->index = i;
      connection->hello.assign(reinterpret_cast<const char*>(hello.data()), hello.size());
      connection->link = network_->link;
      connection->ends[0].wire = this;
      connection->ends[0].id = static_cast<LaneId>(next_id_++);
      connection->ends[1].open = false;
      lanes_[connection->ends[0].id] = {connection, 0};
      network_->connections.push_back(connection);
      call.push_back(std::move(connection));
    }
    const Instant now = Clock::now();
    if (refused) {
      for (const auto& connection : call) {
        Event event(Event::Kind::kLost, connection, 0);
        event.status = absl::UnavailableError(absl::StrCat("connection refused by ", to));
        Schedule(now, std::move(event));
      }
    } else if (!frozen_ && !network_->ignore_dials[to]) {  // a stopped process dials nobody
      Event event(Event::Kind::kAccepted, call.front(), 1);
      event.call = call;
      target->second->Schedule(now + Nanoseconds(network_->link.delay), std::move(event));
    }
    return first;
  }

  absl::Status Post(LaneId lane, absl::Span<const std::byte> header,
                    absl::Span<const std::byte> payload, PostToken token) override {
    if (header.size() > kMaxSegmentHeaderBytes || payload.size() > kMaxSegmentPayloadBytes) {
      return absl::InvalidArgumentError("segment above the limits");
    }
    std::lock_guard<std::mutex> lock(network_->mutex);
    const auto it = lanes_.find(lane);
    if (it == lanes_.end()) return absl::UnavailableError("the lane is closed");
    const auto& [connection, end] = it->second;
    Connection::End& from = connection->ends[end];
    const Instant now = Clock::now();
    from.busy_until = std::max(now, from.busy_until);
    if (connection->link.bytes_per_s > 0) {
      from.busy_until += std::chrono::nanoseconds(
          static_cast<int64_t>(1e9 * static_cast<double>(header.size() + payload.size()) /
                               connection->link.bytes_per_s));
    }
    Event event(Event::Kind::kDepart, connection, end);
    event.header = header;
    event.payload = payload;
    event.token = token;
    Schedule(from.busy_until, std::move(event));
    return absl::OkStatus();
  }

  void Close(LaneId lane) override {
    std::lock_guard<std::mutex> lock(network_->mutex);
    const auto it = lanes_.find(lane);
    if (it == lanes_.end()) return;
    const auto [connection, end] = it->second;
    lanes_.erase(it);
    if (frozen_) {
      connection->ends[end].open = false;
      closed_frozen_.emplace_back(connection, end);  // a stopped process tells nobody
    } else {
      CloseEnd(connection, end);
    }
    Expedite(connection);
  }

  int Progress() override {
    {
      std::lock_guard<std::mutex> lock(network_->mutex);
      armed_ = false;
    }
    int did = 0;
    for (; did < kEventsAProgress; ++did) {
      std::optional<Event> event = Next();
      if (!event.has_value()) break;
      Handle(*event);
    }
    return did;
  }

  bool Arm() override {
    std::lock_guard<std::mutex> lock(network_->mutex);
    if (!frozen_ && !events_due_.empty() && events_due_.begin()->first.first <= Clock::now()) {
      return false;
    }
    SetTimer();
    return true;
  }

  int fd() const override { return timer_fd_; }

  // ---- with the network's mutex held ----

  static std::chrono::nanoseconds Nanoseconds(absl::Duration d) {
    return absl::ToChronoNanoseconds(d);
  }

  void Schedule(Instant due, Event event) {
    events_due_.emplace(std::pair(due, next_event_++), std::move(event));
    // A running owner looks for itself before it sleeps.
    if (armed_ && due < armed_until_) SetTimer();
  }

  void SetTimer() {
    itimerspec spec{};
    armed_ = true;
    armed_until_ = Instant::max();
    if (!frozen_ && !events_due_.empty()) {
      armed_until_ = events_due_.begin()->first.first;
      const int64_t ns = std::max<int64_t>(
          1, std::chrono::nanoseconds(events_due_.begin()->first.first.time_since_epoch()).count());
      spec.it_value.tv_sec = ns / 1000000000;
      spec.it_value.tv_nsec = ns % 1000000000;
    }
    timerfd_settime(timer_fd_, TFD_TIMER_ABSTIME, &spec, nullptr);
  }

  void SetFrozen(bool frozen) {
    frozen_ = frozen;
    if (!frozen) {
      for (const auto& [connection, end] : std::exchange(closed_frozen_, {})) {
        CloseEnd(connection, end);
      }
    }
    SetTimer();
  }

  // What waits to depart on it fails now.
  void Expedite(const std::shared_ptr<Connection>& connection) {
    std::vector<Event> departing;
    for (auto it = events_due_.begin(); it != events_due_.end();) {
      if (it->second.kind == Event::Kind::kDepart && it->second.connection == connection) {
        departing.push_back(std::move(it->second));
        it = events_due_.erase(it);
      } else {
        ++it;
      }
    }
    for (Event& event : departing) Schedule(Clock::now(), std::move(event));
  }

  // The other side sees the end after all that was sent.
  static void CloseEnd(const std::shared_ptr<Connection>& connection, int end) {
    Connection::End& mine = connection->ends[end];
    Connection::End& other = connection->ends[1 - end];
    mine.open = false;
    if (other.wire == nullptr || !other.open || connection->black_hole) return;
    Event event(Event::Kind::kLost, connection, 1 - end);
    event.status = absl::UnavailableError("the other side closed the connection");
    const Instant due =
        std::max(Clock::now() + Nanoseconds(connection->link.delay), mine.last_arrival);
    other.wire->Schedule(due, std::move(event));
  }

  const std::string& wire_label() const { return name_; }

 private:
  std::optional<Event> Next() {
    std::lock_guard<std::mutex> lock(network_->mutex);
    if (frozen_ || events_due_.empty()) return std::nullopt;
    const auto first = events_due_.begin();
    if (first->first.first > Clock::now()) return std::nullopt;
    Event event = std::move(first->second);
    const Instant due = first->first.first;
    events_due_.erase(first);
    if (event.kind == Event::Kind::kDepart) Depart(&event, due);
    return event;
  }

  // Copies the segment to the other side, if the lane lives.
  void Depart(Event* event, Instant due) {
    Connection& connection = *event->connection;
    Connection::End& from = connection.ends[event->end];
    Connection::End& to = connection.ends[1 - event->end];
    if (!from.open) {
      event->status = absl::UnavailableError("the lane was lost");
      return;
    }
    if (connection.black_hole || !to.open || to.wire == nullptr) return;
    Event arrival(Event::Kind::kSegment, event->connection, 1 - event->end);
    arrival.header_copy.assign(event->header.begin(), event->header.end());
    arrival.payload_copy.assign(event->payload.begin(), event->payload.end());
    const auto corrupt = network_->corrupt_next.find(to.wire->wire_label());
    if (corrupt != network_->corrupt_next.end() &&
        corrupt->second.byte < arrival.header_copy.size()) {
      std::byte& byte = arrival.header_copy[corrupt->second.byte];
      byte = static_cast<std::byte>(static_cast<int>(byte) + corrupt->second.change);
      network_->corrupt_next.erase(corrupt);
    }
    from.last_arrival = std::max(from.last_arrival, due + Nanoseconds(connection.link.delay));
    to.wire->Schedule(from.last_arrival, std::move(arrival));
  }

  void Handle(const Event& event) {
    Connection::End& mine = event.connection->ends[event.end];
    if (event.kind == Event::Kind::kDepart) {
      events_->OnPosted(mine.id, event.token, event.status);
      return;
    }
    if (event.kind == Event::Kind::kAccepted) {
      for (const auto& connection : event.call) AcceptOne(connection, event.call.size());
      return;
    }
    {
      std::lock_guard<std::mutex> lock(network_->mutex);
      if (!mine.open) return;
      if (event.kind == Event::Kind::kLost) {
        mine.open = false;
        lanes_.erase(mine.id);
        Expedite(event.connection);
      }
    }
    switch (event.kind) {
      case Event::Kind::kUp:
        events_->OnLaneUp(mine.id);
        break;
      case Event::Kind::kSegment:
        events_->OnSegment(mine.id, event.header_copy, event.payload_copy);
        break;
      case Event::Kind::kLost:
        events_->OnLaneLost(mine.id, event.status);
        break;
      default:
        break;
    }
  }

  void AcceptOne(const std::shared_ptr<Connection>& connection, size_t lanes) {
    Connection::End& mine = connection->ends[1];
    Connection::End& dialer = connection->ends[0];
    {
      std::lock_guard<std::mutex> lock(network_->mutex);
      if (dialer.wire == nullptr || !dialer.open) return;
      mine.wire = this;
      mine.id = static_cast<LaneId>(next_id_++);
      mine.open = true;
      lanes_[mine.id] = {connection, 1};
    }
    const bool kept = events_->OnLaneAccepted(
        mine.id, connection->index, static_cast<int>(lanes),
        {reinterpret_cast<const std::byte*>(connection->hello.data()), connection->hello.size()});
    std::lock_guard<std::mutex> lock(network_->mutex);
    if (!kept) {
      lanes_.erase(mine.id);
      CloseEnd(connection, 1);
    } else if (dialer.wire != nullptr && dialer.open) {
      // Before anything that is posted from here on.
      const Instant due = Clock::now() + Nanoseconds(connection->link.delay);
      mine.last_arrival = std::max(mine.last_arrival, due);
      dialer.wire->Schedule(due, Event(Event::Kind::kUp, connection, 0));
    }
  }

  const std::shared_ptr<FakeNetwork::State> network_;
  const std::string name_;
  const int timer_fd_;
  WireEvents* events_ = nullptr;  // the engine, which owns this wire

  // Guarded by the network's mutex, as other wires schedule events here.
  std::map<std::pair<Instant, uint64_t>, Event> events_due_;
  uint64_t next_event_ = 0;
  bool armed_ = false;  // the timer is set for what is due first, at armed_until_
  Instant armed_until_{};
  bool frozen_ = false;
  std::vector<std::pair<std::shared_ptr<Connection>, int>> closed_frozen_;
  uint32_t next_id_ = 1;
  std::map<LaneId, std::pair<std::shared_ptr<Connection>, int>> lanes_;  // and the end that is ours
};

}  // namespace

template <typename F>
void FakeNetwork::State::ForLanes(absl::string_view a, absl::string_view b, int index, F f) {
  const auto is = [](const Connection::End& end, absl::string_view name) {
    return end.wire != nullptr && end.wire->wire_label() == name;
  };
  for (const auto& weak : connections) {
    const auto connection = weak.lock();
    if (connection == nullptr || (index >= 0 && connection->index != index)) continue;
    const auto& ends = connection->ends;
    if ((is(ends[0], a) && is(ends[1], b)) || (is(ends[0], b) && is(ends[1], a))) f(connection);
  }
}

void FakeNetwork::State::Break(const std::shared_ptr<Connection>& connection,
                               const absl::Status& reason) {
  for (int end = 0; end < 2; ++end) {
    FakeWire* wire = connection->ends[end].wire;
    if (wire == nullptr || !connection->ends[end].open) continue;
    Event event(Event::Kind::kLost, connection, end);
    event.status = reason;
    wire->Schedule(Clock::now(), std::move(event));
  }
}

FakeNetwork::FakeNetwork() : FakeNetwork(Link{}) {}
FakeNetwork::FakeNetwork(Link link) : state_(std::make_shared<State>()) { state_->link = link; }
FakeNetwork::~FakeNetwork() = default;

std::unique_ptr<Wire> FakeNetwork::MakeWire(absl::string_view name) {
  return std::make_unique<FakeWire>(state_, std::string(name));
}

void FakeNetwork::Cut(absl::string_view a, absl::string_view b, int index) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->ForLanes(a, b, index, [this](const std::shared_ptr<Connection>& connection) {
    connection->black_hole = true;  // what is on its way is lost with it
    state_->Break(connection, absl::UnavailableError("connection reset"));
  });
}

void FakeNetwork::BlackHole(absl::string_view a, absl::string_view b, int index) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->ForLanes(a, b, index, [](const auto& connection) { connection->black_hole = true; });
}

void FakeNetwork::SetLink(absl::string_view a, absl::string_view b, int index, Link link) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->ForLanes(a, b, index, [&](const auto& connection) { connection->link = link; });
}

void FakeNetwork::RefuseDials(absl::string_view to, int count) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->refuse_dials[std::string(to)] = count;
}

void FakeNetwork::IgnoreDials(absl::string_view to) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->ignore_dials[std::string(to)] = true;
}

void FakeNetwork::CorruptNext(absl::string_view to, size_t header_byte, int change) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->corrupt_next[std::string(to)] = {header_byte, change};
}

void FakeNetwork::Freeze(absl::string_view name) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (const auto it = state_->wires.find(name); it != state_->wires.end()) {
    it->second->SetFrozen(true);
  }
}

void FakeNetwork::Thaw(absl::string_view name) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (const auto it = state_->wires.find(name); it != state_->wires.end()) {
    it->second->SetFrozen(false);
  }
}

void FakeNetwork::Kill(absl::string_view name) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  const auto it = state_->wires.find(name);
  if (it == state_->wires.end()) return;
  it->second->SetFrozen(true);
  for (const auto& weak : state_->connections) {
    const auto connection = weak.lock();
    if (connection == nullptr) continue;
    if (connection->ends[0].wire == it->second || connection->ends[1].wire == it->second) {
      state_->Break(connection, absl::UnavailableError("connection reset by its process"));
    }
  }
  state_->wires.erase(it);
}

int FakeNetwork::Lanes(absl::string_view a, absl::string_view b) const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  int count = 0;
  state_->ForLanes(a, b, -1, [&count](const auto& connection) {
    if (connection->ends[0].open && connection->ends[1].open) ++count;
  });
  return count;
}

}  // namespace geomesh::transport
