"""Sequences of events as programs of torch: shown to a reader, and run on sharded modules."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, override

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.memory.observer import CollectiveIssued, Event, PhaseBegan
from tests.machine.executors import Setup
from tests.machine.explore import shown
from tests.machine.world import World

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
Calls = list[tuple[Any, ...]]


class Scripted(nn.Module):
    """A module whose forward uses its weight and then calls other modules, as its caller says."""

    def __init__(self, below: dict[int, nn.Module]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.names = {number: f"unit_{number}" for number in below}
        for number, module in below.items():
            self.add_module(self.names[number], module)

    @override
    def forward(self, x: torch.Tensor, calls: Calls) -> torch.Tensor:
        """Call other modules.

        Args:
            x: The input.
            calls: Of each call, the number of the module, the calls that it makes itself, and how:
                `packed` or `reentrant` in a checkpoint, `detached` if no gradient reaches it.
        """
        x = x * self.weight
        for number, inside, *how in calls:
            module = getattr(self, self.names[number])
            if "packed" in how or "reentrant" in how:
                is_reentrant = "reentrant" in how
                y = checkpoint(module, x, inside, use_reentrant=is_reentrant)
            else:
                y = module(x, inside)
            x = x + (y - x).detach() if "detached" in how else y
        return x


def program_of(setup: Setup, path: Sequence[tuple[Any, ...]]) -> str:
    """Return a sequence of events as a program of torch, without its first lines.

    Args:
        setup: A world with one root, without options that torch's program has other means for:
            units called in any order, in checkpoints too, several forwards, gradients that miss
            calls, steps and evaluations between them.
        path: Actions, up to the end of a backward, evaluation or step.

    Raises:
        ValueError: The program would need another means.
    """
    if setup.parents.count(-1) > 1 or setup.tied or setup.several or setup.stays or setup.frozen:
        raise ValueError(f"{setup} has no program of torch here")
    lines = []
    for number in reversed(range(1, len(setup.parents))):
        below = [n for n, parent in enumerate(setup.parents) if parent == number]
        lines.append(f"unit_{number} = shard(Scripted({_table(below)}))")
    below = [number for number, parent in enumerate(setup.parents) if parent == 0]
    lines.append(f"root = shard(Scripted({_table(below)}))")
    lines.append("optimizer = torch.optim.SGD(root.parameters(), lr=0.1)")
    open_calls: list[Calls] = []
    forwards: list[tuple[int, Calls]] = []  # since the last backward: line, and calls
    for name, *arguments in path:
        if name == "forward":
            open_calls = [[]]
            forwards.append((len(lines), open_calls[0]))
            lines.append("")
        elif name == "call":
            inside: Calls = []
            how = [setup.checkpointed] if arguments[1] else []
            open_calls[-1].append((arguments[0], inside, *how))
            open_calls.append(inside)
        elif name == "return":
            open_calls.pop()
        elif name == "evaluate":
            lines.append(f"with torch.no_grad(): root(x, {_all_calls(setup, 0)})")
        elif name == "backward":
            outputs = [f"y_{index}" for index in range(len(forwards))]
            places = [(calls, place) for _, calls in forwards for place in range(len(calls))]
            for bit, (calls, place) in enumerate(reversed(places)):
                if arguments[0] >> bit & 1:
                    calls[place] = (*calls[place], "detached")
            for output, (line, calls) in zip(outputs, forwards, strict=True):
                lines[line] = f"{output} = root(x, {calls})"
            lines.append(f"({' + '.join(outputs)}).sum().backward()")
            lines.append(f"del {', '.join(outputs)}")
            forwards = []
        elif name == "step":
            lines += ["optimizer.step()", "optimizer.zero_grad()"]
        elif name != "engine":
            raise ValueError(f"{name} {arguments} has no program of torch here")
    for index, (line, calls) in enumerate(forwards):
        lines[line] = f"y_{index} = root(x, {calls})"
    return "\n".join(lines)


def described(setup: Setup, path: Sequence[tuple[Any, ...]]) -> str:
    """Return a sequence of actions in words and, if it has one, as a program of torch."""
    words = shown(list(path))
    try:
        return f"{words}\n{program_of(setup, path)}"
    except ValueError:
        return words


def _table(below: list[int]) -> str:
    return "{" + ", ".join(f"{number}: unit_{number}" for number in below) + "}"


def _all_calls(setup: Setup, number: int) -> Calls:
    below = [unit for unit, parent in enumerate(setup.parents) if parent == number]
    return [(unit, _all_calls(setup, unit)) for unit in below]


def commands_of(setup: Setup, program: str) -> list[tuple[str, int]]:
    """Run a program on sharded modules; return the gathers, frees and reductions of units.

    The caller is a rank of a pool.
    """
    commands: list[tuple[str, int]] = []
    strategy = STRATEGIES[setup.zero]

    def shard(module: nn.Module) -> nn.Module:
        fully_shard(module, sharding_strategy=strategy)
        return module

    def number_of(name: str) -> int:
        numbers = re.findall(r"unit_(\d+)", name)
        return int(numbers[-1]) if numbers else 0

    def receive(event: Event) -> None:
        if isinstance(event, PhaseBegan) and event.phase in ("unshard", "reshard"):
            kind = "gather" if event.phase == "unshard" else "free"
            commands.append((kind, number_of(event.owner)))
        elif isinstance(event, CollectiveIssued) and event.kind == "reduce_scatter":
            commands.append(("reduce", number_of(event.group)))

    names: dict[str, Any] = {"torch": torch, "Scripted": Scripted, "shard": shard}
    names["x"] = torch.ones(6)
    construction, marker, rest = program.partition("optimizer =")
    exec(construction, names)
    names["root"]._fsdp_unit.context.observer.subscribe(receive)
    exec(marker + rest, names)
    return commands


def random_path(setup: Setup, chance: random.Random) -> tuple[list[Any], list[tuple[str, int]]]:
    """Return a sequence of actions up to the end of a world, and its commands."""
    world, path = World(setup), []
    while actions := world.actions():
        action = chance.choice(
            [each for each in actions if each[0] != "evaluate" or not world.queue]
        )
        path.append(action)
        world.apply(action)
    return path, world.commands
