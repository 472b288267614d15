"""Replica groups of torchft that train a small sharded model, are killed, and come back."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2.dtensor.sharded_rows import rows_of
from megatron_fsdp_v2.optim import Muon
from megatron_fsdp_v2_for import torchft as fault_tolerance
from tests.distributed.wrapping import wrap
from tests.processes import num_open_files, resident_nbytes
from tests.ranks import forked_from, free_port
from tests.reference.models import INPUT, OUTPUT, Stack

RANKS = 2
"""Ranks of a replica group."""
MAX_NORM = 0.5
PRELOADED = ("tests.clients.replica_groups", "torchft")

HEARTBEAT = timedelta(seconds=1)
COLLECTIVE = timedelta(seconds=3)
JOIN = timedelta(seconds=6)
MANAGER = timedelta(seconds=8)
MESH = timedelta(seconds=12)
QUORUM = timedelta(seconds=40)

STAGES = (
    "forward",
    "backward",
    "before an all-reduce",
    "in an all-reduce",
    "after an all-reduce",
    "before should_commit",
    "after should_commit",
    "in the optimizer step",
)
"""Where a rank is killed; the second of a step's all-reduces."""
HEALING = "while it loads a peer's state"
LOST_TRANSFER = "one rank does not receive a peer's state"
HANG = "hangs in the forward"


@dataclass(frozen=True)
class Fault:
    """A fault of one rank.

    Attributes:
        group: Its replica group.
        rank: Its rank in the group. Rank 0 has the group's store and manager server.
        stage: Where it happens.
        away_s: Seconds until the group is started again.
        raises: Whether it is an exception, after which the group restarts in its processes.
    """

    group: int
    rank: int
    stage: str
    away_s: float = 2.0
    raises: bool = False


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        strategy: Sharding strategy in a replica group.
        groups: Number of replica groups.
        optimizer: `sgd`, `adamw` or `muon`.
        dtype: Dtype of parameters; bf16 keeps main weights and gradients in fp32.
        total: Micro-batches of a step, divided between the groups that take part; None for two
            micro-batches per group.
        is_async: Whether quorums are asynchronous, so that a group that comes back takes part in
            the all-reduces of the step in which it heals with zeros.
        restarts: Whether groups restart in their processes after an exception.
    """

    strategy: str = "optim_grads_params"
    groups: int = 2
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.float64
    total: int | None = 4
    is_async: bool = False
    restarts: bool = False

    def micro_batches(self, rank: int, groups: int) -> range:
        """The micro-batches of a participant of a step."""
        return (
            range(2 * rank, 2 * rank + 2) if self.total is None else range(rank, self.total, groups)
        )

    def weight(self, groups: int) -> float:
        """The factor of a micro-batch's loss, of which gradients are averaged over groups."""
        return 0.5 if self.total is None else groups / self.total

    def model(self) -> Any:
        """Build the model, identical in every process."""
        torch.manual_seed(1)
        return Stack().to(torch.float32 if self.dtype is torch.bfloat16 else self.dtype)

    def build_optimizer(self, model: Any) -> torch.optim.Optimizer:
        """Build the optimizer of a sharded or of a plain model."""
        params = list(model.parameters())
        if self.optimizer == "sgd":
            return torch.optim.SGD(params, lr=0.05, momentum=0.9)
        if self.optimizer == "adamw":
            return torch.optim.AdamW(params, lr=1e-3)
        matrices = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]
        known = {id(p) for p in matrices}
        others = [p for p in params if id(p) not in known]
        return Muon(
            [{"params": matrices}, {"params": others, "use_muon": False, "lr": 1e-3}],
            lr=0.01,
            ns_dtype=torch.float32,
        )


def loss_of(model: Any, step: int, micro_batch: int, rank: int, dtype: torch.dtype) -> Any:
    """Compute the loss of a rank's part of a micro-batch."""
    generator = torch.Generator().manual_seed((step * 100 + micro_batch) * RANKS + rank)
    x = torch.randn(3, INPUT, generator=generator, dtype=torch.float64)
    target = torch.sin(x.sum(1, keepdim=True)).expand(-1, OUTPUT)
    return (model(x.to(dtype)).double() - target).square().mean()


# -- a rank ----------------------------------------------------------------------------------------


class _Fatal:
    """Kills this process at a stage, once that is asked for."""

    def __init__(self, folder: Path, faults: Mapping[int, Fault]) -> None:
        self._folder, self._faults = folder, faults
        self._num_fired = self._num_calm = 0
        self._fault: Fault | None = None

    def arm(self, *, calm_steps: int = 2) -> None:
        """Arm the fault if the one before it has happened, and all groups train again since then.

        Nobody has the state if a fault hits the last group that is up to date.
        """
        num_fired = int((self._folder / "fired").read_text())
        if num_fired != self._num_fired:
            self._num_fired, self._num_calm = num_fired, 0
        is_calm = self._num_calm >= calm_steps
        self._fault = self._faults.get(num_fired) if is_calm else None

    def note_step(self, *, is_calm: bool) -> None:
        """Count the last steps that all groups committed together."""
        self._num_calm = self._num_calm + 1 if is_calm else 0

    def at(self, *stages: str) -> None:
        """Kill this process, stop it, or raise, if a fault of these stages happens now."""
        if self._fault is None or self._fault.stage not in stages:
            return
        if self._fault.raises:
            (self._folder / "raised").write_text(str(self._num_fired + 1))
        elif self._fault.stage != LOST_TRANSFER:
            os.kill(os.getpid(), signal.SIGSTOP if self._fault.stage == HANG else signal.SIGKILL)
        self._fault = None
        raise RuntimeError("an error of the test")


def _managed(fatal: _Fatal, case: Case, **options: Any) -> Any:
    """Build a manager whose process is killed around an all-reduce."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.checkpointing import HTTPTransport

    class Transport(HTTPTransport[Any]):
        def recv_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            fatal.arm(calm_steps=0)
            fatal.at(LOST_TRANSFER)
            return super().recv_checkpoint(*args, **kwargs)

    class Watched(Manager):
        num_calls = 0

        def allreduce(self, tensor: torch.Tensor, **kwargs: Any) -> Any:
            self.num_calls += 1
            if self.num_calls != 2:
                return super().allreduce(tensor, **kwargs)
            fatal.at("before an all-reduce")
            work = super().allreduce(tensor, **kwargs)
            fatal.at("in an all-reduce")
            work.wait()
            fatal.at("after an all-reduce")
            return work

    return Watched(
        pg=ProcessGroupGloo(timeout=COLLECTIVE),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        timeout=MANAGER,
        quorum_timeout=QUORUM,
        connect_timeout=MANAGER,
        use_async_quorum=case.is_async,
        # Models are equal from the start.
        init_sync=False,
        hostname="127.0.0.1",
        checkpoint_transport=Transport(timeout=MANAGER, num_chunks=0),
        **options,
    )


def replica(
    case: Case,
    group: int,
    rank: int,
    port: int,
    lighthouse: str,
    log: Path,
    faults: Mapping[int, Fault],
) -> None:
    """Train as one rank of a replica group, without end."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # The address of torchft's transport of states.
    socket.gethostname = lambda: "127.0.0.1"
    with open(log.with_suffix(".err"), "w") as errors:
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=MESH)
        train(
            case,
            _Fatal(log.parent, faults),
            log,
            rank=rank,
            world_size=RANKS,
            store_addr="127.0.0.1",
            store_port=port,
            lighthouse_addr=lighthouse,
            replica_id=f"group{group}",
        )
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def train(case: Case, fatal: _Fatal, log: Path, **options: Any) -> None:
    """Train until the process is killed, and write a line for every step."""
    manager = _managed(fatal, case, **options)
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = None
    if case.dtype is torch.bfloat16:
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            main_params_dtype=torch.float32,
            grad_comm_dtype=torch.float32,
        )
    model = wrap(case.model(), mesh=mesh, sharding_strategy=case.strategy, mp_policy=policy)
    optimizer = case.build_optimizer(model)
    fault_tolerance.attach(manager, model, optimizer)
    fault_tolerance.check_timeouts(manager, mesh, heartbeat_timeout=HEARTBEAT, join_timeout=JOIN)
    manager.register_state_dict_fn("test", lambda given: fatal.at(HEALING), lambda: None)

    def in_forward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        fatal.at("forward", HANG)
        if output.requires_grad:
            output.register_hook(lambda grad: fatal.at("backward"))

    model.blocks[1].register_forward_hook(in_forward)
    optimizer.register_step_pre_hook(lambda *_: fatal.at("in the optimizer step"))
    num_restarts = 0
    with log.open("w") as out:
        while True:
            try:
                line = _step(case, fatal, manager, mesh, model, optimizer)
            except Exception as error:
                if not case.restarts:
                    raise
                mesh = fault_tolerance.restart(manager, mesh, model, optimizer, error=error)
                num_restarts += 1
                continue
            line |= {"restarts": num_restarts}
            line |= {"resident": resident_nbytes(), "files": num_open_files()}
            # A killed process may leave half a line.
            out.write(json.dumps(line) + "\n")
            out.flush()


def _step(
    case: Case, fatal: _Fatal, manager: Any, mesh: Any, model: Any, optimizer: Any
) -> dict[str, Any]:
    """Run a step, and return its line."""
    manager.num_calls = 0
    fault_tolerance.start_step(manager, mesh)
    # Waits for an asynchronous quorum, which may change the step.
    groups, place = manager.num_participants(), manager.participating_rank()
    step, rank = manager.current_step(), dist.get_rank()
    fatal.arm()
    if groups < case.groups:
        # Leave the others time to come back within a few steps.
        time.sleep(0.3)
    mine, losses = case.micro_batches(place or 0, groups), {}
    for micro_batch in mine:
        is_last = micro_batch == mine[-1]
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = loss_of(model, step, micro_batch, rank, case.dtype)
            (loss * case.weight(groups)).backward()
        losses[micro_batch] = loss.item()
    fatal.at("before should_commit")
    line = {"step": step, "groups": groups, "takes_part": place is not None}
    line |= {"losses": losses, "is_committed": manager.should_commit()}
    if line["is_committed"]:
        fatal.at("after should_commit")
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        line |= {"norm": float(norm), "digest": digest_of(optimizer)}
    optimizer.zero_grad()
    fatal.note_step(is_calm=line["is_committed"] and groups == case.groups)
    return line


def digest_of(optimizer: torch.optim.Optimizer) -> int:
    """A checksum of this rank's rows of the parameters and of the state of their optimizer."""
    digest = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            for tensor in (param, *optimizer.state[param].values()):
                digest = zlib.crc32(rows_of(tensor).detach().numpy().tobytes(), digest)
    return digest


# -- all groups ------------------------------------------------------------------------------------


class Group:
    """The processes of one replica group, which are started again as a launcher does it."""

    def __init__(self, number: int, folder: Path, start: Callable[[int, int], list[Any]]) -> None:
        self.number, self._folder, self._start = number, folder, start
        self.num_starts = self.num_restarts = 0
        self.processes: list[Any] = []
        self.start_at = time.monotonic()

    def end(self, away_s: float) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []
        self.start_at = time.monotonic() + away_s

    def start_in_time(self) -> None:
        if self.processes or time.monotonic() < self.start_at:
            return
        self.processes = self._start(self.number, self.num_starts)
        self.num_starts += 1
        self.num_restarts = 0

    def has_died(self) -> bool:
        return any(process.exitcode is not None for process in self.processes)

    def exit_code(self, rank: int) -> int | None:
        self.processes[rank].join(2.0)
        return self.processes[rank].exitcode  # type: ignore[no-any-return]

    def last_lines(self, number: int) -> list[dict[str, Any]]:
        """The last steps of rank 0, as started last; of a group that is away, none."""
        log = self._folder / f"{self.number}-0-{self.num_starts - 1}"
        return [*_lines(log, number)] if self.processes else []


@contextlib.contextmanager
def lighthouse() -> Iterator[str]:
    """Run a lighthouse of torchft; yield its address."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=int(JOIN.total_seconds() * 1000),
        heartbeat_timeout_ms=int(HEARTBEAT.total_seconds() * 1000),
    )
    try:
        yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


@contextlib.contextmanager
def launched(
    case: Case, folder: Path, faults_of: Callable[[int], Mapping[int, Fault]]
) -> Iterator[list[Group]]:
    """Run a lighthouse and launch the replica groups; end all processes at the end.

    Args:
        case: The training.
        folder: Folder of the logs.
        faults_of: Returns the next faults of a group by their indices in the list of faults.

    Yields:
        The groups, which `Group.start_in_time` starts.
    """
    context = multiprocessing.get_context("forkserver")
    note_fired(folder, 0)

    def start(group: int, number: int) -> list[Any]:
        port, processes, due = free_port(), [], faults_of(group)
        for rank in range(RANKS):
            log = folder / f"{group}-{rank}-{number}"
            own = {index: fault for index, fault in due.items() if fault.rank == rank}
            args = (case, group, rank, port, address, log, own)
            processes.append(context.Process(target=replica, args=args, daemon=True))
            processes[-1].start()
        return processes

    with forked_from(PRELOADED), lighthouse() as address:
        groups = [Group(number, folder, start) for number in range(case.groups)]
        try:
            yield groups
        finally:
            for group in groups:
                group.end(0.0)


def run(
    case: Case, faults: Sequence[Fault], folder: Path, *, timeout_s: float
) -> list[dict[str, Any]]:
    """Train with replica groups until all faults have happened and all groups train again.

    Returns:
        The lines of all ranks' logs, with `group`, `rank` and `start`, the number of earlier starts
        of the group.

    Raises:
        AssertionError: A group ended without a fault, or did not come back in time.
    """
    num_fired = 0

    def faults_of(group: int) -> dict[int, Fault]:
        waiting = ((index, faults[index]) for index in range(num_fired, len(faults)))
        return {index: fault for index, fault in waiting if fault.group == group}

    deadline = time.monotonic() + timeout_s
    with launched(case, folder, faults_of) as groups:
        while not (num_fired == len(faults) and all_train(groups)):
            assert time.monotonic() < deadline, f"{num_fired} faults\n{errors_in(folder)}"
            time.sleep(0.05)
            for group in groups:
                group.start_in_time()
                fault = faults[num_fired] if num_fired < len(faults) else None
                if fault is None or fault.group != group.number:
                    assert not group.has_died(), f"{group.number} ended\n{errors_in(folder)}"
                elif _has_happened(fault, group, folder, num_fired):
                    num_fired += 1
                    note_fired(folder, num_fired)
                    if fault.raises:
                        group.num_restarts += 1
                    else:
                        group.end(fault.away_s)
    return list(lines_of(folder))


def note_fired(folder: Path, num_fired: int) -> None:
    """Tell all ranks the number of faults that have happened."""
    (folder / "fired.new").write_text(str(num_fired))
    (folder / "fired.new").rename(folder / "fired")


def _has_happened(fault: Fault, group: Group, folder: Path, num_fired: int) -> bool:
    """Whether a fault has ended a group, or was raised in it."""
    if fault.raises:
        assert not group.has_died(), f"{group.number} ended\n{errors_in(folder)}"
        raised = folder / "raised"
        return raised.exists() and raised.read_text() == str(num_fired + 1)
    if not group.has_died():
        return False
    # Of a rank that hangs, the other rank finds it.
    rank = 1 - fault.rank if fault.stage == HANG else fault.rank
    expected = 1 if fault.stage in (HANG, LOST_TRANSFER) else -signal.SIGKILL
    code = group.exit_code(rank)
    assert code == expected, f"exit code {code} after {fault}"
    return True


def all_train(groups: Sequence[Group]) -> bool:
    """Whether each group, as (re)started last, has committed three steps with all others."""
    for group in groups:
        lines = group.last_lines(3)
        is_full = (
            line["groups"] == len(groups)
            and line["is_committed"]
            and line["restarts"] == group.num_restarts
            for line in lines
        )
        if len(lines) < 3 or not all(is_full):
            return False
    return True


def errors_in(folder: Path) -> str:
    found = (f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*.err")))
    return "\n".join(found)


def _lines(log: Path, most: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log, or at most so many of the last ones."""
    text = log.read_text() if log.exists() else ""
    # A killed process may leave a part of a line.
    for line in text.splitlines()[: text.count("\n")][-most:]:
        yield json.loads(line)


def lines_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of all logs."""
    for log in sorted(folder.glob("?-?-*")):
        if not log.suffix:
            group, rank, start = map(int, log.name.split("-"))
            for line in _lines(log):
                yield {"group": group, "rank": rank, "start": start, **line}


# -- comparison ------------------------------------------------------------------------------------


def reference(case: Case, groups_of_step: Sequence[int]) -> Iterator[dict[tuple[int, int], float]]:
    """Train the plain model in one process; yield the losses of each step, then its norm.

    Args:
        case: The training.
        groups_of_step: For each step, the number of groups that took part.

    Yields:
        For each step the losses by micro-batch and rank, and the norm of gradients as (-1, -1).
    """
    dtype = torch.float32 if case.dtype is torch.bfloat16 else case.dtype
    model = case.model()
    optimizer = case.build_optimizer(model)
    for step, groups in enumerate(groups_of_step):
        chosen = sorted({m for place in range(groups) for m in case.micro_batches(place, groups)})
        found = {}
        for micro_batch in chosen:
            for rank in range(RANKS):
                loss = loss_of(model, step, micro_batch, rank, dtype)
                (loss / (RANKS * len(chosen))).backward()
                found[micro_batch, rank] = loss.item()
        found[-1, -1] = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        yield found


@dataclass
class Result:
    """What the logs of a run say.

    Attributes:
        error: The largest relative difference of a loss or norm from the reference.
        num_compared: Number of losses compared.
        num_steps: Steps of the training.
        num_aborted: Steps that a group ran in vain, over all groups.
        num_healed: Starts of groups that continued from a peer's state.
    """

    error: float
    num_compared: int
    num_steps: int
    num_aborted: int
    num_healed: int


def compare(case: Case, lines: Iterable[Mapping[str, Any]]) -> Result:
    """Compare the logs of a run with the reference, and replica groups with each other.

    Raises:
        AssertionError: Groups disagree about a step, or their states differ in a bit.
    """
    committed = [line for line in lines if line["is_committed"]]
    num_groups: dict[int, int] = {}
    digests: dict[tuple[int, int], int] = {}
    for line in committed:
        step = line["step"]
        assert num_groups.setdefault(step, line["groups"]) == line["groups"], f"step {step}"
        place = (step, line["rank"])
        assert digests.setdefault(place, line["digest"]) == line["digest"], f"state after {place}"
    num_steps = len(num_groups)
    assert set(num_groups) == set(range(num_steps)), "a step is missing"
    expected = [*reference(case, [num_groups[step] for step in range(num_steps)])]
    errors = []
    for line in committed:
        known = expected[line["step"]]
        pairs = [(line["norm"], known[-1, -1])]
        if line["takes_part"]:
            losses = line["losses"].items()
            pairs += [(loss, known[int(m), line["rank"]]) for m, loss in losses]
        errors += [abs(found - right) / right for found, right in pairs]
    starts = {(line["group"], line["start"]) for line in committed if line["start"]}
    return Result(
        error=max(errors),
        num_compared=len(errors),
        num_steps=num_steps,
        num_aborted=sum(not line["is_committed"] and line["rank"] == 0 for line in lines),
        num_healed=len(starts),
    )
