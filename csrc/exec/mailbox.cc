#include "exec/mailbox.h"

#include <utility>

#include "transport/bytes.h"

namespace geomesh::exec {

Mailbox::Mailbox(transport::Engine* engine, uint64_t channel, std::vector<transport::PeerId> peers)
    : engine_(engine), channel_(channel), peers_(std::move(peers)), partners_(peers_.size()) {}

void Mailbox::SetReader(Service service, Reader reader) {
  readers_[static_cast<size_t>(service)] = std::move(reader);
}

void Mailbox::Open() {
  for (size_t rank = 0; rank < peers_.size(); ++rank) AwaitMail(rank);
}

void Mailbox::AwaitMail(size_t rank) {
  auto buffer = std::make_shared<Buffer>();
  engine_->Recv(
      peers_[rank], {{channel_, kMailMessages | partners_[rank].received++}, 0},
      absl::MakeSpan(*buffer),
      [weak = weak_from_this(), rank, buffer](absl::StatusOr<size_t> bytes) {
        const auto self = weak.lock();
        if (self == nullptr) return;
        if (!bytes.ok()) {  // the channel or the peer is gone
          for (size_t service = 0; service < kServices; ++service) {
            const auto on_lost = self->readers_[service].on_lost;  // which may close the mailbox
            if (on_lost) on_lost(rank, bytes.status());
          }
          return;
        }
        const absl::string_view mail =
            transport::AsText(absl::MakeConstSpan(*buffer).first(*bytes));
        const size_t service = mail.empty() ? kServices : static_cast<uint8_t>(mail[0]);
        if (service < kServices) {
          const auto on_mail = self->readers_[service].on_mail;  // which may close the mailbox
          if (on_mail) on_mail(rank, mail.substr(1));
        }
        self->AwaitMail(rank);
      },
      {.standing = true});
}

void Mailbox::Send(size_t rank, Service service, absl::string_view text) {
  auto mail = std::make_shared<std::string>(1, static_cast<char>(service));
  text = text.substr(0, kMaxBytes);
  mail->append(text.data(), text.size());
  engine_->Send(peers_[rank], {{channel_, kMailMessages | partners_[rank].sent++}, 0},
                transport::AsBytes(*mail), [mail](const absl::Status&) {});
}

}  // namespace geomesh::exec
