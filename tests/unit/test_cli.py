"""What all commands share: help, suggestions, errors in one sentence, closed pipes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import megatron_fsdp_v2_cli as cli
from megatron_fsdp_v2._text import parse_size
from megatron_fsdp_v2.layout.mixed_precision import DTYPES
from megatron_fsdp_v2.layout.placement import OUTER_NAMES, STRATEGIES
from megatron_fsdp_v2.plan.machine import PRESETS
from megatron_fsdp_v2.plan.optimizer_state import OPTIMIZERS
from megatron_fsdp_v2_cli import arguments
from megatron_fsdp_v2_cli.conversions import converted
from megatron_fsdp_v2_cli.plan import arguments as plan_arguments
from megatron_fsdp_v2_mcore.prove.command import command as prove_command
from megatron_fsdp_v2_mcore.prove.shrink import MOST_RANKS
from tests.processes import ROOT, ran
from tests.unit.commands import called


class Greeting:
    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name")
        parser.add_argument("--loudly", choices=["very", "not"])

    def run(self, args: argparse.Namespace) -> int:
        if args.name == "nobody":
            raise ValueError("nobody is here")
        sys.stdout.write(f"hello {args.name}\n")
        return 7


@pytest.fixture(autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("greeting")
    module.command = Greeting()
    monkeypatch.setitem(sys.modules, "greeting", module)
    monkeypatch.setitem(cli.COMMANDS, "greet", ("say hello", "greeting"))
    monkeypatch.setitem(cli.COMMANDS, "absent", ("cannot be imported", "no_such_package.command"))


@pytest.mark.parametrize(
    ("words", "status", "out", "err"),
    [
        ("greet Ada", 7, "hello Ada\n", ""),
        ("greet nobody", 2, "", "nobody is here\n"),
        ("absent --any thing", 2, "", "absent needs no_such_package, which cannot be imported: "),
        ("", 0, "say hello", ""),
        ("gret Ada", 2, "", "did you mean greet?"),
        ("greet Ada --loudy very", 2, "", "did you mean --loudly?"),
        ("greet Ada --loudly vary", 2, "", "did you mean very?"),
        ("ckpt inspct x", 2, "", "did you mean inspect?"),
        ("plan --rank=2 --stratgy all", 2, "", "did you mean --strategy?"),
        ("ckpt inspect /nowhere", 2, "", "/nowhere"),
        ("plan --ranks 2 --memory 80 --model a:b", 2, "", "'80' has no unit"),
        ("plan --ranks 2 --param-dtype bf61 --model a:b", 2, "", "'bf61' is no dtype"),
    ],
)
def test_commands_and_their_errors(
    words: str, status: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, printed, said = called(capsys, *words.split())
    assert found == status
    assert out in printed and err in said
    assert bool(said) == bool(err), said


def test_version_is_that_of_the_installed_distribution(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "version", lambda name: "1.2.3")
    assert called(capsys, "--version") == (0, "megatron-fsdp-v2 1.2.3\n", "")


def run_alone(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'adapters'}", **variables}
    return ran(sys.executable, "-c", code, env=environment)


HELP = {
    "": "ckpt",
    "--version": "megatron-fsdp-v2",
    "ckpt --help": "inspect",
    "ckpt inspect --help": "names, shapes, dtypes and sizes",
    "ckpt verify --help": "compare checksums",
    "ckpt export --help": "plain tensors",
    "ckpt convert --help": "from one kind of checkpoint to another",
    "ckpt convert --to torch_dist --help": "for Megatron's own optimizer",
    "patches --help": "list where Megatron is patched",
    "plan --help": "--prefetch-bytes",
    "prove --help": "--local-ranks",
    "trace --help": "timeline of a step",
}
TYPOS = {
    "ckpt inspct x": "did you mean inspect?",
    "ckpt verify x --jason": "unrecognized arguments: --jason",
    "ckpt convert a b --dtipe fp32": "did you mean --dtype?",
    "ckpt convert --to torch_dist a b --iterration 3": "did you mean --iteration?",
    "patches --jsn": "did you mean --json?",
    "plan --ranks 2 --stratgy all": "did you mean --strategy?",
    "plan --ranks 0": "'0' is not a number of at least 1",
    "prove --devise cpu": "did you mean --device?",
    "trace": "required: run.json",
}
CALLS = """
import contextlib, io, json, sys
from importlib.metadata import EntryPoint
import megatron_fsdp_v2_cli as cli
from megatron_fsdp_v2_cli.ckpt import command
# The installed metadata may be older than this tree.
value = "megatron_fsdp_v2_mcore.checkpoint.torch_dist.converter:to_torch_dist"
command.entry_points = lambda group: [EntryPoint("torch_dist", value, group)]
found = {}
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = cli.main(words.split())
        except SystemExit as leaving:
            status = leaving.code
    heavy = sorted({"torch", "numpy", "megatron.core"} & sys.modules.keys())
    found[words] = [status, said.getvalue(), heavy]
print(json.dumps(found))
"""


def test_help_and_typos_of_every_command_import_no_torch() -> None:
    """A command line is parsed first: torch takes seconds."""
    calls = {**HELP, **TYPOS}
    code = CALLS.replace("sys.argv[1]", repr(json.dumps([*calls])))
    done = run_alone(code)
    assert (done.returncode, done.stderr) == (0, "")
    for words, (status, said, heavy) in json.loads(done.stdout).items():
        assert heavy == [], words
        assert status in ((0, None) if words in HELP else (2,)), words
        # Help is wrapped.
        assert calls[words] in " ".join(said.split()), (words, said)


def test_names_that_are_parsed_without_torch_are_those_of_the_core() -> None:
    assert {getattr(torch, name) for name in arguments.DTYPE_NAMES.values()} == {*DTYPES.values()}
    assert arguments.DTYPE_NAMES.keys() == DTYPES.keys()
    assert tuple(STRATEGIES) == plan_arguments.STRATEGIES
    assert tuple(OUTER_NAMES.values()) == plan_arguments.OUTER_NAMES
    assert tuple(OPTIMIZERS) == plan_arguments.OPTIMIZERS
    assert tuple(PRESETS) == plan_arguments.MACHINES
    parser = argparse.ArgumentParser()
    prove_command.configure(parser)
    assert f"largest number of ranks of a run; default: {MOST_RANKS}" in " ".join(
        parser.format_help().split()
    )


@pytest.mark.parametrize(
    "text",
    ["5GB", "500 MiB", "1.5kib", "7b", "0GB", "0.0b", "5apples b", "GB", "-1GB", "1e3GB", "5 ib"],
)
def test_sizes_are_checked_as_they_are_parsed(text: str) -> None:
    def works(function: Callable[[str], object], error: type[Exception]) -> bool:
        try:
            function(text)
        except error:
            return False
        return True

    assert works(arguments.size, argparse.ArgumentTypeError) == works(parse_size, ValueError)


def test_sizes_and_dtypes_become_values_when_the_command_runs() -> None:
    parser = argparse.ArgumentParser()
    plan_arguments.configure(parser)
    words = "--ranks 2 --activations 2KiB --param-dtype bf16 --model module:function"
    found = converted(parser.parse_args(words.split()))
    assert (found.activations, found.param_dtype) == (2048, torch.bfloat16)
    assert (found.model, found.memory) == ("module:function", None)


def test_a_closed_pipe_is_silent() -> None:
    done = run_alone(
        "import os, sys, types, megatron_fsdp_v2_cli as cli\n"
        "command = types.SimpleNamespace(configure=id, run=lambda args: print('text'))\n"
        "sys.modules['one'] = types.SimpleNamespace(command=command)\n"
        "cli.COMMANDS['one'] = ('prints', 'one')\n"
        "read, write = os.pipe()\n"
        "os.dup2(write, 1), os.close(write), os.close(read)\n"
        "sys.exit(cli.main(['one']))\n"
    )
    assert (done.returncode, done.stderr) == (141, "")


PLAN = "plan --ranks 2 --model torch.nn:Identity"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (f"{PLAN} --json {{0}}/no/plan.json", "plan.json cannot be written: its folder does not"),
        (f"{PLAN} --plot {{0}}", "cannot be written: it is a folder"),
        (f"{PLAN} --machine h100 --timeline {{0}}/no/t.json", "t.json cannot be written: its fold"),
        ("trace {0}/absent.json", "/absent.json: no such file or directory"),
        ("trace {0}", ": is a directory"),
        ("prove --script {0}/absent.sh", "/absent.sh does not exist"),
        ("prove --script {0}", " is not a file"),
        ("prove --yaml {0}/absent.yaml", "/absent.yaml: no such file or directory"),
        ("prove --json {0} -- --num-layers 2", "cannot be written: it is a folder"),
        ("ckpt verify {0}/other", "/other is not a checkpoint: it has no .metadata, only notes"),
        ("ckpt verify {0}/other/notes", "/notes is not a folder"),
        ("ckpt export {0}/m.pt {0}/other/notes/m.pt", "/other/notes is not a folder"),
        ("ckpt convert {0}/m.pt /proc/m", "/proc/m: no such file or directory"),
        ("ckpt convert {0}/m.pt /proc/m.pt", "/proc/m.pt: no such file or directory"),
        ("ckpt convert {0}/m.pt /proc/m.safetensors", "/proc/m.safetensors: no such file or dir"),
    ],
)
def test_files_that_cannot_be_used_are_one_sentence(
    words: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").touch()
    torch.save({"weight": torch.ones(2)}, tmp_path / "m.pt")
    status, out, err = called(capsys, *words.format(tmp_path).split())
    assert (status, out) == (2, "")
    assert problem in err and err.count("\n") == 1
    for raw in ("Errno", "Error", ".incomplete", ".tmp"):
        assert raw not in err


@pytest.mark.slow
def test_prove_without_megatron_names_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").touch()
    path = f"{tmp_path}:{ROOT}:{ROOT / 'adapters'}"
    code = "import sys, megatron_fsdp_v2_cli as cli\n"
    code += "sys.exit(cli.main(['prove', '--', '--num-layers', '2']))"
    done = run_alone(code, PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "megatron-fsdp-v2 prove needs megatron.core, which cannot be imported: install this "
        "package with its extra, megatron-fsdp-v2[megatron]\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "completed"), [("ckpt ver", "verify"), ("plan --strat", "--strategy")]
)
def test_the_shell_completes_words(typed: str, completed: str, tmp_path: Path) -> None:
    line = f"megatron-fsdp-v2 {typed}"
    variables = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    variables |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "words")}
    done = run_alone("import megatron_fsdp_v2_cli as cli; cli.main([])", **variables)
    assert done.stderr == ""
    assert (tmp_path / "words").read_text().split() == [completed]
