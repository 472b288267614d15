"""The gradient norm and what Megatron's loop does with it, for every optimizer of shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from tests.cases import longer
from tests.mcore import flags as f
from tests.mcore.session import Training, enter_rehearsal, train
from tests.mcore.trained import assert_close, trained
from tests.ranks import RankPools

ADAM, LION, MUON = "", "--optimizer lion --lr 1e-4", f.MUON
FLAT, OFFLOADED = "--fsdp-flat-optimizer", "--optimizer-cpu-offload"

optimizers = pytest.mark.parametrize(
    ("named", "ours"),
    [
        pytest.param(ADAM, "", id="adam"),
        longer(ADAM, FLAT, id="flat adam"),
        pytest.param(ADAM, OFFLOADED, id="offloaded adam"),
        longer(LION, "", id="lion"),
        pytest.param(MUON, "", id="muon"),
    ],
)
"""Flags of an optimizer, and those that only sharded parameters can be stepped with."""


@optimizers
def test_it_is_logged_where_nothing_is_clipped(megatron: RankPools, named: str, ours: str) -> None:
    common = ["--train-iters 3 --clip-grad 0 --log-num-zeros-in-grad", named]
    reference = trained(megatron, 2, *common, iterations=3, once=True)
    assert min(reference.grad_norms) > 0.1
    sharded = trained(megatron, 2, *common, f.fsdp(), ours, iterations=3)
    assert_close(sharded, reference)
    assert sharded.num_zeros[0] == pytest.approx(reference.num_zeros[0], abs=64)


def train_below(flags: Sequence[str], threshold: float) -> Training:
    """Run a training that skips iterations whose gradient norm is above a threshold."""
    training = enter_rehearsal()["training"]
    configure = training.get_megatron_optimizer_config

    def get_config(args: Any) -> Any:
        config, overrides = configure(args)
        return dataclasses.replace(config, grad_norm_skip_threshold=threshold), overrides

    with mock.patch.object(training, "get_megatron_optimizer_config", get_config):
        return train(flags)


@optimizers
def test_iterations_with_a_larger_one_than_the_threshold_are_skipped(
    megatron: RankPools, named: str, ours: str
) -> None:
    common = ["--train-iters 6 --lr-warmup-iters 2", named]
    norms = trained(megatron, 2, *common, once=True).grad_norms
    largest, smallest = max(norms), min(norms)
    below: dict[str, Any] = {"by": train_below, "threshold": (largest + smallest) / 2}
    reference = trained(megatron, 2, *common, once=True, **below)
    assert 0 < sum(reference.skipped) < 6
    sharded = trained(megatron, 2, *common, f.fsdp(), ours, **below)
    assert sharded.skipped == reference.skipped
    assert_close(sharded, reference)
