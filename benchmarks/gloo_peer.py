"""One rank of a Gloo benchmark for benchmarks/transport.py: 64 MB send/recv, or 8 bytes both ways.

Usage: gloo_peer.py STORE_FILE RANK INTERFACE SECONDS BYTES
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    store_file, rank, interface, seconds, size = sys.argv[1:]
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    import torch
    import torch.distributed as dist

    store = dist.FileStore(store_file, 2)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=2)
    data = torch.ones(int(size), dtype=torch.uint8)
    more = torch.ones(1)
    dist.barrier()
    begin = time.monotonic()
    count = 0
    while more.item():
        if rank == "0":
            dist.send(data, 1)
        else:
            dist.recv(data, 0)
        count += 1
        if rank == "0" and time.monotonic() - begin > float(seconds):
            more.zero_()
        dist.broadcast(more, 0)  # a few bytes a message
    print(json.dumps({"bytes": count * int(size), "seconds": time.monotonic() - begin}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
