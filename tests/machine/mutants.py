"""Changes of the machine, one at a time, that the exploration must detect.

    python -m tests.machine.mutants [--only FILE] [--states N]

Every comparison is negated, every `and` and `or` exchanged, every condition negated, every call
that is a statement deleted, and every assignment of True or False reversed. Each change is explored
in a process of its own; changes that no rule detects are printed.

Of the 54 changes of `weights.py`, 42 are detected with 40 states per setup. The others, as read and
not proven:

* `gathers.num_uses` counts uses for plans (`plan/step.py`).
* Worlds have one payload: uses of a prefetch (`belongs_to_backward`) and missing payloads
  (`is_kept`) need weights that are gathered for forwards and backwards separately.
* A wait that fails (`free(unit, after_error=True)`) does not occur in a world.
* `requested` units that stay noted, or are freed twice, change nothing: a free of a unit that is
  not gathered does nothing. So does a free after `sync`, since the next check frees stale weights.
* Conditions of `before_use` that only keep a unit gathered for longer, or free one too early.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.util
import os
import pathlib
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import override

from megatron_fsdp_v2.runtime import machine

FILES = ("events", "orders", "reductions", "state", "weights")
PACKAGE = machine.__name__
LIMIT = 30
"""Seconds of computing in one setup after which a change counts as detected: it never ends."""

_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


def _changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield each change of a node, with its name."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]):
            new.ops = [_OPPOSITE[type(op)]()]
            yield "comparison", new
        case ast.BoolOp():
            new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
            yield "and/or", new
        case ast.Expr(value=ast.Call()):
            yield "deleted call", ast.copy_location(ast.Pass(), node)
        case ast.Assign(value=ast.Constant(value=bool(value))):
            new.value = ast.Constant(value=not value)
            yield "flag", new
        case ast.If() | ast.While():
            new.test = ast.UnaryOp(op=ast.Not(), operand=new.test)
            yield "condition", new
        case ast.AugAssign(op=ast.Add()):
            new.op = ast.Sub()
            yield "sign", new
        case ast.UnaryOp(op=ast.Not()):
            yield "negation", new.operand


def mutants(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the kind and the source of every change of a file."""
    tree = ast.parse(source)
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            items = value if isinstance(value, list) else [value]
            for index, item in enumerate(items):
                if not isinstance(item, ast.AST):
                    continue
                for kind, new in _changed(item):
                    if isinstance(value, list):
                        value[index] = new
                    else:
                        setattr(parent, field, new)
                    ast.fix_missing_locations(tree)
                    yield getattr(item, "lineno", 0), kind, ast.unparse(tree)
                    if isinstance(value, list):
                        value[index] = item
                    else:
                        setattr(parent, field, item)


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module of the machine from other source."""

    def __init__(self, name: str, source: str) -> None:
        self._name, self._source = name, source

    @override
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        del path, target
        return importlib.util.spec_from_loader(name, self) if name == self._name else None

    @override
    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, self._name, "exec"), vars(module))


def _is_detected(name: str, source: str, states: int) -> bool:
    """Explore a change in this process, and return whether a rule detects it."""
    for known in list(sys.modules):
        if known.startswith((PACKAGE, "tests.machine.")) and known != __name__:
            del sys.modules[known]
    sys.meta_path.insert(0, _Loader(f"{PACKAGE}.{name}", source))
    parent, _, last = PACKAGE.rpartition(".")
    setattr(sys.modules[parent], last, importlib.import_module(PACKAGE))
    tests = importlib.import_module("tests.machine.test_machine")
    explore = importlib.import_module("tests.machine.explore").explore
    for program in tests.PROGRAMS.values():
        for case in tests.CASES:
            setup = tests.Setup(**case, **program)
            signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT)
            if explore(setup, states).broken is not None:
                return True
    return False


def survives(name: str, source: str, states: int) -> bool:
    """Explore a change in a process of its own; return whether no rule detects it."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.close(2)
        try:
            os._exit(0 if _is_detected(name, source, states) else 1)
        except BaseException:
            # Any other error is loud in a training, too.
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 1


def main() -> None:
    """Explore all changes and print those that no rule detects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=FILES, help="a file of the machine (all)")
    parser.add_argument("--states", type=int, default=300, help="states per setup (300)")
    args = parser.parse_args()
    folder = pathlib.Path(machine.__file__).parent
    total = left = 0
    for name in [args.only] if args.only else FILES:
        source = (folder / f"{name}.py").read_text()
        lines = source.splitlines()
        for line, kind, changed in mutants(source):
            total += 1
            if survives(name, changed, args.states):
                left += 1
                sys.stdout.write(f"{name}.py:{line}: {kind}: {lines[line - 1].strip()}\n")
    share = 100 * (total - left) / total
    sys.stdout.write(f"{total - left} of {total} changes detected ({share:.0f} %)\n")


if __name__ == "__main__":
    main()
