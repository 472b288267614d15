"""Import the flags of Megatron-LM's functional configurations as data.

`python -m functional_tests.upstream.take_over path/to/Megatron-LM` writes `configurations.txt` from
a checkout of the tag. The file has names and values of flags only, without paths and without
flags of logging, timing, loading and saving.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import yaml

from functional_tests.upstream.configurations import FILE, PATH, Configuration
from megatron_fsdp_v2_mcore.prove.shrink import NOT_RUN

TAG = "core_v0.19.0"
FOLDER = "tests/functional_tests/test_cases"

FAMILIES = ("gpt", "hybrid", "mixtral", "moe", "nemotron")
"""Folders whose configurations train with `pretrain_gpt.py` or `pretrain_hybrid.py`."""

OTHER_PROGRAMS = "grpo"
"""Part of the names of configurations in these folders that run `train_rl.py`."""

_HEAD = """
# Flags of the functional tests of Megatron-LM, as data: names and values only.
# Source: https://github.com/NVIDIA/Megatron-LM, {folder}/*/*/model_config.yaml
# at tag {tag} (commit {commit}). Megatron-LM is published under
# the licenses in its LICENSE file; no text or code of it is here.
# Written by python -m functional_tests.upstream.take_over; not to be edited.
#
# Names of configurations that differ only in paths, logging and timing, then their flags.
"""


def _words(value: Any) -> tuple[str, ...]:
    """Return the words after a flag's name on the command line of Megatron-LM's test runner."""
    if value is True:
        return ()
    text = str(value).strip()
    if "$" in text or text.endswith((".yaml", ".yml")):
        return (PATH,)
    if listed := re.fullmatch(r"\[([^\]]+)\]", text):
        return tuple(shlex.split(listed[1]))
    return (text,)


def read(checkout: Path) -> tuple[list[Configuration], list[str]]:
    """Return distinct configurations, and the names of configurations of other programs."""
    found: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    others: list[str] = []
    for path in (checkout / FOLDER).glob("*/*/model_config.yaml"):
        family, name = path.parts[-3:-1]
        arguments = yaml.safe_load(path.read_text()).get("MODEL_ARGS") or {}
        if arguments.keys().isdisjoint({"--train-iters", "--train-samples"}):
            continue
        if family not in FAMILIES or OTHER_PROGRAMS in name:
            others.append(f"{family}/{name}")
            continue
        flags = {
            flag: _words(value)
            for flag, value in arguments.items()
            if flag not in NOT_RUN and value is not False and value is not None
        }
        key = tuple((flag, *words) for flag, words in sorted(flags.items()))
        found.setdefault(key, []).append(f"{family}/{name}")
    configurations = [
        Configuration(tuple(sorted(names)), {flag: words for flag, *words in key})
        for key, names in found.items()
    ]
    return sorted(configurations, key=lambda each: each.names), sorted(others)


def as_text(configurations: list[Configuration], others: list[str], commit: str) -> str:
    """Return the text of `configurations.txt`."""
    lines = _HEAD.format(folder=FOLDER, tag=TAG, commit=commit).strip().splitlines()
    lines += ["", "other programs:", *(f"  {name}" for name in others)]
    for configuration in configurations:
        words = [shlex.join([flag, *given]) for flag, given in configuration.flags.items()]
        lines += ["", *configuration.names]
        options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        text = textwrap.fill(" ".join(words), 98, **options)
        lines.append(textwrap.indent(text, "  "))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write `configurations.txt`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of Megatron-LM")
    checkout = parser.parse_args().checkout
    git = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    FILE.write_text(as_text(*read(checkout), commit))


if __name__ == "__main__":
    main()
