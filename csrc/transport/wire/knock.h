// Asks whether anybody still listens at an address, by a plain TCP connection that says nothing and
// is closed at once: who has met a process that listened and is refused there now knows that it has
// ended, long before attempts to connect run out. Knows sockets only.
#pragma once

#include <memory>

#include "transport/wire/device.h"
#include "transport/wire/wire.h"

namespace geomesh::transport {

// Null where no attempt can be made; never blocks.
std::unique_ptr<Knock> KnockByTcp(const IpEndpoint& endpoint);

}  // namespace geomesh::transport
