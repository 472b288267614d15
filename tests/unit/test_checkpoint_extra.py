"""`extra`: plain data and tensors come back equal, and what cannot is rejected first."""

from __future__ import annotations

import io
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.packing import pack

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


def same(one: Any, other: Any) -> bool:
    """Equal in kind and in every bit that can be seen."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = torch.arange(math.prod(shape)).view(shape).to(draw(st.sampled_from(DTYPES)))
    return tensor.transpose(0, -1) if shape and draw(st.booleans()) else tensor


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(min_size=1, max_size=5)
    | tensors()
)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(PLAIN)
def test_any_plain_data_with_tensors_comes_back_equal(value: Any) -> None:
    content = pack("extra", value)
    assert same(torch.load(io.BytesIO(content), weights_only=True), value)


@pytest.mark.parametrize(
    "extra",
    [
        torch.get_rng_state(),
        torch.tensor(3.0),
        {"rng": {"torch": torch.get_rng_state(), "steps": (1, None, -math.inf)}},
        None,
        nn.Parameter(torch.ones(2)).detach(),
    ],
    ids=["rng", "scalar", "nested", "none", "weights"],
)
def test_tensors_are_saved_and_loaded(tmp_path: Path, extra: Any) -> None:
    checkpoint.save(tmp_path / "k", nn.Linear(2, 2), extra=extra)
    assert same(checkpoint.load(tmp_path / "k", nn.Linear(2, 2)), extra)


def test_of_a_view_only_what_it_shows_is_written() -> None:
    assert len(pack("extra", torch.zeros(1_000_000)[:3])) < 10_000


def contains_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"a": [1, np.float64(2.0)]}, r"extra\['a'\]\[1\] is of the type numpy\.float64.*item\(\)"),
        ((np.ones(2),), r"extra\[0\] is of the type numpy\.ndarray.*from_numpy"),
        ({"net": nn.Linear(1, 1)}, r"extra\['net'\] is of the type torch\.nn\.modules\.linear"),
        # Not a path: Megatron allows those in the whole process.
        ({Fraction(1, 2): 1}, r"a key of extra is of the type fractions"),
        ([torch.ones(1, device="meta")], r"extra\[0\] is on the meta device"),
        ({"a": (b"",)}, r"extra\['a'\]\[0\] is empty bytes"),
        (contains_itself(), "extra is nested too deeply, or contains itself"),
    ],
    ids=["scalar", "array", "module", "key", "meta", "empty", "itself"],
)
def test_what_would_not_load_is_rejected_by_name_before_anything_is_written(
    tmp_path: Path, extra: Any, problem: str
) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=problem):
        checkpoint.save(tmp_path / "k", model, extra=extra)
    assert list(tmp_path.iterdir()) == []
