import argparse
import sys
from importlib.metadata import EntryPoint

import pytest

from megatron_fsdp_v2 import cli

GROUP = cli.COMMAND_GROUP


class Greeting:
    help = "say hello to somebody"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name")

    def run(self, args: argparse.Namespace) -> int:
        sys.stdout.write(f"hello {args.name}\n")
        return 7


greeting = Greeting()


def offer(monkeypatch: pytest.MonkeyPatch, **commands: str) -> None:
    points = {name: EntryPoint(name, value, GROUP) for name, value in commands.items()}
    monkeypatch.setattr(cli, "discover_commands", lambda: points)


def test_subcommand_is_configured_and_run_and_returns_its_status(monkeypatch, capsys):
    offer(monkeypatch, greet=f"{__name__}:greeting")
    assert cli.main(["greet", "Ada"]) == 7
    assert capsys.readouterr().out == "hello Ada\n"


def test_missing_package_of_a_subcommand_is_reported_in_one_sentence(monkeypatch, capsys):
    offer(monkeypatch, patches="no_such_package_here.patches:command")
    assert cli.main(["patches", "--any", "thing"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "megatron-fsdp-v2 patches needs no_such_package_here" in captured.err
    assert "megatron-fsdp-v2[megatron]" in captured.err


def test_help_lists_all_subcommands_with_the_unavailable_ones_marked(monkeypatch, capsys):
    offer(monkeypatch, greet=f"{__name__}:greeting", patches="no_such_package_here:command")
    assert cli.main([]) == 0
    listed = capsys.readouterr().out
    assert "say hello to somebody" in listed
    assert "(unavailable: no_such_package_here cannot be imported)" in listed


@pytest.mark.parametrize("words", ["gret", "greet Ada --loud"])
def test_unknown_subcommands_and_arguments_are_rejected(monkeypatch, capsys, words):
    offer(monkeypatch, greet=f"{__name__}:greeting")
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(words.split())
    assert words.split()[-1] in capsys.readouterr().err


def test_version_is_that_of_the_installed_distribution(monkeypatch, capsys):
    monkeypatch.setattr(cli, "version", lambda name: "1.2.3")
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--version"])
    assert capsys.readouterr().out == "megatron-fsdp-v2 1.2.3\n"
