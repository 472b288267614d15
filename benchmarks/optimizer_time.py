"""Host time per parameter between two backwards, compared with FSDP2.

One process in a group whose collectives do nothing, with parameters of a few elements, measures the
work of Python and of dispatch, for which a GPU would wait.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks import common
from benchmarks.host_time import CONTENDERS

MODELS = {"unsharded": "unsharded", "FSDP2": "FSDP2", "ours": "ours, optim_grads_params"}
WAYS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
ATTRIBUTES = ("grad", "requires_grad", "dtype", "device", "shape", "is_leaf", "numel()")
READS = 500
"""Reads of an attribute per round."""


class _Weight(nn.Module):
    """A weight sharded in halves over both ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def _reader(attribute: str) -> Callable[[torch.Tensor], float]:
    """Return a function that reads an attribute many times and returns nanoseconds per read."""
    # Compile the function from source, so that the loop contains only the read.
    source = (
        "def read(param):\n    start = now()\n    for _ in range(READS):\n"
        f"        param.{attribute}\n    return (now() - start) / READS * 1e9\n"
    )
    made: dict[str, Any] = {"now": time.perf_counter, "READS": READS}
    exec(source, made)
    reader: Callable[[torch.Tensor], float] = made["read"]
    return reader


def _runs(params: list[nn.Parameter]) -> dict[str, Callable[[], Any]]:
    """Return the timed functions by name."""
    runs: dict[str, Callable[[], Any]] = {}
    for way, options in WAYS.items():
        optimizer = torch.optim.AdamW(params, lr=1e-3, **options)
        runs[f"AdamW, {way}"] = optimizer.step
        if way != "fused":
            runs[f"clip_grad_norm_, {way}"] = lambda options=options: nn.utils.clip_grad_norm_(
                params, 1.0, **options
            )
    return runs


def measure(num_params: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return minimum times by function and model, in ms; in ns for attributes."""
    runs: dict[str, dict[str, Callable[[], Any]]] = {}
    some: dict[str, nn.Parameter] = {}
    with common.fake_ranks() as mesh:
        for label, contender in MODELS.items():
            whole = nn.Sequential(*(_Weight() for _ in range(num_params)))
            model = CONTENDERS[contender](whole, mesh)
            model(torch.randn(4, 4)).square().mean().backward()
            params = list(model.parameters())
            some[label] = params[0]
            for what, run in _runs(params).items():
                runs.setdefault(what, {})[label] = run
        return _least(runs, some, rounds)


def _least(
    runs: dict[str, dict[str, Callable[[], Any]]], some: dict[str, nn.Parameter], rounds: int
) -> dict[str, dict[str, float]]:
    found = {what: dict.fromkeys(by_model, float("inf")) for what, by_model in runs.items()}
    readers = {f"param.{attribute}": _reader(attribute) for attribute in ATTRIBUTES}
    found.update({what: dict.fromkeys(some, float("inf")) for what in readers})
    for _ in range(rounds):
        for what, by_model in runs.items():
            for label, run in by_model.items():
                start = time.perf_counter()
                run()
                found[what][label] = min(found[what][label], (time.perf_counter() - start) * 1e3)
        for what, reader in readers.items():
            for label, param in some.items():
                found[what][label] = min(found[what][label], reader(param))
    return found


def main() -> None:
    """Measure and print a table, or JSON."""
    parser = common.options(
        "benchmarks.optimizer_time", __doc__, writes=False, params=300, rounds=20
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.params, args.rounds)
    if args.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    sys.stdout.write(f"{args.params} parameters: ms; of an attribute: ns\n{'':28}")
    sys.stdout.write("".join(f"{label:>12}" for label in MODELS) + "   of FSDP2's\n")
    for what, by_model in found.items():
        times = "".join(f"{by_model[label]:12.2f}" for label in MODELS)
        sys.stdout.write(f"{what:28}{times}{by_model['ours'] / by_model['FSDP2']:14.2f}\n")


if __name__ == "__main__":
    main()
