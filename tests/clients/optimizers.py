"""Every optimizer of some packages, on a sharded model and on the same model as it is."""

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
from typing import Any, override
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.clients.differences import whole
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
"""What is installed for each module."""
STEPS = 6

type Updates = dict[str, torch.Tensor]
WIDTH = 7


class Net(nn.Module):
    """Parameters of one to four dimensions, some of a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)
        self.conv = nn.Conv2d(1, 3, 2)
        self.blocks = nn.ModuleList([Block(WIDTH), Block(WIDTH)])
        self.out = nn.Linear(WIDTH, 1)

    @override
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        x = x + torch.tanh(self.conv(x.unsqueeze(1))).mean((1, 2, 3))[:, None, None]
        for block in self.blocks:
            x = block(x)
        return self.out(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Way:
    """How a class of optimizers is used.

    Attributes:
        build: Makes one of a model and parameters.
        chosen: Which parameters it is given; others are frozen.
        calls: Whether a step is given a closure that goes backward.
        steps: Whether there is a step, or all happens in hooks of the backward.
        creates_graph: Whether gradients have to be differentiable.
        patches: What is something else where it runs unsharded.
        ranks: On how many it is compared. A mean over three rounds otherwise than unsharded, which
            moves far what follows from eigenvectors or from signs of what is nearly zero.
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


def _around(cls: Any, model: nn.Module, params: list[nn.Parameter]) -> Any:
    return cls(torch.optim.AdamW(params))


def _of_model(cls: Any, model: nn.Module, params: list[nn.Parameter]) -> Any:
    return cls(model)


def _in_groups(cls: Any, model: nn.Module, params: list[nn.Parameter]) -> Any:
    groups = [
        {"params": [p for p in params if (p.ndim == 2) is use], "use_muon": use}
        for use in (True, False)
    ]
    return cls(groups)


def _is_matrix(param: nn.Parameter) -> bool:
    return param.ndim == 2


def _sam(**options: Any) -> Callable[..., Any]:
    return _with(base_optimizer=torch.optim.AdamW, **options)


_SENSITIVE = Way(ranks=(2,))
_WAYS: dict[str, Way] = {
    "torch.optim.Muon pytorch_optimizer.DeMo pytorch_optimizer.LoRARite": Way(chosen=_is_matrix),
    # Its solver in bf16 never comes as near as it wants to, and ends after so many iterations.
    "pytorch_optimizer.SpectralSphere": Way(_with(solver_max_iterations=4), chosen=_is_matrix),
    "torch.optim.LBFGS pytorch_optimizer.LBFGS schedulefree.AdamWScheduleFreeClosure "
    "schedulefree.RAdamScheduleFreeClosure schedulefree.SGDScheduleFreeClosure "
    "pytorch_optimizer.AliG": Way(calls=True),
    "pytorch_optimizer.AdaHessian pytorch_optimizer.SophiaH timm.optim.Adahessian": Way(
        creates_graph=True
    ),
    # It has another formula for DTensors, which rounds otherwise in bf16.
    "timm.optim.Muon": Way(patches={"timm.optim.muon.DTensor": torch.Tensor}),
    "timm.optim.SGDP": Way(_with(lr=1e-2)),
    "bitsandbytes.optim.LARS bitsandbytes.optim.LARS32bit bitsandbytes.optim.LARS8bit "
    "bitsandbytes.optim.SGD bitsandbytes.optim.SGD32bit bitsandbytes.optim.SGD8bit "
    "bitsandbytes.optim.PytorchLARS": Way(_with(lr=1e-2, momentum=0.9)),
    "pytorch_optimizer.AdaShift": Way(_with(keep_num=2)),
    "pytorch_optimizer.BSAM": Way(_with(num_data=8), calls=True),
    "pytorch_optimizer.Ranger21": Way(_with(num_iterations=STEPS)),
    "pytorch_optimizer.SAM pytorch_optimizer.FriendlySAM pytorch_optimizer.LookSAM": Way(
        _sam(), calls=True
    ),
    "pytorch_optimizer.WSAM": Way(
        lambda cls, model, params: cls(model, params, torch.optim.AdamW), calls=True
    ),
    # Its moments are in fp32; at its default rate of 1.0 their rounding grows a hundredfold.
    "pytorch_optimizer.AdamMini": Way(lambda cls, model, params: cls(model, lr=1e-3)),
    "pytorch_optimizer.SOAP": _SENSITIVE,
    "pytorch_optimizer.AdaLOMO pytorch_optimizer.LOMO": Way(
        _of_model, chosen=_is_matrix, steps=False
    ),
    "pytorch_optimizer.Lookahead pytorch_optimizer.OrthoGrad pytorch_optimizer.PCGrad "
    "pytorch_optimizer.SafeFP16Optimizer pytorch_optimizer.ScheduleFreeWrapper "
    "pytorch_optimizer.TRAC timm.optim.Lookahead": Way(_around),
    "pytorch_optimizer.AdaGO pytorch_optimizer.AdaMuon pytorch_optimizer.DistributedMuon "
    "pytorch_optimizer.Muon pytorch_optimizer.MuonClip": Way(_in_groups),
    "pytorch_optimizer.NorMuon": dataclasses.replace(_SENSITIVE, build=_in_groups),
}
WAYS = {name: way for names, way in _WAYS.items() for name in names.split()}
"""Where that is not simply `cls(params)` and `step()`."""
_IN_FP32 = ("bitsandbytes.",)


def classes(module: str) -> list[str]:
    """Names of the classes of optimizers that a module has."""
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
    """What came of a class of optimizers.

    Attributes:
        verdict: `right`, `wrong`, `rejected`, or `does not run` where it does not unsharded.
        text: What it said.
        difference: Of the update, relative.
        step: At which it raised.
    """

    verdict: str
    text: str = ""
    difference: float = 0.0
    step: int = 0

    @property
    def row(self) -> str:
        """What the page says of it."""
        if self.verdict == "right":
            return "right"
        why = self.text.partition("cannot step sharded parameters: ")[2] or self.text
        why = re.sub(r" at index \d+", "", why)
        why = re.split(r"[;,(\n]|\. ", why)[0].strip().replace("|", "")
        head = "rejected" if self.verdict == "rejected" else "does not run unsharded here"
        return f"{head}: {why}"


def tokens(step: int, rank: int) -> torch.Tensor:
    """Data of a rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 9, (4, 5), generator=generator)


class _Run:
    """A model, its optimizer, and the data of some ranks."""

    def __init__(self, qualified: str, dtype: torch.dtype, *, is_sharded: bool) -> None:
        module, _, name = qualified.rpartition(".")
        self.way = WAYS.get(qualified, Way())
        torch.manual_seed(1)
        self.model: Any = Net().to(dtype)
        for param in self.model.parameters():
            param.requires_grad_(self.way.chosen(param))
        self.is_sharded = is_sharded
        self.ranks = [dist.get_rank()] if is_sharded else list(range(dist.get_world_size()))
        if is_sharded:
            # Weights that are dropped after a backward cannot be differentiated twice.
            keeps = self.way.creates_graph
            strategy = "optim_grads" if keeps else "optim_grads_params"
            wrap(self.model, sharding_strategy=strategy)
        params = [param for param in self.model.parameters() if param.requires_grad]
        self.started = {name: whole(p) for name, p in self.model.named_parameters()}
        self.step_number = 0
        kind = getattr(importlib.import_module(module), name)
        self.optimizer = self.way.build(kind, self.model, params)
        self._switch("train")

    def _switch(self, mode: str) -> None:
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def loss(self) -> torch.Tensor:
        """Mean over the data of all ranks, with the gradient of this one's."""
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
            loss.backward(create_graph=self.way.creates_graph)
        return loss

    def step(self) -> None:
        torch.manual_seed(self.step_number)
        self.closure()
        if self.way.calls:
            self.optimizer.step(self.closure)
        elif self.way.steps:
            self.optimizer.step()
        self.step_number += 1

    def updates(self) -> Updates:
        """What was added to every parameter, as it is evaluated."""
        self._switch("eval")
        found = {name: whole(p) - self.started[name] for name, p in self.model.named_parameters()}
        self._switch("train")
        return found


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _unsharded(qualified: str) -> tuple[torch.dtype, Updates]:
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
    """Train with an optimizer, sharded over all ranks and not. Collective."""
    with _quiet():
        try:
            with ExitStack() as patched:
                for name, value in WAYS.get(qualified, Way()).patches.items():
                    patched.enter_context(mock.patch(name, value))
                dtype, wanted = _unsharded(qualified)
        except Exception as error:
            return Outcome("does not run", _said(error))
        run = None
        try:
            run = _Run(qualified, dtype, is_sharded=True)
            for _ in range(STEPS):
                run.step()
            found = run.updates()
        except Exception as error:
            return Outcome("rejected", _said(error), step=run.step_number if run else -1)
        at_most = 1e-6 if dtype == torch.float64 else 1e-3
    difference = _difference(found, wanted)
    verdict = "right" if difference <= at_most else "wrong"
    return Outcome(verdict, str(dtype)[6:], difference)


def _difference(found: Updates, wanted: Updates) -> float:
    # A parameter that hardly moves is measured against the others.
    norms = {name: float(update.double().norm()) for name, update in wanted.items()}
    floor = 0.01 * max(norms.values())
    return max(
        float((found[name] - update).double().norm()) / max(norms[name], floor)
        for name, update in wanted.items()
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
