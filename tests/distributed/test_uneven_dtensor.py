"""Operations on uneven DTensors, and on their results, compute over the rows of all ranks."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from megatron_fsdp_v2.dtensor.row_shards import GroupInfo, RowShards
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from tests.cases import longer
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    Operations,
    batch,
    check_error_messages,
    error_message,
    fp64_pair,
    gradient_error,
    mesh_of,
    of_all_ranks,
    on_mesh,
    own_loss,
    pair,
    plain_loss,
    strategies_on,
    weight_error,
    whole,
    wrap,
)

# -- sums and means outside of a forward, such as regularization losses ---------------------------

# `test_operators.py` has the single operators.
LOSSES: dict[str, Callable[[Any], Any]] = {
    "added up in place": lambda p: sum_in_place(p),
    "norms of a list": lambda p: torch.stack(torch._foreach_norm([p, 3 * p])).sum(),
    "as a vector": lambda p: nn.utils.parameters_to_vector([p]).square().mean(),
    "changed in place": lambda p: changed_in_place(2 * p).square().mean(),
    "full tensor": lambda p: whole(p).norm(dim=1).mean(),
    "full tensor of a result": lambda p: whole(p.abs()).norm(dim=1).mean(),
    "replicated": lambda p: whole(replicate(p).abs()).norm(dim=1).mean(),
    "gradient of a gradient": lambda p: penalty(p),
    "zeros without memory": lambda p: torch.sgn(p).sum() + torch.sgn(p.sum(1)).sum(),
}


def replicate(tensor: Any) -> Any:
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()])


def sum_in_place(p: Any) -> Any:
    total = torch.zeros(())
    for _ in range(2):
        total = total + p.square().mean()
        total += p.norm()
    return total


def changed_in_place(tensor: Any) -> Any:
    tensor.mul_(3.0)
    tensor += 1.0
    return tensor


def penalty(p: Any) -> Any:
    (grad,) = torch.autograd.grad(
        (p.pow(3).sum(1) * p.norm()).sum() + p.sum(), p, create_graph=True
    )
    assert type(grad) is type(p.detach()), "a plain DTensor"
    return grad.square().mean()


@on_ranks(2, timeout_s=30, name=LOSSES)
def test_loss_of_a_sharded_parameter_and_its_gradient_equal_those_of_the_full_parameter(
    name: str,
) -> None:
    for granularity, num_holders in (("row", 2), ("tensor", 1)):
        options = {"shard_granularity": granularity}
        plain, model = pair(lambda: nn.Linear(3, 5, bias=False), **options)
        losses = []
        for either in (plain, model):
            either(torch.ones(2, 3)).square().sum().backward()
            losses.append(LOSSES[name](either.weight))
            losses[-1].backward()
        expected, found = losses[0], whole(losses[1])
        assert sum(of_all_ranks(bool(model.weight.to_local().numel()))) == num_holders
        assert abs(found.item() - expected.item()) < 1e-5
        assert gradient_error(model, plain) < 1e-5


@on_ranks(2)
def test_backward_of_sharded_tensors_honors_its_arguments_without_communication() -> None:
    plain, model = pair(lambda: nn.Linear(3, 5))
    for either in (plain, model):
        either(torch.ones(2, 3)).square().sum().backward()
        product = either.weight * either.weight
        gradient = either.weight.detach() * 3
        with Operations() as seen, torch.no_grad():
            product.backward(gradient, retain_graph=True)
            torch.autograd.backward([product], [gradient], inputs=[either.weight])
        loss = (either.weight.sum() * either.bias.sum()).square()
        loss.backward(inputs=[either.bias])
        assert not any("all" in name or "reduce" in name for name in seen.names), seen.names
    assert gradient_error(model, plain) < 1e-5
    check_error_messages(
        RuntimeError, {"only for scalar outputs": lambda: (2 * model.weight).backward()}
    )


# -- gradients of such losses in addition to those of forwards -------------------------------------


_WHEN = ("before", "after", "alone")
"""When the term of a loss is computed: before the forward, after it, or in a separate backward."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "strategy", "is_async"),
    [
        ("2", "optim_grads_params", True),
        ("3", "optim", True),
        ("HSDP 2x2", "optim_grads", True),
        *(
            longer(mesh, strategy, mesh == "HFSDP 2x2")
            for mesh in ("1", "HFSDP 2x2")
            for strategy in strategies_on(mesh)[::2]
        ),
    ],
)
@on_ranks("mesh", timeout_s=120)
def test_direct_gradient_of_a_sharded_parameter_is_added_once_to_the_reduced_gradient(
    mesh: str, strategy: str, is_async: bool
) -> None:
    terms: list[Callable[[Any], Any]] = [
        lambda w: whole(w).norm(dim=1).mean(),
        lambda w: whole(w.abs()).norm(dim=1).mean(),
        lambda w: whole(w.square().sum() + 3 * w.norm(dim=0).mean()),
    ]
    kinds = itertools.product(("row", "tensor"), ("one", "two", "no_sync"), _WHEN)
    for number, (granularity, passes, when) in enumerate(kinds):
        term = terms[number % len(terms)]
        options = {**on_mesh(mesh), "shard_granularity": granularity}
        plain, model = fp64_pair(strategy, enable_async_reduce_grad=is_async, **options)
        params = [(m.blocks[0].up.weight, m.output.weight, m.output.bias) for m in (plain, model)]
        for step in range(1 if passes == "one" else 2):
            first = [10 * term(w) + term(v) for w, v, _ in params]
            losses = [plain_loss(plain, step), own_loss(model, step)]
            last = [10 * term(w) + term(v) for w, v, _ in params]
            direct = first if when == "before" else last
            totals = [a + b for a, b in zip(losses, direct, strict=True)]
            with model.no_sync() if passes == "no_sync" and not step else nullcontext():
                for total in totals if when != "alone" else [*losses, *direct]:
                    total.backward()
        assert gradient_error(model, plain) < 1e-12, (granularity, passes, when)
        assert all(param.grad is not None for param in model.parameters())


# -- writes, and gradients of full tensors ---------------------------------------------------------


@on_ranks(3, granularity=["row", "tensor"])
def test_writes_into_views_change_the_sharded_rows(granularity: str) -> None:
    plain, model = pair(lambda: nn.Conv1d(4, 6, 3), shard_granularity=granularity)
    weights = plain.weight, model.weight

    def check(*calls: Callable[[Any], Any]) -> None:
        for number, call in enumerate(calls):
            version = weights[1]._version
            with torch.no_grad():
                for weight in weights:
                    call(weight)
            assert torch.equal(weights[1].full_tensor(), weights[0]), number
            assert weights[1]._version > version, number

    def halves(weight: Any) -> None:
        first, second = weight.chunk(2)
        first.fill_(2.0)
        second[0].add_(first.sum())

    def both_halves(weight: Any) -> None:
        before = weight.view(2, -1)[1]
        torch._foreach_mul_(list(weight.chunk(2)), 3.0)
        weight[0].copy_(before[: weight[0].numel()].view_as(weight[0]))

    check(
        nn.init.dirac_,
        lambda w: w[2].zero_(),
        lambda w: w.data[1:3, 0].fill_(7.0),
        lambda w: w.view(-1).copy_(w.flatten() * 2),
        lambda w: w.__setitem__(w > 1, 0.5),
        lambda w: w.__setitem__((slice(None), 1), 3.0),
        lambda w: torch.mul(w.detach(), 3.0, out=w.detach()),
        lambda w: w.index_fill_(
            0,
            DTensor.from_local(torch.tensor([4]), mesh_of(3), [Replicate()])
            if isinstance(w, DTensor)
            else torch.tensor([4]),
            -1.0,
        ),
        halves,
        both_halves,
    )
    matrix = wrap(nn.Linear(4, 5)).weight
    with torch.no_grad():
        nn.init.orthogonal_(matrix)
        product = matrix.T @ matrix
        nn.init.eye_(matrix)
    assert torch.allclose(product.full_tensor(), torch.eye(4), atol=1e-6)
    assert torch.equal(matrix.full_tensor(), torch.eye(5, 4))


LOCAL: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "repr": (lambda w: "DTensor" in repr(w), True),
    "repr of a norm": (lambda w: "local=" in repr(torch.linalg.vector_norm(w.detach())), True),
    "repr of a view": (lambda w: "shape=(4,)" in f"{w[0]}", True),
    "dir": (lambda w: "full_tensor" in dir(w), True),
    "len": (len, 6),
    "list": (lambda w: [row.shape for row in w], [(4,)] * 6),
    "index": (lambda w: w[-1, 1:].shape, (3,)),
    "index None": (lambda w: w[None, ..., 0].shape, (1, 6)),
    "transpose": (lambda w: (w.T.shape, w.mT.is_contiguous()), ((4, 6), False)),
    "view": (lambda w: (w.view(-1).device.type, w.view(2, -1).stride()), ("cpu", (12, 1))),
    "chunk": (lambda w: [half.shape for half in w.data.chunk(2)], [(3, 4)] * 2),
    "flatten": (lambda w: w.flatten().dtype, torch.float32),
    "detach of a view": (lambda w: w[0].detach().requires_grad, False),
    "data_ptr": (lambda w: w.data_ptr(), 0),
    "new_tensor": (lambda w: w.new_tensor(2.0, device="cpu").item(), 2.0),
    "copy": (lambda w: type(copy.copy(w.detach())), UnevenDTensor),
    "pickle": (lambda w: len(pickle.dumps(w)) > 96, True),
    "assigned": (lambda w: w.detach().clone().__setitem__((0, slice(2)), 1.0), None),
}
"""Calls that need no other rank, and their results for a tensor of shape (6, 4)."""

_GATHER, _SAVE = "full_tensor() on all ranks", "full_state_dict=True"
REJECTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "numpy": (lambda w: w.detach().numpy(), _GATHER),
    "np.asarray": (lambda w: np.asarray(w.detach()), _GATHER),
    "tolist": (lambda w: w.tolist(), _GATHER),
    "tolist of a view": (lambda w: w[0].tolist(), _GATHER),
    "item": (lambda w: w.detach()[0, 0].item(), _GATHER),
    "float": (lambda w: [float(value) for value in w[0]], _GATHER),
    "format": (lambda w: f"{w[0, 0]:.3f}", _GATHER),
    "bool": (lambda w: bool(w[0, 0]), _GATHER),
    "safetensors": (lambda w: w.view(-1)[-1].data_ptr(), _SAVE),
    "storage": (lambda w: w.storage(), _SAVE),
    "shared memory": (lambda w: w.share_memory_(), _SAVE),
    "pickle of a view": (lambda w: pickle.dumps(w[0]), _SAVE),
    "new shape": (lambda w: w.detach().t_(), "copy_() it over the sharded one"),
    "storage of a view": (lambda w: w[0].untyped_storage(), "the result of full_tensor()"),
    "leaf of a view": (lambda w: w[0].requires_grad_(), "the result of full_tensor()"),
}
"""Calls that need other ranks, which may not make them; and the remedies in their errors."""


@on_ranks(2)
def test_one_rank_alone_gets_a_local_result_or_an_error_with_the_remedy() -> None:
    model: Any = wrap(nn.Linear(4, 6, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    moments = optimizer.state[model.weight]["exp_avg"]
    weight, state = model.weight, model.state_dict()["weight"]
    wrong = []
    if dist.get_rank() == 0:
        for tensor in (weight, weight.grad, state, moments, 2 * weight):
            wrong += [name for name, (call, result) in LOCAL.items() if call(tensor) != result]
            for name, (call, remedy) in REJECTED.items():
                message = error_message(RuntimeError, functools.partial(call, tensor))
                wrong += [name] if remedy not in message else []
    dist.barrier()
    assert not wrong


@on_ranks(2)
def test_what_inference_mode_reads_and_writes_is_right_outside_of_it() -> None:
    plain, model = fp64_pair()
    norms = []
    for either in (plain, model):
        optimizer = torch.optim.SGD(either.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            either(batch(0).double()).square().mean().backward()
            with torch.inference_mode():
                optimizer.step()
                either.load_state_dict({n: 0.9 * v for n, v in either.state_dict().items()})
                for param in either.parameters():
                    param.data.mul_(0.9)
                norms += [whole(p.detach().norm(dim=-1).max()).item() for p in either.parameters()]
    half = len(norms) // 2
    assert norms[:half] == pytest.approx(norms[half:], rel=1e-12)
    assert weight_error(model, plain) < 1e-12


@on_ranks(2)
def test_write_into_a_torch_dtensor_with_a_sharded_operand_changes_its_shards() -> None:
    weight: Any = wrap(nn.Linear(3, 5, bias=False)).weight
    full = weight.full_tensor().detach()
    theirs = distribute_tensor(full.clone(), weight.device_mesh, [Shard(0)])
    theirs.div_(weight.detach().abs().add(1.0))
    assert torch.equal(theirs.full_tensor(), full / (full.abs() + 1.0))


@on_ranks(2)
def test_unsupported_operations_raise_by_name() -> None:
    model: Any = wrap(nn.Linear(3, 5, bias=False))
    weight = model.weight
    kept = 2 * weight
    check_error_messages(
        RuntimeError,
        {
            "zero_ writes into a copy of": weight.detach().unsafe_chunk(2)[0].zero_,
            "t_ changes the shape": weight.detach().t_,
            "fill_ writes, recorded by autograd": lambda: kept[0].fill_(1.0 * kept.sum()),
            "multinomial of a sharded tensor draws": lambda: weight.multinomial(1),
            "a leaf Variable that requires grad": lambda: weight.mul_(2.0),
            "linear computes with weight": lambda: nn.functional.linear(torch.ones(3), weight),
            "mul mixes sharded tensors": lambda: weight.detach().t() * torch.ones(5),
            "to_sparse of a sharded tensor": weight.to_sparse,
        },
    )
    check_error_messages(
        ValueError,
        {
            "grad_placements takes": lambda: weight.full_tensor(grad_placements=[Shard(0)]),
            "to_local: the gradient": lambda: weight.to_local(grad_placements=[Replicate()]),
        },
    )


@on_ranks(2, ranges=[((0, 1), (1, 5)), ((0, 3), (3, 5))])
def test_plain_dtensor_over_local_rows_is_right_or_an_error_by_name(ranges: Any) -> None:
    full, (start, end) = torch.arange(20.0).view(5, 4), ranges[dist.get_rank()]
    shards = RowShards(ranges, (1,), name="weight", info=GroupInfo("unit"))
    param = UnevenDTensor.from_rows(full[start:end].clone(), mesh_of(2), shards, full.shape)
    where = {"device_mesh": param.device_mesh, "placements": param.placements}

    def made() -> Any:
        # As for a shadow of the local rows.
        rows = param.detach().to_local().clone()
        return DTensor.from_local(rows, **where, shape=param.shape, stride=param.stride())

    calls: list[Callable[[], Any]] = [
        lambda: made().full_tensor(),
        lambda: (2.0 * made()).full_tensor() / 2.0,
        lambda: made().mul_(0.5).add_(param.detach(), alpha=0.5).full_tensor(),
        lambda: made().lerp_(param.detach(), 0.5).full_tensor(),
        lambda: param.detach().clone().copy_(made()).full_tensor(),
        lambda: distribute_tensor(made().full_tensor(), **where).full_tensor(),
    ]
    for call in calls:
        if ranges[0] == (0, 3):
            assert torch.equal(call(), full)
        else:
            message = error_message(RuntimeError, call)
            assert "a plain DTensor has the placements of weight of unit" in message
    # Torch reads the rows of this rank without computing, and splits whole tensors evenly.
    assert torch.equal(made().to_local(), param.to_local())
    assert torch.equal(distribute_tensor(full, **where).full_tensor(), full)
    assert len({param.placements: 1, (Shard(0),): 2}) == 1


@on_ranks(3)
def test_gradients_of_the_full_tensor_are_summed_for_partial_placements() -> None:
    full, ranges = torch.arange(20.0).view(5, 4), ((0, 0), (0, 4), (4, 5))
    start, end = ranges[dist.get_rank()]
    for placements, factor in ((None, 1), ([Replicate()], 1), ([Partial()], 1 + 2 + 3)):
        rows = RowShards(ranges, (1,))
        sharded = UnevenDTensor.from_rows(full[start:end].clone(), mesh_of(3), rows, full.shape)
        param = nn.Parameter(sharded)
        seen: list[Any] = []
        product = 1.0 * param
        product.register_hook(lambda grad, seen=seen: seen.append(type(grad)))
        share = dist.get_rank() + 1 if factor > 1 else 1
        (share * product.full_tensor(grad_placements=placements).square()).sum().backward()
        expected = factor * 2 * full[start:end]
        assert torch.equal(param.grad.to_local(), expected) and seen == [UnevenDTensor]
