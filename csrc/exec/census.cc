#include "exec/census.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/bytes.h"

namespace geomesh::exec {
namespace {

constexpr size_t kMaxNamed = 16;  // ranks in each of a report's lists

enum class Mail : uint8_t { kQuestion, kAnswer };

}  // namespace

Census::Census(transport::Engine* engine, Mailbox* mailbox, int rank,
               std::vector<transport::PeerId> peers)
    : engine_(engine),
      mailbox_(mailbox),
      rank_(static_cast<size_t>(rank)),
      peers_(std::move(peers)) {
  mailbox->SetReader(
      Mailbox::Service::kCensus,
      {.on_mail = [this](size_t from, absl::string_view text) { OnMail(from, text); },
       .on_lost = nullptr});
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

void Census::OnMail(size_t rank, absl::string_view text) {
  transport::ByteReader reader(text);
  uint8_t kind = 0;
  uint64_t question = 0;
  if (!reader.Integer(&kind) || !reader.Integer(&question)) return;
  if (static_cast<Mail>(kind) == Mail::kQuestion) {
    uint64_t sequence = 0;
    if (!reader.Integer(&sequence)) return;
    transport::ByteWriter answer;
    answer.Integer(static_cast<uint8_t>(Mail::kAnswer));
    answer.Integer(question);
    for (const Posted& posted : {Find(last_), Find(sequence)}) {
      answer.Integer(posted.sequence);
      answer.Integer(posted.fingerprint);
      answer.Text(posted.operation, kMaxNameBytes);
    }
    mailbox_->Send(rank, Mailbox::Service::kCensus, answer.bytes());
    return;
  }
  if (sequence_ == 0 || question != asked_ || answers_[rank].has_value()) return;
  Answer answer;
  for (Posted* posted : {&answer.last, &answer.asked}) {
    if (!reader.Integer(&posted->sequence) || !reader.Integer(&posted->fingerprint) ||
        !reader.Text(&posted->operation, kMaxNameBytes)) {
      return;
    }
  }
  answers_[rank] = std::move(answer);
  if (--unanswered_ == 0 && done_) std::exchange(done_, nullptr)();
}

void Census::Ask(uint64_t sequence, std::function<void()> done) {
  if (sequence_ != 0) return;
  sequence_ = sequence;
  answers_.assign(peers_.size(), std::nullopt);
  unanswered_ = peers_.size() - 1;
  done_ = std::move(done);
  transport::ByteWriter question;
  question.Integer(static_cast<uint8_t>(Mail::kQuestion));
  question.Integer(++asked_);
  question.Integer(sequence);
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    if (rank != rank_) mailbox_->Send(rank, Mailbox::Service::kCensus, question.bytes());
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
  std::vector<std::string> behind, different, other_sizes, silent;
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
    } else if (answer->asked.sequence == sequence && answer->asked.operation != own.operation) {
      other_sizes.push_back(absl::StrCat(who, ": ", answer->asked.operation));
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
  // Where they may differ by rank, but not all that is called together fits.
  if (text.empty()) {
    list(absl::StrCat("here: ", own.operation, "; with other sizes on "), other_sizes);
  }
  if (text.empty()) return "; all ranks have called it alike";
  return text;
}

}  // namespace geomesh::exec
