"""Diagnostics of a sharded model are correct on every rank and name the parameters at fault."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2.diagnostics import (
    GroupRow,
    GroupSummary,
    check_finite,
    check_no_overlap,
    find_nonfinite,
    group_summary,
    parameter_norms,
    profile_ranges,
)
from megatron_fsdp_v2.diagnostics.finite import not_finite
from megatron_fsdp_v2.dtensor.row_shards import RowShards
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
from megatron_fsdp_v2.runtime.module import unit_of
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    BF16,
    MESHES,
    Dispatched,
    Operations,
    batch,
    error_message,
    of_all_ranks,
    on_mesh,
    own_loss,
    plain_loss,
    strategies_on,
    wrap,
)
from tests.processes import ROOT
from tests.reference import models

MESH_NAMES = ("1", "2", "3", "HSDP 2x2", "HFSDP 2x2")
KINDS = ("Stack", "TiedInside", "PartlyFrozen", "UnusedParameter", "MixedDtypes")
MODELS = {name: getattr(models, name) for name in KINDS}


def _sharded(
    mesh_name: str = "2",
    strategy: str = "optim_grads_params",
    build: Any = models.Stack,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    return wrap(build(), sharding_strategy=strategy, **on_mesh(mesh_name), **options)


# -- norms ------------------------------------------------------------------------------------


def _norms(reference: nn.Module, order: float) -> dict[str, list[float | None]]:
    """Norms of plain parameters and of their gradients, by name."""
    return {
        name: [
            None if t is None else float(torch.linalg.vector_norm(t.detach().double(), order))
            for t in (param, param.grad)
        ]
        for name, param in reference.named_parameters()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh_name", "model_name"),
    [*((mesh, "Stack") for mesh in MESH_NAMES), *(("HFSDP 2x2", kind) for kind in KINDS[1:])],
)
@on_ranks("mesh_name")
def test_norms_equal_those_of_the_unsharded_model(mesh_name: str, model_name: str) -> None:
    torch.manual_seed(0)
    reference = MODELS[model_name]()
    plain_loss(reference).backward()
    for strategy, order in itertools.product(strategies_on(mesh_name), (1.0, 2.0, 3.0, math.inf)):
        model = _sharded(mesh_name, strategy, MODELS[model_name])
        own_loss(model).backward()
        norms, expected = parameter_norms(model, order), _norms(reference, order)
        has_empty = of_all_ranks(any(p.to_local().numel() == 0 for p in model.parameters()))
        assert of_all_ranks(norms) == [norms] * dist.get_world_size()
        assert any(has_empty) or strategy == "no_shard" or mesh_name in ("1", "2")
        assert list(norms) == list(expected)
        floor = 0.33 * max(grad or 0.0 for _, grad in expected.values())
        for name, (param, grad) in expected.items():
            assert norms[name].param == pytest.approx(param, rel=1e-6), name
            if grad is None:
                assert norms[name].grad is None, name
            else:
                tolerance = 1e-6 * max(grad, floor)
                assert norms[name].grad == pytest.approx(grad, abs=tolerance), name


@on_ranks(2)
def test_norms_do_not_depend_on_gathered_units_or_relative_names() -> None:
    model = _sharded()
    before = parameter_norms(model)
    assert all(norm.grad is None for norm in before.values())
    model.unshard()
    model.blocks[0].unshard()
    gathered = parameter_norms(model)
    model.reshard()
    model.blocks[0].reshard()
    assert gathered == before
    # Names are relative to the given module, which need not be a unit.
    assert parameter_norms(model.blocks)["1.up.bias"] == before["blocks.1.up.bias"]
    assert parameter_norms(model.blocks[1])["up.bias"] == before["blocks.1.up.bias"]


@on_ranks(2)
def test_rank_without_gradient_gets_the_norm_of_the_other_ranks() -> None:
    model = _sharded()
    own_loss(model).backward()
    param = model.blocks[0].up.weight
    if dist.get_rank() == 0:
        param.grad = None
    _, own = of_all_ranks(
        0.0 if param.grad is None else float(param.grad.to_local().double().norm())
    )
    assert parameter_norms(model)["blocks.0.up.weight"].grad == pytest.approx(own, rel=1e-12)
    assert own > 0


@pytest.mark.parametrize(("value", "order"), [(math.nan, 2.0), (math.nan, math.inf), (1e30, 2.0)])
@on_ranks(2)
def test_norms_neither_lose_a_nan_nor_overflow(value: float, order: float) -> None:
    model = _sharded()
    param = model.blocks[1].up.weight
    if dist.get_rank() == 1:
        param.to_local().detach()[-1, 0] = value
    norm = parameter_norms(model, order)["blocks.1.up.weight"].param
    assert norm == pytest.approx(value, rel=1e-6, nan_ok=True)


@on_ranks("mesh_name", mesh_name=MESH_NAMES)
def test_diagnostics_issue_at_most_one_collective_per_mesh_axis(mesh_name: str) -> None:
    shape, outer = MESHES[mesh_name]
    axes = sum(size > 1 for size in shape)
    for strategy in strategies_on(mesh_name):
        model = _sharded(mesh_name, strategy)
        own_loss(model).backward()
        counts = []
        for look in (parameter_norms, find_nonfinite, group_summary, check_no_overlap):
            namespaces: list[str] = []
            with Dispatched(lambda func, *_, seen=namespaces: seen.append(func.namespace)):
                look(model)
            counts.append(sum(name in ("c10d", "_c10d_functional") for name in namespaces))
        sharded_axes = axes if outer == "optim" else min(axes, 1)
        assert counts == [0 if strategy == "no_shard" else sharded_axes, axes, 0, 0], strategy


# -- NaN and Inf ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh_name", "one_replica", "dtype"),
    [
        ("1", False, torch.bfloat16),
        ("3", False, torch.float32),
        ("HSDP 2x2", False, torch.float16),
        ("HSDP 2x2", True, torch.bfloat16),
        ("HFSDP 2x2", False, torch.bfloat16),
    ],
)
@on_ranks("mesh_name")
def test_nonfinite_numbers_are_named_and_counted_once_on_all_ranks(
    mesh_name: str, one_replica: bool, dtype: torch.dtype
) -> None:
    """Three NaN in a parameter and two Inf in a gradient, of one replica or of all."""
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, main_params_dtype=torch.float32, main_grads_dtype=dtype
    )
    for strategy in strategies_on(mesh_name):
        model = _sharded(mesh_name, strategy, mp_policy=policy)
        own_loss(model).backward()
        check_finite(model)
        param, other = model.blocks[1].up.weight, model.blocks[2].down.weight
        if not one_replica or param.device_mesh.get_local_rank("outer") == 0:
            if param.local_rows[0] == 0 < param.local_rows[1]:
                param.to_local().detach()[0, :3] = math.nan
            if other.local_rows[0] < other.local_rows[1] == other.shape[0]:
                other.grad.to_local()[-1, :2] = torch.tensor([math.inf, -math.inf])
        message = error_message(RuntimeError, lambda model=model: check_finite(model))
        assert [dataclasses.astuple(item) for item in find_nonfinite(model)] == [
            ("blocks.1.up.weight", "param", 3, 0),
            ("blocks.2.down.weight", "grad", 0, 2),
        ], strategy
        assert "blocks.1.up.weight: 3 NaN, 0 Inf" in message
        assert "gradient of blocks.2.down.weight: 0 NaN, 2 Inf" in message


@on_ranks(2)
def test_diagnostics_of_an_ignored_parameter_are_those_of_its_local_value() -> None:
    model: Any = models.Stack()
    ignored = model.output.weight
    wrap(model, ignored_params={ignored})
    own_loss(model).backward()
    assert model.output.weight is ignored
    norm = parameter_norms(model)["output.weight"]
    assert norm.param == pytest.approx(float(ignored.detach().norm()))
    assert norm.grad == pytest.approx(float(ignored.grad.norm()))
    if dist.get_rank() == 1:
        ignored.detach()[0, 0] = math.nan
    (item,) = find_nonfinite(model)
    assert dataclasses.astuple(item) == ("output.weight", "param", 1, 0)


@on_ranks(2, strategy=["no_shard", "optim_grads_params"])
def test_nonfinite_gradients_are_found_in_one_pass_and_named(strategy: str) -> None:
    name, counts, sound = "blocks.1.up.weight", set(), []
    for num_blocks in (5, 2):
        model: Any = wrap(models.Stack(num_blocks), [], sharding_strategy=strategy)
        model(batch(0)).sum().backward()
        with Operations() as check:
            sound += not_finite(model)
        counts.add(len(check.names))
    rows = model.get_parameter(name).grad.to_local()
    assert any(of_all_ranks(rows.numel())) and not sound
    # The number of operations does not depend on the number of blocks.
    assert len(counts) == 1 and max(counts) < 10
    # The squares of large elements overflow; the elements are finite.
    for value, found in (("1e30", []), ("nan", [name]), ("-inf", [name])):
        if rows.numel():
            rows[-1, -1] = float(value)
            assert not_finite(model) == found


# -- overlap ----------------------------------------------------------------------------------


def _overlap_message(model: nn.Module) -> str:
    return error_message(RuntimeError, lambda: check_no_overlap(model))


SOUND = [("Stack", BF16), ("TiedInside", BF16), ("PartlyFrozen", None), ("MixedDtypes", None)]


@on_ranks("mesh_name", mesh_name=["3", "HFSDP 2x2"])
def test_a_sound_model_has_no_overlap(mesh_name: str) -> None:
    for strategy, (name, policy) in itertools.product(strategies_on(mesh_name), SOUND):
        model = _sharded(mesh_name, strategy, MODELS[name], mp_policy=policy)
        check_no_overlap(model)
        for _ in range(2):
            model(batch(0)).square().mean().backward()
            check_no_overlap(model)


@on_ranks(2)
def test_a_planted_overlap_is_found_and_named() -> None:
    for ranges in (((0, 9), (8, 15)), ((0, 7), (8, 15))):
        model = _sharded()
        model.blocks[1].up.weight.row_shards = RowShards(ranges, (1,))
        text = "the row ranges of blocks.1.up.weight are not those of its layout"
        assert text in _overlap_message(model)

    model = _sharded()
    for param in model.blocks[1].parameters():
        param.row_shards = dataclasses.replace(param.row_shards, strides=(0,))
    assert "not held once in every replica" in _overlap_message(model)

    model = _sharded()
    # Not every rank has rows of both.
    held = "up" if model.blocks[1].up.weight.to_local().numel() else "down"
    mine, theirs = (getattr(model.blocks[block], held).weight for block in (1, 2))
    assert mine.to_local().numel()
    mine._local_tensor = theirs._local_tensor[: mine.to_local().shape[0]]
    message = _overlap_message(model)
    assert "share memory on this rank" in message
    assert f"blocks.1.{held}.weight" in message and f"blocks.2.{held}.weight" in message

    model = _sharded()
    own_loss(model).backward()
    weight = getattr(model.blocks[1], held).weight
    weight.grad = UnevenDTensor.from_rows(
        weight.to_local().detach(), weight.device_mesh, weight.row_shards, weight.shape
    )
    message = _overlap_message(model)
    assert f"gradient of blocks.1.{held}.weight" in message
    assert "share memory on this rank" in message


# -- summary ----------------------------------------------------------------------------------


def _storage(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


def _main_grad(group: Any) -> int:
    """Bytes of a group's main gradient, after a backward."""
    if not group.is_trained:
        return 0
    if group.main_grad is not None:
        return _storage(group.main_grad.tensor)
    # This rank holds only padding, and no gradient needs the buffer.
    assert not any(param.to_local().numel() for param in group.sharded_params)
    return int(group.main_weight.tensor.numel() * group.spec.dtypes.main_grad.itemsize)


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
@on_ranks("mesh_name", mesh_name=["1", "3", "HFSDP 2x2"])
def test_summary_bytes_equal_storage_bytes(
    mesh_name: str, policy: MixedPrecisionPolicy | None
) -> None:
    numels = [p.numel() for p in models.PartlyFrozen().parameters()]
    columns = [f"{role}_nbytes" for role in ("main_weight", "model_weight", "main_grad")]
    columns += ["gathered_nbytes", "full_grad_nbytes"]
    for strategy in strategies_on(mesh_name):
        model = _sharded(mesh_name, strategy, models.PartlyFrozen, mp_policy=policy)
        summary = group_summary(model)
        own_loss(model).backward()
        real = []
        for module in [model, *model.blocks]:
            for group in unit_of(module).groups:
                main, own = group.main_weight.tensor, group.model_weight.tensor
                kinds = ["model_weight"]
                kinds += ["full_grad", "grad_comm", "partial_grad"] if group.is_trained else []
                buffers = [group.temporaries().get(kind) for kind in kinds]
                held = [0 if b is None else _storage(b.acquire()) for b in buffers]
                resting = (main, None if own.data_ptr() == main.data_ptr() else own)
                grad = _main_grad(group)
                real.append((*map(_storage, resting), grad, held[0], sum(held[1:])))
        told = [tuple(getattr(row, column) for column in columns) for row in summary.rows]
        assert told == real, strategy
        assert len(told) == 5, "root, frozen block, block of two groups, block"
        assert any(row[2] == 0 for row in told) and any(row[2] for row in told)
        assert (summary.total("num_params"), summary.total("numel")) == (len(numels), sum(numels))
        assert summary.total("steady_nbytes") == sum(sum(row[:2]) for row in real)


def _row(unit: str, **changes: Any) -> GroupRow:
    dtypes = GroupDtypes(torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)
    row = GroupRow(
        unit, 12, 3_188_000_000, dtypes, "128:RSSP 128:SSSS", True, 194_580, 3 * 10**7,
        778_320, 50_000_000, 778_320, 6_376_000_000, 12_752_000_000,
    )  # fmt: skip
    return dataclasses.replace(row, **changes)


def test_summary_table_of_a_large_model_merges_equal_units_and_fits_its_columns() -> None:
    names = ["", *(f"module.module.decoder.layers.{i}" for i in range(126))]
    text = str(GroupSummary(tuple(_row(name) for name in names)))
    assert "layers.0-125 (126 units)" in text
    assert len(text.splitlines()) <= 10
    assert max(len(line) for line in text.splitlines()) <= 140

    rows = []
    for layer in range(61):
        rows.append(_row(f"model.layers.{layer}", numel=5 if layer < 3 else 7))
        if layer >= 3:
            rows += [_row(f"model.layers.{layer}.mlp.experts.{e}", numel=1) for e in range(4)]
        rows.append(_row(f"model.layers.{layer}.norm", is_trained=layer % 2 == 0))
    text = str(GroupSummary(tuple(rows)))
    units = [line.split("  ")[0] for line in text.splitlines()[2:8]]
    assert units[0] == "model.layers.0-2 (3 units)"
    assert "(31 units)" in units[1] and "(30 units)" in units[2]
    assert units[3] == "model.layers.3-60 (58 units)"
    assert "experts.0-3 (232 units)" in units[4]
    assert units[5].startswith("---")
    assert max(len(line) for line in text.splitlines()) <= 140


def _partly_frozen() -> nn.Module:
    model = models.Stack(6)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    return model


@on_ranks(2)
def test_the_printed_summary_in_the_docs_is_real() -> None:
    summary = group_summary(_sharded(mp_policy=BF16, build=_partly_frozen))
    assert str(summary) in (ROOT / "docs" / "memory.md").read_text()


# -- ranges -----------------------------------------------------------------------------------


PHASES = (
    *("unshard", "wait_for_unshard", "reshard", "pre_forward", "post_forward"),
    *("pre_backward", "post_backward", "reduce_grad", "finish_reduction"),
)


@on_ranks(2, is_async=[True, False])
def test_profile_ranges_are_in_a_trace_only_when_enabled(is_async: bool) -> None:
    model = _sharded(enable_async_reduce_grad=is_async, enable_unshard_prefetch=is_async)
    names = []
    for enabled in (None, True, False):
        if enabled is not None:
            profile_ranges(model, enabled)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            own_loss(model).backward()
        names.append([e.name for e in trace.events() if e.name.startswith("fsdp::")])
    before, during, after = names
    assert before == after == []
    for unit in ("blocks.0", "blocks.1", "blocks.2"):
        assert {f"fsdp::{phase} {unit}" for phase in PHASES} <= set(during)
    assert "fsdp::pre_forward (root)" in during
    assert during.count("fsdp::pre_forward blocks.1") == 1


# -- bad input --------------------------------------------------------------------------------


def test_a_module_without_units_is_rejected_by_name() -> None:
    for look in (parameter_norms, find_nonfinite, check_no_overlap, group_summary, profile_ranges):
        with pytest.raises(ValueError, match="Stack contains no sharded module"):
            look(models.Stack())


@on_ranks(1)
def test_invalid_norm_order_is_rejected() -> None:
    model = _sharded("1")
    for order in (0.0, -math.inf, math.nan):
        with pytest.raises(ValueError, match="must be above 0"):
            parameter_norms(model, order)
