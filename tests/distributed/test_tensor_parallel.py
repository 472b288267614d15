"""Tensor-parallel modules: DTensors of torch, plain TP-local shards with rules, tensor shards."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from megatron_fsdp_v2 import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    UnitOptions,
    checkpoint,
    fully_shard,
)
from megatron_fsdp_v2.checkpoint.entries import state_entries
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.dtensor.row_shards import TensorShard
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.tensor_parallel import (
    COLUMN,
    NORM_RULES,
    REPLICATED,
    FusedShard,
    TensorParallelRule,
    tensor_shards,
)
from tests.cases import quick_if
from tests.distributed.checkpoint_trainings import digests, muon
from tests.distributed.cut_parameters import Spec, full, part, tensor_shard
from tests.distributed.on_ranks import on_ranks
from tests.distributed.plain_parallel_model import RULES, WORDS, Column, parts, whole
from tests.distributed.wrapping import STRATEGIES, error_message, mesh_of, of_all_ranks
from tests.ranks import RankPools
from tests.reference.fused import FusedLinear
from tests.reference.models import Block, Checkpointed, Stack
from tests.reference.wrapping_momentum import WrappingMomentum

VOCAB, HIDDEN, FFN, SEQUENCE, BATCH = 10, 6, 8, 4, 3


def language(kind: Any = Stack, **options: Any) -> Any:
    """Embedding, two blocks, norm and head."""
    model = kind(2, HIDDEN, block=lambda width: Block(width, FFN), **options)
    model.input = nn.Embedding(VOCAB, HIDDEN)
    model.output = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False))
    return model


@functools.cache
def mesh_with_tp(*shape: int) -> DeviceMesh:
    """`(dp, tp)` or `(dp_outer, dp, tp)`; created once, since its groups are never destroyed."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp_outer", "dp", "tp")[-len(shape) :])


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """All axes of a mesh except the tensor-parallel axis."""
    return mesh[("dp_outer", "dp")[-(mesh.ndim - 1) :]]


def plain(seed: int = 0, *kind: Any, **options: Any) -> Any:
    """The unsharded model; `kind` and `options` are those of `language`."""
    torch.manual_seed(seed)
    return language(*kind, **options)


def parallelized(mesh: DeviceMesh, model: Any) -> Any:
    """The model with its sequence, vocabulary, columns and rows sharded over the last axis."""
    plan: dict[str, Any] = {
        "input": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "output.0": SequenceParallel(),
        "output.1": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for number in range(len(model.blocks)):
        plan[f"blocks.{number}.norm"] = SequenceParallel()
        plan[f"blocks.{number}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{number}.down"] = RowwiseParallel(output_layouts=Shard(1))
    return parallelize_module(model, mesh["tp"], plan)


def sharded(*shape: int, model: Any = None, seed: int = 0, **options: Any) -> Any:
    """The parallelized model, sharded over the data-parallel axes block by block."""
    mesh = mesh_with_tp(*shape)
    model = parallelized(mesh, plain(seed) if model is None else model)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=data_axes(mesh), **options)
    return model


def tokens_of(data_rank: int, step: int) -> torch.Tensor:
    """Tokens of one data-parallel rank in a step: `(BATCH, SEQUENCE)`."""
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    return torch.randint(VOCAB, (BATCH, SEQUENCE), generator=generator)


def loss_of(model: nn.Module, data_rank: int, step: int) -> torch.Tensor:
    """Cross entropy of predicting the next token, cyclically."""
    tokens = tokens_of(data_rank, step)
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def data_rank_of(mesh: DeviceMesh) -> int:
    """Data-parallel rank of this process."""
    return dist.get_rank() // mesh.size(mesh.ndim - 1)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_ranks: list[int],
    steps: range,
    clips: float = math.inf,
    loss: Callable[[Any, int, int], torch.Tensor] = loss_of,
) -> list[float]:
    """Train on the mean loss of data-parallel ranks; return gradient norms before clipping."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        torch.stack([loss(model, rank, step) for rank in data_ranks]).mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clips).item())
        optimizer.step()
    return norms


def full_error(model: nn.Module, reference: nn.Module) -> float:
    """Largest difference of weights from those of an unsharded model. Collective."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((p.full_tensor() - q).abs().max()) for p, q in pairs)  # type: ignore[attr-defined]


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if kind == "muon":
        return muon(model, lr=0.02, ns_dtype=torch.float32)
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def _sharded_by_rules(*shape: int, seed: int = 0, **options: Any) -> Any:
    """Plain TP-local shards, sharded by rules."""
    mesh = mesh_with_tp(*shape)
    model = parts(mesh, seed)
    for unit in (model.experts_up, model):
        of_unit = UnitOptions(tensor_shards=tensor_shards(unit, mesh=mesh, rules=RULES))
        fully_shard(unit, mesh=data_axes(mesh), options=of_unit, **options)
    return model


def _loss_of_words(model: Any, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randint(WORDS, (5,), generator=generator)).square().mean()


class OnWholeMesh(nn.Module):
    """Two layers whose parameters are DTensors over all axes of a mesh, or plain tensors."""

    def __init__(self, mesh: DeviceMesh | None = None, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.mesh, self.up, self.down = mesh, nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)
        if mesh is None:
            return
        places = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
        for name, param in list(self.named_parameters()):
            layer, _, attribute = name.partition(".")
            along = [*[Replicate()] * (mesh.ndim - 1), places.get(name, Replicate())]
            made = nn.Parameter(distribute_tensor(param.detach(), mesh, along))
            setattr(self.get_submodule(layer), attribute, made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return self.down(self.up(x).tanh())
        rows = [*[Shard(0)] * (self.mesh.ndim - 1), Replicate()]
        x = DTensor.from_local(x, self.mesh, rows, run_check=False)
        return self.down(self.up(x).tanh()).redistribute(placements=rows).to_local()


def _by_dims(*shape: int, flat: bool, seed: int = 0, model: Any = None, **options: Any) -> Any:
    """A model over a whole mesh, whose data-parallel axes are named; flattened if `flat`."""
    mesh = mesh_with_tp(*shape)
    names = mesh.mesh_dim_names[:-1]
    dims = DataParallelMeshDims(shard=names if flat else names[-1])
    if not flat and len(names) > 1:
        dims.replicate = names[0]
    model = OnWholeMesh(mesh, seed) if model is None else model
    for unit in (model.up, model):
        fully_shard(unit, mesh=mesh, dp_mesh_dims=dims, **options)
    return model


class OnOwnRows(nn.Module):
    """Two layers that every tensor-parallel rank has whole, and computes with on its rows."""

    def __init__(self, mesh: DeviceMesh | None = None, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.mesh, self.up, self.down = mesh, nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x
        if self.mesh is not None:
            axis = self.mesh.ndim - 1
            rows = x.tensor_split(self.mesh.size(axis))[self.mesh.get_local_rank(axis)]
        # Mean squares of the ranks add up to that of all rows.
        return self.down(self.up(rows).tanh()) * (len(rows) / len(x)) ** 0.5


def _on_own_rows(*shape: int, seed: int = 0, **options: Any) -> Any:
    mesh = mesh_with_tp(*shape)
    model = OnOwnRows(mesh, seed)
    shards = dict.fromkeys(model.parameters(), TensorShard(mesh, None, sums_gradients=True))
    of_unit = UnitOptions(tensor_shards=shards)
    return _by_dims(*shape, flat=False, model=model, options=of_unit, **options)


def _loss_of_rows(model: Any, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(BATCH, HIDDEN, generator=generator)).square().mean()


@dataclass(frozen=True)
class Way:
    """An unsharded model, the same model over a mesh, and the loss of one data-parallel rank."""

    whole: Callable[[], Any]
    sharded: Callable[..., Any]
    loss: Callable[[Any, int, int], torch.Tensor]

    def train(self, model: Any, optimizer: Any, data_ranks: list[int], steps: int) -> list[float]:
        """Train; return gradient norms before clipping."""
        return train(model, optimizer, data_ranks, range(steps), clips=0.5, loss=self.loss)


WAYS = {
    "parallelize_module": Way(plain, sharded, loss_of),
    "rules": Way(whole, _sharded_by_rules, _loss_of_words),
    "dp_mesh_dims": Way(OnWholeMesh, partial(_by_dims, flat=False), _loss_of_rows),
    "flattened": Way(OnWholeMesh, partial(_by_dims, flat=True), _loss_of_rows),
    "summed gradients": Way(OnOwnRows, _on_own_rows, _loss_of_rows),
}
KINDS = [(strategy, "sgd") for strategy in STRATEGIES]
KINDS += [(STRATEGIES[-1], "adamw"), (STRATEGIES[-1], "muon")]


@pytest.mark.parametrize(
    ("shape", "strategy", "kind"),
    [
        quick_if(
            (strategy, kind) in (KINDS[1:4:2] if shape == (2, 2) else KINDS[3:4]),
            shape,
            strategy,
            kind,
        )
        for shape in ((2, 2), (1, 2, 2))
        for strategy, kind in KINDS
    ],
)
@on_ranks("shape", way=WAYS)
def test_training_equals_the_unsharded_loop(
    way: str, shape: tuple[int, ...], strategy: str, kind: str
) -> None:
    mesh, how = mesh_with_tp(*shape), WAYS[way]
    if way == "rules" and kind == "muon":
        kind = "adamw"
    model, reference = how.sharded(*shape, sharding_strategy=strategy), how.whole()
    ranks = list(range(mesh.size() // shape[-1]))
    mine = how.train(model, _optimizer(kind, model), [data_rank_of(mesh)], 3)
    theirs = how.train(reference, _optimizer(kind, reference), ranks, 3)
    tolerance = 1e-5 if kind == "muon" else 1e-6
    assert full_error(model, reference) < tolerance
    assert mine == pytest.approx(theirs, abs=tolerance, rel=tolerance)


# -- checkpoints ----------------------------------------------------------------------------------


def _states(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Torch's state dicts, and separately the extra state, which differs between ranks."""
    weights, states = get_state_dict(model, optimizer)
    extra = {name: weights.pop(name) for name in list(weights) if "_extra_state" in name}
    return {"model": weights, "optimizer": states}, extra


def _saved(folder: str, way: str) -> dict[str, str]:
    how = WAYS[way]
    model = how.sharded(2, 2)
    optimizer = _optimizer("adamw", model)
    how.train(model, optimizer, [data_rank_of(mesh_with_tp(2, 2))], 2)
    checkpoint.save(f"{folder}/ours", model, optimizer)
    dcp.save(_states(model, optimizer)[0], checkpoint_id=f"{folder}/torch")
    if dist.get_rank() == 0:
        checkpoint.export(f"{folder}/ours", f"{folder}/plain.pt")
    dist.barrier()
    loaded = torch.load(f"{folder}/plain.pt", weights_only=True)
    for name, param in model.named_parameters():
        assert torch.equal(loaded[name], param.full_tensor()), name
    return digests(model, optimizer)


def _loaded(folder: str, way: str, shape: tuple[int, ...], strategy: str) -> list[dict[str, str]]:
    """Digests of the states that this package and torch load."""
    found = []
    for kind in ("ours", "torch"):
        model = WAYS[way].sharded(*shape, seed=1, sharding_strategy=strategy)
        optimizer = _optimizer("adamw", model)
        if kind == "ours":
            checkpoint.load(f"{folder}/ours", model, optimizer)
        else:
            state, extra = _states(model, optimizer)
            dcp.load(state, checkpoint_id=f"{folder}/torch")
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"] | extra,
                optim_state_dict=state["optimizer"],
            )
        found.append(digests(model, optimizer))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_loads_bit_equal_at_other_data_and_tensor_parallel_sizes(
    pools: RankPools, tmp_path: Path, way: str
) -> None:
    saved = pools(4).run(_saved, str(tmp_path), way)[0]
    stored = CheckpointFolder(tmp_path / "ours").entries
    assert not any("_extra_state" in key for key in stored)
    assert len(saved) > 12
    for number, shape in enumerate([(2, 1), (1, 2), (4, 1), (1, 1), (2, 2)]):
        strategy = STRATEGIES[number % len(STRATEGIES)]
        for found in pools(shape[0] * shape[1]).run(_loaded, str(tmp_path), way, shape, strategy):
            assert found == [saved, saved], shape


# -- recomputation, pool, outer axes and frozen layers -------------------------------------------


def _frozen() -> Any:
    model = plain()
    model.blocks[0].up.requires_grad_(False)
    return model


_RECOMPUTED = partial(plain, 0, Checkpointed)
VARIANTS: dict[str, Callable[[], Any]] = {
    "recomputed": lambda: sharded(2, 2, model=_RECOMPUTED(use_reentrant=False)),
    "trace pool": lambda: sharded(2, 2, enable_trace_pool=True),
    "outer axis, sharded": lambda: sharded(2, 1, 2, outer_dp_sharding_strategy="optim"),
    "frozen": lambda: sharded(2, 2, model=_frozen()),
}


@pytest.mark.slow
@on_ranks(4, name=VARIANTS)
def test_variants_of_a_step_train_like_the_unsharded_model(name: str) -> None:
    model, reference = VARIANTS[name](), _frozen() if name == "frozen" else plain()
    train(model, _optimizer("sgd", model), [data_rank_of(mesh_with_tp(2, 2))], range(5))
    train(reference, _optimizer("sgd", reference), [0, 1], range(5))
    assert full_error(model, reference) < 1e-6


@on_ranks(2)
def test_gathered_parameters_are_dtensors_over_the_tensor_parallel_mesh() -> None:
    model = sharded(1, 2)
    model.blocks[0].down.weight.marked = True
    loss_of(model, 0, 0).backward()
    assert all(type(p.data) is UnevenDTensor for p in model.parameters())
    block = model.blocks[0]
    block.unshard()
    weight = block.up.weight
    assert weight.placements == (Shard(0),)
    assert block.down.weight.placements == (Shard(1),)
    assert block.down.bias.placements == (Replicate(),)
    assert weight.device_mesh.mesh_dim_names == ("tp",)
    assert weight.is_leaf and weight.requires_grad
    assert weight is block._fsdp_unit.groups[0].unsharded_params[2]


@on_ranks(2)
def test_state_dict_of_a_parallelized_model_loads_into_a_model_from_meta() -> None:
    with torch.device("meta"):
        skeleton = language()
    model = sharded(1, 2, model=skeleton)
    for seed, assign in ((3, False), (4, True)):
        given = parallelized(mesh_with_tp(1, 2), plain(seed)).state_dict()
        model.load_state_dict(given, assign=assign)
        loss_of(model, 0, 0)
        assert full_error(model, plain(seed)) == 0.0


@on_ranks(4)
def test_a_file_of_one_rank_holds_its_tensor_parallel_rows() -> None:
    first, second, file = sharded(2, 2), sharded(2, 2, seed=1), io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert full_error(second, plain()) == 0.0


@on_ranks(2)
def test_replicated_parameters_from_meta_are_the_same_on_all_tensor_parallel_ranks() -> None:
    # Ranks are seeded differently, as in a training with dropout.
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    mesh = mesh_with_tp(1, 2)
    parallelize_module(model, mesh["tp"], {"0": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    bias = model[0].bias.to_local().detach()
    assert torch.equal(*of_all_ranks(bias)) and bool(bias.any())


@on_ranks(2)
def test_buffers_from_meta_may_be_dtensors() -> None:
    mesh = mesh_with_tp(2, 1)
    with torch.device("meta"):
        model: Any = nn.BatchNorm1d(4)
    variance = distribute_tensor(model.running_var, mesh["tp"], [Replicate()])
    model.register_buffer("running_var", variance)
    fully_shard(model, mesh=mesh["dp"])
    assert model.running_var.to_local().tolist() == [1.0] * 4


# -- rejected DTensors ---------------------------------------------------------------------------


@on_ranks(4)
def test_norms_over_two_meshes_are_rejected_with_advice_that_works() -> None:
    mesh = mesh_with_tp(2, 2)

    def trained(*, described: bool | None) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        if described is not None:
            plan = {"0": ColwiseParallel(output_layouts=Replicate())}
            parallelize_module(model, mesh["tp"], plan)
            rules = [TensorParallelRule(nn.Module, REPLICATED)]
            shards = tensor_shards(model, mesh=mesh, rules=rules) if described else {}
            # Separate units, so that every rank has rows of both.
            for unit in (*model, model):
                fully_shard(unit, mesh=mesh["dp"], options=UnitOptions(tensor_shards=shards))
        model(torch.arange(16.0).view(2, 8)).square().sum().backward()
        return model.parameters()

    def norm(*, described: bool | None) -> float:
        return float(nn.utils.clip_grad_norm_(trained(described=described), 1.0).item())

    rejected = error_message(ValueError, lambda: norm(described=False))
    ratio = norm(described=True) / norm(described=None)
    assert "tensors over two meshes" in rejected and "REPLICATED" in rejected
    assert ratio == pytest.approx(1.0, rel=1e-5)


@on_ranks(4)
def test_dtensors_that_cannot_be_sharded_are_rejected_by_name() -> None:
    mesh, other = mesh_with_tp(2, 2), init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))

    def shard(param: Any, data: Any = None, **options: Any) -> str:
        module = nn.Linear(4, 4, bias=False)
        module.weight = nn.Parameter(param)
        shards = {module.weight: TensorShard(mesh, 0)} if options else {}
        of_unit = UnitOptions(tensor_shards=shards)
        return error_message(
            ValueError, lambda: fully_shard(module, mesh=data or mesh["dp"], options=of_unit)
        )

    def over(tensor: Any, *placements: Any, rows: int = 4) -> Any:
        return DTensor.from_local(torch.ones(rows, 4), tensor, placements, run_check=False)

    nameless = init_device_mesh("cpu", (4,))
    another = "not an axis of the same mesh"
    found = [
        ("mesh['tp']", shard(over(mesh["dp"], Shard(0)))),
        (another, shard(over(mesh["dp"], Shard(0)))),
        (another, shard(over(other, Shard(0)))),
        ("still to be summed", shard(over(mesh["tp"], Partial()))),
        ("parallelize over a 1-D mesh", shard(over(mesh, Replicate(), Shard(0)))),
        ("no names of axes", shard(over(mesh["tp"], Shard(0)), data=nameless)),
        ("unequal parts", shard(distribute_tensor(torch.ones(5, 4), mesh["tp"], [Shard(0)]))),
        ("leave it out of tensor_shards", shard(over(mesh["tp"], Shard(0)), described=True)),
    ]
    for text, message in found:
        assert "parameter weight" in message and text in message


# -- rejected rules and tensor shards ------------------------------------------------------------


@on_ranks(2)
def test_invalid_rules_are_rejected_by_name() -> None:
    mesh = mesh_with_tp(1, 2)

    def described(module: nn.Module, *rules: TensorParallelRule, over: Any = mesh) -> str:
        return error_message(ValueError, lambda: tensor_shards(module, mesh=over, rules=rules))

    tied = nn.ModuleDict({"column": Column(4, 4), "linear": nn.Linear(4, 4, bias=False)})
    tied["linear"].weight = tied["column"].weight
    for text, placements in {
        "has no pattern for it": {"kernel": Shard(0)},
        "has no dimension 2": {"*": Shard(2)},
        "use Shard, Replicate or FusedShard": {"*": Partial()},
        "cannot be divided into 3 equal matrices": {"*": FusedShard(0, 3)},
    }.items():
        assert text in described(Column(4, 4), TensorParallelRule(Column, placements))
    no_rule = described(nn.Sequential(nn.Linear(4, 4)), *RULES)
    assert "parameter 0.weight of shape (4, 4) of Linear is unknown: no rule matches" in no_rule
    linear = TensorParallelRule(nn.Linear, REPLICATED)
    assert "linear.weight is tied" in described(tied, *RULES, linear)
    one_axis = described(nn.LayerNorm(4), *NORM_RULES, over=mesh["tp"])
    assert "then the tensor-parallel axis" in one_axis
    for cls in ("Linear", torch.Tensor):
        assert "import path" in error_message(
            ValueError, lambda cls=cls: TensorParallelRule(cls, COLUMN)
        )


WEIGHTS = {
    "column": Spec((FFN, HIDDEN), 0),
    "gated": Spec((2 * FFN, HIDDEN), 0, num_pieces=2),
    "row": Spec((HIDDEN, FFN), 1),
    "norm": Spec((HIDDEN,)),
}


def _whole(name: str) -> torch.Tensor:
    return full(sorted(WEIGHTS).index(name), WEIGHTS[name].shape)


class _Parts(nn.Module):
    """TP-local shards of a rank; gradients are a function of the full weights."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        for name, spec in WEIGHTS.items():
            value = part(_whole(name), spec, rank, size)
            self.register_parameter(name, nn.Parameter(value.clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() * sum((p**3).sum() for p in self.parameters())  # type: ignore[return-value]


def _sharded(dp: int, tp: int, strategy: str) -> Any:
    both = mesh_of(dp, tp)
    model = _Parts(both.get_local_rank(1), tp)
    shards = {p: tensor_shard(p, WEIGHTS[name], both) for name, p in model.named_parameters()}
    options = UnitOptions(tensor_shards=shards)
    return fully_shard(model, mesh=both["outer"], sharding_strategy=strategy, options=options)


@on_ranks(2, sizes=[(1, 2), (2, 1)], strategy=STRATEGIES[-1:])
def test_state_wrapped_by_an_optimizer_has_the_rows_of_its_parameter(
    sizes: tuple[int, int], strategy: str
) -> None:
    """The optimizer creates the state as plain DTensors."""
    model = _sharded(*sizes, strategy)
    optimizer = WrappingMomentum(model.parameters(), lr=0.1)
    model(torch.ones(3)).backward()
    optimizer.step()
    entries = state_entries(optimizer, {p: name for name, p in model.named_parameters()})
    assert len(entries) == len(WEIGHTS)
    assert {type(value) for value in entries.values()} == {UnevenDTensor}


@on_ranks(4)
def test_pieces_of_a_gated_layer_are_its_full_halves() -> None:
    model = _sharded(2, 2, "optim_grads_params")
    gate, up = model.gated.pieces()
    whole = _whole("gated")
    assert gate.shape == up.shape == (FFN, HIDDEN)
    assert torch.equal(gate.full_tensor(), whole[:FFN])
    assert torch.equal(up.full_tensor(), whole[FFN:])
    assert [piece.shape for piece in model.row.pieces()] == [model.row.shape]


@on_ranks(4)
def test_broadcast_from_rank_0_loads_weights_and_rejects_fused_sub_tensors() -> None:
    model = _sharded(2, 2, "optim_grads_params")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    spread = partial(set_model_state_dict, model, options=options)

    def given(*names: str) -> dict[str, torch.Tensor]:
        return {name: _whole(name) + 1 for name in names if dist.get_rank() == 0}

    single = [name for name, spec in WEIGHTS.items() if spec.num_pieces == 1]
    spread(given(*single))
    for name in single:
        assert torch.equal(getattr(model, name).full_tensor(), _whole(name) + 1), name
    assert "each sub-tensor of a fused" in error_message(
        RuntimeError, lambda: spread(given(*WEIGHTS))
    )


@on_ranks(4)
def test_invalid_tensor_shards_are_rejected_by_name() -> None:
    data, both = mesh_of(2, 2)["outer"], mesh_of(2, 2)

    def shard(**kwargs: Any) -> Any:
        model = nn.Linear(4, 4, bias=False)
        tensor = TensorShard(**{"mesh": both, "dim": 0, **kwargs})
        options = UnitOptions(tensor_shards={model.weight: tensor})
        return fully_shard(model, mesh=data, options=options)

    swapped = DeviceMesh.from_group(
        [both.get_group(1), both.get_group(0)], "cpu", mesh=both.mesh.T, mesh_dim_names=("a", "b")
    )
    one = error_message(ValueError, lambda: shard(mesh=data))
    assert "parameter weight" in one and "one more" in one
    assert "one more" in error_message(ValueError, lambda: shard(mesh=swapped))
    assert "no dimension 2" in error_message(ValueError, lambda: shard(dim=2))
    assert "add up to the 4" in error_message(ValueError, lambda: shard(pieces=(1, 2)))


@on_ranks(2)
def test_gradients_of_fused_kernels_cannot_be_summed_over_ranks() -> None:
    mesh, layer = mesh_with_tp(1, 2), FusedLinear(4, "add")
    shards = dict.fromkeys(layer.parameters(), TensorShard(mesh, None, sums_gradients=True))
    fully_shard(layer, mesh=mesh["dp"], options=UnitOptions(tensor_shards=shards))
    loss = layer(torch.ones(2, 4)).sum()
    rejected = error_message(RuntimeError, loss.backward)
    assert "a fused kernel wrote the gradient of weight" in rejected


class OfLocalRows(nn.Module):
    """Multiplies this rank's rows by a replicated weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if isinstance(weight, DTensor):
            weight = weight.to_local(grad_placements=[Partial()])
        return rows * weight


@on_ranks(2)
def test_gradients_are_summed_over_tensor_parallel_ranks_in_the_communication_dtype() -> None:
    mesh, ones = mesh_with_tp(1, 2), torch.ones(1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, grad_comm_dtype=torch.float32)
    plain = OfLocalRows(ones)
    sums = UnitOptions(tensor_shards={plain.weight: TensorShard(mesh, None, sums_gradients=True)})
    replicated = OfLocalRows(distribute_tensor(ones, mesh["tp"], [Replicate()]))
    for module, options in ((plain, sums), (replicated, None)):
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy, options=options)
        # In bfloat16, 256 + 1 is 256.
        module(torch.tensor([256.0 if dist.get_rank() == 0 else 1.0])).sum().backward()
        assert module.weight.grad.full_tensor().item() == 257


@on_ranks(3)
def test_separate_parameter_is_sharded_independently_of_other_parameters() -> None:
    def cuts(rows: int) -> Any:
        model = nn.ModuleDict({"shared": nn.Linear(4, 5), "other": nn.Linear(3, rows)})
        model.__class__ = type("Both", (nn.ModuleDict,), {"forward": lambda self, x: x})
        fully_shard(model, options=UnitOptions(separate_params={model["shared"].weight}))
        return model["shared"].weight.local_rows

    assert cuts(2) == cuts(31)
