#include "base/options.h"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <numeric>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/log.h"
#include "base/status_macros.h"

namespace geomesh {
namespace {

using Setter = absl::Status (*)(Options& options, absl::string_view text);
using Getter = std::string (*)(const Options& options);

struct Entry {
  OptionInfo info;
  Setter set;  // null: read elsewhere
  Getter get =
      nullptr;  // the value as text, for comparing and for errors; null where it has no name
};

absl::Status SetInteger(int64_t& field, absl::string_view text, int64_t least, int64_t most) {
  int64_t value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < least || value > most) {
    return absl::InvalidArgumentError(
        absl::StrCat("takes a whole number from ", least, " to ", most));
  }
  field = value;
  return absl::OkStatus();
}

// "64K", "32M", "1G" or plain bytes.
absl::Status SetBytes(int64_t& field, absl::string_view text, int64_t least) {
  int64_t unit = 1;
  absl::string_view digits = text;
  if (!digits.empty()) {
    switch (absl::ascii_toupper(digits.back())) {
      case 'K':
        unit = int64_t{1} << 10;
        break;
      case 'M':
        unit = int64_t{1} << 20;
        break;
      case 'G':
        unit = int64_t{1} << 30;
        break;
    }
    if (unit != 1) digits.remove_suffix(1);
  }
  int64_t value = 0;
  if (!absl::SimpleAtoi(digits, &value) || value < 0 || value > (int64_t{1} << 40) / unit ||
      value * unit < least) {
    return absl::InvalidArgumentError(
        absl::StrCat("takes bytes, at least ", least,
                     ", as a whole number with K, M or G behind it or nothing"));
  }
  field = value * unit;
  return absl::OkStatus();
}

absl::Status SetDuration(absl::Duration& field, absl::string_view text, absl::Duration least) {
  // Also keeps deadlines far from where clocks overflow; "inf" would be a wait without an end.
  constexpr absl::Duration kMost = absl::Hours(24);
  absl::Duration value;
  if (!absl::ParseDuration(text, &value) || value < least || value > kMost) {
    return absl::InvalidArgumentError(absl::StrCat(
        "takes a duration of ", absl::FormatDuration(least), " to 24h, such as 500ms, 20s or 2m"));
  }
  field = value;
  return absl::OkStatus();
}

template <std::string Options::*field>
absl::Status SetText(Options& options, absl::string_view text) {
  options.*field = std::string(text);
  return absl::OkStatus();
}

template <std::string Options::*field>
std::string GetText(const Options& options) {
  return options.*field;
}

absl::Status SetChoice(std::string& field, absl::string_view text,
                       std::initializer_list<absl::string_view> choices) {
  if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
    const absl::Span<const absl::string_view> all(choices.begin(), choices.size());
    return absl::InvalidArgumentError(
        absl::StrCat("takes ", absl::StrJoin(all.first(all.size() - 1), ", "), " or ", all.back()));
  }
  field = std::string(text);
  return absl::OkStatus();
}

// The log reads its variable itself; here a wrong one is refused.
absl::Status CheckLogLevel(Options&, absl::string_view text) {
  if (text.empty() || ParseLogLevel(text).has_value()) return absl::OkStatus();
  return absl::InvalidArgumentError("takes error, warning, info or debug");
}

absl::Status SetPorts(PortRange& field, absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, '-');
  uint32_t first = 0;
  uint32_t last = 0;
  const bool ok =
      (parts.size() == 1 || parts.size() == 2) && absl::SimpleAtoi(parts.front(), &first) &&
      absl::SimpleAtoi(parts.back(), &last) && first >= 1 && first <= last && last <= 65535;
  if (!ok)
    return absl::InvalidArgumentError("takes one port or a range of ports, such as 23000-23100");
  field = PortRange{static_cast<uint16_t>(first), static_cast<uint16_t>(last)};
  return absl::OkStatus();
}

absl::Status SetDscp(std::optional<Dscp>& field, absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ',');
  uint32_t urgent = 0, bulk = 0;
  if (text.empty()) {
    field.reset();
    return absl::OkStatus();
  }
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &urgent) ||
      !absl::SimpleAtoi(parts[1], &bulk) || urgent > 63 || bulk > 63) {
    return absl::InvalidArgumentError("takes two numbers from 0 to 63, such as 46,10");
  }
  field = Dscp{static_cast<uint8_t>(urgent), static_cast<uint8_t>(bulk)};
  return absl::OkStatus();
}

constexpr Entry kTable[] = {
    {{"region", "GEOMESH_REGION", "text", "",
      "Region of this process, as the topology file names it. Without one all ranks count as one "
      "region."},
     &SetText<&Options::region>,
     &GetText<&Options::region>},
    {{"topology", "GEOMESH_TOPOLOGY", "text", "",
      "Topology file (or the name of a shipped one, such as azure-4) that plans are made for. The "
      "same on all ranks."},
     &SetText<&Options::topology>,
     &GetText<&Options::topology>},
    {{"interface", "GEOMESH_INTERFACE", "text", "",
      "Network interface (eth0) or own address (10.0.0.5) to use. Without one: the interface by "
      "which this machine "
      "reaches MASTER_ADDR."},
     &SetText<&Options::interface>,
     &GetText<&Options::interface>},
    {{"ports", "GEOMESH_PORTS", "ports", "",
      "Range of TCP ports to listen on, such as 23000-23100. Without one the system chooses."},
     [](Options& o, absl::string_view text) { return SetPorts(o.ports, text); },
     [](const Options& o) { return o.ports.ToString(); }},
    {{"advertise", "GEOMESH_ADVERTISE", "text", "",
      "Address or name, with a port or without (203.0.113.7:23000), that others dial instead of "
      "the interface's own address: behind NAT or a port forward. With wire tls only."},
     &SetText<&Options::advertise>,
     &GetText<&Options::advertise>},
    {{"wire", "GEOMESH_WIRE", "choice", "",
      "ucx (private or tunnelled networks) or tls. Without one: tls where a key or certificate is "
      "set, else ucx."},
     [](Options& o, absl::string_view text) {
       if (text.empty()) return SetText<&Options::wire>(o, text);
       return SetChoice(o.wire, text, {"ucx", "tls"});
     },
     &GetText<&Options::wire>},
    {{"psk_file", "GEOMESH_PSK_FILE", "text", "",
      "File with the job's shared key (at least 32 bytes, base64 or hex; several for a change of "
      "keys, one a line): everything between ranks goes through TLS 1.3. The same on all ranks."},
     &SetText<&Options::psk_file>,
     &GetText<&Options::psk_file>},
    {{"tls_cert", "GEOMESH_TLS_CERT", "text", "",
      "This rank's certificate (PEM), instead of a shared key; with tls_key and tls_ca."},
     &SetText<&Options::tls_cert>,
     &GetText<&Options::tls_cert>},
    {{"tls_key", "GEOMESH_TLS_KEY", "text", "",
      "The certificate's private key (PEM, readable by its owner only)."},
     &SetText<&Options::tls_key>,
     &GetText<&Options::tls_key>},
    {{"tls_ca", "GEOMESH_TLS_CA", "text", "", "The CA (PEM) that issued all ranks' certificates."},
     &SetText<&Options::tls_ca>,
     &GetText<&Options::tls_ca>},
    {{"lanes", "GEOMESH_LANES", "integer", "0",
      "Connections to each peer. 0: one inside a host; between hosts two, and more while "
      "throughput "
      "grows by it."},
     [](Options& o, absl::string_view text) { return SetInteger(o.lanes, text, 0, 64); },
     [](const Options& o) { return absl::StrCat(o.lanes); }},
    {{"scheduler", "GEOMESH_SCHEDULER", "choice", "storm",
      "Which message goes next: storm (what is nearly complete first), fifo or fair (all in turn). "
      "The latter are there to compare."},
     [](Options& o, absl::string_view text) {
       return SetChoice(o.scheduler, text, {"storm", "fifo", "fair"});
     },
     &GetText<&Options::scheduler>},
    {{"balancer", "GEOMESH_BALANCER", "choice", "rate",
      "How large messages are spread over the lanes: rate (by measured rate), backlog (least bytes "
      "first) or round-robin."},
     [](Options& o, absl::string_view text) {
       return SetChoice(o.balancer, text, {"rate", "backlog", "round-robin"});
     },
     &GetText<&Options::balancer>},
    {{"pin_bytes", "GEOMESH_PIN_BYTES", "bytes", "64K",
      "Messages up to this size stay on one lane each, the quickest. 0: none does; 1024G: all do, "
      "for paths that must not reorder."},
     [](Options& o, absl::string_view text) { return SetBytes(o.pin_bytes, text, 0); },
     [](const Options& o) { return absl::StrCat(o.pin_bytes); }},
    {{"dscp", "GEOMESH_DSCP", "text", "",
      "DSCP values for networks that honour them, such as 46,10: control and messages of at most "
      "64 KB go on a lane of their own, marked with the first, all others with the second. With "
      "wire tls only."},
     [](Options& o, absl::string_view text) { return SetDscp(o.dscp, text); },
     [](const Options& o) {
       return o.dscp.has_value() ? absl::StrCat(o.dscp->urgent, ",", o.dscp->bulk) : "";
     }},
    {{"unexpected_bytes", "GEOMESH_UNEXPECTED_BYTES", "bytes", "32M",
      "What a peer may send ahead of the receive that takes it. Both ends must have the same."},
     [](Options& o, absl::string_view text) { return SetBytes(o.unexpected_bytes, text, 1 << 20); },
     [](const Options& o) { return absl::StrCat(o.unexpected_bytes); }},
    {{"suspect_after", "GEOMESH_SUSPECT_AFTER", "duration", "3s",
      "A peer that is silent for so long while it is waited for, and does not answer when asked, "
      "is suspected, and named in the log."},
     [](Options& o, absl::string_view text) {
       return SetDuration(o.suspect_after, text, absl::Milliseconds(100));
     },
     [](const Options& o) { return absl::FormatDuration(o.suspect_after); }},
    {{"dead_after", "GEOMESH_DEAD_AFTER", "duration", "20s",
      "A peer that is silent for so long is given up."},
     [](Options& o, absl::string_view text) {
       return SetDuration(o.dead_after, text, absl::Milliseconds(200));
     },
     [](const Options& o) { return absl::FormatDuration(o.dead_after); }},
    {{"linger", "GEOMESH_LINGER", "duration", "10s",
      "How long the end of a group waits for sends that are still under way."},
     [](Options& o, absl::string_view text) {
       return SetDuration(o.linger, text, absl::ZeroDuration());
     },
     [](const Options& o) { return absl::FormatDuration(o.linger); }},
    {{"record_folder", "GEOMESH_RECORD_FOLDER", "text", "",
      "Where a failure leaves a file with the engine's last events, which its error names. Without "
      "one: the system's folder for temporary files; off: nowhere."},
     &SetText<&Options::record_folder>,
     &GetText<&Options::record_folder>},
    {{"", "GEOMESH_LOG_LEVEL", "choice", "warning", "error, warning, info or debug."},
     &CheckLogLevel,
     nullptr},
    {{"", "GEOMESH_UCX_ROOT", "text", "",
      "When building: prefix of a system UCX of at least 1.13, instead of the libucx wheel."},
     nullptr,
     nullptr},
    {{"", "GEOMESH_BUILD_CUDA", "choice", "auto",
      "When building: auto (the kernels for GPUs where nvcc works), on or off."},
     nullptr},
    {{"", "GEOMESH_WAN_CONTROL", "text", "",
      "Set by `geomesh emulate` in every region: the emulator's control socket."},
     nullptr,
     nullptr},
    {{"", "GEOMESH_WAN_BINARY", "text", "",
      "The emulator's program, where it isn't in the package."},
     nullptr,
     nullptr},
};

// Levenshtein distance; names are short.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({row[j] + 1, row[j + 1] + 1, replaced});
    }
  }
  return row.back();
}

absl::Status Named(absl::string_view what, absl::string_view text, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::InvalidArgumentError(absl::StrCat(what, "='", text, "': ", status.message()));
}

}  // namespace

std::string PortRange::ToString() const {
  if (any()) return "any port";
  return first == last ? absl::StrCat(first) : absl::StrCat(first, "-", last);
}

absl::StatusOr<Options> Options::FromEnvironment() {
  Options options;
  for (const Entry& entry : kTable) {
    const char* text = std::getenv(entry.info.variable.data());
    if (text == nullptr || entry.set == nullptr) continue;
    GM_RETURN_IF_ERROR(Named(entry.info.variable, text, entry.set(options, text)));
  }
  return options;
}

absl::Status Options::Set(absl::string_view name, absl::string_view text) {
  for (const Entry& entry : kTable) {
    if (entry.set != nullptr && !name.empty() && entry.info.name == name)
      return Named(name, text, entry.set(*this, text));
  }
  std::string known;
  for (const Entry& entry : kTable) {
    if (!entry.info.name.empty())
      absl::StrAppend(&known, known.empty() ? "" : ", ", entry.info.name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("no option is named '", name, "'; there are ", known));
}

std::string Options::Get(absl::string_view name) const {
  for (const Entry& entry : kTable) {
    if (entry.get != nullptr && entry.info.name == name) return entry.get(*this);
  }
  return "";
}

absl::Span<const OptionInfo> OptionTable() {
  static const std::vector<OptionInfo>* table = [] {
    auto* infos = new std::vector<OptionInfo>;
    for (const Entry& entry : kTable) infos->push_back(entry.info);
    return infos;
  }();
  return *table;
}

std::vector<std::string> UnknownVariables(absl::Span<const std::string> names) {
  std::vector<std::string> sentences;
  for (const std::string& name : names) {
    if (!absl::StartsWith(name, "GEOMESH_")) continue;
    const Entry* nearest = nullptr;
    size_t best = 0;
    for (const Entry& entry : kTable) {
      const size_t distance = EditDistance(name, entry.info.variable);
      if (nearest == nullptr || distance < best) {
        nearest = &entry;
        best = distance;
      }
    }
    if (best == 0) continue;
    sentences.push_back(absl::StrCat(
        "the variable ", name, " is not one of torch_geomesh's and has no effect; did you mean ",
        nearest->info.variable, "?"));
  }
  return sentences;
}

}  // namespace geomesh
