"""A sharded module is an instance of torch's `FSDPModule`, and what follows from that works."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TheirModule
from torch.distributed.fsdp import UnshardHandle, share_comm_ctx
from torch.distributed.fsdp import fully_shard as their_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as their_register
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from megatron_fsdp_v2 import FSDPModule, fully_shard, register_fsdp_forward_method
from megatron_fsdp_v2.runtime.torch_fsdp import REFUSED_METHODS
from tests.distributed.wrapping import mesh_of
from tests.ranks import RankPools
from tests.reference.models import INPUT, WIDTH, Block, Stack

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def _sharded(model: Any, strategy: str = "optim_grads_params", mesh: Any = None) -> Any:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks if isinstance(model, Stack) else model:
        fully_shard(block, mesh=mesh, sharding_strategy=strategy)
    return fully_shard(model, mesh=mesh, sharding_strategy=strategy)


def test_no_method_of_any_version_of_fsdp2_reaches_into_its_own_state() -> None:
    names = [name for name in vars(TheirModule) if not name.startswith("__")]
    functions = [name for name in names if callable(getattr(TheirModule, name))]
    assert len(functions) > 15
    assert [n for n in functions if getattr(FSDPModule, n) is getattr(TheirModule, n)] == []


def kinds_and_refusals() -> tuple[list[bool], list[str], list[str]]:
    """Instances; what rejected methods say; types of a slice and of what is in it."""
    model = _sharded(nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2)))
    said = []
    for name in REFUSED_METHODS:
        with pytest.raises(RuntimeError) as raised:
            getattr(model, name)(None)
        said.append(str(raised.value))
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
    return instances, said, [type(part).__name__, type(part[0]).__name__, type(model).__name__]


def test_units_are_instances_and_refuse_by_name_what_they_do_not_have(pools: RankPools) -> None:
    for instances, said, classes in pools(2).run(kinds_and_refusals):
        assert instances == [True, True, True, True, False, True]
        for name, sentence in zip(REFUSED_METHODS, said, strict=True):
            assert f"has no {name}: " in sentence
        assert classes == ["Sequential", "FSDPBlock", "FSDPSequential"]


def put_in_their_place() -> tuple[bool, bool]:
    """Whether ours shards where a library imports theirs, with a default of one's own or not."""
    found = []
    for ours in (fully_shard, functools.partial(fully_shard, sharding_strategy="optim")):
        with mock.patch("torch.distributed.fsdp.fully_shard", ours):
            from torch.distributed import fsdp

            model = fsdp.fully_shard(Block())
        found.append(isinstance(model, FSDPModule))
        with pytest.raises((AssertionError, ValueError, RuntimeError)):
            their_fully_shard(model)
    return found[0], found[1]


def test_ours_can_be_put_in_the_place_of_theirs(pools: RankPools) -> None:
    assert pools(2).run(put_in_their_place) == [(True, True)] * 2


class Scorer(Stack):
    """A model that is also run through a method other than its forward."""

    def score(self, x: torch.Tensor, *, factor: float) -> torch.Tensor:
        return self.forward(x).square().mean() * factor


def _step(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _distance(model: nn.Module, plain: nn.Module) -> float:
    """Largest difference of any weight."""
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max((a.full_tensor() - b).abs().max().item() for a, b in pairs)


def trained_by_a_method(strategy: str, register: Any) -> tuple[float, bool]:
    """Largest difference from the unsharded model's, through a registered forward method.

    And whether the model dies with its last name.
    """
    torch.manual_seed(0)
    plain = Scorer()
    model = _sharded(copy.deepcopy(plain), strategy)
    register(model, "score")
    x = torch.randn(2, 4, INPUT)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(2):
        model.score(x[dist.get_rank()], factor=3.0).backward()
        for part in x:
            (plain.score(part, factor=3.0) / 2).backward()
        _step(optimizers)
    distance, reference = _distance(model, plain), weakref.ref(model)
    register(plain, "score")  # not sharded: nothing happens
    del model, optimizers, part
    return distance, reference() is None


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("register", [register_fsdp_forward_method, their_register])
def test_a_registered_forward_method_trains_as_the_forward_does(
    pools: RankPools, strategy: str, register: Any
) -> None:
    for distance, is_gone in pools(2).run(trained_by_a_method, strategy, register):
        assert distance < 1e-6
        assert is_gone or register is their_register


class Generator(nn.Module):
    """A method that runs the forward, and computes with the module's own weight around it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.block(x) @ self.embedding.weight.t()) @ self.embedding.weight

    def generate(self, tokens: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(2):
            x = self(x)
        if fails:
            raise KeyboardInterrupt
        return self.embedding(tokens) + x


def trained_around_its_forward(strategy: str, register: Any) -> float:
    """Largest difference from the unsharded model's, with steps of the method and the forward."""
    torch.manual_seed(0)
    plain = Generator()
    model = copy.deepcopy(plain)
    for unit in (model.block, model):
        fully_shard(unit, mesh=mesh_of(dist.get_world_size()), sharding_strategy=strategy)
    register(model, "generate")
    tokens, x = torch.tensor([1, 3, 3]), torch.randn(4, WIDTH)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    differences = []
    for fails in (False, True, False):
        if fails:
            with contextlib.suppress(KeyboardInterrupt):
                model.generate(tokens, fails=True)
        with torch.no_grad():
            differences.append(float((model.generate(tokens) - plain.generate(tokens)).abs().max()))
        for either in (model, plain):
            (either.generate(tokens).square().mean() + either(x).square().mean()).backward()
        _step(optimizers)
    return max(*differences, _distance(model, plain))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("register", [register_fsdp_forward_method, their_register])
def test_a_registered_method_may_run_the_forward_inside(
    pools: RankPools, strategy: str, register: Any
) -> None:
    assert max(pools(2).run(trained_around_its_forward, strategy, register)) < 1e-6


def pipelined(strategy: str, schedule: str) -> float:
    """Largest difference of weights from the unsharded model's, with torch's pipelining."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    stages = [nn.Sequential(Block(), Block()) for _ in range(2)]
    x, y = torch.randn(2, 2, 4, 3, WIDTH)
    plain = copy.deepcopy(stages)
    here, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    module = _sharded(stages[here], strategy, mesh["dp"])
    loss_fn = nn.functional.mse_loss
    stage = PipelineStage(
        module,
        here,
        2,
        torch.device("cpu"),
        group=mesh.get_group("pp"),
    )
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    runner = kind(stage, n_microbatches=4, loss_fn=loss_fn)
    whole = nn.Sequential(*plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, whole)]
    for _ in range(2):
        if here == 0:
            runner.step(x[dp])
        else:
            runner.step(target=y[dp])
        for part, target in zip(x, y, strict=True):
            (loss_fn(whole(part), target) / 2).backward()
        _step(optimizers)
    return _distance(module, plain[here])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_torchs_pipelining_trains_as_the_unsharded_loop_does(
    pools: RankPools, strategy: str
) -> None:
    schedule = "gpipe" if strategy in ("optim", "optim_grads_params") else "1f1b"
    assert max(pools(4).run(pipelined, strategy, schedule)) < 1e-6


def kept_after_the_backward() -> tuple[bool, list[bool], bool]:
    """Whether no bit changes; whether weights stay after micro-batches; and after a step."""
    torch.manual_seed(0)
    plain = Stack()
    weights, kept, after = [], [], True
    for keeps in (False, True):
        model = _sharded(copy.deepcopy(plain))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            for micro in range(3):
                model.set_reshard_after_backward(not keeps or micro == 2)
                model.set_requires_gradient_sync(micro == 2)
                torch.manual_seed(7 * step + micro)
                model(torch.randn(2, INPUT)).square().mean().backward()
                if keeps:
                    kept.append(model.blocks[1]._fsdp_unit.is_unsharded)
            optimizer.step()
            optimizer.zero_grad()
        weights.append([param.to_local().clone() for param in model.parameters()])
        after = after and not model.blocks[1]._fsdp_unit.is_unsharded
    return all(map(torch.equal, *weights)), kept, after


def test_weights_kept_after_a_backward_change_no_bit(pools: RankPools) -> None:
    for same, kept, after in pools(2).run(kept_after_the_backward):
        assert same
        assert kept == [True, True, False] * 2
        assert after


class Failing(Stack):
    fails = False

    def forward(self, x: torch.Tensor) -> Any:
        x = self.run_blocks(self.input(x))
        if self.fails:
            raise KeyError("in the middle of a forward")
        return self.output(x)


def state_after_a_reset() -> tuple[bool, str]:
    """Whether all parameters are sharded ones again, and what a unit that is no root says."""
    model = _sharded(Failing())
    model.fails = True
    with pytest.raises(KeyError):
        model(torch.randn(2, INPUT))
    model.reset_iter_state()
    is_sharded = all(hasattr(param, "full_tensor") for param in model.parameters())
    with pytest.raises(RuntimeError) as raised:
        model.blocks[0].reset_iter_state()
    model.fails = False
    model(torch.randn(2, INPUT)).sum().backward()
    return is_sharded, str(raised.value)


def test_a_reset_after_an_exception_brings_sharded_parameters_back(pools: RankPools) -> None:
    for is_sharded, said in pools(2).run(state_after_a_reset):
        assert is_sharded
        assert "blocks.0 (Block) is not the root" in said


def round_trip() -> bool:
    """Whether torch's own state dicts bring a model and its optimizer back, bit by bit."""
    model = _sharded(Stack())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model(torch.randn(2, INPUT)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return [param.to_local().clone() for param in model.parameters()]

    step()
    weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    first = step()
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return all(map(torch.equal, first, step()))


def test_torchs_state_dicts_restore_model_and_optimizer(pools: RankPools) -> None:
    assert pools(2).run(round_trip) == [True] * 2
