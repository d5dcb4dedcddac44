// UCX's own log lines, sent into ours: nothing on stdout. Knows nothing of lanes.
#pragma once

#include <string>

namespace geomesh::transport {

// Takes over UCX's log for the whole process; later calls do nothing. Its lines appear at debug
// level: what matters of them comes back in the wire's statuses.
void RouteUcxLog();

// What UCX last complained about on this thread or its async thread since the last call, for a
// status whose UCX code alone says little ("Input/output error"); empty if nothing.
std::string TakeLastUcxComplaint();

// The settings that UCX said it does not know since the last call; empty if none.
std::string TakeUnusedUcxSettings();

}  // namespace geomesh::transport
