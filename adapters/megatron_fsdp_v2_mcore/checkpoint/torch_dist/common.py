"""The common state of a `torch_dist` checkpoint: arguments, schedule, optimizer options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron.core.optimizer.optimizer import param_group_identifier_keys

from megatron_fsdp_v2.checkpoint.trust import file_inside
from megatron_fsdp_v2_mcore.checkpoint.torch_dist.folder import MegatronFolder, load_plain
from megatron_fsdp_v2_mcore.flags.errors import FlagError

__all__ = [
    "COMMON",
    "FULLY_RESHARDABLE",
    "SHARDING_TYPE",
    "SavedGroups",
    "common_state",
    "optimizer_problem",
]

COMMON = "common_state/shard_0_1"
LEGACY_COMMON = "common.pt"

SHARDING_TYPE = "distrib_optim_sharding_type"
FULLY_RESHARDABLE = "fully_reshardable"

_EXPERTS = "is_expert_parallel"


def common_state(folder: MegatronFolder) -> dict[str, Any]:
    """Read the arguments, iteration, schedule and optimizer options of a checkpoint.

    Raises:
        FlagError: The checkpoint has no common state.
        CheckpointError: The common state contains other objects than plain data.
    """
    legacy = file_inside(folder.path, LEGACY_COMMON)
    if legacy.is_file():
        found = load_plain(legacy)
    elif folder.has(COMMON):
        shards = folder.object(COMMON)
        found = shards[0] if isinstance(shards, list | tuple) and shards else None
    else:
        raise FlagError(f"{folder.path} is not a complete torch_dist checkpoint: no {COMMON}")
    if not isinstance(found, dict) or "args" not in found:
        raise FlagError(f"{folder.path} has no arguments of a Megatron run")
    return found


def optimizer_problem(common: dict[str, Any]) -> str:
    """Return the reason why optimizer state cannot be resharded; empty if it can."""
    if "optimizer" not in common:
        return "it has no optimizer state; add --no-load-optim to start with a new optimizer"
    sharding = (common.get("content_metadata") or {}).get(SHARDING_TYPE)
    for part in _parts(common["optimizer"]):
        sharding = part.get("param_state_sharding_type", sharding)
    if sharding in (None, FULLY_RESHARDABLE):
        return ""
    return (
        f"its optimizer state was saved as {sharding}, in rank-local buffers that cannot be "
        "resharded; save it with --dist-ckpt-optim-fully-reshardable, or add --no-load-optim to "
        "start with a new optimizer"
    )


def _parts(optimizer: dict[Any, Any]) -> list[dict[str, Any]]:
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
        for part in _parts(common["optimizer"]):
            inner = part.get("optimizer", part)
            step = inner.get("state", {}).get("common_step")
            for group in inner["param_groups"]:
                found.groups.append({k: v for k, v in group.items() if k != "params"})
                step = group.get("step", step)
            found.step = max(found.step, float(step or 0))
        return found

    def options(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a parameter of this run, updated with those of its saved group.

        Args:
            mine: The parameter's options in this run.

        Raises:
            FlagError: No saved group matches these options.
        """
        saved = next(self._like(mine, ()), None) or next(self._like(mine, (_EXPERTS,)), None)
        if saved is None:
            shown = {key: mine.get(key) for key in param_group_identifier_keys if key in mine}
            raise FlagError(
                f"the checkpoint has no optimizer options for parameters with {shown}; use the "
                "flags of the run that saved it, or add --no-load-optim"
            )
        kept = {k: v for k, v in saved.items() if k in mine and k not in (_EXPERTS, "step")}
        return {**mine, **kept, **({"step": int(self.step)} if "step" in mine else {})}

    def _like(self, mine: dict[str, Any], ignored: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        keys = [key for key in param_group_identifier_keys if key not in ignored]
        for group in self.groups:
            if all(_option(group, key) == _option(mine, key) for key in keys):
                yield group


def _option(group: dict[str, Any], key: str) -> Any:
    # Megatron saves some options under such an alias.
    return group.get(key, group.get(f"pre_{key}"))
