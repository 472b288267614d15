"""Worlds that are explored: kinds of programs, each in all cases of levels, axes and prefetches."""

from __future__ import annotations

import itertools
from typing import Any

from tests.machine.executors import Setup

PROGRAMS: dict[str, dict[str, Any]] = {
    "units in any order": {},
    "units called again": {"max_calls": 2},
    "unit inside a unit": {"parents": (-1, 0, 1)},
    "tied units": {"tied": ((2, 1),)},
    "frozen unit": {"frozen": frozenset([1])},
    "units that stay gathered after a backward": {"keeps": True, "evaluates": True},
    "unit that stays gathered": {"stays": frozenset([1])},
    "unit that stays gathered between others": {
        "stays": frozenset([2]),
        "prefetch": 2,
        "parents": (-1, 0, 0, 0),
    },
    "non-reentrant checkpoints": {"checkpointed": "packed"},
    "reentrant checkpoints": {"checkpointed": "reentrant"},
    "recomputed units called again": {
        "checkpointed": "packed",
        "max_calls": 2,
        "max_steps": 1,
        "skips": True,
    },
    "parameters without a gradient": {"misses": frozenset([1, 2]), "max_calls": 2},
    "parameters without a gradient before the last backward": {
        "misses": frozenset([0, 1, 2]),
        "accumulates": True,
        "max_forwards": 2,
        "freezes": frozenset([1]),
    },
    "units that raise and whose callers go on": {"catches": True, "max_calls": 2},
    "units of two modules that raise": {
        "catches": True,
        "several": frozenset([1]),
        "parents": (-1, 0, 0, 1),
    },
    "gradients that miss units": {"skips": True},
    "two forwards before a backward": {"max_forwards": 2, "max_steps": 1},
    "two backwards before a step": {"max_forwards": 2, "max_steps": 1, "accumulates": True},
    "two roots": {"parents": (-1, -1, 0, 1)},
    "a training step inside a forward": {"trains_inside": True, "max_calls": 2, "max_steps": 3},
    "a training step inside a forward of units that stay gathered": {
        "trains_inside": True,
        "max_calls": 2,
        "max_steps": 3,
        "keeps": True,
        "stays": frozenset([1]),
    },
    "a training step inside a forward of a unit of two modules": {
        "trains_inside": True,
        "max_calls": 2,
        "max_steps": 3,
        "several": frozenset([1]),
    },
    "evaluations anywhere": {"evaluates": True},
    "an exception anywhere": {"interrupts": True},
    "an exception between two backwards": {
        "interrupts": True,
        "max_forwards": 2,
        "max_steps": 1,
        "accumulates": True,
    },
    "an exception and recomputations": {
        "checkpointed": "packed",
        "interrupts": True,
        "max_forwards": 2,
        "max_steps": 1,
    },
    "an exception and reentrant recomputations": {
        "checkpointed": "reentrant",
        "interrupts": True,
        "max_forwards": 2,
        "max_steps": 1,
    },
    "an exception in two roots": {"parents": (-1, -1, 0, 1), "interrupts": True, "max_steps": 1},
    "recomputed units inside a unit": {
        "parents": (-1, 0, 1, 1),
        "checkpointed": "packed",
        "max_steps": 1,
    },
    "units of reentrant checkpoints called again": {
        "checkpointed": "reentrant",
        "max_calls": 2,
        "skips": True,
    },
    "gradients that kernels write": {
        "fused": frozenset([1, 2]),
        "max_live": 1,
    },
    "units of another root that are gathered ahead": {
        "parents": (-1, -1, 0, 1),
        "chosen": ((2, 3), (3, 2)),
        "idles": True,
        "evaluates": True,
    },
    "recomputations that stop early": {"parents": (-1, 0, 1), "checkpointed": "stopping"},
    "unit of two modules": {"several": frozenset([1])},
    "unit of two modules of which one runs again": {
        "several": frozenset([1]),
        "restarts": True,
        "max_calls": 2,
    },
    "units outside the root's forward": {"alone": True, "max_forwards": 2, "max_steps": 1},
    "an exception in units outside the root's forward": {
        "alone": True,
        "interrupts": True,
        "max_forwards": 2,
        "max_steps": 1,
    },
    "uses of parameters themselves": {"direct": frozenset([1])},
    "many uses of parameters themselves": {
        "direct": frozenset([0, 1, 2, 3]),
        "max_uses": 3,
        "parents": (-1, 0, 0, 0),
        "max_live": 1,
    },
    "a unit frozen while it is gathered": {
        "direct": frozenset([1]),
        "freezes": frozenset([1]),
        "keeps": True,
        "max_forwards": 2,
    },
    "outputs that no hook sees": {"unseen": frozenset([1]), "max_calls": 2},
    "a backward inside one of another root": {
        "parents": (-1, -1, 0, 1),
        "inner": True,
        "max_forwards": 2,
        "max_steps": 1,
    },
    "an exception and a use of a parameter itself": {
        "direct": frozenset([1]),
        "interrupts": True,
        "max_steps": 1,
    },
    "a unit frozen between two backwards": {
        "freezes": frozenset([1]),
        "max_forwards": 2,
        "accumulates": True,
    },
    "a unit unfrozen between two backwards": {
        "frozen": frozenset([1]),
        "freezes": frozenset([1]),
        "max_forwards": 2,
        "accumulates": True,
    },
    "uses of parameters themselves in recomputations": {
        "direct": frozenset([1, 2]),
        "max_uses": 2,
        "checkpointed": "packed",
    },
    "uses of parameters themselves in reentrant recomputations": {
        "direct": frozenset([1, 2]),
        "max_uses": 2,
        "checkpointed": "reentrant",
    },
    "a use of a parameter itself after a training step inside a forward": {
        "trains_inside": True,
        "direct": frozenset([1]),
        "max_calls": 2,
        "max_steps": 3,
    },
    "loads anywhere": {"loads": frozenset([1, 2]), "max_calls": 2},
    "weights written in forwards": {
        "writes": frozenset([1, 2]),
        "parents": (-1, 0, 0, 0),
        "evaluates": True,
        "stays": frozenset([2]),
    },
    "forwards with gradients inside a backward": {"nests": True, "evaluates": True},
    "forwards with gradients inside a backward of two roots": {
        "nests": True,
        "evaluates": True,
        "parents": (-1, -1, 0, 1),
    },
    "two backwards through one graph": {"repeats": True},
    "a backward that is repeated after an exception": {
        "repeats": True,
        "interrupts": True,
        "max_steps": 1,
    },
    "recomputations without a backward": {
        "checkpointed": "packed",
        "skips": True,
        "max_steps": 1,
        "parents": (-1, 0, 0, 0),
    },
    "graphs that are freed": {"drops": True, "max_forwards": 2},
    "a step between a forward and its backward": {"steps_early": True, "evaluates": True},
    "units that others gather ahead": {"chosen": ((0, 2), (1, 2)), "evaluates": True},
    "parameters that are replaced": {"replaces": True, "keeps": True, "evaluates": True},
    "weights of forwards and backwards apart": {"payloads": True, "max_calls": 2},
    "weights of recomputations and backwards apart": {
        "payloads": True,
        "checkpointed": "packed",
        "stays": frozenset([1]),
        "evaluates": True,
    },
    "a bound in bytes": {"prefetch": None, "prefetch_nbytes": 2, "parents": (-1, 0, 0, 0)},
    "two bounds": {"prefetch": 2, "prefetch_nbytes": 1, "parents": (-1, 0, 0, 0)},
    "reductions that the host waits for": {"waits": True, "max_calls": 2},
    "collectives that ranks always compare": {"compares": "always", "evaluates": True},
    "a wait that fails": {"fails": True},
    "a reduction that fails": {"breaks": True, "max_forwards": 2},
    "a reduction that fails between micro-batches": {
        "breaks": True,
        "accumulates": True,
        "max_forwards": 2,
        "freezes": frozenset([1]),
    },
    "a backward that fails in the loss": {"resets": True, "max_forwards": 2, "skips": True},
    "a backward that fails in the loss between micro-batches": {
        "resets": True,
        "accumulates": True,
        "max_forwards": 2,
        "alone": True,
    },
    "a wait that fails in units inside units": {
        "fails": True,
        "parents": (-1, 0, 1),
        "evaluates": True,
        "checkpointed": "packed",
    },
    "units that a user unshards": {"unshards": True, "keeps": True, "evaluates": True},
    "units that a user unshards after forwards that differ": {
        "unshards": True,
        "skips": True,
        "drops": True,
        "alone": True,
    },
    "units made idle": {"idles": True, "interrupts": True, "keeps": True},
    "captured steps": {"captures": True, "keeps": True, "illegal": True},
    "captured steps and evaluations": {"captures": True, "keeps": True, "evaluates": True},
    "captured steps without units that stay": {"captures": True, "max_steps": 3},
    "random weights": {"draws": True},
    "formats that communicate": {"formats": True, "draws": True, "accumulates": True},
    "ends that no hook reports": {"hookless": frozenset([1, 2]), "parents": (-1, 0, 1, 0)},
    "gradients of other inputs": {"other_inputs": frozenset([1, 2]), "max_calls": 2},
    "backwards that are finalized": {"manual": True, "max_forwards": 2, "keeps": True},
    "reductions that users call": {
        "accumulates": True,
        "max_forwards": 2,
        "freezes": frozenset([1]),
    },
    "the second axis at the last backward": {
        "accumulates": True,
        "max_forwards": 2,
        "unsynced_by": "requires_all_reduce",
    },
    "a last backward": {"accumulates": True, "max_forwards": 2, "unsynced_by": "is_last_backward"},
    "units that are deleted": {"deletes": frozenset([1]), "evaluates": True, "max_steps": 3},
    "roots that are deleted": {
        "deletes": frozenset([0, 1]),
        "parents": (-1, -1, 0, 1),
        "interrupts": True,
    },
    "schedules": {"schedules": True, "max_forwards": 3, "illegal": True},
    "schedules and exceptions": {"schedules": True, "max_forwards": 2, "interrupts": True},
    "schedules that accumulate": {
        "schedules": True,
        "max_forwards": 2,
        "accumulates": True,
        "stays": frozenset([1]),
    },
    "more uses than are remembered": {"max_runs": 3, "max_calls": 3},
    "what is rejected": {"illegal": True, "parents": (-1, 0, 1)},
    "two backwards of two roots before a step": {
        "parents": (-1, -1, 0, 1),
        "accumulates": True,
        "max_forwards": 2,
    },
    "the second axis of two roots at the last backward": {
        "parents": (-1, -1, 0, 1),
        "accumulates": True,
        "max_forwards": 2,
        "unsynced_by": "requires_all_reduce",
    },
    "two roots and evaluations": {"parents": (-1, -1, 0, 1), "evaluates": True},
    "several forwards of two roots": {
        "parents": (-1, -1, 0, 1),
        "alone": True,
        "max_forwards": 2,
        "max_steps": 1,
    },
    "several forwards of two roots that gradients miss": {
        "parents": (-1, -1, 0, 1),
        "skips": True,
        "max_forwards": 2,
        "max_steps": 1,
    },
    "many recomputed units inside a unit": {
        "parents": (-1, 0, 1, 1, 1),
        "checkpointed": "packed",
        "skips": True,
        "max_steps": 1,
    },
}
AXES: tuple[dict[str, Any], ...] = ({"axes": 1}, {"axes": 2}, {"axes": 2, "queues": True})
CASES = [
    {"zero": zero, "prefetch": prefetch, **axes}
    for zero, axes, prefetch in itertools.product((3, 2, 1, 0), AXES, (0, 1, 2))
]


def setup_of(case: dict[str, Any], program: str) -> Setup:
    """Return a world of a kind of programs; what the kind says holds in every case."""
    return Setup(**{**case, **PROGRAMS[program]})


CROSSED: tuple[tuple[str, str, int], ...] = (
    ("a training step inside a forward", "units outside the root's forward", 13),
    (
        "a training step inside a forward of a unit of two modules",
        "uses of parameters themselves",
        31,
    ),
    (
        "outputs that no hook sees",
        "a use of a parameter itself after a training step inside a forward",
        31,
    ),
    (
        "the second axis of two roots at the last backward",
        "units that stay gathered after a backward",
        11,
    ),
    ("random weights", "graphs that are freed", 19),
    ("units outside the root's forward", "reentrant checkpoints", 2),
    (
        "captured steps without units that stay",
        "a reduction that fails between micro-batches",
        34,
    ),
    ("captured steps and evaluations", "an exception and recomputations", 17),
    ("backwards that are finalized", "a unit unfrozen between two backwards", 32),
    ("captured steps without units that stay", "a step between a forward and its backward", 18),
    ("collectives that ranks always compare", "a reduction that fails", 20),
    ("evaluations anywhere", "what is rejected", 7),
    ("parameters that are replaced", "a last backward", 26),
    ("parameters that are replaced", "an exception anywhere", 1),
    ("parameters that are replaced", "units made idle", 10),
    ("parameters that are replaced", "uses of parameters themselves", 19),
    ("parameters without a gradient", "ends that no hook reports", 7),
    (
        "parameters without a gradient before the last backward",
        "parameters that are replaced",
        11,
    ),
    (
        "recomputed units inside a unit",
        "forwards with gradients inside a backward of two roots",
        3,
    ),
    ("two backwards through one graph", "two roots and evaluations", 33),
    ("two forwards before a backward", "ends that no hook reports", 14),
    ("unit that stays gathered", "a unit unfrozen between two backwards", 10),
    ("units made idle", "units of two modules that raise", 1),
    ("units of two modules that raise", "an exception in units outside the root's forward", 13),
)
"""Two kinds of programs at once, and the number of a case."""


def crossed(one: str, other: str, case: int) -> Setup:
    """Return a world of programs that may do what two kinds of programs do."""
    both = [PROGRAMS[one], PROGRAMS[other]]
    # As many events and units as either has.
    most = {}
    for name in ("max_forwards", "max_calls", "max_steps", "parents"):
        if values := [kind[name] for kind in both if name in kind]:
            most[name] = max(values, key=len if name == "parents" else None)
    return Setup(**{**CASES[case], **both[0], **both[1], **most})
