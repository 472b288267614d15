"""Muon's update of sharded parameters is that of whole matrices, wherever their rows are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of
from megatron_fsdp_v2.optim import MatrixEngine, MatrixFunction, Muon
from tests.distributed.checkpoint_trainings import block_muon
from tests.distributed.muon_cases import (
    Bag,
    Place,
    Spec,
    error,
    full,
    give,
    gradients,
    initial,
    part,
    plain,
    sharded,
    whole,
)
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    fp64_pair,
    mesh_of,
    of_all_ranks,
    train_both,
    weight_error,
)
from tests.reference.muon import ReferenceMuon

EXACT = 1e-12
"""Tolerance in fp64: far above its rounding, far below any mistake."""
FP32 = 1e-6
CUBIC = {"ns_coefficients": (1.5, -0.5, 0.0)}
"""Newton's own coefficients. The default ones stretch small singular values, and their rounding
errors, by up to `3.4445 ** 5`: there even two orders of the same fp32 products differ by more."""
STRETCHED = 5 * FP32

# Odd rows, fewer rows than ranks, one row, one column, stacks, and a frozen matrix.
SPECS = (
    Spec((7, 5)),
    Spec((5, 7)),
    Spec((1, 6)),
    Spec((6, 1)),
    Spec((2, 9)),
    Spec((13, 3), is_frozen=True),
    Spec((16, 4)),
    Spec((3, 8, 5)),
    Spec((7, 5)),
    Spec((5, 4, 6)),
    Spec((1, 1)),
    Spec((1, 6)),
)
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
    Spec((4, 4), 0, is_frozen=True),
    Spec((8, 6), 0),
    Spec((1, 4), 1),
)
EVEN = [Place((2, 2), strategy, has_tensor_axis=True) for strategy in STRATEGIES]


def random_specs(seed: int) -> list[Spec]:
    """Some matrices and stacks with few rows and columns."""
    dice = random.Random(seed)
    shapes = [
        tuple(dice.randint(1, 11) for _ in range(dice.choice((2, 2, 2, 3)))) for _ in range(9)
    ]
    return [Spec(shape) for shape in shapes]


def _train(
    specs: Sequence[Spec],
    params: Sequence[nn.Parameter],
    optimizer: Any,
    dtype: torch.dtype,
) -> None:
    for step in range(3):
        give(params, gradients(specs, step, dtype))
        optimizer.step()


def check_updates(
    specs: Sequence[Spec],
    *places: Place,
    dtype: torch.dtype = torch.float64,
    tolerance: float = EXACT,
    **options: Any,
) -> None:
    """See that weights and momenta after three steps are those of whole matrices, at places."""
    # A rate at which weights are made of updates, so that an error of those is seen.
    options = {"lr": 0.5, **options}
    reference = ReferenceMuon(plain(specs, dtype), dtype=dtype, **options)
    _train(specs, reference.matrices, reference, dtype)
    trained = [number for number, spec in enumerate(specs) if not spec.is_frozen]
    for place in places:
        params = sharded(specs, place, dtype)
        optimizer = Muon(params, ns_dtype=dtype, **options)
        _train(specs, params, optimizer, dtype)
        momenta = [whole(optimizer.state[params[i]]["momentum_buffer"]) for i in trained]
        weights = error([whole(p) for p in params], [p.detach() for p in reference.matrices])
        assert weights < tolerance, f"weights of {place}"
        assert error(momenta, [reference.momenta[i] for i in trained]) < tolerance, place
        assert not [p for p in params if not p.requires_grad and p in optimizer.state]


@on_ranks("world_size", world_size=[1, 2, 3, 4])
def test_the_update_is_that_of_whole_matrices_at_every_strategy(world_size: int) -> None:
    places = [Place((world_size,), strategy) for strategy in STRATEGIES]
    check_updates(SPECS, *places)
    check_updates(SPECS, places[-1], dtype=torch.float32, tolerance=FP32, **CUBIC)
    if world_size == 2:
        check_updates(SPECS, places[-1], dtype=torch.float32, tolerance=STRETCHED)


@on_ranks("world_size", world_size=[2, 3, 4], seed=[0, 1])
def test_matrices_of_random_shapes(world_size: int, seed: int) -> None:
    specs, place = random_specs(10 * world_size + seed), Place((world_size,))
    check_updates(specs, place, Place((world_size,), "optim", granularity="block:2"))
    check_updates(specs, place, dtype=torch.float32, tolerance=FP32, **CUBIC)


@on_ranks(4, outer=["no_shard", "optim"])
def test_hsdp_and_hfsdp(outer: str) -> None:
    strategies = STRATEGIES if outer == "no_shard" else STRATEGIES[1:]
    check_updates(SPECS, *(Place((2, 2), strategy, outer) for strategy in strategies))


@on_ranks(4)
def test_matrices_that_tensor_parallelism_cut_are_put_together() -> None:
    wide, tall = Place((1, 4), has_tensor_axis=True), Place((4, 1), has_tensor_axis=True)
    specs = [spec for spec in TENSOR_SPECS if spec.dim is None or spec.shape[spec.dim] % 4 == 0]
    assert len(specs) > 6
    check_updates(TENSOR_SPECS, *EVEN)
    check_updates(specs, *EVEN, wide, tall)


@pytest.mark.slow
@pytest.mark.functional
@on_ranks(8)
def test_eight_ranks_of_one_and_of_three_axes() -> None:
    check_updates(SPECS, Place((8,)))
    for outer in ("optim", "no_shard"):
        check_updates(TENSOR_SPECS, Place((2, 2, 2), outer=outer, has_tensor_axis=True))


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"adjust_lr_fn": "original", "weight_decay": 0.0},
        {"ns_steps": 2, "momentum": 0.5},
        {"ns_coefficients": (3.0, -3.2, 1.2), "eps": 10.0},
    ],
)
@on_ranks(2)
def test_options_mean_what_they_do_for_whole_matrices(options: dict[str, Any]) -> None:
    check_updates(SPECS, Place((2,)), **options)


# -- beside torch's own ---------------------------------------------------------------------------

# All different, so that a batch is one matrix and its products are those of torch's optimizer.
ONE_EACH = tuple(Spec(shape) for shape in ((7, 5), (5, 7), (1, 6), (33, 20), (20, 33), (16, 4)))


BESIDE_TORCH = [None, Place((3,)), Place((3,), "no_shard")]
BIT_FOR_BIT: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "lr": 0.02},
]


def beside_torch(place: Place | None, dtype: torch.dtype, **options: Any) -> tuple[list[Any], ...]:
    """Weights here, and torch's; momenta are bitwise torch's."""
    theirs = plain(ONE_EACH, dtype)
    reference = torch.optim.Muon(theirs, **options)
    mine = plain(ONE_EACH, dtype) if place is None else sharded(ONE_EACH, place, dtype)
    optimizer = Muon(mine, **options)
    for params, who in ((theirs, reference), (mine, optimizer)):
        _train(ONE_EACH, params, who, dtype)
    for a, b in zip(mine, theirs, strict=True):
        momentum = whole(optimizer.state[a]["momentum_buffer"])
        assert torch.equal(momentum, reference.state[b]["momentum_buffer"])
    return [whole(param) for param in mine], [param.detach() for param in theirs]


@pytest.mark.parametrize("place", BESIDE_TORCH, ids=str)
@pytest.mark.parametrize("options", BIT_FOR_BIT, ids=str)
@on_ranks(3)
def test_the_update_is_that_of_torch_to_the_bit(
    options: dict[str, Any], place: Place | None
) -> None:
    assert all(map(torch.equal, *beside_torch(place, torch.float32, **options)))


@pytest.mark.parametrize("place", BESIDE_TORCH, ids=str)
@on_ranks(3)
def test_bf16_parameters_are_torchs_within_rounding(place: Place | None) -> None:
    # Torch rounds `w + alpha * u` in bf16 once or twice, depending on strides and on lengths.
    assert error(*beside_torch(place, torch.bfloat16)) < 2**-8


@on_ranks(2)
def test_a_batch_in_bf16_is_torchs_within_rounding() -> None:
    specs = [Spec((24, 16))] * 5 + [Spec((16, 24))] * 5
    theirs, mine = plain(specs), sharded(specs, Place((2,)))
    for params, kind in ((theirs, torch.optim.Muon), (mine, Muon)):
        _train(specs, params, kind(params, lr=0.5), torch.float32)
    assert error([whole(param) for param in mine], [p.detach() for p in theirs]) < 2**-8


# -- mixtures -------------------------------------------------------------------------------------


@on_ranks(4)
def test_one_group_may_have_parameters_of_several_meshes_and_plain_ones() -> None:
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
    assert error([whole(p) for p in params], [p.detach() for p in reference.matrices]) < EXACT


OTHERS = (Spec((7,)), Spec((9, 4)), Spec((1,)), Spec((5, 2), is_frozen=True), Spec((2, 3, 4)))


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("lr", [0.02, torch.tensor(0.02, dtype=torch.float64)], ids=str)
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
            give(params, gradients(specs, step, dtype))
            if step == 1:
                # AdamW leaves alone what has no gradient.
                params[count].grad = None
            who.step()
    assert reference.adamw is not None
    for a, b in zip(mine[count:], theirs[count:], strict=True):
        if not b.requires_grad:
            assert a not in optimizer.state
            continue
        state = reference.adamw.state[b]
        for key in ("exp_avg", "exp_avg_sq"):
            assert error([whole(optimizer.state[a][key])], [state[key]]) < EXACT
        if not hasattr(a, "row_shards") or local_of(a).numel():
            assert float(optimizer.state[a]["step"]) == float(state["step"])
    assert error([whole(p) for p in mine], [p.detach() for p in theirs]) < EXACT


@on_ranks(2, strategy=STRATEGIES)
def test_a_training_is_the_plain_loops(strategy: str) -> None:
    plain_model, model = fp64_pair(strategy)
    optimizer = block_muon(model, lr=0.01, ns_dtype=torch.float64)
    matrices, others = (group["params"] for group in block_muon(plain_model).param_groups)
    reference = ReferenceMuon(matrices, others, lr=0.01, dtype=torch.float64)
    train_both(plain_model, model, (reference, optimizer), range(5))
    assert weight_error(model, plain_model) < EXACT


# -- the engine by itself -------------------------------------------------------------------------


def _engine(params: Sequence[nn.Parameter], apply: Any, **options: Any) -> MatrixEngine:
    function = MatrixFunction(apply, lambda m, n: m * n)
    return MatrixEngine(params, [function] * len(params), **options)


def _ranked(stack: torch.Tensor) -> torch.Tensor:
    """Something that depends on all of a matrix and its shape, and not on the batch."""
    return stack * stack.sum((-2, -1), keepdim=True) + stack.shape[-2]


@on_ranks(4, strategy=("optim_grads_params", "no_shard"))
def test_tensor_parallel_parts_can_be_matrices_of_their_own(strategy: str) -> None:
    place = Place((2, 2), strategy, has_tensor_axis=True)
    params = sharded(TENSOR_SPECS, place, torch.float64)
    engine = _engine(params, _ranked, joins_tensor_parallel=False)
    results = engine.run([local_of(p).detach() for p in params])
    values = zip(TENSOR_SPECS, initial(TENSOR_SPECS, torch.float64), params, results, strict=True)
    for spec, value, param, result in values:
        rank = param.device_mesh.get_local_rank(1)  # type: ignore[attr-defined]
        mine = part(value, spec, rank, 2)
        expected = _ranked(mine if mine.ndim == 3 else mine[None]).view(mine.shape)
        start, end = param.local_rows  # type: ignore[attr-defined]
        assert torch.allclose(result, expected[start:end], rtol=1e-13)


@pytest.mark.parametrize("place", [Place((2, 2)), Place((2, 2), "no_shard")], ids=str)
@on_ranks(4)
def test_replicas_can_each_do_all_of_the_work(place: Place) -> None:
    params = sharded((Spec((8, 6)), Spec((3, 4, 5))), place, torch.float64)
    values = [local_of(p).detach() for p in params]
    shared, alone = (_engine(params, _ranked, shares_replicas=s) for s in (True, False))
    assert all(map(torch.equal, shared.run(values), alone.run(values)))
    assert all(axis.size == 2 for work in alone.works for axis in work.axes)
    # What every rank has whole is not sent.
    sent = sum(work.sent_numel for work in alone.works)
    assert (sent == 0) == (place.strategy == "no_shard")


@pytest.mark.parametrize(
    "place",
    [
        Place((4,)),
        Place((4,), "no_shard"),
        # Here some ranks have nothing to do along an axis in some buckets, and others have.
        Place((2, 2), outer="optim"),
        Place((2, 2), outer="no_shard"),
        Place((2, 2), has_tensor_axis=True),
    ],
    ids=str,
)
@on_ranks(4)
def test_small_buckets_change_no_bit(place: Place) -> None:
    # One owner is busy with the first; what the others own leaves them idle in some buckets.
    specs = [Spec((40, 7)), Spec((6, 6)), *(Spec((5, 6 + n)) for n in range(14)), Spec((3, 4, 5))]
    params = sharded(specs, place)
    values = [local_of(p).detach() for p in params]
    options = {"shares_replicas": True}
    few, many = (_engine(params, _ranked, bucket_numel=n, **options) for n in (2**30, 36))
    assert few.works[0].ownership.num_buckets == 1
    for _ in range(2):
        assert all(map(torch.equal, few.run(values), many.run(values)))
    assert many.works[0].ownership.num_buckets > 3


@on_ranks(2)
def test_functions_of_several_kinds_may_be_mixed() -> None:
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


@on_ranks(2)
def test_random_tensors_are_equal_everywhere() -> None:
    # What all of the above rests on: full() is a function of its arguments.
    values = full(3, (4, 2)).tolist()
    assert of_all_ranks(values) == [values] * 2
