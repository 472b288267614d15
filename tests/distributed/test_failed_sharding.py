"""Where fully_shard fails, everything is as it was, and calling it again trains as ever."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, override

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import megatron_fsdp_v2
from megatron_fsdp_v2 import FSDPModule, fully_shard
from megatron_fsdp_v2.params import registration
from megatron_fsdp_v2.runtime import optimizer_steps
from megatron_fsdp_v2.runtime.fsdp_module import unit_of
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import mesh_of, said, step_all

WIDTH = 5
PACKAGE = str(Path(megatron_fsdp_v2.__file__).parent)


class Late(nn.Module):
    """On the meta device but for a buffer, which its initialization changes too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta"))
        self.register_buffer("scale", torch.empty(WIDTH, device="meta"))
        self.register_buffer("number", torch.zeros(()))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.scale.fill_(0.5)
        self.number += 1
        self.was_reset = True

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) * self.scale * self.number


class Mixed(nn.Module):
    """A unit that ran on its own, and beside it all kinds of parameters for the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.late = Late()
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.last = nn.Linear(WIDTH, WIDTH)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.tied(self.late(self.first(x))) * self.frozen)


def _options() -> dict[str, Any]:
    mesh = mesh_of(dist.get_world_size())
    return {"mesh": mesh, "enable_trace_pool": True, "gradient_scaling_factor": 1.0}


def _built() -> Any:
    """The model, whose first unit has a plan for its memory."""
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


class _Same:
    """Equal to what is the same object; keeps it alive, so that no other one can take its place."""

    def __init__(self, value: object) -> None:
        self.value = value

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]

    @override
    def __repr__(self) -> str:
        return f"<{type(self.value).__name__} at {id(self.value):#x}>"


def _state(value: Any, depth: int = 3) -> Any:
    """A value to compare: plain data and containers by content, everything else by identity."""
    if isinstance(value, bool | int | float | str | bytes | type(None)):
        return value
    if depth and type(value) in (list, tuple, deque):
        return [type(value), [_state(one, depth - 1) for one in value]]
    if depth and type(value) in (dict, OrderedDict):
        items = [(_state(k, depth), _state(v, depth - 1)) for k, v in value.items()]
        return [_Same(value), items]
    return _Same(value)


def _attributes(target: Any) -> dict[str, Any]:
    return {name: _state(value) for name, value in vars(target).items()}


def _of_tensor(tensor: torch.Tensor) -> Any:
    table: Any = getattr(tensor, "_post_accumulate_grad_hooks", None)
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return (
        [_state(value) for value in vars(tensor).values()],
        (tensor.requires_grad, tensor.device, _state(tensor._backward_hooks), _state(table)),
        None if local.is_meta else local.detach().numpy().tobytes(),
        _state(registration._STALE.slots.get(tensor)),  # type: ignore[no-untyped-call]
    )


def _of_unit(unit: Any) -> Iterable[Any]:
    yield _attributes(unit)
    yield _attributes(unit.context)
    pool = unit.context.allocator
    yield _attributes(pool)
    for arena in pool._arenas.values():
        # Its memory comes back with the plan, at the next use.
        yield {k: v for k, v in _attributes(arena).items() if k != "_pool"}
        yield [(_state(buffer.arena), buffer.key, buffer.name) for buffer in arena.buffers()]
    for group in unit.groups:
        yield _attributes(group)
        yield _attributes(group.registrations)
        yield group.holders.empty, group._label.name


def _snapshot(model: Any, originals: list[torch.Tensor]) -> dict[str, Any]:
    """Everything that sharding may change."""
    found: dict[str, Any] = {"random": torch.get_rng_state().numpy().tobytes()}
    found["watched"] = len(optimizer_steps._WATCH._contexts)
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


class Injected(Exception):
    """Raised on purpose."""


def fail_at(number: int, call: Callable[[], Any], events: tuple[str, ...]) -> bool:
    """Make a call fail at the n-th time that a function of the package is entered, or left.

    Returns:
        Whether it did; there may be fewer.
    """
    left = number

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        del arg
        code = frame.f_code
        # A generator may be entered to be closed, and nobody hears of an error there.
        if not code.co_filename.startswith(PACKAGE) or code.co_flags & inspect.CO_GENERATOR:
            return None
        frame.f_trace_lines = "line" in events
        # Everything is done when these are left: no code of theirs can fail after that.
        is_over = event == "return" and code.co_qualname in ("make_unit", "fully_shard")
        if event in events and not is_over:
            left -= 1
            if not left:
                raise Injected(f"{code.co_qualname}, {event}")
        return trace

    sys.settrace(trace)
    try:
        call()
    except Injected:
        return True
    finally:
        sys.settrace(None)
    assert left > 0, "an injected error went unnoticed"
    return False


def _train(model: Any) -> list[bytes]:
    """Losses and own rows of the weights in some steps, of a model that is sharded by now."""
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


def check_failures(
    of: str, least: int, events: tuple[str, ...] = ("call",), every: int = 1
) -> None:
    """See that failures, of which there are some, change nothing, and that the next call trains."""
    call: Callable[[Any], Any] = functools.partial(_SHARDED[of], **_options())
    expected, model = _built(), _built()
    torch.manual_seed(1)
    call(expected)
    expected_bits = _train(expected)
    torch.manual_seed(1)
    originals = [*model.parameters(), *model.buffers()]
    before, number = _snapshot(model, originals), 1
    while fail_at(number, lambda: call(model), events):
        assert _changes(before, _snapshot(model, originals)) == [], number
        number += every
    assert number // every >= least
    assert _train(model) == expected_bits
    assert model.calls == ["forward", "weight"] * 3


_SHARDED: dict[str, Callable[..., Any]] = {
    "root": fully_shard,
    "some": lambda model, **options: fully_shard([model.late, model.tied], **options),
}


@on_ranks(1)
def test_a_failure_at_any_step_changes_nothing_and_the_next_call_trains() -> None:
    check_failures("root", 50, every=11)


@pytest.mark.functional
@on_ranks(2, timeout_s=600, of=["root", "some"])
def test_a_failure_where_any_function_begins_or_ends_changes_nothing(of: str) -> None:
    check_failures(of, 500, ("call", "return"))


def _raise(*args: Any, **kwargs: Any) -> None:
    raise Injected


def _initialize_and_raise(module: Any) -> None:
    module.reset_parameters()
    module.extra = nn.Parameter(torch.ones(1))
    module.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    raise Injected


def _out_of_memory(model: Any) -> None:
    model.huge = nn.Parameter(torch.zeros(1).expand(1 << 55))
    try:
        assert "memory" in said(RuntimeError, lambda: fully_shard(model, **_options()))
    finally:
        del model.huge


def _failed_collective(model: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # The first one is of the weight, the second of the buffer.
        calls = itertools.count()
        broadcast = dist.broadcast
        patch.setattr(
            dist,
            "broadcast",
            lambda *args, **kwargs: (_raise if next(calls) else broadcast)(*args, **kwargs),
        )
        _fails(model)


def _fails(model: Any, **options: Any) -> None:
    with pytest.raises(Injected):
        fully_shard(model, **options, **_options())


def _gathered_inside(model: Any) -> None:
    model.first.unshard()
    before = _snapshot(model, [])
    assert "is gathered" in said(RuntimeError, lambda: fully_shard(model, **_options()))
    assert not _changes(before, _snapshot(model, []))
    model.first.reshard()


def _mesh_of_another_rank(model: Any) -> None:
    for other in (0, 1):
        # Both ranks make both.
        mesh = DeviceMesh("cpu", [other])
        if dist.get_rank() != other:
            text = said(ValueError, lambda m=mesh: fully_shard(model, **{**_options(), "mesh": m}))
            assert f"this is rank {dist.get_rank()}, and mesh has the ranks [{other}]" in text


REAL: dict[str, Callable[[Any], None]] = {
    "no memory for a buffer": _out_of_memory,
    "an initialization that raises": lambda model: _fails(
        model, param_init_fn=_initialize_and_raise
    ),
    "a collective that fails": _failed_collective,
    "a mesh of another rank": _mesh_of_another_rank,
}


@on_ranks(2)
def test_real_errors_change_nothing_and_the_next_call_trains() -> None:
    expected, model = _built(), _built()
    torch.manual_seed(1)
    expected_bits = _train(expected)
    torch.manual_seed(1)
    _gathered_inside(model)
    originals = [*model.parameters(), *model.buffers()]
    for name, fail in REAL.items():
        before = _snapshot(model, originals)
        fail(model)
        assert _changes(before, _snapshot(model, originals)) == [], name
    assert _train(model) == expected_bits
    assert model.calls == ["forward", "weight"] * 3
