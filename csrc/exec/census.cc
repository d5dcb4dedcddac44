#include "exec/census.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/bytes.h"

namespace geomesh::exec {
namespace {

constexpr size_t kMaxNamed = 16;  // ranks in each of a report's lists

uint64_t QuestionId(uint64_t count) { return kCensusMessages | count << 1; }
uint64_t AnswerId(uint64_t count) { return kCensusMessages | count << 1 | 1; }

}  // namespace

Census::Census(transport::Engine* engine, uint64_t channel, int rank,
               std::vector<transport::PeerId> peers)
    : engine_(engine),
      channel_(channel),
      rank_(static_cast<size_t>(rank)),
      peers_(std::move(peers)),
      questions_(peers_.size(), 0) {}

void Census::Open() {
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    if (rank != rank_) AwaitQuestion(rank);
  }
}

void Census::Note(uint64_t sequence, uint32_t fingerprint, absl::string_view operation) {
  Posted& posted = posted_[sequence % kRemembered];
  posted.sequence = sequence;
  posted.fingerprint = fingerprint;
  posted.operation.assign(operation.data(), std::min(operation.size(), kMaxNameBytes));
  last_ = std::max(last_, sequence);
}

Census::Posted Census::Find(uint64_t sequence) const {
  const Posted& posted = posted_[sequence % kRemembered];
  return posted.sequence == sequence ? posted : Posted{};
}

void Census::AwaitQuestion(size_t rank) {
  auto buffer = std::make_shared<std::array<std::byte, sizeof(uint64_t)>>();
  engine_->Recv(
      peers_[rank], {{channel_, QuestionId(questions_[rank])}, 0}, absl::MakeSpan(*buffer),
      [weak = weak_from_this(), rank, buffer](absl::StatusOr<size_t> bytes) {
        const auto self = weak.lock();
        if (self == nullptr || !bytes.ok()) return;  // the channel or the peer is gone
        uint64_t sequence = 0;
        transport::ByteReader(absl::MakeConstSpan(*buffer).first(*bytes)).Integer(&sequence);
        const uint64_t count = self->questions_[rank]++;
        self->SendTo(rank, AnswerId(count),
                     Serialize({self->Find(self->last_), self->Find(sequence)}));
        self->AwaitQuestion(rank);
      });
}

void Census::SendTo(size_t rank, uint64_t id, std::string bytes) {
  auto kept = std::make_shared<std::string>(std::move(bytes));
  engine_->Send(peers_[rank], {{channel_, id}, 0}, transport::AsBytes(*kept),
                [kept](const absl::Status&) {});
}

void Census::Ask(uint64_t sequence, std::function<void()> done) {
  if (sequence_ != 0) return;
  sequence_ = sequence;
  answers_.assign(peers_.size(), std::nullopt);
  unanswered_ = peers_.size() - 1;
  done_ = std::move(done);
  const uint64_t count = asked_++;
  transport::ByteWriter question;
  question.Integer(sequence);
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    if (rank == rank_) continue;
    SendTo(rank, QuestionId(count), question.bytes());
    auto buffer = std::make_shared<std::array<std::byte, kMaxAnswerBytes>>();
    engine_->Recv(peers_[rank], {{channel_, AnswerId(count)}, 0}, absl::MakeSpan(*buffer),
                  [weak = weak_from_this(), rank, count, buffer](absl::StatusOr<size_t> bytes) {
                    const auto self = weak.lock();
                    if (self == nullptr || self->sequence_ == 0 || count + 1 != self->asked_)
                      return;
                    if (!bytes.ok()) return;
                    self->answers_[rank] =
                        Parse(transport::AsText(absl::MakeConstSpan(*buffer).first(*bytes)));
                    if (--self->unanswered_ == 0 && self->done_)
                      std::exchange(self->done_, nullptr)();
                  });
  }
}

void Census::Forget(uint64_t sequence) {
  if (sequence_ != sequence) return;
  sequence_ = 0;
  done_ = nullptr;
}

std::string Census::Report(uint64_t sequence) const {
  if (sequence_ != sequence || sequence == 0) return "";
  const Posted own = Find(sequence);
  std::vector<std::string> behind, different, silent;
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    if (rank == rank_) continue;
    const std::string who = engine_->DescribePeer(peers_[rank]);
    const std::optional<Answer>& answer = answers_[rank];
    if (!answer.has_value()) {
      silent.push_back(who);
    } else if (answer->last.sequence < sequence) {
      behind.push_back(answer->last.sequence == 0
                           ? absl::StrCat(who, " (which has called nothing yet)")
                           : absl::StrCat(who, " (its last: ", answer->last.operation,
                                          ", sequence ", answer->last.sequence, ")"));
    } else if (answer->asked.sequence == sequence && answer->asked.fingerprint != own.fingerprint) {
      different.push_back(absl::StrFormat("%s: %s, fingerprint %08x", who, answer->asked.operation,
                                          answer->asked.fingerprint));
    }
  }
  std::string text;
  const auto list = [&text](absl::string_view title, const std::vector<std::string>& entries) {
    if (entries.empty()) return;
    absl::StrAppend(&text, "; ", title);
    for (size_t i = 0; i < std::min(entries.size(), kMaxNamed); ++i) {
      absl::StrAppend(&text, i == 0 ? "" : ", ", entries[i]);
    }
    if (entries.size() > kMaxNamed) {
      absl::StrAppend(&text, " and ", entries.size() - kMaxNamed, " more");
    }
  };
  list("not called by ", behind);
  list(absl::StrFormat("here: %s, fingerprint %08x; not the same on ", own.operation,
                       own.fingerprint),
       different);
  list("not known (no answer) of ", silent);
  if (text.empty()) return "; all ranks have called it alike";
  return text;
}

std::string Census::Serialize(const Answer& answer) {
  transport::ByteWriter writer;
  for (const Posted* posted : {&answer.last, &answer.asked}) {
    writer.Integer(posted->sequence);
    writer.Integer(posted->fingerprint);
    writer.Text(posted->operation, kMaxNameBytes);
  }
  return writer.bytes();
}

std::optional<Census::Answer> Census::Parse(absl::string_view bytes) {
  transport::ByteReader reader(transport::AsBytes(bytes));
  Answer answer;
  for (Posted* posted : {&answer.last, &answer.asked}) {
    if (!reader.Integer(&posted->sequence) || !reader.Integer(&posted->fingerprint) ||
        !reader.Text(&posted->operation, kMaxNameBytes)) {
      return std::nullopt;
    }
  }
  return answer;
}

}  // namespace geomesh::exec
