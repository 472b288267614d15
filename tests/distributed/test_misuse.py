"""Invalid arguments and misuse raise errors with advice, and later calls work."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as their_fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from megatron_fsdp_v2 import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    RuntimeOptions,
    ShardPlacementResult,
    UnitOptions,
    fully_shard,
)
from megatron_fsdp_v2.diagnostics import memory_tracker
from megatron_fsdp_v2.params.autograd import save_activations_on_cpu
from megatron_fsdp_v2.params.formats import register_format
from megatron_fsdp_v2.runtime import context
from megatron_fsdp_v2.runtime.module import unit_of
from tests.distributed.on_ranks import on_ranks
from tests.distributed.test_parameters import rebuild, step
from tests.distributed.wrapping import (
    batch,
    check_error_messages,
    error_message,
    gradient_error,
    loss_of,
    mesh_of,
    own_loss,
    pair,
    wrap,
)
from tests.parity.inputs_outputs import ClosureBlock, Regularized, Unpacking, gradient_penalty
from tests.reference.models import INPUT, WIDTH, Formula, Skipping, Stack
from tests.reference.scaled_float8 import ScaledFloat8Format, quantize_linears

# -- arguments ------------------------------------------------------------------------------------


def _linear(**options: Any) -> Any:
    return fully_shard(nn.Linear(2, 2), **options)


def _holding(name: str, param: torch.Tensor) -> Any:
    """Shard a module with a given parameter."""
    module = nn.Linear(2, 2)
    setattr(module, name, nn.Parameter(param))
    return fully_shard(module)


def _parent_before_child() -> None:
    model = Stack()
    fully_shard(model)
    fully_shard(model.blocks[0])


def _parameter_with_fsdp2_hook() -> None:
    module = nn.Linear(2, 2)
    # The hook that FSDP2 calls before it gathers a parameter.
    module.bias.fsdp_pre_all_gather = lambda *args: (args, None)  # type: ignore[attr-defined]
    fully_shard(module)


def _tied_but_different() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    fully_shard(first)
    fully_shard(second, gradient_scaling_factor=3.0)


class _Bare(nn.Module):
    """A module without `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2, device="meta"))


class _Reshaping(_Bare):
    """A module whose initialization registers a parameter of another shape."""

    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.zeros(3, 2))


def _quantized_and_offloaded() -> None:
    register_format(ScaledFloat8Format)
    model = Stack()
    quantize_linears(model)
    fully_shard(model.blocks[0], offload_policy=CPUOffloadPolicy())


@dataclasses.dataclass
class _Elsewhere:
    """A policy of another library, with fields that this package does not support."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


@dataclasses.dataclass
class _OfTorch215:
    """A policy with the field that torch's policy has from 2.15 on."""

    param_dtype: torch.dtype | None = None
    param_dtype_override_fn: Any = None


ARGUMENTS: dict[str, dict[str, Any]] = {
    "unknown sharding_strategy 'zero3'; choose one of no_shard, optim": {
        "sharding_strategy": "zero3"
    },
    "needs a 2-D mesh": {"outer_dp_sharding_strategy": "optim"},
    "mesh must be a DeviceMesh, got str": {"mesh": "dp"},
    "unknown shard_granularity 'rows'": {"shard_granularity": "rows"},
    "reduce_scatter_with_fp32_accumulation cannot be used with sharding_strategy=": {
        "mp_policy": MixedPrecisionPolicy(reduce_scatter_with_fp32_accumulation=True),
        "sharding_strategy": "no_shard",
    },
    "used_params has a parameter of shape (2, 3) that no other unit has": {
        "options": UnitOptions(used_params={nn.Parameter(torch.ones(2, 3))})
    },
    "on_missing_grad must be 'none', 'zero' or 'error', got": {"on_missing_grad": "ignore"},
    "enable_trace_pool must be True or False, got 'yes'": {"enable_trace_pool": "yes"},
    "options must be a RuntimeOptions or a UnitOptions, got {": {"options": {"check_ranks": None}},
    "mp_policy must be a MixedPrecisionPolicy": {"mp_policy": torch.bfloat16},
    "whose buffer_dtype cannot be honored": {"mp_policy": _Elsewhere(buffer_dtype=torch.float32)},
    "whose param_dtype_override_fn cannot be honored": {
        "mp_policy": _OfTorch215(param_dtype_override_fn=lambda param: None)
    },
    "reshard_after_forward must be True, False or None, got 3": {"reshard_after_forward": 3},
    "reshard_after_forward must be True, False or None, got 'yes'": {
        "reshard_after_forward": "yes"
    },
    "offload_policy='cpu' cannot be honored; give": {"offload_policy": "cpu"},
    "dp_mesh_dims must be a DataParallelMeshDims(shard=..., replicate=...) with names": {
        "dp_mesh_dims": "dp"
    },
    "must name axes of mesh, each once and in the order of the mesh": {
        "dp_mesh_dims": DataParallelMeshDims(shard="dp")
    },
    "shard_placement_fn returns S(2) for parameter weight of 2 dimensions; return None": {
        "shard_placement_fn": lambda param: Shard(2)
    },
    "mesh must be a DeviceMesh, got NoneType": {
        "shard_placement_fn": lambda param: ShardPlacementResult(None, None)
    },
}
# -- misuse ---------------------------------------------------------------------------------------


def _while_unsharded() -> None:
    model = Stack()
    fully_shard(model.blocks[0]).unshard()
    fully_shard(model)


def _during_a_step() -> None:
    model = Stack()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    model(torch.ones(2, 5))
    fully_shard(model)


def _shared_with_another_root() -> None:
    first, second = Stack(), Stack()
    second.blocks[0].up.weight = first.blocks[0].up.weight
    for model in (first, second):
        fully_shard(model.blocks[0])
        fully_shard(model)
    first(torch.ones(2, 5))
    with contextlib.suppress(RuntimeError):
        second(torch.ones(2, 5))
    # The error is raised at every use.
    second(torch.ones(2, 5))


def _tied_to_a_gathered_unit() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    fully_shard(first).unshard()
    fully_shard(second)


def _non_leaf() -> None:
    module = nn.Linear(3, 3)
    # As left by code that computes weights from other tensors.
    module._parameters["weight"] = module.weight * 2.0
    fully_shard(module)


def _cuda_mesh() -> None:
    mesh = DeviceMesh("cuda", torch.arange(dist.get_world_size()), _init_backend=False)
    fully_shard(nn.Linear(3, 3), mesh=mesh)


def _opts_out_between_backwards() -> None:
    model = wrap(Stack(), sharding_strategy="no_shard")
    with model.no_sync():
        model(torch.ones(2, 5)).sum().backward()
    model.set_requires_gradient_reduction(False)


def _stale_optimizer() -> None:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    fully_shard(model)
    optimizer.step()


def _optimizer_before_rebuilding() -> None:
    model = wrap(Stack())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    rebuild(model)
    step(model, optimizer)


def _changed(path: str, value: Callable[[Any], Any]) -> Callable[[], None]:
    """A function that sets an attribute of a sharded model and runs the model."""
    owner, _, name = path.rpartition(".")

    def call() -> None:
        model = wrap(Stack())
        target = model.get_parameter(owner) if name == "data" else model.get_submodule(owner)
        setattr(target, name, value(model))
        model(torch.ones(2, 5))

    return call


def _tied_to_a_rebuilt_weight() -> None:
    model = wrap(Stack())
    rebuild(model)
    model.blocks[0].up.weight = model.blocks[1].up.weight
    model(torch.ones(2, 5))


def _untied() -> None:
    model = Stack()
    model.blocks[0].up.weight = model.blocks[1].up.weight
    wrap(model, sharding_strategy="no_shard")  # every rank has the rows that differ
    rebuild(model)
    with torch.no_grad():
        model.blocks[1].up.weight.add_(1.0)
    model(torch.ones(2, 5))


def _without_a_gradient() -> None:
    model = Stack()
    model.blocks[0].unused = nn.Parameter(torch.ones(2, 2))
    wrap(model, on_missing_grad="error")(torch.ones(2, 5)).sum().backward()


def _computes_with_an_original() -> None:
    layer = nn.Linear(4, 4)
    kept = [layer.weight]
    module = Formula(lambda m, x: m.layer(x) + x @ kept[0].t(), layer=layer)
    wrap(module)(torch.ones(2, 4)).sum().backward()


def _reads_freed_weight() -> None:
    model = wrap(Stack())
    loss = loss_of(model, 0)
    kept = list(model.output.parameters())
    loss.backward()
    kept[0].square()


def _adds_parameters_late() -> None:
    model = wrap(Stack())
    loss_of(model, 0).backward()
    model.blocks[0].adapter = nn.Linear(2, 2)
    torch.optim.AdamW(model.parameters()).step()
    loss_of(model, 0)


def _with_plain_gradient(act: Callable[[Any], Any]) -> None:
    model = wrap(Stack())
    model.output.weight.grad = torch.ones(3, 7)
    act(model)


def _changes_a_leaf() -> None:
    model = wrap(Formula(lambda m, x: m.layer(x.relu_()), layer=nn.Linear(4, 4)))
    model(torch.ones(2, 4, requires_grad=True))


def _new(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=dtype))


def _tracked(module: nn.Module) -> None:
    with memory_tracker(module):
        pass


VALUE: dict[str, Callable[[], Any]] = {
    **{text: partial(_linear, **options) for text, options in ARGUMENTS.items()},
    **{
        f"{option} must be a whole number of at least 1, got {value}": partial(
            RuntimeOptions, **{option: value}
        )
        for option in ("unshard_prefetch_depth", "unshard_prefetch_bytes", "max_live_grad_buffers")
        for value in (0, 1.5, True)
    },
    "Stack contains no sharded module": lambda: _tracked(Stack()),
    "Sequential is not sharded itself": lambda: _tracked(nn.Sequential(wrap(Stack()))),
    "a data-parallel mesh has 1 axis (dp) or 2 (outer dp, inner dp), got 3": lambda: _linear(
        mesh=init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    ),
    "needs an nn.Module": lambda: fully_shard(lambda x: x),  # type: ignore[arg-type]
    "ModuleList has no forward": lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])),
    "fully_shard was already called on this": lambda: fully_shard(_linear()),
    "is sharded already, by a unit that contains it": _parent_before_child,
    "parameter scale is 0-dim": lambda: _holding("scale", torch.tensor(1.0)),
    "parameter weight is a TwoTensor, which is made of other tensors": lambda: _holding(
        "weight", TwoTensor(torch.ones(2, 2), torch.zeros(2, 2))
    ),
    "parameter bias is a Parameter, which no registered weight format supports, and its "
    "fsdp_pre_all_gather cannot be called: its class does not": _parameter_with_fsdp2_hook,
    "parameter weight is tied to weight of Linear/0, which was sharded with another mesh": (
        _tied_but_different
    ),
    "check_ranks must be 'never', 'once' or 'always', got 'sometimes'": lambda: RuntimeOptions(
        check_ranks="sometimes"
    ),
    "Linear is not sharded; call fully_shard": lambda: unit_of(nn.Linear(2, 2)),
    "parameter weight is not a leaf tensor": _non_leaf,
    "parameter weight is complex (torch.complex64) and trained": lambda: _holding(
        "weight", torch.ones(2, 2, dtype=torch.complex64)
    ),
    "parameter weight is of 8 bits (torch.float8_e4m3fn) and trained": lambda: _holding(
        "weight", torch.ones(2, 2).to(torch.float8_e4m3fn)
    ),
    "parameter up.weight is a ScaledFloat8": _quantized_and_offloaded,
    "initialization of _Reshaping left weight of shape (3, 2)": lambda: fully_shard(_Reshaping()),
    "min_nbytes is a number of bytes, got -1": lambda: save_activations_on_cpu(min_nbytes=-1),
    "got an empty list": lambda: fully_shard([]),
    "needs an nn.Module, got str": lambda: fully_shard([nn.Linear(2, 2), "head"]),
    "the root (Stack) are torch.float32 and cannot become torch.bfloat16 once they are": (
        lambda: wrap(Stack()).bfloat16()
    ),
    "set the dtype to compute with by mp_policy=MixedPrecisionPolicy(param_dtype=...)": (
        lambda: nn.Sequential(wrap(Stack())).half()
    ),
    "stay on cpu, where their mesh is, and cannot move to meta": lambda: wrap(Stack()).to("meta"),
    "was tied to another one after fully_shard; tie them before": _tied_to_a_rebuilt_weight,
    "is tied, and was replaced by tensors of different values (weight of Linear is one)": _untied,
    "shape (3, 7) before, (4, 7) now": _changed("output.weight", lambda _: _new(4, 7)),
    "was removed after fully_shard": _changed("blocks.0.up.bias", lambda _: None),
    "changed from torch.float32 to torch.bfloat16; keep its dtype": _changed(
        "output.weight", lambda _: _new(3, 7, dtype=torch.bfloat16)
    ),
    "cannot take data of shape (4, 7)": _changed("output.weight.data", lambda _: torch.ones(4, 7)),
}
if not torch.cuda.is_available():
    # On a machine with a GPU, a CUDA mesh is valid.
    VALUE["mesh is of device type 'cuda', and there is no CUDA device here"] = _cuda_mesh
TYPE: dict[str, Callable[[], Any]] = {
    "has no reduce_dtype; the communication dtype of gradients is grad_comm_dtype": (
        lambda: MixedPrecisionPolicy(reduce_dtype=torch.float32)  # type: ignore[arg-type]
    ),
    "unexpected keyword argument 'sharding'": lambda: _linear(sharding=None),
}
RUNTIME: dict[str, Callable[[], Any]] = {
    "call reshard() on it, or wrap its parent before the first step": _while_unsharded,
    "is gathered or has a reduction under way": _during_a_step,
    "which belongs to another root; call fully_shard on a module that": _shared_with_another_root,
    "which is gathered; call reshard() on its module first": _tied_to_a_gathered_unit,
    "has gradients that are not synchronized yet": _opts_out_between_backwards,
    "(_Bare) had no values on the meta device, or after rebuild(), and got none since": (
        lambda: fully_shard(_Bare())(torch.ones(1, 2))
    ),
    "no gradient arrived for unused": _without_a_gradient,
    "for layer.weight of Formula/0 as it was before fully_shard": _computes_with_an_original,
    "square reads output.weight of Stack/0, whose gathered memory": _reads_freed_weight,
    "parameter blocks.0.adapter.weight was registered after fully_shard": _adds_parameters_late,
    "p.grad of output.weight of Stack/0 was assigned a plain tensor": lambda: _with_plain_gradient(
        lambda model: torch.optim.AdamW(model.parameters()).step()
    ),
    "a plain tensor of shape (3, 7), and the gradient": lambda: _with_plain_gradient(
        lambda model: loss_of(model, 0).backward()
    ),
    "a leaf Variable that requires grad": _changes_a_leaf,
    "cannot be deep-copied": lambda: copy.deepcopy(_linear()),
    "cannot be pickled": lambda: pickle.dumps(_linear()),
    "holds input.weight of Stack/0 as it was before fully_shard": _stale_optimizer,
    "holds input.weight of Stack/0 as it was before the parameter was replaced": (
        _optimizer_before_rebuilding
    ),
}


def _transformed(transform: Callable[..., Any], *more: Any) -> None:
    transform(wrap(Stack()), *more)


RUNTIME |= {
    "the root (Stack) runs inside torch.func.grad or": partial(
        _transformed, torch.func.vjp, torch.ones(2, 5)
    ),
    "the root (Stack) runs inside torch.func.jvp or": partial(
        _transformed, torch.func.jvp, (torch.ones(2, 5),), (torch.ones(2, 5),)
    ),
}


@on_ranks(2)
def test_every_invalid_call_raises_an_error_with_its_cause() -> None:
    check_error_messages(ValueError, VALUE)
    check_error_messages(TypeError, TYPE)
    check_error_messages(RuntimeError, RUNTIME)


def _tied_head(**options: Any) -> Any:
    """Shard a model with a unit whose only weight is another unit's."""
    layers = {name: nn.Linear(3, 3, bias=False) for name in ("first", "head")}
    layers["head"].weight = layers["first"].weight
    model = Formula(lambda m, x: m.head(m.first(x)), **layers)
    return wrap(model, layers.values(), **options)


@on_ranks(2, pool=[False, True])
def test_modules_that_zero_3_cannot_run_raise_errors_that_name_the_unit(pool: bool) -> None:
    def trained(build: Callable[[], Any], frozen: bool = False) -> str:
        model = wrap(build(), enable_trace_pool=pool)
        model.blocks.requires_grad_(not frozen)
        return error_message(RuntimeError, lambda: [own_loss(model).backward() for _ in range(3)])

    for frozen in (False, True):
        hidden = trained(lambda: Unpacking(block=ClosureBlock), frozen)
        assert "blocks.2 (ClosureBlock)" in hidden
        assert "returns tensors inside an object that is not searched" in hidden
    for what in ("weight", "view", "detached"):
        leaking = trained(lambda what=what: Regularized(what))
        assert "the forward of blocks.0 (Leaking) returns its weight up.weight" in leaking
    tied = _tied_head(enable_trace_pool=pool)
    x = torch.randn(2, 3, requires_grad=True)
    alone = error_message(
        RuntimeError, lambda: torch.autograd.grad(tied.head(x).sum(), x, create_graph=True)
    )
    assert alone.startswith("head (Linear) is in a backward with create_graph=True")
    plain, model = pair(enable_trace_pool=pool)
    twice = error_message(RuntimeError, lambda: gradient_penalty(model, 0, 0, dist.get_rank()))
    assert twice.startswith("the root (Stack) is in a backward with create_graph=True")
    # Training continues.
    for rank in range(2):
        (loss_of(plain, rank) / 2).backward()
    own_loss(model).backward()
    assert gradient_error(model, plain) < 1e-6


@on_ranks(2, strategy=["no_shard", "optim_grads", "optim_grads_params"])
def test_second_backward_on_one_graph_raises_or_accumulates(strategy: str) -> None:
    x = torch.linspace(-1, 1, 10).view(2, 5)
    plain, model = pair(sharding_strategy=strategy)
    plain(x).square().mean().backward()
    loss = model(x).square().mean()
    loss.backward()
    text = error_message(RuntimeError, loss.backward)
    model.zero_grad()
    model(x).square().mean().backward()
    errors = [gradient_error(model, plain)]
    model.zero_grad()
    plain(x).square().mean().backward()
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    errors.append(gradient_error(model, plain))
    assert "backward through the graph a second time" in text
    assert max(errors) < 1e-6


@on_ranks(2)
def test_other_data_parallel_wrappers_around_and_inside_are_rejected() -> None:
    def around() -> nn.Module:
        return nn.Sequential(wrap(Stack()), nn.Linear(3, 3))

    def fsdp1(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"))

    ddp, inner = DistributedDataParallel, nn.Sequential(nn.Linear(3, 3))
    their_fully_shard(inner[0], mesh=mesh_of(2))
    # Torch's wrappers raise their own errors before any value moves.
    for module in (wrap(Stack()), around()):
        for wrapper in (ddp, fsdp1, partial(their_fully_shard, mesh=mesh_of(2))):
            with pytest.raises((RuntimeError, NotImplementedError, TypeError, AssertionError)):
                wrapper(module)
    reduces = {
        "0 (DistributedDataParallel) reduces its gradients through": ddp(nn.Linear(3, 3)),
        "0 (FullyShardedDataParallel) reduces its gradients through": fsdp1(nn.Linear(3, 3)),
        "0.0 (FSDPLinear) reduces its gradients through torch.distributed.fsdp.fully_": inner,
    }
    for text, module in reduces.items():
        outer = nn.Sequential(module)
        assert text in error_message(ValueError, lambda outer=outer: fully_shard(outer))
    itself = error_message(ValueError, lambda: fully_shard(ddp(nn.Linear(3, 3))))
    assert "the module (DistributedDataParallel) reduces its gradients" in itself


@on_ranks(2)
def test_module_run_outside_its_units_forward_raises_by_name() -> None:
    model: Any = wrap(Stack())
    block, x = model.blocks[1], torch.randn(2, WIDTH)
    embedding: Any = fully_shard(nn.Sequential(nn.Embedding(9, WIDTH)))
    functional = nn.functional
    for name, call in (
        ("input.weight of Stack", lambda: functional.linear(batch(0), model.input.weight)),
        ("up.weight of blocks.1", lambda: block.up(x)),
        ("norm.weight of blocks.1", lambda: block.norm(x)),
        ("0.weight of Sequential", lambda: embedding[0](torch.tensor([1, 2]))),
        ("up.weight of blocks.1", lambda: torch.matmul(torch.randn(2, INPUT), block.up.weight)),
        ("up.weight of blocks.1", lambda: torch.matmul(x, block.up.weight.t())),
    ):
        text = error_message(RuntimeError, call)
        assert "which is sharded: this rank holds some of its rows" in text, name
        assert "unshard()" in text and "register_fsdp_forward_method" in text
        assert "UnitOptions(used_params=...)" in text
        assert f"computes with {name}" in text
    # A root stays gathered after a forward with gradients enabled.
    teacher: Any = wrap(Stack())
    teacher(batch(0))
    with torch.no_grad():
        text = error_message(
            RuntimeError, lambda: teacher.input.weight.lerp_(model.input.weight, 0.1)
        )
    assert "call reshard() on that module" in text
    # Errors of other causes keep their message.
    shape = error_message(RuntimeError, lambda: model.input.weight.view(-1, 11))
    assert "which is sharded" not in shape and shape != "no error"
    block.unshard()
    assert block.up(x).shape == (2, 2 * WIDTH + 1)
    block.reshard()


# -- steps that cannot be captured in a CUDA graph ------------------------------------------------
#
# `test_fake_cuda.py` checks the operations of a captured step, and `make test-gpu` its replays on
# a GPU.

UNCAPTURABLE: dict[str, dict[str, Any]] = {
    "check_ranks='always' compares on the host": {"check_ranks": "always"},
    "enable_trace_pool may change addresses": {"enable_trace_pool": True},
    "weights are offloaded": {"offload_policy": CPUOffloadPolicy()},
    "weights are quantized": {},
}


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    """Report that the current stream is capturing."""
    with mock.patch.object(context, "is_capturing", lambda device: True):
        yield


@on_ranks(2, reason=UNCAPTURABLE)
def test_an_option_that_cannot_be_captured_is_rejected_by_name(reason: str) -> None:
    model: Any = Stack()
    if "quantized" in reason:
        register_format(ScaledFloat8Format)
        quantize_linears(model)
    wrap(model, **UNCAPTURABLE[reason])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own_loss(model).backward()
    with _capturing():
        texts = [
            error_message(RuntimeError, optimizer.step),
            error_message(RuntimeError, lambda: own_loss(model)),
        ]
    for text in texts:
        assert "the root (Stack) cannot be captured in a CUDA graph: " in text and reason in text
    optimizer.step()
    own_loss(model).backward()


@on_ranks(2)
def test_partial_capture_of_a_pass_is_rejected_by_name() -> None:
    model: Any = wrap(Stack())
    with _capturing():
        first = error_message(RuntimeError, lambda: own_loss(model))
    loss = own_loss(model)
    with _capturing():
        backward = error_message(RuntimeError, loss.backward)
    with contextlib.ExitStack() as capture:
        handle = model.blocks[0].register_forward_hook(
            lambda *_: capture.enter_context(_capturing())
        )
        forward = error_message(RuntimeError, lambda: own_loss(model))
    handle.remove()
    own_loss(model).backward()
    assert "ranks compare what they sharded at the first use: run a step before" in first
    for text in (backward, forward):
        assert "runs in the capture of a CUDA graph" in text
        assert "began outside it; capture forward and backward together" in text


@on_ranks(2)
def test_captured_step_with_an_unused_parameter_is_rejected_by_name() -> None:
    model: Any = wrap(Skipping(), sharding_strategy="optim_grads")
    model.skip = 1
    own_loss(model).backward()
    with _capturing():
        text = error_message(RuntimeError, lambda: own_loss(model).backward())
    assert "had no gradient in a backward captured in a CUDA graph" in text
    model.zero_grad()
    own_loss(model).backward()
