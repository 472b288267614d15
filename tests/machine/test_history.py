"""Faults of control, most of which this package had, each as a short sequence of events.

A sequence runs under all rules of `World`. Where several ways are given, ranks may run them
together, so that they must issue the same collectives. `change` reintroduces a fault in one place
of the machine: the sequence must detect it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import pytest

from megatron_fsdp_v2.runtime import machine
from tests.machine.executors import Setup
from tests.machine.explore import run

CALL_1 = "call 1 0, return"
CALL_2 = "call 2 0, return"
CALL_3 = "call 3 0, return"
ALL = f"{CALL_1}, {CALL_2}, {CALL_3}"
ONE = f"forward 0, {CALL_1}, return"
BOTH = f"forward 0, {CALL_1}, {CALL_2}, return"
DEEP = f"forward 0, {CALL_2}, {CALL_3}, return"
TWO_ROOTS = (-1, -1, 0, 0, 1)


@dataclass(frozen=True)
class Fault:
    """A fault of the history.

    Attributes:
        what: What was wrong.
        setup: The world.
        ways: Sequences of actions; the collectives of all of them must be equal.
        change: Name of a file of the machine, a text in it, and what to put there to have the fault
            again.
    """

    what: str
    setup: Setup
    ways: tuple[str, ...]
    change: tuple[str, str, str] | None = None


FAULTS = [
    # -- passes
    Fault(
        "a rank that ran no unit in the first of two forwards did not reduce the others' units",
        Setup(zero=2, max_forwards=2),
        (f"{ONE}, {ONE}, backward 0, *", f"forward 0, return, {ONE}, backward 0, *"),
        ("events", "(current.has_root or current.has_forwards)", "current.has_forwards"),
    ),
    Fault(
        "an evaluation between a forward and its backward began another pass of the root",
        Setup(zero=2, evaluates=True, alone=True, max_forwards=2),
        (
            f"{BOTH}, evaluate 0, forward 1, return, backward 0, *",
            f"{ONE}, evaluate 0, backward 0, *",
        ),
        ("events", "unit.is_root and has_grad, root", "unit.is_root, root"),
    ),
    Fault(
        "a unit that ran before its root's forward kept the weights of before the step",
        Setup(zero=2, alone=True, max_forwards=2),
        (f"{ONE}, backward 0, *, step, forward 1, return, {ONE}, backward 0, *",),
    ),
    Fault(
        "a unit that ran after its root's forward took its place in a backward that was over",
        Setup(zero=3, alone=True, max_forwards=4),
        (f"{BOTH}, backward 0, *, forward 1, return, {BOTH}, forward 2, return, backward 0, *",),
    ),
    Fault(
        "a unit outside its root's forward could not run again after an exception",
        Setup(zero=3, alone=True, interrupts=True, max_forwards=3),
        ("forward 1, interrupt 0, forward 1, return, backward 0, *",),
        (
            "events",
            "    if unit.phase is Phase.FORWARD:\n        unit.move(Phase.IDLE)\n"
            "        if not is_kept:\n            weights.free(unit, after_error=True)\n"
            "    if unit.root.is_pass_of(unit):",
            "    if unit.root.is_pass_of(unit) and unit.is_root:",
        ),
    ),
    Fault(
        "a backward and a step inside the forward of the root ended that forward",
        Setup(trains_inside=True, max_calls=2, max_steps=3),
        (f"forward 0, {CALL_1}, train, {CALL_1}, return",),
        ("reductions", "Phase.FORWARD if unit.has_begun", "Phase.FORWARD if False"),
    ),
    Fault(
        "units that ran after a step inside the forward of their root had the weights of before it",
        Setup(zero=2, trains_inside=True, max_calls=2, max_steps=3),
        (
            f"forward 0, {CALL_1}, train, {CALL_1}, return",
            f"forward 0, {CALL_1}, train, {CALL_2}, return",
        ),
        (
            "events",
            "if root.current.is_over:\n                _continue",
            "if False:\n                _continue",
        ),
    ),
    Fault(
        "a unit whose second module a forward skipped was in its forward for ever",
        Setup(several=frozenset([1]), max_forwards=2),
        (
            f"forward 0, call 1 0, {CALL_2}, return, backward 0, *, step, "
            f"forward 0, call 1 0, {CALL_2}, call 1 0, return, return, backward 0, *",
        ),
    ),
    Fault(
        "a unit of two modules was freed before its second module ran",
        Setup(several=frozenset([1])),
        (f"forward 0, call 1 0, {CALL_2}, call 1 0, return, return, backward 0, *",),
        ("events", "return not unit.pending_modules", "return True"),
    ),
    # -- forwards inside a backward
    Fault(
        "a forward in a hook of a backward was taken for a recomputation",
        Setup(zero=3, evaluates=True, steps_early=True, prefetch=0),
        (f"{BOTH}, step, backward 0, engine, evaluate 0, *",),
        ("events", "and unit in root.passed.recomputable", ""),
    ),
    Fault(
        "a forward in a hook freed the weights that the backward around it computes with",
        Setup(zero=3, evaluates=True),
        (f"{BOTH}, backward 0, engine, engine, evaluate 0, *",),
        ("events", "has_grad=has_grad) and not unit.is_gathered_around:", "has_grad=has_grad):"),
    ),
    Fault(
        "a forward of another root in a backward met reductions that other ranks had not issued",
        Setup(zero=2, parents=TWO_ROOTS, evaluates=True),
        (
            "forward 0, call 2 0, return, return, backward 0, engine, evaluate 1, *",
            "forward 0, call 2 0, return, call 3 0, return, return, backward 0, engine, engine, "
            "engine, engine, evaluate 1, *",
        ),
        (
            "events",
            "        reductions.finish_others(root)\n    if not (root",
            "        pass\n    if not (root",
        ),
    ),
    Fault(
        "a second backward through one graph reduced units again that had their turn",
        Setup(zero=2, repeats=True),
        (f"{BOTH}, backward 0, *, again, *", f"{ONE}, backward 0, *, again, *"),
        (
            "orders",
            "self._next, self.is_reduced = 0, self._order is None",
            "self.is_reduced = self._order is None",
        ),
    ),
    # -- recomputations
    Fault(
        "a unit whose recomputation an exception stops early, and that has no backward, was in its "
        "forward for ever",
        Setup(checkpointed="stopping", skips=True, max_calls=2),
        ("forward 0, call 1 1, return, call 1 1, return, return, backward 3, *",),
        (
            "events",
            "        _end_recomputation(unit)\n        return\n    if unit.phase",
            "        return\n    if unit.phase",
        ),
    ),
    Fault(
        "a reentrant checkpoint, whose first forward has no graph, expected no backward",
        Setup(zero=2, checkpointed="reentrant"),
        ("forward 0, call 1 1, return, call 2 1, return, return, backward 0, *",),
        (
            "events",
            "if has_grad or pass_has_grad:\n            root.current",
            "if has_grad:\n            root.current",
        ),
    ),
    Fault(
        "units of a recomputed region were all gathered at a time",
        Setup(parents=(-1, 0, 1, 1, 1), checkpointed="packed", prefetch=1),
        (
            "forward 0, call 1 1, call 2 0, return, call 3 0, return, call 4 0, return, return, "
            "return, backward 0, *",
        ),
    ),
    Fault(
        "a recomputation stayed gathered beside all those that had no backward",
        Setup(checkpointed="packed", skips=True, max_calls=2, parents=(-1, 0, 0, 0)),
        ("forward 0, call 1 1, return, call 2 1, return, call 3 1, return, return, backward 7, *",),
    ),
    Fault(
        "a rank that skipped a unit reduced other roots before an evaluation in their backward",
        Setup(zero=0, parents=TWO_ROOTS, evaluates=True, max_steps=3),
        tuple(
            f"{DEEP}, backward 0, *, step, {first}, forward 1, call 4 0, return, return, "
            "backward 0, engine, engine, engine, engine, evaluate 0, *"
            for first in (DEEP, "forward 0, return")
        ),
    ),
    # -- gathers ahead
    Fault(
        "a unit gathered ahead in vain was gathered until the end of the step",
        Setup(zero=3, evaluates=True, max_steps=3),
        (f"{BOTH}, backward 0, *, step, {ONE}, backward 0, *, step, {BOTH}, backward 0, *",),
        (
            "events",
            "            weights.drop_prefetched(root)\n            if root.r",
            "            if root.r",
        ),
    ),
    Fault(
        "after an evaluation in a backward, the next backward gathered units of the last step",
        Setup(zero=3, evaluates=True, prefetch=2, max_steps=3),
        (f"{BOTH}, backward 0, engine, evaluate 0, *, step, forward 0, return, backward 0, *",),
        ("events", "        root.nested.gathers.backward.ran = []\n", ""),
    ),
    Fault(
        "a unit gathered ahead, dropped by a load and gathered ahead again was dropped in use",
        Setup(zero=3, prefetch=2, parents=(-1, 0, 0, 0), loads=frozenset([3]), max_steps=3),
        (
            f"forward 0, {ALL}, return, backward 0, *, step, "
            f"forward 0, {CALL_1}, load 3, {CALL_2}, {CALL_3}, return, backward 0, *",
        ),
    ),
    Fault(
        "a unit that was not expected left those gathered ahead where they were",
        Setup(zero=3, max_calls=2, parents=(-1, 0, 0, 0)),
        (
            f"forward 0, {ALL}, return, backward 0, *, step, "
            f"forward 0, {CALL_3}, {CALL_1}, {CALL_2}, return, backward 0, *",
        ),
        (
            "weights",
            "while prefetched and (dropped := prefetched.popleft()) is not unit:",
            "while False:",
        ),
    ),
    Fault(
        "a unit gathered ahead ran with the weights from before a write in the forward",
        Setup(writes=frozenset([1])),
        (f"{BOTH}, backward 0, *, step, forward 0, write 1, {CALL_1}",),
        (
            "events",
            "gathered_around:\n            weights.free_if_changed(unit)",
            "gathered_around:\n            pass",
        ),
    ),
    Fault(
        "a load between a forward and its backward left the gathered weights installed",
        Setup(zero=3, loads=frozenset([1]), stays=frozenset([1])),
        (f"{BOTH}, load 1, backward 0, *",),
    ),
    # -- turns of reductions
    Fault(
        "a rank that skipped a unit did not take part in its reduction",
        Setup(zero=2),
        (f"{BOTH}, backward 0, *", f"{ONE}, backward 0, *", "forward 0, return, backward 0, *"),
        (
            "reductions",
            "        root.pending.add(unit)\n        _reduce(root, unit, synchronize=unit.syncs",
            "        _reduce(root, unit, synchronize=unit.syncs",
        ),
    ),
    Fault(
        "a gradient that missed a unit let the units after it be reduced before it",
        Setup(zero=2, skips=True),
        (f"{BOTH}, backward 0, *", f"{BOTH}, backward 1, *", f"{BOTH}, backward 2, *"),
    ),
    Fault(
        "units of a root were reduced after those of another root of the loss, if a rank ran less",
        Setup(zero=2, parents=(-1, -1, 0, 1, 1), alone=True, max_forwards=2),
        (
            f"forward 3, return, forward 0, {CALL_2}, return, forward 1, return, backward 0, *",
            "forward 4, return, forward 0, return, forward 1, return, backward 0, *",
        ),
    ),
    Fault(
        "a unit called twice, one of whose gradients a rank lacked, was reduced at another place",
        Setup(zero=3, max_calls=2, skips=True, parents=(-1, 0, 0, 0)),
        (
            f"forward 0, {CALL_1}, {CALL_3}, {CALL_2}, {CALL_3}, {CALL_2}, return, backward 0, *",
            f"forward 0, {CALL_1}, {CALL_3}, {CALL_2}, {CALL_3}, {CALL_2}, return, backward 4, *",
        ),
        ("orders", "if self._left[u] <= 0 and u not in repeated]", "if self._left[u] <= 0]"),
    ),
    Fault(
        "a tied parameter was reduced before the last unit that uses it had its backward",
        Setup(zero=2, tied=((2, 1),)),
        (f"{BOTH}, backward 0, *",),
        (
            "events",
            "root.current.add_use(unit.reduced_with)\n            # A forward",
            "root.current.add_use([unit])\n            # A forward",
        ),
    ),
    Fault(
        "one backward through two forwards of a root reduced its units once",
        Setup(zero=2, max_forwards=2),
        (f"{BOTH}, {BOTH}, backward 0, *", f"{ONE}, {BOTH}, backward 0, *"),
        ("reductions", "    elif passed is root.passed:\n", "    else:\n"),
    ),
    Fault(
        "a forward whose graph was freed let later backwards wait for its turn",
        Setup(zero=2, drops=True, max_forwards=2, parents=(-1, -1, 0, 1)),
        (
            "forward 0, call 2 0, return, return, forward 1, return, drop, "
            "forward 0, call 2 0, return, return, backward 0, *",
        ),
        (
            "orders",
            "        # No backward can follow, so that no other pass waits for this one.\n"
            "        self._leave()",
            "        pass",
        ),
    ),
    # -- room
    Fault(
        "all units had full gradients at a time, since no reduction was waited for",
        Setup(zero=2, parents=(-1, 0, 0, 0, 0), max_live=1),
        (
            "forward 0, call 1 0, return, call 2 0, return, call 3 0, return, call 4 0, return, "
            "return, backward 0, *",
        ),
        ("reductions", "while len(root.inner) >= root.control.max_live:", "while False:"),
    ),
    Fault(
        "partial gradients along the second axis were left when a backward ended",
        Setup(zero=3, axes=2),
        (f"{BOTH}, backward 0, *",),
        ("reductions", "    while root.outer:\n        _finish_outer(root)", "    pass"),
    ),
    # -- accumulated gradients, frozen units
    Fault(
        "a unit frozen during accumulation lost its gradient",
        Setup(zero=1, accumulates=True, freezes=frozenset([1]), max_forwards=2),
        (
            f"{BOTH}, backward 0, *, freeze 1, {BOTH}, backward 0, *",
            f"forward 0, {CALL_2}, return, backward 0, *, freeze 1, {BOTH}, backward 0, *",
        ),
        ("reductions", "is_pending and (group.is_trained or group.is_owed)", "group.is_trained"),
    ),
    Fault(
        "a unit that no backward used since an unsynchronized one owed a gradient for ever",
        Setup(zero=3, axes=2, accumulates=True, freezes=frozenset([1]), max_forwards=2),
        (
            f"forward 0, {CALL_2}, return, backward 0, *, freeze 1, "
            f"forward 0, {CALL_2}, return, backward 0, *",
        ),
        ("reductions", "root.ranks_may_differ or group.has_gradient or group.has_partial", "True"),
    ),
    Fault(
        "ranks reduced an unfrozen unit only if they had its gradient",
        Setup(zero=2, frozen=frozenset([1]), freezes=frozenset([1])),
        (
            f"freeze 1, {BOTH}, backward 0, *",
            f"freeze 1, forward 0, {CALL_2}, return, backward 0, *",
        ),
        (
            "reductions",
            "(group.has_gradient or (is_pending and",
            "(group.has_gradient or (False and",
        ),
    ),
    Fault(
        "a gradient that one rank keeps from an earlier backward was reduced on that rank alone",
        Setup(zero=1, accumulates=True, max_forwards=2),
        (
            f"{BOTH}, backward 0, *, {ONE}, backward 0, *",
            f"{ONE}, backward 0, *, {ONE}, backward 0, *",
        ),
    ),
    # -- uses of parameters themselves
    Fault(
        "a parameter used itself in a loss was reduced apart from the other ranks' gradients",
        Setup(zero=2, direct=frozenset([1])),
        (
            f"use 1 1, forward 0, {CALL_2}, return, backward 0, *",
            f"use 1 0, forward 0, {CALL_2}, return, backward 0, *",
            f"forward 0, {CALL_2}, use 1 1, return, backward 0, *",
        ),
    ),
    Fault(
        "a use of a parameter whose result was only looked at deferred all later reductions",
        Setup(zero=2, direct=frozenset([2]), max_live=1, parents=(-1, 0, 0, 0, 0)),
        (
            "forward 0, use 2 0, call 1 0, return, call 2 0, return, call 3 0, return, "
            "call 4 0, return, return, backward 0, *",
        ),
        ("orders", "            self._uses[unit] -= 1", "            pass"),
    ),
    Fault(
        "a parameter used before the forward of its unit began a pass without the root's turn",
        Setup(zero=2, parents=(-1, -1, 0, 1), direct=frozenset([2])),
        (
            "use 2 1, forward 1, call 3 0, return, return, backward 0, *",
            "use 2 1, forward 1, return, backward 0, *",
        ),
    ),
    Fault(
        "at ZeRO-3, a use of a parameter on one rank was reduced where its gradient arrived",
        Setup(zero=3, direct=frozenset([1])),
        (
            f"forward 0, {CALL_2}, use 1 1, return, backward 0, *",
            f"forward 0, {CALL_2}, use 1 0, return, backward 0, *",
        ),
        ("reductions", "    root.pending.update(passed.used_directly)", "    pass"),
    ),
    # -- exceptions
    Fault(
        "a forward after a failed backward was taken for one inside it, since the engine's thread "
        "dropped its callback late",
        Setup(interrupts=True, max_forwards=2),
        (f"{ONE}, backward 0, engine, interrupt 1, {ONE}, backward 0, *",),
        ("events", "is Engine.RUNNING and root.do.engine_run == -1:", "is None:"),
    ),
    Fault(
        "a rank whose backward failed did not reduce the units that other ranks reduced",
        Setup(zero=2, interrupts=True, max_forwards=2),
        (
            f"{BOTH}, backward 0, engine, engine, interrupt 0, {BOTH}, backward 0, *",
            f"{BOTH}, backward 0, *, {BOTH}, backward 0, *",
        ),
        (
            "reductions",
            "[*root.in_turn, *root.passed.due(is_left=True)]",
            "[]",
        ),
    ),
    Fault(
        "a rank whose backward alone failed took no part in the flags at its end",
        Setup(zero=2, interrupts=True, max_forwards=2),
        (
            f"{BOTH}, backward 0, engine, engine, engine, interrupt 0, {BOTH}, backward 0, *",
            f"{BOTH}, backward 0, *, {BOTH}, backward 0, *",
        ),
        (
            "reductions",
            "is_shared = each in shared",
            "is_shared = False",
        ),
    ),
    Fault(
        "a rank whose backward alone failed did not refresh its weights with the others",
        Setup(zero=1, interrupts=True, max_forwards=2),
        (
            f"{BOTH}, backward 0, engine, interrupt 0, step, {BOTH}, backward 0, *",
            f"{BOTH}, backward 0, *, step, {BOTH}, backward 0, *",
        ),
    ),
    Fault(
        "a rank that failed waited for its reductions in another order than ranks that did not",
        Setup(zero=2, axes=2, parents=(-1, -1, 0, 1), interrupts=True),
        (
            f"forward 0, {CALL_2}, return, forward 1, {CALL_3}, return, backward 0, *, step, "
            f"forward 0, return, forward 1, return, backward 0, *",
            f"forward 0, {CALL_2}, return, forward 1, {CALL_3}, return, backward 0, engine, "
            "engine, engine, engine, engine, engine, interrupt 0, step, "
            f"forward 0, return, forward 1, return, backward 0, *",
        ),
        (
            "reductions",
            "        for each in shared:\n            drain(each)\n",
            "        for each in shared[:0]:\n            drain(each)\n",
        ),
    ),
    Fault(
        "gradients of a failed backward were in those of the next one",
        Setup(zero=3, interrupts=True, max_forwards=2),
        (f"{BOTH}, backward 0, engine, engine, engine, engine, interrupt 0, {ONE}, backward 0, *",),
        ("reductions", "each.do.drop_gradients(before, is_shared=is_shared)", "pass"),
    ),
    Fault(
        "a forward that failed inside a unit left that unit gathered and in its forward",
        Setup(parents=(-1, 0, 1), interrupts=True, max_forwards=2),
        (
            "forward 0, call 1 0, call 2 0, interrupt 0, "
            "forward 0, call 1 0, return, return, backward 0, *",
        ),
    ),
    Fault(
        "a use of a parameter joined the pass of a failed forward, so that one backward had two "
        "passes of a root, of which the first was reduced before another root's earlier turn",
        Setup(
            zero=2,
            parents=(-1, -1, 0, 1, 1),
            direct=frozenset([2]),
            interrupts=True,
            alone=True,
            max_forwards=2,
        ),
        (
            "forward 0, interrupt 0, forward 3, return, use 2 1, "
            f"forward 0, {CALL_2}, return, forward 1, return, backward 0, *",
            "forward 0, interrupt 0, forward 4, return, use 2 1, "
            f"forward 0, return, forward 1, {CALL_3}, return, backward 0, *",
        ),
    ),
    Fault(
        "in a backward through two forwards of a root, the first was reduced before another "
        "root's earlier turn",
        Setup(zero=2, parents=(-1, -1, 0, 1, 1), alone=True, max_forwards=4),
        tuple(
            f"forward {unit}, return, forward 0, {CALL_2}, return, forward 0, return, "
            "forward 1, return, backward 0, *"
            for unit in (3, 4)
        ),
        (
            "reductions",
            "_finish([each for each in _together(root) if each.passed.turn.last > last], position)",
            "pass",
        ),
    ),
    Fault(
        "a use of a parameter joined the pass of a failed forward, and only ranks on which a "
        "gradient reached it reduced its unit once more",
        Setup(direct=frozenset([1]), interrupts=True, max_forwards=2),
        tuple(f"forward 0, interrupt 0, use 1 {kept}, {BOTH}, backward 0, *" for kept in (0, 1)),
        ("reductions", "root.current.is_over |= failed and unit.is_root", "pass"),
    ),
    Fault(
        "a use of a parameter after a failed backward, before the engine dropped its callback, was "
        "held to be part of that backward",
        Setup(zero=2, direct=frozenset([1]), interrupts=True),
        (f"{ONE}, backward 0, engine, interrupt 1, use 1 1, backward 0, *",),
        ("events", "is_in_backward(root) and root.nested is None", "root.belongs_to_backward"),
    ),
    Fault(
        "a forward that ran a backward and a step, and no unit after them, left the refresh that "
        "other ranks did in it to its next pass",
        Setup(zero=2, trains_inside=True, max_calls=2, max_steps=3),
        (f"forward 0, {CALL_1}, train, return", f"forward 0, {CALL_1}, train, {CALL_2}, return"),
        ("events", "root.current.is_over and not is_nested", "False"),
    ),
    Fault(
        "a backward through what followed a step in a forward reduced all units once more on the "
        "ranks that ran a unit there",
        Setup(zero=2, trains_inside=True, max_calls=2, max_steps=3),
        (
            f"forward 0, {CALL_1}, train, return, backward 0, *",
            f"forward 0, {CALL_1}, train, {CALL_2}, return, backward 0, *",
        ),
        ("events", "            forward.passed = root.current\n", "            pass\n"),
    ),
    Fault(
        "memory was kept for a backward after a use of a parameter itself between two forwards",
        Setup(zero=2, direct=frozenset([1]), max_forwards=2),
        (f"{BOTH}, use 1 1, {BOTH}, backward 0, *, step, forward 0",),
        (
            "events",
            "if forward.number < unit.backward_number and not forward.is_nested:",
            "if forward.passed is not root.passed and not forward.is_nested:",
        ),
    ),
    Fault(
        "gradients were synchronized after a backward that had failed on one rank alone, without "
        "the reductions of the others",
        Setup(zero=2, accumulates=True, interrupts=True, max_forwards=2),
        (
            f"{BOTH}, backward 0, engine, interrupt 0, synchronize",
            f"{BOTH}, backward 0, *, synchronize",
        ),
        ("reductions", "if root.engine is not Engine.RESTING and", "if False and"),
    ),
    Fault(
        "a rank whose synchronized backward alone failed reduced units again when users "
        "synchronized gradients, and the others did not",
        Setup(zero=1, accumulates=True, interrupts=True, max_forwards=2),
        (
            f"{BOTH}, backward 0, *, {BOTH}, backward 0, engine, interrupt 0, synchronize",
            f"{BOTH}, backward 0, *, {BOTH}, backward 0, *, synchronize",
        ),
        ("reductions", "each.has_unreduced = len(each.synced) < len(each.units)", "pass"),
    ),
    Fault(
        "after two forwards of a root and one backward, memory was kept for another backward",
        Setup(max_forwards=2),
        (f"{BOTH}, {BOTH}, backward 0, *, step, forward 0",),
        (
            "events",
            "            unit.num_pending_backwards = max(0, unit.num_pending_backwards - 1)\n"
            "            unit.backward",
            "            unit.backward",
        ),
    ),
    Fault(
        "a unit of which a backward inside the forward ran before its second module was in its "
        "forward for ever",
        Setup(trains_inside=True, several=frozenset([1]), max_calls=2, max_steps=3),
        ("forward 0, call 1 0, train, return, backward 0, *, forward 0, train, call 1 0",),
        (
            "reductions",
            "            unit.end_forward()\n        # A forward may",
            "            unit.pending_modules.clear()\n        # A forward may",
        ),
    ),
    Fault(
        "Ctrl-C in the forward of a recomputed unit made the backward of an earlier loss raise",
        Setup(checkpointed="packed", interrupts=True, max_forwards=2),
        (
            "forward 0, call 1 1, return, return, forward 0, call 1 1, interrupt 1, backward 0, *, "
            "step, forward 0, call 1 1, return, return, backward 0, *",
        ),
        (
            "events",
            "if unit.has_begun and again and unit.phase is Phase.FORWARD:",
            "if False:",
        ),
    ),
    Fault(
        "a unit that raised, and whose caller went on, stayed gathered",
        Setup(catches=True),
        ("forward 0, call 1 0, catch, return",),
        ("events", "weights.free(unit, after_error=True)", "pass"),
    ),
    Fault(
        "a unit whose backward follows its forward at once in a schedule was gathered twice",
        Setup(schedules=True, max_forwards=2),
        (
            "begin, start 0, stop 0, start 0, stop 0, start 0, stop 0, start 0, stop 0, finish 0, "
            "step, begin, start 0, stop 0, start 0, stop 0, start 0",
        ),
        (
            "events",
            "weights.free_after_use(unit, unit.root.gathers.schedule)",
            "weights.free(unit)",
        ),
    ),
]


def _functions(module: Any) -> Iterator[tuple[str, FunctionType]]:
    """Yield all functions and methods that a module defines, with their names."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        for member in vars(value).values() if inspect.isclass(value) else (value,):
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType):
                yield function.__qualname__, function


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """Yield the code of all functions and methods of a file, with their names."""
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const.co_qualname, const
            yield from _codes(const)


@contextlib.contextmanager
def changed(name: str, old: str, new: str) -> Iterator[None]:
    """Change the code of one place of a file of the machine."""
    module = importlib.import_module(f"{machine.__name__}.{name}")
    assert module.__file__ is not None
    source = pathlib.Path(module.__file__).read_text()
    assert source.count(old) == 1, f"{name}.py has {source.count(old)} times: {old}"
    codes = dict(_codes(compile(source.replace(old, new), module.__file__, "exec")))
    functions = [(f, f.__code__) for qualname, f in _functions(module) if qualname in codes]
    try:
        for function, _ in functions:
            function.__code__ = codes[function.__qualname__]
        yield
    finally:
        for function, code in functions:
            function.__code__ = code


def check(fault: Fault) -> None:
    """Run all ways of a fault, and compare their collectives."""
    logs = [run(fault.setup, way).log for way in fault.ways]
    assert all(log == logs[0] for log in logs)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_fault_of_the_history_does_not_occur(fault: Fault) -> None:
    check(fault)


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.change], ids=lambda fault: fault.what
)
def test_sequence_detects_its_fault(fault: Fault) -> None:
    assert fault.change is not None
    with changed(*fault.change), pytest.raises((AssertionError, RuntimeError)):
        check(fault)
