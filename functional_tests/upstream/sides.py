"""The two trainings of a configuration: sharded by this package, and Megatron's DDP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from functional_tests.matrix import Run
from functional_tests.upstream.configurations import Configuration
from megatron_fsdp_v2_mcore.prove import shrink, sides
from megatron_fsdp_v2_mcore.prove.shrink import as_words, without
from megatron_fsdp_v2_mcore.prove.sides import LOCAL, PRECISION, Side


@dataclass(frozen=True)
class Shrunk:
    """A shrunk configuration, which a few ranks train in seconds.

    Attributes:
        name: Name of the first configuration that becomes this one.
        names: Names of all configurations that become this one.
        run: Its flags and number of ranks.
    """

    name: str
    names: tuple[str, ...]
    run: shrink.ShrunkRun


def shrunk(configurations: list[Configuration]) -> list[Shrunk]:
    """Shrink configurations, and merge those that become equal."""
    runs: dict[tuple[int, tuple[str, ...]], tuple[shrink.ShrunkRun, list[str]]] = {}
    for configuration in configurations:
        run = shrink.shrink(dict(configuration.flags))
        names = runs.setdefault((run.world_size, as_words(run.flags)), (run, []))[1]
        names.extend(configuration.names)
    return [Shrunk(names[0], tuple(names), run) for run, names in runs.values()]


def user_flags(each: Shrunk) -> list[str]:
    """Return the command line of a user of this package at ZeRO-3, on GPUs."""
    flags = without(each.run.flags, sides.WRAPPERS)
    return list(as_words(sides.user_flags(flags)))


def _on_cpu(side: Side) -> Run:
    # FP8 has its own tests, and Megatron's own layers are faster on a CPU.
    flags = sides.on_cpu(side.flags, LOCAL)
    return Run(side.world_size, as_words(flags), exact_norms=side.exact_norms)


def _unchanged(side: Side) -> Side:
    return side


def sharded(each: Shrunk, kind: Callable[[Side], Side] = _unchanged) -> Run:
    """Return the run of this package, on a CPU."""
    flags = sides.user_flags(without(each.run.flags, sides.WRAPPERS))
    return _on_cpu(kind(Side(each.run.world_size, flags)))


def reference(each: Shrunk, kind: Callable[[Side], Side] = _unchanged) -> Run:
    """Return the run of Megatron's own DDP, in which every rank steps all weights."""
    return _on_cpu(kind(sides.reference(each.run)))


def is_low_precision(each: Shrunk) -> bool:
    """Return whether weights or reduced gradients are in 16 bits."""
    return not PRECISION.isdisjoint(each.run.flags)
