"""Ends right after a collective, without destroying its group: Python goes while works end."""

import torch
import torch.distributed as dist

dist.init_process_group("geomesh", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(50):
    dist.all_reduce(torch.ones(3), async_op=True)
dist.all_reduce(torch.ones(3))
