"""Runs every optimizer class of several packages on a sharded and on an unsharded model."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.clients.differences import full_copy
from tests.distributed.wrapping import wrap
from tests.reference.models import Block

PACKAGES = {
    "torch.optim": "torch",
    "pytorch_optimizer": "pytorch-optimizer",
    "timm.optim": "timm",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "bitsandbytes.optim": "bitsandbytes",
}
"""Distribution packages by module."""
STEPS = 6

type Updates = dict[str, torch.Tensor]
WIDTH = 7


class Net(nn.Module):
    """A model with parameters of one to four dimensions, some of which have a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)
        self.conv = nn.Conv2d(1, 3, 2)
        self.blocks = nn.ModuleList([Block(WIDTH), Block(WIDTH)])
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        x = x + torch.tanh(self.conv(x.unsqueeze(1))).mean((1, 2, 3))[:, None, None]
        for block in self.blocks:
            x = block(x)
        return self.out(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Usage:
    """How an optimizer class is used.

    Attributes:
        build: Builds an optimizer from the class, a model and its trainable parameters.
        chosen: Whether a parameter is trained; all others are frozen.
        calls: Whether `step()` takes a closure that runs the backward.
        steps: Whether the optimizer has a `step()`; otherwise hooks of the backward update weights.
        creates_graph: Whether gradients must be differentiable.
        patches: Replacements of names in the unsharded run.
        ranks: World sizes to compare. The mean over 3 ranks rounds differently from the unsharded
            mean. Updates from eigenvectors, or from signs of values near zero, amplify this.
    """

    build: Callable[[Any, nn.Module, list[nn.Parameter]], Any] = lambda cls, model, params: cls(
        params
    )
    chosen: Callable[[nn.Parameter], bool] = lambda param: True
    calls: bool = False
    steps: bool = True
    creates_graph: bool = False
    patches: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = (2, 3)


def _with(**options: Any) -> Callable[..., Any]:
    return lambda cls, model, params: cls(params, **options)


def _wrapping_adamw(cls: Any, model: nn.Module, params: list[nn.Parameter]) -> Any:
    return cls(torch.optim.AdamW(params))


def _from_model(cls: Any, model: nn.Module, params: list[nn.Parameter]) -> Any:
    return cls(model)


def _with_muon_groups(cls: Any, model: nn.Module, params: list[nn.Parameter]) -> Any:
    groups = [
        {"params": [p for p in params if (p.ndim == 2) is use], "use_muon": use}
        for use in (True, False)
    ]
    return cls(groups)


def _is_matrix(param: nn.Parameter) -> bool:
    return param.ndim == 2


_ON_TWO_RANKS = Usage(ranks=(2,))
_USAGES: dict[str, Usage] = {
    "torch.optim.Muon pytorch_optimizer.DeMo pytorch_optimizer.LoRARite": Usage(chosen=_is_matrix),
    # Its solver does not converge in bf16 and always runs the maximum number of iterations.
    "pytorch_optimizer.SpectralSphere": Usage(_with(solver_max_iterations=4), chosen=_is_matrix),
    "torch.optim.LBFGS pytorch_optimizer.LBFGS schedulefree.AdamWScheduleFreeClosure "
    "schedulefree.RAdamScheduleFreeClosure schedulefree.SGDScheduleFreeClosure "
    "pytorch_optimizer.AliG": Usage(calls=True),
    "pytorch_optimizer.AdaHessian pytorch_optimizer.SophiaH timm.optim.Adahessian": Usage(
        creates_graph=True
    ),
    # It uses another formula for DTensors, which rounds differently in bf16.
    "timm.optim.Muon": Usage(patches={"timm.optim.muon.DTensor": torch.Tensor}),
    "timm.optim.SGDP": Usage(_with(lr=1e-2)),
    "bitsandbytes.optim.LARS bitsandbytes.optim.LARS32bit bitsandbytes.optim.LARS8bit "
    "bitsandbytes.optim.SGD bitsandbytes.optim.SGD32bit bitsandbytes.optim.SGD8bit "
    "bitsandbytes.optim.PytorchLARS": Usage(_with(lr=1e-2, momentum=0.9)),
    "pytorch_optimizer.AdaShift": Usage(_with(keep_num=2)),
    "pytorch_optimizer.BSAM": Usage(_with(num_data=8), calls=True),
    "pytorch_optimizer.Ranger21": Usage(_with(num_iterations=STEPS)),
    "pytorch_optimizer.SAM pytorch_optimizer.FriendlySAM pytorch_optimizer.LookSAM": Usage(
        _with(base_optimizer=torch.optim.AdamW), calls=True
    ),
    "pytorch_optimizer.WSAM": Usage(
        lambda cls, model, params: cls(model, params, torch.optim.AdamW), calls=True
    ),
    # Its moments are in fp32; the default learning rate of 1.0 amplifies rounding a hundredfold.
    "pytorch_optimizer.AdamMini": Usage(lambda cls, model, params: cls(model, lr=1e-3)),
    "pytorch_optimizer.SOAP": _ON_TWO_RANKS,
    "pytorch_optimizer.AdaLOMO pytorch_optimizer.LOMO": Usage(
        _from_model, chosen=_is_matrix, steps=False
    ),
    "pytorch_optimizer.Lookahead pytorch_optimizer.OrthoGrad pytorch_optimizer.PCGrad "
    "pytorch_optimizer.SafeFP16Optimizer pytorch_optimizer.ScheduleFreeWrapper "
    "pytorch_optimizer.TRAC timm.optim.Lookahead": Usage(_wrapping_adamw),
    "pytorch_optimizer.AdaGO pytorch_optimizer.AdaMuon pytorch_optimizer.DistributedMuon "
    "pytorch_optimizer.Muon pytorch_optimizer.MuonClip": Usage(_with_muon_groups),
    "pytorch_optimizer.NorMuon": dataclasses.replace(_ON_TWO_RANKS, build=_with_muon_groups),
}
USAGES = {name: way for names, way in _USAGES.items() for name in names.split()}
"""Usages of the classes that need more than `cls(params)` and `step()`."""
_IN_FP32 = ("bitsandbytes.",)


def classes(module: str) -> list[str]:
    """Return the names of the optimizer classes of a module."""
    found = importlib.import_module(module)
    return [
        name
        for name in sorted(dir(found))
        if inspect.isclass(kind := getattr(found, name))
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    ]


@dataclass(frozen=True)
class Outcome:
    """The result of a comparison of an optimizer class.

    Attributes:
        verdict: `right`, `wrong`, `rejected`, or `does not run` if the unsharded run fails.
        text: The error message, or the dtype of the run.
        difference: Largest relative difference of an update.
        step: The step that raised an error; -1 if the construction raised it.
    """

    verdict: str
    text: str = ""
    difference: float = 0.0
    step: int = 0

    @property
    def row(self) -> str:
        """The text of this result in the table of the page."""
        if self.verdict == "right":
            return "right"
        why = self.text.partition("cannot step sharded parameters: ")[2] or self.text
        why = re.sub(r" at index \d+", "", why)
        why = re.split(r"[;,(\n]|\. ", why)[0].strip().replace("|", "")
        head = "rejected" if self.verdict == "rejected" else "does not run unsharded here"
        return f"{head}: {why}"


def tokens(step: int, rank: int) -> torch.Tensor:
    """Return the batch of a rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 9, (4, 5), generator=generator)


class _Run:
    """A model, its optimizer, and the data of some ranks."""

    def __init__(self, qualified: str, dtype: torch.dtype, *, is_sharded: bool) -> None:
        module, _, name = qualified.rpartition(".")
        self.usage = USAGES.get(qualified, Usage())
        torch.manual_seed(1)
        self.model: Any = Net().to(dtype)
        for param in self.model.parameters():
            param.requires_grad_(self.usage.chosen(param))
        self.is_sharded = is_sharded
        self.ranks = [dist.get_rank()] if is_sharded else list(range(dist.get_world_size()))
        if is_sharded:
            # A second differentiation needs the weights, which ZeRO-3 frees after a backward.
            keeps = self.usage.creates_graph
            strategy = "optim_grads" if keeps else "optim_grads_params"
            wrap(self.model, sharding_strategy=strategy)
        params = [param for param in self.model.parameters() if param.requires_grad]
        self.started = {name: full_copy(p) for name, p in self.model.named_parameters()}
        self.step_number = 0
        kind = getattr(importlib.import_module(module), name)
        self.optimizer = self.usage.build(kind, self.model, params)
        self._switch("train")

    def _switch(self, mode: str) -> None:
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def loss(self) -> torch.Tensor:
        """Return the mean loss over all ranks; its gradient is that of `self.ranks` only."""
        losses = [self.model(tokens(self.step_number, rank)).square().mean() for rank in self.ranks]
        loss = torch.stack(losses).mean()
        if self.is_sharded:
            total = loss.detach().clone()
            dist.all_reduce(total)
            loss = loss + (total / dist.get_world_size() - loss.detach())
        return loss

    def closure(self) -> torch.Tensor:
        with torch.enable_grad():
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward(create_graph=self.usage.creates_graph)
        return loss

    def step(self) -> None:
        torch.manual_seed(self.step_number)
        self.closure()
        if self.usage.calls:
            self.optimizer.step(self.closure)
        elif self.usage.steps:
            self.optimizer.step()
        self.step_number += 1

    def updates(self) -> Updates:
        """Return the change of every parameter since the start, in the optimizer's eval mode."""
        self._switch("eval")
        found = {
            name: full_copy(p) - self.started[name] for name, p in self.model.named_parameters()
        }
        self._switch("train")
        return found


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _train_unsharded(qualified: str) -> tuple[torch.dtype, Updates]:
    errors = []
    dtypes = [torch.float64, torch.float32]
    for dtype in dtypes[1:] if qualified.startswith(_IN_FP32) else dtypes:
        try:
            run = _Run(qualified, dtype, is_sharded=False)
            for _ in range(STEPS):
                run.step()
            updates = run.updates()
            if not all(update.isfinite().all() for update in updates.values()):
                raise ArithmeticError("its weights are not finite")
            if not any(update.any() for update in updates.values()):
                raise ArithmeticError(f"it changes no weight in {STEPS} steps")
            return dtype, updates
        except Exception as error:
            errors.append(error)
    raise errors[-1]


def outcome(qualified: str) -> Outcome:
    """Train with an optimizer, sharded over all ranks and unsharded. Collective."""
    with _quiet():
        try:
            with ExitStack() as patched:
                for name, value in USAGES.get(qualified, Usage()).patches.items():
                    patched.enter_context(mock.patch(name, value))
                dtype, wanted = _train_unsharded(qualified)
        except Exception as error:
            return Outcome("does not run", _message(error))
        run = None
        try:
            run = _Run(qualified, dtype, is_sharded=True)
            for _ in range(STEPS):
                run.step()
            found = run.updates()
        except Exception as error:
            return Outcome("rejected", _message(error), step=run.step_number if run else -1)
        at_most = 1e-6 if dtype == torch.float64 else 1e-3
    difference = _difference(found, wanted)
    verdict = "right" if difference <= at_most else "wrong"
    return Outcome(verdict, str(dtype)[6:], difference)


def _difference(found: Updates, wanted: Updates) -> float:
    # A floor for parameters whose updates are small in comparison with those of others.
    norms = {name: float(update.double().norm()) for name, update in wanted.items()}
    floor = 0.01 * max(norms.values())
    return max(
        float((found[name] - update).double().norm()) / max(norms[name], floor)
        for name, update in wanted.items()
    )


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
