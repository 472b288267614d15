"""Devices, ranks and commands of the checks, and the description of the machine in a report."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import math
import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

from tests.distributed.wrapping import wrap
from tests.mcore.command_line import Run, environment_of
from tests.processes import ROOT
from tests.ranks import RankPool
from tests.reference.models import Block
from tests.shares import commit_of

LIMIT_S = 900.0
"""Time limit of one command, or of one function on all ranks."""
PATIENCE_S = 40.0
"""Time between SIGTERM and SIGKILL of a command.

The launcher kills ranks that ignore SIGTERM after 30 seconds. Each rank has its own session, so
SIGKILL of the launcher's process group does not reach the ranks.
"""


@dataclass(frozen=True)
class Machine:
    """The device, ranks and extent of the checks.

    Attributes:
        device: `cuda` or `cpu`.
        ranks: Maximum number of ranks of a check.
        is_small: Whether checks run only a minimal case.
        ends_at: Time of the monotonic clock at which the checks end.
    """

    device: str
    ranks: int
    is_small: bool = False
    ends_at: float = math.inf

    @property
    def on_cuda(self) -> bool:
        """Whether checks run on GPUs."""
        return self.device == "cuda"

    def require(self, ranks: int) -> None:
        """Skip the check if there are fewer ranks."""
        if self.ranks < ranks:
            pytest.skip(f"needs {ranks} ranks")

    def require_cuda(self) -> None:
        """Skip the rest of the check on a CPU, which cannot verify the claim."""
        if not self.on_cuda:
            pytest.skip("needs a GPU; rehearsed on a CPU")

    def within(self, limit_s: float = LIMIT_S) -> float:
        """Return a time limit in seconds that also ends with the checks."""
        return min(limit_s, max(1.0, self.ends_at - time.monotonic()))

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: int = 0, limit_s: float = LIMIT_S
    ) -> list[Any]:
        """Call a module-level function on new ranks; return the result of each rank.

        Args:
            function: The function; the device is its first argument.
            args: Further arguments.
            ranks: Number of ranks; 0 for all.
            limit_s: Time limit; afterwards all ranks are killed.

        Raises:
            RankFailure: A rank raised, died, or exceeded the time limit.
        """
        pool = RankPool(ranks or self.ranks, device=self.device)
        try:
            return pool.run(function, self.device, *args, timeout_s=self.within(limit_s))
        finally:
            pool.close()


def run_command(
    machine: Machine, words: Sequence[str], log: Path, *, environment: Mapping[str, str | None]
) -> Run:
    """Run a command in a new session and write its output to a file.

    Args:
        machine: The machine, whose time limits the command.
        words: The command.
        log: The file for the output.
        environment: Variables to set; None removes a variable.

    Raises:
        TimeoutError: The command exceeded the time limit and was terminated.
    """
    kept = {name: value for name, value in environment.items() if value is not None}
    variables, limit_s = environment_of(**kept), machine.within()
    for name in environment.keys() - kept.keys():
        variables.pop(name, None)
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(
            words,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=variables,
            start_new_session=True,
        )
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not done after {limit_s:.0f} s; see {log}") from None
        finally:
            _terminate(child)
    return Run(code, log.read_text(encoding="utf-8", errors="replace"))


def _terminate(child: subprocess.Popen[bytes]) -> None:
    """Terminate a command and its process group."""
    for kind, patience in ((signal.SIGTERM, PATIENCE_S), (signal.SIGKILL, 5.0)):
        if child.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)


_PACKAGES = (
    *("torch", "megatron-core", "transformer_engine", "transformer_engine_torch"),
    *("emerging-optimizers", "triton", "numpy"),
)


def describe(device: str) -> dict[str, str]:
    """Return the hardware, driver, packages and environment for the header of a report.

    The function does not initialize CUDA, so that the processes of the checks can use the GPUs.
    """
    changes = _output("git", "-C", str(ROOT), "status", "--porcelain")
    found = {
        "device": device,
        "commit": commit_of(ROOT) + (" with changes" if changes else ""),
        "system": f"{platform.system()} {platform.release()}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["CUDA of torch"] = str(torch.version.cuda)
    found["NCCL"] = _nccl()
    found["layers of Megatron"] = (
        layer_implementation() if device == "cuda" else "rehearsed on a CPU"
    )
    found["GPUs"] = _output(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    found["links"] = _output("nvidia-smi", "topo", "-m") if device == "cuda" else ""
    variables = ("NCCL_", "CUDA_", "NVTE_", "TORCH_", "PYTORCH_")
    chosen = [f"{n}={v}" for n, v in sorted(os.environ.items()) if n.startswith(variables)]
    found["environment"] = ", ".join(chosen) or "nothing set"
    return found


DETERMINISTIC_ENVIRONMENT = {
    # Matrix products with a fixed order of summation.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Reductions with one algorithm and order for all sizes.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    # Attention of Transformer Engine without atomic additions.
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
"""Environment of every check on a GPU, for deterministic results; set variables are kept."""

TRANSFORMER_ENGINE = "2.20.2"
"""Version with which quantized weights are tested."""

_DRIVERS = {"12": 525, "13": 580}
"""Minimum driver version by major version of CUDA."""


def requirements() -> tuple[list[str], bool]:
    """Return sentences about missing requirements, and whether checks can run on a GPU."""
    cuda, said, can_run = str(torch.version.cuda), [], True
    needed = _DRIVERS.get(cuda.partition(".")[0], 0)
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = found.splitlines()[0] if found else "none"
    major = driver.partition(".")[0]
    if not (major.isdigit() and int(major) >= needed):
        can_run = False
        said.append(
            f"torch {torch.__version__} is built for CUDA {cuda}, which needs NVIDIA's driver "
            f"{needed} or newer; found: {driver}. Install it from the distribution's packages "
            "(nvidia-driver, cuda-drivers), or a torch that is built for an older CUDA"
        )
    if not has_transformer_engine():
        said.append(
            f"Transformer Engine is not installed: Megatron's local layers are trained instead, "
            f"and FP8 is left out. Install it with: CUDA_HOME=... pip install "
            f"--no-build-isolation 'transformer-engine[pytorch]=={TRANSFORMER_ENGINE}' (it needs "
            "the CUDA toolkit, cuDNN and NCCL of torch's own version)"
        )
    return said, can_run


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms in this process; operations without one raise."""
    torch.use_deterministic_algorithms(True)
    # Filled memory would hide reads of uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@functools.cache
def mesh_of(device: str, *shape: int) -> DeviceMesh:
    """Return the mesh of all ranks, outer axis first; one axis without a shape. On a rank."""
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh(device, shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def sharded_blocks(device: str, num: int, width: int, **options: Any) -> Any:
    """Return a sequence of blocks, each of which is a unit; by default over one axis. On a rank."""
    model: Any = nn.Sequential(*(Block(width) for _ in range(num))).to(device)
    return wrap(model, list(model), **{"mesh": mesh_of(device), **options})


def synchronize(device: str) -> None:
    """Wait until the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def profiled(device: str) -> Iterator[profile]:
    """Profile the host and, on CUDA, the device."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as found:
        yield found


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine, which has Megatron's default layers, is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def layer_implementation() -> str:
    """Return the implementation of Megatron's layers that trainings on a GPU use."""
    if has_transformer_engine():
        return "Transformer Engine's layers"
    return "Megatron's local layers: Transformer Engine is not installed"


def _nccl() -> str:
    try:
        version: Sequence[int] = torch.cuda.nccl.version()
        return ".".join(map(str, version))
    except (AttributeError, RuntimeError):
        return "not in this torch"


def _output(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{words[0]}: {type(error).__name__}"
    return done.stdout.strip()
