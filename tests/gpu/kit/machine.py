"""Where checks run: versions, driver, devices, commit."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.gpu.kit.trainings import has_transformer_engine, layers
from tests.shares import commit_of

_PACKAGES = (
    "torch",
    "megatron-core",
    "transformer_engine",
    "transformer_engine_torch",
    "emerging-optimizers",
    "triton",
    "numpy",
)


def describe(device: str, root: Path) -> dict[str, str]:
    """What a reader of a report needs to know of the machine.

    Nothing here touches a GPU: processes that checks start could not use one then.

    Args:
        device: `cuda` or `cpu`.
        root: The working tree.
    """
    changes = _output("git", "-C", str(root), "status", "--porcelain")
    found = {
        "device": device,
        "commit": commit_of(root) + (" with changes" if changes else ""),
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
    found["layers of Megatron"] = layers() if device == "cuda" else "its own, rehearsed on a CPU"
    found["GPUs"] = _output(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    found["links"] = _output("nvidia-smi", "topo", "-m") if device == "cuda" else ""
    variables = ("NCCL_", "CUDA_", "NVTE_", "TORCH_", "PYTORCH_")
    chosen = [f"{n}={v}" for n, v in sorted(os.environ.items()) if n.startswith(variables)]
    found["environment"] = ", ".join(chosen) or "nothing set"
    return found


FOR_BITS = {
    # Matrix products that add in one order.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Sums over ranks that are made in one order, whatever NCCL would choose for a size.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    # Attention of Transformer Engine without atomic additions.
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
"""Environment of every check on a GPU: what equal bits need. What is set already is left."""

TRANSFORMER_ENGINE = "2.20.2"
"""That quantized weights are tested with."""

_DRIVERS = {"12": 525, "13": 580}
"""The oldest driver that runs programs of a major version of CUDA."""


def requirements() -> tuple[list[str], bool]:
    """What checks on a GPU need of this machine, in sentences, and whether they can run at all."""
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
    """Have this process compute the same bits every time, or raise where it cannot."""
    torch.use_deterministic_algorithms(True)
    # Or torch fills what is empty, which hides what nobody wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@functools.cache
def mesh_of(device: str, shape: tuple[int, ...]) -> DeviceMesh:
    """The mesh of all ranks, in a rank's process; the outer axis first."""
    return init_device_mesh(device, shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def device_of(device: str) -> torch.device:
    """This rank's device."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if device == "cuda"
        else torch.device(device)
    )


def num_gpus() -> int:
    """How many GPUs checks may use, asked in a process of its own."""
    count = _output(sys.executable, "-c", "import torch; print(torch.cuda.device_count())")
    return int(count) if count.isdigit() else 0


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
