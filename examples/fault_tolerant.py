"""Replica groups under torchft, sharded by this package, that may be lost and come back.

    torchft_lighthouse --min_replicas 1 --heartbeat_timeout_ms 5000 --join_timeout_ms 40000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    for group in 0 1; do
        torchrun --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0 \
            --max-restarts 100 examples/fault_tolerant.py --group $group &
    done

Kill a process of a group: the other group takes over its micro-batches until it is back. After an
exception in a process, its group goes on in the processes that it has.
"""

import argparse
import contextlib
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchft import Manager, ProcessGroupGloo

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2_for import torchft as fault_tolerance

MICRO_BATCHES = 4  # of a step, in all groups together
HEARTBEAT, COLLECTIVE, JOIN = (timedelta(seconds=s) for s in (5, 20, 40))
MANAGER, MESH, QUORUM = (timedelta(seconds=s) for s in (30, 60, 120))


def loss_of(model: Any, step: int, micro_batch: int) -> Any:
    """Compute the loss of this rank's part of a micro-batch, the same after a failed attempt."""
    seed = (step * MICRO_BATCHES + micro_batch) * dist.get_world_size() + dist.get_rank()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    return (model(x) - x.sin()).square().mean()


def train_step(manager: Any, mesh: Any, model: Any, optimizer: Any) -> None:
    """Run a step, which is repeated if a rank or a group was lost in it."""
    fault_tolerance.start_step(manager, mesh)
    step, groups = manager.current_step(), manager.num_participants()
    mine, mean = range(manager.participating_rank() or 0, MICRO_BATCHES, groups), 0.0
    for micro_batch in mine:
        with contextlib.nullcontext() if micro_batch == mine[-1] else model.no_sync():
            loss = loss_of(model, step, micro_batch)
            (loss * groups / MICRO_BATCHES).backward()
        mean += loss.item() / len(mine)
    if manager.should_commit():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sys.stdout.write(f"step {step} of {groups}: {mean:.4f}\n" * (dist.get_rank() == 0))
    optimizer.zero_grad()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--group", default="0", help="name of this replica group")
parser.add_argument("--steps", type=int, default=100)
args = parser.parse_args()
dist.init_process_group("gloo", timeout=MESH)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)  # all groups start with the same weights
model: Any = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
for module in (*model, model):
    fully_shard(module, mesh=mesh, sharding_strategy="optim_grads_params")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
own: dict[str, Any] = {"min_replica_size": 1, "use_async_quorum": False, "init_sync": False}
own |= {"timeout": MANAGER, "quorum_timeout": QUORUM, "replica_id": f"group{args.group}"}
manager = Manager(ProcessGroupGloo(timeout=COLLECTIVE), None, None, **own)
fault_tolerance.attach(manager, model, optimizer)
fault_tolerance.check_timeouts(manager, mesh, heartbeat_timeout=HEARTBEAT, join_timeout=JOIN)
while manager.current_step() < args.steps:
    try:
        train_step(manager, mesh, model, optimizer)
    except Exception as error:  # such as out of memory: the processes of this group go on
        mesh = fault_tolerance.restart(manager, mesh, model, optimizer, error=error)
manager.shutdown()
dist.destroy_process_group()
