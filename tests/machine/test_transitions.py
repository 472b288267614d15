"""The file of transitions names events of the machine, and what it lacks is noticed."""

from __future__ import annotations

from unittest import mock

from megatron_fsdp_v2.runtime.machine import events, reductions, weights
from megatron_fsdp_v2.runtime.machine.state import Engine, Phase
from tests.machine import transitions
from tests.machine.executors import Setup
from tests.machine.explore import run
from tests.machine.transitions import FILE, Row, known, recording, shown, walked
from tests.random.campaign import kind_of_failure, outcome_of, run_watched
from tests.random.cases import Case, Event, Node
from tests.random.program import Outcome
from tests.ranks import RankPools


def test_file_is_sorted_and_names_functions_of_the_machine() -> None:
    assert FILE.read_text() == shown(known())
    names = {event.split()[0] for event, _, _ in known()}
    assert {"enter_module", "first_gradient", "last_gradient", "defer", "end", "free"} <= names
    functions = {**vars(events), **vars(reductions), **vars(weights)}
    assert names <= functions.keys()
    # Events of a root have no unit.
    firsts = {"of", "passes", *(phase.value for phase in Phase)}
    assert {unit.split(" ")[0] for _, unit, _ in known()} == firsts
    assert {root.split()[0] for *_, root in known()} == {engine.value for engine in Engine}


def test_walks_break_few_rules() -> None:
    found, num_broken = walked(range(40))
    assert num_broken < 10
    assert len(found) > len(known()) // 4


def test_calls_of_the_machine_itself_are_no_events() -> None:
    met: set[Row] = set()
    with recording(met):
        run(Setup(), "forward 0")
    names = {event.split()[0] for event, _, _ in met}
    # `enter_module` calls `begin_forward`, which begins the pass.
    assert names == {"enter_module", "begin_graph"}
    before = events.begin_forward
    run(Setup(), "forward 0")
    assert events.begin_forward is before


def run_without_recomputations(case: Case, folder: str) -> Outcome:
    """Run a case with a file that has no recomputation."""
    rows = {row for row in known() if "recomputing" not in row[1]}
    with mock.patch.object(transitions, "known", lambda: rows):
        return run_watched(case, folder)


def test_transitions_that_the_file_lacks_are_noticed(pools: RankPools) -> None:
    inner = Node(3, "checkpoint", children=(Node(4, "linear", unit=True),))
    tree = Node(1, "seq", children=(Node(2, "linear", unit=True), inner))
    program = (Event("forward"), Event("backward"), Event("step"))
    case = Case(3, tree=tree, program=program)
    assert outcome_of(case, pools, run=run_watched) == Outcome("same")
    outcome = outcome_of(case, pools, run=run_without_recomputations)
    assert outcome.kind == "unexplored"
    assert kind_of_failure(outcome).startswith("unexplored begin_graph |")
    assert all("recomputing" in line for line in outcome.text.splitlines())
