"""A `torch_dist` folder of Megatron, and its common state: arguments and optimizer options.

Its non-tensor entries contain plain data and instances of the few classes that Megatron saves.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2_mcore.checkpoint.group_options import EXPERT, restored_options
from megatron_fsdp_v2_mcore.flags.errors import FlagError

COMMON = "common_state/shard_0_1"
LEGACY_COMMON = "common.pt"

SHARDING_TYPE = "distrib_optim_sharding_type"
FULLY_RESHARDABLE = "fully_reshardable"

_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Options by which groups are found only if no flag says which of two values to use."""

_OF_THE_RUN = (EXPERT, "step", "lr", "weight_decay", "default_config")
"""Options that are not read from a group: the schedule sets the rates of the step."""

# Megatron allows its classes in torch.load. These are their names in other versions.
_reconstruct: Any = numpy.empty(0).__reduce__()[0]
torch.serialization.add_safe_globals(
    [
        (_reconstruct, "numpy.core.multiarray._reconstruct"),
        (pathlib.PosixPath, "pathlib._local.PosixPath"),
    ]
)


def common_state(folder: CheckpointFolder) -> dict[str, Any]:
    """Read the arguments, iteration, schedule and optimizer options of a checkpoint.

    Raises:
        FlagError: The checkpoint has no common state, or no arguments in it.
        NotPlainError: The common state contains other objects than plain data.
    """
    if folder.has_file(LEGACY_COMMON):
        found = folder.load_file(LEGACY_COMMON)
    elif COMMON in folder.entries:
        shards = folder.object(COMMON)
        found = shards[0] if isinstance(shards, list | tuple) and shards else None
    else:
        raise FlagError(f"{folder.path} is not a complete torch_dist checkpoint: no {COMMON}")
    run_arguments(found, folder.path)
    content: dict[str, Any] = found
    return content


def run_arguments(content: Any, path: Path) -> argparse.Namespace:
    """Return Megatron's arguments of the run that saved a checkpoint.

    Args:
        content: Non-tensor entries of the checkpoint.
        path: Folder of the checkpoint, for the error message.

    Raises:
        FlagError: The entries contain no such arguments.
    """
    args = content.get("args") if isinstance(content, dict) else None
    if not isinstance(args, argparse.Namespace):
        raise FlagError(f"{path} has no arguments of a Megatron run")
    return args


def optimizer_problem(common: dict[str, Any]) -> str:
    """Return the reason why optimizer state cannot be resharded; empty if it can."""
    if "optimizer" not in common:
        return "it has no optimizer state; add --no-load-optim to start with a new optimizer"
    sharding = (common.get("content_metadata") or {}).get(SHARDING_TYPE)
    for part in _inner_states(common["optimizer"]):
        sharding = part.get("param_state_sharding_type", sharding)
    if sharding in (None, FULLY_RESHARDABLE):
        return ""
    return (
        f"its optimizer state was saved as {sharding}, in rank-local buffers that cannot be "
        "resharded; save it with --dist-ckpt-optim-fully-reshardable, or add --no-load-optim to "
        "start with a new optimizer"
    )


def _inner_states(optimizer: dict[Any, Any]) -> list[dict[str, Any]]:
    """Return the states of a chain's optimizers, such as those of dense and expert parameters."""
    is_chain = bool(optimizer) and all(isinstance(key, int) for key in optimizer)
    return list(optimizer.values()) if is_chain else [optimizer]


@dataclass(slots=True)
class SavedGroups:
    """Saved options of the optimizer.

    Attributes:
        step: Number of steps.
        groups: Options of each parameter group.
    """

    step: float = 0.0
    groups: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def of(common: dict[str, Any]) -> SavedGroups:
        """Collect the options of all optimizers of a checkpoint."""
        found = SavedGroups()
        for part in _inner_states(common["optimizer"]):
            inner = part.get("optimizer", part)
            step = inner.get("state", {}).get("common_step")
            for group in inner["param_groups"]:
                found.groups.append({k: v for k, v in group.items() if k != "params"})
                step = group.get("step", step)
            found.step = max(found.step, float(step or 0))
        return found

    def options(self, name: str, given: dict[str, Any], args: Any) -> dict[str, Any]:
        """Return the options of a parameter of a resumed run; see `restored_options`.

        Args:
            name: Name of the parameter, for errors.
            given: Its options by the command line.
            args: Megatron's arguments.

        Raises:
            FlagError: No saved group, or one of several, is that of the parameter.
        """
        keys = param_group_identifier_keys
        dense = [key for key in keys if key != EXPERT]
        found = (self._matching(given, keys) or self._matching(given, dense))[:1]
        if args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler:
            found = found or self._matching(given, [key for key in dense if key not in _RATES])
        options = [
            {k: v for k, v in group.items() if k in given and k not in _OF_THE_RUN}
            for group in found
        ]
        restored = [restored_options(name, given, {**given, **saved}, args) for saved in options]
        if not restored or any(other != restored[0] for other in restored):
            identifiers = {key: given[key] for key in keys if key in given}
            raise FlagError(
                f"the checkpoint has no optimizer options for {name} with {identifiers}; use "
                "the flags of the run that saved it, or add --no-load-optim"
            )
        return {**restored[0], **({"step": int(self.step)} if "step" in given else {})}

    def _matching(self, given: dict[str, Any], keys: Sequence[str]) -> list[dict[str, Any]]:
        return [
            group
            for group in self.groups
            if all(_option(group, key) == _option(given, key) for key in keys)
        ]


def _option(group: dict[str, Any], key: str) -> Any:
    # Megatron saves some options under such an alias.
    return group.get(key, group.get(f"pre_{key}"))
