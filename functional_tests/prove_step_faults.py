"""Faults of steps, of parameter groups and of resumes, which `prove` must find and name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_fsdp_v2.dtensor.sharded_rows import local_of
from megatron_fsdp_v2_mcore.prove.worker import Job

type Fault = Callable[[Job], contextlib.AbstractContextManager[Any]]
"""Returns a context in which this package computes something wrong."""
type Options = dict[str, Any]


def _inner(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chain, as torch sees them."""
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]


def _around_step(change: Callable[[Any], contextlib.AbstractContextManager[Any]]) -> Fault:
    """Step inside a context, after gradients are clipped."""

    def fault(job: Job) -> contextlib.AbstractContextManager[Any]:
        from megatron_fsdp_v2_mcore.optim.optimizer import ShardedChain

        step = ShardedChain._step

        def stepped(self: Any) -> Any:
            with change(self):
                return step(self)

        return mock.patch.object(ShardedChain, "_step", stepped)

    return fault


def options(change: Callable[[Options], Options]) -> Fault:
    """Step with other options than those in the parameter groups."""

    @contextlib.contextmanager
    def changed(optimizer: Any) -> Iterator[None]:
        groups = optimizer.param_groups
        kept = []
        for group in groups:
            new = change(group)
            kept.append({name: group[name] for name in new})
            group.update(new)
        yield
        for group, old in zip(groups, kept, strict=True):
            group.update(old)

    return _around_step(changed)


def before_step(change: Callable[[Any, torch.Tensor], None]) -> Fault:
    """Change this rank's rows of clipped gradients: takes a parameter and its gradient."""

    @contextlib.contextmanager
    def changed(optimizer: Any) -> Iterator[None]:
        for param in optimizer.get_parameters():
            if param.grad is not None and local_of(param).numel():
                change(param, local_of(param.grad))
        yield

    return _around_step(changed)


def after_step(change: Callable[[Any, torch.Tensor, torch.Tensor], None]) -> Fault:
    """Change this rank's rows of weights: takes a parameter, its rows, and those before."""

    @contextlib.contextmanager
    def changed(optimizer: Any) -> Iterator[None]:
        params = [param for param in optimizer.get_parameters() if local_of(param).numel()]
        before = [local_of(param).detach().clone() for param in params]
        yield
        for param, rows in zip(params, before, strict=True):
            change(param, local_of(param).detach(), rows)

    return _around_step(changed)


def state_before_step(change: Callable[[Options], None]) -> Fault:
    """Change the state of every parameter: takes the state."""

    @contextlib.contextmanager
    def changed(optimizer: Any) -> Iterator[None]:
        for inner in _inner(optimizer):
            for state in inner.state.values():
                change(state)
            for group in inner.param_groups:
                # Transformer Engine counts the steps of a group.
                if "step" in group:
                    change(group)
        yield

    return _around_step(changed)


def _clipped(clip: Any, others: Options, params: Any, most: float, total: float) -> None:
    clip(params, max_norm=most, total_norm=total, **others)


def clipping(change: Callable[..., None]) -> Fault:
    """Clip otherwise: takes Megatron's function, the parameters, and both norms."""

    def fault(job: Job) -> contextlib.AbstractContextManager[Any]:
        from megatron.core.optimizer import optimizer

        clip = optimizer.clip_grad_by_total_norm_fp32

        def changed(params: Any, max_norm: float, total_norm: float, **others: Any) -> None:
            call = functools.partial(_clipped, clip, others)
            change(call, params, max_norm, total_norm)

        return mock.patch.object(optimizer, "clip_grad_by_total_norm_fp32", changed)

    return fault


def schedule(name: str, change: Callable[[Any, Options, float], float]) -> Fault:
    """Schedule another value: takes the scheduler, a group and the value."""

    def fault(job: Job) -> contextlib.AbstractContextManager[Any]:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        scheduled = getattr(OptimizerParamScheduler, name)

        def changed(self: Any, group: Any) -> float:
            return change(self, group, scheduled(self, group))

        return mock.patch.object(OptimizerParamScheduler, name, changed)

    return fault


def groups(change: Callable[[list[Options]], None]) -> Fault:
    """Build an optimizer of other parameter groups."""

    def fault(job: Job) -> contextlib.AbstractContextManager[Any]:
        from megatron.core import optimizer

        build = optimizer._get_param_groups

        def changed(*args: Any, **kwargs: Any) -> Any:
            built = build(*args, **kwargs)
            change(built)
            return built

        return mock.patch.object(optimizer, "_get_param_groups", changed)

    return fault


def load(change: Callable[[Any, Any], None], *, only_on_one_rank: bool = False) -> Fault:
    """Change what a load has restored: takes the optimizer and the scheduler."""

    def fault(job: Job) -> contextlib.AbstractContextManager[Any]:
        from megatron.training import training

        restore = training.load_checkpoint

        def loaded(model: Any, optimizer: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            result = restore(model, optimizer, scheduler, *args, **kwargs)
            if dist.get_world_size() == 1 or not only_on_one_rank:
                change(optimizer, scheduler)
            return result

        return mock.patch.object(training, "load_checkpoint", loaded)

    return fault


def loaded_state(change: Callable[[Options], None], *, only_on_one_rank: bool = False) -> Fault:
    """Change the restored state of the first matrix with several rows on this rank."""

    def changed(optimizer: Any, scheduler: Any) -> None:
        for inner in _inner(optimizer):
            for param, state in inner.state.items():
                if param.dim() == 2 and local_of(param).shape[0] > 1:
                    change(state)
                    return

    return load(changed, only_on_one_rank=only_on_one_rank)


def _fewer_newton_schulz_steps(job: Job) -> contextlib.AbstractContextManager[Any]:
    from megatron_fsdp_v2_mcore.optim.muon import _NewtonSchulz

    call = _NewtonSchulz.__call__
    return mock.patch.object(
        _NewtonSchulz,
        "__call__",
        lambda self, stack: call(dataclasses.replace(self, steps=self.steps - 1), stack),
    )


def _is_vector(param: Any) -> bool:
    return bool(param.dim() == 1)


def _has_no_decay(group: Options) -> bool:
    return bool(group["wd_mult"] == 0)


def _nothing(*args: Any) -> None:
    pass


def _add_decay(param: Any, grad: torch.Tensor) -> None:
    grad.add_(local_of(param).detach(), alpha=0.1)


def _clip_by_own_norm(clip: Any, params: Any, most: float, total: float) -> None:
    own = torch.stack([local_of(p.grad).norm() for p in params if p.grad is not None]).norm()
    clip(params, most, float(own))


def _clip_matrices(clip: Any, params: Any, most: float, total: float) -> None:
    clip([param for param in params if not _is_vector(param)], most, total)


def _merge_groups(built: list[Options]) -> None:
    built[0]["params"] += [param for group in built[1:] for param in group["params"]]
    del built[1:]


def _leave_out_a_parameter(built: list[Options]) -> None:
    del built[0]["params"][-1]


def _multiply(key: str, factor: float) -> Callable[[Options], None]:
    def changed(state: Options) -> None:
        if key in state:
            local_of(state[key]).mul_(factor)

    return changed


def _rotate(key: str) -> Callable[[Options], None]:
    def changed(state: Options) -> None:
        local_of(state[key]).copy_(local_of(state[key]).roll(1, 0).clone())

    return changed


def _count_steps(count: Callable[[Any], Any]) -> Callable[[Options], None]:
    def changed(state: Options) -> None:
        if "step" in state:
            state["step"] = count(state["step"])

    return changed


def _forget(optimizer: Any, scheduler: Any) -> None:
    for inner in _inner(optimizer):
        inner.state.clear()


def _restart_counts(optimizer: Any, scheduler: Any) -> None:
    for inner in _inner(optimizer):
        for state in (*inner.state.values(), *inner.param_groups):
            if "step" in state:
                state["step"] = state["step"] * 0


def _restart_schedule(optimizer: Any, scheduler: Any) -> None:
    scheduler.num_steps = 0
    scheduler.step(0)


def _take_back_the_last_row(param: Any, rows: torch.Tensor, before: torch.Tensor) -> None:
    if param.dim() == 2:
        rows[-1].copy_(before[-1])


def _take_back_vectors(param: Any, rows: torch.Tensor, before: torch.Tensor) -> None:
    if _is_vector(param):
        rows.copy_(before)


def _double_on_one_rank(param: Any, rows: torch.Tensor, before: torch.Tensor) -> None:
    if dist.get_rank() == dist.get_world_size() - 1 and param.dim() == 2:
        rows.add_(rows - before)


def _decay_on_one_rank(param: Any, rows: torch.Tensor, before: torch.Tensor) -> None:
    if dist.get_rank() == dist.get_world_size() - 1 and param.dim() == 2:
        rows.mul_(1 - 1e-4)


def _zero_small_gradients(param: Any, grad: torch.Tensor) -> None:
    grad.masked_fill_(grad.abs() < 1e-5, 0)


EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall"
)
MUON, LION, DECOUPLED = "--optimizer muon", "--optimizer lion", "--decoupled-lr 1e-3"
WARMUP = "--lr-warmup-iters 100 --lr-decay-style cosine --min-lr 1e-5"
DECAYS = "--start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style linear"
SHARDED_TENSORS = "--tensor-model-parallel-size 8 --swiglu"
LAYERS = "--transformer-impl local"
WEIGHT = r"steps with equal gradients: weight of \S+ of iteration "
OPTION = r"steps with equal gradients: optimizer option of \S+ "
ONE_RANK = r"resumed on one rank: "

_FAULTS: Mapping[str, tuple[Fault, str, str]] = {
    "no weight decay": (options(lambda g: {"weight_decay": 0.0}), "", WEIGHT + "1"),
    "doubled weight decay": (
        options(lambda g: {"weight_decay": 2 * g["weight_decay"]}),
        "",
        WEIGHT + "1",
    ),
    "weight decay without the learning rate": (
        options(lambda g: {"weight_decay": g["weight_decay"] / g["lr"]}),
        "",
        WEIGHT + "1",
    ),
    "tiny weight decay is lost": (
        options(lambda g: {"weight_decay": 0.0}),
        "--weight-decay 1e-4",
        WEIGHT + "1",
    ),
    "weight decay of vectors": (
        options(lambda g: {"weight_decay": 0.1}),
        "",
        WEIGHT + "1",
    ),
    "no weight decay of experts": (
        options(lambda g: {"weight_decay": 0.0} if g["is_expert_parallel"] else {}),
        EXPERTS,
        WEIGHT + r"1",
    ),
    "weight decay in gradients": (before_step(_add_decay), "", WEIGHT + "1"),
    "weight decay of one rank": (after_step(_decay_on_one_rank), "", WEIGHT + "1"),
    "no weight decay of Muon": (options(lambda g: {"weight_decay": 0.0}), MUON, WEIGHT + "1"),
    "no weight decay of Lion": (options(lambda g: {"weight_decay": 0.0}), LION, WEIGHT + "1"),
    "doubled eps": (options(lambda g: {"eps": 2 * g["eps"]}), "", WEIGHT + "1"),
    "default eps": (options(lambda g: {"eps": 1e-8}), "--adam-eps 1e-5", WEIGHT + "1"),
    "other beta1": (options(lambda g: {"betas": (0.89, g["betas"][1])}), "", WEIGHT + "2"),
    "other beta2": (options(lambda g: {"betas": (g["betas"][0], 0.998)}), "", WEIGHT + "[23]"),
    "swapped betas": (options(lambda g: {"betas": g["betas"][::-1]}), "", WEIGHT + "2"),
    "betas of Lion": (options(lambda g: {"betas": g["betas"][::-1]}), LION, WEIGHT + "2"),
    "learning rate 1 % larger": (options(lambda g: {"lr": 1.01 * g["lr"]}), "", WEIGHT + "1"),
    "one learning rate for all": (options(lambda g: {"lr": 1e-3}), DECOUPLED, WEIGHT + "1"),
    "steps counted twice": (
        state_before_step(_count_steps(lambda step: step + 1)),
        LAYERS,
        WEIGHT + "2",
    ),
    "steps not counted": (
        state_before_step(_count_steps(lambda step: step * 0)),
        LAYERS,
        WEIGHT + "2",
    ),
    "no momentum": (state_before_step(_multiply("exp_avg", 0.0)), "", WEIGHT + "2"),
    "second moment 1 % larger": (
        state_before_step(_multiply("exp_avg_sq", 1.01)),
        "",
        WEIGHT + "2",
    ),
    "no momentum of Muon": (
        state_before_step(_multiply("momentum_buffer", 0.0)),
        MUON,
        WEIGHT + "2",
    ),
    "one Newton-Schulz step fewer": (_fewer_newton_schulz_steps, MUON, WEIGHT + "1"),
    "no clipping": (clipping(_nothing), "", WEIGHT + "1"),
    "clipped to twice the norm": (
        clipping(lambda clip, params, most, total: clip(params, 2 * most, total)),
        "",
        WEIGHT + "1",
    ),
    "clipped by the norm of this rank": (clipping(_clip_by_own_norm), "", WEIGHT + "1"),
    "only matrices are clipped": (clipping(_clip_matrices), "", WEIGHT + "1"),
    "not clipped, and a large norm allowed": (
        clipping(_nothing),
        "--clip-grad 100",
        WEIGHT + "1",
    ),
    "last row of a shard": (after_step(_take_back_the_last_row), "", WEIGHT + "1"),
    "vectors are not stepped": (after_step(_take_back_vectors), "", WEIGHT + "1"),
    "stepped twice on one rank": (after_step(_double_on_one_rank), "", WEIGHT + "1"),
    "small gradients are lost": (before_step(_zero_small_gradients), "", WEIGHT + "1"),
    "learning rate of the next iteration": (
        schedule("get_lr", lambda s, g, lr: lr * 0.9 if s.num_steps else lr),
        "",
        OPTION + r"\(lr\) of iteration 2",
    ),
    "no warmup": (
        schedule("get_lr", lambda s, g, lr: 1e-3),
        WARMUP,
        OPTION + r"\(lr\) of iteration 1",
    ),
    "constant weight decay": (
        schedule("get_wd", lambda s, g, decay: 0.1),
        DECAYS,
        OPTION + r"\(weight_decay\) of iteration 1",
    ),
    "one parameter group": (groups(_merge_groups), "", OPTION + r"\(wd_mult\) of iteration 1"),
    "a parameter in no group": (
        groups(_leave_out_a_parameter),
        "",
        OPTION + r"\(parameter groups\) of iteration 1",
    ),
    "state lost by a load": (load(_forget), "", "resumed at the same size: weight of"),
    "steps counted from 0 after a load": (
        load(_restart_counts),
        LAYERS,
        "resumed at the same size: weight of",
    ),
    "schedule restarts after a load": (
        load(_restart_schedule),
        "",
        r"resumed at the same size: optimizer option of \S+ \(lr\)",
    ),
    "second moment of another row": (
        loaded_state(_rotate("exp_avg_sq")),
        "",
        "resumed at the same size: weight of",
    ),
    "state lost on one rank": (
        load(_forget, only_on_one_rank=True),
        SHARDED_TENSORS,
        ONE_RANK + r"loaded state of exp_avg\S* of",
    ),
    "momentum of another row on one rank": (
        loaded_state(_rotate("exp_avg"), only_on_one_rank=True),
        SHARDED_TENSORS,
        ONE_RANK + r"loaded state of exp_avg of",
    ),
    "steps counted from 0 on one rank": (
        load(_restart_counts, only_on_one_rank=True),
        f"{SHARDED_TENSORS} {LAYERS}",
        ONE_RANK + r"loaded state of step of",
    ),
    "schedule restarts on one rank": (
        load(_restart_schedule, only_on_one_rank=True),
        SHARDED_TENSORS,
        ONE_RANK + r"optimizer option of \S+ \(lr\) of iteration 3",
    ),
    "momentum of Muon on one rank": (
        loaded_state(_multiply("momentum_buffer", 0.5), only_on_one_rank=True),
        MUON,
        ONE_RANK + r"loaded state of momentum_buffer of",
    ),
}
"""By description: the fault, flags of the job, and what the verdict says."""


@dataclass(frozen=True)
class StepFault:
    """A fault that `prove` must find.

    Attributes:
        plant: Returns a context with the fault.
        flags: Flags of the job.
        said: Regular expression of the verdict.
    """

    plant: Fault
    flags: str
    said: str

    @property
    def is_in_every_step(self) -> bool:
        """Whether steps with equal gradients show the fault; otherwise, only a resume does."""
        return self.said.startswith("steps")


STEP_FAULTS = {name: StepFault(*of_name) for name, of_name in _FAULTS.items()}
