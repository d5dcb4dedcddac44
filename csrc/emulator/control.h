// The control socket of geomesh-wan: one command a line, one line of JSON back. Knows the words of
// the protocol; what they do is the forwarder's.
//
//   link FROM TO path bytes_per_s=B delay_s=D [jitter_s=J] [loss=P] queue_bytes=Q [path ...]
//                     sets one direction, each `path` word begins one more path
//   cut FROM TO       nothing passes and what is under way is lost; one direction
//   restore FROM TO
//   counters          per ordered pair: bytes, packets and drops
//   reset             counters from zero
//   status            lateness, drops, processor time, scheduling
//   enter REGION      the reply carries the region's namespaces: net, uts, ipc, mnt[, user]
//   kill              ends every process inside the regions
//   quit              ends the emulation and every process inside it
//
// A reply is {"ok": true, ...} or {"ok": false, "error": "..."}.
#pragma once

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "emulator/forwarder.h"

namespace geomesh::emulator {

// A JSON string literal.
std::string JsonString(absl::string_view text);

class Control {
 public:
  // `user_namespace` may be invalid; both outlive this.
  Control(Forwarder& forwarder, const Fd& user_namespace, uint64_t seed, bool realtime)
      : forwarder_(forwarder), user_namespace_(user_namespace), seed_(seed), realtime_(realtime) {}

  // Listens at `path`, which must not exist.
  absl::Status Listen(const std::string& path);

  // The reply to one command, without its line end (all but `enter`, which needs the socket).
  std::string Answer(absl::string_view line);

 private:
  struct Client {
    Fd fd;
    std::string input;
  };
  void Accept();
  void Read(int fd);
  absl::Status SendNamespaces(int fd, absl::string_view region);
  absl::StatusOr<Link*> FindLink(absl::string_view from, absl::string_view to);
  absl::StatusOr<std::string> Execute(absl::string_view line);
  absl::Status SetLink(const std::vector<std::string>& words);
  std::string Counters();
  std::string StatusFields();

  Forwarder& forwarder_;
  const Fd& user_namespace_;
  uint64_t seed_;
  bool realtime_;
  Fd listener_;
  std::map<int, Client> clients_;
};

// Asks the geomesh-wan behind the socket at `path` for a region's namespaces and moves there.
absl::Status EnterRegion(const std::string& path, const std::string& region);

}  // namespace geomesh::emulator
