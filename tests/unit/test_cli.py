"""What all commands share: help, suggestions, errors in one sentence, closed pipes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import megatron_fsdp_v2_cli as cli
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


def test_help_imports_no_torch() -> None:
    done = run_alone(
        "import sys, megatron_fsdp_v2_cli as cli; cli.main([]); sys.exit('torch' in sys.modules)"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout for name in ("ckpt", "patches", "plan"))


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
