// A peer that says anything in any order, against a true Peer with its Inbox and Outbox: one thread
// and no network, so a run takes microseconds and is the same each time. Inputs are steps: segments
// (mostly right, or any bytes), what this side's user does, and what the wire reports.
//
// Must hold whatever comes: what is kept unasked for stays within the bound, memory is used only
// while it is lent, and each send and receive ends exactly once.
#include <algorithm>
#include <deque>
#include <memory>
#include <unordered_map>
#include <unordered_set>

#include "base/log.h"
#include "fuzz_target.h"
#include "transport/bytes.h"
#include "transport/peer.h"

namespace geomesh::fuzz {
namespace {

using namespace transport;  // NOLINT

constexpr ProcessUid kSelf{5, 0}, kLesser{1, 0}, kGreater{9, 0};
constexpr size_t kSegment = kMaxSegmentPayloadBytes;
constexpr int kMaxSteps = 300, kMaxOperations = 64;

enum Step : uint8_t {
  kAnySegment,  // 80 bytes of header
  kSegmentOfType,
  kRecv,
  kSend,
  kPosted,  // the wire lets go of a segment
  kLoseLane,
  kDialled,  // another lane comes
  kCloseChannel,
  kRunTimers,
  kTick,
  kLeave,
  kSteps
};

// Takes what is posted, and reads it only when it lets go of it, as a wire does.
class StubWire : public Wire {
 public:
  struct Posted {
    LaneId lane;
    absl::Span<const std::byte> header, payload;
    PostToken token;
  };

  absl::string_view name() const override { return "stub"; }
  absl::StatusOr<std::string> Listen(WireEvents*) override { return std::string("stub"); }
  absl::StatusOr<LaneId> Dial(absl::string_view, absl::string_view, int lanes,
                              absl::Span<const std::byte>) override {
    const LaneId first{next_};
    for (int i = 0; i < lanes; ++i) alive_.insert(next_++);
    return first;
  }
  absl::Status Post(LaneId lane, absl::Span<const std::byte> header,
                    absl::Span<const std::byte> payload, PostToken token) override {
    if (alive_.count(static_cast<uint32_t>(lane)) == 0) return absl::UnavailableError("closed");
    posted.push_back({lane, header, payload, token});
    ++sent_[static_cast<uint32_t>(lane)];
    return absl::OkStatus();
  }
  void Close(LaneId lane) override { alive_.erase(static_cast<uint32_t>(lane)); }
  int Progress() override { return 0; }
  bool Arm() override { return true; }
  int fd() const override { return -1; }

  LaneId NewLane() {
    alive_.insert(next_);
    return LaneId{next_++};
  }
  std::vector<uint32_t> Alive() const {
    std::vector<uint32_t> lanes(alive_.begin(), alive_.end());
    std::sort(lanes.begin(), lanes.end());
    return lanes;
  }
  uint64_t sent(uint32_t lane) { return sent_[lane]; }

  std::deque<Posted> posted;

 private:
  uint32_t next_ = 1;
  std::unordered_set<uint32_t> alive_;
  std::unordered_map<uint32_t, uint64_t> sent_;
};

class Host : public PeerHost {
 public:
  Host() {
    options_.unexpected_bytes = 1 << 20;
    options_.host = "self";
  }

  Wire& wire() override { return wire_; }
  const EngineOptions& options() const override { return options_; }
  const ProcessUid& self_uid() const override { return kSelf; }
  std::string SelfDescription() const override { return "self"; }
  void Defer(absl::AnyInvocable<void() &&> work) override { deferred_.push_back(std::move(work)); }
  void RunAt(Instant, absl::AnyInvocable<void() &&> work) override {
    timers_.push_back(std::move(work));
  }
  void Record(const RecordedEvent&) override {}
  std::string WriteRecord() override { return ""; }
  void MarkDirty(Peer*) override { dirty_ = true; }
  void AckSoon() override { ack_soon_ = true; }
  void AddLane(LaneId, Peer*) override {}
  void ForgetLane(LaneId) override {}
  void Track(Outgoing* out, Peer*) override { tracked_.insert(out); }
  void Untrack(Outgoing* out) override { tracked_.erase(out); }
  bool ChannelClosed(uint64_t channel) const override { return closed_.count(channel) > 0; }
  void OnPeerLost(Peer*, const absl::Status& reason) override {
    FUZZ_CHECK(!reason.ok());
    FUZZ_CHECK(++lost_ == 1);
  }
  void OnPeerClosedChannel(Peer*, uint64_t, const absl::Status& reason) override {
    FUZZ_CHECK(!reason.ok());
  }
  void OnPeerLeftChannel(Peer*, uint64_t, const absl::Status& reason) override {
    FUZZ_CHECK(!reason.ok());
  }
  void OnUnexpected(Peer*, const MessageKey&) override {}

  // What the engine's loop does before it sleeps.
  void Settle(Peer* peer) {
    while (!deferred_.empty() || dirty_ || ack_soon_) {
      while (!deferred_.empty()) {
        absl::AnyInvocable<void()&&> work = std::move(deferred_.front());
        deferred_.pop_front();
        std::move(work)();
      }
      if (std::exchange(dirty_, false)) {
        peer->Pump();
        peer->FlushAcks(/*all=*/false);
      }
      if (std::exchange(ack_soon_, false)) {
        peer->FlushAcks(/*all=*/true);
        ack_soon_ = false;  // a bare segment that is still on the wire is sent again after it
      }
    }
  }
  void RunTimers() {
    for (auto& timer : std::exchange(timers_, {})) std::move(timer)();
  }
  // The wire lets go of the oldest segment.
  void LetGo(Peer* peer, const absl::Status& status) {
    const StubWire::Posted posted = wire_.posted.front();
    wire_.posted.pop_front();
    static volatile uint64_t sink = 0;
    for (const auto span : {posted.header, posted.payload}) {
      for (size_t i = 0; i < span.size(); i += 64) sink = sink + static_cast<uint8_t>(span[i]);
      if (!span.empty()) sink = sink + static_cast<uint8_t>(span.back());
    }
    auto* out = reinterpret_cast<Outgoing*>(static_cast<uint64_t>(posted.token));
    FUZZ_CHECK(tracked_.erase(out) == 1);
    peer->OnPosted(out, status);
  }

  StubWire& stub() { return wire_; }
  void Close(uint64_t channel) { closed_.insert(channel); }

 private:
  EngineOptions options_;
  StubWire wire_;
  std::deque<absl::AnyInvocable<void() &&>> deferred_;
  std::vector<absl::AnyInvocable<void() &&>> timers_;
  std::unordered_set<Outgoing*> tracked_;
  std::unordered_set<uint64_t> closed_;
  bool dirty_ = false, ack_soon_ = false;
  int lost_ = 0;
};

// One input's run.
class Run {
 public:
  explicit Run(Input input) : input_(input) {
    PeerRecord record;
    dials_ = input_.Byte() % 2 == 1;
    record.uid = dials_ ? kGreater : kLesser;
    record.rank = 7;
    record.host = "hostile";
    record.wire = "stub";
    record.address = "stub";
    uid_ = record.uid;
    peer_ = std::make_unique<Peer>(&host_, PeerId{0}, record);
    peer_->Connect();
  }

  void Steps() {
    for (int step = 0; step < kMaxSteps && !input_.empty(); ++step) {
      Do(static_cast<Step>(input_.Byte() % kSteps));
      host_.Settle(peer_.get());
      const PeerStats stats = peer_->Stats(std::chrono::steady_clock::now());
      FUZZ_CHECK(stats.unexpected_bytes <= static_cast<uint64_t>(host_.options().unexpected_bytes));
      if (!any_channel_ && peer_->Unexpected(1).empty() && peer_->Unexpected(2).empty()) {
        FUZZ_CHECK(stats.unexpected_bytes == 0);
      }
    }
  }

  void End() {
    const absl::Status reason = absl::CancelledError("the end");
    peer_->Leave(reason);
    host_.Settle(peer_.get());
    // Nothing is kept, and what was kept has been counted right.
    FUZZ_CHECK(peer_->Stats(std::chrono::steady_clock::now()).unexpected_bytes == 0);
    peer_->Lose(reason);
    peer_->CloseLanes();
    host_.Settle(peer_.get());
    while (!host_.stub().posted.empty()) host_.LetGo(peer_.get(), reason);
    host_.Settle(peer_.get());
    for (const auto& operation : operations_) FUZZ_CHECK(operation->ended == 1);
  }

 private:
  struct Operation {
    std::vector<std::byte> bytes;
    int ended = 0;
  };

  // Of few values, so that they meet.
  MessageKey Key() {
    const uint8_t byte = input_.Byte();
    return {uint64_t{1} + byte / 8 % 2, uint64_t{byte} % 8};
  }
  uint64_t Size() {
    static constexpr uint64_t kSizes[] = {0, 1, 100, 5000, kSegment, kSegment + 1, 3 * kSegment};
    const uint8_t byte = input_.Byte();
    return byte < 250 ? kSizes[byte % std::size(kSizes)] : input_.Integer(8);
  }
  std::optional<uint32_t> SomeLane() {
    const std::vector<uint32_t> lanes = host_.stub().Alive();
    const uint8_t byte = input_.Byte();
    if (lanes.empty()) return std::nullopt;
    return lanes[byte % lanes.size()];
  }

  void Arrive(uint32_t lane, absl::Span<const std::byte> header, size_t payload_bytes) {
    // Of exactly its size, so that AddressSanitizer sees a read past the end.
    std::vector<std::byte> payload(payload_bytes);
    for (size_t i = 0; i < payload.size() && i < 2; ++i) payload[i] = std::byte{input_.Byte()};
    peer_->OnSegment(LaneId{lane}, header, payload);
  }

  void ArriveOfType(uint32_t lane) {
    SegmentHeader h;
    h.type = static_cast<SegmentType>(1 + input_.Byte() % 15);
    h.source_check = SourceCheck(uid_, kSelf);
    h.sequence = ++sequences_[lane];
    h.key = Key();
    const uint8_t ways = input_.Byte();
    h.ack = ways % 4 == 0 ? 0 : host_.stub().sent(lane);
    h.flags = h.type == SegmentType::kData || h.type == SegmentType::kHeartbeat ? ways / 4 % 4 : 0;
    if (ways >= 240) h.released = input_.Integer(8);
    h.fingerprint = ways / 16 % 2 == 0 ? 0 : input_.Byte();
    size_t payload = 0;
    switch (h.type) {
      case SegmentType::kData:
        h.total_bytes = Size();
        h.offset = input_.Byte() % 4 * kSegment;
        if (h.offset < h.total_bytes)
          payload = std::min<uint64_t>(kSegment, h.total_bytes - h.offset);
        break;
      case SegmentType::kWelcome:
        h.total_bytes = Size();
        break;
      case SegmentType::kMoreLanes:
      case SegmentType::kLaneLost:
        h.key.id = input_.Integer(3);
        h.offset = input_.Byte();
        break;
      case SegmentType::kInPlace:
        h.total_bytes = Size();
        payload = 24;
        break;
      case SegmentType::kWanted:
      case SegmentType::kAnnounce:
      case SegmentType::kPulled: {
        // Keys of the same few values.
        std::vector<MessageKey> keys;
        for (int n = 1 + input_.Byte() % 4; n > 0; --n) keys.push_back(Key());
        h.payload_bytes = static_cast<uint32_t>(16 * keys.size());
        HeaderBytes bytes;
        EncodeHeader(h, &bytes);
        const std::string payload_bytes = EncodeKeys(keys);
        peer_->OnSegment(LaneId{lane}, bytes, AsBytes(payload_bytes));
        return;
      }
      case SegmentType::kReject:
      case SegmentType::kClose:
      case SegmentType::kRefused:
        payload = input_.Byte() % 32;
        break;
      default:
        break;
    }
    h.payload_bytes = static_cast<uint32_t>(payload);
    HeaderBytes bytes;
    EncodeHeader(h, &bytes);
    Arrive(lane, bytes, payload);
  }

  void Do(Step step) {
    switch (step) {
      case kAnySegment: {
        const std::optional<uint32_t> lane = SomeLane();
        any_channel_ = true;
        const size_t payload = input_.Integer(3) % (kSegment + 1);
        const std::string header(input_.Take(kSegmentHeaderBytes));
        if (lane.has_value()) Arrive(*lane, AsBytes(header), payload);
        break;
      }
      case kSegmentOfType:
        if (const std::optional<uint32_t> lane = SomeLane(); lane.has_value()) ArriveOfType(*lane);
        break;
      case kRecv: {
        const MessageKey key = Key();
        const uint64_t size = std::min<uint64_t>(Size(), 4 * kSegment);
        // As the engine does.
        if (host_.ChannelClosed(key.channel) || operations_.size() >= kMaxOperations) break;
        auto operation = std::make_shared<Operation>();
        operation->bytes.resize(size);
        operations_.push_back(operation);
        peer_->Recv({key, 0}, absl::MakeSpan(operation->bytes),
                    [operation](absl::StatusOr<size_t> result) {
                      ++operation->ended;
                      if (result.ok()) FUZZ_CHECK(*result <= operation->bytes.size());
                      // The user's memory is the user's again.
                      std::vector<std::byte>().swap(operation->bytes);
                    },
                    {});
        break;
      }
      case kSend: {
        const MessageKey key = Key();
        const uint64_t size = std::min<uint64_t>(Size(), 4 * kSegment);
        const bool in_place = input_.Byte() % 2 == 1;
        if (host_.ChannelClosed(key.channel) || operations_.size() >= kMaxOperations) break;
        auto operation = std::make_shared<Operation>();
        operation->bytes.resize(size);
        operations_.push_back(operation);
        SendOptions options;
        options.in_place = in_place;
        peer_->Send(
            {key, 0}, operation->bytes,
            [operation](const absl::Status&) {
              ++operation->ended;
              std::vector<std::byte>().swap(operation->bytes);
            },
            options);
        break;
      }
      case kPosted: {
        const bool well = input_.Byte() % 8 != 0;
        if (host_.stub().posted.empty()) break;
        host_.LetGo(peer_.get(), well ? absl::OkStatus() : absl::UnavailableError("broke"));
        break;
      }
      case kLoseLane:
        if (const std::optional<uint32_t> lane = SomeLane(); lane.has_value()) {
          host_.stub().Close(LaneId{*lane});
          peer_->OnLaneLost(LaneId{*lane}, absl::UnavailableError("the wire broke"));
        }
        break;
      case kDialled: {
        Hello hello;
        hello.dialer = uid_;
        hello.target = kSelf;
        const uint8_t byte = input_.Byte();
        hello.attempt = 1 + byte % 2;
        hello.unexpected_bytes = Size();
        hello.more = byte >= 128;
        const LaneId lane = host_.stub().NewLane();
        if (!peer_->Accept(lane, byte / 2 % 8, hello)) host_.stub().Close(lane);
        break;
      }
      case kCloseChannel: {
        const uint64_t channel = Key().channel;
        host_.Close(channel);
        peer_->CloseChannel(channel, absl::CancelledError("closed"));
        peer_->TellClosed(channel, absl::CancelledError("closed"));
        break;
      }
      case kRunTimers:
        host_.RunTimers();
        break;
      case kTick: {
        const uint8_t byte = input_.Byte();
        peer_->Tick(std::chrono::steady_clock::now() + std::chrono::seconds(byte % 64),
                    absl::ZeroDuration(), byte >= 128);
        break;
      }
      case kLeave:
        if (input_.Byte() == 1) peer_->Leave(absl::CancelledError("left"));
        break;
      case kSteps:
        break;
    }
  }

  Input input_;
  Host host_;
  ProcessUid uid_;
  bool dials_ = false;
  bool any_channel_ = false;  // not only 1 and 2, which Key() has
  std::unordered_map<uint32_t, uint64_t> sequences_;
  std::vector<std::shared_ptr<Operation>> operations_;
  std::unique_ptr<Peer> peer_;
};

}  // namespace

void TryInput(absl::string_view bytes) {
  static const bool quiet = [] {
    SetLogSink([](LogLevel, absl::string_view) {});
    return true;
  }();
  (void)quiet;
  Run run{Input(bytes)};
  run.Steps();
  run.End();
}

std::vector<std::string> Seeds() {
  const auto text = [](std::initializer_list<int> bytes) {
    std::string seed;
    for (const int byte : bytes) seed.push_back(static_cast<char>(byte));
    return seed;
  };
  // Segments: lane, type less one, key, ways, then what the type takes.
  const std::string two_lanes = text({0, kDialled, 0, 2, kDialled, 2, 2});
  const std::string posted = text({kPosted, 1, kPosted, 1, kPosted, 1});
  const auto data = [&](int lane, int key, int size, int offset) {
    return text({kSegmentOfType, lane, 0, key, 1, size, offset, 'a', 'b'});
  };
  const auto plain = [&](int lane, SegmentType type, int key) {
    return text({kSegmentOfType, lane, static_cast<int>(type) - 1, key, 1});
  };
  std::vector<std::string> seeds;
  // A message before its receive, and one after, whose segments come in turn on two lanes.
  seeds.push_back(two_lanes + posted + data(0, 3, 2, 0) + text({kRecv, 3, 2, kRecv, 4, 6}) +
                  data(0, 4, 6, 2) + data(1, 4, 6, 0) + data(0, 4, 6, 1));
  // As much as may come before its receive; then a segment more, one that came before, one of
  // another size.
  const std::string early =
      two_lanes + data(0, 1, 6, 0) + data(1, 1, 6, 1) + data(0, 1, 6, 2) + data(0, 2, 3, 0);
  seeds.push_back(early + text({kRecv, 1, 6, kRecv, 2, 3}));
  for (const std::string& breach : {data(0, 5, 4, 0), data(1, 2, 3, 0), data(0, 2, 2, 0)}) {
    seeds.push_back(early + breach + text({kRecv, 1, 6, kRecv, 2, 3}));
  }
  // A send that is wanted, acknowledged, and one whose lane breaks.
  seeds.push_back(two_lanes + plain(0, SegmentType::kHeartbeat, 0) + text({kSend, 5, 6, 0}) +
                  posted + text({kSegmentOfType, 0, 3, 5, 1, 0, 5}) +
                  plain(1, SegmentType::kAck, 0) + text({kLoseLane, 0}) + posted +
                  text({kSegmentOfType, 0, 8, 0, 1, 0, 1, 0, 0}) + posted);
  // The other side welcomes.
  seeds.push_back(text({1, kSegmentOfType, 0, 9, 0, 1, 4, kSegmentOfType, 1, 9, 0, 1, 4}) + posted +
                  text({kSend, 2, 4, 1}) + data(1, 2, 4, 0));
  // Control of all kinds; goodbye.
  std::string control = two_lanes;
  for (const auto type : {SegmentType::kReject, SegmentType::kClose, SegmentType::kReads,
                          SegmentType::kInPlace, SegmentType::kBye}) {
    control += plain(0, type, 1) + text({3, 'a', 'b'});
  }
  seeds.push_back(control + text({kRunTimers, kTick, 140, kCloseChannel, 0, kLeave, 1}));
  // A channel that it leaves, with a receive and a send that wait, a message before and one after.
  seeds.push_back(two_lanes + text({kRecv, 1, 2, kSend, 2, 3, 0}) + posted + data(0, 3, 2, 0) +
                  plain(1, SegmentType::kClose, 0) + text({0}) + text({kRecv, 3, 2, kRecv, 4, 2}) +
                  data(1, 4, 2, 0));
  // A header of any bytes, for once right.
  SegmentHeader header;
  header.type = SegmentType::kHeartbeat;
  header.source_check = SourceCheck(kLesser, kSelf);
  header.sequence = 1;
  HeaderBytes bytes;
  EncodeHeader(header, &bytes);
  seeds.push_back(two_lanes + text({kAnySegment, 0, 0, 0, 0}) + std::string(AsText(bytes)));
  return seeds;
}

}  // namespace geomesh::fuzz
