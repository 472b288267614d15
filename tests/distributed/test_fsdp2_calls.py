"""What is typed for FSDP2 works here, or says what to type."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_v2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    backward_both,
    batch,
    listen,
    said,
    step_all,
    weight_error,
    wrap,
)
from tests.reference.models import INPUT, Stack


@dataclasses.dataclass
class _Elsewhere:
    """A policy of some library, with more to say than there is here."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


@dataclasses.dataclass
class _OfTorch215:
    """The field that torch's policy has from 2.15 on."""

    param_dtype: torch.dtype | None = None
    param_dtype_override_fn: Any = None


@dataclasses.dataclass
class _OnAnotherMesh:
    """As torch 2.15's `ShardPlacementResult`."""

    placement: Shard
    mesh_info: Any = None


def test_policies_of_other_libraries_mean_what_they_do_there() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    theirs = fsdp.MixedPrecisionPolicy
    assert MixedPrecisionPolicy.of(None) == MixedPrecisionPolicy()
    assert MixedPrecisionPolicy.of(theirs()) == MixedPrecisionPolicy()
    # Torch 2.15 changed what it means to leave `reduce_dtype` out, for its newer class alone.
    follows = fp32 if torch.__version__ >= (2, 15) else bf16
    assert MixedPrecisionPolicy.of(theirs(param_dtype=bf16)).resolve(fp32).grad_comm == follows
    for old in (fsdp.MixedPrecision(bf16), _Elsewhere(bf16)):
        assert MixedPrecisionPolicy.of(old).resolve(fp32).grad_comm == bf16
    full = theirs(bf16, reduce_dtype=fp32, output_dtype=fp32, cast_forward_inputs=False)
    assert MixedPrecisionPolicy.of(full) == MixedPrecisionPolicy(
        param_dtype=bf16, grad_comm_dtype=fp32, output_dtype=fp32, cast_forward_inputs=False
    )


REFUSED: dict[str, dict[str, Any]] = {
    "mp_policy must be a MixedPrecisionPolicy": {"mp_policy": torch.bfloat16},
    "whose buffer_dtype cannot be honored": {"mp_policy": _Elsewhere(buffer_dtype=torch.float32)},
    "whose param_dtype_override_fn cannot be honored": {
        "mp_policy": _OfTorch215(param_dtype_override_fn=lambda param: None)
    },
    "reshard_after_forward must be True, False or None, got 2": {"reshard_after_forward": 2},
    "reshard_after_forward must be True, False or None, got 'yes'": {
        "reshard_after_forward": "yes"
    },
    "offload_policy='cpu' cannot be honored; give": {"offload_policy": "cpu"},
    "dp_mesh_dims='dp' cannot be honored: give the data-parallel axes as the mesh": {
        "dp_mesh_dims": "dp"
    },
    "shard_placement_fn returns S(1) for parameter weight; parameters are sharded by": {
        "shard_placement_fn": lambda param: Shard(1) if param.ndim > 1 else None
    },
    "make a module whose parameters have another mesh a unit with that mesh": {
        "shard_placement_fn": lambda param: _OnAnotherMesh(Shard(0))
    },
}


@on_ranks(4, text=REFUSED)
def test_arguments_without_a_meaning_here_say_so(text: str) -> None:
    assert text in said(ValueError, lambda: fully_shard(nn.Linear(4, 4), **REFUSED[text]))


@on_ranks(2)
def test_a_call_typed_for_fsdp2_trains_as_it_does_there() -> None:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": None,
        "mp_policy": policy,
        "offload_policy": fsdp.OffloadPolicy(),
        "shard_placement_fn": lambda param: Shard(0),
        "ignored_params": None,
    }
    torch.manual_seed(0)
    plain = Stack()
    models = []
    for shard in (fully_shard, fsdp.fully_shard):
        model: Any = copy.deepcopy(plain)
        shard(model.blocks[0], **options, reshard_after_forward=1)
        shard(model.blocks[1], **options, reshard_after_forward=dist.get_world_size())
        shard(model, **options, reshard_after_forward=None)
        models.append(model)
    wire = listen(models[0])
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            torch.manual_seed(10 * step + dist.get_rank())
            model(torch.randn(4, INPUT)).float().square().mean().backward()
            step_all(optimizer)
    pairs = zip(*(model.parameters() for model in models), strict=True)
    same = all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)
    mine = models[0]
    units = [unit_of(module) for module in (mine, mine.blocks[0], mine.blocks[1])]
    assert wire.dtypes(gathers=True) == {torch.bfloat16}
    assert wire.dtypes(gathers=False) == {torch.float32}
    assert same
    assert [unit.reshard_after_forward for unit in units] == [True, False, True]
    assert units[0].groups[0].mesh is units[1].groups[0].mesh


class Framed(Stack):
    """Blocks between two layers that are one unit; one of them, or a block, may be recomputed."""

    recomputed = ""
    use_reentrant = False
    uses_output = True

    def _run(self, name: str, module: nn.Module, x: torch.Tensor) -> Any:
        if name == self.recomputed:
            return checkpoint(module, x, use_reentrant=self.use_reentrant)
        return module(x)

    def forward(self, x: torch.Tensor) -> Any:
        x = self._run("input", self.input, x)
        for block in self.blocks:
            x = self._run("block", block, x)
        return self._run("output", self.output, x) if self.uses_output else x


def _distance_of_steps(plain: Any, model: Any) -> float:
    """Largest difference of weights to those of a plain model, after steps on all ranks' data."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step).requires_grad_()).square().mean()

    for step in range(2):
        with torch.no_grad():
            model(batch(0))
        backward_both(plain, model, step, loss)
        step_all(*optimizers)
    return weight_error(model, plain)


LISTS = [("", False), ("input", False), ("output", False), ("block", True), ("output", True)]


@on_ranks(2)
def test_several_modules_are_one_unit_from_the_first_to_the_last() -> None:
    distances = {}
    torch.manual_seed(0)
    plain = Framed()
    for strategy in STRATEGIES:
        for recomputed, reentrant in LISTS if strategy.startswith("optim_grads") else LISTS[:1]:
            model = copy.deepcopy(plain)
            outer = [model.input, model.output]
            assert fully_shard(outer, sharding_strategy=strategy) is outer
            wrap(model, model.blocks, sharding_strategy=strategy)
            model.recomputed, model.use_reentrant = recomputed, reentrant
            reference = copy.deepcopy(plain)
            found = _distance_of_steps(reference, model)
            distances[f"{strategy} {recomputed} {reentrant}"] = found
    wire = listen(model)
    with torch.no_grad():
        model(batch(0))
        whole = wire.count("all_gather")
        model.uses_output = False
        model(batch(0))
    unit = unit_of(model.output)
    assert unit is unit_of(model.input) and not unit.is_unsharded and unit.is_idle
    without_output = wire.count("all_gather") - whole
    names = [unit.name, *unit.groups[0].names]
    assert len(distances) == 12
    assert {name: d for name, d in distances.items() if d > 1e-6} == {}
    assert whole == without_output == 4
    assert names[0] == "input, output (Linear, Linear)"
    assert set(names[1:]) == {"0.weight", "0.bias", "1.weight", "1.bias"}


@on_ranks(2)
def test_several_modules_need_no_module_around_them() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(INPUT, 4), nn.Tanh(), nn.Linear(4, 2))
    model = copy.deepcopy(plain)
    fully_shard([model[0], model[2]])
    found = _distance_of_steps(plain, model)
    inner = nn.Linear(2, 2)
    around = nn.Sequential(inner)
    fully_shard([around, inner, around])
    assert not isinstance(inner, FSDPModule)
    mixed = said(ValueError, lambda: fully_shard([nn.Linear(2, 2), "head"]))
    assert found < 1e-6
    assert "got an empty list" in said(ValueError, lambda: fully_shard([]))
    assert "needs an nn.Module, got str" in mixed
