"""What a step of Muon costs, counted; its state; and bad input."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_fsdp_v2.comm.interface import Collective
from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of
from megatron_fsdp_v2.optim import MatrixEngine, MatrixFunction, Muon, newton_schulz_flops
from tests.distributed.checkpoint_trainings import block_muon, torch_loads, torch_saves
from tests.distributed.muon_cases import (
    Place,
    Spec,
    error,
    full,
    give,
    gradients,
    plain,
    sharded,
    whole,
)
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import mesh_of, of_all_ranks, said, wrap
from tests.ranks import RankPools
from tests.reference.models import Stack
from tests.reference.muon import ReferenceMuon

SPECS = tuple(Spec(shape) for shape in ((8, 6), (6, 8), (3, 4, 5), (8, 6), (9, 4), (2, 10)))
TOTAL_FLOPS = sum(
    newton_schulz_flops(*spec.shape[-2:]) * math.prod(spec.shape[:-2]) for spec in SPECS
)


def _stepped(specs: Sequence[Spec], place: Place, **options: Any) -> tuple[list[Any], Muon]:
    """Parameters after one step, with gradients for the next one."""
    params = sharded(specs, place)
    optimizer = Muon(params, **options)
    for step in range(2):
        give(params, gradients(specs, step))
        if step == 0:
            optimizer.step()
    return params, optimizer


def _engine(optimizer: Muon) -> MatrixEngine:
    assert optimizer._engine is not None
    return optimizer._engine[1]


# -- counted --------------------------------------------------------------------------------------


def collectives(place: Place) -> Counter[str]:
    """Collectives of a step that is not the first, of one bucket, by name."""
    _, optimizer = _stepped(SPECS, place)
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert sum(work.ownership.num_buckets for work in _engine(optimizer).works) == 1
    names = [event.name for event in profile.events()]
    return Counter(name for name in names if name.startswith(("gloo:", "c10d::")))


@on_ranks(3)
def test_a_bucket_is_one_pair_of_all_to_alls_and_nothing_else() -> None:
    assert collectives(Place((3,))) == {"gloo:all_to_all": 2, "c10d::alltoall_base_": 2}


@on_ranks(3)
def test_replicas_are_sent_results_alone() -> None:
    found = collectives(Place((3,), "no_shard"))
    assert found == {"gloo:all_to_all": 1, "c10d::alltoall_base_": 1}


@pytest.mark.parametrize("place", [Place((1,)), Place((3,), granularity="tensor")], ids=str)
@on_ranks("place")
def test_what_is_whole_on_its_rank_is_not_communicated(place: Place) -> None:
    assert not collectives(place)


class _Counting:
    """A communicator that notes how much this rank sends in every all-to-all."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.sent: list[int] = []

    def issue(self, collective: Collective, *, async_op: bool) -> Any:
        numels = (collective.input_numels, collective.output_numels)
        assert not any(n[collective.axis.rank] for n in numels), "what stays is not communicated"
        self.sent.append(collective.input.numel())
        return self._inner.issue(collective, async_op=async_op)


@on_ranks(4)
def test_every_bucket_is_a_pair_and_sends_what_was_planned() -> None:
    params = sharded(SPECS, Place((4,)))
    function = MatrixFunction(lambda stack: stack, lambda m, n: m * n)
    engine = MatrixEngine(params, [function] * len(params), bucket_numel=1)
    (work,) = engine.works
    work.communicator = wire = _Counting(work.communicator)
    values = [local_of(param).detach() for param in params]
    engine.run(values)
    sent, own = sum(wire.sent), sum(value.numel() for value in values)
    pairs = zip(work.ownership.matrices, work.ownership.buckets, strict=True)
    num_cut = len({bucket for matrix, bucket in pairs if not matrix.whole_at})
    all_sent, all_own = sum(of_all_ranks(sent)), sum(of_all_ranks(own))
    assert num_cut > 1
    assert len(wire.sent) == 2 * num_cut
    assert sent == work.sent_numel
    assert 0 < all_sent <= 2 * all_own


@pytest.mark.parametrize(
    "place",
    [Place((4,)), Place((4,), "no_shard"), Place((2, 2)), Place((2, 2), outer="optim")],
    ids=str,
)
@on_ranks(4)
def test_every_matrix_is_worked_on_once_where_it_was_planned(place: Place) -> None:
    _, optimizer = _stepped(SPECS, place)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    measured = counter.get_total_flops()
    everywhere = of_all_ranks(measured)
    assert measured == sum(work.flops for work in _engine(optimizer).works)
    assert sum(everywhere) == TOTAL_FLOPS
    # Seven matrices, the three of the stack where they are: nobody does more than half.
    assert measured < TOTAL_FLOPS / 2


# -- state ----------------------------------------------------------------------------------------


def _model(**options: Any) -> tuple[Any, Muon]:
    torch.manual_seed(0)
    model = Stack().double()
    if options:
        wrap(model, **{**options, "mesh": mesh_of(*options["mesh"])})
    return model, block_muon(model, lr=0.05, ns_dtype=torch.float64)


def _go_on(model: nn.Module, optimizer: Muon, steps: range) -> None:
    params = list(model.parameters())
    for step in steps:
        # The same gradients wherever a parameter is.
        give(params, [full(100 * step + i, p.shape, p.dtype) for i, p in enumerate(params)])
        optimizer.step()


def save_trained(folder: str) -> None:
    """Two steps, and a checkpoint."""
    model, optimizer = _model(mesh=(3,))
    _go_on(model, optimizer, range(2))
    torch_saves(folder, model, optimizer)


def check_going_on(folder: str, **options: Any) -> None:
    """See that what is loaded is the unsharded training's state, and two steps later again."""
    plain_model, plain_optimizer = _model()
    _go_on(plain_model, plain_optimizer, range(2))
    model, optimizer = _model(**options)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    torch_loads(folder, model, optimizer)
    pairs = list(zip(model.parameters(), plain_model.parameters(), strict=True))
    for mine, theirs in pairs:
        state = optimizer.state[mine]
        assert state.keys() == plain_optimizer.state[theirs].keys()
        for key, value in plain_optimizer.state[theirs].items():
            found = whole(state[key])
            # Momenta of Muon are sums of gradients, bitwise identical.
            is_exact = key in ("momentum_buffer", "step")
            assert torch.equal(found, value) if is_exact else error([found], [value]) < 1e-12, key
        assert error([whole(mine)], [theirs.detach()]) < 1e-12
    for either, its in ((plain_model, plain_optimizer), (model, optimizer)):
        _go_on(either, its, range(2, 4))
    assert max(error([whole(a)], [b.detach()]) for a, b in pairs) < 1e-12


def test_a_training_goes_on_at_other_world_sizes_and_strategies(
    pools: RankPools, tmp_path: Path
) -> None:
    pools(3).run(save_trained, str(tmp_path))
    pools(1).run(check_going_on, str(tmp_path), mesh=(1,))
    pools(2).run(check_going_on, str(tmp_path), mesh=(2,), sharding_strategy="optim")
    pools(4).run(check_going_on, str(tmp_path), mesh=(4,))
    pools(4).run(check_going_on, str(tmp_path), mesh=(2, 2), outer_dp_sharding_strategy="optim")
    pools(4).run(check_going_on, str(tmp_path), mesh=(4,), sharding_strategy="no_shard")


def test_a_copied_optimizer_steps_like_the_original() -> None:
    params = plain(SPECS)
    optimizer = Muon(params, ns_dtype=torch.float32)
    give(params, gradients(SPECS, 0))
    optimizer.step()
    other = copy.deepcopy(optimizer)
    copies = other.param_groups[0]["params"]
    for who, those in ((optimizer, params), (other, copies)):
        give(those, gradients(SPECS, 1))
        who.step()
    assert all(torch.equal(a, b) for a, b in zip(params, copies, strict=True))


def test_state_dicts_are_handed_over() -> None:
    first, second = plain(SPECS), plain(SPECS)
    optimizers = [Muon(params, lr=0.1) for params in (first, second)]
    give(first, gradients(SPECS, 0))
    optimizers[0].step()
    for mine, theirs in zip(second, first, strict=True):
        mine.data.copy_(theirs.data)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for params, optimizer in zip((first, second), optimizers, strict=True):
        give(params, gradients(SPECS, 1))
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# -- options --------------------------------------------------------------------------------------


@on_ranks(2)
def test_options_may_change_between_steps() -> None:
    dtype = torch.float64
    theirs, mine = plain(SPECS, dtype), sharded(SPECS, Place((2,)), dtype)
    reference = ReferenceMuon(theirs, lr=0.1, dtype=dtype)
    optimizer = Muon(mine, lr=0.1, ns_dtype=dtype)
    for step in range(3):
        if step == 1:
            optimizer.param_groups[0]["ns_steps"] = 2
            reference.newton_schulz["steps"] = 2
            optimizer.param_groups[0]["lr"] = reference.lr = 0.3
        if step == 2:
            mine[1].requires_grad_(False)
            theirs[1].requires_grad_(False)
        for params, who in ((theirs, reference), (mine, optimizer)):
            give(params, gradients(SPECS, step, dtype))
            who.step()  # type: ignore[attr-defined]
    assert error([whole(p) for p in mine], [p.detach() for p in theirs]) < 1e-12


def test_a_closure_computes_the_loss_with_gradients() -> None:
    param = nn.Parameter(torch.ones(2, 3))
    optimizer = Muon([param])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 6.0
    assert not torch.equal(param.detach(), torch.ones(2, 3))


def test_a_learning_rate_may_be_a_tensor() -> None:
    found = []
    for lr in (0.25, torch.tensor(0.25)):
        params = plain(SPECS)
        give(params, gradients(SPECS, 0))
        Muon(params, lr=lr).step()
        found.append([param.detach() for param in params])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# -- bad input ------------------------------------------------------------------------------------

MATRIX = nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"lr": torch.tensor([1.0, 2.0])}, "lr must have one element"),
        ({"lr": float("nan")}, "lr must be at least 0"),
        ({"momentum": -0.1}, "momentum must be at least 0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"ns_steps": 0}, "ns_steps must be from 1 to 99, got 0"),
        ({"ns_steps": 100}, "ns_steps must be from 1 to 99, got 100"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be"),
        ({"adjust_lr_fn": "bad"}, "adjust_lr_fn must be 'original' or 'match_rms_adamw'"),
        ({"betas": (0.9, 1.0)}, "betas[1] must be in [0, 1), got 1.0"),
        ({"ns_dtype": torch.int32}, "ns_dtype must be a floating-point dtype"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_out_of_range_is_rejected_by_name(options: dict[str, Any], words: str) -> None:
    assert words in said(ValueError, lambda: Muon([MATRIX], **options))


def test_a_parameter_that_is_no_matrix_is_rejected_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    text = said(ValueError, lambda: Muon(model.named_parameters()))
    assert "0.bias is 1-D" in text and "use_muon=False" in text
    odd = [nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))]
    assert "parameter 0 of shape (2, 2) is complex" in said(ValueError, lambda: Muon(odd))
    four = [nn.Parameter(torch.ones(2, 2, 2, 2))]
    assert "is 4-D" in said(ValueError, lambda: Muon(four))
    # AdamW takes them all.
    Muon(model.parameters(), use_muon=False)


def test_a_rejected_group_leaves_the_optimizer_as_it_was() -> None:
    optimizer = Muon([MATRIX])
    bad = {"params": [nn.Parameter(torch.ones(2))]}
    assert "1-D" in said(ValueError, lambda: optimizer.add_param_group(bad))
    assert len(optimizer.param_groups) == 1


def test_a_missing_gradient_is_named_and_a_frozen_parameter_needs_none() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(6)))
    optimizer = Muon(model.named_parameters())
    model[5].requires_grad_(False)
    model[0].weight.grad = torch.ones(3, 3)
    text = said(RuntimeError, optimizer.step)
    assert "no gradient for 1.weight, 2.weight, 3.weight and 1 more" in text
    for layer in model[1:5]:
        layer.weight.grad = torch.ones(3, 3)
    before = model[5].weight.detach().clone()
    optimizer.step()
    assert torch.equal(model[5].weight, before)


@on_ranks(2)
def test_misuse_of_sharded_parameters_is_named() -> None:
    specs = [Spec((4, 3)), Spec((6, 2)), Spec((4, 3))]
    params = sharded(specs, Place((2,)))
    give(params, gradients(specs, 0))
    params[1].grad = None
    missing = said(RuntimeError, Muon(params).step)
    vector = sharded([Spec((4, 3)), Spec((4,))], Place((2,)))
    foreign = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh_of(2), [Shard(0)]))
    function = MatrixFunction(lambda stack: stack, lambda m, n: 1)
    of_dtensor = said(ValueError, lambda: Muon([foreign]))
    by_engine = said(ValueError, lambda: MatrixEngine([foreign], [function]))
    of_vector = said(ValueError, lambda: MatrixEngine([vector[1]], [function]))
    bucket = said(ValueError, lambda: MatrixEngine(params, [function] * 3, bucket_numel=0))
    assert "no gradient for p0 of inner/0" in missing
    assert "p0 of inner/0 is 1-D" in said(ValueError, lambda: Muon(vector))
    assert "parameter 0 of shape (4, 3) is a DTensor" in of_dtensor
    assert "not sharded by fully_shard" in of_dtensor
    assert "not sharded by fully_shard" in by_engine
    assert "got shape (4,)" in of_vector
    assert "bucket_numel must be at least 1" in bucket
    engine = MatrixEngine(params, [function] * 3)
    assert "expected 3 updates, got 0" in said(ValueError, lambda: engine.run([]))


def _ranks_differ(arrange: Callable[[list[Any], int], list[Any]]) -> str:
    specs = [Spec((4, 3)), Spec((4, 3)), Spec((6, 2))]
    params = sharded(specs, Place((2,)))
    give(params, gradients(specs, 0))
    return said(RuntimeError, Muon(arrange(params, dist.get_rank())).step)


@on_ranks(2)
def test_ranks_that_give_other_parameters_say_so_on_every_rank() -> None:
    order = _ranks_differ(lambda p, rank: p if rank else [p[2], p[1], p[0]])
    alike = _ranks_differ(lambda p, rank: p if rank else [p[1], p[0], p[2]])
    fewer = _ranks_differ(lambda p, rank: p[: 2 + rank])
    same = _ranks_differ(lambda p, rank: p)
    for text in (order, alike):
        assert "ranks differ at unit" in text and "p0 of Bag/0" in text
    assert "ranks differ" in fewer
    assert same == "no error"
