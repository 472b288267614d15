"""Makes a failing case smaller, as long as it still fails in the same way."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.random.cases import Case, Event, Node, Options
from tests.random.rules import broken_rule

Fails = Callable[[Case], bool]
"""Whether a case fails in the way that is looked for."""


def shrink(case: Case, fails: Fails, most_tries: int = 400) -> Case:
    """The smallest failing case that greedy steps lead to.

    Args:
        case: One that fails.
        fails: Runs a case.
        most_tries: Cases to run at most.
    """
    tried, changed = 0, True
    while changed:
        changed, position = False, 0
        while True:
            # What failed to fail at earlier positions is not tried again until the next round.
            candidate = next(itertools.islice(smaller(case), position, None), None)
            if candidate is None:
                break
            if broken_rule(candidate):
                position += 1
                continue
            if tried >= most_tries:
                return case
            tried += 1
            if fails(candidate):
                case, changed = candidate, True
            else:
                position += 1
    return case


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are simpler in one respect, boldest first."""
    yield from _fewer_events(case)
    for tree in _smaller_trees(case.tree):
        yield replace(case, tree=tree)
    for index in range(len(case.ties)):
        yield replace(case, ties=case.ties[:index] + case.ties[index + 1 :])
    yield from _fewer_ranks(case)
    for options in _simpler(case.options, Options(mesh=case.options.mesh)):
        yield replace(case, options=options)
    plain = Case(seed=case.seed, tree=case.tree, ties=case.ties, program=case.program)
    for changed in _simpler(case, replace(plain, options=case.options)):
        yield changed
    for index, event in enumerate(case.program):
        for changed in _simpler_events(event, case.options):
            program = (*case.program[:index], changed, *case.program[index + 1 :])
            yield replace(case, program=program)


def _fewer_events(case: Case) -> Iterator[Case]:
    program = case.program
    size = len(program)
    # All of it, then halves, quarters, single ones.
    while size >= 1:
        for start in range(0, len(program), size):
            rest = program[:start] + program[start + size :]
            if len(rest) < len(program):
                yield replace(case, program=rest)
        size //= 2


def _smaller_trees(node: Node) -> Iterator[Node]:
    """A tree without one of its nodes, or with a simpler one."""
    for index, child in enumerate(node.children):
        before, after = node.children[:index], node.children[index + 1 :]
        yield replace(node, children=before + after)
        if child.children:
            # What is inside, in place of what it is in.
            yield replace(node, children=before + child.children + after)
    for changed in _simpler(node, Node(node.id, node.kind, node.how, node.size)):
        if changed.children == node.children:
            yield changed
    if node.kind in ("seq", "act", "mlp", "spare", "odd", "embed") and node.kind != "seq":
        yield replace(node, kind="linear", how="", size=0)
    for index, child in enumerate(node.children):
        before, after = node.children[:index], node.children[index + 1 :]
        for changed in _smaller_trees(child):
            yield replace(node, children=(*before, changed, *after))


def _fewer_ranks(case: Case) -> Iterator[Case]:
    mesh = case.options.mesh
    for fewer in ((1,), (2,), (1, 2), (2, 1), (3,)):
        size, now = fewer[0] * fewer[-1] if len(fewer) == 2 else fewer[0], case.world_size
        if size < now or (size == now and len(fewer) < len(mesh)):
            yield _with_mesh(case, fewer)


def _with_mesh(case: Case, mesh: tuple[int, ...]) -> Case:
    def changed(options: Options) -> Options:
        outer = options.outer if len(mesh) == 2 else "no_shard"
        return replace(options, mesh=mesh, outer=outer)

    program = tuple(
        replace(e, options=changed(e.options)) if e.options is not None else e for e in case.program
    )
    return replace(case, options=changed(case.options), program=program)


def _simpler[T](value: T, plain: T) -> Iterator[T]:
    """A dataclass with one field as in a plain one."""
    fields: Any = dataclasses.fields(value)  # type: ignore[arg-type]
    for field in fields:
        default = getattr(plain, field.name)
        if getattr(value, field.name) != default:
            yield replace(value, **{field.name: default})  # type: ignore[type-var]


def _simpler_events(event: Event, options: Options) -> Iterator[Event]:
    how = event.how if event.do == "fail" else ""
    plain = Event(event.do, slot=event.slot, node=event.node, how=how)
    yield from (changed for changed in _simpler(event, plain))
    if event.options is not None:
        for changed in _simpler(event.options, Options(mesh=options.mesh)):
            yield replace(event, options=changed)
