"""The flags of a job: from a command line, a script that starts it, or a YAML file."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fsdp_v2_mcore.prove import dry_run

_FUNCTIONS = {
    # A program that this machine lacks is recorded as one that it has: Python is never started.
    "command_not_found_handle": f'exec -a "$1" {shlex.quote(sys.executable)} "${{@:2}}"',
    # The script may name processes of another job.
    "kill": ":",
}
"""Functions of bash in the script's environment."""
_LAUNCHING_MODULES = {
    *("torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic.launch"),
    *("accelerate.commands.launch", "megatron_fsdp_v2_mcore.run"),
}
"""Modules whose arguments begin with those of a launcher, or with the path of a program."""
_TAKE_TEXT = {"pdsh", "sbatch", "ssh"}
"""Programs whose last argument may be a command line for a shell."""
_MOST_NESTED = 3
"""Shells in arguments of launchers in arguments of launchers."""
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


@dataclass(frozen=True)
class _Command:
    """A program that was not started.

    Attributes:
        words: Its name and arguments.
        environment: Its environment.
    """

    words: Sequence[str]
    environment: Mapping[str, str]


def read_script(path: Path) -> Source:
    """Run a shell script without the programs that it starts, and return the flags of a training.

    Bash expands variables and arrays itself. `dry_run` says which programs run.

    Args:
        path: A bash script that starts `torchrun` or `python`, also under `srun` and others.

    Raises:
        ValueError: The script is not a file, or starts no training, or this machine does not allow
            tracing.
    """
    if not path.is_file():
        raise ValueError(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
    commands, said = _dry_run(["bash", str(path)], os.environ)
    shells = commands
    for _ in range(_MOST_NESTED):
        calls = [(words, each.environment) for each in shells if (words := _shell_in(each.words))]
        shells = [each for words, variables in calls for each in _dry_run(words, variables)[0]]
        commands += shells
    found = [source for each in commands if (source := _training_of(each))]
    if not found:
        names = dict.fromkeys(os.path.basename(each.words[0]) for each in commands)
        ran = f"; it starts {', '.join(itertools.islice(names, 10))}" if names else ""
        raise ValueError(
            f"{path} starts no training that is a .py file or a module with flags{ran}: {said}; "
            "give the flags of the job after --"
        )
    return max(found, key=lambda source: len(source.words))


def _dry_run(words: Sequence[str], environment: Mapping[str, str]) -> tuple[list[_Command], str]:
    """Run a shell, and return the programs that it would start and its last line of errors."""
    functions = {f"BASH_FUNC_{name}%%": f"() {{ {body}; }}" for name, body in _FUNCTIONS.items()}
    with tempfile.NamedTemporaryFile() as record:
        try:
            done = subprocess.run(
                [sys.executable, "-IS", dry_run.__file__, record.name, *words],
                env={**environment, **functions},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            said = f"it did not end within {_TIMEOUT_S} s"
        else:
            if done.returncode == dry_run.CANNOT_TRACE:
                raise ValueError(
                    "this machine does not allow to trace processes (ptrace), without which a "
                    "script might start its job; give the flags of the job after --"
                )
            said = next(iter(done.stderr.strip().splitlines()[-1:]), "it printed no error")
        found = [_Command(*json.loads(line)) for line in record.read().splitlines()]
        return [command for command in found if command.words], said


def _shell_in(words: Sequence[str]) -> list[str]:
    """Return the call of a shell in the arguments of a launcher; empty if there is none."""
    for position, word in enumerate(words):
        if position and os.path.basename(word) in dry_run.SHELLS and words[position + 1 :]:
            return ["bash", *words[position + 1 :]]
        if position and word.endswith(".sh") and os.path.isfile(word):
            return ["bash", *words[position:]]
    # A launcher that is a script itself comes after its interpreter.
    takes_text = any(os.path.basename(word) in _TAKE_TEXT for word in words[:2])
    if takes_text and " " in words[-1]:
        return ["bash", "-c", words[-1].removeprefix("--wrap=")]
    return []


def _training_of(command: _Command) -> Source | None:
    """Split a launcher's command line after the training script; None if there is none."""
    words = command.words
    for position, (word, flag) in enumerate(itertools.pairwise(words), start=1):
        is_module = words[position - 2] == "-m" and word not in _LAUNCHING_MODULES
        if position > 1 and (is_module or word.endswith(".py")) and flag.startswith("--"):
            break
    else:
        return None
    launcher: dict[str, str] = {}
    for flag, value in itertools.pairwise(words[:position]):
        name, joined, joined_value = flag.partition("=")
        launcher[name.replace("_", "-")] = joined_value if joined else value
    sizes = launcher.get("--nproc-per-node", "unknown"), launcher.get("--nnodes", "1")
    is_known = all(size.isdecimal() for size in sizes)
    num_ranks = int(sizes[0]) * int(sizes[1]) if is_known else None
    return Source(tuple(words[position:]), num_ranks, command.environment)


def read_yaml(path: Path) -> Source:
    """Read flags from a YAML file.

    Args:
        path: Names and values of flags, in sections or not, in Megatron's spelling with or without
            leading dashes: `--yaml-cfg` files, or `MODEL_ARGS` of its functional tests.

    Raises:
        ValueError: The file contains something other than names and values of flags.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
        if not isinstance(content, dict):
            raise ValueError(f"{path} contains no names and values of flags")
        variables = content.get("ENV_VARS") or {}
        if not isinstance(variables, dict):
            raise ValueError(f"ENV_VARS of {path} contains no names and values of variables")
        environment = {str(name): str(value) for name, value in variables.items()}
        words = tuple(_words(content.get("MODEL_ARGS", content), path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML file: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply for names and values of flags") from None
    return Source(words, None, environment)


def _words(section: Any, path: Path) -> list[str]:
    if not isinstance(section, dict):
        raise ValueError(f"MODEL_ARGS of {path} contains no names and values of flags")
    words: list[str] = []
    for name, value in section.items():
        if not isinstance(name, str):
            raise ValueError(f"{path} has {name!r} in the place of the name of a flag")
        if isinstance(value, dict):
            words += _words(value, path)
        elif value is True:
            words.append(_flag(name))
        elif value is not False and value is not None:
            values = value if isinstance(value, list) else [value]
            if any(isinstance(one, list | dict) for one in values):
                raise ValueError(f"{path} has a list of lists as the value of {name}")
            words += [_flag(name), *map(str, values)]
    return words


def _flag(name: str) -> str:
    return name if name.startswith("--") else "--" + name.replace("_", "-")
