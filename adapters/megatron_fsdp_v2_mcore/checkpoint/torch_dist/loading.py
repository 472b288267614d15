"""A `torch_dist` checkpoint loaded into a sharded run, every rank reading the rows it holds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of
from megatron_fsdp_v2_mcore.checkpoint.names import canonical_parameter_names
from megatron_fsdp_v2_mcore.checkpoint.state_dict import load_by_model
from megatron_fsdp_v2_mcore.checkpoint.torch_dist.common import (
    SavedGroups,
    common_state,
    optimizer_problem,
)
from megatron_fsdp_v2_mcore.checkpoint.torch_dist.folder import MegatronFolder, ReadRequest
from megatron_fsdp_v2_mcore.checkpoint.torch_dist.stored import StoredBlock, stored_blocks
from megatron_fsdp_v2_mcore.flags.checkpoint_check import (
    RELEASE,
    find_checkpoint,
    is_torch_dist,
    reject_gpt_layers,
)
from megatron_fsdp_v2_mcore.flags.errors import FlagError

__all__ = ["with_torch_dist"]

META = "param_to_group_meta"
STATE = "optimizer.state."
MAIN_WEIGHTS = ("param", "fp32_param")
"""What Megatron's distributed optimizer, and the one of its DDP, call main weights."""

_SHOWN = 6


def with_torch_dist(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have Megatron's `_load_base_checkpoint` load `torch_dist` folders into shards.

    To Megatron, which decides by a checkpoint's format what to load and asks for it under names of
    sharded runs, such a folder then looks like one of this run's own format.

    Args:
        original: Loads every other folder, after it is made to ask for the whole model.
    """
    load_base = load_by_model(original)

    def load(
        load_dir: Any,
        args: Any,
        rank0: bool = False,
        sharded_state_dict: dict[str, Any] | None = None,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        found = None
        if load_dir is not None and args.non_persistent_ckpt_type is None:
            found = find_checkpoint(load_dir, getattr(args, "ckpt_step", None) or None)
        if found is None or not is_torch_dist(found[0]):
            return load_base(load_dir, args, rank0, sharded_state_dict, *rest, **kwargs)
        path, iteration = found
        reject_gpt_layers(path, kwargs.get("gpt_compat_layer_maps"))
        megatron = importlib.import_module("megatron.training.checkpointing")
        megatron.set_loaded_iteration(iteration)
        folder = MegatronFolder(path)
        loaded = _Loading(folder, common_state(folder)).load(sharded_state_dict, args)
        return loaded, str(path), path.name == RELEASE, megatron.CheckpointType.FSDP_DTENSOR

    return load


class _Loading:
    """One checkpoint and what it is to fill."""

    def __init__(self, folder: MegatronFolder, common: dict[str, Any]) -> None:
        self._folder = folder
        self._common = common
        self._wanted: list[ReadRequest] = []
        self._may_be_short: list[bool] = []
        self._problems: list[str] = []

    def load(self, request: dict[str, Any] | None, args: Any) -> dict[str, Any]:
        """Fill the tensors of a state dict and replace what is not a tensor.

        Args:
            request: The state dict Megatron made to be filled; None where it asks for arguments
                and the iteration alone.
            args: Megatron's arguments.

        Raises:
            FlagError: The checkpoint does not hold what is asked for.
        """
        common = self._common
        is_release = self._folder.path.name == RELEASE
        if not (args.no_load_optim or args.finetune or is_release):
            problem = optimizer_problem(common)
            if problem:
                raise FlagError(f"{self._folder.path} cannot be resumed from: {problem}")
        result = {key: value for key, value in (request or {}).items() if not key.startswith("_")}
        for key in ("args", "iteration", "checkpoint_version"):
            result[key] = common.get(key)
        result["num_floating_point_operations_so_far"] = common.get(
            "num_floating_point_operations_so_far", 0
        )
        if request is None:
            return result
        if "opt_param_scheduler" in request:
            result["opt_param_scheduler"] = common["opt_param_scheduler"]
        if "rng_state" in request:
            result["rng_state"] = self._rng_state(request["rng_state"], args)
        # A release is weights alone.
        optimizer = None if is_release else request.get("optimizer")
        self._fill(request["_model"], optimizer)
        return result

    @torch.no_grad()
    def _fill(self, chunks: Sequence[nn.Module], optimizer: dict[str, Any] | None) -> None:
        metadata = dict(self._common.get("content_metadata") or {})
        metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
        states = self._states(chunks, optimizer)
        for chunk in chunks:
            for tensor, blocks in stored_blocks(chunk, metadata):
                for block in blocks:
                    self._want_weight(tensor, block, has_optimizer=optimizer is not None)
                    for option, state in states.get(tensor, {}).items():
                        self._want(f"{STATE}{option}.{block.key}", state, block)
        if self._problems:
            shown = listed(sorted(self._problems), _SHOWN)
            others = [p for p in self._problems if not p.startswith(f"it does not hold {STATE}")]
            raise FlagError(
                f"{self._folder.path} is a checkpoint of another model: {shown}"
                f"{'' if others else '; add --no-load-optim to start with a fresh optimizer'}"
            )
        counts = self._folder.fill(self._wanted)
        for wanted, count, may_be_short in zip(
            self._wanted, counts, self._may_be_short, strict=True
        ):
            if count != wanted.target.numel() and not may_be_short:
                raise FlagError(
                    f"{self._folder.path} is incomplete: {count} of {wanted.target.numel()} "
                    f"elements at {wanted.offset} of {wanted.key} are there"
                )
        for chunk in chunks:
            for param in chunk.parameters():
                # Written into its memory, which nothing that watches parameters sees.
                torch.autograd.graph.increment_version(param)

    def _states(
        self, chunks: Sequence[nn.Module], optimizer: dict[str, Any] | None
    ) -> dict[torch.Tensor, dict[str, UnevenDTensor]]:
        """Moments to be read, by parameter; steps and options are filled in here."""
        if optimizer is None:
            return {}
        params = {
            name.fqn: param
            for param, name in canonical_parameter_names(chunks).items()
            if not name.is_unused
        }
        saved = SavedGroups.of(self._common)
        found: dict[torch.Tensor, dict[str, UnevenDTensor]] = {}
        for part in [optimizer] if "state" in optimizer else list(optimizer.values()):
            for fqn, entry in part["state"].items():
                if fqn not in params:
                    continue
                moments = {k: v for k, v in entry.items() if isinstance(v, UnevenDTensor)}
                found[params[fqn]] = moments
                if "step" in entry:
                    entry["step"] = torch.full_like(torch.as_tensor(entry["step"]), saved.step)
            part[META] = {fqn: saved.options(meta) for fqn, meta in part[META].items()}
            if "grad_scaler" in part:
                part["grad_scaler"] = self._grad_scaler() or part["grad_scaler"]
        return found

    def _grad_scaler(self) -> dict[str, Any]:
        optimizer = self._common["optimizer"]
        parts = [optimizer, *(p for p in optimizer.values() if isinstance(p, dict))]
        return next((part["grad_scaler"] for part in parts if "grad_scaler" in part), {})

    def _want_weight(
        self, tensor: torch.Tensor, block: StoredBlock, *, has_optimizer: bool
    ) -> None:
        """Ask for main weights where there are some, which have more digits."""
        is_float = isinstance(tensor, UnevenDTensor) and tensor.dtype == torch.float32
        if has_optimizer and is_float:
            for name in MAIN_WEIGHTS:
                key = f"{STATE}{name}.{block.key}"
                if self._folder.has(key):
                    self._want(key, tensor, block)
                    return
        self._want(block.key, tensor, block)

    def _want(self, key: str, tensor: torch.Tensor, block: StoredBlock) -> None:
        there = self._folder.shape(key)
        if there is None:
            self._problems.append(f"it does not hold {key}")
            return
        if not _fits(there, block):
            self._problems.append(f"{key} is {there}, and here {block.shape}")
            return
        for offset, target in _targets(tensor, block):
            if block.is_padded:
                target.zero_()
            self._wanted.append(ReadRequest(key, offset, target))
            self._may_be_short.append(block.is_padded)

    def _rng_state(self, mine: dict[str, Any], args: Any) -> dict[str, Any]:
        """State of random number generators, where it is that of the same parallel sizes.

        As in Megatron, generators keep the seeds of this run otherwise.
        """
        tp = parallel_state.get_tensor_model_parallel_rank()
        pp = parallel_state.get_pipeline_model_parallel_rank()
        sizes = (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        key = f"rng_state/shard_{pp}.{tp}_{sizes[0]}.{sizes[1]}"
        if not self._folder.has(key):
            if dist.get_rank() == 0:
                sys.stdout.write(
                    f"{self._folder.path} holds no random number state for these parallel sizes: "
                    "generators keep the seeds that this run started with\n"
                )
            return mine
        states = self._folder.object(key)[0]
        num_states = (
            parallel_state.get_data_parallel_world_size() if args.data_parallel_random_init else 1
        )
        if len(states) < num_states:
            return mine
        return {f"({pp}, {tp})": states}


def _fits(there: tuple[int, ...], block: StoredBlock) -> bool:
    """Whether a tensor of the checkpoint has the shape it should have."""
    if len(there) != len(block.shape):
        return False
    # Only a vocabulary may be of another length, which is the first dimension of its weights.
    first = 1 if block.is_padded else 0
    return there[first:] == block.shape[first:]


def _targets(
    tensor: torch.Tensor, block: StoredBlock
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """What of a block this rank holds: where it lies in the checkpoint, and memory to fill."""
    if isinstance(tensor, UnevenDTensor):
        local, (first, last) = local_of(tensor).detach(), tensor.local_rows
    else:
        local, (first, last) = tensor.detach(), (0, tensor.shape[0] if tensor.dim() else 1)
    extra = len(block.offset) - len(block.start)
    if not block.start:
        yield block.offset, local.view((1,) * extra)
        return
    low = max(first, block.start[0])
    high = min(last, block.start[0] + block.size[0])
    if low >= high or 0 in block.size:
        return
    others = zip(block.start[1:], block.size[1:], strict=True)
    target = local[(slice(low - first, high - first), *(slice(s, s + n) for s, n in others))]
    offset = list(block.offset)
    offset[extra] += low - block.start[0]
    yield tuple(offset), target[(None,) * extra]
