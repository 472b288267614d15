"""Options of this package without a field in Megatron's configuration objects."""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass, field
from typing import Any

from megatron_fsdp_v2 import RuntimeOptions
from megatron_fsdp_v2.layout.placement import STRATEGIES, ShardingStrategy
from megatron_fsdp_v2.runtime.options import check_at_least_one
from megatron_fsdp_v2_mcore.flags.table import OWN_FLAGS


@dataclass(frozen=True, slots=True)
class Options:
    """Sharding options that are not in Megatron's configuration objects.

    They come from the flags of this package, and from flags that Megatron does not pass to the
    wrapper. A script on `megatron.core` passes them to `FullyShardedDataParallel`.

    Attributes:
        expert_strategy: Sharding strategy of expert parameters; None for that of dense parameters.
        broadcasts_parameters: Whether the weights of the first data-parallel rank are broadcast,
            because ranks build different weights.
        logs_parameter_norms: Whether the norm of every parameter is logged.
        unit_bytes: Maximum bytes of parameters of consecutive layers that form one unit; None for
            --suggested-communication-unit-size, or 16 MiB without it.
        runtime: Options of the units, apart from those that Megatron's configuration sets.
        steps_each_parameter: Whether Adam steps each parameter even if it could step flat tensors.
        uses_gather_groups: Whether weights are gathered in dedicated process groups.
        saves_differing_replicas: Whether a save continues, with a warning, if the replicas of a
            parameter differ between tensor-parallel ranks or pipeline stages.
        trusts_checkpoint: Whether a load unpickles objects that are not plain data, which runs code
            that the checkpoint names.
        exits_on_failed_save: Whether a failed save ends the training, instead of being reported.
        hang_reports: Folder of the reports of `watch_collectives`; None for none.
        audit: Number of steps between audits, which look for corrupted memory; None for none.

    Raises:
        ValueError: A strategy is unknown, or `unit_bytes` is less than 1.
    """

    expert_strategy: ShardingStrategy | None = None
    broadcasts_parameters: bool = False
    logs_parameter_norms: bool = False
    unit_bytes: int | None = None
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)
    steps_each_parameter: bool = False
    uses_gather_groups: bool = False
    saves_differing_replicas: bool = False
    trusts_checkpoint: bool = False
    exits_on_failed_save: bool = False
    hang_reports: str | None = None
    audit: int | None = None

    def __post_init__(self) -> None:
        if self.expert_strategy not in (None, *STRATEGIES):
            raise ValueError(
                f"expert_strategy is one of {', '.join(STRATEGIES)}, got {self.expert_strategy!r}"
            )
        if self.unit_bytes is not None:
            check_at_least_one("unit_bytes", self.unit_bytes)

    @classmethod
    def from_args(cls, args: Any) -> Options:
        """Read the options from Megatron's arguments."""
        found = {flag.option: getattr(args, flag.name, None) for flag in OWN_FLAGS}
        given = {option: value for option, value in found.items() if value is not None}
        names = {option.name for option in dataclasses.fields(RuntimeOptions)} & given.keys()
        return cls(
            runtime=RuntimeOptions(**{name: given.pop(name) for name in names}),
            broadcasts_parameters=bool(getattr(args, "data_parallel_random_init", False)),
            uses_gather_groups=bool(getattr(args, "create_all_gather_group", False)),
            **given,
        )


_active: list[Options] = []


def active_options() -> Options:
    """Return the options of the command line that selected this package, or the defaults."""
    return _active[0] if _active else Options()


def is_active() -> bool:
    """Return whether Megatron's optimizers and gradient reductions are patched."""
    return bool(_active)


def set_active(options: Options | None) -> None:
    """Record the options with which Megatron's functions are patched; None if they are not."""
    _active[:] = [] if options is None else [options]


def require_active() -> None:
    """Check that Megatron's functions are patched before a model is sharded.

    Megatron's own optimizers would treat shards as whole tensors and count replicated elements
    several times.

    Raises:
        RuntimeError: Megatron's functions are not patched.
    """
    if not _active:
        raise RuntimeError(
            "FullyShardedDataParallel needs patches of Megatron's optimizers and gradient "
            "reductions, which are not applied: in a script on megatron.core, call "
            "megatron_fsdp_v2_mcore.enable() first; otherwise call "
            "megatron_fsdp_v2_mcore.install() and pass --use-megatron-fsdp "
            "--use-fsdp-fully-shard-api to Megatron"
        )


def training_globals() -> Any:
    """Return Megatron's module of arguments and writers."""
    # Imported by name and on demand, since scripts on megatron.core do not need it.
    return importlib.import_module("megatron.training.global_vars")
