// The engine's public face, and what happens to engines in a forked child.
#include "transport/engine.h"

#include <pthread.h>

#include <mutex>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "transport/core.h"

namespace geomesh::transport {
namespace {

// All living engines, for the fork handler: a child (a DataLoader's worker) inherits memory and
// descriptors, and neither the thread nor the right to use them.
struct Registry {
  std::mutex mutex;
  absl::flat_hash_set<Core*> cores;
};

Registry& GetRegistry() {
  static Registry* registry = [] {
    auto* created = new Registry;  // never destroyed: a fork may come late
    pthread_atfork([] { GetRegistry().mutex.lock(); }, [] { GetRegistry().mutex.unlock(); },
                   [] {
                     for (Core* core : GetRegistry().cores) core->AbandonAfterFork();
                     GetRegistry().mutex.unlock();
                   });
    return created;
  }();
  return *registry;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(EngineOptions options,
                                                       std::unique_ptr<Wire> wire) {
  absl::StatusOr<std::unique_ptr<EventLoop>> loop = EventLoop::Create();
  if (!loop.ok()) return loop.status();
  auto core = std::make_unique<Core>(std::move(options), std::move(wire), *std::move(loop));
  if (absl::Status status = core->Start(); !status.ok()) return status;
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.cores.insert(core.get());
  return std::unique_ptr<Engine>(new Engine(std::move(core)));
}

Engine::Engine(std::unique_ptr<Core> core) : core_(std::move(core)) {}

Engine::~Engine() {
  {
    Registry& registry = GetRegistry();
    std::lock_guard<std::mutex> lock(registry.mutex);
    registry.cores.erase(core_.get());
  }
  if (core_->abandoned()) {
    core_.release();  // its thread and its peers belong to the parent
    return;
  }
  core_->Stop();
}

const ProcessUid& Engine::uid() const { return core_->uid(); }
absl::string_view Engine::wire_name() const { return core_->wire_name(); }
const std::string& Engine::address() const { return core_->address(); }
std::string Engine::memory_offer() const { return core_->memory_offer(); }
void Engine::Post(absl::AnyInvocable<void() &&> work) { core_->Post(std::move(work)); }

void Engine::PostQuietly(absl::AnyInvocable<void() &&> work) {
  core_->PostQuietly(std::move(work));
}
void Engine::Nudge(bool here) { core_->Nudge(here); }
bool Engine::Help(absl::FunctionRef<bool()> done, absl::Duration patience) {
  return core_->Help(done, patience);
}

absl::Status Engine::Drain(absl::Time deadline) {
  const Instant until = std::chrono::steady_clock::now() + (deadline - absl::Now());
  auto state = std::make_shared<internal::CallState<absl::Status>>();
  Post([core = core_.get(), until, finisher = internal::Finisher<absl::Status>(state)]() mutable {
    core->WhenDelivered(until, [finisher = std::move(finisher)](absl::Status status) mutable {
      finisher.Finish(std::move(status));
    });
  });
  return state->Wait();
}

void Engine::LimitGoodbye(absl::Duration limit) {
  Post([core = core_.get(), limit] { core->LimitGoodbye(limit); });
}

absl::StatusOr<PeerId> Engine::AddPeer(const PeerRecord& record) { return core_->AddPeer(record); }

void Engine::Send(PeerId peer, Envelope envelope, absl::Span<const std::byte> bytes, SendDone done,
                  SendOptions options) {
  core_->Send(peer, envelope, bytes, std::move(done), options);
}

void Engine::Recv(PeerId peer, Envelope envelope, absl::Span<std::byte> buffer, RecvDone done,
                  RecvOptions options) {
  core_->Recv(peer, envelope, buffer, std::move(done), options);
}

void Engine::CloseChannel(uint64_t channel, const absl::Status& reason,
                          absl::Span<const PeerId> tell) {
  core_->CloseChannel(channel, reason, tell);
}

void Engine::OpenChannel(uint64_t channel, std::vector<PeerId> peers, ChannelEvents events) {
  core_->OpenChannel(channel, std::move(peers), std::move(events));
}

bool Engine::IsUnexpected(PeerId peer, const MessageKey& key) const {
  const Peer* found = core_->FindPeer(peer);
  return found != nullptr && found->IsUnexpected(key);
}

uint64_t Engine::AddTimer(absl::Time when, absl::AnyInvocable<void() &&> work) {
  return core_->AddTimer(when, std::move(work));
}

void Engine::CancelTimer(uint64_t timer) { core_->CancelTimer(timer); }
std::string Engine::WriteRecord() { return core_->WriteRecord(); }

int64_t Engine::unsent_bytes() const { return core_->unsent_bytes(); }
std::vector<PeerStats> Engine::Stats() const { return core_->Stats(); }

std::string Engine::DescribePeer(PeerId peer) const {
  const Peer* found = core_->FindPeer(peer);
  return found == nullptr ? "an unknown process" : found->Description();
}

}  // namespace geomesh::transport
