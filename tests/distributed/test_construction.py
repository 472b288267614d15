"""Models on the meta device; and a failing fully_shard changes nothing."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import traceback
import typing
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import megatron_fsdp_v2
from megatron_fsdp_v2 import FSDPModule, fully_shard
from megatron_fsdp_v2.runtime import optimizer_steps
from megatron_fsdp_v2.runtime.fsdp2 import swap_class
from megatron_fsdp_v2.runtime.module import unit_of
from tests.cases import longer
from tests.distributed.nccl_double import as_on_cuda
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    backward_both,
    batch,
    error_message,
    fill,
    gradient_error,
    mesh_of,
    of_all_ranks,
    pair,
    step_all,
    weight_error,
    wrap,
)
from tests.reference.failing import PlannedFailure
from tests.reference.models import INPUT, TiedInside
from tests.sharding import shard


@on_ranks("sizes", sizes=[(3,), (2, 2)], strategy=["optim_grads_params", "no_shard"])
def test_meta_model_is_identical_across_ranks_and_peaks_at_one_unit(
    sizes: tuple[int, ...], strategy: str
) -> None:
    # Seeds differ between ranks, and weights must still be identical.
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model: Any = TiedInside()
    made: list[weakref.ref[torch.Tensor]] = []
    num_live = []

    def initialize(module: Any) -> None:
        module.reset_parameters()
        made.append(weakref.ref(module.weight))
        num_live.append(sum(ref() is not None for ref in made))

    options = {"mesh": mesh_of(*sizes), "sharding_strategy": strategy, "param_init_fn": initialize}
    wrap(model, [model.embedding, *model.blocks, model.head], **options)
    full = {name: param.full_tensor().tolist() for name, param in model.named_parameters()}
    same = of_all_ranks(full)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    losses = []
    for _ in range(3):
        loss = model(batch(0)).square().mean()
        loss.backward()
        step_all(optimizer)
        losses.append(float(loss.detach()))
    assert all(other == full for other in same)
    drawn = [str(value) for name, value in full.items() if "norm" not in name]
    assert len(set(drawn)) == len(drawn)
    # The weights of one block.
    assert max(num_live) == 3
    assert model.head.weight is model.embedding.weight
    assert not any(param.is_meta for param in model.parameters())
    assert losses[2] < losses[0]


class Forgetful(nn.Linear):
    """A module whose initialization omits a buffer."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.register_buffer("scale", torch.empty(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


@on_ranks(1)
def test_uninitialized_buffer_is_named_in_the_error() -> None:
    with torch.device("meta"):
        module: Any = Forgetful()
    fully_shard(module)
    text = error_message(RuntimeError, lambda: module(batch(0)))
    module.scale.fill_(2.0)
    assert "scale of unit the root (Forgetful) had no values on the meta device" in text
    assert module(batch(0)).isfinite().all()


class Bare(nn.Module):
    """A module without `reset_parameters`, as most modules of model libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.register_buffer("table", torch.arange(5))
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, self.table] @ self.weight)


@on_ranks(2, strategy=["optim", "optim_grads_params"])
def test_modules_without_reset_parameters_load_a_state_dict(strategy: str) -> None:
    mesh = mesh_of(dist.get_world_size())
    torch.manual_seed(0)
    real = nn.Sequential(Bare(), nn.Linear(1, 2))
    errors, distances = [], {}
    for how in ("full", "assigned", "distributed", "sharded"):
        with torch.device("meta"):
            model: Any = nn.Sequential(Bare(), nn.Linear(1, 2))
            wrap(model, [model[0]], sharding_strategy=strategy)
        errors.append(error_message(RuntimeError, lambda model=model: model(torch.ones(2, 5))))
        model.to_empty(device="cpu")
        state: Any = real.state_dict()
        if how == "distributed":
            split = {k: distribute_tensor(v, mesh, [Shard(0)]) for k, v in real.named_parameters()}
            state = {**state, **split}
        if how == "sharded":
            other: Any = copy.deepcopy(real)
            wrap(other, [other[0]], sharding_strategy=strategy)
            state = other.state_dict()
        model.load_state_dict(state, assign=how != "full")
        # Assigned parameters are replaced by sharded parameters at the first use.
        model(batch(0))
        model.reshard()
        real.zero_grad()
        backward_both(real, model)
        distances[how] = max(weight_error(model, real), gradient_error(model, real))
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    full = torch.cat([p.full_tensor().flatten() for p in model.parameters()])
    assert all("table, weight of unit 0 (Bare) had no values" in error for error in errors)
    assert max(distances.values()) < 1e-6, distances
    assert bool((full == 0.5).all())


class _SkipsBare(nn.Sequential):
    """Runs its first module unless `skips`."""

    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](x[:, :1] if self.skips else self[0](x))


@on_ranks(2)
def test_a_rank_may_skip_a_loaded_unit_of_the_meta_device_at_first() -> None:
    with torch.device("meta"):
        model: Any = _SkipsBare(Bare(), nn.Linear(1, 2))
    wrap(model, [model[0]], sharding_strategy="optim_grads")
    model.load_state_dict(_SkipsBare(Bare(), nn.Linear(1, 2)).state_dict())
    for model.skips in (dist.get_rank() == 1, False):
        model(torch.ones(2, 5)).sum().backward()
    assert model[0].weight.grad.to_local().any()


class Rewrapping(nn.Module):
    """Registers new parameters and sets attributes on them, as Transformer Engine's modules do."""

    def __init__(self, *, copies: bool = False) -> None:
        super().__init__()
        self.copies = copies
        self.weight = nn.Parameter(torch.empty(6, 4))
        self.weight.from_the_constructor = 1  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        values = torch.arange(24.0).view(6, 4)
        if not self.copies:
            values = self.weight.detach().copy_(values)
        self.weight = nn.Parameter(values)
        self.weight.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@on_ranks(2, copies=[False, True])
def test_parameters_registered_by_an_initialization_keep_attributes_and_values(
    copies: bool,
) -> None:
    with torch.device("meta"):
        module: Any = Rewrapping(copies=copies)
    fully_shard(module)
    weight = module.weight
    assert torch.equal(weight.full_tensor(), torch.arange(24.0).view(6, 4))
    module.unshard()
    for param in (weight, module.weight):
        assert (param.sequence_parallel, param.from_the_constructor) == (True, 1)


class LeftAsItIs(nn.Module):
    """A module whose initialization replaces the weight's data, with NaN on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 3))

    def reset_parameters(self) -> None:
        self.weight.data = torch.full((5, 3), float("nan") if dist.get_rank() else 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@on_ranks(2)
def test_ranks_agree_on_whether_weights_have_values() -> None:
    with torch.device("meta"):
        module: Any = LeftAsItIs()
    fully_shard(module)
    fill(module, 2.0)
    assert float(module(torch.ones(1, 5)).sum()) == 30.0


class Tables(nn.Module):
    """Transposed buffers of dtypes that not every backend can reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        for dtype in TABLE_DTYPES:
            self.register_buffer(str(dtype)[6:], torch.empty(2, 3, dtype=dtype).t())

    def reset_parameters(self) -> None:
        for tensor in (self.weight, *self.buffers()):
            tensor.copy_(torch.full_like(tensor, dist.get_rank() + 1, dtype=torch.float32))


TABLE_DTYPES = (torch.int16, torch.uint16, torch.bool, torch.complex64, torch.float8_e4m3fn)


@on_ranks(2, answers_as_nccl=[False, True])
def test_buffers_of_any_dtype_are_broadcast_from_rank_0(answers_as_nccl: bool) -> None:
    with torch.device("meta"):
        model = Tables()
    with as_on_cuda() if answers_as_nccl else contextlib.nullcontext():
        wrap(model)
    values = {str(b.dtype): {*b.to(torch.complex64).flatten().tolist()} for b in model.buffers()}
    assert values == {str(dtype): {1 + 0j} for dtype in TABLE_DTYPES}


@on_ranks(3)
def test_values_come_from_the_first_rank_that_is_not_on_the_meta_device() -> None:
    rank = dist.get_rank()
    with contextlib.nullcontext() if rank else torch.device("meta"):
        torch.manual_seed(rank)
        module: Any = nn.Sequential(Bare(), nn.BatchNorm1d(1))
    if rank:
        module[0].table.add_(rank)
    before = [tensor.clone() for tensor in module.state_dict().values()]
    originals = list(module.state_dict().values())
    wrap(module, [module[0]])
    torch.manual_seed(1)
    expected = nn.Sequential(Bare(), nn.BatchNorm1d(1))
    expected[0].table.add_(1)
    assert weight_error(module, expected) == 0.0
    assert module[0].table.tolist() == [i + max(rank, 1) for i in range(5)]
    assert rank == 0 or all(map(torch.equal, before, originals))


def _drawn() -> nn.Module:
    """A model in which one module has two parents."""
    torch.manual_seed(7)
    first, shared = nn.Linear(5, 4), nn.Linear(4, 3)
    inner = nn.Sequential(shared, nn.Sequential(shared), nn.Bilinear(3, 3, 2))
    return nn.Sequential(first, inner, nn.Embedding(3, 2))


@on_ranks(2, unit_by_unit=[False, True])
def test_weights_and_random_state_equal_those_of_an_unsharded_program(unit_by_unit: bool) -> None:
    real = _drawn()
    with torch.device("meta"):
        model: Any = _drawn()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    for layer in model if unit_by_unit else ():
        fully_shard(layer)
    fully_shard(model)
    assert torch.equal(torch.get_rng_state(), before)
    found = [param.full_tensor() for param in model.parameters()]
    assert all(map(torch.equal, found, real.parameters()))


def _initialize(model: nn.Module) -> None:
    """Draw values of all parameters, in several ways."""
    torch.manual_seed(8)
    first, second, *others = model.parameters()
    nn.init.trunc_normal_(first)
    nn.init.kaiming_uniform_(first)
    with torch.no_grad():
        second.copy_(torch.randn_like(second)).exponential_()
    for param in others:
        nn.init.normal_(param)


@on_ranks(2, strategy=["no_shard", "optim_grads_params"])
def test_random_initialization_after_sharding_draws_the_values_of_whole_parameters(
    strategy: str,
) -> None:
    plain, model = pair(_drawn, lambda model: [model[1]], sharding_strategy=strategy)
    model.to_empty(device="cpu")
    for each in (plain, model):
        _initialize(each)
    found = [param.full_tensor() for param in model.parameters()]
    assert all(map(torch.equal, found, plain.parameters()))


@on_ranks(2)
def test_replicas_that_differ_after_to_empty_are_found() -> None:
    model = wrap(nn.Linear(INPUT, 2), [], sharding_strategy="no_shard")
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    model.reset_parameters()
    text = error_message(RuntimeError, lambda: model(batch(0)))
    assert "copies of one weight must be identical across ranks" in text


WIDTH = 5
PACKAGE = str(Path(megatron_fsdp_v2.__file__).parent)


class Late(nn.Module):
    """A module on the meta device except for one buffer, which its initialization changes too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta"))
        self.register_buffer("scale", torch.empty(WIDTH, device="meta"))
        self.register_buffer("number", torch.zeros(()))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.scale.fill_(0.5)
        self.number += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) * self.scale * self.number


class Mixed(nn.Module):
    """A unit that has run before, and parameters of all kinds for the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.late = Late()
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.tied(self.late(self.first(x))) * self.frozen)


def _options() -> dict[str, Any]:
    mesh = mesh_of(dist.get_world_size())
    return {"mesh": mesh, "enable_trace_pool": True, "gradient_scaling_factor": 1.0}


def _built() -> Any:
    """The model, whose first unit has a memory plan."""
    torch.manual_seed(0)
    model: Any = Mixed()
    model.calls = []
    model.last.weight.register_post_accumulate_grad_hook(lambda _: model.calls.append("weight"))
    model.last.register_forward_hook(lambda *_: model.calls.append("forward"))
    fully_shard(model.first, **_options())
    for _ in range(4):
        model.first(torch.ones(2, WIDTH)).sum().backward()
    model.zero_grad()
    assert model.first.trace_pool().reports()[0].plan is not None
    return model


def _state(value: Any, depth: int = 3) -> Any:
    """A value to compare: plain data and containers by content, everything else by identity."""
    if isinstance(value, bool | int | float | str | bytes | type(None)):
        return value
    if depth and type(value) in (list, tuple, deque):
        return [type(value), [_state(one, depth - 1) for one in value]]
    items: list[Any] = []
    if depth and type(value) in (dict, OrderedDict):
        items = [(_state(k, depth), _state(v, depth - 1)) for k, v in value.items()]
    # The addresses are compared; the object is kept, so that its address is not reused.
    return (id(value), value, items)


def _attributes(target: Any) -> dict[str, Any]:
    return {name: _state(value) for name, value in vars(target).items()}


def _of_tensor(tensor: torch.Tensor) -> Any:
    table: Any = getattr(tensor, "_post_accumulate_grad_hooks", None)
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return (
        [_state(value) for value in vars(tensor).values()],
        (tensor.requires_grad, tensor.device, _state(tensor._backward_hooks), _state(table)),
        None if local.is_meta else local.detach().numpy().tobytes(),
    )


def _of_unit(unit: Any) -> Iterable[Any]:
    yield _attributes(unit)
    yield _attributes(unit.context)
    yield _attributes(unit.context.allocator)
    for group in unit.groups:
        yield _attributes(group)
        yield [_attributes(payload.gathered) for payload in group.payloads]
        yield [_attributes(buffer) for buffer in group.grads.buffers()]


def _snapshot(model: Any, originals: list[torch.Tensor]) -> dict[str, Any]:
    """Everything that sharding may change."""
    found: dict[str, Any] = {"random": torch.get_rng_state().numpy().tobytes()}
    found["watched"] = len(optimizer_steps.OPTIMIZER_WATCH._contexts)
    for name, module in model.named_modules():
        found[f"class of {name}"] = type(module)
        for key, value in _attributes(module).items():
            found[f"{key} of {name}"] = value
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            found[f"value of {name}.{key}"] = None if tensor is None else _of_tensor(tensor)
        if isinstance(module, FSDPModule):
            found[f"unit of {name}"] = list(_of_unit(unit_of(module)))
    found["originals"] = [_of_tensor(tensor) for tensor in originals]
    return found


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    both = {**before, **after}
    return [key for key in both if before.get(key, "none") != after.get(key, "none")]


def fail_at(number: int, call: Callable[[], Any], events: tuple[str, ...]) -> bool:
    """Make a call fail at the n-th of some trace events in functions of the package.

    Returns:
        Whether the call failed; it may have fewer events.
    """
    left = number

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        code = frame.f_code
        # Python ignores errors in `__del__`, and in a generator that is entered to be closed.
        if not code.co_filename.startswith(PACKAGE) or code.co_flags & inspect.CO_GENERATOR:
            return None
        # Nothing that can fail is left when a unit is installed.
        running = {f.f_code.co_name for f, _ in traceback.walk_stack(frame)}
        if running & {"__del__", "_install"}:
            return None
        frame.f_trace_lines = "line" in events
        # These functions are complete when they return: no later statement of theirs can fail.
        is_over = event == "return" and code.co_name in ("make_unit", "fully_shard", "checked")
        if event in events and not is_over:
            left -= 1
            if not left:
                raise PlannedFailure(f"{code.co_qualname}, {event}")
        return trace

    sys.settrace(trace)
    try:
        call()
    except PlannedFailure:
        return True
    finally:
        sys.settrace(None)
    assert left > 0, "an injected error went unnoticed"
    return False


def _train(model: Any) -> list[bytes]:
    """Shard the root if it is not sharded, and train; return losses and this rank's rows."""
    if not isinstance(model, FSDPModule):
        fully_shard(model, **_options())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(3):
        x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH) + step + dist.get_rank()
        loss = model(x).square().mean()
        loss.backward()
        step_all(optimizer)
        found.append(loss.detach().numpy().tobytes())
    return found + [param.to_local().detach().numpy().tobytes() for param in model.parameters()]


def _built_and_expected(call: Callable[..., Any]) -> tuple[Any, list[bytes]]:
    """The model, and the results of training it after a call that shards it."""
    expected, model = _built(), _built()
    torch.manual_seed(1)
    call(expected, **_options())
    results = _train(expected)
    torch.manual_seed(1)
    return model, results


_SHARDED: dict[str, Callable[..., Any]] = {
    "root": fully_shard,
    "some": lambda model, **options: fully_shard([model.late, model.tied], **options),
}


@pytest.mark.parametrize(
    ("of", "least", "events", "every"),
    [
        ("root", 50, ("call",), 11),
        longer("root", 500, ("call", "return"), 1),
        longer("some", 500, ("call", "return"), 1),
    ],
)
@on_ranks(2, timeout_s=600)
def test_failure_in_any_function_changes_nothing_and_the_next_call_trains(
    of: str, least: int, events: tuple[str, ...], every: int
) -> None:
    """At least `least` failures, of every `every`th event."""
    model, expected = _built_and_expected(_SHARDED[of])
    originals = [*model.parameters(), *model.buffers()]
    before, number = _snapshot(model, originals), 1
    while fail_at(number, lambda: _SHARDED[of](model, **_options()), events):
        assert _changes(before, _snapshot(model, originals)) == [], number
        number += every
    assert number // every >= least
    assert _train(model) == expected
    assert model.calls == ["forward", "weight"] * 3


def _initialize_and_raise(module: Any) -> None:
    module.reset_parameters()
    module.extra = nn.Parameter(torch.ones(1))
    module.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    raise PlannedFailure("an initialization that raises")


@on_ranks(2)
def test_real_errors_change_nothing_and_the_next_call_trains() -> None:
    model, expected = _built_and_expected(fully_shard)
    rank, meshes = dist.get_rank(), [DeviceMesh("cpu", [other]) for other in range(2)]
    calls: dict[str, Callable[[], Any]] = {
        "is gathered": lambda: fully_shard(model, **_options()),
        "an initialization that raises": lambda: shard(
            model, param_init_fn=_initialize_and_raise, **_options()
        ),
        f"this is rank {rank}, and mesh has the ranks [{1 - rank}]": lambda: fully_shard(
            model, **{**_options(), "mesh": meshes[1 - rank]}
        ),
    }
    model.first.unshard()
    for text, call in calls.items():
        originals = [*model.parameters(), *model.buffers()]
        before = _snapshot(model, originals)
        assert text in error_message(Exception, call)
        assert _changes(before, _snapshot(model, originals)) == [], text
        model.first.reshard()
    assert _train(model) == expected
    assert model.calls == ["forward", "weight"] * 3


class ReadsAnnotations(nn.Linear):
    """Resolves the annotations of every subclass, as models of transformers do."""

    seen: typing.ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ReadsAnnotations.seen = typing.get_type_hints(cls)


def test_annotations_of_a_sharded_class_can_be_resolved() -> None:
    module = ReadsAnnotations(2, 3)
    swap_class(module)
    assert isinstance(module, FSDPModule)
    assert "weight" in ReadsAnnotations.seen


def test_sharded_class_prints_its_original_name_and_its_module_a_sharded_name() -> None:
    module = nn.Sequential(nn.Linear(2, 3))
    swap_class(module[0])
    assert str(type(module[0])) == str(nn.Linear)
    assert "(0): FSDPLinear(" in str(module)
