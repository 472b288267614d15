"""Other libraries' data parallelism around a sharded module, or inside of one: errors that say so.

Those wrappers communicate the gradients of all parameters that they find, and would take shards
for whole parameters. Nobody tells a module that it is wrapped; but a wrapper asks it for its
modules, and can be known by who is asking.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed import fsdp
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DataParallel, DistributedDataParallel

__all__ = ["check_modules_inside", "check_who_asks"]

_ASKING = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.nn.parallel.replicate": "DataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel (FSDP1)",
    "torch.distributed.fsdp._init_utils": "FullyShardedDataParallel (FSDP1)",
    "torch.distributed.fsdp._fully_shard._fsdp_init": "torch.distributed.fsdp.fully_shard",
}
_WRAPPERS = (DataParallel, DistributedDataParallel, fsdp.FullyShardedDataParallel)
_BETWEEN = (torch_module.__name__, __name__)


def check_who_asks(module: object) -> None:
    """Where a sharded module is asked for its modules: see that no other wrapper asks.

    Raises:
        RuntimeError: One does.
    """
    if torch.compiler.is_compiling():
        # A compiled forward asks for its parameters; a constructor is not compiled.
        return
    frame: types.FrameType | None = sys._getframe(1)
    between = (*_BETWEEN, sys._getframe(1).f_globals.get("__name__"))
    while frame is not None and frame.f_globals.get("__name__") in between:
        frame = frame.f_back
    name = None if frame is None else _ASKING.get(frame.f_globals.get("__name__", ""))
    if name is not None and frame is not None and not _ignores_some(frame):
        raise RuntimeError(
            f"{name} was called on a module that is, or contains, a {type(module).__name__} that "
            "megatron_fsdp_v2.fully_shard sharded, which shards its parameters and reduces its "
            "gradients by itself. Leave the wrapper out: sharding_strategy='no_shard' is "
            "DDP, a 2-D mesh is HSDP, and fully_shard on the module around shards what is left. "
            "(DDP around it may have what is left where it is told to ignore what is sharded.)"
        )


def _ignores_some(frame: types.FrameType) -> bool:
    """Whether DDP was told to leave parameters to others, as it is where it meets FSDP2."""
    wrapped = frame.f_locals.get("module")
    if wrapped is None:
        wrapped = getattr(frame.f_locals.get("self"), "module", None)
    return bool(getattr(wrapped, "_ddp_params_and_buffers_to_ignore", ()))


def check_modules_inside(modules: Sequence[nn.Module], own: type) -> None:
    """See that nothing below some modules reduces its gradients already.

    Args:
        modules: About to be sharded.
        own: Class of the modules that this package sharded.

    Raises:
        ValueError: Something does.
    """
    for module in modules:
        for name, below in module.named_modules():
            theirs = isinstance(below, fsdp.FSDPModule) and not isinstance(below, own)
            if not theirs and not isinstance(below, _WRAPPERS):
                continue
            what = "torch.distributed.fsdp.fully_shard" if theirs else type(below).__name__
            unwrapped = "call this fully_shard instead" if theirs else "give the module inside it"
            raise ValueError(
                f"{name or 'the module'} ({type(below).__name__}) reduces its gradients through "
                f"{what} already, and parameters can be sharded or replicated by one of both only; "
                f"{unwrapped}"
            )
