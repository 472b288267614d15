"""Attributes and hooks of parameters, and parameters that are replaced after sharding."""

from __future__ import annotations

import contextlib
import gc
import types
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from megatron_fsdp_v2 import MixedPrecisionPolicy, checkpoint
from megatron_fsdp_v2.optim import flat_optimizer
from tests.cases import quick_only
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    STRATEGIES,
    backward_both,
    batch,
    error_message,
    fill,
    fp64_pair,
    gradient_error,
    mesh_of,
    of_all_ranks,
    own_loss,
    pair,
    plain_loss,
    train_both,
    weight_error,
    whole,
    wrap,
)
from tests.reference.models import INPUT, WIDTH, Checkpointed, Stack, UsedTwice


class Marker:
    """An object that code may set as an attribute of a parameter."""


MARKER = Marker()


def _scaled(value: int) -> int:
    return 3 * value


MARKS: dict[str, Any] = {
    "sequence_parallel": True,
    "partition_dim": 1,
    "allreduce": False,
    "nobody_knows_this_one": ("a", 1),
    "an_object": MARKER,
    "a_function": _scaled,
}


@on_ranks(2, param_dtype=(None, torch.bfloat16), strategy=STRATEGIES[::3])
def test_attributes_are_on_sharded_and_on_gathered_parameters(
    strategy: str, param_dtype: torch.dtype
) -> None:
    model: Any = Stack(2)
    model.output.requires_grad_(False)
    marks = {
        name: {**MARKS, "number": number}
        for number, (name, _) in enumerate(model.named_parameters())
    }
    for name, param in model.named_parameters():
        for attribute, value in marks[name].items():
            setattr(param, attribute, value)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    wrap(model, sharding_strategy=strategy, mp_policy=policy)
    looks = 0

    def look(module: nn.Module, prefix: str) -> None:
        nonlocal looks
        for name, param in module.named_parameters(prefix=prefix):
            looks += 1
            found = {attribute: getattr(param, attribute, "missing") for attribute in marks[name]}
            assert found == marks[name], name

    look(model, "")
    for index, block in enumerate(model.blocks):
        prefix = f"blocks.{index}"
        block.up.register_forward_hook(lambda *_, b=block, p=prefix: look(b, p))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        model(batch(dist.get_rank())).float().square().mean().backward()
        optimizer.step()
    look(model, "")
    per_block = len(list(model.blocks[0].parameters()))
    assert looks == 2 * len(marks) + 4 * per_block


@on_ranks(2)
def test_bound_method_of_a_parameter_is_rebound_and_keeps_no_original_alive() -> None:
    linear: Any = nn.Linear(4, 6, bias=False)
    linear.weight.base = 4
    linear.weight.compute = types.MethodType(lambda self, x: self.base + x, linear.weight)
    original = weakref.ref(linear.weight)
    wrap(linear)
    gc.collect()
    method = linear.weight.compute
    assert method(3) == 7
    assert method.__self__ is linear.weight
    assert original() is None


KINDS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def _step_in_backward(model: nn.Module, kind: str, *, to_none: bool = True) -> dict[Any, Any]:
    """Create an optimizer for every parameter, stepped by a hook."""
    optimizers = {param: KINDS[kind]([param]) for param in model.parameters()}

    def step(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad(set_to_none=to_none)

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)
    return optimizers


CASES: dict[str, tuple[Any, str, bool, dict[str, Any]]] = {
    "adamw": (Stack, "adamw", True, {}),
    "twice, zeros": (UsedTwice, "momentum", False, {"enable_trace_pool": True}),
    "recomputed": (
        partial(Checkpointed, use_reentrant=True),
        "adamw",
        True,
        {"reshard_after_forward": False},
    ),
}


@on_ranks(2, strategy=STRATEGIES[::3], case=CASES)
def test_optimizer_in_backward_trains_like_an_optimizer_after_backward(
    strategy: str, case: str
) -> None:
    """Steps have one and two micro-batches in turn."""
    build, kind, to_none, options = CASES[case]
    plain, model = pair(lambda: build().double(), sharding_strategy=strategy, **options)
    _step_in_backward(model, kind, to_none=to_none)
    optimizer = KINDS[kind](plain.parameters())
    for step in range(4):
        defers = step % 2 == 1
        for micro in range(1 + defers):
            waits = defers and micro == 0
            with model.no_sync() if waits else contextlib.nullcontext():
                backward_both(plain, model, 10 * step + micro)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        assert weight_error(model, plain) < 1e-9
        with torch.no_grad():
            x = batch(0, step, dtype=torch.float64)
            assert float((model(x) - plain(x)).abs().max()) < 1e-9


@on_ranks("shape", shape=[(3,), (2, 2)], strategy=STRATEGIES[::3])
def test_hooks_are_called_on_every_rank_with_the_reduced_gradient(
    shape: tuple[int, ...], strategy: str
) -> None:
    plain, model = fp64_pair(strategy, mesh=mesh_of(*shape))
    expected = dict(zip(model.parameters(), plain.parameters(), strict=True))
    called: list[bool] = []

    def note(param: Any) -> None:
        # Collective: the hook runs on every rank, also without rows.
        is_final = torch.allclose(param.grad.full_tensor(), expected[param].grad)
        called.append(is_final and not torch.is_grad_enabled())

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(note)
    counts = []
    for step, waits in enumerate([False, True, False, True]):
        plain_loss(plain, step).backward()
        with model.no_sync() if waits else contextlib.nullcontext():
            own_loss(model, step).backward()
        counts.append(len(called))
    model.reduce_grad()
    counts.append(len(called))
    # A backward without gradients of parameters.
    x = batch(0, dtype=torch.float64).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    counts.append(len(called))
    assert counts == [len(expected) * times for times in (1, 1, 2, 2, 3, 3)]
    assert all(called)
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2, strategy=STRATEGIES[::3])
def test_hooks_of_parameters_without_gradients_are_not_called(strategy: str) -> None:
    model = wrap(Stack().double(), sharding_strategy=strategy)
    called: set[str] = set()
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: called.add(name))
    names = {name for name, _ in model.named_parameters()}
    model.blocks[1](torch.ones(2, 7, dtype=torch.float64)).sum().backward()
    some = set(called)
    called.clear()
    own_loss(model, 0).backward()
    assert some == {name for name in names if name.startswith("blocks.1.")}
    assert called == names


@on_ranks(2, meta=[False, True])
def test_hooks_registered_before_sharding_are_kept_or_rejected(meta: bool) -> None:
    with torch.device("meta" if meta else "cpu"):
        layer = nn.Linear(4, 4)
    called: list[Any] = []
    handle = layer.weight.register_post_accumulate_grad_hook(called.append)
    model = wrap(layer, [])
    counts = []
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        counts.append(len(called))
        handle.remove()
    model.weight.register_hook(lambda grad: 2 * grad)
    late = error_message(RuntimeError, lambda: model(torch.ones(2, 4)))
    with torch.no_grad():
        model(torch.ones(2, 4))
    hooked = nn.Linear(4, 4)
    hooked.bias.register_hook(lambda grad: 2 * grad)
    assert counts == [1, 1]
    assert called[0] is model.weight
    assert "weight of Linear/0 has a hook of register_hook()" in late
    assert "parameter bias has a hook of register_hook()" in error_message(
        ValueError, lambda: wrap(hooked, [])
    )


def step(model: Any, optimizer: Any) -> float:
    optimizer.zero_grad()
    loss = model(torch.linspace(-1, 1, 10).view(2, 5)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _losses(model: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return [step(model, optimizer) for _ in range(3)]


def rebuild(model: Any) -> None:
    """Replace every parameter by a new object, as some code does."""
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                setattr(module, name, nn.Parameter(param.detach().clone()))


def _assign_sharded(model: Any) -> None:
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _assign_full(model: Any) -> None:
    state = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _move(model: Any) -> None:
    model.to("cpu")
    model.float()


def _set_data(model: Any) -> None:
    for param in model.parameters():
        param.data = param.detach().clone()


CHANGES = {
    "rebuilt": rebuild,
    "assigned, sharded": _assign_sharded,
    "assigned, full": _assign_full,
    "moved to the same device": _move,
    "data set": _set_data,
}


@on_ranks(2, strategy=STRATEGIES[::3], change=CHANGES)
def test_replaced_parameters_keep_their_values_and_continue_to_train(
    change: str, strategy: str
) -> None:
    torch.manual_seed(0)
    expected = _losses(wrap(Stack(), sharding_strategy=strategy))
    torch.manual_seed(0)
    model = wrap(Stack(), sharding_strategy=strategy)
    CHANGES[change](model)
    assert _losses(model) == expected


@on_ranks(2, copied=[torch.clone, whole], was_used=[False, True])
def test_replaced_parameters_stay_frozen_and_in_use_after_a_load(
    copied: Callable[[Any], Any], was_used: bool
) -> None:
    model = wrap(nn.Linear(5, 3), [])
    if was_used:
        model(torch.ones(2, 5))
    for name, param in [*model._parameters.items()]:
        setattr(model, name, nn.Parameter(copied(param.detach()), requires_grad=False))
    replaced = [*model.parameters()]
    model.load_state_dict({}, strict=False)
    # An optimizer may hold them.
    assert all(p is q for p, q in zip(model.parameters(), replaced, strict=True))
    model(torch.ones(2, 5))
    assert not any(param.requires_grad for param in model.parameters())


# -- averaged weights that are swapped in for an evaluation -------------------------------------


def _swap_references(params: list[Any], averages: list[Any]) -> Callable[[], object]:
    kept = [param.data for param in params]
    for param, average in zip(params, averages, strict=True):
        param.data = average.data
    return lambda: _swap_references(params, kept)


def _swap_whole(params: list[Any], averages: list[Any]) -> Callable[[], object]:
    return _swap_references(params, [average.full_tensor() * 1.0 for average in averages])


def _swap_copies(params: list[Any], averages: list[Any]) -> Callable[[], object]:
    kept = [param.data.clone() for param in params]
    torch._foreach_copy_([param.data for param in params], averages)
    return lambda: [param.data.copy_(data) for param, data in zip(params, kept, strict=True)]


def _exchange(params: list[Any], averages: list[Any]) -> Callable[[], object]:
    for param, average in zip(params, averages, strict=True):
        param.data, average.data = average.data, param.data
    return lambda: _exchange(params, averages)


def _swap_tensors(params: list[Any], averages: list[Any]) -> Callable[[], object]:
    for param, average in zip(params, averages, strict=True):
        torch.utils.swap_tensors(param, average)
    return lambda: _swap_tensors(params, averages)


def _swap_flat(params: list[Any], averages: list[Any]) -> Callable[[], object]:
    mains = {param.row_shards.info.owner().main_weight for param in params}
    kept = {main: main.tensor.clone() for main in mains}
    value = averages[0].full_tensor().mean()
    for main in mains:
        main.tensor.fill_(value)
    return lambda: [main.tensor.copy_(flat) for main, flat in kept.items()]


def _swap_rows(params: list[Any], averages: list[Any]) -> Callable[[], object]:
    """Write in ways that advance no version counter, and increment it."""
    kept = [param.to_local().detach().clone() for param in params]
    for number, (param, average) in enumerate(zip(params, averages, strict=True)):
        rows, values = param.to_local().detach(), average.to_local().detach()
        if number % 2:
            rows.numpy()[...] = values.numpy()
        else:
            rows.data.copy_(values)
    torch.autograd.graph.increment_version(params)
    return lambda: [param.to_local().copy_(rows) for param, rows in zip(params, kept, strict=True)]


SWAPS = {
    "references": _swap_references,
    "whole tensors": _swap_whole,
    "copies": _swap_copies,
    "exchanged": _exchange,
    "swap_tensors": _swap_tensors,
    "flat": _swap_flat,
    "rows": _swap_rows,
}


@on_ranks("size", size=quick_only((1, 2), 2), strategy=("no_shard", *STRATEGIES[2:]))
def test_averaged_weights_are_swapped_in_for_an_evaluation_and_out_again(
    size: int, strategy: str
) -> None:
    x = torch.linspace(-1, 1, 10).view(2, 5)
    averaged = wrap(Stack())
    fill(averaged, 0.5)
    expected = averaged(x).detach()

    def losses(swap: Any, dtype: Any, kind: Any) -> list[float]:
        torch.manual_seed(0)
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        model = wrap(Stack(), sharding_strategy=strategy, mp_policy=policy)
        optimizer = kind(model.parameters(), lr=0.05)
        found = [step(model, optimizer)]
        params = list(model.parameters())
        averages = [nn.Parameter(torch.full_like(param, 0.5)) for param in params]
        if swap is not None:
            with torch.no_grad():
                restore = swap(params, averages)
                with torch.inference_mode():
                    output = model(x)
                restore()
            torch.testing.assert_close(output, expected.to(output.dtype), rtol=0.01, atol=0.0)
        found += [step(model, optimizer) for _ in range(2)]
        assert all(bool((average.to_local() == 0.5).all()) for average in averages)
        return found

    for dtype, kind in ((None, AdamW), (torch.bfloat16, flat_optimizer(AdamW))):
        undisturbed = losses(None, dtype, kind)
        for name, swap in SWAPS.items():
            assert losses(swap, dtype, kind) == undisturbed, name


GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "sharded": lambda grad: 0.5 * grad.detach(),
    "whole": lambda grad: torch.full(grad.shape, 0.25, dtype=grad.dtype),
}


@on_ranks(2, strategy=STRATEGIES[::3], kind=GRADIENTS)
def test_data_assigned_to_a_gradient_is_added_to_and_stepped(strategy: str, kind: str) -> None:
    plain, model = fp64_pair(strategy)
    optimizers = (
        torch.optim.SGD(plain.parameters(), lr=0.1),
        flat_optimizer(torch.optim.SGD)(model.parameters(), lr=0.1),
    )

    def assign() -> None:
        for param in (*plain.parameters(), *model.parameters()):
            param.grad.data = GRADIENTS[kind](param.grad)

    backward_both(plain, model)
    assign()
    backward_both(plain, model, step=1)
    added = gradient_error(model, plain)
    assign()
    for optimizer in optimizers:
        optimizer.step()
    assert added < 1e-12
    assert weight_error(model, plain) < 1e-12


@on_ranks(2, strategy=("optim_grads_params", "optim_grads"))
def test_state_dicts_and_loads_of_every_module_see_sharded_parameters(strategy: str) -> None:
    plain, model = pair(sharding_strategy=strategy)
    errors = []
    for place in ("output", "blocks.1.up", "blocks", ""):
        same, part = plain.get_submodule(place), model.get_submodule(place)
        loss = own_loss(model)
        state = part.state_dict()
        loss.backward()
        errors += [
            float((whole(state[name]) - value).abs().max())
            for name, value in same.state_dict().items()
        ]
        loaded = {name: value + 1 for name, value in same.state_dict().items()}
        same.load_state_dict(loaded)
        loss = own_loss(model)
        part.load_state_dict(loaded)
        if strategy != "optim_grads_params":  # there the backward raises, as an unsharded one
            loss.backward()
        own_loss(model).backward()
        errors.append(weight_error(model, plain))
    assert max(errors) == 0.0


@on_ranks(4, timeout_s=20)
def test_part_of_a_model_is_loaded_while_weights_are_kept(tmp_path: Path) -> None:
    """Ranks without rows of a parameter use its new weights too."""
    plain, model = pair()
    model.set_reshard_after_backward(False)
    errors, held = [], []
    for place in ("blocks.0.norm", "output"):
        same, part = plain.get_submodule(place), model.get_submodule(place)
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        held.append(of_all_ranks([param.to_local().numel() for param in part.parameters()]))
        same.load_state_dict({name: value + 1 for name, value in same.state_dict().items()})
        checkpoint.save(tmp_path / place, same, torch.optim.SGD(same.parameters(), lr=0.2))
        with model.no_sync():
            own_loss(model).backward()
        checkpoint.load(tmp_path / place, part, optimizer)
        with torch.no_grad():
            errors.append(float((own_loss(model) - own_loss(plain)).abs()))
        errors.append(optimizer.param_groups[0]["lr"] - 0.2)
    assert max(errors) < 1e-6
    assert not all(map(any, held[0]))


class Flattening(nn.GRU):
    """Moves its weights to other memory, as every RNN does with cuDNN."""

    def flatten_parameters(self) -> None:
        with torch.no_grad():
            for weight in self._flat_weights:
                assert weight is not None
                weight.set_(weight.detach().clone())  # type: ignore[call-overload]


class Recurrent(nn.Module):
    """A recurrent layer, which keeps a list of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = Flattening(INPUT, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.rnn(x)[0]
        return outputs


@on_ranks(2, build=(Stack, Recurrent), full=(False, True))
def test_load_with_assign_keeps_parameters_for_their_optimizer(build: Any, full: bool) -> None:
    plain, model = pair(build)
    params = list(model.parameters())
    optimizers = KINDS["momentum"](plain.parameters()), KINDS["momentum"](params)
    kept = []
    for step in range(2):
        train_both(plain, model, optimizers, range(step, step + 1))
        state = {n: 2 * (whole(v) if full else v) for n, v in model.state_dict().items()}
        own_loss(model)
        model.load_state_dict(state, assign=True)
        plain.load_state_dict({name: 2 * value for name, value in plain.state_dict().items()})
        kept += [a is b for a, b in zip(params, model.parameters(), strict=True)]
    train_both(plain, model, optimizers, range(2, 3))
    assert all(kept)
    assert weight_error(model, plain) < 1e-6


def _initializes_unsharded(model: Any) -> None:
    model.unshard()
    nn.init.ones_(model.output.weight)
    model.reshard()


def _saves_unsharded(model: Any) -> None:
    model.blocks[0].unshard()
    nn.init.ones_(model.blocks[0].up.weight)
    model.state_dict()


def _in_hook(change: Any) -> Any:
    def hook(module: Any, args: Any) -> None:
        del args
        change(module.weight)

    def run(model: Any) -> None:
        handle = model.blocks[1].up.register_forward_pre_hook(hook)
        try:
            with torch.no_grad():
                own_loss(model)
        finally:
            handle.remove()

    return run


WRITES = {
    "output.weight of Stack/0 was changed in place": _initializes_unsharded,
    "up.weight of blocks.0/0 was changed in place": _saves_unsharded,
    "up.weight of blocks.1/0 was changed in place": _in_hook(lambda w: w[0].mul_(2.0)),
    "up.weight of blocks.1/0 was changed": _in_hook(lambda w: w.data.clamp_(-0.01, 0.01)),
    "up.weight of blocks.1/0 is gathered, and data assigned": _in_hook(
        lambda w: setattr(w, "data", w * 2.0)
    ),
}


@on_ranks("size", size=(1, 2), strategy=("no_shard", "optim_grads_params"))
def test_changes_of_gathered_weights_raise_on_any_number_of_ranks(size: int, strategy: str) -> None:
    plain, model = pair(sharding_strategy=strategy)
    found = {text: error_message(RuntimeError, lambda w=w: w(model)) for text, w in WRITES.items()}
    wrong = {text: error for text, error in found.items() if text not in error}
    model.reset_iter_state()
    model.load_state_dict(plain.state_dict())
    backward_both(plain, model)
    assert not wrong
    assert gradient_error(model, plain) < 1e-6


@on_ranks(2, strategy=STRATEGIES, is_unit=[False, True], loads=[False, True])
def test_parameters_tied_after_sharding_train_as_one(
    strategy: str, is_unit: bool, loads: bool
) -> None:
    units = None if is_unit else lambda model: []
    plain, model = pair(units=units, sharding_strategy=strategy)
    for each in (plain, model):
        each.blocks[2].up.weight = each.blocks[0].up.weight
    if loads:
        values = {name: value + 1.0 for name, value in plain.state_dict().items()}
        plain.load_state_dict(values)
        model.load_state_dict({n: whole(p) + 1.0 for n, p in model.state_dict().items()})
    optimizers = tuple(AdamW(each.parameters(), lr=0.1) for each in (plain, model))
    train_both(plain, model, optimizers, range(3))
    assert weight_error(model, plain) < 1e-5
    assert model.blocks[2].up.weight is model.blocks[0].up.weight


@on_ranks(2, strategy=["optim", "optim_grads_params"])
def test_parameters_that_cannot_be_tied_are_rejected_by_name(strategy: str) -> None:
    model = Stack()
    for block in model.blocks[1:]:
        wrap(block, [], sharding_strategy=strategy)
    wrap(model.blocks[0], [], sharding_strategy=strategy, shard_granularity="tensor")
    wrap(model, [], sharding_strategy=strategy)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    for _ in range(2):
        text = error_message(ValueError, lambda: model(batch(0)))
        assert "weight of Linear was tied to up.weight of blocks.0/0" in text
    model = wrap(Stack(), sharding_strategy=strategy)
    model(batch(0))
    model.blocks[2].up.weight = model.blocks[0].up.weight
    text = error_message(ValueError, lambda: model(batch(0)))
    assert "register the same sharded parameter twice before the first forward" in text


class _Sharing(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(WIDTH, WIDTH), shared

    def forward(self, x: torch.Tensor) -> Any:
        return self.shared(torch.tanh(self.own(x)))


@on_ranks(2, strategy=["optim", "optim_grads_params"])
def test_two_roots_share_a_unit_or_are_rejected_by_name(strategy: str) -> None:
    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        shared = nn.Linear(WIDTH, WIDTH)
        return _Sharing(shared), _Sharing(shared)

    def loss(model: Any, rank: int) -> Any:
        return model(torch.full((2, WIDTH), 1.0 + rank)).square().mean()

    first, second = made()
    for unit in (first.shared, first, second):
        wrap(unit, [], sharding_strategy=strategy)
    rank = dist.get_rank()
    if strategy == "optim_grads_params":
        text = error_message(RuntimeError, lambda: loss(first, rank))
        assert "is below two roots, _Sharing and _Sharing" in text
        loss(second, rank).backward()
        return
    plain = made()
    for _ in range(2):
        for model, reference in zip((first, second), plain, strict=True):
            loss(model, rank).backward()
            ((loss(reference, 0) + loss(reference, 1)) / 2).backward()
    for model, reference in zip((first, second), plain, strict=True):
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(whole(param.grad), expected.grad, rtol=1e-5)


@on_ranks(4, strategy=["optim", "optim_grads"])
def test_two_roots_in_one_loss_reduce_a_shared_unit(strategy: str) -> None:
    def made() -> nn.ModuleList:
        torch.manual_seed(0)
        shared = nn.Linear(WIDTH, WIDTH)
        return nn.ModuleList([_Sharing(shared), _Sharing(shared)])

    def loss(models: Any, seed: int) -> Any:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        return sum(model(x).square().mean() for model in models)

    plain, models = made(), made()
    options: Any = {"mesh": mesh_of(2, 2), "sharding_strategy": strategy}
    for unit in (models[0].shared, *models):
        wrap(unit, [], **options)
        # More than are reduced: nothing makes room before the backward ends.
        unit.set_reduce_scatter_max_input_buffers(9)
    first, second = (loss(models, 4 * step + dist.get_rank()) for step in range(2))
    second.backward()
    (sum(loss(plain, 4 + rank) for rank in range(4)) / 4).backward()
    assert gradient_error(models, plain) < 1e-6
    del first


@on_ranks(2, strategy=["no_shard", "optim_grads_params"])
def test_gradients_written_by_the_program_are_stepped(strategy: str) -> None:
    model = wrap(Stack(), sharding_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    first, second = model.output.weight, model.output.bias
    before = [whole(first), whole(second)]
    first.grad, second.grad = torch.zeros_like(first), torch.zeros_like(second)
    first.grad.copy_(values := torch.arange(21.0).view(3, 7))
    second.grad.to_local().fill_(2.0)
    optimizer.step()
    assert torch.equal(whole(first), before[0] - values)
    assert torch.equal(whole(second), before[1] - 2.0)
