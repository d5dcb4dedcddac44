// The one table of options: name, GEOMESH_ variable, type, default, meaning. Parsing, `geomesh
// options` and the docs page are made from it. Knows no user of an option.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace geomesh {

// Inclusive; 0-0: any port.
struct PortRange {
  uint16_t first = 0;
  uint16_t last = 0;

  bool any() const { return last == 0; }
  std::string ToString() const;  // "5000", "23000-23100", "any port"
};

// What IP packets are marked with (RFC 2474), for networks that honour it.
struct Dscp {
  uint8_t urgent = 0, bulk = 0;
};

struct Options {
  std::string region;
  std::string topology;
  std::string interface;
  PortRange ports;
  std::string advertise;
  std::string wire;  // "ucx", "tls" or empty: by the keys
  std::string psk_file;
  std::string tls_cert, tls_key, tls_ca;
  int64_t lanes = 0;
  std::string scheduler = "storm";
  std::string balancer = "rate";
  int64_t pin_bytes = 64 << 10;
  std::optional<Dscp> dscp;
  int64_t unexpected_bytes = 32 << 20;
  absl::Duration suspect_after = absl::Seconds(3);
  absl::Duration dead_after = absl::Seconds(20);
  absl::Duration linger = absl::Seconds(10);
  std::string record_folder;

  // Every variable of the table that is set in the environment, over the defaults.
  // InvalidArgument names the variable, its value and what it takes.
  static absl::StatusOr<Options> FromEnvironment();

  // Sets one option by its name ("dead_after") from text ("20s").
  absl::Status Set(absl::string_view name, absl::string_view text);

  // An option's value as text, equal for equal values; "" where none has that name.
  std::string Get(absl::string_view name) const;
};

struct OptionInfo {
  absl::string_view name;           // empty: a variable that something else than the engine reads
  absl::string_view variable;       // "GEOMESH_LANES"
  absl::string_view type;           // "integer", "bytes", "duration", "text", "ports", "choice"
  absl::string_view default_value;  // as text that Set takes
  absl::string_view meaning;
};

// All options, in the order of the documentation.
absl::Span<const OptionInfo> OptionTable();

// A sentence for every variable in `names` that begins with GEOMESH_ and isn't in the table, with
// the nearest name.
std::vector<std::string> UnknownVariables(absl::Span<const std::string> names);

}  // namespace geomesh
