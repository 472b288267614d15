"""Runs a case: the sharded model on this rank's data, and a plain loop over all ranks' data.

Every rank also builds the plain model and trains it with the data of all ranks, so that the
expected losses, gradients, parameters and optimizer states are known on every rank. Results are
compared after every event.

After an exception in a forward or a backward the program acts as a training loop would: it drops
the losses of that step, clears the gradients on all ranks, and continues.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_v2 import FSDPModule, checkpoint
from tests.distributed.checkpoint_trainings import torch_load, torch_save
from tests.distributed.wrapping import whole
from tests.random.by_hand import EVENTS, in_thread, make_optimizer, on_some_rank
from tests.random.calls import do_call, drop_gradients
from tests.random.cases import Case, Event
from tests.random.models import INPUT, Call, build, distance, loss_of, roots, tensors_of
from tests.random.precision import POLICIES, Casts, with_main_weights
from tests.random.rules import rejection
from tests.random.sharded import shard
from tests.random.weight_losses import term_of
from tests.reference.failing import PlannedFailure
from tests.reference.training import distances

TOLERANCES = {"float64": 1e-9, "float32": 1e-5, "cached": 3e-2, "uncached": 2e-2}
"""By dtype or kind of autocast, which rounds gradients to bf16 before they are scaled."""
MOST_PROBLEMS = 5


class InvalidCase(Exception):
    """The plain model cannot run the event, so there is no reference."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case on a rank.

    Attributes:
        kind: `same`, `different`, `raised`, `invalid`, or `rejected`: the traced pool's own error
            for a pass without a plan, which leaves a valid state, or `rules.rejection`.
        event: Position of the first failing event.
        text: Description of the failure.
    """

    kind: str
    event: int = -1
    text: str = ""


def batch(case: Case, seed: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs `(rows, INPUT)` and tokens `(rows,)` of one rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    rows = 1 + (seed + rank) % 3
    x = torch.randn(rows, INPUT, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, 97, (rows,), generator=generator)
    return x.to(getattr(torch, case.dtype)), tokens


def chosen(case: Case, seed: int, rank: int) -> frozenset[int]:
    """Return the ids of nodes that a forward skips or runs once more."""
    found = set()
    for node in case.tree.walk():
        if node.how == "step" and (seed * 7 + node.id) % 3 == 0:
            found.add(node.id)
        if node.how in ("rank", "uneven") and (seed * 7 + node.id + rank) % 2 == 0:
            found.add(node.id)
    return frozenset(found)


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Mark exceptions inside as `invalid`."""
    try:
        yield
    except Exception as error:
        raise InvalidCase(f"{type(error).__name__}: {error}") from error


def _called(call: Callable[[], Any]) -> Any:
    return call()


@dataclass
class Snapshot:
    """State of the plain model and optimizer at a save."""

    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    kind: str
    is_of_torch: bool = False
    future: Any = None

    def wait(self) -> None:
        """Wait until the save is on disk."""
        if self.future is not None:
            self.future.result()


class Run:
    """One case on one rank."""

    def __init__(self, case: Case, folder: str) -> None:
        self.case = case
        self.folder = Path(folder)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.precision = POLICIES[case.policy]
        self.tolerance = self.precision.tolerance or TOLERANCES[case.autocast or case.dtype]
        self.problems: list[tuple[int, str]] = []
        self.position = -1
        self.options = case.options
        with _plain():
            self.plain = build(case)
            self.dtypes = with_main_weights(self.plain, self.precision)
        self.model = shard(case, case.options)
        if case.options.meta:
            self.model.load_state_dict(self.plain.state_dict())
        # Keep sharded parameters: between a forward and its backward, modules have gathered ones.
        self.params: dict[str, Any] = dict(self.model.named_parameters())
        self.make_optimizers(case.options.optimizer)
        # By slot: this rank's loss, all ranks' losses of the plain model, and the inputs of both.
        self.slots: dict[int, tuple[Any, list[Any], Any, list[Any]]] = {}
        self.snapshots: dict[int, Snapshot] = {}
        self.unsynced = False
        self.has_grads = False
        # Whether gradients were set to zero after a failed step, which may have left some None.
        self.has_zeros = False

    # -- shared by both models -----------------------------------------------------------------

    @property
    def factor(self) -> float:
        """Factor of the sum of gradients over ranks."""
        scale = self.options.scale
        scale = 1.0 / self.world_size if scale is None else scale
        return 0.5 * scale if self.options.hook else scale

    @property
    def loss_factor(self) -> float:
        """Factor of the plain model's losses; with a policy, gradients are scaled instead."""
        return 1.0 if self.case.policy else self.factor

    def with_casts(self, call: Call) -> Call:
        """Return the call of a forward of the plain model, with its casts."""
        if not self.case.policy:
            return call
        return replace(call, casts=Casts(self.precision, self.dtypes, self.factor))

    def make_optimizers(self, kind: str) -> None:
        """Build both optimizers; see `make_optimizer`."""
        self.kind = kind
        with _plain():
            self.plain_optimizer = make_optimizer(kind, self.plain.parameters())
        self.optimizer = make_optimizer(kind, self.params.values())

    def is_reference(self) -> contextlib.AbstractContextManager[None]:
        """Mark exceptions inside, of the plain model, as those of an invalid case."""
        return _plain()

    def output(self, model: Any, x: torch.Tensor, call: Call) -> Any:
        """Return the output of a model, under the case's autocast."""
        if model is self.plain:
            call = self.with_casts(call)
        if not self.case.autocast:
            output = model(x, call)
            if model is self.plain and self.precision.output is not None:
                return [tensor.to(self.precision.output) for tensor in tensors_of(output)]
            return output
        # The plain model runs the forwards of all ranks, each with casts of its own.
        cached = self.case.autocast == "cached" and model is not self.plain
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            return model(x, call)

    def loss(self, model: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
        """Return a loss of all outputs of a model."""
        return loss_of(self.output(model, x, call))

    def call(self, seed: int, rank: int) -> tuple[torch.Tensor, Call]:
        """Return input and call of one rank's forward."""
        x, tokens = batch(self.case, seed, rank)
        skipped, of_second = (chosen(self.case, seed + root, rank) for root in range(2))
        return x, Call(tokens, skipped, of_second)

    def own(self, event: Event) -> tuple[torch.Tensor, Call]:
        """Return input and call of this rank's forward."""
        return self.call(event.seed, self.rank)

    # -- comparing -----------------------------------------------------------------------------

    def check_error(self, what: str, error: float) -> None:
        """Record a difference that is too large, or NaN."""
        if not error <= self.tolerance:
            self.problems.append((self.position, f"{what}: {error:.3g}"))

    def compare_numbers(self, what: str, mine: Any, theirs: Any) -> None:
        """Compare single numbers; equal infinities are equal."""
        mine, theirs = float(mine), float(theirs)
        error = 0.0 if mine == theirs else abs(mine - theirs) / max(abs(theirs), 1e-3)
        self.check_error(what, error)

    def compare_rows(self, what: str, pairs: dict[str, tuple[Any, Any]]) -> None:
        """Compare local rows with the rows of full tensors."""
        held = {n: (mine.local_rows, mine.to_local().detach()) for n, (mine, _) in pairs.items()}
        full = {name: theirs.detach() for name, (_, theirs) in pairs.items()}
        for name, error in zip(pairs, distances(held, full), strict=True):
            self.check_error(f"{what} of {name}", error)

    def pairs(self) -> dict[str, tuple[Any, Any]]:
        """Return pairs of sharded and plain parameter by name."""
        plain = dict(self.plain.named_parameters())
        return {name: (param, plain[name]) for name, param in self.params.items()}

    def compare_params(self) -> None:
        """Compare the values and `requires_grad` of all parameters."""
        pairs = self.pairs()
        self.compare_rows("value", pairs)
        for name, (mine, full) in pairs.items():
            if mine.requires_grad is not full.requires_grad or mine.shape != full.shape:
                self.problems.append((self.position, f"{name}: shape or requires_grad"))
            if self.case.autocast or self.case.policy:
                # Weights that differ by rounding may differ by a whole bf16 step after a cast.
                full.data.copy_(mine.full_tensor())

    def compare_grads(self) -> None:
        """Compare gradients.

        A parameter without elements has an empty gradient where the plain one may have None. None
        counts as zero with a hook on reduced gradients, which may add some of other ranks, and
        after a failed step whose gradients were set to zero.
        """
        pairs = self.pairs()
        has, lacks = self._presence(pairs)
        compared = {}
        for (name, (mine, full)), some, missing in zip(pairs.items(), has, lacks, strict=True):
            if full.numel() == 0:
                continue
            if some and missing:
                self.problems.append((self.position, f"{name} has a gradient on some ranks only"))
            is_zero = self.options.hook or self.has_zeros
            if some and full.grad is None and is_zero:
                full.grad = torch.zeros_like(full)
            if not some and full.grad is not None and self.has_zeros and not full.grad.any():
                full.grad = None
            if bool(some) != (full.grad is not None):
                what = "a" if some else "no"
                self.problems.append((self.position, f"{name} has {what} gradient"))
                continue
            if mine.grad is not None:
                compared[name] = (mine.grad, full.grad)
        self.compare_rows("gradient", compared)

    def _presence(self, pairs: dict[str, tuple[Any, Any]]) -> tuple[list[int], list[int]]:
        """Return, per parameter, whether any rank has a gradient, and whether any lacks one."""
        held = [mine for mine, _ in pairs.values()]
        has = [mine.grad is not None for mine in held]
        lacks = [mine.grad is None for mine in held]
        found = on_some_rank(has + lacks)
        return found[: len(held)], found[len(held) :]

    def compare_states(self) -> None:
        """Compare the optimizer states, except those of parameters without elements."""
        pairs = self.pairs()
        found: dict[str, dict[str, tuple[Any, Any]]] = {}
        for name, (mine, full) in pairs.items():
            if full.numel() == 0:
                continue
            ours = self.optimizer.state.get(mine, {})
            theirs = self.plain_optimizer.state.get(full, {})
            if ours.keys() != theirs.keys():
                text = f"state of {name}: {sorted(ours)} and {sorted(theirs)}"
                self.problems.append((self.position, text))
                continue
            for key, value in theirs.items():
                if isinstance(ours[key], torch.Tensor) and hasattr(ours[key], "local_rows"):
                    found.setdefault(key, {})[name] = (ours[key], value)
                elif value is not None:
                    self.compare_numbers(f"{key} of {name}", ours[key], value)
        for key, states in found.items():
            self.compare_rows(key, states)

    # -- events --------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run all events; stop at the first failing event."""
        for position, event in enumerate(self.case.program):
            self.position = position
            if event.do == "call":
                do_call(self, event)
            elif event.do in EVENTS:
                EVENTS[event.do](self, event)
            else:
                getattr(self, "do_" + event.do.replace(" ", "_"))(event)
            # All ranks stop together.
            if on_some_rank([bool(self.problems)])[0]:
                break
        for snapshot in self.snapshots.values():
            snapshot.wait()
        if not self.problems:
            return Outcome("same")
        text = "\n".join(text for _, text in self.problems[:MOST_PROBLEMS])
        return Outcome("different", self.problems[0][0], text)

    def do_forward(self, event: Event) -> None:
        """Compute and keep a loss; `flag`: the input requires a gradient; `how`: `thread`."""
        with _plain():
            inputs, losses = [], []
            for rank in range(self.world_size):
                x, call = self.call(event.seed, rank)
                inputs.append(x.requires_grad_(event.flag))
                losses.append(self.loss(self.plain, x, call))
        x, call = self.own(event)
        x.requires_grad_(event.flag)
        run = in_thread if event.how == "thread" else _called
        loss = run(lambda: self.loss(self.model, x, call))
        self.compare_numbers("loss", loss.detach(), losses[self.rank].detach())
        if all(loss.requires_grad for loss in losses):
            self.slots[event.slot] = (loss, losses, x, inputs)

    def do_backward(self, event: Event) -> None:
        """Backward of a kept loss; `how`: in `generate.DEFERRED`, or `retain`, which keeps it."""
        if event.slot not in self.slots:
            return
        loss, losses, x, inputs = self.slots.pop(event.slot)
        retains = "retain" in event.how
        if retains:
            self.slots[event.slot] = (loss, losses, x, inputs)
        before = [i.grad for i in inputs]
        with _plain():
            torch.stack(losses).sum().mul(self.loss_factor).backward(retain_graph=retains)
        if "no sync" in event.how:
            with contextlib.ExitStack() as stack:
                for root in roots(self.model):
                    stack.enter_context(root.no_sync())
                loss.backward(retain_graph=retains)
        elif event.how == "some units":
            units = [m for m in self.model.modules() if isinstance(m, FSDPModule)]
            for number, unit in enumerate(units):
                is_synced = bool((event.seed + number) % 2)
                unit.set_requires_gradient_sync(is_synced, recurse=False)
            loss.backward()
            for unit in units:
                unit.set_requires_gradient_sync(True, recurse=False)
        else:
            for root in roots(self.model):
                root.set_is_last_backward("not last" not in event.how)
                root.set_requires_all_reduce("no all reduce" not in event.how)
            loss.backward(retain_graph=retains)
            for root in roots(self.model):
                root.set_is_last_backward(True)
                root.set_requires_all_reduce(True)
        self.unsynced = event.how not in ("", "retain")
        self.has_grads = True
        if x.requires_grad and before[self.rank] is None and x.grad is not None:
            expected = inputs[self.rank].grad / self.loss_factor
            self.check_error("gradient of the input", distance(x.grad, expected))
        if not self.unsynced:
            self.compare_grads()

    def do_input_gradient(self, event: Event) -> None:
        """A gradient with respect to the input alone, without gradients of parameters."""
        if self.unsynced:
            return

        def gradient(model: Any) -> torch.Tensor:
            x, call = self.own(event)
            return torch.autograd.grad(self.loss(model, x.requires_grad_(True), call), x)[0]

        with _plain():
            expected = gradient(self.plain)
        self.check_error("gradient of the input alone", distance(gradient(self.model), expected))
        self.compare_grads()

    def do_penalty(self, event: Event) -> None:
        """A backward through a gradient: the loss is the norm of the input's gradient."""
        if self.unsynced:
            return

        def penalty(model: Any, rank: int) -> torch.Tensor:
            x, call = self.call(event.seed, rank)
            x.requires_grad_(True)
            loss = self.loss(model, x, call)
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            return grad.square().sum() + loss

        with _plain():
            losses = [penalty(self.plain, rank) for rank in range(self.world_size)]
            torch.stack(losses).sum().mul(self.loss_factor).backward()
        loss = penalty(self.model, self.rank)
        self.compare_numbers("penalty", loss.detach(), losses[self.rank].detach())
        loss.backward()
        self.has_grads = True
        self.compare_grads()

    def do_weights(self, event: Event) -> None:
        """A backward of a loss of the parameters themselves, with a factor of each rank."""
        if self.unsynced:
            return

        # A parameter frozen while gathered is updated at the next reshard.
        pairs = [
            (mine, full)
            for mine, full in self.pairs().values()
            if mine.requires_grad and full.requires_grad and full.ndim and full.numel()
        ]
        if not pairs:
            return
        terms = [term_of(event.seed, n, full, self.tolerance) for n, (_, full) in enumerate(pairs)]
        found: Any = sum(whole(term(mine)) for term, (mine, _) in zip(terms, pairs, strict=True))
        expected: Any = sum(term(full) for term, (_, full) in zip(terms, pairs, strict=True))
        self.compare_numbers("loss of weights", whole(found).detach(), expected.detach())
        factors = [1.0 + 0.5 * rank for rank in range(self.world_size)]
        (expected * sum(factors) * self.factor).backward()
        (found * factors[self.rank]).backward()
        self.has_grads = True
        self.compare_grads()

    def do_evaluate(self, event: Event) -> None:
        """A forward without gradients; `how`: `inference` mode, or in another `thread`."""
        inference = event.how == "inference"
        self._forward_alone(event, torch.inference_mode if inference else torch.no_grad)

    def do_waste(self, event: Event) -> None:
        """A forward with gradients without a backward."""
        self._forward_alone(event, torch.enable_grad)

    def _forward_alone(self, event: Event, context: Any) -> None:
        def loss(model: Any) -> torch.Tensor:
            with context():
                x, call = self.own(event)
                return self.loss(model, x, call).detach()

        with _plain():
            expected = loss(self.plain)
        run = in_thread if event.how == "thread" else _called
        self.compare_numbers("loss", run(lambda: loss(self.model)), expected)

    def do_fail(self, event: Event) -> None:
        """A step that fails at a node, followed by clearing the gradients for a retry.

        `how`: `forward`, `backward` or `recomputation`.
        """
        x, call = self.own(event)
        call.fail, call.fails_in = event.node, event.how
        with contextlib.suppress(PlannedFailure):
            loss = self.loss(self.model, x, call)
            if loss.requires_grad:
                loss.backward()
        self.slots.clear()
        if event.how != "forward" and self.case.differs_by_rank:
            # Reset before other collectives, since ranks may have issued different reductions.
            for root in roots(self.model):
                root.reset_iter_state()
            self._zero(set_to_none=True)
        if self.unsynced:
            # An optimizer does not discard gradients that are not synchronized.
            drop_gradients(self)
        self._zero(event.flag)
        self.has_zeros = not event.flag
        # A reduction in flight may overwrite zeros; the next forward restores them.
        if event.flag or event.how == "forward":
            self.compare_grads()

    def do_zero(self, event: Event) -> None:
        """Clear gradients; `flag`: to None."""
        if not self.unsynced:
            self._zero(event.flag)

    def _zero(self, set_to_none: bool) -> None:
        self.plain_optimizer.zero_grad(set_to_none=set_to_none)
        self.optimizer.zero_grad(set_to_none=set_to_none)
        # Frozen parameters may also have gradients, which the optimizer does not clear.
        self.unsynced = self.has_grads = False
        self.has_zeros &= not set_to_none

    def do_step(self, event: Event) -> None:
        """Step both optimizers."""
        if self.unsynced:
            return
        self.slots.clear()
        if self.has_zeros:
            self.compare_grads()
        self.plain_optimizer.step()
        self.optimizer.step()
        self.compare_params()
        self.compare_states()

    def do_freeze(self, event: Event) -> None:
        """Freeze or train everything in a node, also between the micro-batches of a step."""
        self.slots.clear()
        for model in (self.plain, self.model):
            if event.node in model.known:
                model.known[event.node].requires_grad_(not event.flag)

    def do_state(self, event: Event) -> None:
        """Compare the state dict."""
        theirs = self.plain.state_dict()
        mine = self.model.state_dict()
        if list(mine) != list(theirs):
            self.problems.append((self.position, "names of the state dict"))
            return
        sharded = {n: (t, theirs[n]) for n, t in mine.items() if hasattr(t, "local_rows")}
        self.compare_rows("state dict", sharded)
        for name in mine.keys() - sharded.keys():
            if not torch.equal(mine[name], theirs[name]):
                self.problems.append((self.position, f"buffer {name}"))

    def do_full(self, event: Event) -> None:
        """Gather every parameter in full. Collective."""
        for name, (mine, full) in self.pairs().items():
            found = mine.full_tensor().detach().double()
            self.check_error(f"full {name}", distance(found, full.detach().double()))

    def do_load(self, event: Event) -> None:
        """Load other weights, given in full; `how`: `assign` replaces the
        parameters by them, and `assign sharded` by their own state dict."""
        self.slots.clear()
        generator = torch.Generator().manual_seed(event.seed)
        known: dict[int, torch.Tensor] = {}
        state = {}
        for name, value in self.plain.state_dict().items():
            # Tied parameters have several names and one value.
            key = value.data_ptr() if value.numel() else id(value)
            if key not in known:
                noise = torch.randn(tuple(value.shape), generator=generator, dtype=torch.float64)
                known[key] = (value.double() * 0.7 + 0.1 * noise).to(value.dtype)
            state[name] = known[key]
        self.plain.load_state_dict(state)
        # A copy, since the model may use the memory of what is assigned to it.
        given = {name: value.clone() for name, value in state.items()}
        self.model.load_state_dict(given, assign=event.how == "assign")
        if event.how == "assign sharded":
            self.model.load_state_dict(self.model.state_dict(), assign=True)
        self.compare_params()

    def do_functional(self, event: Event) -> None:
        """A call with other weights for that call alone."""
        x, call = self.own(event)
        values = {
            name: (param.detach() * 0.8 + 0.01).to(self.dtypes[id(param)])
            for name, param in self.plain.named_parameters()
        }
        with _plain(), torch.no_grad():
            given = (x, self.with_casts(call))
            expected = loss_of(torch.func.functional_call(self.plain, values, given))
        try:
            with torch.no_grad():
                found = loss_of(torch.func.functional_call(self.model, values, (x, call)))
        except (ValueError, RuntimeError) as error:
            if "functional_call" not in str(error):
                raise
            # Parameters that were frozen while gathered are updated at the next reshard.
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        else:
            self.compare_numbers("functional call", found, expected)
        self.compare_params()

    # -- checkpoints ---------------------------------------------------------------------------

    def do_save(self, event: Event) -> None:
        """Save under a number; `how`: `async`, or `torch` for torch's own checkpoint."""
        if self.unsynced:
            return
        state, params = self.plain_optimizer.state, self.plain.parameters()
        is_stateless = any(param.requires_grad and param not in state for param in params)
        path = str(self.folder / f"{event.slot}")
        if event.slot in self.snapshots:
            # A save to a path with another save in progress is rejected.
            self.snapshots.pop(event.slot).wait()
        # Torch's calls reject a trained parameter without state where others have some, and make no
        # state where there are gradients, as after a step of Muon that was left out.
        # A new optimizer has no state yet.
        has_others = state or not self.kind.startswith("sgd")
        if event.how == "torch" and has_others and is_stateless:
            return
        snapshot = Snapshot(
            copy.deepcopy(self.plain.state_dict()),
            copy.deepcopy(self.plain_optimizer.state_dict()),
            self.kind,
            is_of_torch=event.how == "torch",
        )
        if event.how == "torch":
            torch_save(path, self.model, self.optimizer)
        else:
            snapshot.future = checkpoint.save(
                path, self.model, self.optimizer, async_save=event.how == "async"
            )
        self.snapshots[event.slot] = snapshot

    def do_restore(self, event: Event) -> None:
        """Load a save; with `options`, into a new model with that sharding."""
        snapshot = self.snapshots.get(event.slot)
        if snapshot is None or self.unsynced:
            return
        if event.how == "torch" and not snapshot.is_of_torch:
            # The later save was left out.
            return
        snapshot.wait()
        path = str(self.folder / f"{event.slot}")
        trained = {name: param.requires_grad for name, param in self.plain.named_parameters()}
        if event.options is not None:
            self.options = event.options
            self.model = shard(self.case, self.options)
            self.params = dict(self.model.named_parameters())
            for name, param in self.params.items():
                param.requires_grad_(trained[name])
        if event.options is not None or self.kind != snapshot.kind:
            self.make_optimizers(snapshot.kind)
        self.slots.clear()
        self.plain.load_state_dict(snapshot.model)
        # Torch's save does not copy tensors, and training would change the snapshot.
        self.plain_optimizer.load_state_dict(copy.deepcopy(snapshot.optimizer))
        self._zero(set_to_none=True)
        if event.how == "torch":
            # Torch lists the parameters before the first step of a new optimizer reshards them.
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        load = torch_load if event.how == "torch" else checkpoint.load
        load(path, self.model, self.optimizer)
        self.compare_params()
        self.compare_states()


def run_case(case: Case, folder: str) -> Outcome:
    """Run a case on this rank. Collective."""
    run: Run | None = None
    try:
        run = Run(case, folder)
        return run.run()
    except InvalidCase as error:
        return Outcome("invalid", -1 if run is None else run.position, str(error))
    except Exception as error:
        # Other ranks wait for a rank that stops; its message must not wait for them.
        options = case.options if run is None else run.options
        expected = [rejection(case, options)]
        if options.pool:
            expected.append("no traced pass uses them together")
        is_rejected = any(text and text in str(error) for text in expected)
        kind = "rejected" if is_rejected else "raised"
        return Outcome(kind, -1 if run is None else run.position, traceback.format_exc())
