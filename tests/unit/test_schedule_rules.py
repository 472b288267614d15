"""The schedule's rules by hand: what is gathered ahead, what is waited for, and when."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import override

import pytest
import torch
from torch import nn

from megatron_fsdp_v2.plan import MeshDescription, Strategy, TrainingDescription, describe_module
from megatron_fsdp_v2.plan.schedule import replay
from megatron_fsdp_v2.plan.sharding import shard
from megatron_fsdp_v2.runtime.gather_rules import GatherSchedule, PrefetchLimit
from megatron_fsdp_v2.runtime.options import RuntimeOptions
from megatron_fsdp_v2.runtime.reduction_rules import Reduction, ReductionSchedule
from tests.reference.models import Stack

# -- a whole step -----------------------------------------------------------------------------


def _step(num_blocks: int, **options: int | bool) -> list[str]:
    """What a step of a hybrid-sharded stack of blocks issues, in words."""
    with torch.device("meta"):
        model: nn.Module = Stack(num_blocks)
    units, _ = describe_module(model)
    runtime = RuntimeOptions(**options)  # type: ignore[arg-type]
    training = TrainingDescription(units, {"dp": MeshDescription(4)}, options=runtime)
    events = replay(training, shard(training, Strategy(outer_size=2))).events
    words = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "outer"}
    issued = [each for each in events if each.kind in words]
    return [f"{words[each.kind]} {each.unit[7:] or 'root'}" for each in issued]


def test_a_step_gathers_one_unit_ahead_and_waits_for_the_oldest_of_two_reductions() -> None:
    assert _step(3) == [
        # Forward.
        *("gather root", "gather 0", "gather 1", "gather 2"),
        # Backward; the root is still gathered.
        *("gather 2", "gather 1", "reduce 2", "gather 0", "reduce 1"),
        # A third gradient buffer: the first reduction is waited for, and goes on.
        *("outer 2", "reduce 0", "outer 1", "reduce root"),
        *("outer 0", "outer root"),
    ]


def test_a_step_gathers_further_ahead_and_reduces_one_by_one_when_told_so() -> None:
    assert _step(3, unshard_prefetch_depth=2, max_live_grad_buffers=1) == [
        *("gather root", "gather 0", "gather 1", "gather 2"),
        # The root has the one gradient buffer from its output layer on.
        *("gather 2", "gather 1", "gather 0", "reduce 2"),
        *("outer 2", "reduce 1", "outer 1", "reduce 0", "outer 0", "reduce root", "outer root"),
    ]


def test_a_step_gathers_small_units_further_ahead_than_large_ones_when_bytes_limit_it() -> None:
    unlimited = _step(3, unshard_prefetch_bytes=1 << 30)
    assert unlimited[:8] == [
        *("gather root", "gather 0", "gather 1", "gather 2"),
        *("gather 2", "gather 1", "gather 0", "reduce 2"),
    ]
    # Less than a unit takes: the next one alone.
    assert _step(3, unshard_prefetch_bytes=1) == _step(3)
    assert _step(3, unshard_prefetch_bytes=1 << 30, unshard_prefetch_depth=1) == _step(3)


def test_a_step_in_turn_overlaps_nothing() -> None:
    assert _step(2, unshard_prefetch_depth=0, enable_async_reduce_grad=False) == [
        *("gather root", "gather 0", "gather 1"),
        *("gather 1", "reduce 1", "outer 1", "gather 0", "reduce 0", "outer 0"),
        *("reduce root", "outer root"),
    ]


# -- what is gathered ahead -------------------------------------------------------------------


@dataclass(eq=False)
class FakeUnit:
    """A unit that notes what is asked of it."""

    name: str
    log: list[str]
    gathered_nbytes: int
    is_unsharded: bool = False
    has_one_form: bool = True

    def prefetch(self) -> None:
        self.log.append(f"+{self.name}")
        self.is_unsharded = True

    def reshard(self) -> None:
        self.log.append(f"-{self.name}")
        self.is_unsharded = False


@dataclass
class Gathering:
    """Units under a schedule, and what it had them do."""

    depth: int | None = 1
    names: str = "abcd"
    sizes: tuple[int, ...] = (1, 1, 1, 1)
    nbytes: int | None = None
    bucket: int = 0
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        sizes = zip(self.names, self.sizes, strict=True)
        self.units = {name: FakeUnit(name, self.log, nbytes) for name, nbytes in sizes}
        limit = PrefetchLimit(self.depth, self.nbytes, self.bucket)
        self.schedule: GatherSchedule[FakeUnit] = GatherSchedule(limit, self._in_one)

    @contextlib.contextmanager
    def _in_one(self) -> Iterator[None]:
        self.log.append("(")
        yield
        self.log.append(")")

    def forward(self, ran: str, chosen: str = "") -> list[str]:
        """A pass through these units; what was gathered ahead and dropped unused."""
        self.log.clear()
        self.schedule.begin_forward(self.units["a"])
        refs = [weakref.ref(self.units[name]) for name in chosen]
        for name in ran:
            unit = self.units[name]
            self.schedule.before_use(unit)
            unit.is_unsharded = True
            self.schedule.in_forward(unit, refs if name == ran[0] else ())
            unit.is_unsharded = False
        self.schedule.drop_prefetched()
        return list(self.log)


def test_nothing_is_gathered_ahead_in_the_first_pass_and_the_next_unit_in_the_second() -> None:
    gathering = Gathering()
    assert gathering.forward("abcd") == []
    assert [entry for entry in gathering.forward("abcd") if entry[0] == "+"] == ["+b", "+c", "+d"]


def test_as_many_units_are_gathered_ahead_as_told() -> None:
    gathering = Gathering(depth=2)
    gathering.forward("abcd")
    assert [e for e in gathering.forward("abcd") if e[0] == "+"] == ["+b", "+c", "+d"]
    assert gathering.log.index("+c") == 1
    still = Gathering(depth=0)
    still.forward("abcd")
    assert still.forward("abcd", chosen="c") == []


def test_units_are_gathered_ahead_while_their_bytes_fit_and_the_next_one_whatever_it_takes() -> (
    None
):
    # b and c fit together after a; d does not, neither with c after b, nor alone.
    gathering = Gathering(None, sizes=(1, 40, 60, 101), nbytes=100)
    gathering.forward("abcd")
    log = gathering.forward("abcd")
    assert [entry for entry in log if entry[0] == "+"] == ["+b", "+c", "+d"]
    # Both of them while a is at work.
    assert log.index("+c") == 1
    limit = PrefetchLimit(None, 100)
    following = ((40, 60, 101), (60, 101), (101,), ())
    assert [limit.count(left) for left in following] == [2, 1, 1, 0]
    # Both limits hold; and nothing is gathered ahead where no unit may be.
    assert PrefetchLimit(1, 100).count((40, 60)) == 1
    assert PrefetchLimit(0, 100).count((40, 60)) == 0
    assert PrefetchLimit.of(None, None) == PrefetchLimit(1, None)


def test_a_backward_gathers_ahead_as_many_units_as_fit() -> None:
    gathering = Gathering(None, sizes=(60, 50, 50, 1), nbytes=100)
    units = gathering.units
    for name in "abcd":
        gathering.schedule.expect_backward(units[name])
    gathering.schedule.begin_backward()
    steps = []
    for name in "dcba":
        gathering.log.clear()
        gathering.schedule.before_use(units[name])
        units[name].is_unsharded = True
        gathering.schedule.in_backward(units[name])
        units[name].is_unsharded = False
        steps.append("".join(gathering.log))
    assert steps == ["+c+b", "", "+a", ""]


def test_small_units_that_come_next_are_gathered_in_one_up_to_the_bytes_of_a_bucket() -> None:
    gathering = Gathering(1, "abcdef", (9, 2, 2, 3, 8, 1), bucket=5)
    gathering.forward("abcdef")
    log = "".join(gathering.forward("abcdef"))
    # After a: b and c, and nothing more until d is next; e is larger than a bucket.
    assert log == "(+b+c)(+d)(+e)(+f)"
    # With two ahead, the second of them begins a bucket as well.
    gathering = Gathering(2, "abcdef", (9, 2, 2, 3, 1, 1), bucket=5)
    gathering.forward("abcdef")
    assert "".join(gathering.forward("abcdef")) == "(+b+c)(+d+e+f)"
    limit = PrefetchLimit(2, None, 5)
    assert limit.most((2, 2, 3, 1, 1)) == 3
    assert limit.most((9, 2, 3, 1, 1)) == 3
    assert limit.most((9, 2, 0, 0)) == 2


def test_what_was_expected_and_skipped_is_dropped_where_the_next_unit_is_used() -> None:
    gathering = Gathering()
    gathering.forward("abcd")
    # b was expected after a; c runs instead, then d as before.
    assert gathering.forward("acd")[:3] == ["+b", "-b", "+d"]


def test_what_is_gathered_ahead_at_the_end_of_a_pass_is_dropped() -> None:
    gathering = Gathering()
    gathering.forward("ab")
    assert gathering.forward("a") == ["+b", "-b"]


def test_units_that_gather_nothing_are_left_out_and_others_are_gathered_past_them() -> None:
    gathering = Gathering(sizes=(0, 5, 0, 5))
    gathering.forward("abcd")
    # a looks ahead for b, and b for d; c neither drops it nor is one of those gathered ahead.
    assert gathering.forward("abcd") == ["+b", "+d"]
    # b did not run: what had been gathered for it goes where another one is used.
    assert gathering.forward("acd") == ["+b", "-b"]


def test_units_a_user_asked_for_stay_until_they_ran() -> None:
    gathering = Gathering()
    gathering.forward("abcd")
    log = gathering.forward("abcd", chosen="d")
    # Not b, which came next; and nobody drops d before it runs.
    assert log[0] == "+d"
    assert "+b" not in log
    assert "-d" not in log


def test_a_backward_takes_the_forwards_in_reverse() -> None:
    gathering = Gathering(depth=2)
    units = gathering.units
    gathering.schedule.forget_backwards()
    for name in "abcd":
        gathering.schedule.expect_backward(units[name])
    for _ in range(2):
        gathering.log.clear()
        gathering.schedule.begin_backward()
        for name in "dcba":
            gathering.schedule.before_use(units[name])
            units[name].is_unsharded = True
            gathering.schedule.in_backward(units[name])
            units[name].is_unsharded = False
        assert gathering.log[:3] == ["+c", "+b", "+a"]


# -- what is waited for -----------------------------------------------------------------------


class FakeGroup(str):
    """A group that is a name: `x` of one axis, `X` of two, `u` collects unreduced."""

    has_partial = False

    @property
    def full_nbytes(self) -> int:
        """One for `a`, two for `b`."""
        return ord(self.lower()) - ord("a") + 1

    @property
    def accumulates_unreduced(self) -> bool:
        return self == "u"

    @property
    def has_outer_axis(self) -> bool:
        return self.isupper()


class FakeReductions(ReductionSchedule[FakeGroup, int]):
    """Reductions of groups that are names."""

    def __init__(self, bound: int, *, is_async: bool = True, bucket_nbytes: int = 0) -> None:
        self.log: list[str] = []
        super().__init__(
            bound, is_async=is_async, bucket_nbytes=bucket_nbytes, together=self._in_one
        )
        self._known: dict[str, FakeGroup] = {}

    def named(self, names: str) -> list[FakeGroup]:
        """The groups of these names."""
        return [self._known.setdefault(name, FakeGroup(name)) for name in names]

    def reduce_named(self, names: str, *, synchronize: bool) -> None:
        """Reduce those of them that are due."""
        self.reduce(self.due(self.named(names), synchronize=synchronize))

    @contextlib.contextmanager
    def _in_one(self) -> Iterator[None]:
        self.log.append("(")
        yield
        self.log.append(")")

    @override
    def issue_inner(self, group: FakeGroup) -> int:
        self.log.append(f"inner {group}")
        group.has_partial = group.has_outer_axis
        return 0

    @override
    def finish_inner(self, done: Sequence[Reduction[FakeGroup, int]]) -> None:
        self.log.append(f"free {''.join(reduction.group for reduction in done)}")

    @override
    def issue_outer(self, groups: Sequence[FakeGroup]) -> list[int]:
        self.log.append(f"outer {''.join(groups)}")
        for group in groups:
            group.has_partial = False
        return [0] * len(groups)

    @override
    def finish_outer(self, done: Sequence[Reduction[FakeGroup, int]]) -> None:
        self.log.append(f"done {''.join(reduction.group for reduction in done)}")


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_no_more_reductions_are_under_way_than_there_may_be_gradient_buffers(bound: int) -> None:
    reductions = FakeReductions(bound)
    for group in "abcdef":
        reductions.reserve(*reductions.named(group))
        assert len(reductions) < bound
        reductions.reduce_named(group, synchronize=True)
        assert len(reductions) <= bound
    assert [entry[-1] for entry in reductions.log if entry.startswith("free")] == list(
        "abcdef"[: 6 - bound]
    )


def test_a_group_that_is_being_reduced_is_waited_for_before_it_takes_another_gradient() -> None:
    reductions = FakeReductions(3)
    for group in "ab":
        reductions.reduce_named(group, synchronize=True)
    reductions.reserve(*reductions.named("a"))
    assert reductions.log[2:] == ["free a"]


def test_the_outer_axis_follows_the_inner_one_with_a_bound_of_its_own() -> None:
    reductions = FakeReductions(1)
    for groups in ("AB", "C", "d"):
        reductions.reduce_named(groups, synchronize=True)
    assert reductions.log == [
        *("inner A", "inner B", "free AB", "outer AB"),
        *("inner C", "free C", "done AB", "outer C", "inner d"),
    ]
    reductions.drain()
    assert reductions.log[-2:] == ["free d", "done C"]


def test_a_partial_shard_goes_on_when_synchronized_and_not_while_its_inner_part_is_under_way() -> (
    None
):
    reductions = FakeReductions(2)
    reductions.reduce_named("A", synchronize=False)
    reductions.drain()
    assert reductions.log == ["inner A", "free A"]
    reductions.reduce_named("B", synchronize=True)
    reductions.reduce_partials(reductions.named("AB"))
    assert reductions.log[2:] == ["inner B", "outer A"]
    reductions.drain()
    assert reductions.log[4:] == ["free B", "outer B", "done A", "done B"]


def test_what_collects_unreduced_is_due_when_gradients_are_synchronized() -> None:
    reductions = FakeReductions(2)
    groups = reductions.named("au")
    assert reductions.due(groups, synchronize=False) == {"a": False}
    assert reductions.due(groups, synchronize=True) == {"a": False, "u": False}


def test_small_groups_are_reduced_in_one_up_to_the_bytes_of_a_bucket() -> None:
    reductions = FakeReductions(2, bucket_nbytes=4)
    for group in "abc":
        reductions.reduce_named(group, synchronize=True)
    # c does not fit with a and b.
    first = ["(", "inner a", "inner b", ")"]
    assert reductions.log == first
    assert reductions.groups() == ["a", "b", "c"]
    # A later gradient of c goes with what waits already.
    reductions.reduce_named("c", synchronize=True)
    # What is larger than a bucket is one by itself, after what came before it.
    reductions.reduce_named("f", synchronize=True)
    assert reductions.log[4:] == ["(", "inner c", ")", "free ab", "(", "inner f", ")"]
    reductions.drain()
    assert reductions.log[11:] == ["free c", "free f"]


def test_a_partial_shard_waits_for_the_bucket_that_its_group_is_in() -> None:
    reductions = FakeReductions(2, bucket_nbytes=100)
    reductions.reduce_named("A", synchronize=False)
    reductions.drain()
    reductions.log.clear()
    reductions.reduce_named("A", synchronize=True)
    reductions.reduce_partials(reductions.named("A"))
    assert reductions.log == []
    reductions.drain()
    assert reductions.log == ["(", "inner A", ")", "free A", "outer A", "done A"]


def test_a_bucket_that_is_forgotten_is_not_reduced() -> None:
    reductions = FakeReductions(2, bucket_nbytes=100)
    reductions.reduce_named("a", synchronize=True)
    assert reductions.has_bucket
    reductions.forget_bucket()
    reductions.drain()
    assert reductions.log == []


def test_reductions_that_overlap_nothing_are_waited_for_at_once() -> None:
    reductions = FakeReductions(2, is_async=False)
    reductions.reduce_named("A", synchronize=True)
    assert reductions.log == ["inner A", "free A", "outer A", "done A"]
    assert not len(reductions)
