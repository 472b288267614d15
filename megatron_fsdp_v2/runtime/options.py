"""What belongs to a root and not to one of its units: said once, the same for all."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fsdp_v2.comm.rank_checks import CheckRanks
from megatron_fsdp_v2.runtime.gather_rules import NOTHING_AHEAD, PrefetchLimit

__all__ = ["RuntimeOptions", "check_at_least_one", "given_options", "options_of_root"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """How the units of one root run; no bit of any result depends on it. See `fully_shard`.

    Attributes:
        enable_unshard_prefetch: Gather the next unit while one computes.
        unshard_prefetch_depth: Units gathered ahead of the one at work; None for any number where
            `unshard_prefetch_bytes` says how much, and for one elsewhere.
        unshard_prefetch_bytes: Bytes of weights gathered ahead, but always those of one unit; None
            for no such limit.
        enable_unshard_after_step: Gather what a forward begins with when the optimizer has stepped.
        enable_async_reduce_grad: Reduce a unit's gradients while the next one computes.
        max_live_grad_buffers: Units that have full gradient buffers at a time.
        bucket_bytes: Bytes of weights or gradients up to which units that follow each other are
            gathered, or reduced, in one collective; None for one collective for every unit.
        enable_trace_pool: Have temporary buffers at planned addresses of one block of memory.
        check_ranks: How often ranks compare what they do.
    """

    enable_unshard_prefetch: bool = True
    unshard_prefetch_depth: int | None = None
    unshard_prefetch_bytes: int | None = None
    enable_unshard_after_step: bool = False
    enable_async_reduce_grad: bool = True
    max_live_grad_buffers: int = 2
    bucket_bytes: int | None = None
    enable_trace_pool: bool = False
    check_ranks: CheckRanks = CheckRanks.ONCE

    @property
    def prefetch_limit(self) -> PrefetchLimit:
        """How much is gathered ahead while a unit computes."""
        if not self.enable_unshard_prefetch:
            return NOTHING_AHEAD
        return PrefetchLimit.of(
            self.unshard_prefetch_depth, self.unshard_prefetch_bytes, self.bucket_bytes
        )


def check_at_least_one(name: str, value: object) -> None:
    """See that a bound of what is live at a time is one.

    Raises:
        ValueError: It is not a whole number of at least 1.
    """
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def given_options(**options: Any) -> dict[str, Any]:
    """Options of `RuntimeOptions` that a call of `fully_shard` gave: those that are not None.

    Raises:
        ValueError: One has a value that it cannot have.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name == "check_ranks":
            given[name] = CheckRanks.parse(value)
        elif not name.startswith("enable_"):
            check_at_least_one(name, value)
        elif not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
    return given


def options_of_root(given: Iterable[tuple[str, Mapping[str, Any]]]) -> RuntimeOptions:
    """What units of one root were given, together; the default where none was given a value.

    Args:
        given: Name and options of every unit.

    Raises:
        ValueError: Two were given different values.
    """
    known: dict[str, tuple[str, Any]] = {}
    for name, options in given:
        for option, value in options.items():
            other, first = known.setdefault(option, (name, value))
            if first != value:
                raise ValueError(
                    f"{option}={_shown(first)} for {other} and {option}={_shown(value)} for {name}:"
                    " units of one root share it; give it to the root alone, or the same to all"
                )
    return RuntimeOptions(**{option: value for option, (_, value) in known.items()})


def _shown(value: object) -> str:
    return repr(value.value if isinstance(value, enum.Enum) else value)
