"""The flags of a job: from a command line, a script that starts it, or a YAML file."""

from __future__ import annotations

import itertools
import os
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_RECORDER = """#!/bin/sh
# Records one command of the job's script instead of running it.
{ printf '%s\\0' "$0" "$@"; printf '\\0'; env -0; printf '\\0'; } >> "$MEGATRON_FSDP_V2_RECORD"
"""
_RECORDED = (
    "torchrun python python3 srun sbatch mpirun mpiexec accelerate deepspeed docker nvidia-smi"
)
_VALUES = (
    "--nproc",
    "--nnodes",
    "--node",
    "--master",
    "--rdzv",
    "--max",
    "--role",
    "--log",
    "--tee",
)
"""Beginnings of flags of launchers."""
_TIMEOUT_S = 60


@dataclass(frozen=True)
class Source:
    """The flags of a job.

    Attributes:
        words: The training flags.
        num_ranks: Number of ranks that a launcher was given; None if unknown.
        environment: Environment of the training, as far as it is known.
    """

    words: tuple[str, ...]
    num_ranks: int | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


def read_script(path: Path) -> Source:
    """Run a shell script with its launchers replaced, and return the flags it starts them with.

    Bash expands variables and arrays itself. Whatever else the script does, it does.

    Args:
        path: A bash script that starts `torchrun` or `python`, also under `srun`.

    Raises:
        ValueError: The script starts no training.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in _RECORDED.split():
            recorder = Path(folder, name)
            recorder.write_text(_RECORDER)
            recorder.chmod(recorder.stat().st_mode | stat.S_IXUSR)
        record = Path(folder, "recorded")
        record.touch()
        changed = {"PATH": f"{folder}:{os.environ.get('PATH', '')}"}
        changed["MEGATRON_FSDP_V2_RECORD"] = str(record)
        try:
            done = subprocess.run(
                ["bash", str(path)],
                env=os.environ | changed,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"{path} did not end within {_TIMEOUT_S} s") from None
        found = _recorded(record.read_bytes().decode())
    trainings = [source for source in found if len(source.words) > 2]
    if not trainings:
        said = done.stderr.strip().splitlines()[-1:] or ["it printed no error"]
        raise ValueError(
            f"{path} starts no training with {', '.join(_RECORDED.split()[:4])}: {said[0]}"
        )
    return max(trainings, key=lambda source: len(source.words))


def _recorded(text: str) -> list[Source]:
    parts = text.split("\0\0")[:-1]
    return [
        _of_command(command.split("\0")[1:], dict(v.split("=", 1) for v in variables.split("\0")))
        for command, variables in zip(parts[::2], parts[1::2], strict=True)
    ]


def _of_command(words: Sequence[str], variables: Mapping[str, str]) -> Source:
    """Split a launcher's command line at the training script; `bash -c` is split into words."""
    if len(words) == 1 or "-c" in words[:-1]:
        words = shlex.split(words[-1])
    launcher: dict[str, str] = {}
    position = 0
    for number, word in enumerate(words):
        if word.endswith(".py") or words[number - 1 : number] == ["-m"]:
            position = number + 1
            break
    for flag, value in itertools.pairwise(words[: position + 1]):
        name, joined, joined_value = flag.partition("=")
        launcher[name.replace("_", "-")] = joined_value if joined else value
    sizes = [launcher.get(name, "1") for name in ("--nproc-per-node", "--nnodes")]
    is_known = position and all(size.isdecimal() for size in sizes)
    num_ranks = int(sizes[0]) * int(sizes[1]) if is_known else None
    return Source(tuple(words[position:]), num_ranks, variables)


def read_yaml(path: Path) -> Source:
    """Read flags from a YAML file.

    Args:
        path: Names and values of flags, in sections or not, in Megatron's spelling with or without
            leading dashes: `--yaml-cfg` files, or `MODEL_ARGS` of its functional tests.

    Raises:
        ValueError: The file contains no mapping.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML file: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains no names and values of flags")
    variables = content.get("ENV_VARS") or {}
    environment = {name: str(value) for name, value in variables.items()}
    return Source(tuple(_words(content.get("MODEL_ARGS", content))), None, environment)


def _words(section: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in section.items():
        if isinstance(value, dict):
            words += _words(value)
        elif value is True:
            words.append(_flag(name))
        elif value is not False and value is not None:
            values = value if isinstance(value, list) else [value]
            words += [_flag(name), *map(str, values)]
    return words


def _flag(name: str) -> str:
    return name if name.startswith("--") else "--" + name.replace("_", "-")
