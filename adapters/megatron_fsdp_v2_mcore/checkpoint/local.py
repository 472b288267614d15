"""Local checkpoints: `--non-persistent-ckpt-type local`.

Every rank writes its own rows and other values to the disk of its node, and reads them back after a
restart of the same job. NVIDIA's resiliency extension keeps the files, and with `--replication`
copies of them on other ranks. Here the state is made that it writes, and read into the shards.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from megatron_fsdp_v2._text import listed, listed_ranks
from megatron_fsdp_v2.checkpoint.errors import CheckpointError, all_ranks_or_raise
from megatron_fsdp_v2.dtensor.sharded_rows import plain_of
from megatron_fsdp_v2_mcore.checkpoint.state_dict import (
    CHUNKS,
    Translation,
    fill_by_global_names,
    set_value,
)
from megatron_fsdp_v2_mcore.flags.errors import flag_of

_MANAGER = "local_checkpoint_manager"
"""Entry of Megatron's checkpointing context: the extension's manager."""

_LOADED = "local_state_of_megatron_fsdp_v2"
"""Entry of the same context, between the two calls in which Megatron loads: the state of a file."""

_OF_THE_RUN = ("args", "iteration", "checkpoint_version")

_STATE = "optimizer.state."

_SAME = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances",
    "use_tp_pp_dp_mapping",
    "data_parallel_sharding_strategy",
    "expert_data_parallel_sharding_strategy",
    "outer_dp_sharding_strategy",
)
"""Arguments that determine which rows a rank has."""


def with_sharded_states(original: Callable[..., Any]) -> Any:
    """Wrap `MCoreTensorAwareStateDict.from_state_dict` to make the local state of sharded chunks.

    Args:
        original: Megatron's method, for state dicts of other models.
    """

    def from_state_dict(sharded_state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        entries = dict(sharded_state_dict)
        chunks = entries.pop(CHUNKS, None)
        if chunks is None:
            return original(sharded_state_dict, *args, **kwargs)
        flat, _ = flatten_state_dict(Translation(chunks, entries).for_local_saving())
        # Imported here because other checkpoints do not need the extension.
        local_state = importlib.import_module("megatron_fsdp_v2_mcore.checkpoint.local_state")
        # Megatron keeps the second value for the next save.
        return local_state.LocalState(flat), None

    return staticmethod(from_state_dict)


class LocalSaveError(CheckpointError):
    """A local save failed on all ranks, since it failed on some."""


def find_manager(context: dict[str, Any] | None) -> Any:
    """Return the manager of local checkpoints, in which a failure of one rank is one of all ranks.

    Args:
        context: Megatron's checkpointing context. The extension's manager in it is replaced.
    """
    manager = (context or {}).get(_MANAGER)
    if context is None or manager is None:
        return None
    # Imported here because other checkpoints do not need the extension.
    kind = importlib.import_module("megatron_fsdp_v2_mcore.checkpoint.local_manager").CheckedManager
    if not isinstance(manager, kind):
        manager = kind(manager.root_local_ckpt_dir, manager.session_id, manager.repl_strategy)
        context[_MANAGER] = manager
    return manager


def find_local(context: dict[str, Any] | None, persistent: int | None, *, says: bool) -> int | None:
    """Find the newest local checkpoint that all ranks have, of the ranks of this run. Collective.

    Args:
        context: Megatron's checkpointing context.
        persistent: Iteration of the checkpoint that is loaded otherwise; None if there is none.
        says: Whether rank 0 prints why a local checkpoint is not loaded.

    Returns:
        Its iteration; None if there is no local checkpoint, or the other one is newer.

    Raises:
        CheckpointError: The only checkpoints are local ones of other ranks.
    """
    manager = find_manager(context)
    if manager is None:
        return None
    # A process that ended during a save leaves an incomplete file, which the extension would refuse
    # to write again when the training reaches that iteration.
    for incomplete in manager.local_ckpt_dir.glob("iter_*_local.dirty.pt"):
        incomplete.unlink()
    found = manager.find_latest()
    reason = ""
    if found >= 0 and persistent is not None and found < persistent:
        reason = f"local checkpoints of iteration {found} are older than that of {persistent}"
    elif found < 0:
        saved = sorted({rank for ids in manager.globally_available_ids for _, rank, _ in ids})
        if saved:
            reason = (
                f"{manager.root_local_ckpt_dir} has local checkpoints of {listed_ranks(saved)}, "
                f"and none that is complete for the {dist.get_world_size()} ranks of this run"
            )
            if persistent is None:
                raise CheckpointError(
                    f"{reason}; use the number of ranks that saved them, or remove them to start "
                    "from scratch"
                )
    if reason and says and dist.get_rank() == 0:
        sys.stdout.write(f"WARNING: {reason}; loading iteration {persistent}\n")
    return None if reason or found < 0 else int(found)


def load_local(context: dict[str, Any], args: Any, request: dict[str, Any] | None) -> Any:
    """Load the local checkpoint that `find_local` has found. Collective.

    Args:
        context: Megatron's checkpointing context.
        args: Megatron's arguments.
        request: The state dict to fill; None for the arguments and the iteration of the run.

    Returns:
        The state dict and the name of the checkpoint.

    Raises:
        CheckpointError: The checkpoint is of other ranks or another model. Raised on all ranks.
    """
    manager = context[_MANAGER]
    if _LOADED not in context:
        context[_LOADED] = all_ranks_or_raise("load its local checkpoint", manager.load)
    state, name = context[_LOADED]
    if request is None:
        values = state.values_by_name()
        all_ranks_or_raise("load its local checkpoint", lambda: _check_run(values["args"], args))
        return {key: values[key] for key in _OF_THE_RUN}, str(name)
    del context[_LOADED]
    return fill_by_global_names(request, args, lambda entries: _fill(entries, state)), str(name)


def _check_run(saved: Any, args: Any) -> None:
    for name in _SAME:
        before, now = getattr(saved, name, None), getattr(args, name, None)
        if before != now:
            what = "the number of ranks" if name == "world_size" else flag_of(name)
            raise CheckpointError(
                f"{what} is {now}, and the local checkpoint in "
                f"{args.non_persistent_local_ckpt_dir} was saved with {before}: a rank reads the "
                f"rows that it wrote; use {before}, or load a checkpoint of --save without "
                "--non-persistent-ckpt-type local"
            )


def _fill(request: dict[str, Any], state: Any) -> None:
    """Copy values of a local state into the tensors of a request, and replace the others."""
    request.pop("_model", None)
    values = state.values_by_name()
    _drop_states_before_the_first_step(request.get("optimizer", {}).get("state", {}), values)
    flat, paths = flatten_state_dict(request)
    wanted = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}

    @torch.no_grad()
    def fill() -> None:
        local_state = importlib.import_module("megatron_fsdp_v2_mcore.checkpoint.local_state")
        part_of = local_state.LocalPart.of
        differing = [n for n, value in wanted.items() if state.places.get(n) != part_of(value)]
        if differing:
            raise CheckpointError(
                f"the local checkpoint has other rows, or none, of {listed(differing, 4)}; load it "
                "with the model and the flags with which it was saved, or load a checkpoint of "
                "--save without --non-persistent-ckpt-type local"
            )
        for name, value in flat.items():
            if name in wanted:
                plain_of(value).copy_(values[name])
            elif name in values:
                set_value(request, paths[name], values[name])

    all_ranks_or_raise("load its local checkpoint", fill)


def _drop_states_before_the_first_step(states: dict[str, Any], saved: Iterable[str]) -> None:
    """Remove parameters without saved optimizer state: gradients have overflowed in all steps."""
    names = (name.removeprefix(_STATE) for name in saved if name.startswith(_STATE))
    stepped = {name.rpartition(".")[0] for name in names}
    for name in states.keys() - stepped:
        del states[name]
