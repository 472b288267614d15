"""Replica groups under torchft: after every fault, losses equal those of unsharded training."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2_for.torchft import restart, start_step
from tests.cases import longer
from tests.clients.conftest import Record
from tests.clients.differences import full_copy
from tests.clients.replica_groups import (
    HANG,
    HEALING,
    LOST_TRANSFER,
    STAGES,
    Case,
    Fault,
    compare,
    lighthouse,
    run,
)
from tests.clients.soak import AT_MOST, Soaked, soak
from tests.distributed.wrapping import mesh_of, wrap
from tests.processes import ROOT
from tests.ranks import RankPools
from tests.reference.models import Stack

COMPARED = "losses and norms of every step"


def check(case: Case, faults: list[Fault], folder: Path, record: Record, at_most: float) -> None:
    """Train through faults, and compare with the reference."""
    result = compare(case, run(case, faults, folder, timeout_s=120 + 20 * len(faults)))
    # A fault costs the step in which it happens, or none. A group that did not receive a peer's
    # state, or was killed then, costs the others one more.
    assert result.num_aborted <= case.groups * len(faults)
    assert result.num_healed >= len({fault.group for fault in faults if not fault.raises})
    assert result.num_compared > (10 if case.restarts else 20) * len(faults)
    record("torchft", f"{COMPARED}, {len(faults)} faults", result.error, at_most)


def alternating(groups: int, stages: tuple[str, ...]) -> list[Fault]:
    """A fault at each stage: of both ranks of all groups, which come back soon, or later."""
    return [
        Fault((index + 1) % groups, index // groups % 2, stage, away_s=2.0 * (index % 3 > 0))
        for index, stage in enumerate(stages)
    ]


def raised(*stages: str) -> list[Fault]:
    """An exception at each stage, on alternating ranks and groups."""
    return [
        Fault(index // 2 % 2, index % 2, stage, raises=True) for index, stage in enumerate(stages)
    ]


# Stages after which a group keeps its values, and after which it has none.
KEEPS = ("backward", "after an all-reduce", "before should_commit")
TORN = ("after should_commit", "in the optimizer step", LOST_TRANSFER)


def test_group_killed_in_a_backward_comes_back(tmp_path: Path, record: Record) -> None:
    check(Case(), [Fault(1, 0, "backward")], tmp_path, record, 1e-12)


@pytest.mark.parametrize(
    ("case", "faults", "at_most"),
    [
        longer(Case(), alternating(2, STAGES), 1e-12, id="ZeRO-3, 2 groups"),
        longer(Case("optim", 3), alternating(3, STAGES), 1e-12, id="ZeRO-1, 3 groups"),
        longer(
            Case("no_shard"),
            [
                Fault(1, 0, "backward", away_s=0.0),
                Fault(1, 1, HEALING),
                Fault(0, 1, "forward", away_s=0.0),
                Fault(0, 0, HEALING),
                Fault(1, 1, HANG),
                Fault(1, 0, HANG),
            ],
            1e-12,
            id="ZeRO-0, killed while healing, and hanging",
        ),
        longer(
            Case(),
            [Fault(1, 0, "backward", away_s=0.0), Fault(1, 1, LOST_TRANSFER)],
            1e-12,
            id="ZeRO-3, a rank without a peer's state",
        ),
        longer(
            Case("optim_grads", optimizer="muon"),
            alternating(2, ("in an all-reduce", "backward", "in the optimizer step")),
            1e-12,
            id="ZeRO-2, Muon",
        ),
        longer(
            Case("optim_grads", 3, dtype=torch.bfloat16, total=None),
            alternating(3, ("in an all-reduce", "forward", "after should_commit")),
            # The reference is in fp32: only digests of groups show equal numbers.
            0.05,
            id="ZeRO-2, bf16, 2 micro-batches per group",
        ),
        longer(
            Case("optim", optimizer="sgd", dtype=torch.float32, total=None),
            alternating(2, ("after an all-reduce", "before should_commit")),
            1e-6,
            id="ZeRO-1, fp32, 2 micro-batches per group",
        ),
        longer(
            Case(is_async=True),
            alternating(2, ("backward", "in the optimizer step", "in an all-reduce")),
            1e-12,
            id="ZeRO-3, asynchronous quorum",
        ),
        longer(
            Case("no_shard", 3, total=None, is_async=True),
            alternating(3, ("before an all-reduce", "forward", "after should_commit")),
            1e-12,
            id="ZeRO-0, 3 groups, asynchronous quorum",
        ),
        pytest.param(Case(restarts=True), raised("forward"), 1e-12, id="ZeRO-3, an exception"),
        longer(Case(restarts=True), raised(*KEEPS, *TORN[:2]), 1e-12, id="ZeRO-3, exceptions"),
        longer(
            Case("optim", optimizer="muon", restarts=True),
            raised(*TORN[1:], "forward", "in an all-reduce"),
            1e-12,
            id="ZeRO-1, Muon, exceptions",
        ),
        longer(
            Case("no_shard", 3, dtype=torch.float32, restarts=True),
            [*raised("before an all-reduce"), *alternating(3, KEEPS[:1]), *raised(*KEEPS[1:])],
            1e-6,
            id="ZeRO-0, 3 groups, exceptions and kills",
        ),
    ],
)
def test_losses_equal_the_reference_through_faults(
    case: Case, faults: list[Fault], at_most: float, tmp_path: Path, record: Record
) -> None:
    check(case, faults, tmp_path, record, at_most)


class Stubborn:
    """A manager whose steps fail before anything is communicated."""

    def __init__(self, *, is_async: bool = False) -> None:
        self._use_async_quorum, self._commit_failures = is_async, 0

    def current_step(self) -> int:
        return 0

    def start_quorum(self) -> None:
        pass


class WithoutQuorum(Stubborn):
    def start_quorum(self) -> None:
        raise TimeoutError("no quorum")


def errors_of_restarts() -> list[str]:
    """Return the errors of restarts that are impossible."""
    mesh, error = mesh_of(2), RuntimeError("the step failed")
    model = wrap(Stack(), mesh=mesh)
    found = []
    alone = mesh_of(2, 1)["inner"]
    for manager in (Stubborn(), Stubborn(is_async=True), WithoutQuorum()):
        if not found:
            with pytest.raises(ValueError, match="call start_step") as info:
                restart(manager, mesh, model, error=error)
            found.append(str(info.value))
        with contextlib.suppress(TimeoutError):
            start_step(manager, mesh)
        with pytest.raises(Exception) as info:
            restart(manager, mesh, model, error=error, max_in_a_row=0)
        found.append(str(info.value))
    with pytest.raises(ValueError, match="ranks") as info:
        restart(manager, alone, model, error=error)
    return [*found, str(info.value)]


def test_impossible_restarts_raise(clients: RankPools) -> None:
    found, other = clients(2).run(errors_of_restarts)
    assert found == other
    assert found == [
        "call start_step before each step; restart continues after it",
        "the step failed",
        "restart needs a Manager with use_async_quorum=False",
        "the step failed",
        "restart makes the default process group again, of 2 ranks, and the mesh has 1",
    ]


def test_comparison_finds_a_loss_of_another_step(tmp_path: Path) -> None:
    """The comparison itself, without processes: it must not accept anything."""
    line = {"step": 0, "groups": 1, "takes_part": True, "is_committed": True, "group": 0, "rank": 0}
    line |= {"start": 0, "losses": {}, "norm": math.inf, "digest": 1}
    assert compare(Case(), [line]).error == math.inf
    with pytest.raises(AssertionError, match="state after"):
        compare(Case(), [line, line | {"group": 1, "digest": 2}])
    with pytest.raises(AssertionError, match="a step is missing"):
        compare(Case(), [line | {"step": 1}])


def test_kills_at_random_times_change_no_number(tmp_path: Path, record: Record) -> None:
    """`make soak` is the long version, which also checks that memory does not grow."""
    soaked = soak(tmp_path, steps=60, kills=2, kill_every_s=5.0)
    result = soaked.compared()
    assert result.num_steps >= 60
    assert (soaked.num_kills >= 2, soaked.num_ended) == (True, 0)
    assert result.num_healed > 0
    record("torchft", f"{COMPARED}, {soaked.num_kills} kills", result.error, AT_MOST)


@pytest.mark.parametrize(
    ("per_step", "files_per_step", "error"),
    [
        (0, 0.0, ""),
        (500, 0.0, ""),
        (4096, 0.0, "memory grows: group 0, rank 0, start 1: 2000 steps, 102"),
        (0, 0.01, "open files grow"),
    ],
)
def test_a_process_that_grows_is_found(per_step: int, files_per_step: float, error: str) -> None:
    place = {"group": 0, "rank": 0, "start": 1}
    lines = [
        place
        | {"groups": 2 if n == 99 else 3, "files": int(n * files_per_step)}
        | {"resident": 100 * 2**20 + n * per_step + n % 7}
        for n in range(2100)
    ]
    (survivor,) = Soaked(lines, 0, 0, 0.0).survivors()
    expectation = pytest.raises(AssertionError, match=error) if error else contextlib.nullcontext()
    with expectation:
        survivor.check()
    assert not Soaked(lines[:1000], 0, 0, 0.0).survivors()


def train_with(code: str) -> float:
    """Run code of the page in a group of its own; return the error of the trained parameters."""
    import torchft

    model = nn.Module()
    model.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.forward = model.layers.forward
    plain = copy.deepcopy(model.layers)

    def loss_of(module: nn.Module, step: int, micro_batch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2 * step + micro_batch)
        return module(torch.randn(3, 4, generator=generator)).square().mean()

    given: dict[str, Any] = {"model": model, "mesh": mesh_of(1), "fully_shard": fully_shard}
    given |= {"group": 0, "num_steps": 3, "MICRO_BATCHES": 2, "loss_of": loss_of}
    given |= {"torch": torch, "timedelta": timedelta, "contextlib": contextlib}
    gloo = mock.patch.object(torchft, "ProcessGroupNCCL", torchft.ProcessGroupGloo)
    with lighthouse() as address, gloo:
        with mock.patch.dict(os.environ, TORCHFT_LIGHTHOUSE=address):
            exec(code, given)
        given["manager"].shutdown()
    optimizer = torch.optim.AdamW(plain.parameters())
    for step in range(3):
        for micro_batch in range(2):
            (loss_of(plain, step, micro_batch) / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((full_copy(ours) - theirs).abs().max()) for ours, theirs in pairs)


def test_code_of_the_page_trains(clients: RankPools) -> None:
    page = (ROOT / "docs" / "fault_tolerance.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    (error,) = clients(1).run(train_with, code)
    assert error < 1e-6


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def _workers(launcher: subprocess.Popen[bytes]) -> list[int]:
    found = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(pid) for pid in found]


@pytest.mark.functional
def test_example_goes_on_after_a_kill(tmp_path: Path) -> None:
    # torchrun and torchft's transport of states use the name of this machine.
    (tmp_path / "sitecustomize.py").write_text(
        "import socket\nsocket.gethostname = socket.getfqdn = lambda *_: '127.0.0.1'\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "adapters")])
    environment = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--max-restarts", "9"]
    torchrun += ["--local-addr", "127.0.0.1", "--monitor-interval", "0.5"]
    with lighthouse() as address, contextlib.ExitStack() as stack:
        environment["TORCHFT_LIGHTHOUSE"] = address
        logs = [tmp_path / f"group{group}.log" for group in range(2)]
        launchers = []
        for group, log in enumerate(logs):
            command = [*torchrun, "examples/fault_tolerant.py", "--group", str(group)]
            command += ["--steps", "100000"]
            file = stack.enter_context(log.open("wb"))
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
            launchers.append(stack.enter_context(process))
            # torchrun ends its workers.
            stack.callback(process.terminate)

        def steps(group: int) -> list[tuple[int, int]]:
            """Steps of a group, each with its number of groups."""
            found = re.findall(r"step (\d+) of (\d)", logs[group].read_text())
            return [(int(step), int(groups)) for step, groups in found]

        _wait_for(lambda: any(groups == 2 for _, groups in steps(1)), "no step of both groups")
        killed_in = steps(1)[-1][0]
        os.kill(_workers(launchers[1])[0], signal.SIGKILL)

        def is_back() -> bool:
            return sum(step > killed_in + 1 and groups == 2 for step, groups in steps(1)) >= 3

        try:
            _wait_for(is_back, "group 1 is not back")
        except AssertionError:
            raise AssertionError("\n".join(log.read_text()[-4000:] for log in logs)) from None
        # The group that is left commits every step once.
        first, *later = [step for step, _ in steps(0)]
        assert later == [*range(first + 1, first + 1 + len(later))]
