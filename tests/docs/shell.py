"""Checks of shell blocks, without running their commands.

The programs' own parsers check flags, make checks targets, and files must exist.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template

from megatron_fsdp_v2_cli import COMMANDS, build_parser
from tests.processes import ROOT, ran

_ELLIPSIS = "..."
_PLACEHOLDER = re.compile(r"<[a-z][a-z _-]*>")
_ASSIGNMENT = re.compile(r"\w+=")
# Variables that Slurm, the script, or the user sets.
_VARIABLES = {
    "CHECKPOINTS": "/shared/checkpoints",
    "SLURM_JOB_NODELIST": "node-[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "7",
    "IMAGE": "pytorch.sqsh",
    "head_node": "node-1",
}
_MODEL_FLAGS = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 2 --lr 1e-3 --mock-data
--tokenizer-type NullTokenizer --vocab-size 256 --train-iters 2
"""

Command = list[str]
"""A program and its arguments, as the shell passes them."""


def typed_lines(language: str, code: str) -> str:
    """Return the typed lines: all lines of a script, or the lines after a console's prompts."""
    if language != "console":
        return code
    typed = []
    continues = False
    for line in code.splitlines():
        if line.startswith("$ ") or continues:
            typed.append(line.removeprefix("$ "))
            continues = line.endswith("\\")
    return "".join(f"{line}\n" for line in typed)


def commands_of(script: str) -> list[Command]:
    """Return the program calls of a script of simple commands, one per line.

    Args:
        script: Shell code. `<your flags>` stands for anything and becomes `...`.

    Raises:
        AssertionError: A quote is not closed, or a variable is unknown.
    """
    found = []
    for line in _PLACEHOLDER.sub(_ELLIPSIS, script).replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
            if words and not _ASSIGNMENT.match(words[0]):
                words = [Template(word).substitute(_VARIABLES) for word in words]
                if words[0] == "srun":
                    # Its options are of the form --name=value.
                    words = [*itertools.dropwhile(lambda w: w.startswith("-"), words[1:])]
                found.append(words)
        except (ValueError, KeyError) as error:
            raise AssertionError(f"{line}: {error}") from None
    return found


def check(command: Command) -> None:
    """Check one call of a program without executing it.

    Raises:
        AssertionError: The program would reject its arguments, or a file does not exist.
    """
    name, arguments = Path(command[0]).name, [a for a in command[1:] if a != _ELLIPSIS]
    if name not in _CHECKS:
        raise AssertionError(f"nobody knows how to check a call of {name!r}: see {__name__}")
    _CHECKS[name](arguments)


def check_flags(flags: Sequence[str]) -> None:
    """Check flags, added to those of a small model, with Megatron's parser and this package.

    Raises:
        AssertionError: A flag or value is unknown, or this package rejects it.
    """
    from megatron_fsdp_v2_mcore import FlagError
    from megatron_fsdp_v2_mcore.flags.arguments import check_arguments, is_enabled

    # The program removes --cpu-rehearsal before Megatron parses; the checkpoint may not exist.
    words = [word for word in flags if word not in (_ELLIPSIS, "--cpu-rehearsal")]
    args = _parsed(_megatron_parser(), [*_MODEL_FLAGS.split(), *words])
    args.world_size, args.load = 4, None
    if is_enabled(args):
        try:
            check_arguments(args)
        except FlagError as error:
            raise AssertionError(str(error)) from None


@functools.cache
def _megatron_parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    from megatron_fsdp_v2_mcore.flags.arguments import add_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    return add_arguments(add_megatron_arguments(parser))


def _parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            return parser.parse_args(list(words))
        except SystemExit as leaving:
            # --help and --version also exit.
            if leaving.code in (0, None):
                return argparse.Namespace()
    raise AssertionError(said.getvalue().strip().splitlines()[-1])


def _check_make(arguments: Sequence[str]) -> None:
    make = shutil.which("make")
    assert make is not None
    # This test may run under make, whose options are in the environment.
    environment = {key: value for key, value in os.environ.items() if "MAKE" not in key}
    done = ran(make, "--dry-run", *arguments, env=environment)
    if done.returncode != 0:
        raise AssertionError(done.stderr.strip())
    for variable in (word.partition("=")[0] for word in arguments if "=" in word):
        if not re.search(rf"\b{variable}\b", (ROOT / "Makefile").read_text()):
            raise AssertionError(f"the Makefile does not read {variable}")


def _check_torchrun(arguments: Sequence[str]) -> None:
    from torch.distributed.run import get_args_parser

    args = _parsed(get_args_parser(), arguments)
    _check_started(args.module, args.training_script, args.training_script_args)


def _check_python(arguments: Sequence[str]) -> None:
    words = list(arguments)
    if words[:1] == ["-c"]:
        compile(words[1], "-c", "exec")
    elif words[:1] == ["-m"] and words[1] in ("pip", "pytest"):
        _CHECKS[words[1]](words[2:])
    elif words:
        is_module = words[0] == "-m"
        _check_started(is_module, *words[is_module:][:1], words[is_module + 1 :])


def _check_started(is_module: bool, program: str, arguments: Sequence[str]) -> None:
    if not is_module:
        # A path in this tree must exist; other names are the reader's own scripts.
        first = Path(program).parts[0]
        if (ROOT / first).is_dir() and not (ROOT / program).is_file():
            raise AssertionError(f"there is no {program}")
        return
    if importlib.util.find_spec(program) is None:
        raise AssertionError(f"there is no module {program}")
    if program == "megatron_fsdp_v2_mcore.pretrain_gpt":
        check_flags(arguments)
    elif program == "megatron_fsdp_v2_mcore.run":
        _check_started(False, arguments[0], arguments[1:])
        check_flags(arguments[1:])
    elif program == "examples.train_hf":
        from examples.train_hf.__main__ import build_parser as parser_of_trainer

        _parsed(parser_of_trainer(), arguments)


def _check_our_command(arguments: Sequence[str]) -> None:
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        raise AssertionError(f"megatron-fsdp-v2 has no command {arguments[0]}")
    _parsed(build_parser(arguments), arguments)


def _check_pytest(arguments: Sequence[str]) -> None:
    for path in (word.partition("::")[0] for word in arguments if "/" in word):
        if not (ROOT / path).exists():
            raise AssertionError(f"there is no {path}")


def _check_pip(arguments: Sequence[str]) -> None:
    done = ran(sys.executable, "-m", "pip", *arguments[:1], "--help")
    extras = re.findall(r"^\.\[(.*)\]$", "\n".join(arguments), re.MULTILINE)
    offered = (ROOT / "pyproject.toml").read_text()
    missing = [e for listed in extras for e in listed.split(",") if f"\n{e} = [" not in offered]
    if done.returncode != 0 or missing:
        raise AssertionError(f"pip {arguments[:1]} fails, or has no extra {missing}")


_CHECKS: dict[str, Callable[[Sequence[str]], None]] = {
    "make": _check_make,
    "torchrun": _check_torchrun,
    "megatron-fsdp-v2": _check_our_command,
    "python": _check_python,
    "python3": _check_python,
    "pytest": _check_pytest,
    "pip": _check_pip,
}
