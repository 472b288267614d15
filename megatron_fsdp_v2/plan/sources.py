"""Sources of planned trainings: the training flags of a framework.

An adapter reads the flags of its framework and offers a function under the entry-point group
`megatron_fsdp_v2.plan_sources`; the core knows no flags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from megatron_fsdp_v2.plan.description import Strategy, TrainingDescription

SOURCE_GROUP = "megatron_fsdp_v2.plan_sources"


class FlagsError(ValueError):
    """Training flags that cannot be planned; the message names them and the reason."""


@dataclass(frozen=True, slots=True)
class SourceResult:
    """The training that flags describe.

    Attributes:
        stages: One rank's part of the training, for every pipeline stage.
        strategy: Strategy that the flags select.
    """

    stages: tuple[TrainingDescription, ...]
    strategy: Strategy


Source = Callable[[Sequence[str], int], SourceResult]
"""Describes training flags for a number of ranks; raises `FlagsError`."""


def describe_flags(flags: Sequence[str], num_ranks: int) -> SourceResult:
    """Describe training flags with the installed adapter, which is imported here.

    Args:
        flags: The training flags.
        num_ranks: Ranks of the job.

    Raises:
        ValueError: No adapter is installed, something cannot be imported, or the flags are
            rejected.
    """
    for point in sorted(entry_points(group=SOURCE_GROUP)):
        try:
            source: Source = point.load()
            return source(flags, num_ranks)
        except ImportError as error:
            raise ValueError(
                f"training flags after -- need {error.name or error}, which cannot be imported: "
                "install this package with its extra, megatron-fsdp-v2[megatron]"
            ) from None
    raise ValueError(
        "training flags after -- need an adapter, and none is installed; name a function that "
        "builds the model with --model instead"
    )
