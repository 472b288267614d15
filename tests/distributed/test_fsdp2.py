"""Calls, methods and `isinstance` checks written for FSDP2, compared with PyTorch's FSDP2."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TheirModule
from torch.distributed.fsdp import UnshardHandle, share_comm_ctx
from torch.distributed.fsdp import fully_shard as their_fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from megatron_fsdp_v2 import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    group_modules,
    register_fsdp_forward_method,
)
from megatron_fsdp_v2.diagnostics import parameter_norms
from megatron_fsdp_v2.runtime.fsdp2 import REJECTED_METHODS
from megatron_fsdp_v2.runtime.module import ShardedModule, unit_of
from tests.cases import quick_only
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import (
    BF16,
    STRATEGIES,
    backward_both,
    batch,
    error_message,
    gradient_error,
    loss_of,
    mesh_of,
    own_loss,
    pair,
    record_collectives,
    step_all,
    weight_error,
    whole,
    wrap,
)
from tests.parity.unusual import Generating
from tests.reference.failing import fail, failing
from tests.reference.models import INPUT, WIDTH, Block, Formula, Stack


def _wrapped(shard: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Stack()
    for unit in (*model.blocks, model):
        shard(unit, mesh=mesh_of(dist.get_world_size()), **options)
    return model


_theirs, _ours = partial(_wrapped, their_fully_shard), partial(_wrapped, fully_shard)


def _distance(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    largest = max(float(tensor.abs().max()) for tensor in first)
    pairs = zip(first, second, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs) / largest


# -- methods --------------------------------------------------------------------------------------


def _kinds(module: nn.Module) -> set[bool]:
    """Whether parameters of a module are sharded."""
    return {isinstance(param, DTensor) for param in module.parameters()}


def effects_of_methods(make: Callable[..., Any]) -> dict[str, Any]:
    """The visible effects of each method."""
    found: dict[str, Any] = {}
    model = make()
    first, second, third = model.blocks
    found["after wrapping"] = _kinds(model)
    first.unshard()
    found["unshard: this unit alone"] = (_kinds(first), _kinds(second))
    found["unshard: whole plain values"] = [
        (tuple(p.shape), round(float(p.detach().double().sum()), 5)) for p in first.parameters()
    ]
    first.reshard()
    found["reshard"] = _kinds(first)
    second.unshard(async_op=True).wait()
    found["unshard, async"] = _kinds(second)
    second.reshard()

    seen: list[Any] = []

    def look(*_: Any) -> None:
        seen.append((_kinds(first), _kinds(second), _kinds(third)))

    handle = third.register_forward_hook(look)
    model(batch(0)).sum().backward()
    model.set_reshard_after_forward(False)
    model(batch(0)).sum().backward()
    model.set_reshard_after_forward(True)
    second.set_reshard_after_forward(False)
    model(batch(0)).sum().backward()
    second.set_reshard_after_forward(True)
    handle.remove()
    found["set_reshard_after_forward: gathered late in the forward"] = [
        (kinds[0], kinds[1]) for kinds in seen
    ]
    found["after a backward"] = _kinds(model)
    model.set_reshard_after_backward(False)
    model(batch(0)).sum().backward()
    found["set_reshard_after_backward"] = (_kinds(first), _kinds(third))
    model.set_reshard_after_backward(True)
    model(batch(0)).sum().backward()
    found["and back"] = _kinds(model)
    model.zero_grad()
    return found


@on_ranks(2)
def test_methods_behave_like_fsdp2s() -> None:
    assert effects_of_methods(_ours) == effects_of_methods(_theirs)


# -- documentation --------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_fsdp2.md"


@on_ranks(2)
def test_the_documented_code_runs_and_trains_as_before() -> None:
    before, after, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "torch.distributed.fsdp" in before
    assert "megatron_fsdp_v2" in after
    weights = []
    for code in (before, after):
        names: dict[str, Any] = {}
        exec(code, names)
        weights.append(names["weights"])
    assert _distance(*weights) < 1e-6


def test_documentation_lists_every_public_method() -> None:
    page = PAGE.read_text()
    names = [name for name in vars(ShardedModule) | vars(FSDPModule) if name[0] != "_"]
    assert len(names) > 5
    assert [name for name in names if name not in page] == []


def test_policies_of_fsdp_and_fsdp2_keep_their_meaning() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    theirs = fsdp.MixedPrecisionPolicy
    assert MixedPrecisionPolicy.of(None) == MixedPrecisionPolicy()
    assert MixedPrecisionPolicy.of(theirs()) == MixedPrecisionPolicy()
    # Torch 2.15 changed the default of `reduce_dtype`, in its newer class only.
    follows = fp32 if torch.__version__ >= (2, 15) else bf16
    assert MixedPrecisionPolicy.of(theirs(param_dtype=bf16)).resolve(fp32).grad_comm == follows
    assert MixedPrecisionPolicy.of(fsdp.MixedPrecision(bf16)).resolve(fp32).grad_comm == bf16
    full = theirs(bf16, reduce_dtype=fp32, output_dtype=fp32, cast_forward_inputs=False)
    assert MixedPrecisionPolicy.of(full) == MixedPrecisionPolicy(
        param_dtype=bf16, grad_comm_dtype=fp32, output_dtype=fp32, cast_forward_inputs=False
    )


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [("SGD", torch.float32), ("AdamW", torch.float32), ("SGD", torch.bfloat16)],
)
@on_ranks(3)
def test_fsdp2_call_trains_like_fsdp2(optimizer: str, dtype: torch.dtype) -> None:
    """Train for five steps with this package and with FSDP2."""
    options: dict[str, Any] = {
        "mesh": None,
        "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": fsdp.OffloadPolicy(),
        "shard_placement_fn": lambda param: Shard(0),
        "ignored_params": None,
    }
    kinds: dict[str, Any] = {
        "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "AdamW": partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
    }
    plain, weights = Stack(), []
    for shard in (fully_shard, fsdp.fully_shard):
        model: Any = copy.deepcopy(plain)
        shard(model.blocks[0], **options, reshard_after_forward=1)
        shard(model.blocks[1], **options, reshard_after_forward=dist.get_world_size())
        shard(model, **options, reshard_after_forward=None)
        if shard is fully_shard:
            recorded = record_collectives(model)
            units = [unit_of(module) for module in (model, model.blocks[0], model.blocks[1])]
        made = kinds[optimizer](model.parameters())
        for step in range(5):
            own_loss(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            step_all(made)
        weights.append([param.full_tensor().detach() for param in model.parameters()])
    assert recorded.dtypes(gathers=True) == {dtype}
    assert recorded.dtypes(gathers=False) == {torch.float32}
    assert _distance(*weights) < 1e-6
    assert [unit.settings.reshard_after_forward for unit in units] == [True, False, True]
    assert units[0].groups[0].spec.mesh is units[1].groups[0].spec.mesh


@on_ranks(2)
def test_several_modules_are_one_unit_from_the_first_to_the_last_module() -> None:
    model: Any = Stack()
    outer = [model.input, model.output]
    assert fully_shard(outer) is outer
    wrap(model)
    recorded, unit = record_collectives(model), unit_of(model.output)
    with torch.no_grad():
        model(batch(0))
        whole = recorded.count("all_gather")
        # A forward that does not run the last module of the unit.
        model.run_blocks(model.input(batch(0)))
    assert unit is unit_of(model.input) and unit.name == "input, output (Linear, Linear)"
    assert set(unit.groups[0].names) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert whole == 4


@on_ranks(1)
def test_nested_modules_of_a_list_are_part_of_the_outer_module() -> None:
    inner = nn.Linear(2, 2)
    around = nn.Sequential(inner)
    fully_shard([around, inner, around])
    assert not isinstance(inner, FSDPModule)


def test_group_modules_groups_consecutive_modules_up_to_max_bytes() -> None:
    small, large, none = nn.Linear(2, 2, bias=False), nn.Linear(8, 8, bias=False), nn.ReLU()
    other, tied = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    tied.weight = other.weight
    assert group_modules([small, other, large, small], 32) == [[small, other], [large], [small]]
    assert group_modules([large, none, small], 16) == [[large], [none, small]]
    assert group_modules([nn.Sequential(other, tied), small], 32)[0][1] is small
    assert group_modules([none]) == [[none]]
    assert group_modules([]) == []
    assert "max_bytes must be a whole number" in error_message(
        ValueError, lambda: group_modules([], 0)
    )


@on_ranks(2)
def test_units_are_fsdpmodule_instances_and_reject_unsupported_methods_by_name() -> None:
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2))
    wrap(model, model)
    for name in REJECTED_METHODS:
        assert f"has no {name}: " in error_message(
            RuntimeError, lambda name=name: getattr(model, name)(None)
        )
    with pytest.raises(AttributeError, match="has no '_lazy_init' of FSDP2's internals"):
        model._get_fsdp_state()._lazy_init()
    share_comm_ctx([model, model[0]])
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        their_fully_shard(model)
    instances = [isinstance(part, TheirModule) for part in (model, *model, nn.Linear(1, 1))]
    handle = model[0].unshard(async_op=True)
    instances.append(isinstance(handle, UnshardHandle))
    handle.wait()
    model[0].reshard()
    part = model[:2]
    classes = [type(module).__name__ for module in (part, part[0], model)]
    assert instances == [True, True, True, True, False, True]
    assert classes == ["Sequential", "FSDPBlock", "FSDPSequential"]


@on_ranks(2)
def test_registered_method_keeps_no_model_alive_and_plain_models_are_unchanged() -> None:
    plain, model = pair(Generating)
    for either in (plain, model):
        register_fsdp_forward_method(either, "generate")
    own_loss(model).backward()
    model.generate(batch(0))
    reference = weakref.ref(model)
    registered = ["generate" in vars(either) for either in (plain, model)]
    del model, either
    assert registered == [False, True]
    assert reference() is None


@on_ranks(4, kind=[Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble])
def test_torchs_pipelining_trains_as_the_unsharded_loop_does(kind: Any) -> None:
    """A zero-bubble schedule has several stages on a rank, and splits their backwards."""
    splits = kind is ScheduleInterleavedZeroBubble
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    modules = [nn.Sequential(Block(), Block()) for _ in range(4 if splits else 2)]
    x, y = torch.randn(2, 2, 4, 3, WIDTH)
    whole = nn.Sequential(*copy.deepcopy(modules))
    here, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    stages = []
    for index in range(here, len(modules), 2):
        module = wrap(
            modules[index],
            modules[index],
            mesh=mesh["dp"],
            sharding_strategy="no_shard" if kind is Schedule1F1B else "optim_grads_params",
            reshard_after_forward=not splits,
        )
        cpu, group = torch.device("cpu"), mesh.get_group("pp")
        stages.append(PipelineStage(module, index, len(modules), cpu, group=group))
    loss_fn = nn.functional.mse_loss
    runner = kind(stages if splits else stages[0], n_microbatches=4, loss_fn=loss_fn)
    own = nn.ModuleList(modules[here::2])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (own, whole)]
    for _ in range(2):
        if here == 0:
            runner.step(x[dp])
        else:
            runner.step(target=y[dp])
        for part, target in zip(x, y, strict=True):
            (loss_fn(whole(part), target) / 2).backward()
        step_all(*optimizers)
    assert weight_error(own, whole[here::2]) < 1e-6


@on_ranks(2)
def test_reset_iter_state_after_an_exception_restores_sharded_parameters() -> None:
    model = wrap(Stack())
    with failing(model.output.register_forward_pre_hook(fail)):
        model(torch.randn(2, INPUT))
    model.reset_iter_state()
    is_sharded = all(hasattr(param, "full_tensor") for param in model.parameters())
    text = error_message(RuntimeError, model.blocks[0].reset_iter_state)
    model(torch.randn(2, INPUT)).sum().backward()
    assert is_sharded
    assert "blocks.0 (Block) is not the root" in text


def _gradient_norms(model: nn.Module, *names: str) -> list[float]:
    """Norms of gradients; sets the gradients of all parameters to None."""
    norms = parameter_norms(model)
    model.zero_grad()
    return [norms[name].grad or 0.0 for name in names]


@on_ranks(2, sums_only=[False, True])
def test_divide_factor_applies_to_one_unit_and_can_change_between_steps(sums_only: bool) -> None:
    model: Any = wrap(Stack().double())
    model.set_force_sum_reduction_for_comms(sums_only)
    model.blocks[0].set_force_sum_reduction_for_comms(sums_only)
    names = ("blocks.0.up.weight", "output.weight")
    own_loss(model).backward()
    mean = _gradient_norms(model, *names)
    recorded = record_collectives(model)
    ratios = []
    for factor in (1.0, 4, 2.0):
        # The factor of a unit does not apply to units inside the unit.
        model.blocks[0].set_gradient_divide_factor(factor)
        own_loss(model).backward()
        ratios += map(truediv, _gradient_norms(model, *names), mean)
    assert recorded.count("reduce_scatter")
    model.set_reduce_scatter_divide_factor(2.0)
    bad = error_message(ValueError, lambda: model.set_gradient_divide_factor(0))
    other: Any = wrap(Stack(), sharding_strategy="no_shard")
    with other.no_sync():
        other(batch(0)).sum().backward()
    late = error_message(RuntimeError, lambda: other.set_gradient_divide_factor(2.0))
    assert ratios == pytest.approx([2.0, 1.0, 0.5, 1.0, 1.0, 1.0])
    assert "must be a positive number, got 0" in bad
    assert "call set_gradient_divide_factor between steps" in late


@on_ranks(2)
def test_divide_factor_applies_to_parameters_unfrozen_later() -> None:
    model: Any = nn.Linear(4, 2, bias=False).requires_grad_(False)
    fully_shard(model)
    model.set_gradient_divide_factor(1.0)
    model.requires_grad_(True)
    model(torch.ones(1, 4)).sum().backward()
    # Eight elements, each of which is a sum of one over two ranks.
    assert _gradient_norms(model, "weight") == [pytest.approx(2.0 * 8**0.5)]


@on_ranks(4, strategy=["optim", "optim_grads_params"])
def test_finalize_backward_synchronizes_gradients(strategy: str) -> None:
    model: Any = wrap(Stack(), sharding_strategy=strategy, mesh=mesh_of(2, 2))
    on_a_unit = error_message(
        RuntimeError, lambda: model.blocks[0].set_manual_backward_finalization(True)
    )
    without = error_message(RuntimeError, model.finalize_backward)
    model.set_manual_backward_finalization(True)
    model.finalize_backward()  # nothing ran
    model.set_is_last_backward(True)  # the call takes precedence
    for micro in range(2):
        own_loss(model, micro).backward()
    is_waiting = any(group.has_unreduced for group in unit_of(model).groups)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    model.finalize_backward()
    is_left = any(group.has_unreduced for group in unit_of(model).groups)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    handle = model.finalize_backward(async_op=True)
    handle.wait()
    model.set_manual_backward_finalization(False)
    own_loss(model, 0).backward()
    syncs_again = not any(group.has_unreduced for group in unit_of(model).groups)
    assert "blocks.0 (Block) is not the root; call set_manual_backward_finalization on" in on_a_unit
    assert (
        "synchronize gradients at their end; call set_manual_backward_finalization(True)" in without
    )
    assert (is_waiting, is_left, syncs_again) == (True, True, True)
    assert isinstance(handle, getattr(fsdp, "GradientReductionHandle", object))


@on_ranks(4, strategy=["no_shard", "optim_grads_params"])
def test_backwards_without_all_reduce_issue_no_outer_collectives(strategy: str) -> None:
    model: Any = wrap(Stack(), sharding_strategy=strategy, mesh=mesh_of(2, 2))
    flat: Any = wrap(Stack(), sharding_strategy=strategy, mesh=mesh_of(4))
    model.set_requires_all_reduce(False)
    flat.set_requires_all_reduce(False)
    recorded = record_collectives(model)
    for sharded in (model, flat):
        own_loss(sharded).backward()
    sent = [(one.kind, one.axis_size) for one in recorded.sent if one.kind != "all_gather"]
    # The inner axis only: one collective for each unit, and none if gradients are not sharded.
    assert sent == ([] if strategy == "no_shard" else [("reduce_scatter", 2)] * 4)
    # A 1-D mesh has no all-reduce to skip.
    assert flat.output.weight.grad is not None


def _hooked(model: Any, seen: list[float], change: Callable[[torch.Tensor], Any]) -> None:
    """Set hooks that change reduced gradients, and note their squared norms over the mesh."""

    def hook(flat: torch.Tensor) -> None:
        seen[-1] += float(flat.double().square().sum())
        change(flat)

    for unit in (model, *model.blocks):
        unit.set_all_reduce_hook(hook)


@on_ranks(4, shape=[(4,), (2, 2)])
def test_all_reduce_hook_gets_and_changes_what_fsdp2s_does(shape: tuple[int, ...]) -> None:
    found = []
    for shard in (their_fully_shard, fully_shard):
        torch.manual_seed(0)
        model: Any = Stack()
        for unit in (*model.blocks, model):
            shard(unit, mesh=mesh_of(*shape))
        seen: list[float] = []
        # Not linear: each backward alone reaches the hook, scaled.
        _hooked(model, seen, lambda flat: flat.mul_(flat.abs()))
        gradients = []
        for step in range(4):
            seen.append(0.0)
            model.set_requires_gradient_sync(step != 2)
            own_loss(model, step).backward()
            if step != 2:
                gradients += [p.grad.full_tensor() for p in model.parameters()]
        total = torch.tensor(seen)
        dist.all_reduce(total)
        found.append((total, gradients))
    (theirs, their_gradients), (ours, our_gradients) = found
    assert ours.tolist() == pytest.approx(theirs.tolist(), rel=1e-5)
    assert ours[2] == 0.0
    assert _distance(their_gradients, our_gradients) < 1e-6


@on_ranks(
    4,
    shape=quick_only([(4,), (2, 2)], (2, 2)),
    options=[
        {"mp_policy": BF16, "enable_trace_pool": True},
        {"offload_policy": fsdp.CPUOffloadPolicy(), "outer_dp_sharding_strategy": "optim"},
    ],
)
def test_all_reduce_hook_that_changes_nothing_has_no_effect(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    options = {"mesh": mesh_of(*shape)} | options
    if len(shape) == 1:
        options.pop("outer_dp_sharding_strategy", None)
    models = [pair(Stack, **options)[1] for _ in range(2)]
    _hooked(models[0], seen := [], lambda flat: None)
    for step in range(4):
        seen.append(0.0)
        for model in models:
            with model.no_sync():
                own_loss(model, 2 * step).backward()
            own_loss(model, 2 * step + 1).backward()
            if step == 2:
                model.zero_grad()
    grads = [[whole(p.grad) for p in model.parameters()] for model in models]
    total = torch.tensor(seen)
    dist.all_reduce(total)
    assert bool((total > 0.0).all())
    assert _distance(*grads) < 1e-6


@on_ranks(4, strategy=STRATEGIES)
def test_all_reduce_hook_replaces_an_outer_axis(strategy: str) -> None:
    mesh, here = mesh_of(2, 2), dist.get_rank()
    group = mesh.get_group("outer")

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        # Ranks of one inner axis alone use the addend, whose group is its own.
        return m.stack(x) + (m.addend if m.rank < 2 else 0.0)

    plain: Any = Formula(run, stack=Stack(), addend=nn.Parameter(torch.ones(1)), rank=here)
    model = copy.deepcopy(plain)
    options = {"separate_params": {model.addend}, "sharding_strategy": strategy}
    units = (wrap(model, model.stack.blocks, mesh=mesh["inner"], **options), *model.stack.blocks)
    for unit in units:
        unit.set_all_reduce_hook(lambda flat: dist.all_reduce(flat, group=group))
    for step, factor in enumerate((4.0, 2.0)):
        for unit in units:
            unit.set_gradient_divide_factor(factor)
        for micro in range(2):
            with nullcontext() if micro else model.no_sync():
                own_loss(model, 2 * step + micro).backward()
            for plain.rank in range(4):
                (loss_of(plain, plain.rank, 2 * step + micro) / factor).backward()
    error = gradient_error(model, plain)
    model.zero_grad()
    for unit in units:
        unit.set_all_reduce_hook(None)
    own_loss(model).backward()
    assert error < 1e-6
    # Without the hook, ranks of one inner axis alone have a gradient of the addend.
    assert (model.addend.grad is None) == (here >= 2)


@on_ranks(2)
def test_values_without_effect_warn_or_raise() -> None:
    model: Any = wrap(Stack())
    model.set_unshard_in_backward(True)
    model.set_post_optim_event(None)
    model.set_reduce_scatter_max_input_buffers(1)
    assert unit_of(model.blocks[0]).context.options.max_live_grad_buffers == 1
    with pytest.warns(UserWarning) as warned:
        model.set_unshard_in_backward(False)
    model(batch(0)).sum().backward()
    buffers = error_message(ValueError, lambda: model.set_reduce_scatter_max_input_buffers(0))
    assert "the root (Stack) is gathered in its backward all the same" in str(warned[0].message)
    assert "max_input_buffers must be a whole number of at least 1, got 0" in buffers


@on_ranks(2)
def test_a_module_without_parameters_runs() -> None:
    x = torch.ones(3)
    empty = fully_shard(Formula(lambda m, x, more: x + more[0] + more[1]))
    assert bool((empty(x, (x, x)) == 3).all())


class Chunked(nn.Module):
    """A language model whose norm and head can run separately, on chunks."""

    def __init__(self, ties: bool) -> None:
        super().__init__()
        self.body = nn.Linear(INPUT, INPUT, bias=False)
        self.norm = nn.LayerNorm(INPUT)
        self.head = nn.Linear(INPUT, INPUT, bias=False)
        if ties:
            self.head.weight = self.body.weight

    def forward(self, x: torch.Tensor, skip_head: bool = False) -> torch.Tensor:
        x = self.norm(self.body(x))
        return x if skip_head else self.head(x)


def _run_chunked(model: Any, x: torch.Tensor, share: float) -> None:
    """Run a forward and backward whose head runs forward and backward chunk by chunk.

    Args:
        model: A `Chunked`.
        x: Inputs.
        share: Share of this batch in the loss.
    """
    hidden = model(x, skip_head=True)
    cut = hidden.detach().requires_grad_()
    for part in cut.chunk(2):
        (model.head(part).square().mean() / 2 * share).backward()
    assert cut.grad is not None
    hidden.backward(cut.grad)


def _set_kept(head: Any, flag: bool) -> None:
    """Set whether the head stays gathered from chunk to chunk, as training loops do."""
    head.set_reshard_after_forward(not flag)
    head.set_reshard_after_backward(not flag)


@on_ranks(2, mode=["tied", "kept", "accumulated", "failed"])
def test_head_in_a_unit_of_several_modules_runs_in_chunks(mode: str) -> None:
    plain = Chunked(ties=mode == "tied")
    model: Any = copy.deepcopy(plain)
    fully_shard([model.norm, model.head])
    fully_shard(model)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02, eps=1e-3) for m in (plain, model)]
    for step in range(6):
        x = batch(dist.get_rank(), step)
        for rank in range(2):
            _run_chunked(plain, batch(rank, step), 1 / 2)
        if mode == "failed":
            with failing(model.head.register_forward_pre_hook(fail)):
                model(x)
        if mode == "kept":
            _set_kept(model.head, True)
        if mode == "accumulated":
            model.set_requires_gradient_sync(step % 2 == 1)
            model.set_is_last_backward(step % 2 == 1)
        _run_chunked(model, x, 1.0)
        if mode == "kept":
            _set_kept(model.head, False)
            model.head.reshard()
        if step % 2:
            step_all(*optimizers)
    assert weight_error(model, plain) < 1e-5


def _in_ddp(model: Any) -> nn.Module:
    """Wrap in DDP, which replicates parameters outside the unit and those the unit ignores."""
    ignored = set(model.sharded[2].parameters())
    fully_shard(model.sharded, ignored_params=ignored)
    names = [n for n, p in model.named_parameters() if p not in ignored and n != "addend"]
    assert names == ["sharded.0.weight", "sharded.0.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model)


def _in_replicate(model: Any) -> nn.Module:
    fully_shard(model.sharded)
    return replicate(model)


@on_ranks(2, wrapped=[_in_ddp, _in_replicate])
def test_ddp_and_replicate_around_a_sharded_unit_train_like_the_plain_model(wrapped: Any) -> None:
    layers = nn.Sequential(nn.Linear(INPUT, 8), nn.ReLU(), nn.Linear(8, INPUT))
    addend = nn.Parameter(torch.randn(INPUT))
    plain = Formula(lambda m, x: m.sharded(x) + m.addend, sharded=layers, addend=addend)
    model = wrapped(copy.deepcopy(plain))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02, eps=1e-3) for m in (plain, model)]
    for step in range(3):
        backward_both(plain, model, step)
        step_all(*optimizers)
    full = [whole(param) for param in model.parameters()]
    pairs = zip(full, plain.parameters(), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-5
