"""Calls of methods between the events of a program, which change no result.

Users may make them at any time, or between two steps; the latter drop the losses of forwards. A
call that raises an error changes nothing either.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron_fsdp_v2 import FSDPModule
from megatron_fsdp_v2.checkpoint import restore, snapshot
from megatron_fsdp_v2.diagnostics import audit
from megatron_fsdp_v2.runtime.module import unit_of
from tests.random.by_hand import FACTOR
from tests.random.cases import Event
from tests.random.models import distance, loss_of, roots


def _units(run: Any) -> list[Any]:
    return [module for module in run.model.modules() if isinstance(module, FSDPModule)]


def _unit(run: Any, event: Event) -> Any:
    found = _units(run)
    return found[event.seed % len(found)]


def _is_set(event: Event) -> bool:
    return bool(event.seed % 2)


def drop_gradients(run: Any) -> None:
    """Drop all gradients, also those that are not synchronized."""
    for model in (run.plain, run.model):
        for root in roots(model):
            root.zero_grad()
    run.unsynced = run.has_grads = run.has_zeros = False


# -- weights ---------------------------------------------------------------------------------------


def _unshard_two(run: Any, event: Event) -> None:
    handles = [unit.unshard(async_op=True) for unit in (_unit(run, event), _units(run)[-1])]
    for handle in handles:
        handle.wait()


def _unshard_and_reshard(run: Any, event: Event) -> None:
    unit = _unit(run, event)
    unit.unshard()
    unit.reshard()


def _prefetch(run: Any, event: Event) -> None:
    others = [unit for number, unit in enumerate(_units(run)) if (event.seed >> number) % 2]
    unit = _unit(run, event)
    if event.seed % 5:
        unit.set_modules_to_forward_prefetch(others[:3])
    else:
        unit.set_modules_to_backward_prefetch(others[:3])


def _reshard_after_forward(run: Any, event: Event) -> None:
    _unit(run, event).set_reshard_after_forward(_is_set(event), recurse=event.seed % 3 == 0)


def _reshard_after_backward(run: Any, event: Event) -> None:
    _unit(run, event).set_reshard_after_backward(_is_set(event), recurse=event.seed % 3 == 0)


def _read_whole(run: Any, event: Event) -> None:
    for of_plain, root in zip(roots(run.plain), roots(run.model), strict=True):
        plain = dict(of_plain.named_parameters(remove_duplicate=False))
        for param, whole in root.named_full_parameters():
            expected = plain[param].detach().to(whole.dtype).double()
            run.check_error(f"whole {param}", distance(whole.double(), expected))


def _assign(run: Any, event: Event) -> None:
    """Assign a parameter that is not tied to a module."""
    run.slots.clear()
    drop_gradients(run)
    sites: dict[nn.Parameter, list[tuple[str, str]]] = {}
    for name, module in run.plain.named_modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                sites.setdefault(param, []).append((name, attribute))
    alone = [(param, *places[0]) for param, places in sites.items() if len(places) == 1]
    if not alone:
        return
    param, name, attribute = alone[event.seed % len(alone)]
    with torch.no_grad():
        param.mul_(FACTOR)
    value = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
    setattr(run.model.get_submodule(name), attribute, value)
    # Takes the value over, as the next forward would.
    for unit in _units(run):
        unit.reshard()
        unit.unshard()
        unit.reshard()


# -- gradients -------------------------------------------------------------------------------------


def _zero(run: Any, event: Event) -> None:
    drop_gradients(run)
    run.compare_grads()


def _reduce(run: Any, event: Event) -> None:
    for root in roots(run.model):
        root.reduce_grad()
    run.unsynced = False
    run.compare_grads()


def _divide(run: Any, event: Event) -> None:
    run.slots.clear()
    drop_gradients(run)
    factor = 1.0 + event.seed % 4
    for root in roots(run.model):
        # Forgets what a failed backward left.
        root.reset_iter_state()
    for unit in _units(run):
        unit.set_gradient_divide_factor(factor)
    run.options = replace(run.options, scale=1 / factor)


# -- the whole model -------------------------------------------------------------------------------


def _offload(run: Any, event: Event) -> None:
    run.slots.clear()
    try:
        for root in roots(run.model):
            root.offload(run.optimizer, pin_memory=False)
    except RuntimeError as error:
        if "not synchronized" not in str(error):
            raise
    finally:
        for root in roots(run.model):
            root.reload()


def _rebuild(run: Any, event: Event) -> None:
    run.slots.clear()
    for root in roots(run.model):
        root.zero_grad()
        units = [module for module in root.modules() if isinstance(module, FSDPModule)]
        meshes = {group.spec.mesh for unit in units for group in unit_of(unit).held_groups}
        assert root.rebuild({mesh: mesh for mesh in meshes}, run.optimizer)
    drop_gradients(run)


def _restore(run: Any, event: Event) -> None:
    run.slots.clear()
    taken = snapshot(run.model, run.optimizer, pin_memory=False)
    with torch.no_grad():
        for param in run.params.values():
            param.mul_(FACTOR)
        for state in run.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.ndim:
                    value.zero_()
    restore(taken, run.model, run.optimizer)
    drop_gradients(run)


def _audit(run: Any, event: Event) -> None:
    if found := audit(run.model, run.optimizer):
        run.problems.append((run.position, f"audit: {found[:2]}"))


def _convert(run: Any, event: Event) -> None:
    (run.model if _is_set(event) else _unit(run, event)).to("cpu")


def _change_mode(run: Any, event: Event) -> None:
    run.model.eval()
    run.model.train()


def _look(run: Any, event: Event) -> None:
    assert repr(run.model)
    assert all(
        param.grad is None or param.grad.shape == param.shape for param in run.params.values()
    )
    run.model.state_dict()


def _copy(run: Any, event: Event) -> None:
    for call in (copy.deepcopy, pickle.dumps):
        try:
            call(_unit(run, event))
        except (RuntimeError, TypeError, AttributeError, pickle.PicklingError):
            continue
        run.problems.append((run.position, f"{call.__name__} is no error"))


def _load_optimizer(run: Any, event: Event) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def _pause(run: Any, event: Event) -> None:
    """An evaluation while everything is frozen, as in a training of two models."""
    run.slots.clear()
    trained = {}
    for model in (run.plain, run.model):
        trained[model] = [param.requires_grad for param in model.parameters()]
        model.requires_grad_(False)
    run.do_evaluate(Event("evaluate", seed=event.seed))
    for model in (run.plain, run.model):
        # The gathered parameters, where they are registered now.
        for was_trained, param in zip(trained[model], model.parameters(), strict=True):
            param.requires_grad_(was_trained)


def _use_alone(run: Any, event: Event) -> None:
    """A forward of one unit alone, and in two of three cases its backward."""
    case = run.case
    nodes = [node for node in case.tree.walk() if node.unit and node.id in run.plain.known]
    if not nodes or case.policy or case.autocast or run.unsynced:
        return
    node = nodes[event.seed % len(nodes)]

    def loss(model: Any, rank: int) -> torch.Tensor:
        module = model.known[node.id]
        _, call = run.call(event.seed, rank)
        generator = torch.Generator().manual_seed(event.seed + rank)
        x = torch.randn(len(call.tokens), case.width, generator=generator, dtype=torch.float64)
        x = x.to(getattr(torch, case.dtype))
        return loss_of((module[0] if isinstance(module, nn.ModuleList) else module)(x, call))

    with run.is_reference():
        losses = [loss(run.plain, rank) for rank in range(run.world_size)]
    found = loss(run.model, run.rank)
    run.compare_numbers("loss of a unit", found.detach(), losses[run.rank].detach())
    if event.seed % 3 and all(each.requires_grad for each in losses):
        with run.is_reference():
            torch.stack(losses).sum().mul(run.loss_factor).backward()
        found.backward()
        run.has_grads = True
        run.compare_grads()


CALLS: dict[str, Callable[[Any, Event], object]] = {
    "unshard": lambda run, event: _unit(run, event).unshard(),
    "unshard two": _unshard_two,
    "unshard and reshard": _unshard_and_reshard,
    "reshard": lambda run, event: _unit(run, event).reshard(),
    "prefetch": _prefetch,
    "reshard after forward": _reshard_after_forward,
    "reshard after backward": _reshard_after_backward,
    "read whole": _read_whole,
    "assign": _assign,
    "zero": _zero,
    "reduce": _reduce,
    "divide": _divide,
    "offload": _offload,
    "rebuild": _rebuild,
    "restore": _restore,
    "audit": _audit,
    "convert": _convert,
    "change mode": _change_mode,
    "look": _look,
    "copy": _copy,
    "load optimizer": _load_optimizer,
    "pause": _pause,
    "use alone": _use_alone,
}


def do_call(run: Any, event: Event) -> None:
    """Call methods; `how`: a key of `CALLS`."""
    CALLS[event.how](run, event)
    run.compare_params()
