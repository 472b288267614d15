"""Where checks run: versions, driver, devices, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.gpu.kit.trainings import layers
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
