"""A sample of the random cases, and tests of shrinking.

`make test-random` runs 1,000 cases.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fsdp_v2 import fully_shard
from tests.cases import quick_only
from tests.random import by_hand, calls, sharded
from tests.random.campaign import outcome_of, replay, report, run_watched, shrunk
from tests.random.cases import STRATEGIES, ZERO_3, Case, Event, Node, Options, from_json, to_json
from tests.random.generate import VARIANTS, generate
from tests.random.precision import POLICIES
from tests.random.program import Outcome, run_case
from tests.random.rules import broken_rule
from tests.random.sharded import COMPILED
from tests.ranks import RankPools


@pytest.mark.parametrize("seed", quick_only(range(8), 0, 1))
def test_random_case_matches_the_plain_loop(pools: RankPools, seed: int) -> None:
    outcome = outcome_of(generate(seed), pools, run=run_watched)
    assert outcome.kind == "same", outcome.text


def test_repair_of_a_failed_backward_keeps_gradients_of_a_loss_of_weights(pools: RankPools) -> None:
    """A forward that repairs a failed backward once dropped the gradient of a loss of weights."""
    case = """{"seed": 50223, "tree": {"id": 2, "kind": "seq", "children": [
        {"id": 1, "kind": "linear"}]}, "options": {"strategy": "optim", "mesh": [2]}, "program": [
        {"do": "fail", "node": 1, "how": "backward"}, {"do": "weights"}, {"do": "forward"},
        {"do": "backward"}]}"""
    outcome = outcome_of(from_json(case), pools)
    assert outcome.kind == "same", outcome.text


def test_state_dict_keeps_the_weights_of_a_module_in_two_units_gathered(pools: RankPools) -> None:
    shared = Node(1, "linear")
    unit = Node(2, "seq", unit=True, children=(shared,))
    tree = Node(4, "seq", children=(unit, Node(3, "again", size=shared.id)))
    program = (Event("forward"), Event("state"), Event("evaluate"))

    assert outcome_of(Case(0, tree=tree, program=program), pools) == Outcome("same")


def test_units_of_two_roots_are_reduced_in_one_order_after_a_failed_forward(
    pools: RankPools,
) -> None:
    """Ranks once reduced different numbers of units of one root before those of the other.

    A use of a weight itself joined the pass of the failed forward, so that one backward had two
    passes of the first root, while the pass of the second one had begun before both.
    """
    skipped = Node(4, "branch", how="rank", children=(Node(5, "linear", unit=True),))
    layers = (Node(2, "linear", unit=True), Node(3, "dead", children=(skipped,)))
    tree = Node(1, "seq", children=(*layers, Node(6, "linear", unit=True)))
    options = Options(strategy="optim_grads", mesh=(2,), nccl=True)
    failed = Event("fail", node=2, how="forward", flag=True)
    program = (Event("full"), failed, Event("head"), Event("step"))
    case = Case(3, tree=tree, roots=2, options=options, program=program)

    assert outcome_of(case, pools) == Outcome("same")


def test_norms_that_overflow_in_both_loops_are_equal(pools: RankPools) -> None:
    options = Options(mesh=(2,), scale=1e30)
    program = (Event("forward"), Event("backward"), Event("clip"))
    case = Case(3, dtype="float32", options=options, program=program)

    assert outcome_of(case, pools) == Outcome("same")


def test_a_backward_under_autocast_may_run_another_root(pools: RankPools) -> None:
    """The output of the autocast forward was once an input of the root without autocast."""
    echo = Node(2, "echo", how="hook other", children=(Node(3, "linear", unit=True),))
    program = (Event("forward"), Event("backward"))
    case = Case(3, dtype="float32", autocast="uncached", tree=Node(1, "seq", children=(echo,)))
    case = replace(case, roots=2, options=Options(strategy="optim", mesh=(2,)), program=program)

    assert outcome_of(case, pools) == Outcome("same")


def _steps_by_hand() -> tuple[Event, ...]:
    """Return a program with every event by hand, in every variant that fits a small model."""
    begin = (Event("zero", flag=True), Event("forward"), Event("backward"))
    more = (Event("forward", seed=1), Event("backward"), Event("step"))
    program: list[Event] = []
    for seed, how in enumerate(by_hand.GRADS):
        program += [*begin, Event("grad", seed, how=how), *more]
    for seed, how in enumerate(by_hand.WRITES):
        program += [Event("evaluate"), Event("write", seed, how=how), Event("evaluate")]
    for how in VARIANTS["clip"]:
        program += [*begin, Event("clip", how=how)]
    for how in VARIANTS["hooked"]:
        program += [Event("hooked", node=2, how=how), Event("step")]
    for flag in (True, False):
        program += [Event("scaler", flag=flag), Event("rate", flag=flag)]
    for how in ("adamw split", "momentum"):
        some = Event("backward", seed=1, how="some units")
        program += [Event("optimizer", how=how), *begin[:2], some, Event("head"), *more]
    program += [Event("forward", how="thread"), Event("backward"), Event("dual")]
    return tuple(program)


@pytest.mark.parametrize("strategy", quick_only(STRATEGIES, STRATEGIES[1]))
def test_changes_by_hand_match_the_plain_loop(pools: RankPools, strategy: str) -> None:
    layers = (Node(2, "linear", unit=True), Node(3, "normed", unit=True), Node(4, "spare"))
    options = Options(strategy=strategy, mesh=(2,), replaced=True)
    case = Case(3, tree=Node(1, "seq", children=layers), options=options, program=_steps_by_hand())

    assert outcome_of(case, pools) == Outcome("same")
    if strategy == ZERO_3:
        cast = replace(case, dtype="float32", autocast="uncached")
        assert outcome_of(cast, pools) == Outcome("same")


@pytest.mark.parametrize("strategy", quick_only(STRATEGIES, STRATEGIES[1], ZERO_3))
@pytest.mark.parametrize("roots", [1, 2])
def test_calls_change_no_result(pools: RankPools, strategy: str, roots: int) -> None:
    layers = (Node(2, "linear", unit=True), Node(3, "normed", unit=True), Node(4, "spare"))
    options = Options(strategy=strategy, mesh=(2,), replaced=True, optimizer="adamw")
    program = [Event("optimizer", how="adamw")]
    for seed, how in enumerate(calls.CALLS):
        call = Event("call", seed, how=how)
        program += [Event("forward", seed), call, Event("backward"), call, Event("step"), call]
    case = Case(3, tree=Node(1, "seq", children=layers), roots=roots, options=options)

    assert outcome_of(replace(case, program=tuple(program)), pools) == Outcome("same")


LAYERS = (Node(2, "linear", unit=True), Node(3, "normed", unit=True), Node(4, "mlp", size=3))
STEPS = (
    *(Event("forward"), Event("backward", how="no sync"), Event("forward", seed=1)),
    *(Event("backward"), Event("clip"), Event("step"), Event("evaluate"), Event("head")),
    *(Event("step"), Event("save"), Event("forward", seed=2), Event("backward"), Event("step")),
    *(Event("restore"), Event("load"), Event("hooked"), Event("step"), Event("evaluate")),
)


@pytest.mark.parametrize("strategy", quick_only(STRATEGIES[1:], ZERO_3))
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy])
def test_policies_match_a_plain_loop_with_casts(
    pools: RankPools, policy: str, strategy: str
) -> None:
    tree = Node(1, "seq", children=(*LAYERS, Node(5, "again", size=2)))
    options = Options(strategy=strategy, mesh=(2,), optimizer="adamw")
    dtype = POLICIES[policy].given or "float64"
    case = Case(3, dtype=dtype, policy=policy, tree=tree, options=options, program=STEPS)

    assert outcome_of(case, pools) == Outcome("same")


def run_without_policy(case: Case, folder: str) -> Outcome:
    """Run a case whose units have no policy."""
    with mock.patch.object(sharded, "POLICIES", {case.policy: POLICIES[""]}):
        return run_case(case, folder)


def test_a_policy_that_is_not_applied_is_found(pools: RankPools) -> None:
    case = Case(3, policy="bf16", tree=Node(1, "seq", children=LAYERS), program=STEPS)

    assert outcome_of(case, pools, run=run_without_policy).kind == "different"


def run_compiled(case: Case, folder: str) -> tuple[Outcome, int]:
    """Run a case; also return the number of graphs."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    return run_case(case, folder), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("compiled", quick_only(filter(None, COMPILED), "units"))
def test_compiled_modules_match_the_plain_loop(
    pools: RankPools, tmp_path: Path, compiled: str
) -> None:
    options = Options(mesh=(2,), compiled=compiled)
    case = Case(3, tree=Node(1, "seq", children=LAYERS), options=options, program=STEPS)

    for outcome, num_graphs in pools(2).run(run_compiled, case, str(tmp_path)):
        assert outcome == Outcome("same")
        assert num_graphs > 0


def test_two_roots_that_share_a_module_match_the_plain_loop_or_are_rejected(
    pools: RankPools,
) -> None:
    options = Options(strategy="optim_grads", mesh=(2,))
    tree = Node(1, "seq", children=LAYERS)
    case = Case(3, tree=tree, roots=2, shared=2, options=options, program=STEPS)

    assert outcome_of(case, pools) == Outcome("same")
    at_zero_3 = replace(case, options=replace(options, strategy=ZERO_3))
    for rejected in (at_zero_3, replace(case, shared=4)):
        assert outcome_of(rejected, pools).kind == "rejected"


def test_case_round_trips_through_json() -> None:
    for seed in range(100):
        case = generate(seed)
        assert from_json(to_json(case)) == case
        assert not broken_rule(case)
        assert generate(seed) == case


def test_written_case_can_be_replayed(
    pools: RankPools, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = report(_failing_case(), pools, tmp_path)
    assert replay(path, pools) == 0
    assert capsys.readouterr().out.startswith("same")


# -- with an injected fault ------------------------------------------------------------------------


def _fully_shard_with_fault(module: Any, **options: Any) -> Any:
    """Call `fully_shard`, with a wrong gradient scale for units that contain a `SparePart`."""
    if any(getattr(part, "spare", None) is not None for part in module.modules()):
        options["gradient_scaling_factor"] = 0.9
    return fully_shard(module, **options)


def run_with_fault(case: Case, folder: str) -> Outcome:
    """Run a case with the injected fault."""
    with mock.patch.object(sharded, "fully_shard", _fully_shard_with_fault):
        return run_case(case, folder)


@functools.cache
def _failing_case() -> Case:
    """Return a case with many features; its `spare` node triggers the injected fault."""
    inner = Node(3, "seq", unit=True, children=(Node(4, "spare"), Node(5, "mlp", size=3)))
    tree = Node(1, "seq", children=(Node(2, "linear", unit=True), inner, Node(6, "act")))
    step = (Event("backward"), Event("step"))
    between = (Event("zero", flag=True), Event("state"), Event("forward", seed=3))
    program = (Event("evaluate"), Event("forward"), *step, *between, *step)
    options = Options(strategy="optim", mesh=(2,), pool=True, optimizer="momentum")
    return Case(3, tree=tree, output="dict", ends="units", options=options, program=program)


def test_injected_fault_is_found_and_shrunk(pools: RankPools) -> None:
    case = _failing_case()
    assert outcome_of(case, pools).kind == "same"
    assert outcome_of(case, pools, run=run_with_fault).kind == "different"

    small = shrunk(case, pools, run_with_fault)
    assert [event.do for event in small.program] == ["forward", "backward"]
    assert [node.kind for node in small.tree.walk()] == ["seq", "spare"]
    assert (small.options, small.world_size) == (Options(), 1)
