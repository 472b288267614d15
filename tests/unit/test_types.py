"""Types that a user's program sees, where `make setup` installs the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.processes import ran

PROGRAM = """
from concurrent.futures import Future
from typing import assert_type

import torch
from torch import nn

import megatron_fsdp_v2
from megatron_fsdp_v2 import (
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    RuntimeOptions,
    fully_shard,
)
from megatron_fsdp_v2.checkpoint import Comparison, compare, load, save

model = fully_shard(
    nn.Linear(1, 2),
    sharding_strategy="optim",
    mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    options=RuntimeOptions(max_live_grad_buffers=3),
    dp_mesh_dims=DataParallelMeshDims(shard="dp"),
    shard_placement_fn=lambda param: None,
)
assert_type(model, FSDPModule)
model.set_requires_gradient_sync(False)
model(torch.ones(1)).sum().backward()
model.zero_grad()
optimizer = torch.optim.AdamW(model.parameters())
first, second = fully_shard([nn.Linear(1, 2), nn.Linear(1, 2)])
assert_type(first, FSDPModule)
for layers in megatron_fsdp_v2.group_modules([first, second]):
    fully_shard(layers)
assert_type(save("path", model, optimizer, async_save=True), Future[None])
save("path", model, extra={"step": 3})
load("path", model, optimizer, strict=False)
assert_type(compare("path", model), Comparison)
assert_type(megatron_fsdp_v2.__version__, str)

# Each of these has to be an error: an unused `ignore` is one too.
fully_shard(model, sharding_strategy="zero3")  # type: ignore[call-overload]
fully_shard(model, outer_dp_sharding_strategy="optim_grads")  # type: ignore[call-overload]
fully_shard(model, on_missing_grad="ones")  # type: ignore[call-overload]
fully_shard(model, dp_mesh_dims=3)  # type: ignore[call-overload]
fully_shard(model, strategy="optim")  # type: ignore[call-overload]
RuntimeOptions(check_ranks="sometimes")  # type: ignore[arg-type]
model.set_requires_gradient_syncs(False)  # type: ignore[operator]
save("path", model, async_save=3)  # type: ignore[call-overload]
"""


def checked(folder: Path, python: str = sys.executable) -> str:
    """Return what mypy reports of the program, in a folder without a configuration."""
    (folder / "program.py").write_text(PROGRAM)
    words = ["-m", "mypy", "--strict", "--python-executable", python, "--config-file="]
    done = ran(sys.executable, *words, "program.py", cwd=folder)
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_program_is_type_checked_against_the_installed_package(tmp_path: Path) -> None:
    assert checked(tmp_path).startswith("Success")
