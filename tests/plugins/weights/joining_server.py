"""Joins a group and receives tensors, exactly as SGLang 0.5.23 does (`init_custom_process_group`, and
`receive_weights_from_distributed`). Prints `joined` when it is connected to all others, then what it received, or `failed`.

    python joining_server.py HOST PORT WORLD_SIZE RANK NAME DTYPE:SHAPE …
"""

import sys

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    default_pg_timeout,
    rendezvous,
)

host, port, size, rank, name = sys.argv[1:6]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # of its tensor-parallel processes
store, _, _ = next(rendezvous(f"tcp://{host}:{port}", int(rank), int(size), timeout=default_pg_timeout))
store.set_timeout(default_pg_timeout)
group, _ = _new_process_group_helper(
    int(size),
    int(rank),
    [],
    Backend("gloo"),
    PrefixStore(name, store),
    group_name=name,
    backend_options=None,
    timeout=default_pg_timeout,
)
_world.pg_group_ranks[group] = {i: i for i in range(int(size))}
print("joined", flush=True)

received, handles = [], []
try:  # each call fails if the group is closed already
    for fact in sys.argv[6:]:
        dtype, _, shape = fact.partition(":")
        weight = torch.empty([int(part) for part in shape.split(",") if part], dtype=getattr(torch, dtype))
        handles.append(dist.broadcast(weight, src=0, group=group, async_op=True))
        received.append(weight)
    for handle in handles:
        handle.wait()
except RuntimeError as error:
    print("failed", error)
else:
    if sum(weight.numel() for weight in received) < 1000:
        print([(str(weight.dtype), tuple(weight.shape), weight.float().tolist()) for weight in received])
    else:
        print("[received]")
