"""Settings of ours that Megatron's configuration objects have no field for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_fsdp_v2.layout.placement import STRATEGIES
from megatron_fsdp_v2_mcore.flags.table import OWN_FLAGS

__all__ = ["Options", "active_options", "is_active", "require_active", "set_active"]


@dataclass(frozen=True, slots=True)
class Options:
    """What our own flags, and Megatron's that it keeps to itself, say about sharding.

    A script on `megatron.core` alone gives it to `FullyShardedDataParallel`.

    Attributes:
        expert_strategy: Sharding strategy of expert parameters; None: that of dense ones.
        broadcasts_parameters: Whether data-parallel ranks built different weights, of which the
            first rank's count.
        logs_parameter_norms: Whether norms of every parameter are logged.
        uses_trace_pool: Whether temporary buffers are at planned addresses.
        unshard_prefetch_depth: See `fully_shard`.
        unshard_prefetch_bytes: See `fully_shard`.
        unshard_after_step: Whether the optimizer's step gathers what the next forward begins with.
        max_live_grad_buffers: See `fully_shard`.
        bucket_bytes: See `fully_shard`.
        steps_flat_tensors: Whether Adam steps a few flat tensors instead of every parameter.
        gathers_apart: Whether weights are gathered in process groups of their own.

    Raises:
        ValueError: A strategy is not known, or a number is not at least 1.
    """

    expert_strategy: str | None = None
    broadcasts_parameters: bool = False
    logs_parameter_norms: bool = False
    uses_trace_pool: bool = False
    unshard_prefetch_depth: int | None = None
    unshard_prefetch_bytes: int | None = None
    unshard_after_step: bool = False
    max_live_grad_buffers: int = 2
    bucket_bytes: int | None = None
    steps_flat_tensors: bool = False
    gathers_apart: bool = False

    def __post_init__(self) -> None:
        if self.expert_strategy not in (None, *STRATEGIES):
            raise ValueError(
                f"expert_strategy is one of {', '.join(STRATEGIES)}, got {self.expert_strategy!r}"
            )
        numbers = ("unshard_prefetch_depth", "unshard_prefetch_bytes", "max_live_grad_buffers")
        for name in (*numbers, "bucket_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is at least 1, got {value}")

    @classmethod
    def from_args(cls, args: Any) -> Options:
        """Read them from Megatron's arguments."""
        given = {flag.option: getattr(args, flag.name, None) for flag in OWN_FLAGS}
        return cls(
            broadcasts_parameters=bool(getattr(args, "data_parallel_random_init", False)),
            gathers_apart=bool(getattr(args, "create_all_gather_group", False)),
            **{option: value for option, value in given.items() if value is not None},
        )


_active: list[Options] = []


def active_options() -> Options:
    """Return the options of the command line that selected this package, or the defaults."""
    return _active[0] if _active else Options()


def is_active() -> bool:
    """Return whether Megatron's optimizers and gradient sums are those for sharded parameters."""
    return bool(_active)


def set_active(options: Options | None) -> None:
    """Record that these functions of Megatron are patched, or with None that they are not."""
    _active[:] = [] if options is None else [options]


def require_active() -> None:
    """Reject a sharded model that Megatron's own optimizers would step.

    They would treat shards as whole tensors, and count replicated elements several times.

    Raises:
        RuntimeError: Megatron's functions are not patched.
    """
    if not _active:
        raise RuntimeError(
            "FullyShardedDataParallel needs Megatron's optimizers and sums of gradients replaced, "
            "and they are not: call megatron_fsdp_v2_mcore.enable() once before (a script on "
            "megatron.core alone), or megatron_fsdp_v2_mcore.install() and give Megatron "
            "--use-megatron-fsdp --use-fsdp-fully-shard-api"
        )
