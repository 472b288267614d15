"""Events of a program that do by hand what a training loop may do between its passes.

Each event does the same to the plain and to the sharded model, and compares them afterwards.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.wrapping import whole
from tests.random.cases import Event
from tests.random.models import OPTIMIZERS, tensors_of
from tests.random.precision import scaled_gradient

SPLIT = " split"
"""Ends the name of an optimizer that gets half of the parameters by `add_param_group`."""
FACTOR = 0.8


def make_optimizer(kind: str, params: Iterable[Any]) -> torch.optim.Optimizer:
    """Build an optimizer: a key of `OPTIMIZERS`, which may be followed by ` split`."""
    params = list(params)
    if not kind.endswith(SPLIT):
        return OPTIMIZERS[kind](params)
    half = (len(params) + 1) // 2
    optimizer = OPTIMIZERS[kind.removesuffix(SPLIT)](params[:half])
    if params[half:]:
        optimizer.add_param_group({"params": params[half:], "lr": 0.02})
    return optimizer


def in_thread(call: Callable[[], Any]) -> Any:
    """Return the result of a call in another thread."""
    found: list[Any] = []
    failed: list[BaseException] = []

    def target() -> None:
        try:
            found.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def on_some_rank(flags: list[bool]) -> list[int]:
    """Return the elementwise maximum of flags over ranks. Collective."""
    found = torch.tensor(flags, dtype=torch.int64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def _set_grad(param: Any, grad: Any) -> None:
    param.grad = grad


def _set_data(param: Any, data: Any) -> None:
    param.data = data


GRADS: dict[str, Callable[[Any], object]] = {
    "": lambda p: p.grad.mul_(FACTOR),
    "none": lambda p: _set_grad(p, None),
    "new": lambda p: _set_grad(p, p.grad * FACTOR + 0.01),
    "weights": lambda p: _set_grad(p, p.detach() * 0.1),
    "clone": lambda p: _set_grad(p, p.grad.clone()),
    "data": lambda p: p.grad.data.mul_(FACTOR),
    "set data": lambda p: _set_data(p.grad, p.grad.data * FACTOR),
    "view": lambda p: p.grad[:1].zero_(),
    "decay": lambda p: p.grad.add_(p.detach(), alpha=0.1),
    "local": lambda p: _local(p.grad).mul_(FACTOR),
    "foreach": lambda p: torch._foreach_mul_([p.grad], FACTOR),
    "zero": lambda p: p.grad.zero_(),
}
"""Changes of a gradient between a backward and a step."""

WRITES: dict[str, Callable[[Any], object]] = {
    "": lambda p: p.data.mul_(FACTOR),
    "in place": lambda p: p.mul_(FACTOR),
    "copy": lambda p: p.copy_(p * FACTOR),
    "local": lambda p: _local(p).mul_(FACTOR),
    "view": lambda p: p[:1].mul_(FACTOR),
    "clamp": lambda p: p.clamp_(-0.5, 0.5),
    "set data": lambda p: _set_data(p, p.data * FACTOR),
    "full": lambda p: _set_data(p, whole(p).detach() * FACTOR),
    "foreach": lambda p: torch._foreach_mul_([p], FACTOR),
    "lerp": lambda p: p.lerp_(p * 0.5, 0.5),
}
"""Changes of a weight between two passes, without gradients."""


def _local(tensor: Any) -> torch.Tensor:
    """Return the local rows of a sharded tensor, or a plain tensor itself."""
    return tensor.to_local() if hasattr(tensor, "local_rows") else tensor


def _picked(run: Any, seed: int) -> list[tuple[Any, Any]]:
    """Return some pairs of sharded and plain parameters, without those without elements."""
    pairs = [pair for pair in run.pairs().values() if pair[1].numel()]
    return [pair for number, pair in enumerate(pairs) if (seed + number) % 3 or len(pairs) == 1]


def do_grad(run: Any, event: Event) -> None:
    """Change the gradients of some parameters; `how`: a key of `GRADS`."""
    # A reduction in flight of a failed backward may write zeroed gradients until a forward.
    if run.unsynced or not run.has_grads or run.has_zeros:
        return
    run.compare_grads()
    with torch.no_grad():
        for pair in _picked(run, event.seed):
            is_new = event.how == "weights" and all(param.requires_grad for param in pair)
            for param in pair:
                if is_new or param.grad is not None:
                    GRADS[event.how](param)
    run.compare_grads()


def do_write(run: Any, event: Event) -> None:
    """Change some weights; `how`: a key of `WRITES`."""
    run.slots.clear()
    with torch.no_grad():
        for pair in _picked(run, event.seed):
            for param in pair:
                WRITES[event.how](param)
    run.compare_params()


def do_optimizer(run: Any, event: Event) -> None:
    """Continue with a new optimizer; `how`: its kind, see `make_optimizer`."""
    run.make_optimizers(event.how or "sgd")


def do_rate(run: Any, event: Event) -> None:
    """Change the learning rate of one parameter group, or of all with `flag`."""
    for optimizer in (run.plain_optimizer, run.optimizer):
        groups = optimizer.param_groups
        for group in groups if event.flag else [groups[event.seed % len(groups)]]:
            group["lr"] *= 0.5 + 0.1 * (event.seed % 7)


def do_clip(run: Any, event: Event) -> None:
    """Clip gradients to a norm; `how`: its order if it is not 2."""
    held = [p for p in run.params.values() if p.to_local().numel()]
    if run.unsynced or not run.has_grads:
        return
    # Other ranks would wait for a rank with rows but without any gradient.
    if on_some_rank([all(p.grad is None for p in held)])[0]:
        return
    limit, order = 0.05 * (1 + event.seed % 5), float(event.how or 2)
    # A norm of no elements does not exist for every order.
    pairs = [pair for pair in run.pairs().values() if pair[1].numel()]
    if order < 1:
        _clip_unstable(run, pairs, order, limit)
        return
    expected = nn.utils.clip_grad_norm_([full for _, full in pairs], limit, order)
    found: Any = nn.utils.clip_grad_norm_([mine for mine, _ in pairs], limit, order)
    if held:
        run.compare_numbers("norm", found.item(), expected)
    run.compare_grads()


def _clip_unstable(run: Any, pairs: list[tuple[Any, Any]], order: float, limit: float) -> None:
    """Clip to a norm that the smallest elements determine, whose rounding may differ.

    The reference is the norm of the sharded gradients, gathered.
    """
    if run.has_zeros:
        return
    run.compare_grads()
    pairs = [(mine, full) for mine, full in pairs if mine.grad is not None]
    if run.problems or not pairs:
        return
    grads = [mine.grad for mine, _ in pairs]
    expected = nn.utils.get_total_norm([grad.full_tensor() for grad in grads], order)
    found = whole(nn.utils.get_total_norm(grads, order))
    run.compare_numbers("norm", found, expected)
    found = whole(nn.utils.clip_grad_norm_([mine for mine, _ in pairs], limit, order))
    run.compare_numbers("norm of clipping", found, expected)
    for _, full in pairs:
        full.grad.mul_((limit / (expected + 1e-6)).clamp(max=1.0).to(full.grad.dtype))
    run.compare_grads()


# -- hooks -----------------------------------------------------------------------------------------


def _scaled(value: Any) -> Any:
    return value * FACTOR if isinstance(value, torch.Tensor) else value


def _scale_first_input(module: Any, args: Any) -> Any:
    return (_scaled(args[0]), *args[1:]) if args else None


def _scale_output(module: Any, args: Any, output: Any) -> Any:
    return _scaled(output) if isinstance(output, torch.Tensor) else None


def _scale_grads(module: Any, grads: Any, *_: Any) -> Any:
    return tuple(map(_scaled, grads))


def _scale_grad(param: Any) -> None:
    param.grad.mul_(FACTOR)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "pre forward": lambda module: module.register_forward_pre_hook(_scale_first_input),
    "forward": lambda module: module.register_forward_hook(_scale_output),
    "pre backward": lambda module: module.register_full_backward_pre_hook(_scale_grads),
    "backward": lambda module: module.register_full_backward_hook(_scale_grads),
}
"""Hooks of modules."""


@contextlib.contextmanager
def _hooks(run: Any, event: Event) -> Iterator[None]:
    """Register hooks on some parameters (`how` empty), or on the modules of a node."""
    handles = []
    if not event.how:
        for pair in _picked(run, event.seed):
            if all(param.requires_grad for param in pair):
                handles += [p.register_post_accumulate_grad_hook(_scale_grad) for p in pair]
    else:
        for model in (run.plain, run.model):
            if (found := model.known.get(event.node)) is not None:
                # With two roots, the modules of both.
                for module in found if isinstance(found, nn.ModuleList) else [found]:
                    handles.append(HOOKS[event.how](module))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def do_hooked(run: Any, event: Event) -> None:
    """A forward and a synchronized backward with hooks of parameters or of a module."""
    run.slots.clear()
    # A hook of a gradient that exists before may run again without a backward of the parameter.
    run.do_zero(Event("zero", flag=True))
    with _hooks(run, event):
        run.do_forward(Event("forward", seed=event.seed))
        run.do_backward(Event("backward"))


# -- losses ----------------------------------------------------------------------------------------


def do_head(run: Any, event: Event) -> None:
    """A backward whose loss multiplies a whole weight with this rank's activations."""
    if run.unsynced:
        return
    pairs = [pair for pair in run.pairs().values() if pair[1].numel()]
    pairs = [pair for pair in pairs if all(param.requires_grad for param in pair)]
    if not pairs:
        return
    mine, full = pairs[event.seed % len(pairs)]

    def loss(model: Any, rank: int, weight: torch.Tensor) -> torch.Tensor:
        x, call = run.call(event.seed, rank)
        output = run.output(model, x, call)
        first = tensors_of(output)[0].double()
        other = torch.stack([tensor.double().square().mean() for tensor in tensors_of(output)])
        return other.sum() + (first.mean() * weight.double().tanh()).square().mean() * 3.0

    with run.is_reference():
        weight = scaled_gradient(full, run.factor / run.loss_factor)
        losses = [loss(run.plain, rank, weight) for rank in range(run.world_size)]
        torch.stack(losses).sum().mul(run.loss_factor).backward()
    found = loss(run.model, run.rank, mine.full_tensor())
    run.compare_numbers("loss with a head", found.detach(), losses[run.rank].detach())
    found.backward()
    run.has_grads = True
    run.compare_grads()


def do_scaler(run: Any, event: Event) -> None:
    """A step with `GradScaler`; with `flag`, one element of a gradient is infinite."""
    if run.unsynced:
        return
    run.slots.clear()
    run.do_zero(Event("zero", flag=True))
    with run.is_reference():
        losses = [
            run.loss(run.plain, *run.call(event.seed, rank)) for rank in range(run.world_size)
        ]
    if not all(loss.requires_grad for loss in losses):
        return
    theirs, ours = (torch.amp.GradScaler("cpu", init_scale=128.0) for _ in range(2))
    with run.is_reference():
        theirs.scale(torch.stack(losses).sum().mul(run.loss_factor)).backward()
    ours.scale(run.loss(run.model, *run.own(event))).backward()
    run.has_grads = True
    with_grad = [pair for pair in run.pairs().values() if pair[1].grad is not None]
    with_grad = [pair for pair in with_grad if pair[1].numel()]
    run.compare_grads()
    if not with_grad:
        return
    if event.flag:
        mine, full = with_grad[event.seed % len(with_grad)]
        with torch.no_grad():
            full.grad[-1:].fill_(float("inf"))
            mine.grad[-1:].fill_(float("inf"))
    for scaler, optimizer in ((theirs, run.plain_optimizer), (ours, run.optimizer)):
        scaler.unscale_(optimizer)
    if not event.flag:
        run.compare_grads()
    for scaler, optimizer in ((theirs, run.plain_optimizer), (ours, run.optimizer)):
        scaler.step(optimizer)
        scaler.update()
    run.compare_numbers("loss scale", ours.get_scale(), theirs.get_scale())
    run.compare_params()
    run.compare_states()
    run.do_zero(Event("zero", flag=True))


def do_dual(run: Any, event: Event) -> None:
    """Forward-mode differentiation; that of `torch.func` is an error by name."""
    forward_ad = torch.autograd.forward_ad

    def tangent(model: Any, rank: int) -> torch.Tensor:
        x, call = run.call(event.seed, rank)
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(run.loss(model, forward_ad.make_dual(x, 0.5 * x), call))
            return found.tangent.detach()

    try:
        expected = [tangent(run.plain, rank) for rank in range(run.world_size)][run.rank]
    except (RuntimeError, NotImplementedError, AttributeError):
        # An operation without a formula, or an output that does not depend on the input.
        return
    run.compare_numbers("forward derivative", tangent(run.model, run.rank), expected)
    x, call = run.own(event)
    try:
        torch.func.jvp(lambda x: run.loss(run.model, x, call), (x,), (x,))
    except RuntimeError as error:
        if "torch.func.jvp" not in str(error):
            raise
    else:
        run.problems.append((run.position, "torch.func.jvp is no error"))
    run.compare_params()


EVENTS: dict[str, Callable[[Any, Event], None]] = {
    "clip": do_clip,
    "grad": do_grad,
    "write": do_write,
    "optimizer": do_optimizer,
    "rate": do_rate,
    "hooked": do_hooked,
    "head": do_head,
    "scaler": do_scaler,
    "dual": do_dual,
}
