#include "emulator/link.h"

#include <algorithm>
#include <utility>

namespace geomesh::emulator {
namespace {

// A super-packet comes out in pieces of this much wire time, so that a slow link has no bursts.
constexpr double kPieceNs = 1e6;

void Accumulate(Tally& into, const Tally& from) {
  into.bytes += from.bytes;
  into.packets += from.packets;
}

void Accumulate(PathCounters& into, const PathCounters& from) {
  Accumulate(into.sent, from.sent);
  Accumulate(into.lost, from.lost);
  Accumulate(into.dropped, from.dropped);
}

uint64_t NewTicket() {
  static uint64_t last = 0;
  return ++last;
}

}  // namespace

Path::Path(const PathSettings& settings, uint64_t seed)
    : settings_(settings), random_(seed), ticket_(NewTicket()) {}

void Path::Configure(const PathSettings& settings, int64_t now_ns) {
  const int64_t backlog = BacklogBytes(now_ns);
  settings_ = settings;
  clear_at_ns_ =
      now_ns + static_cast<int64_t>(static_cast<double>(backlog) * 1e9 / settings_.bytes_per_s);
  carry_ns_ = 0;
}

int64_t Path::BacklogBytes(int64_t now_ns) const {
  if (clear_at_ns_ <= now_ns) return 0;
  return static_cast<int64_t>(static_cast<double>(clear_at_ns_ - now_ns) * 1e-9 *
                              settings_.bytes_per_s);
}

void Path::Admit(const std::shared_ptr<const Packet>& packet, int64_t now_ns) {
  if (clear_at_ns_ < now_ns) {
    clear_at_ns_ = now_ns;
    carry_ns_ = 0;
  }
  const double ns_per_byte = 1e9 / settings_.bytes_per_s;
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  uint32_t first = 0;
  uint32_t count = 0;
  double piece_ns = 0;
  auto flush = [&](uint32_t next) {
    if (count > 0) Schedule(packet, first, count);
    first = next;
    count = 0;
    piece_ns = 0;
  };
  for (uint32_t i = 0; i < packet->segments(); ++i) {
    const uint32_t bytes = packet->SegmentBytes(i);
    if (BacklogBytes(now_ns) + bytes > settings_.queue_bytes) {
      counters_.dropped.Add(bytes);
      flush(i + 1);
      continue;
    }
    const double wire_ns = bytes * ns_per_byte;
    const bool lost = settings_.loss > 0 && uniform(random_) < settings_.loss;
    // What came before the lost segment must be scheduled before its wire time is added.
    if (lost) flush(i + 1);
    const double exact_ns = wire_ns + carry_ns_;
    const int64_t whole_ns = static_cast<int64_t>(exact_ns);
    carry_ns_ = exact_ns - static_cast<double>(whole_ns);
    clear_at_ns_ += whole_ns;
    counters_.sent.Add(bytes);
    if (lost) {
      counters_.lost.Add(bytes);
      continue;
    }
    ++count;
    piece_ns += wire_ns;
    if (piece_ns + wire_ns > kPieceNs) flush(i + 1);
  }
  flush(packet->segments());
}

void Path::Schedule(const std::shared_ptr<const Packet>& packet, uint32_t first, uint32_t count) {
  int64_t due_ns = clear_at_ns_ + settings_.delay_ns;
  if (settings_.jitter_ns > 0) {
    due_ns += std::uniform_int_distribution<int64_t>(0, settings_.jitter_ns)(random_);
  }
  last_due_ns_ = std::max(last_due_ns_, due_ns);
  pieces_.push_back({last_due_ns_, Piece(packet, first, count)});
}

Piece Path::Pop() {
  Piece piece = std::move(pieces_.front().piece);
  pieces_.pop_front();
  return piece;
}

Tally Path::Clear(int64_t now_ns) {
  Tally cleared;
  for (const Scheduled& scheduled : pieces_) {
    const Piece& piece = scheduled.piece;
    for (uint32_t i = 0; i < piece.count(); ++i) {
      cleared.Add(piece.packet().SegmentBytes(piece.first() + i));
    }
  }
  pieces_.clear();
  clear_at_ns_ = now_ns;
  last_due_ns_ = now_ns;
  carry_ns_ = 0;
  ticket_ = NewTicket();
  return cleared;
}

void Link::Configure(const std::vector<PathSettings>& paths, uint64_t seed, int64_t now_ns) {
  if (paths.size() != paths_.size()) {
    for (const auto& path : paths_) {
      Accumulate(retired_, path->counters());
      Accumulate(cut_drops_, path->Clear(now_ns));
    }
    paths_.clear();
    for (size_t i = 0; i < paths.size(); ++i) {
      paths_.push_back(std::make_unique<Path>(paths[i], seed + i));
    }
    return;
  }
  for (size_t i = 0; i < paths.size(); ++i) paths_[i]->Configure(paths[i], now_ns);
}

void Link::Cut(int64_t now_ns) {
  cut_ = true;
  for (const auto& path : paths_) Accumulate(cut_drops_, path->Clear(now_ns));
}

int Link::Route(const Packet& packet) {
  if (up()) return static_cast<int>(packet.flow_hash() % paths_.size());
  for (uint32_t i = 0; i < packet.segments(); ++i) cut_drops_.Add(packet.SegmentBytes(i));
  return -1;
}

PathCounters Link::Counters() const {
  PathCounters sum = retired_;
  for (const auto& path : paths_) Accumulate(sum, path->counters());
  return sum;
}

void Link::ResetCounters() {
  retired_ = {};
  cut_drops_ = {};
  for (const auto& path : paths_) path->ResetCounters();
}

}  // namespace geomesh::emulator
