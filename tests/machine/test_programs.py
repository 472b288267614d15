"""The world executes the commands that sharded modules execute in the same program of torch."""

from __future__ import annotations

import random
from typing import Any

from tests.distributed.on_ranks import on_ranks
from tests.machine.executors import Setup
from tests.machine.programs import commands_of, program_of, random_path

KINDS: dict[str, dict[str, Any]] = {
    "units called again": {"max_calls": 2},
    "unit inside a unit": {"parents": (-1, 0, 1), "evaluates": True},
    "gradients that miss units": {"skips": True, "max_calls": 2},
    "non-reentrant checkpoints": {"checkpointed": "packed"},
    "reentrant checkpoints": {"checkpointed": "reentrant"},
    "two forwards before a backward": {"max_forwards": 2, "max_steps": 1},
}


@on_ranks(2, kind=KINDS, zero=[3, 2])
def test_sharded_modules_execute_the_commands_of_the_world(kind: str, zero: int) -> None:
    setup = Setup(zero=zero, **KINDS[kind])
    chance = random.Random(0)
    differ = []
    for _ in range(10):
        path, expected = random_path(setup, chance)
        program = program_of(setup, path)
        commands = commands_of(setup, program)
        if commands != expected:
            differ.append(f"{program}\n{commands}\n{expected}")
    assert not differ, differ[0]


def test_program_of_torch_is_shown() -> None:
    path: list[tuple[Any, ...]] = [
        *(("forward", 0), ("call", 1, False), ("call", 2, False), ("return",), ("return",)),
        *(("return",), ("backward", 0), ("engine",), ("step",)),
    ]
    assert program_of(Setup(parents=(-1, 0, 1)), path).splitlines() == [
        "unit_2 = shard(Scripted({}))",
        "unit_1 = shard(Scripted({2: unit_2}))",
        "root = shard(Scripted({1: unit_1}))",
        "optimizer = torch.optim.SGD(root.parameters(), lr=0.1)",
        "y_0 = root(x, [(1, [(2, [])])])",
        "(y_0).sum().backward()",
        "del y_0",
        "optimizer.step()",
        "optimizer.zero_grad()",
    ]
