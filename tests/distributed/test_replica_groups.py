"""What torchft's manager gets from a sharded model; `tests/clients` runs it with torchft itself."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2.optim import Muon, flat_optimizer
from megatron_fsdp_v2.runtime.module import units_of
from megatron_fsdp_v2_for import torchft as fault_tolerance
from tests.cases import quick_only, quick_strategies
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import STRATEGIES, error_message, mesh_of, own_loss, wrap
from tests.reference.models import Stack


class Manager:
    """As much of torchft's manager as the adapter uses, for a replica group without peers.

    Attributes:
        spoils: Whether an all-reduce fails and leaves other values in its tensor.
        load, state: What `attach` registered.
    """

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.spoils = False
        self.is_started = False
        self._commit_failures = 0

    def allreduce(self, flat: torch.Tensor) -> Any:
        if self.spoils:
            flat.fill_(float("nan"))
        return SimpleNamespace(wait=lambda: None)

    def register_state_dict_fn(self, key: str, load: Any, state: Any) -> None:
        self.load, self.state = load, state

    def current_step(self) -> int:
        return self.step

    def start_quorum(self) -> None:
        self.is_started = True


def muon(model: Any) -> torch.optim.Optimizer:
    matrices = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    return Muon([{"params": matrices}, {"params": others, "use_muon": False}], lr=0.02)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "flat Adam": lambda model: flat_optimizer(torch.optim.Adam)(model.parameters(), lr=0.01),
    # It has means of rows and columns, which are equal on all ranks.
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "Muon": muon,
}


def group_of(seed: int, strategy: str, optimizer: str) -> tuple[Manager, Any, Any]:
    """A manager, its model, and the optimizer."""
    torch.manual_seed(seed)
    model = Stack()
    model.register_buffer("mean", torch.full((3,), float(seed)))
    # Weights stay gathered after an evaluation.
    sharded = wrap(model, sharding_strategy=strategy, reshard_after_forward=False)
    manager, stepped = Manager(), OPTIMIZERS[optimizer](sharded)
    fault_tolerance.attach(manager, sharded, stepped)
    return manager, sharded, stepped


def train(model: Any, optimizer: Any, step: int, *, commits: bool = True) -> torch.Tensor:
    """Train a step of two micro-batches with clipped gradients; return the last loss."""
    with model.no_sync():
        own_loss(model, 2 * step).backward()
    loss = own_loss(model, 2 * step + 1)
    loss.backward()
    if commits:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def sent(state: Any) -> Any:
    """A state as another process receives it from torchft, which sends any object."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def rows(model: Any) -> list[torch.Tensor]:
    return [p.to_local().detach().clone() for p in model.parameters()]


def are_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@on_ranks(
    2,
    strategy=quick_strategies(STRATEGIES),
    optimizer=quick_only(OPTIMIZERS, "Adam", "Muon"),
)
def test_state_of_a_peer_continues_its_training(strategy: str, optimizer: str) -> None:
    peer, peers_model, peers_optimizer = group_of(1, strategy, optimizer)
    for step in range(2):
        train(peers_model, peers_optimizer, step)
    peers_model.mean = peers_model.mean + 4.0
    healing, model, own_optimizer = group_of(2, strategy, optimizer)
    train(model, own_optimizer, 0)
    # Model weights are as new as main weights now.
    with torch.no_grad():
        own_loss(model, 0)
    healing.load(sent(peer.state()))
    losses = [
        [train(*group, step) for step in (2, 3)]
        for group in ((peers_model, peers_optimizer), (model, own_optimizer))
    ]
    assert are_equal(*losses)
    assert are_equal(rows(model), rows(peers_model))
    assert model.mean.tolist() == [5.0] * 3


@on_ranks(2, strategy=STRATEGIES)
def test_state_may_be_read_in_a_forward_and_loaded_after_a_backward(strategy: str) -> None:
    peer, peers_model, peers_optimizer = group_of(1, strategy, "Adam")
    train(peers_model, peers_optimizer, 0)
    before, read = rows(peers_model), list[torch.Tensor]()

    def read_state(*_: Any) -> None:
        state = peer.state()["model"]
        read.extend(state[name].clone() for name, _ in peers_model.named_parameters())

    handle = peers_model.blocks[1].register_forward_hook(read_state)
    own_loss(peers_model, 2).backward()
    handle.remove()
    healing, model, optimizer = group_of(2, strategy, "Adam")
    own_loss(model, 0).backward()
    gradients = [p.grad for p in peers_model.parameters()]
    healing.load(sent(peer.state()))
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        param.grad.to_local().copy_(gradient.to_local())
    for stepped in (optimizer, peers_optimizer):
        stepped.step()
    assert are_equal(before, read)
    assert are_equal(rows(model), rows(peers_model))


@on_ranks(2, strategy=STRATEGIES)
def test_aborted_step_leaves_nothing_behind(strategy: str) -> None:
    manager, model, optimizer = group_of(1, strategy, "Adam")
    _, fresh_model, fresh_optimizer = group_of(1, strategy, "Adam")
    losses = []
    for step in range(4):
        if step in (0, 2):
            manager.spoils = True
            train(model, optimizer, 7, commits=False)
            manager.spoils = False
        losses += [train(model, optimizer, step), train(fresh_model, fresh_optimizer, step)]
    context = next(iter(units_of(model))).context
    assert are_equal(losses[::2], losses[1::2])
    assert are_equal(rows(model), rows(fresh_model))
    assert all(p.grad is None for p in model.parameters())
    assert not any(grads.has_partial for unit in context.units() for grads in unit.grads())


@on_ranks(2)
def test_parameters_that_are_not_sharded_are_rejected() -> None:
    model = Stack()
    model.input.requires_grad_(False)
    found = error_message(ValueError, lambda: fault_tolerance.attach(Manager(), model))
    assert "blocks.0.norm.weight is trained and not sharded" in found
    wrap(model)
    fault_tolerance.attach(Manager(), model)


@on_ranks(2)
def test_ranks_at_different_steps_do_not_start_one() -> None:
    mesh, equal = mesh_of(2), Manager(5)
    fault_tolerance.start_step(equal, mesh)
    differ = Manager(5 if dist.get_rank() else 0)
    found = error_message(RuntimeError, lambda: fault_tolerance.start_step(differ, mesh))
    assert equal.is_started
    assert f"at steps 0 to 5, this rank at {differ.step}" in found
    assert not differ.is_started


SECONDS = {"heartbeat": 5, "join": 120, "collective": 60, "manager": 180, "quorum": 3600}


def timeouts_error(changed: dict[str, float], mesh: Any) -> str:
    """The message of `check_timeouts` for some timeouts in seconds."""
    given = {name: timedelta(seconds=value) for name, value in (SECONDS | changed).items()}
    manager = SimpleNamespace(
        _pg=SimpleNamespace(_timeout=given["collective"]),
        _timeout=given["manager"],
        _quorum_timeout=given["quorum"],
    )
    timeouts = {"heartbeat_timeout": given["heartbeat"], "join_timeout": given["join"]}
    check = fault_tolerance.check_timeouts
    return error_message(ValueError, lambda: check(manager, mesh, **timeouts))


@on_ranks(
    2,
    case=[
        ({}, []),
        ({"join": 60}, ["process group (60 s) must be shorter than the join_", "house: 120"]),
        ({"manager": 30}, ["than the timeout of the Manager (30 s)", "the Manager: 120 s"]),
        ({"heartbeat": 7000}, ["heartbeat_timeout of the lighthouse (7000 s)", "er: 14000 s"]),
        ({"join": 3600}, ["join_timeout of the lighthouse (3600 s)", "of the Manager: 7200 s"]),
        ({"manager": 1800}, ["the mesh's process group (1800 s)", "process group: 3600 s", "7200"]),
        ({"quorum": 600}, ["mesh's process group (1800 s) must be shorter", "Manager: 3600 s"]),
    ],
)
def test_timeouts_in_the_wrong_order_are_named(case: tuple[dict[str, float], list[str]]) -> None:
    changed, expected = case
    found = timeouts_error(changed, mesh_of(2))
    assert all(part in found for part in expected or ["no error"]), found


@on_ranks(2)
def test_proposed_timeouts_are_in_order() -> None:
    # torchft's defaults: of the lighthouse's command line, of the manager, of its process group.
    defaults = {"join": 60, "collective": 60, "manager": 60, "quorum": 60}
    found = timeouts_error(defaults, mesh_of(2))
    proposed = {"join": 120, "manager": 120, "quorum": 3600}
    assert found.count("must be shorter") == 4
    for text in ("join_timeout of the lighthouse: 120 s, timeout of the Manager: 120 s", "3600"):
        assert text in found
    assert timeouts_error(defaults | proposed, mesh_of(2)) == "no error"
