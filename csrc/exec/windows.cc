#include "exec/windows.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "transport/bytes.h"

namespace geomesh::exec {
namespace {

enum class Mail : uint8_t { kPut, kLanded, kSignal };

uint64_t PutId(uint64_t put) { return kWindowMessages | put; }

}  // namespace

Windows::Windows(transport::Engine* engine, Mailbox* mailbox, uint64_t channel,
                 std::vector<transport::PeerId> peers, Broken broken)
    : engine_(engine),
      mailbox_(mailbox),
      channel_(channel),
      peers_(std::move(peers)),
      broken_(std::move(broken)),
      origins_(peers_.size()),
      puts_(peers_.size(), 0) {
  mailbox->SetReader(
      Mailbox::Service::kWindow,
      {.on_mail = [this](size_t from, absl::string_view text) { OnMail(from, text); },
       .on_lost =
           [this](size_t rank, const absl::Status& reason) {
             bool needed = false;
             for (const auto& [put, state] : under_way_) needed = needed || put.first == rank;
             for (const auto& [window, waiting] : origins_[rank].waiting) {
               needed = needed || !waiting.empty();
             }
             if (needed) broken_(reason);
           }});
}

void Windows::Register(uint64_t window, absl::Span<std::byte> bytes, std::shared_ptr<void> memory) {
  windows_[window] = {bytes, std::move(memory)};
}

void Windows::Deregister(uint64_t window) {
  windows_.erase(window);
  for (Origin& origin : origins_) origin.signals.erase(window);
}

void Windows::Put(uint64_t window, size_t rank, uint64_t offset, absl::Span<const std::byte> bytes,
                  absl::Time deadline, Done done) {
  const uint64_t put = puts_[rank]++;
  const std::pair<size_t, uint64_t> key(rank, put);
  PutUnderWay& state = under_way_[key];
  state.done = std::move(done);
  if (!closed_.ok()) {
    state.status = closed_;
    state.sent = state.there = true;
    engine_->Post([weak = weak_from_this(), key] {
      if (const auto self = weak.lock()) self->EndPut(key.first, key.second);
    });
    return;
  }
  transport::ByteWriter mail;
  mail.Integer(static_cast<uint8_t>(Mail::kPut));
  mail.Integer(window);
  mail.Integer(offset);
  mail.Integer(uint64_t{bytes.size()});
  mailbox_->Send(rank, Mailbox::Service::kWindow, mail.bytes());
  state.timer = engine_->AddTimer(deadline, [weak = weak_from_this(), rank, offset, bytes] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    self->broken_(absl::DeadlineExceededError(absl::StrCat(
        "a put of ", bytes.size(), " bytes at byte ", offset, " of the window of ",
        self->engine_->DescribePeer(self->peers_[rank]), " was not done at its deadline")));
  });
  engine_->Send(peers_[rank], {{channel_, PutId(put)}, 0}, bytes,
                [weak = weak_from_this(), key](const absl::Status& status) {
                  const auto self = weak.lock();
                  if (self == nullptr) return;
                  PutUnderWay& state = self->under_way_.at(key);
                  state.sent = true;
                  if (!status.ok()) {  // the group ends: nobody will say anything
                    state.status = status;
                    state.there = true;
                  }
                  self->EndPut(key.first, key.second);
                });
}

void Windows::EndPut(size_t rank, uint64_t put) {
  const auto it = under_way_.find({rank, put});
  if (it == under_way_.end() || !it->second.sent || !it->second.there) return;
  const PutUnderWay state = std::move(it->second);
  under_way_.erase(it);
  if (state.timer != 0) engine_->CancelTimer(state.timer);
  state.done(state.status);
}

void Windows::Signal(uint64_t window, size_t rank, Done done) {
  if (closed_.ok()) {
    transport::ByteWriter mail;
    mail.Integer(static_cast<uint8_t>(Mail::kSignal));
    mail.Integer(window);
    mailbox_->Send(rank, Mailbox::Service::kWindow, mail.bytes());
  }
  engine_->Post([done = std::move(done), status = closed_] { done(status); });
}

void Windows::AwaitSignal(uint64_t window, size_t rank, absl::Time deadline, Done done) {
  const uint64_t wait = next_wait_++;
  Wait& state = waits_[wait];
  state.done = std::move(done);
  if (!closed_.ok()) {
    engine_->Post([weak = weak_from_this(), wait, reason = closed_] {
      if (const auto self = weak.lock()) self->EndWait(wait, reason);
    });
    return;
  }
  state.timer = engine_->AddTimer(deadline, [weak = weak_from_this(), wait, window, rank] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    std::erase(self->origins_[rank].waiting[window], wait);
    self->EndWait(wait, absl::DeadlineExceededError(absl::StrCat(
                            "no signal from ", self->engine_->DescribePeer(self->peers_[rank]),
                            " before the deadline")));
  });
  origins_[rank].waiting[window].push_back(wait);
  engine_->Post([weak = weak_from_this(), rank] {  // not within this call
    if (const auto self = weak.lock()) self->CountSignals(rank);
  });
}

void Windows::EndWait(uint64_t wait, const absl::Status& status) {
  const auto it = waits_.find(wait);
  if (it == waits_.end()) return;
  const Wait state = std::move(it->second);
  waits_.erase(it);
  if (state.timer != 0) engine_->CancelTimer(state.timer);
  state.done(status);
}

void Windows::OnMail(size_t rank, absl::string_view text) {
  transport::ByteReader reader(text);
  uint8_t kind = 0;
  uint64_t number = 0;
  if (!reader.Integer(&kind) || !reader.Integer(&number)) return;
  switch (static_cast<Mail>(kind)) {
    case Mail::kPut: {
      uint64_t offset = 0, bytes = 0;
      if (reader.Integer(&offset) && reader.Integer(&bytes)) OnPut(rank, number, offset, bytes);
      break;
    }
    case Mail::kLanded: {
      const auto it = under_way_.find({rank, number});
      if (it == under_way_.end()) return;
      it->second.there = true;
      EndPut(rank, number);
      break;
    }
    case Mail::kSignal:
      origins_[rank].held.emplace_back(origins_[rank].puts, number);
      CountSignals(rank);
      break;
  }
}

void Windows::OnPut(size_t rank, uint64_t window, uint64_t offset, uint64_t bytes) {
  const auto it = windows_.find(window);
  const uint64_t size = it == windows_.end() ? 0 : it->second.bytes.size();
  if (it == windows_.end() || offset > size || bytes > size - offset) {
    broken_(absl::InvalidArgumentError(absl::StrCat(
        "a put of ", bytes, " bytes at byte ", offset, " from ",
        engine_->DescribePeer(peers_[rank]), " to window ", window, ", which ",
        it == windows_.end() ? "is not registered here (any more): puts must be waited for before "
                               "the window is deregistered"
                             : absl::StrCat("has ", size, " bytes"))));
    return;
  }
  const uint64_t put = origins_[rank].puts++;
  origins_[rank].landing.insert(put);
  engine_->Recv(peers_[rank], {{channel_, PutId(put)}, 0}, it->second.bytes.subspan(offset, bytes),
                [weak = weak_from_this(), rank, put, bytes,
                 keep = it->second.keep](absl::StatusOr<size_t> received) {
                  const auto self = weak.lock();
                  if (self == nullptr || !received.ok()) return;  // the group ends
                  self->OnLanded(rank, put,
                                 *received == bytes ? absl::OkStatus()
                                                    : absl::InvalidArgumentError(absl::StrCat(
                                                          "a put of ", *received,
                                                          " bytes was announced as ", bytes)));
                });
}

void Windows::OnLanded(size_t rank, uint64_t put, const absl::Status& status) {
  if (!status.ok()) return broken_(status);
  origins_[rank].landing.erase(put);
  transport::ByteWriter mail;
  mail.Integer(static_cast<uint8_t>(Mail::kLanded));
  mail.Integer(put);
  mailbox_->Send(rank, Mailbox::Service::kWindow, mail.bytes());
  CountSignals(rank);
}

void Windows::CountSignals(size_t rank) {
  Origin& origin = origins_[rank];
  while (!origin.held.empty()) {
    const auto [puts_before, window] = origin.held.front();
    if (!origin.landing.empty() && *origin.landing.begin() < puts_before) break;
    ++origin.signals[window];
    origin.held.pop_front();
  }
  std::vector<uint64_t> ended;
  for (auto& [window, waiting] : origin.waiting) {
    uint64_t& signals = origin.signals[window];
    while (!waiting.empty() && signals > 0) {
      --signals;
      ended.push_back(waiting.front());
      waiting.pop_front();
    }
  }
  for (const uint64_t wait : ended) EndWait(wait, absl::OkStatus());
}

void Windows::Close(const absl::Status& reason) {
  if (!closed_.ok()) return;
  closed_ = reason;
  std::vector<uint64_t> waits;
  for (const auto& [wait, state] : waits_) waits.push_back(wait);
  for (const uint64_t wait : waits) EndWait(wait, reason);
  std::vector<std::pair<size_t, uint64_t>> puts;
  for (auto& [key, state] : under_way_) {
    state.there = true;
    state.status.Update(reason);
    puts.push_back(key);
  }
  for (const auto& [rank, put] : puts) EndPut(rank, put);
}

}  // namespace geomesh::exec
