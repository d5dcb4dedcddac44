#include "transport/recorder.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace geomesh::transport {
namespace {

const char* Name(RecordedEvent::What what) {
  using What = RecordedEvent::What;
  switch (what) {
    case What::kSend:
      return "send";
    case What::kSent:
      return "sent";
    case What::kRecv:
      return "receive";
    case What::kReceived:
      return "received";
    case What::kConnected:
      return "connected";
    case What::kLaneUp:
      return "lane up";
    case What::kLaneLost:
      return "lane lost";
    case What::kSuspected:
      return "suspected";
    case What::kHeardAgain:
      return "heard again";
    case What::kLost:
      return "lost";
    case What::kClosed:
      return "channel closed";
  }
  return "";
}

}  // namespace

std::string Recorder::Text(Instant now, absl::FunctionRef<std::string(PeerId)> describe) const {
  using What = RecordedEvent::What;
  std::map<PeerId, std::string> names;
  std::string text =
      absl::StrFormat("# the last %d of %d events; seconds before this was written\n",
                      std::min<uint64_t>(count_, kKept), count_);
  for (uint64_t i = count_ - std::min<uint64_t>(count_, kKept); i < count_; ++i) {
    const RecordedEvent& event = events_[i % kKept];
    std::string& name = names[event.peer];
    if (name.empty()) name = describe(event.peer);
    absl::StrAppendFormat(&text, "%.6f %s: %s", absl::ToDoubleSeconds(Between(event.when, now)),
                          name, Name(event.what));
    switch (event.what) {
      case What::kSend:
      case What::kSent:
      case What::kRecv:
      case What::kReceived:
        absl::StrAppendFormat(&text, " %016x/%016x, %d bytes", event.key.channel, event.key.id,
                              event.bytes);
        break;
      case What::kLaneUp:
      case What::kLaneLost:
        absl::StrAppendFormat(&text, " %x", event.lane);
        break;
      case What::kClosed:
        absl::StrAppendFormat(&text, " %016x", event.key.channel);
        break;
      default:
        break;
    }
    if (event.code != absl::StatusCode::kOk) {
      absl::StrAppend(&text, ", ", absl::StatusCodeToString(event.code));
    }
    text += '\n';
  }
  return text;
}

}  // namespace geomesh::transport
