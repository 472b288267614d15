"""Diagnostics tell the truth about a sharded model, on every rank, and name what is wrong."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any, override

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
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
from megatron_fsdp_v2.dtensor.row_shards import RowShards
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.wrapping import BF16
from tests.parity.patterns import batch
from tests.ranks import RankPools
from tests.reference import models

ROOT = Path(__file__).parents[2]
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
MESHES: dict[str, tuple[int, ...]] = {
    "1": (1,),
    "2": (2,),
    "3": (3,),
    "HSDP 2x2": (2, 2),
    "HFSDP 2x2": (2, 2),
}
MODELS = {
    cls.__name__: cls
    for cls in (
        models.Stack,
        models.TiedInside,
        models.PartlyFrozen,
        models.UnusedParameter,
        models.MixedDtypes,
    )
}


@functools.cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    # Once in a process: every new mesh makes process groups that are never ended.
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def _strategies(mesh_name: str) -> list[str]:
    return [s for s in STRATEGIES if not (mesh_name.startswith("HFSDP") and s == "no_shard")]


def _ranks(mesh_name: str) -> int:
    return math.prod(MESHES[mesh_name])


def _sharded(
    mesh_name: str = "2",
    strategy: str = "optim_grads_params",
    build: Any = models.Stack,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    model = build()
    outer = "optim" if mesh_name.startswith("HFSDP") else "no_shard"
    for module in [*model.blocks, model]:
        fully_shard(
            module,
            mesh=_mesh(MESHES[mesh_name]),
            sharding_strategy=strategy,
            outer_dp_sharding_strategy=outer,
            **options,
        )
    return model


def _backward(model: nn.Module) -> None:
    model(batch(0, 0, dist.get_rank())).square().mean().backward()


class _Collectives(TorchDispatchMode):
    """Counts collectives of process groups."""

    count = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


# -- norms ------------------------------------------------------------------------------------


def norms_and_reference(mesh_name: str, model_name: str) -> tuple[list[Any], list[Any], bool]:
    """Norms of the sharded model by strategy and order, of the unsharded one by order."""
    world_size, orders = dist.get_world_size(), (1.0, 2.0, 3.0, math.inf)
    torch.manual_seed(0)
    reference = MODELS[model_name]()
    for rank in range(world_size):
        (reference(batch(0, 0, rank)).square().mean() / world_size).backward()
    expected = [
        {
            name: [
                None if t is None else float(torch.linalg.vector_norm(t.detach().double(), order))
                for t in (param, param.grad)
            ]
            for name, param in reference.named_parameters()
        }
        for order in orders
    ]
    found, has_empty_shard = [], False
    for strategy in _strategies(mesh_name):
        model = _sharded(mesh_name, strategy, MODELS[model_name])
        _backward(model)
        has_empty_shard |= any(p.to_local().numel() == 0 for p in model.parameters())
        found.append([parameter_norms(model, order) for order in orders])
    return found, expected, has_empty_shard


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("mesh_name", MESHES)
def test_norms_are_those_of_the_unsharded_model(
    pools: RankPools, mesh_name: str, model_name: str
) -> None:
    results = pools(_ranks(mesh_name)).run(norms_and_reference, mesh_name, model_name)
    found, expected, _ = results[0]
    assert all(other[0] == found for other in results), "ranks got different numbers"
    if mesh_name not in ("1", "2"):
        assert any(has_empty_shard for *_, has_empty_shard in results)
    for by_order in found:
        for norms, reference in zip(by_order, expected, strict=True):
            assert list(norms) == list(reference)
            floor = 0.33 * max(grad or 0.0 for _, grad in reference.values())
            for name, (param, grad) in reference.items():
                assert norms[name].param == pytest.approx(param, rel=1e-6), name
                if "unused" in name:
                    # No gradient there, zero here: others of its unit have one.
                    assert (grad, norms[name].grad) == (None, 0.0)
                elif grad is None:
                    assert norms[name].grad is None, name
                else:
                    tolerance = 1e-6 * max(grad, floor)
                    assert norms[name].grad == pytest.approx(grad, abs=tolerance), name


def norms_in_other_states() -> None:
    model = _sharded()
    before = parameter_norms(model)
    assert all(norm.grad is None for norm in before.values())
    model.unshard()
    model.blocks[0].unshard()
    gathered = parameter_norms(model)
    model.reshard()
    model.blocks[0].reshard()
    assert gathered == before
    # Relative to what is asked about, which need not be a unit itself.
    assert parameter_norms(model.blocks)["1.up.bias"] == before["blocks.1.up.bias"]
    assert parameter_norms(model.blocks[1])["up.bias"] == before["blocks.1.up.bias"]


def test_norms_are_the_same_while_units_are_gathered_and_by_relative_name(
    pools: RankPools,
) -> None:
    pools(2).run(norms_in_other_states)


def norm_with_a_gradient_on_one_rank() -> tuple[float | None, float]:
    model = _sharded()
    _backward(model)
    param = model.blocks[0].up.weight
    if dist.get_rank() == 0:
        param.grad = None
        return parameter_norms(model)["blocks.0.up.weight"].grad, 0.0
    own = float(param.grad.to_local().double().norm())
    return parameter_norms(model)["blocks.0.up.weight"].grad, own


def test_a_rank_without_gradient_adds_nothing_and_gets_the_norm(pools: RankPools) -> None:
    (first, _), (second, own) = pools(2).run(norm_with_a_gradient_on_one_rank)
    assert first == second == pytest.approx(own, rel=1e-12)
    assert own > 0


def norms_of_ignored() -> bool:
    torch.manual_seed(0)
    model = models.Stack()
    ignored = model.output.weight
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=_mesh((2,)), ignored_params={ignored})
    _backward(model)
    norm = parameter_norms(model)["output.weight"]
    return norm.param == pytest.approx(float(ignored.detach().norm())) and (
        norm.grad == pytest.approx(float(ignored.grad.norm()))
    )


def test_an_ignored_parameter_is_taken_as_it_is(pools: RankPools) -> None:
    assert all(pools(2).run(norms_of_ignored))


def norms_of_planted(value: float, order: float) -> float:
    model = _sharded()
    param = model.blocks[1].up.weight
    if dist.get_rank() == 1:
        param.to_local().detach()[-1, 0] = value
    return parameter_norms(model, order)["blocks.1.up.weight"].param


def test_norms_neither_lose_a_nan_nor_overflow(pools: RankPools) -> None:
    for order in (2.0, math.inf):
        assert all(math.isnan(norm) for norm in pools(2).run(norms_of_planted, math.nan, order))
    for norm in pools(2).run(norms_of_planted, 1e30, 2.0):
        assert norm == pytest.approx(1e30, rel=1e-6)


def collectives_of_a_look(mesh_name: str) -> list[tuple[int, ...]]:
    counts = []
    for strategy in _strategies(mesh_name):
        model = _sharded(mesh_name, strategy)
        _backward(model)
        row = []
        for look in (parameter_norms, find_nonfinite, group_summary, check_no_overlap):
            with _Collectives() as collectives:
                look(model)
            row.append(collectives.count)
        counts.append(tuple(row))
    return counts


@pytest.mark.parametrize("mesh_name", MESHES)
def test_one_collective_for_each_mesh_axis_and_none_for_what_layouts_tell(
    pools: RankPools, mesh_name: str
) -> None:
    sharded_axes = {"1": 0, "2": 1, "3": 1, "HSDP 2x2": 1, "HFSDP 2x2": 2}[mesh_name]
    axes = sum(size > 1 for size in MESHES[mesh_name])
    for counts in pools(_ranks(mesh_name)).run(collectives_of_a_look, mesh_name):
        for strategy, found in zip(_strategies(mesh_name), counts, strict=True):
            along_shards = 0 if strategy == "no_shard" else sharded_axes
            assert found == (along_shards, axes, 0, 0), strategy


# -- NaN and Inf ------------------------------------------------------------------------------


def nonfinite_planted(
    mesh_name: str, strategy: str, dtype: torch.dtype, every_replica: bool
) -> tuple[list[Any], str]:
    """Plant three NaN in a parameter and two Inf in a gradient, where one rank alone holds them."""
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, main_params_dtype=torch.float32, main_grads_dtype=dtype
    )
    model = _sharded(mesh_name, strategy, mp_policy=policy)
    _backward(model)
    check_finite(model)
    if every_replica or dist.get_rank() == 0:
        param, other = model.blocks[1].up.weight, model.blocks[2].down.weight
        if param.local_rows[0] == 0 < param.local_rows[1]:
            param.to_local().detach()[0, :3] = math.nan
        if other.local_rows[0] < other.local_rows[1] == other.shape[0]:
            other.grad.to_local()[-1, :2] = torch.tensor([math.inf, -math.inf])
    try:
        check_finite(model)
    except RuntimeError as error:
        return [dataclasses.astuple(item) for item in find_nonfinite(model)], str(error)
    return [], ""


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nonfinite_numbers_are_named_and_counted_once_on_all_ranks(
    pools: RankPools, mesh_name: str, dtype: torch.dtype
) -> None:
    for strategy in _strategies(mesh_name):
        results = pools(_ranks(mesh_name)).run(nonfinite_planted, mesh_name, strategy, dtype, True)
        for found, message in results:
            assert found == [
                ("blocks.1.up.weight", "param", 3, 0),
                ("blocks.2.down.weight", "grad", 0, 2),
            ], strategy
            assert "blocks.1.up.weight: 3 NaN, 0 Inf" in message
            assert "gradient of blocks.2.down.weight: 0 NaN, 2 Inf" in message


def test_what_is_wrong_on_one_replica_is_found_on_all_ranks(pools: RankPools) -> None:
    for mesh_name, strategy in (("2", "no_shard"), ("HSDP 2x2", "optim_grads_params")):
        results = pools(_ranks(mesh_name)).run(
            nonfinite_planted, mesh_name, strategy, torch.float32, False
        )
        assert results[0][0], "nothing was planted on rank 0"
        assert all(result == results[0] for result in results), mesh_name


def nonfinite_ignored() -> list[Any]:
    torch.manual_seed(0)
    model = models.Stack()
    ignored = model.output.weight
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=_mesh((2,)), ignored_params={ignored})
    if dist.get_rank() == 1:
        ignored.detach()[0, 0] = math.nan
    return [dataclasses.astuple(item) for item in find_nonfinite(model)]


def test_a_nan_in_an_ignored_parameter_of_one_rank_is_found_on_all_ranks(pools: RankPools) -> None:
    assert pools(2).run(nonfinite_ignored) == [[("output.weight", "param", 1, 0)]] * 2


# -- overlap ----------------------------------------------------------------------------------


def overlap_errors(mesh_name: str) -> list[str]:
    """Messages about sound models: none."""
    messages = []
    for strategy in _strategies(mesh_name):
        for build, policy in (
            (models.Stack, BF16),
            (models.TiedInside, BF16),
            (models.PartlyFrozen, None),
            (models.MixedDtypes, None),
        ):
            model = _sharded(mesh_name, strategy, build, mp_policy=policy)
            for _ in range(2):
                messages.append(_overlap_message(model))
                model(batch(0, 0, 0)).square().mean().backward()
            messages.append(_overlap_message(model))
    return [message for message in messages if message]


def _overlap_message(model: nn.Module) -> str:
    try:
        check_no_overlap(model)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mesh_name", MESHES)
def test_a_sound_model_has_no_overlap(pools: RankPools, mesh_name: str) -> None:
    assert all(found == [] for found in pools(_ranks(mesh_name)).run(overlap_errors, mesh_name))


def planted_overlaps() -> dict[str, str]:
    """What is said about a model in which one thing was made wrong, by what it was."""
    messages = {}
    model = _sharded()
    group = unit_of(model.blocks[1]).groups[0]
    # Units that are alike share a layout.
    group.layout = copy.copy(group.layout)
    slots = list(group.layout.slots)
    first, second = group.names.index("up.weight"), group.names.index("down.weight")
    slots[second] = dataclasses.replace(slots[second], offset=slots[first].end - 1)
    object.__setattr__(group.layout, "slots", tuple(slots))
    messages["layout"] = _overlap_message(model)

    for what, ranges in (("twice", ((0, 9), (8, 15))), ("never", ((0, 7), (8, 15)))):
        model = _sharded()
        model.blocks[1].up.weight._row_shards = RowShards(ranges, (1,))
        messages[what] = _overlap_message(model)

    model = _sharded()
    for param in model.blocks[1].parameters():
        param._row_shards = dataclasses.replace(param.row_shards, strides=(0,))
    messages["replicas"] = _overlap_message(model)

    model = _sharded()
    # Not every rank has rows of both.
    held = "up" if model.blocks[1].up.weight.to_local().numel() else "down"
    messages["held"] = held
    mine, theirs = (getattr(model.blocks[block], held).weight for block in (1, 2))
    assert mine.to_local().numel()
    mine._local_tensor = theirs._local_tensor[: mine.to_local().shape[0]]
    messages["memory"] = _overlap_message(model)

    model = _sharded()
    _backward(model)
    weight = getattr(model.blocks[1], held).weight
    weight.grad = UnevenDTensor.from_rows(
        weight.to_local().detach(), weight.device_mesh, weight.row_shards, weight.shape
    )
    messages["gradient"] = _overlap_message(model)
    return messages


def test_a_planted_overlap_is_found_and_named(pools: RankPools) -> None:
    for messages in pools(2).run(planted_overlaps):
        up, down = "blocks.1.up.weight", "blocks.1.down.weight"
        assert "overlap in their flat buffer" in messages["layout"]
        assert up in messages["layout"] and down in messages["layout"]
        assert f"rows 8 to 9 of {up} are held by two shards" in messages["twice"]
        assert f"rows 7 to 8 of {up} are held by no shard" in messages["never"]
        assert "not held once in every replica" in messages["replicas"]
        assert "share memory on this rank" in messages["memory"]
        held = f"{messages['held']}.weight"
        assert f"blocks.1.{held}" in messages["memory"]
        assert f"blocks.2.{held}" in messages["memory"]
        assert f"gradient of blocks.1.{held}" in messages["gradient"]
        assert "share memory on this rank" in messages["gradient"]


# -- summary ----------------------------------------------------------------------------------


def _storage(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


def summary_and_storages(mesh_name: str, strategy: str, policy: Any) -> tuple[Any, Any, Any]:
    """Rows before the first step, bytes of real storages after it, and numbers of elements."""
    model = _sharded(mesh_name, strategy, models.PartlyFrozen, mp_policy=policy)
    summary = group_summary(model)
    _backward(model)
    real = []
    for module in [model, *model.blocks]:
        for group in unit_of(module).groups:
            main, own = group.main_weight.tensor, group.model_weight.tensor
            gathered = group.weights._temporary
            buffers = [gathered]
            if group.grads is not None:
                grads = group.grads.buffers
                buffers += [grads.full, grads.grad_comm, grads.partial]
            held = [0 if b is None else _storage(b.acquire()) for b in buffers]
            grad = None if group.grads is None else group.grads.main.tensor
            resting = (main, None if own.data_ptr() == main.data_ptr() else own, grad)
            real.append((*(_storage(tensor) for tensor in resting), held[0], sum(held[1:])))
    columns = [f"{role}_nbytes" for role in ("main_weight", "model_weight", "main_grad")]
    columns += ["gathered_nbytes", "full_grad_nbytes"]
    told = [tuple(getattr(row, column) for column in columns) for row in summary.rows]
    return told, real, (summary.num_params, summary.numel, summary.steady_nbytes)


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
def test_bytes_of_the_summary_are_those_of_real_storages(
    pools: RankPools, mesh_name: str, policy: MixedPrecisionPolicy | None
) -> None:
    reference = models.PartlyFrozen()
    numel = sum(p.numel() for p in reference.parameters())
    num_params = len(list(reference.parameters()))
    for strategy in _strategies(mesh_name):
        for told, real, totals in pools(_ranks(mesh_name)).run(
            summary_and_storages, mesh_name, strategy, policy
        ):
            assert told == real, strategy
            assert len(told) == 5, "root, frozen block, block of two groups, block"
            assert any(row[2] == 0 for row in told) and any(row[2] for row in told)
            assert totals == (num_params, numel, sum(sum(row[:3]) for row in real))


def summary_rows() -> GroupSummary:
    return group_summary(_sharded("HFSDP 2x2", mp_policy=BF16))


def test_rows_say_dtypes_and_placements_of_each_axis(pools: RankPools) -> None:
    summary = pools(4).run(summary_rows)[0]
    assert [row.unit for row in summary.rows] == ["", "blocks.0", "blocks.1", "blocks.2"]
    row = summary.rows[1]
    assert row.placements == "2:RSSP 2:SSSS"
    assert row.is_trained and row.num_params == 6
    assert row.dtypes == GroupDtypes(torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)
    assert "blocks.0-2 (3 units)" in str(summary)
    assert "bf16/fp32/fp32/bf16" in str(summary)


def _row(unit: str, **changes: Any) -> GroupRow:
    dtypes = GroupDtypes(torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)
    row = GroupRow(
        unit, 12, 3_188_000_000, dtypes, "128:RSSP 128:SSSS", True, 194_580, 3 * 10**7,
        778_320, 50_000_000, 778_320, 6_376_000_000, 12_752_000_000,
    )  # fmt: skip
    return dataclasses.replace(row, **changes)


def test_the_table_of_a_large_model_folds_equal_units_and_fits_its_columns() -> None:
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


def test_units_that_differ_in_any_number_are_not_folded() -> None:
    text = str(GroupSummary((_row("layers.0"), _row("layers.1", padding_numel=1))))
    assert "layers.0 " in text and "layers.1 " in text and "units)" not in text


def _partly_frozen() -> nn.Module:
    model = models.Stack(6)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    return model


def printed_summary() -> str:
    """What docs/diagnostics.md shows."""
    return str(group_summary(_sharded(mp_policy=BF16, build=_partly_frozen)))


def test_the_printed_summary_in_the_docs_is_real(pools: RankPools) -> None:
    text = (ROOT / "docs" / "diagnostics.md").read_text()
    assert pools(2).run(printed_summary)[0] in text


# -- ranges -----------------------------------------------------------------------------------


def range_names(is_async: bool) -> list[list[str]]:
    """Names of ranges in a step: off, on, and off again."""
    found = []
    model = _sharded(enable_async_reduce_grad=is_async, enable_unshard_prefetch=is_async)
    for enabled in (None, True, False):
        if enabled is not None:
            profile_ranges(model, enabled)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            _backward(model)
        found.append([e.name for e in trace.events() if e.name.startswith("fsdp::")])
    return found


def test_ranges_of_every_phase_and_unit_are_in_a_trace_when_on_and_none_when_off(
    pools: RankPools,
) -> None:
    phases = ("unshard", "wait_for_unshard", "reshard", "pre_forward", "post_forward")
    phases += ("pre_backward", "post_backward", "reduce_grad")
    for is_async in (True, False):
        for before, during, after in pools(2).run(range_names, is_async):
            assert before == after == []
            for unit in ("blocks.0", "blocks.1", "blocks.2"):
                assert {f"fsdp::{phase} {unit}" for phase in phases} <= set(during)
            assert "fsdp::pre_forward (root)" in during
            assert during.count("fsdp::pre_forward blocks.1") == 1


# -- bad input --------------------------------------------------------------------------------


def test_a_module_without_units_is_rejected_by_name() -> None:
    for look in (parameter_norms, find_nonfinite, check_no_overlap, group_summary, profile_ranges):
        with pytest.raises(ValueError, match="Stack contains no sharded module"):
            look(models.Stack())


def orders_rejected() -> None:
    model = _sharded("1")
    for order in (0.0, -math.inf, math.nan):
        with pytest.raises(ValueError, match="must be above 0"):
            parameter_norms(model, order)


def test_an_order_that_is_no_norm_is_rejected(pools: RankPools) -> None:
    pools(1).run(orders_rejected)
