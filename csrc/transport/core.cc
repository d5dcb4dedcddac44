#include "transport/core.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/identity.h"
#include "base/log.h"
#include "transport/bytes.h"
#include "transport/local_memory.h"

namespace geomesh::transport {
namespace {

constexpr size_t kMaxStrangers = 1024;
constexpr size_t kMaxClosedChannels = 4096;
constexpr absl::Duration kAckDelay = absl::Milliseconds(2);
constexpr absl::Duration kBetweenRecords = absl::Seconds(1);
constexpr absl::Duration kRefusalLinger = absl::Seconds(1);
constexpr absl::Duration kDrainCheck = absl::Milliseconds(2);
constexpr int kAnnounceTicks = 2;
constexpr absl::Duration kKnockPause = absl::Milliseconds(100);
constexpr absl::Duration kKnockPatience = absl::Seconds(1);
// A caller that helps goes back to its own business, and to its signals, after this.
constexpr absl::Duration kLongestHelp = absl::Milliseconds(20);
constexpr absl::Duration kHelpRemembered = absl::Milliseconds(20);
// Another call of a caller that helped may follow.
constexpr absl::Duration kHelpFollows = absl::Microseconds(200);

}  // namespace

Core::Core(EngineOptions options, std::unique_ptr<Wire> wire, std::unique_ptr<EventLoop> loop)
    : options_(std::move(options)),
      uid_{Random64(), Random64()},
      loop_(std::move(loop)),
      wire_(std::move(wire)),
      wire_name_(wire_->name()) {
  options_.unexpected_bytes = std::max(options_.unexpected_bytes, kMinUnexpectedBytes);
  if (options_.host.empty()) {
    char name[256] = "";
    gethostname(name, sizeof(name) - 1);
    options_.host = name;
  }
}

Core::~Core() = default;

absl::Status Core::Start() {
  std::promise<absl::Status> started;
  std::future<absl::Status> result = started.get_future();
  // Signals are for the threads of the program that we are a guest in.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this, &started] {
    pthread_setname_np(pthread_self(), "geomesh-engine");
    absl::StatusOr<std::string> address = wire_->Listen(this);
    const bool ok = address.ok();
    if (ok) address_ = *std::move(address);
    if (!ok) wire_.reset();
    started.set_value(ok ? absl::OkStatus() : address.status());
    if (ok) Run();
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  result.wait();
  absl::Status status = result.get();
  if (!status.ok()) thread_.join();
  return status;
}

void Core::Stop() {
  if (!thread_.joinable()) return;
  loop_->Post([this] { stopping_.store(true, std::memory_order_relaxed); });
  thread_.join();
}

std::string Core::memory_offer() const {
  return LocalMemory::Offer({reinterpret_cast<const std::byte*>(&uid_), sizeof(uid_)});
}

void Core::Post(EventLoop::Work work) {
  if (abandoned() || stopping_.load(std::memory_order_relaxed)) return;
  loop_->Post(std::move(work));
}

void Core::PostQuietly(EventLoop::Work work) {
  if (abandoned() || stopping_.load(std::memory_order_relaxed)) return;
  loop_->PostQuietly(std::move(work));
}

void Core::AbandonAfterFork() {
  abandoned_.store(true, std::memory_order_relaxed);
  loop_->AbandonAfterFork();
}

// ---- the loop ----

void Core::Run() {
  std::unique_lock<std::mutex> turn(turn_);
  ScheduleTick(std::chrono::steady_clock::now());
  while (!stopping_.load(std::memory_order_relaxed)) {
    if (Turn()) continue;
    if (!wire_->Arm()) continue;
    Sleep(turn);
  }
  Finish(turn);
}

void Core::Sleep(std::unique_lock<std::mutex>& turn) {
  const auto helped_within = [this](absl::Duration time) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::nanoseconds(now).count() - helped_at_ns_.load(std::memory_order_relaxed) <
           absl::ToInt64Nanoseconds(time);
  };
  // Callers that help leave timers behind, and would have to wake this thread for each.
  const absl::Duration most = helped_within(kHelpRemembered) ? kAckDelay : absl::InfiniteDuration();
  loop_->Sleep(wire_->fd(), most, turn, [&] { return helping_ || helped_within(kHelpFollows); });
}

void Core::Nudge(bool here) {
  if (abandoned() || stopping_.load(std::memory_order_relaxed)) return;
  if (here) {
    if (const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock); turn.owns_lock()) {
      if (stopping_.load(std::memory_order_relaxed)) return;
      loop_->RunPosted();
      RunDeferred();
      PumpDirty();
      return LeaveTurn();
    }
  }
  loop_->Wake();
}

bool Core::Help(absl::FunctionRef<bool()> done, absl::Duration patience) {
  // Not where nothing is left to be done: who only looks in must not keep the engine's own thread
  // from its work.
  if (abandoned() || stopping_.load(std::memory_order_relaxed) || done()) return false;
  const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
  if (!turn.owns_lock() || stopping_.load(std::memory_order_relaxed)) {
    return false;
  }
  helping_ = true;
  const Instant begin = std::chrono::steady_clock::now();
  Instant idle_since = begin;
  while (!done() && !stopping_.load(std::memory_order_relaxed)) {
    const bool did = Turn();
    const Instant now = std::chrono::steady_clock::now();
    if (did) idle_since = now;
    if (Between(idle_since, now) >= patience && !did) break;
    if (Between(begin, now) >= kLongestHelp) break;
  }
  helping_ = false;
  LeaveTurn();
  if (done()) {
    helped_at_ns_.store(
        std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(),
        std::memory_order_relaxed);
  } else {  // the engine's own thread goes on, at once
    helped_at_ns_.store(0, std::memory_order_relaxed);
    loop_->Wake();
  }
  return true;
}

void Core::LeaveTurn() {
  // The engine's thread has left the wire armed when it went to sleep. What has come since the last
  // look is its own affair.
  const auto rest = [this] { return !loop_->has_posted() && deferred_.empty() && wire_->Arm(); };
  bool rests = rest();
  if (!rests) {
    Turn();
    rests = rest();
  }
  const bool stopping = stopping_.load(std::memory_order_relaxed);
  if (!rests || loop_->TimerBeforeAlarm() || stopping) loop_->Wake();
}

bool Core::Turn() {
  int did = loop_->RunPosted();
  did += wire_->Progress();
  did += loop_->RunTimers();
  did += static_cast<int>(deferred_.size());
  RunDeferred();
  PumpDirty();
  return did > 0 || !deferred_.empty();
}

// Callbacks may defer more; those run in the next turn, after the wire had its own.
void Core::RunDeferred() {
  for (size_t n = deferred_.size(); n > 0; --n) {
    EventLoop::Work work = std::move(deferred_.front());
    deferred_.pop_front();
    std::move(work)();
  }
}

void Core::PumpDirty() {
  while (!dirty_.empty()) {
    const std::vector<Peer*> dirty = std::exchange(dirty_, {});
    dirty_set_.clear();
    for (Peer* peer : dirty) {
      peer->Pump();
      peer->FlushAcks(/*all=*/false);
    }
  }
}

void Core::MarkDirty(Peer* peer) {
  if (dirty_set_.insert(peer).second) dirty_.push_back(peer);
}

void Core::AckSoon() {
  if (ack_timer_armed_) return;
  ack_timer_armed_ = true;
  loop_->AddTimer(std::chrono::steady_clock::now() + kAckDelay, [this] {
    ack_timer_armed_ = false;
    for (const auto& peer : peers_) peer->FlushAcks(/*all=*/true);
  });
}

void Core::ScheduleTick(Instant at) {
  next_tick_ = at;
  loop_->AddTimer(at, [this] { Tick(); });
}

void Core::Tick() {
  const Instant now = std::chrono::steady_clock::now();
  const absl::Duration interval =
      std::min({options_.heartbeat, options_.suspect_after / 8, options_.dead_after / 4});
  // Was this process stopped? Then what the others said meanwhile is not read yet: no silence of
  // theirs.
  absl::Duration late = Between(next_tick_, now);
  if (late < options_.suspect_after / 4) late = absl::ZeroDuration();
  const bool announce = ++ticks_ % kAnnounceTicks == 0;
  for (const auto& peer : peers_) peer->Tick(now, late, announce);

  std::vector<LaneId> stale;
  for (const auto& [lane, stranger] : strangers_) {
    if (Between(stranger.since, now) > options_.connect_timeout) stale.push_back(lane);
  }
  for (LaneId lane : stale) {
    strangers_.erase(lane);
    wire_->Close(lane);
  }
  ScheduleTick(now + interval);
}

void Core::Finish(std::unique_lock<std::mutex>& turn) {
  const absl::Status reason = absl::CancelledError("the engine of this process is shutting down");
  PumpDirty();
  channels_.clear();  // nobody is to be told of what follows
  knock_.reset();
  for (const auto& peer : peers_) peer->Leave(reason);
  const Instant deadline = std::chrono::steady_clock::now() + goodbye_limit_;
  loop_->AddTimer(deadline, [] {});  // ends the last sleep
  while (std::chrono::steady_clock::now() < deadline &&
         !std::all_of(peers_.begin(), peers_.end(), [](const auto& p) { return p->delivered(); })) {
    if (Turn() || !wire_->Arm()) continue;
    Sleep(turn);
  }
  for (const auto& peer : peers_) {
    peer->Lose(reason, /*left=*/true);
    peer->CloseLanes();
  }
  while (wire_->Progress() > 0) {
  }
  wire_.reset();
  // The wire is gone and holds no memory any more.
  for (const auto& [out, peer] : std::exchange(on_wire_, {})) {
    if (peer != nullptr) {
      peer->OnPosted(out, reason);
    } else {
      delete out;
    }
  }
  while (!deferred_.empty()) {
    EventLoop::Work work = std::move(deferred_.front());
    deferred_.pop_front();
    std::move(work)();
  }
  loop_->Clear();
}

// ---- what the engine's users call ----

absl::StatusOr<PeerId> Core::AddPeer(const PeerRecord& record) {
  const auto key = std::pair(record.uid.high, record.uid.low);
  if (const auto it = peer_ids_.find(key); it != peer_ids_.end()) return it->second;
  const auto id = static_cast<PeerId>(peers_.size());
  peers_.push_back(std::make_unique<Peer>(this, id, record));
  peer_ids_.emplace(key, id);
  Peer* peer = peers_.back().get();
  peer->Connect();
  if (peer->connecting()) KnockLater();

  std::vector<Stranger> waiting;
  for (const auto& [lane, stranger] : strangers_) {
    if (stranger.hello.dialer == record.uid) waiting.push_back(stranger);
  }
  std::sort(waiting.begin(), waiting.end(), [](const Stranger& a, const Stranger& b) {
    return std::pair(a.hello.attempt, a.index) < std::pair(b.hello.attempt, b.index);
  });
  for (const Stranger& stranger : waiting) {
    strangers_.erase(stranger.lane);
    if (!peer->Accept(stranger.lane, stranger.index, stranger.hello)) wire_->Close(stranger.lane);
  }
  return id;
}

void Core::KnockLater() {
  if (std::exchange(knock_timer_armed_, true)) return;
  loop_->AddTimer(std::chrono::steady_clock::now() + kKnockPause, [this] {
    knock_timer_armed_ = false;
    KnockAtNext();
  });
}

void Core::KnockAtNext() {
  const Instant now = std::chrono::steady_clock::now();
  if (knock_ != nullptr) {
    const bool early = Between(knocked_when_, now) < kKnockPatience;
    if (early && knock_->answer() == Knock::Answer::kNone) return KnockLater();
    peers_[knocked_at_]->OnKnock(*knock_);
    knock_.reset();
  }
  for (size_t tried = 0; tried < peers_.size(); ++tried) {
    knocked_at_ = (knocked_at_ + 1) % peers_.size();
    const Peer& peer = *peers_[knocked_at_];
    if (!peer.connecting()) continue;
    knock_ = wire_->KnockAt(peer.record().address);
    knocked_when_ = now;
    return KnockLater();
  }
}

Peer* Core::FindPeer(PeerId peer) const {
  const auto index = static_cast<size_t>(peer);
  return index < peers_.size() ? peers_[index].get() : nullptr;
}

absl::Status Core::Refusal(const Peer* peer, uint64_t channel) const {
  if (peer == nullptr) return absl::InvalidArgumentError("no such peer");
  const auto it = closed_.find(channel);
  return it == closed_.end() ? absl::OkStatus() : it->second;
}

void Core::Send(PeerId id, const Envelope& envelope, absl::Span<const std::byte> bytes,
                Engine::SendDone done, const SendOptions& options) {
  Peer* peer = FindPeer(id);
  if (const absl::Status refusal = Refusal(peer, envelope.key.channel); !refusal.ok()) {
    Defer([done = std::move(done), refusal]() mutable { std::move(done)(refusal); });
    return;
  }
  peer->Send(envelope, bytes, std::move(done), options);
}

void Core::Recv(PeerId id, const Envelope& envelope, absl::Span<std::byte> buffer,
                Engine::RecvDone done, const RecvOptions& options) {
  Peer* peer = FindPeer(id);
  if (const absl::Status refusal = Refusal(peer, envelope.key.channel); !refusal.ok()) {
    Defer([done = std::move(done), refusal]() mutable { std::move(done)(refusal); });
    return;
  }
  peer->Recv(envelope, buffer, std::move(done), options);
}

void Core::RememberClosed(uint64_t channel, const absl::Status& reason) {
  if (!closed_.emplace(channel, reason).second) return;
  closed_order_.push_back(channel);
  if (closed_order_.size() > kMaxClosedChannels) {
    closed_.erase(closed_order_.front());
    closed_order_.pop_front();
  }
}

void Core::CloseChannel(uint64_t channel, const absl::Status& reason,
                        absl::Span<const PeerId> tell) {
  const absl::Status why = reason.ok() ? absl::CancelledError("the channel was closed") : reason;
  RememberClosed(channel, why);
  channels_.erase(channel);
  closed_early_.erase(channel);
  for (const auto& peer : peers_) peer->CloseChannel(channel, why);
  for (PeerId id : tell) {
    if (Peer* peer = FindPeer(id); peer != nullptr) peer->TellClosed(channel, reason);
  }
}

void Core::OpenChannel(uint64_t channel, std::vector<PeerId> peers, Engine::ChannelEvents events) {
  if (closed_.erase(channel) > 0) {
    closed_order_.erase(std::find(closed_order_.begin(), closed_order_.end(), channel));
  }
  auto opened = std::make_shared<Channel>();
  opened->peers = std::move(peers);
  opened->events = std::move(events);
  channels_[channel] = opened;
  // What happened before it was opened.
  for (PeerId id : opened->peers) {
    Peer* peer = FindPeer(id);
    if (peer != nullptr && peer->lost()) {
      Defer([this, channel, opened, id, reason = peer->lost_reason()] {
        const auto it = channels_.find(channel);
        if (it == channels_.end() || it->second != opened || !opened->events.on_peer_lost) return;
        opened->events.on_peer_lost(id, reason);
      });
    } else if (peer != nullptr && !peer->Left(channel).ok()) {
      OnPeerLeftChannel(peer, channel, peer->Left(channel));
    }
  }
  if (const auto it = closed_early_.find(channel); it != closed_early_.end()) {
    const auto [id, reason] = it->second;
    closed_early_.erase(it);
    if (FindPeer(id) != nullptr) OnPeerClosedChannel(FindPeer(id), channel, reason);
  }
  if (!opened->events.on_unexpected) return;
  for (const PeerId id : opened->peers) {
    if (Peer* peer = FindPeer(id); peer != nullptr) {
      for (const MessageKey& key : peer->Unexpected(channel)) OnUnexpected(peer, key);
    }
  }
}

uint64_t Core::AddTimer(absl::Time when, EventLoop::Work work) {
  return loop_->AddTimer(std::chrono::steady_clock::now() + (when - absl::Now()), std::move(work));
}

void Core::WhenDelivered(Instant deadline, absl::AnyInvocable<void(absl::Status) &&> done) {
  std::string missing;
  int64_t messages = 0, bytes = 0;
  for (const auto& peer : peers_) {
    const Peer::Undelivered undelivered = peer->undelivered();
    if (undelivered.messages == 0) continue;
    messages += undelivered.messages;
    bytes += undelivered.bytes;
    absl::StrAppend(&missing, missing.empty() ? "" : ", ", peer->Description());
  }
  if (missing.empty()) {
    std::move(done)(absl::OkStatus());
  } else if (const Instant now = std::chrono::steady_clock::now(); now >= deadline) {
    std::move(done)(absl::DeadlineExceededError(
        absl::StrCat(messages, " messages (", bytes, " bytes) not delivered to ", missing)));
  } else {
    loop_->AddTimer(std::min(now + kDrainCheck, deadline),
                    [this, deadline, done = std::move(done)]() mutable {
                      WhenDelivered(deadline, std::move(done));
                    });
  }
}

std::string Core::WriteRecord() {
  if (options_.record_folder.empty()) return "";
  const std::string path = absl::StrCat(options_.record_folder, "/geomesh-", getpid(), ".events");
  // Of failures that come together, the first one tells.
  const Instant now = std::chrono::steady_clock::now();
  if (Between(record_written_, now) < kBetweenRecords) return path;
  record_written_ = now;
  std::string text = absl::StrCat(
      "# ", SelfDescription(), ", process ", getpid(), ", ", absl::FormatTime(absl::Now()), "\n",
      recorder_.Text(now, [this](PeerId peer) { return FindPeer(peer)->Description(); }));
  // The disk may be slow, and heartbeats must not wait for it.
  std::thread([path, text = std::move(text)] {
    std::ofstream(path + ".new", std::ios::binary | std::ios::trunc) << text;
    std::rename((path + ".new").c_str(), path.c_str());
  }).detach();
  return path;
}

int64_t Core::unsent_bytes() const {
  int64_t bytes = 0;
  for (const auto& peer : peers_) bytes += peer->unsent_bytes();
  return bytes;
}

std::vector<PeerStats> Core::Stats() const {
  const Instant now = std::chrono::steady_clock::now();
  std::vector<PeerStats> stats;
  for (const auto& peer : peers_) stats.push_back(peer->Stats(now));
  return stats;
}

// ---- WireEvents ----

void Core::OnLaneUp(LaneId lane) {
  if (const auto it = lanes_.find(lane); it != lanes_.end()) it->second->OnLaneUp(lane);
}

bool Core::OnLaneAccepted(LaneId lane, int index, int lanes,
                          absl::Span<const std::byte> hello_bytes) {
  const absl::StatusOr<Hello> hello = Hello::Parse(hello_bytes);
  if (!hello.ok()) {
    Log(LogLevel::kWarning, "transport",
        absl::StrCat("refused a connection: ", hello.status().message()));
    return false;
  }
  if (index < 0 || index > 255) return false;
  if (hello->version != kProtocolVersion) {
    Refuse(lane, *hello,
           absl::StrCat("it speaks protocol version ", kProtocolVersion, ", not ", hello->version,
                        ": install the same torch_geomesh everywhere"));
    return true;
  }
  if (hello->target != uid_) {
    Refuse(lane, *hello,
           "the process that was called has ended and another one has its address: the record in "
           "the store is stale");
    return true;
  }
  if (hello->dialer == uid_) return false;
  const auto it = peer_ids_.find(std::pair(hello->dialer.high, hello->dialer.low));
  if (it != peer_ids_.end()) return FindPeer(it->second)->Accept(lane, index, *hello);
  if (strangers_.size() >= kMaxStrangers) return false;
  strangers_[lane] = {lane, index, *hello, std::chrono::steady_clock::now()};
  return true;
}

// Says why before the lane is closed: the dialer's user shall read it.
void Core::Refuse(LaneId lane, const Hello& hello, absl::string_view why) {
  Log(LogLevel::kWarning, "transport",
      absl::StrCat("refused a connection of ",
                   hello.description.empty() ? "an unknown process" : hello.description, ": ",
                   why));
  refused_.insert(lane);
  Defer([this, lane, hello, text = std::string(why)] {
    if (!refused_.contains(lane)) return;
    auto* out = new Outgoing;
    out->owned_payload = text;
    out->payload = AsBytes(out->owned_payload);
    out->settled = true;
    out->on_wire = true;
    SegmentHeader& h = out->header;
    h.type = SegmentType::kRefused;
    h.source_check = SourceCheck(hello.target, hello.dialer);  // as whom we were called
    h.sequence = 1;
    h.payload_bytes = static_cast<uint32_t>(text.size());
    EncodeHeader(h, &out->header_bytes);
    on_wire_[out] = nullptr;
    const auto token = static_cast<PostToken>(reinterpret_cast<uint64_t>(out));
    if (!wire_->Post(lane, out->header_bytes, out->payload, token).ok()) {
      on_wire_.erase(out);
      delete out;
    }
    RunAt(std::chrono::steady_clock::now() + kRefusalLinger, [this, lane] {
      if (refused_.erase(lane) > 0) wire_->Close(lane);
    });
  });
}

void Core::OnSegment(LaneId lane, absl::Span<const std::byte> header,
                     absl::Span<const std::byte> payload) {
  if (const auto it = lanes_.find(lane); it != lanes_.end()) {
    it->second->OnSegment(lane, header, payload);
  } else if (strangers_.erase(lane) > 0 || refused_.erase(lane) > 0) {
    // Nobody speaks before the welcome.
    Log(LogLevel::kWarning, "transport", "closed a connection that spoke before it was welcome");
    Defer([this, lane] { wire_->Close(lane); });
  }
}

void Core::OnPosted(LaneId, PostToken token, const absl::Status& status) {
  const auto it = on_wire_.find(reinterpret_cast<Outgoing*>(static_cast<uint64_t>(token)));
  if (it == on_wire_.end()) return;
  const auto [out, peer] = *it;
  on_wire_.erase(it);
  if (peer != nullptr) {
    peer->OnPosted(out, status);
  } else {
    delete out;
  }
}

void Core::OnLaneLost(LaneId lane, const absl::Status& reason) {
  strangers_.erase(lane);
  refused_.erase(lane);
  if (const auto it = lanes_.find(lane); it != lanes_.end()) it->second->OnLaneLost(lane, reason);
}

// ---- PeerHost ----

std::string Core::SelfDescription() const {
  const auto it = peer_ids_.find(std::pair(uid_.high, uid_.low));
  if (it != peer_ids_.end()) return FindPeer(it->second)->Description();
  return absl::StrCat("a process on host ", options_.host);
}

void Core::OnPeerLost(Peer* peer, const absl::Status& reason) {
  for (const auto& [id, channel] : channels_) {
    if (std::find(channel->peers.begin(), channel->peers.end(), peer->id()) ==
        channel->peers.end()) {
      continue;
    }
    Defer([this, id = id, channel = channel, peer = peer->id(), reason] {
      const auto it = channels_.find(id);
      if (it == channels_.end() || it->second != channel || !channel->events.on_peer_lost) return;
      channel->events.on_peer_lost(peer, reason);
    });
  }
}

void Core::OnPeerClosedChannel(Peer* peer, uint64_t channel, const absl::Status& reason) {
  const auto it = channels_.find(channel);
  if (it == channels_.end()) {
    if (closed_.contains(channel)) return;
    if (!closed_early_.emplace(channel, std::pair(peer->id(), reason)).second) return;
    closed_early_order_.push_back(channel);
    if (closed_early_order_.size() > kMaxClosedChannels) {
      closed_early_.erase(closed_early_order_.front());
      closed_early_order_.pop_front();
    }
    return;
  }
  Defer([this, channel, opened = it->second, peer = peer->id(), reason] {
    const auto it = channels_.find(channel);
    if (it == channels_.end() || it->second != opened || !opened->events.on_closed) return;
    opened->events.on_closed(peer, reason);
  });
}

void Core::OnPeerLeftChannel(Peer* peer, uint64_t channel, const absl::Status& reason) {
  const auto it = channels_.find(channel);
  if (it == channels_.end()) return;  // told when it is opened
  Defer([this, channel, opened = it->second, peer = peer->id(), reason] {
    const auto it = channels_.find(channel);
    if (it == channels_.end() || it->second != opened || !opened->events.on_peer_left) return;
    opened->events.on_peer_left(peer, reason);
  });
}

void Core::OnUnexpected(Peer* peer, const MessageKey& key) {
  const auto it = channels_.find(key.channel);
  if (it == channels_.end()) return;
  const std::shared_ptr<Channel> channel = it->second;  // the handler may close it
  if (channel->events.on_unexpected) channel->events.on_unexpected(peer->id(), key);
}

}  // namespace geomesh::transport
