"""Transformer Engine's modules without Megatron: tensor-parallel, sharded, in checkpoints."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp_v2 import UnitOptions, checkpoint, fully_shard
from megatron_fsdp_v2.tensor_parallel import tensor_shards
from megatron_fsdp_v2_mcore.model.amax_mesh import name_amax_mesh
from megatron_fsdp_v2_mcore.model.tensor_parallel_rules import TRANSFORMER_ENGINE_RULES
from tests.cases import longer
from tests.distributed.checkpoint_trainings import WAYS, digests
from tests.distributed.plain_parallel_model import copied, summed
from tests.distributed.wrapping import error_message, fill
from tests.mcore.session import enter_rehearsal, enter_te
from tests.mcore.trained import TIMEOUT_S, on_te
from tests.ranks import RankPools

HIDDEN, FFN, EXPERTS, TOKENS = 16, 24, (5, 3), 8
STEPS = 3


class Model(nn.Module):
    """Every module of the table, column-parallel and row-parallel, with and without biases."""

    def __init__(self, group: Any, tp: int) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        same: dict[str, Any] = dict(tp_group=group, tp_size=tp, device="cpu")
        self.group = group
        fused: dict[str, Any] = dict(parameters_split=("query", "key"), bias=False)
        self.projections = te.LayerNormLinear(
            HIDDEN, 2 * HIDDEN, parallel_mode="column", **fused, **same
        )
        self.out = te.Linear(HIDDEN, HIDDEN, parallel_mode="row", **same)
        gated: dict[str, Any] = dict(activation="swiglu", normalization="RMSNorm")
        self.mlp = te.LayerNormMLP(HIDDEN, FFN, set_parallel_mode=True, **gated, **same)
        experts = len(EXPERTS), HIDDEN, HIDDEN
        # With tensor parallelism, GroupedLinear supports no bias.
        self.up = te.GroupedLinear(*experts, parallel_mode="column", bias=False, **same)
        self.down = te.GroupedLinear(*experts, parallel_mode="row", bias=False, **same)
        self.whole = te.Linear(HIDDEN, HIDDEN, device="cpu")
        self.norm = te.RMSNorm(HIDDEN, device="cpu")
        self.last = te.LayerNorm(HIDDEN, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        splits = list(EXPERTS)
        # A rank has a shard of the queries and a shard of the keys.
        query, key = self.projections(x).chunk(2, -1)
        x = x + self.out(torch.tanh(query) * key)
        x = x + self.mlp(x)
        # Experts leave communication to the token dispatcher.
        routed = self.down(self.up(copied(x, self.group), splits), splits)
        x = self.norm(x + summed(routed, self.group))
        return self.last(self.whole(x))


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    """Return a new mesh: trainings of Megatron destroy the groups of existing meshes."""
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def _part(name: str, whole: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    """Return the shard of a full weight on one tensor-parallel rank, by parameter name."""
    replicated = ("norm", "last", "whole", "out.bias", "mlp.fc2_bias")
    if "layer_norm" in name or name.startswith(replicated):
        return whole
    if name.startswith("mlp.fc1"):
        gate, up = whole.chunk(2)
        return torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])
    if name.startswith(("out.weight", "mlp.fc2_weight", "down.weight")):
        return whole.chunk(tp, 1)[rank]
    return whole.chunk(tp)[rank]


def sharded(dp: int, tp: int, strategy: str = "optim_grads_params") -> tuple[Any, DeviceMesh]:
    """Return the sharded model; its full weights are the same at all parallel sizes."""
    enter_rehearsal("transformer_engine")
    mesh = mesh_of(dp, tp)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    torch.manual_seed(0)
    whole = dict(Model(alone, 1).named_parameters())
    model: Any = Model(mesh["tp"].get_group(), tp)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(_part(name, whole[name], mesh.get_local_rank("tp"), tp))
    for unit in (*model.children(), model):
        shards = tensor_shards(unit, mesh=mesh, rules=TRANSFORMER_ENGINE_RULES)
        options = UnitOptions(tensor_shards=shards)
        fully_shard(unit, mesh=mesh["dp"], options=options, sharding_strategy=strategy)
    return model, mesh


def optimizer_of(model: nn.Module, **options: Any) -> Any:
    """Return Transformer Engine's FusedAdam of the parameters."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam(list(model.parameters()), lr=0.01, **options)


def train(model: Any, mesh: DeviceMesh, optimizer: Any, steps: range) -> list[float]:
    """Train on the data of four ranks, split among the data-parallel ranks; return the losses."""
    losses = []
    dp = mesh.size(0)
    for step in steps:
        total = torch.zeros(())
        mine = range(mesh.get_local_rank("dp"), 4, dp)
        for number in mine:
            model.set_requires_gradient_sync(number == mine[-1])
            generator = torch.Generator().manual_seed(10 * step + number)
            x = torch.randn(TOKENS, HIDDEN, generator=generator)
            loss = model(x).pow(3).mean() / len(mine)
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total, group=mesh["dp"].get_group())
        losses.append(float(total) / dp)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def save(folder: str, dp: int, tp: int) -> tuple[dict[str, str], list[float]]:
    """Train, save, and continue the training.

    Returns:
        Digests of the saved values, and losses of all steps.
    """
    model, mesh = sharded(dp, tp)
    optimizer = optimizer_of(model)
    losses = train(model, mesh, optimizer, range(STEPS))
    checkpoint.save(folder, model, optimizer)
    saved = digests(model, optimizer)
    return saved, losses + train(model, mesh, optimizer, range(STEPS, 2 * STEPS))


def load(folder: str, dp: int, tp: int, strategy: str) -> tuple[dict[str, str], list[float]]:
    """Load a checkpoint over other weights and state.

    Returns:
        Digests of the loaded values, and losses of the following steps.
    """
    model, mesh = sharded(dp, tp, strategy)
    optimizer = optimizer_of(model)
    train(model, mesh, optimizer, range(7, 8))
    checkpoint.load(folder, model, optimizer)
    loaded = digests(model, optimizer)
    return loaded, train(model, mesh, optimizer, range(STEPS, 2 * STEPS))


# ------------------------------------------------------------------------------ quantized modules


def quantized(amax_history_len: int = 4) -> nn.Sequential:
    """Return modules with extra state, after a forward and a backward in FP8."""
    te = enter_te()
    from transformer_engine.common.recipe import DelayedScaling

    torch.manual_seed(0)
    same: dict[str, Any] = dict(device="cpu")
    model = nn.Sequential(
        te.Linear(32, 32, **same), te.LayerNormMLP(32, 64, **same), te.RMSNorm(32, **same)
    )
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=amax_history_len)):
        model(torch.ones(16, 32)).sum().backward()
    return model


def weights_of(model: nn.Module) -> dict[str, Any]:
    """Return the state for torch's own checkpoint: no extra state of FP8 modules."""
    found = get_model_state_dict(model)
    return {name: value for name, value in found.items() if not name.endswith("_extra_state")}


def output_in_fp8(tp: int, *, names_mesh: bool) -> tuple[torch.Tensor, list[str]]:
    """Return all output columns of a column-parallel layer in FP8, and its warnings.

    The layer uses current scaling. One half of the weight is much smaller than the other.
    """
    te = enter_te()
    from transformer_engine.common.recipe import Float8CurrentScaling

    mesh = mesh_of(dist.get_world_size() // tp, tp)
    group = mesh["tp"].get_group()
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(64, 32, generator=generator) * torch.tensor([[1.0], [0.3]]).repeat(32, 1)
    whole[:32] *= 0.1
    x = torch.randn(16, 32, generator=generator)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        layer = te.Linear(
            32, 64, bias=False, parallel_mode="column", tp_group=group, tp_size=tp, device="cpu"
        )
        with torch.no_grad():
            layer.weight.copy_(whole.chunk(tp)[mesh.get_local_rank("tp")])
        shards = tensor_shards(layer, mesh=mesh, rules=TRANSFORMER_ENGINE_RULES)
        fully_shard(layer, mesh=mesh["dp"], options=UnitOptions(tensor_shards=shards))
        if names_mesh:
            name_amax_mesh(layer, mesh["tp"])
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            out = all_gather_tensor(layer(x).detach(), 1, group)
    return out, [str(warning.message) for warning in said]


EXTRA = "_extra_state"


@pytest.mark.parametrize(
    ("saved_at", "loaded_at", "strategy"),
    [
        ((1, 2), (2, 1), "optim_grads_params"),
        longer((2, 1), (1, 2), "no_shard"),
        longer((2, 2), (4, 1), "optim_grads"),
        longer((2, 2), (1, 1), "optim"),
        longer((1, 1), (2, 2), "optim_grads_params"),
    ],
)
def test_checkpoints_are_bitwise_identical_at_other_parallel_sizes(
    megatron_te: RankPools,
    tmp_path: Path,
    saved_at: tuple[int, int],
    loaded_at: tuple[int, int],
    strategy: str,
) -> None:
    ranks = saved_at[0] * saved_at[1]
    folder = str(tmp_path / "checkpoint")
    saves = megatron_te(ranks).run(save, folder, *saved_at, timeout_s=TIMEOUT_S)
    saved, losses = saves[0]
    assert len(set(losses)) == len(losses) == 2 * STEPS
    loads = megatron_te(loaded_at[0] * loaded_at[1]).run(
        load, folder, *loaded_at, strategy, timeout_s=TIMEOUT_S
    )
    for loaded, following in loads:
        assert loaded == saved
        assert following == pytest.approx(losses[STEPS:], rel=1e-5)


@on_te(2, way=WAYS)
def test_checkpoints_omit_extra_state_of_fp8_modules(tmp_path: Path, way: str) -> None:
    model, path = quantized(), tmp_path / "saved"
    lengths = [value.numel() for key, value in model.state_dict().items() if EXTRA in key]
    if way == "ours":
        checkpoint.save(path, model)
    else:
        dcp.save(weights_of(model), checkpoint_id=str(path))
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    before = [param.detach().full_tensor() for param in model.parameters()]  # type: ignore[attr-defined]
    # A longer amax history.
    other = quantized(16)
    fill(other, 0.0)
    if way == "ours":
        checkpoint.load(path, other)
    else:
        state = weights_of(other)
        dcp.load(state, checkpoint_id=str(path))
        set_model_state_dict(other, state, options=StateDictOptions(strict=False))
    after = [param.detach().full_tensor() for param in other.parameters()]  # type: ignore[attr-defined]
    assert any(lengths)
    assert not [name for name in names if EXTRA in name]
    assert all(map(torch.equal, before, after))


@on_te(2)
def test_named_amax_mesh_gives_every_shard_the_scale_of_the_full_weight() -> None:
    results = [
        output_in_fp8(tp, names_mesh=names_mesh)
        for tp, names_mesh in ((1, False), (2, True), (2, False))
    ]
    whole, named, not_named = (found for found, _ in results)
    # No warnings, neither with a named mesh nor without.
    assert not [line for _, said in results for line in said if "amax" in line or "mesh" in line]
    assert torch.equal(named, whole)
    assert not torch.equal(not_named, whole)


@on_te(2)
def test_experts_stacked_in_a_grouped_tensor_are_rejected_by_name() -> None:
    te = enter_te()
    with mock.patch.dict(os.environ, NVTE_GROUPED_LINEAR_SINGLE_PARAM="1"):
        experts = te.GroupedLinear(2, 32, 32, bias=False, single_grouped_weight=True, device="cpu")
    assert type(experts.weight).__name__ == "GroupedTensor"
    text = error_message(ValueError, lambda: fully_shard(experts))
    assert text.startswith("parameter weight is a GroupedTensor, which is made of other tensor")
    assert type(experts) is te.GroupedLinear


@pytest.mark.parametrize("dtype", [torch.bfloat16, longer(torch.uint8)], ids=str)
@on_te(2)
def test_checkpoints_of_state_with_scales_are_rejected(tmp_path: Path, dtype: torch.dtype) -> None:
    model, mesh = sharded(2, 1)
    optimizer = optimizer_of(model)
    checkpoint.save(tmp_path / "saved", model, optimizer)
    scaled = optimizer_of(model, exp_avg_dtype=dtype)
    train(model, mesh, scaled, range(1))
    for call in (checkpoint.save, checkpoint.load):
        with pytest.raises((ValueError, RuntimeError), match=f"exp_avg in {dtype}, with scal"):
            call(tmp_path / "saved", model, scaled)


@on_te(2)
def test_attention_without_weights_has_no_amax_mesh() -> None:
    te = enter_te()
    from transformer_engine.common.recipe import Float8CurrentScaling

    layer = te.Linear(32, 32, bias=False, device="cpu")
    attention = te.DotProductAttention(2, 16, attention_dropout=0.0)
    mesh = mesh_of(1, 2)["tp"]
    hooks = name_amax_mesh(nn.ModuleList([layer, attention]), mesh)
    with torch.no_grad(), te.autocast(enabled=True, recipe=Float8CurrentScaling()):
        x = layer(torch.randn(16, 32)).view(16, 1, 2, 16)
        assert attention(x, x, x).shape == (16, 1, 32)
    assert len(hooks) == 1


def test_invalid_amax_mesh_is_rejected() -> None:
    with pytest.raises(ValueError, match="the mesh for amaxes must have one axis"):
        name_amax_mesh(nn.Linear(2, 2), None)  # type: ignore[arg-type]
