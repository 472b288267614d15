"""Megatron-LM's own configurations train as with DDP, or are rejected with the reason."""

from __future__ import annotations

import pytest

from functional_tests.trainings import Difference, Table, Trainings, difference
from functional_tests.upstream import sides
from functional_tests.upstream.configurations import read
from functional_tests.upstream.conftest import known_own_precision, known_rejections
from megatron_fsdp_v2_mcore.prove import shrink
from megatron_fsdp_v2_mcore.prove.sides import in_fp32, in_own_precision
from tests.mcore.trained import first_difference

TOLERANCE = 1e-6

# Gradients of key biases are zero up to rounding, and some are exactly zero: one for each channel
# and layer.
ZEROS_BY_CHANCE = 128


def _accepted() -> list[sides.Shrunk]:
    """Return the configurations that are not rejected."""
    rejected = known_rejections()
    return [each for each in sides.shrunk(read()) if each.name not in rejected]


@pytest.mark.slow
def test_configurations_are_rejected_for_the_known_reasons(reasons: dict[str, str]) -> None:
    lines = [f"{name}\t{reason}" for name, reason in reasons.items()]
    assert reasons == known_rejections(), "rejections.txt has other lines:\n" + "\n".join(lines)


def test_shrinking_keeps_every_axis_and_every_flag() -> None:
    by_name = {name: each for each in sides.shrunk(read()) for name in each.names}
    for configuration in read():
        small = by_name[configuration.names[0]]
        kept = small.run.flags
        for flag, words in configuration.flags.items():
            if flag == "--num-layers" and not shrink.PATTERNS.isdisjoint(kept):
                continue  # The pattern determines the number.
            assert flag in kept, (configuration.names, flag)
            if flag in shrink.AXES:
                assert (int(words[0]) > 1) == (int(kept[flag][0]) > 1), (configuration.names, flag)
        new = kept.keys() - configuration.flags.keys()
        new -= {
            "--adam-eps",
            "--clip-grad",
            "--weight-decay",
            "--global-batch-size",
            "--train-iters",
            "--num-layers",
            shrink.LOSS_SCALE,
        }
        assert new <= shrink.DATA.keys() | shrink.MAMBA.keys(), (configuration.names, new)
        assert small.run.world_size <= shrink.MOST_RANKS


_OWN_PRECISION = known_own_precision()


def test_configurations_compared_in_own_precision_are_accepted_and_low_precision() -> None:
    by_name = {each.name: each for each in _accepted()}
    assert by_name.keys() >= _OWN_PRECISION
    assert all(sides.is_low_precision(by_name[name]) for name in _OWN_PRECISION)


@pytest.mark.functional
@pytest.mark.parametrize(
    "each", [pytest.param(each, id=each.name.replace("/", "-")) for each in _accepted()]
)
def test_configuration_matches_megatrons_ddp(
    trainings: Trainings, table: Table, each: sides.Shrunk
) -> None:
    is_own = each.name in _OWN_PRECISION
    in_precision = in_own_precision if is_own else in_fp32
    theirs = trainings(sides.reference(each, in_precision))
    mine = trainings(sides.sharded(each, in_precision))
    found = difference(mine, theirs, shrink.ITERATIONS, ZEROS_BY_CHANCE)
    where = first_difference(mine, theirs, TOLERANCE, TOLERANCE)
    assert found.within(Difference(TOLERANCE, TOLERANCE)), f"{found}; {where}"
    table.add((each.name, str(each.run.world_size), "own" if is_own else "fp32"), found)
