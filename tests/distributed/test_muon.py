"""Muon's update of sharded parameters equals that of full matrices; step cost; bad input."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.dtensor.sharded_rows import local_of
from megatron_fsdp_v2.optim import (
    MatrixEngine,
    MatrixFunction,
    Muon,
    engine,
    newton_schulz,
    newton_schulz_flops,
)
from tests.distributed.checkpoint_trainings import digests, muon, net
from tests.distributed.cut_parameters import (
    Bag,
    Place,
    Spec,
    gradients,
    initial,
    part,
    plain,
    relative_error,
    set_gradients,
    sharded,
)
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    check_error_messages,
    error_message,
    mesh_of,
    of_all_ranks,
    whole,
)
from tests.reference.muon import ReferenceMuon

EXACT = 1e-12
"""Tolerance in fp64: far above rounding errors, far below the error of any mistake."""
FP32 = 1e-6
CUBIC = {"ns_coefficients": (1.5, -0.5, 0.0)}
"""Newton's coefficients. The default coefficients amplify small singular values and their rounding
errors by up to `3.4445 ** 5`, so that even the same fp32 products in another order differ more."""
STRETCHED = 5 * FP32

# Odd rows, fewer rows than ranks, one row, one column, stacks, and a frozen matrix.
MATRICES = ((7, 5), (5, 7), (1, 6), (6, 1), (2, 9), (16, 4), (7, 5), (1, 1))
STACKS = ((3, 8, 5), (5, 4, 6), (3, 2, 6, 4), (1, 2, 5, 7))
SHAPES = (*MATRICES, *STACKS)
SPECS = (*map(Spec, SHAPES), Spec((1, 6)), Spec((13, 3), is_frozen=True))
TENSOR_SPECS = (
    Spec((8, 6), 0),
    Spec((6, 8), 1),
    Spec((16, 5), 0, num_pieces=2),
    Spec((5, 12), 1, num_pieces=3),
    Spec((7, 5)),
    Spec((4, 3, 5), 0),
    Spec((8, 3, 2), 0, num_pieces=2),
    Spec((3, 8, 5), 1),
    Spec((3, 5, 8), 2),
    Spec((4, 2, 3, 5), 0),
    Spec((8, 3, 2, 4), 0, num_pieces=2),
    Spec((3, 4, 2, 5), 1),
    Spec((2, 2, 8, 5), 2),
    Spec((2, 3, 2, 6), 3),
    Spec((4, 4), 0, is_frozen=True),
    Spec((8, 6), 0),
    Spec((1, 4), 1),
)
EVEN = [Place((2, 2), strategy, has_tensor_axis=True) for strategy in STRATEGIES]


def _train(
    specs: Sequence[Spec], params: Sequence[nn.Parameter], optimizer: Any, dtype: torch.dtype
) -> None:
    for step in range(3):
        set_gradients(params, gradients(specs, step, dtype))
        optimizer.step()


def error_of(params: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Relative error of full values. Collective."""
    return relative_error([whole(p.detach()) for p in params], [p.detach() for p in expected])


def check_updates(
    specs: Sequence[Spec],
    *places: Place | None,
    dtype: torch.dtype = torch.float64,
    tolerance: float = EXACT,
    **options: Any,
) -> None:
    """Check that weights and momenta after three steps equal those of full matrices.

    A place of None is a plain training.
    """
    # A rate at which updates dominate the weights, so that their errors are detected.
    options = {"lr": 0.5, **options}
    same = {name: value for name, value in options.items() if name != "ns_method"}
    reference = ReferenceMuon(plain(specs, dtype), dtype=dtype, **same)
    _train(specs, reference.matrices, reference, dtype)
    trained = [number for number, spec in enumerate(specs) if not spec.is_frozen]
    for place in places:
        params = plain(specs, dtype) if place is None else sharded(specs, place, dtype)
        optimizer = Muon(params, ns_dtype=dtype, **options)
        _train(specs, params, optimizer, dtype)
        momenta = [optimizer.state[params[i]]["momentum_buffer"] for i in trained]
        assert error_of(params, reference.matrices) < tolerance, f"weights of {place}"
        assert error_of(momenta, [reference.momenta[i] for i in trained]) < tolerance, place
        assert not [p for p in params if not p.requires_grad and p in optimizer.state]


@on_ranks("world_size", world_size=[1, 2, 3, 4])
def test_update_equals_full_matrices_at_every_strategy(world_size: int) -> None:
    places = [Place((world_size,), strategy) for strategy in STRATEGIES]
    check_updates(SPECS, None, *places, Place((world_size,), granularity="block:2"))
    check_updates(SPECS, places[-1], dtype=torch.float32, tolerance=FP32, **CUBIC)
    if world_size == 2:
        check_updates(SPECS, places[-1], dtype=torch.float32, tolerance=STRETCHED)


@on_ranks(4, outer=["no_shard", "optim"])
def test_update_equals_full_matrices_on_hsdp_and_hfsdp(outer: str) -> None:
    strategies = STRATEGIES if outer == "no_shard" else STRATEGIES[1:]
    check_updates(SPECS, *(Place((2, 2), strategy, outer) for strategy in strategies))


@on_ranks(4)
def test_tensor_parallel_matrices_are_joined_for_the_update() -> None:
    wide, tall = Place((1, 4), has_tensor_axis=True), Place((4, 1), has_tensor_axis=True)
    specs = [spec for spec in TENSOR_SPECS if spec.dim is None or spec.shape[spec.dim] % 4 == 0]
    assert len(specs) > 6
    check_updates(TENSOR_SPECS, *EVEN)
    check_updates(specs, *EVEN, wide, tall)


@pytest.mark.functional
@on_ranks(8)
def test_update_equals_full_matrices_on_eight_ranks() -> None:
    check_updates(SPECS, Place((8,)))
    for outer in ("optim", "no_shard"):
        check_updates(TENSOR_SPECS, Place((2, 2, 2), outer=outer, has_tensor_axis=True))


OPTIONS: list[dict[str, Any]] = [
    {"nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw"},
    {"adjust_lr_fn": "original", "weight_decay": 0.0},
    {"ns_steps": 2, "momentum": 0.5},
    {"ns_coefficients": (3.0, -3.2, 1.2), "eps": 10.0},
]


@on_ranks(2, options=OPTIONS)
def test_options_equal_those_of_full_matrices(options: dict[str, Any]) -> None:
    check_updates(SPECS, Place((2,)), **options)


LONG = tuple(map(Spec, ((4, 40), (33, 5), (2, 6, 30), (3, 4), (1, 7))))


@on_ranks(2)
def test_iterations_on_the_gram_matrix_equal_those_on_the_matrix() -> None:
    check_updates(LONG, Place((2,)), ns_method="gram", tolerance=1e-10)
    check_updates(LONG, Place((2,)), ns_method="gram", ns_steps=7, **CUBIC)


@pytest.mark.parametrize("shape", [(64, 256), (448, 64)])
def test_iterations_on_the_gram_matrix_cost_less_and_round_no_worse(shape: tuple[int, int]) -> None:
    """With singular values over eight decades, as bf16 rounds them."""
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    count = min(shape)
    matrix = (u[:, :count] * 10.0 ** (-8 * torch.linspace(0, 1, count)) @ v[:count])[None]
    exact = newton_schulz(matrix, dtype=torch.float64)
    both = [newton_schulz(matrix, method=method) for method in ("standard", "gram")]
    assert not torch.equal(*both)
    standard, gram = (float((each.double() - exact).norm() / exact.norm()) for each in both)
    assert gram < 1.1 * standard
    flops = [newton_schulz_flops(*shape, method=method) for method in ("standard", "gram")]
    assert flops[1] < 0.7 * flops[0]
    assert len({newton_schulz_flops(8, 8, method=method) for method in ("standard", "gram")}) == 1


@on_ranks(3)
def test_blocks_of_rows_are_orthogonalized_on_their_own() -> None:
    heads = tuple(map(Spec, ((8, 6), (12, 3), (4, 4), (0, 3), (4, 0))))
    for method in ("standard", "gram"):
        places = Place((3,)), Place((3,), "no_shard"), Place((3,), granularity="block:4")
        check_updates(heads, *places, block_rows=4, ns_method=method, tolerance=1e-10)


@on_ranks(4)
def test_blocks_of_tensor_parallel_parts_are_those_of_the_whole() -> None:
    specs = Spec((16, 6), 0), Spec((8, 8), 1), Spec((16, 5), 0, num_pieces=2), Spec((8, 5))
    places = [*EVEN, Place((2, 2)), Place((2, 2), outer="optim")]
    check_updates(specs, *places, block_rows=4, tolerance=1e-10)


@on_ranks(2)
def test_blocks_that_no_boundary_splits_are_not_sent() -> None:
    specs = [Spec((24, 6)), Spec((16, 3))]
    sent = {}
    for granularity in ("block:4", "row"):
        params = sharded(specs, Place((2,), granularity=granularity))
        optimizer = Muon(params, block_rows=4)
        set_gradients(params, gradients(specs, 0))
        optimizer.step()
        (work,) = _engine_work(optimizer).works
        sent[granularity] = sum(bucket.sent_numel for bucket in work.plan)
    assert sent["block:4"] == 0
    # At most one block is split.
    assert sum(of_all_ranks(sent["row"])) <= 2 * 4 * 6


# -- comparison with torch.optim.Muon -------------------------------------------------------------

# Distinct shapes, so that a batch is one matrix and its products are those of torch's optimizer.
ONE_EACH = tuple(Spec(shape) for shape in ((7, 5), (5, 7), (1, 6), (33, 20), (20, 33), (16, 4)))


BESIDE_TORCH: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.float32, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "lr": 0.02}),
    (torch.bfloat16, {}),
]


@pytest.mark.parametrize(("dtype", "options"), BESIDE_TORCH, ids=str)
@on_ranks(3, place=[None, Place((3,))])
def test_update_equals_that_of_torch(
    place: Place | None, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Momenta are bitwise identical, and so are weights except in bf16."""
    theirs = plain(ONE_EACH, dtype)
    reference = torch.optim.Muon(theirs, **options)
    mine = plain(ONE_EACH, dtype) if place is None else sharded(ONE_EACH, place, dtype)
    optimizer = Muon(mine, **options)
    for params, who in ((theirs, reference), (mine, optimizer)):
        _train(ONE_EACH, params, who, dtype)
    for a, b in zip(mine, theirs, strict=True):
        momentum = whole(optimizer.state[a]["momentum_buffer"])
        assert torch.equal(momentum, reference.state[b]["momentum_buffer"])
    # Torch rounds `w + alpha * u` in bf16 once or twice, depending on strides and on lengths.
    tolerance = 2**-8 if dtype is torch.bfloat16 else 0.0
    assert error_of(mine, theirs) <= tolerance


# -- mixtures -------------------------------------------------------------------------------------


@on_ranks(4)
def test_one_group_mixes_parameters_of_several_meshes_and_plain_parameters() -> None:
    specs = [*SPECS, *SPECS, *SPECS]
    dtype = torch.float64
    reference = ReferenceMuon(plain(specs, dtype), lr=0.5, dtype=dtype)
    bags = [Bag(initial(specs, dtype)[i::3], specs[i::3]) for i in range(3)]
    fully_shard(bags[0], mesh=mesh_of(4))
    fully_shard(bags[1], mesh=mesh_of(2, 2)["inner"])
    by_bag = [list(bag.parameters()) for bag in bags]
    params = [by_bag[number % 3][number // 3] for number in range(len(specs))]
    optimizer = Muon(params, lr=0.5, ns_dtype=dtype)
    for who in (reference, optimizer):
        _train(specs, who.matrices if who is reference else params, who, dtype)
    assert error_of(params, reference.matrices) < EXACT


OTHERS = (Spec((7,)), Spec((9, 4)), Spec((1,)), Spec((5, 2), is_frozen=True), Spec((2, 3, 4)))


@pytest.mark.parametrize(
    ("strategy", "lr"),
    [("no_shard", 0.02), ("optim_grads_params", torch.tensor(0.02, dtype=torch.float64))],
    ids=str,
)
@on_ranks(3)
def test_groups_without_muon_are_stepped_by_adamw(strategy: str, lr: Any) -> None:
    specs, dtype = [*SPECS, *OTHERS], torch.float64
    theirs, mine = plain(specs, dtype), sharded(specs, Place((3,), strategy), dtype)
    count = len(SPECS)
    reference = ReferenceMuon(theirs[:count], theirs[count:], lr=0.02, dtype=dtype)
    groups = [{"params": mine[:count]}, {"params": mine[count:], "use_muon": False}]
    optimizer = Muon(groups, lr=lr, ns_dtype=dtype)
    for params, who in ((theirs, reference), (mine, optimizer)):
        for step in range(3):
            set_gradients(params, gradients(specs, step, dtype))
            if step == 1:
                # AdamW skips parameters without a gradient.
                params[count].grad = None
            who.step()
    for a, b in zip(mine[count:], theirs[count:], strict=True):
        if not b.requires_grad:
            assert a not in optimizer.state
            continue
        state = reference.adamw.state[b]
        for key in ("exp_avg", "exp_avg_sq"):
            assert error_of([optimizer.state[a][key]], [state[key]]) < EXACT
        if not hasattr(a, "row_shards") or local_of(a).numel():
            assert float(optimizer.state[a]["step"]) == float(state["step"])
    assert error_of(mine, theirs) < EXACT


ON_FOUR_RANKS = [Place((4,)), Place((4,), "no_shard"), Place((2, 2)), Place((2, 2), outer="optim")]


# -- the matrix engine ----------------------------------------------------------------------------


def _engine(params: Sequence[nn.Parameter], apply: Any, **options: Any) -> MatrixEngine:
    function = MatrixFunction(apply, lambda m, n: m * n)
    return MatrixEngine(params, [function] * len(params), **options)


def _scaled_by_sum(stack: torch.Tensor) -> torch.Tensor:
    """A function of the whole matrix and its shape that does not depend on the batch."""
    return stack * stack.sum((-2, -1), keepdim=True) + stack.shape[-2]


@on_ranks(4, strategy=("optim_grads_params", "no_shard"))
def test_tensor_parallel_shards_can_be_separate_matrices(strategy: str) -> None:
    place = Place((2, 2), strategy, has_tensor_axis=True)
    params = sharded(TENSOR_SPECS, place, torch.float64)
    engine = _engine(params, _scaled_by_sum, joins_tensor_parallel=False)
    results = engine.run([local_of(p).detach() for p in params])
    values = zip(TENSOR_SPECS, initial(TENSOR_SPECS, torch.float64), params, results, strict=True)
    for spec, value, param, result in values:
        rank = param.device_mesh.get_local_rank(1)  # type: ignore[attr-defined]
        mine = part(value, spec, rank, 2)
        expected = _scaled_by_sum(mine if mine.ndim == 3 else mine[None]).view(mine.shape)
        start, end = param.local_rows  # type: ignore[attr-defined]
        assert torch.allclose(result, expected[start:end], rtol=1e-13)


@on_ranks(4)
def test_ranks_with_replicated_parameters_can_each_compute_every_matrix() -> None:
    params = sharded((Spec((8, 6)), Spec((3, 4, 5))), Place((2, 2), "no_shard"), torch.float64)
    values = [local_of(p).detach() for p in params]
    shared, alone = (_engine(params, _scaled_by_sum, spreads_replicated=s) for s in (True, False))
    assert all(map(torch.equal, shared.run(values), alone.run(values)))
    assert not any(bucket.sent_numel for work in alone.works for bucket in work.plan)
    assert any(bucket.sent_numel for work in shared.works for bucket in work.plan)


# Along an axis, some ranks have no work in some buckets, and other ranks have.
@on_ranks(4, place=[*ON_FOUR_RANKS, Place((2, 2), has_tensor_axis=True)])
def test_bucket_sizes_do_not_change_results(place: Place) -> None:
    # One owner has the large first matrix; other owners have no work in some buckets.
    specs = [Spec((40, 7)), Spec((6, 6)), *(Spec((5, 6 + n)) for n in range(14)), Spec((3, 4, 5))]
    params = sharded(specs, place)
    values = [local_of(p).detach() for p in params]
    options = {"spreads_replicated": True}
    engines = []
    for numel in (2**30, 36):
        with mock.patch.object(engine, "BUCKET_NUMEL", numel):
            engines.append(_engine(params, _scaled_by_sum, **options))
    few, many = engines
    assert few.works[0].ownership.num_buckets == 1
    for _ in range(2):
        assert all(map(torch.equal, few.run(values), many.run(values)))
    assert many.works[0].ownership.num_buckets > 3


@on_ranks(2)
def test_engine_mixes_functions_of_several_kinds() -> None:
    specs = [Spec((6, 6))] * 4
    params = sharded(specs, Place((2,)), torch.float64)
    kinds = [
        MatrixFunction(lambda s: s.mT, lambda m, n: 1),
        MatrixFunction(lambda s: s.mT.float() * 2, lambda m, n: 7),
    ]
    engine = MatrixEngine(params, [kinds[0], kinds[1], kinds[1], kinds[0]])
    values = initial(specs, torch.float64)
    results = engine.run([local_of(p).detach() for p in params])
    expected = [values[0].T, (values[1].T.float() * 2).double()]
    expected += [(values[2].T.float() * 2).double(), values[3].T]
    rows = [p.local_rows for p in params]  # type: ignore[attr-defined]
    pairs = zip(results, expected, rows, strict=True)
    assert all(torch.equal(mine, e[first:last]) for mine, e, (first, last) in pairs)


SPECS_WORK = tuple(Spec(shape) for shape in ((8, 6), (6, 8), (3, 4, 5), (8, 6), (9, 4), (2, 10)))
TOTAL_FLOPS = sum(
    newton_schulz_flops(*spec.shape[-2:]) * math.prod(spec.shape[:-2]) for spec in SPECS_WORK
)


def _stepped(specs: Sequence[Spec], place: Place, **options: Any) -> tuple[list[Any], Muon]:
    """Parameters after one step, with gradients for the next one."""
    params = sharded(specs, place)
    optimizer = Muon(params, **options)
    for step in range(2):
        set_gradients(params, gradients(specs, step))
        if step == 0:
            optimizer.step()
    return params, optimizer


def _engine_work(optimizer: Muon) -> MatrixEngine:
    return optimizer._engine[1]


# -- collectives and FLOPs ------------------------------------------------------------------------


ALL_TO_ALLS = [
    # Rows to the owner, and results back.
    (Place((3,)), 2),
    (Place((3,), "no_shard"), 1),
    (Place((3,), granularity="tensor"), 0),
    (Place((1,)), 0),
]


@pytest.mark.parametrize(("place", "number"), ALL_TO_ALLS, ids=str)
@on_ranks("place")
def test_step_of_one_bucket_issues_at_most_two_all_to_alls(place: Place, number: int) -> None:
    _, optimizer = _stepped(SPECS_WORK, place)
    with torch.profiler.profile() as profile:
        optimizer.step()
    names = [event.name for event in profile.events()]
    found = Counter(name for name in names if name.startswith(("gloo:", "c10d::")))
    assert sum(work.ownership.num_buckets for work in _engine_work(optimizer).works) == 1
    assert found == Counter({"gloo:all_to_all": number, "c10d::alltoall_base_": number})


@on_ranks(4, place=ON_FOUR_RANKS)
def test_every_matrix_is_computed_once_by_its_owner(place: Place) -> None:
    _, optimizer = _stepped(SPECS_WORK, place)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    measured = counter.get_total_flops()
    everywhere = of_all_ranks(measured)
    works = _engine_work(optimizer).works
    assert measured == sum(work.ownership.flops[work._rank] for work in works)
    assert sum(everywhere) == TOTAL_FLOPS
    # Eight matrices, three of them in one stack: no rank does more than half of the work.
    assert measured < TOTAL_FLOPS / 2


# -- state ----------------------------------------------------------------------------------------


def test_a_copied_optimizer_steps_like_the_original() -> None:
    params = plain(SPECS_WORK)
    optimizer = Muon(params, ns_dtype=torch.float32)
    set_gradients(params, gradients(SPECS_WORK, 0))
    optimizer.step()
    other = copy.deepcopy(optimizer)
    copies = other.param_groups[0]["params"]
    for who, those in ((optimizer, params), (other, copies)):
        set_gradients(those, gradients(SPECS_WORK, 1))
        who.step()
    assert all(torch.equal(a, b) for a, b in zip(params, copies, strict=True))


# -- options --------------------------------------------------------------------------------------


@on_ranks(2)
def test_options_may_change_between_steps() -> None:
    dtype = torch.float64
    theirs, mine = plain(SPECS_WORK, dtype), sharded(SPECS_WORK, Place((2,)), dtype)
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
            set_gradients(params, gradients(SPECS_WORK, step, dtype))
            who.step()  # type: ignore[attr-defined]
    assert error_of(mine, theirs) < 1e-12


@on_ranks(2, strategy=[STRATEGIES[0], STRATEGIES[-1]])
def test_a_step_that_overflows_leaves_weights_and_state(strategy: str) -> None:
    model = net(sharding_strategy=strategy)
    optimizer = muon(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    found = []
    for factor in (1.0, float("inf")):
        x = torch.ones(4, 5) * (factor if dist.get_rank() else 1.0)
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(digests(model, optimizer))
    assert scaler.get_scale() == 2.0
    assert found[0] == found[1] and "up.weight.momentum_buffer" in found[0]


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


# -- bad input ------------------------------------------------------------------------------------

MATRIX = nn.Parameter(torch.ones(2, 2))


OUT_OF_RANGE: list[tuple[dict[str, Any], str]] = [
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
    ({"ns_method": "bad"}, "ns_method must be 'standard' or 'gram', got 'bad'"),
    ({"block_rows": 0}, "block_rows must be at least 1, got 0"),
    ({"block_rows": 3}, "has shape (2, 2), and block_rows=3 divides the rows of 2-D parameters"),
    ({"ns_dtype": torch.int32}, "ns_dtype must be a floating-point dtype"),
]


def test_an_option_out_of_range_is_rejected_by_name() -> None:
    calls = {words: partial(Muon, [MATRIX], **options) for options, words in OUT_OF_RANGE}
    check_error_messages(ValueError, calls)


def test_parameter_that_is_not_a_matrix_is_rejected_by_name() -> None:
    model, optimizer = nn.Sequential(nn.Linear(3, 2)), Muon([MATRIX])
    odd = [nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))]
    group = {"params": [nn.Parameter(torch.ones(2))]}
    text = error_message(ValueError, lambda: Muon(model.named_parameters()))
    assert "0.bias is 1-D" in text and "use_muon=False" in text
    rejected: dict[str, Callable[[], Any]] = {
        "parameter 0 of shape (2, 2) is complex": lambda: Muon(odd),
        "1-D": lambda: optimizer.add_param_group(group),
    }
    check_error_messages(ValueError, rejected)
    assert len(optimizer.param_groups) == 1
    # AdamW takes them all.
    Muon(model.parameters(), use_muon=False)


class _StrictMuon(Muon):
    """Muon that treats a missing gradient as an error, as Megatron's does."""

    skips_missing_gradients = False


def test_a_missing_gradient_is_named_and_a_frozen_parameter_needs_none() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(6)))
    optimizer = _StrictMuon(model.named_parameters())
    model[5].requires_grad_(False)
    model[0].weight.grad = torch.ones(3, 3)
    text = error_message(RuntimeError, optimizer.step)
    assert "no gradient for 1.weight, 2.weight, 3.weight and 1 more" in text
    for layer in model[1:5]:
        layer.weight.grad = torch.ones(3, 3)
    before = model[5].weight.detach().clone()
    optimizer.step()
    assert torch.equal(model[5].weight, before)


@on_ranks(2)
def test_misuse_of_sharded_parameters_is_rejected_by_name() -> None:
    specs = [Spec((4, 3)), Spec((6, 2)), Spec((4, 3))]
    params = sharded(specs, Place((2,)))
    set_gradients(params, gradients(specs, 0))
    params[1].grad = None
    assert "no gradient for p0 of inner/0" in error_message(RuntimeError, _StrictMuon(params).step)
    vector = sharded([Spec((4, 3)), Spec((4,))], Place((2,)))
    foreign = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh_of(2), [Shard(0)]))
    function = MatrixFunction(lambda stack: stack, lambda m, n: 1)
    engine = MatrixEngine(params, [function] * 3)
    rejected: dict[str, Callable[[], Any]] = {
        "p0 of inner/0 is 1-D": lambda: Muon(vector),
        "parameter 0 of shape (4, 3) is a DTensor": lambda: Muon([foreign]),
        "not sharded by fully_shard": lambda: MatrixEngine([foreign], [function]),
        "got shape (4,)": lambda: MatrixEngine([vector[1]], [function]),
        "expected 3 updates, got 0": lambda: engine.run([]),
    }
    check_error_messages(ValueError, rejected)


def _ranks_differ(arrange: Callable[[list[Any], int], list[Any]]) -> str:
    specs = [Spec((4, 3)), Spec((4, 3)), Spec((6, 2))]
    params = sharded(specs, Place((2,)))
    set_gradients(params, gradients(specs, 0))
    return error_message(RuntimeError, Muon(arrange(params, dist.get_rank())).step)


@on_ranks(2)
def test_different_parameters_across_ranks_raise_on_every_rank() -> None:
    order = _ranks_differ(lambda p, rank: p if rank else [p[2], p[1], p[0]])
    alike = _ranks_differ(lambda p, rank: p if rank else [p[1], p[0], p[2]])
    fewer = _ranks_differ(lambda p, rank: p[: 2 + rank])
    same = _ranks_differ(lambda p, rank: p)
    for text in (order, alike):
        assert "ranks differ at unit" in text and "p0 of Bag/0" in text
    assert "ranks differ" in fewer
    assert same == "no error"
