"""Reads the checkpoints of `--load` in place of Megatron, whose readers run code.

Torch and Megatron unpickle `.metadata` and all entries that are not tensors. Here `.metadata`
becomes records that are checked, and other entries must be plain data. Megatron's own readers are
not called for any folder.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from megatron_fsdp_v2.checkpoint.errors import NotFoundError, all_ranks_or_raise, everyones
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.loading import requests_for
from megatron_fsdp_v2_mcore.checkpoint.local import find_local, load_local
from megatron_fsdp_v2_mcore.checkpoint.state_dict import CHUNKS, load_by_global_names, set_value
from megatron_fsdp_v2_mcore.checkpoint.torch_dist.folder import run_arguments
from megatron_fsdp_v2_mcore.checkpoint.torch_dist.loading import load_torch_dist
from megatron_fsdp_v2_mcore.flags.arguments import selects_this_package
from megatron_fsdp_v2_mcore.flags.checkpoint_check import (
    RELEASE,
    TRACKER,
    find_checkpoint,
    flag_errors,
    is_torch_dist,
    reject_gpt_layers,
)
from megatron_fsdp_v2_mcore.flags.options import Options

_OF_THE_RUN = ("args", "iteration", "checkpoint_version")
"""Entries that Megatron requests before it builds a state dict."""


def without_unpickling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace Megatron's `_load_base_checkpoint` for command lines that select this package.

    Folders are `fsdp_dtensor` or `torch_dist` checkpoints. The latter are reported in the format of
    this run, so that Megatron requests the entries of sharded runs.

    Args:
        original: Megatron's function, for all other command lines.
    """

    def load(
        load_dir: Any,
        args: Any,
        rank0: bool = False,
        sharded_state_dict: dict[str, Any] | None = None,
        checkpointing_context: dict[str, Any] | None = None,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        if not selects_this_package(args, sys.argv):
            return original(
                load_dir, args, rank0, sharded_state_dict, checkpointing_context, *rest, **kwargs
            )
        if sharded_state_dict is not None and CHUNKS not in sharded_state_dict:
            raise RuntimeError(
                f"load_checkpoint reads {load_dir} into shards, and got chunks without them; build "
                "them with get_model(..., wrap_with_ddp=True)"
            )
        found = _find(load_dir, args)
        megatron = importlib.import_module("megatron.training.checkpointing")
        with flag_errors():
            persistent = None if found is None else found[1]
            local = find_local(checkpointing_context, persistent, says=rank0)
            if local is not None:
                assert checkpointing_context is not None
                megatron.set_loaded_iteration(local)
                loaded, name = load_local(checkpointing_context, args, sharded_state_dict)
                # Before it requests values, Megatron must know the format of this run.
                kinds = megatron.CheckpointType
                return loaded, name, False, kinds.FSDP_DTENSOR if rank0 else kinds.LOCAL
        if found is None:
            _report_missing(load_dir, args)
            return None, "", False, None
        path, iteration = found
        reject_gpt_layers(path, kwargs.get("gpt_compat_layer_maps"))
        megatron.set_loaded_iteration(iteration)
        if not rank0:
            megatron.print_rank_0(f" loading checkpoint from {load_dir} at iteration {iteration}")
        place = str(path), path.name == RELEASE, megatron.CheckpointType.FSDP_DTENSOR

        def read(
            _load_dir: Any, _args: Any, rank0: bool = False, request: dict[str, Any] | None = None
        ) -> Any:
            del rank0
            loaded = _of_the_run(folder) if request is None else _fill(folder, request)
            return loaded, *place

        with flag_errors():
            trusts_objects = Options.from_args(args).trusts_checkpoint
            folder = CheckpointFolder(path, trusts_objects=trusts_objects)
            if is_torch_dist(path):
                loaded = load_torch_dist(folder, sharded_state_dict, args)
                return loaded, *place
            return load_by_global_names(read, load_dir, args, rank0, sharded_state_dict)

    return load


def _find(load_dir: Any, args: Any) -> tuple[Path, int] | None:
    """Find the checkpoint to load, the same on all ranks. Collective.

    Returns:
        The folder of an iteration, and the iteration; None if there is no checkpoint.
    """

    def find() -> tuple[Path, int] | None:
        step = getattr(args, "ckpt_step", None) or None
        return None if load_dir is None else find_checkpoint(load_dir, step)

    found = all_ranks_or_raise(f"load {load_dir}", find)
    # A file system may show an older file of the latest iteration to some ranks.
    all_found = [other for other in everyones(found) if other is not None]
    return max(all_found, key=lambda other: other[1], default=None)


def _report_missing(load_dir: Any, args: Any) -> None:
    """Report that there is no checkpoint, and end the program if the run requires one."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        sys.stdout.write(f"WARNING: {load_dir} has no checkpoint (no {TRACKER})\n")
    if args.exit_on_missing_checkpoint:
        sys.exit()


def _of_the_run(folder: CheckpointFolder) -> dict[str, Any]:
    """Read the arguments, the iteration and the version of Megatron's format."""
    found = {key: folder.object(key) for key in _OF_THE_RUN}
    run_arguments(found, folder.path)
    return found


def _fill(folder: CheckpointFolder, request: dict[str, Any]) -> dict[str, Any]:
    """Fill the tensors of a request and replace its other values, in place. Collective."""
    request.pop("_model", None)
    flat, paths = flatten_state_dict(request)
    present = {key: value for key, value in flat.items() if key in folder.entries}
    tensors = {k: value for k, value in present.items() if isinstance(value, torch.Tensor)}

    @torch.no_grad()
    def fill() -> None:
        folder.fill([r for key, tensor in tensors.items() for r in requests_for(key, tensor)])
        for key in present.keys() - tensors.keys():
            set_value(request, paths[key], folder.object(key))

    all_ranks_or_raise(f"load {folder.path}", fill)
    return request


class EntryReader:
    """Replaces torch's `FileSystemReader` in Megatron, which asks it for the names of entries only.

    Torch's class unpickles `.metadata`.

    Args:
        path: The checkpoint.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def read_metadata(self) -> SimpleNamespace:
        """Return an object with the entries of the checkpoint.

        Raises:
            FileNotFoundError: There is no checkpoint.
            FlagError: The index is damaged.
        """
        with flag_errors():
            try:
                return SimpleNamespace(state_dict_metadata=CheckpointFolder(self._path).entries)
            except NotFoundError as error:
                raise FileNotFoundError(str(error)) from error
