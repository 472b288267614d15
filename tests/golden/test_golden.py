"""Trainings match their golden records. See the docstring of the package."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import pytest

from tests.cases import quick_if
from tests.golden import files
from tests.golden.cases import CASES
from tests.golden.recording import record
from tests.ranks import RankPools

SAMPLE = "plain | optim_grads_params | 3"
MOST_BYTES = 300_000

recorded = functools.cache(files.read)


@pytest.mark.parametrize(
    "name", [quick_if(number % 32 == 0, name) for number, name in enumerate(CASES)]
)
def test_training_matches_its_record(pools: RankPools, name: str) -> None:
    expected, found = recorded()[name], record(pools, CASES[name])
    if not files.has_same_kernels(expected, found):
        warnings.warn(
            "the bits of torch's kernels differ from the recorded ones: losses compared only",
            stacklevel=1,
        )
    differs = files.difference(expected, found, CASES[name].close)
    assert not differs, f"{name}: {differs}"


def test_records_are_small_and_complete() -> None:
    assert list(recorded()) == list(CASES)
    sizes = [(files.FOLDER / f"{file}.json").stat().st_size for file in files.FILES]
    assert sum(sizes) < MOST_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"enable_unshard_prefetch": False},
            "events of every rank, micro-batch 0, event 10, after 'backward': recorded "
            "'all_gather float32 1056 inner gather', found 'matmul'",
        ),
        ({"max_live_grad_buffers": 1}, "bytes, rank 0: recorded "),
        ({"gradient_scaling_factor": 0.3}, "bits, gradients: recorded "),
    ],
    ids=["events", "bytes", "bits"],
)
def test_differences_in_events_bytes_and_bits_are_described(
    pools: RankPools, options: dict[str, Any], text: str
) -> None:
    case = CASES[SAMPLE]
    plain = record(pools, case)
    other = record(pools, dataclasses.replace(case, options=options))
    assert text in files.difference(plain, other, case.close)
