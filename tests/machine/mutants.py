"""Changes of the machine, one at a time, that the exploration must detect.

    python -m tests.machine.mutants [--only FILE ...] [--num N] [--stages N]

Every comparison is negated, every `and` and `or` exchanged, every condition negated, every call
that is a statement deleted, and every assignment of True or False reversed. Each change meets
sequences of events drawn at random, in a process of its own, in the setups that run its line, those
that detected most changes so far first, up to the first one that detects it, and then those of
`test_history.py` and `test_aborts.py`; changes that nothing detects are printed.
A change is detected by a rule of the exploration, by another exception of the machine, or because
it never ends. All changes meet one sequence per setup; those that are left meet `--num`, and at
last more of the programs in which ranks differ most.

What is left is not proven to be harmless. As read and not proven, no world can detect changes of

* `reductions.join` and `events._begin_nested_pass`: `finish_others`. All roots of a world have one
  ZeRO level and run in one call of the engine, so that those under way reduce in turn.
* `reductions.join`: `repair`. It is for a training step inside a forward that failed, and that the
  forward tries again.
* `events.leave_module`: uses of a module that is recomputed alone. Units of two modules are in no
  checkpoint.
* `events.end_direct_use`: `end_use`. The end of the backward reduces what is left; no rule says
  that uses of parameters themselves are reduced earlier.
* `events._continue_pass`: whether gradients are enabled, and `forget_casts`. They are for what a
  forward computes after a training step inside it.
* `reductions._reduce_late`: several groups of a unit, of which some were reduced. Units of a world
  have one group.
* `reductions._reduce_remaining`: `pending.clear()`. It is for a double backward that reaches units
  after their turn.
* Signs of `weight_version`: any other number makes weights stale.
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
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, override

from megatron_fsdp_v2.runtime import machine

FILES = ("events", "orders", "reductions", "state", "weights")
PACKAGE = machine.__name__
_CASES = (4, 2, 6, 10, 25)
"""Indices of the cases in which every program is explored."""
_LONGER = (
    ("two roots", 10),
    ("several forwards of two roots", 10),
    ("two roots and evaluations", 10),
    ("an exception in two roots", 10),
    ("units outside the root's forward", 10),
    ("uses of parameters themselves", 10),
    ("uses of parameters themselves", 1),
    ("an exception and a use of a parameter itself", 10),
    ("an exception and a use of a parameter itself", 1),
    ("gradients that miss units", 10),
    ("a unit unfrozen between two backwards", 10),
    ("a unit frozen while it is gathered", 10),
    ("a unit frozen while it is gathered", 19),
)
"""Programs in which ranks may differ most, and their cases: explored longer, and last."""
_NAMED = -1
"""In place of the index of a setup: the sequences of the history, and those that abandon units."""
LIMIT = 60
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
        case ast.If(test=test) | ast.While(test=test) if not _is_negated(test):
            new.test = ast.UnaryOp(op=ast.Not(), operand=new.test)
            yield "condition", new
        case ast.AugAssign(op=ast.Add()):
            new.op = ast.Sub()
            yield "sign", new
        case ast.UnaryOp(op=ast.Not()):
            yield "negation", new.operand


def _is_negated(test: ast.expr) -> bool:
    """Return whether the change of a condition itself is that of its comparison or negation."""
    return isinstance(test, ast.UnaryOp) or (isinstance(test, ast.Compare) and len(test.ops) == 1)


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


def _setups() -> list[Any]:
    """Return the worlds in which changes are explored: programs in a few cases, and crossed."""
    setups = importlib.import_module("tests.machine.setups")
    cases = [setups.CASES[index] for index in _CASES]
    found = [setups.setup_of(case, program) for program in setups.PROGRAMS for case in cases]
    found += [setups.crossed(*each) for each in setups.CROSSED]
    return found + [setups.setup_of(setups.CASES[case], each) for each, case in _LONGER]


def _reached(setups: Sequence[Any], num: int) -> list[set[tuple[str, int]]]:
    """Return of each setup the files and lines of the machine that its sequences of events run."""
    sample = importlib.import_module("tests.machine.explore").sample
    monitoring = sys.monitoring
    reached: set[tuple[str, int]] = set()

    def run(code: CodeType, line: int) -> Any:
        path = pathlib.Path(code.co_filename)
        if path.parent == pathlib.Path(machine.__file__).parent:
            reached.add((path.stem, line))
        return monitoring.DISABLE

    monitoring.use_tool_id(monitoring.COVERAGE_ID, "mutants")
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, run)
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)
    found = []
    for setup in setups:
        reached.clear()
        monitoring.restart_events()
        if (broken := sample(setup, num).broken) is not None:
            raise RuntimeError(f"the machine itself breaks a rule: {broken}")
        found.append(set(reached))
    monitoring.set_events(monitoring.COVERAGE_ID, 0)
    monitoring.free_tool_id(monitoring.COVERAGE_ID)
    return found


def _explored(name: str, source: str, num: int, order: Sequence[int]) -> tuple[int, str]:
    """Explore a change in this process.

    Args:
        name: File of the machine.
        source: Its changed source.
        num: Sequences of events per setup.
        order: Indices of setups, in the order in which they are tried.

    Returns:
        Index of the setup that detected the change, or `_NAMED`, and how it did, if any.
    """
    for known in list(sys.modules):
        if known.startswith((PACKAGE, "tests.machine.")) and known != __name__:
            del sys.modules[known]
    sys.meta_path.insert(0, _Loader(f"{PACKAGE}.{name}", source))
    parent, _, last = PACKAGE.rpartition(".")
    index = _NAMED
    try:
        setattr(sys.modules[parent], last, importlib.import_module(PACKAGE))
        setups = _setups()
        sample = importlib.import_module("tests.machine.explore").sample
        for index in order:
            signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT)
            if (broken := sample(setups[index], num).broken) is not None:
                return index, broken[0]
        index = _NAMED
        if num == 1 and (broken := _named()):
            return index, broken
    except Exception as error:  # loud in a training, too
        return index, f"{type(error).__name__}: {error}"
    return _NAMED, ""


def _named() -> str:
    """Run the sequences of the history, and those that abandon units; return what fails."""
    history = importlib.import_module("tests.machine.test_history")
    for fault in history.FAULTS:
        history.check(fault)
    aborts = importlib.import_module("tests.machine.test_aborts")
    return next(filter(None, map(aborts.abandoned, aborts.PROGRAMS)), "")


def detect(name: str, source: str, num: int, order: Sequence[int]) -> tuple[int, str] | None:
    """Explore a change in a process of its own; see `_explored`. None if no rule detects it."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.close(2)
        try:
            index, how = _explored(name, source, num, order)
            os.write(writer, f"{index} {how}"[:4000].encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8", errors="replace") as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    if not answer:
        return -1, f"never ends (over {LIMIT} seconds in a setup)"
    number, _, how = answer.partition(" ")
    return (int(number), how) if how else None


def main() -> None:
    """Explore all changes and print those that no rule detects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=FILES, nargs="*", help="files of the machine (all)")
    parser.add_argument("--lines", type=int, nargs="*", help="lines of the file (all)")
    parser.add_argument("--num", type=int, default=40, help="sequences of a setup (40)")
    parser.add_argument("--stages", type=int, default=3, help="how many stages run (3)")
    parser.add_argument("--verbose", action="store_true", help="also print what detects the others")
    args = parser.parse_args()
    folder = pathlib.Path(machine.__file__).parent
    setups = _setups()
    reached = _reached(setups, args.num)
    num_short = len(setups) - len(_LONGER)
    short, longer = range(num_short), range(num_short, len(setups))
    stages = [(short, 1), (short, args.num), (longer, 5 * args.num)][: args.stages]
    successes: Counter[int] = Counter()
    for name in args.only or FILES:
        source = (folder / f"{name}.py").read_text()
        lines = source.splitlines()
        found = [each for each in mutants(source) if not args.lines or each[0] in args.lines]
        left = found
        for stage, (indices, num) in enumerate(stages):
            undetected = []
            for line, kind, changed in left:
                # Most changes are detected by a few setups.
                order = sorted(indices, key=lambda index: -successes[index])
                running = [index for index in order if (name, line) in reached[index]]
                # A line that runs when the machine is imported, or is part of another one.
                order = running or order
                detected = detect(name, changed, num, order)
                what = f"{name}.py:{line}: {kind}: {lines[line - 1].strip()}"
                if detected is None:
                    undetected.append((line, kind, changed))
                    if stage == len(stages) - 1 or args.verbose:
                        sys.stdout.write(f"{what} (stage {stage + 1})\n")
                elif detected[0] >= 0:
                    successes[detected[0]] += 1
                if args.verbose and detected is not None:
                    sys.stdout.write(f"  ({what}: {detected})\n")
                sys.stdout.flush()
            left = undetected
        num_detected = len(found) - len(left)
        share = 100 * num_detected / len(found)
        sys.stdout.write(f"{name}.py: {num_detected} of {len(found)} detected ({share:.0f} %)\n")


if __name__ == "__main__":
    main()
