"""The work of `megatron-fsdp-v2 prove`: check the flags, train on both sides, and compare."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

import torch

from megatron_cpu_rehearsal.flags import with_cpu_flags
from megatron_cpu_rehearsal.te import load
from megatron_fsdp_v2_cli.progress import progress
from megatron_fsdp_v2_mcore.flags.arguments import supported_on_cpu
from megatron_fsdp_v2_mcore.prove import report, sides
from megatron_fsdp_v2_mcore.prove.page import html_page
from megatron_fsdp_v2_mcore.prove.preflight import preflight
from megatron_fsdp_v2_mcore.prove.proof import TIMEOUT_S, Prover, num_trainings
from megatron_fsdp_v2_mcore.prove.ranks import Pool, RankError, pools
from megatron_fsdp_v2_mcore.prove.rejection import rejection
from megatron_fsdp_v2_mcore.prove.shrink import (
    MOST_RANKS,
    Flags,
    as_words,
    covering_runs,
    parse_words,
    ranks_of,
)
from megatron_fsdp_v2_mcore.prove.source import Source, read_script, read_yaml
from megatron_fsdp_v2_trace.drawing import library
from megatron_fsdp_v2_trace.files import check_writable


def run(args: argparse.Namespace) -> int:
    """Prove the configuration, and print the report; return the exit status."""
    start = time.monotonic()
    source = _source(args)
    _check_installed()
    # Minutes later, a missing folder or library would cost the results.
    for path in (args.html, args.json):
        if path not in (None, "-"):
            check_writable(path)
    if args.html is not None:
        library("plotly")
    flags = parse_words(source.words)
    ranks = args.ranks or source.num_ranks
    warnings = list(preflight(flags, source.environment, ranks))
    most_ranks = args.local_ranks or MOST_RANKS
    if args.device == "cuda":
        most_ranks = min(most_ranks, torch.cuda.device_count())
        if most_ranks < 2:
            raise ValueError("--device cuda needs two GPUs; leave it out to prove on the CPU")
    runs = covering_runs(flags, most_ranks)
    impl = sides.layers_of(flags)[0] if args.device == "cpu" else None
    if impl and sides.needs_transformer_engine(flags) and (why_not := load.why_not_installed()):
        raise ValueError(f"FP8 and FP4 cannot be proven here: {why_not}")
    total = 1 + sum(map(num_trainings, runs))
    with (
        progress("prove", unit=" trainings") as advance,
        pools(impl, sides.recipe_of(flags, impl)) as of_size,
    ):
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            advance(done, total)

        try:
            _check(flags, ranks, of_size(1), impl)
        except RankError as error:
            raise ValueError(f"the flags cannot be checked here: {error}") from error
        count()
        prover = Prover(of_size, impl, advance=count)
        results = [prover.prove(run) for run in runs]
    found = report.ProofReport(flags, impl, warnings, results, time.monotonic() - start)
    data = json.dumps(report.as_dict(found), indent=2) + "\n"
    # Printed first: a full disk would cost the results as well.
    if args.json == "-":
        sys.stdout.write(data)
    else:
        sys.stdout.writelines(f"{line}\n" for line in report.lines(found))
    if args.json not in (None, "-"):
        Path(args.json).write_text(data)
    if args.html is not None:
        args.html.write_text(html_page(found))
    return found.exit_code


def _check_installed() -> None:
    """Check that the ranks, which import Megatron, will find it.

    Raises:
        ImportError: They will not.
    """
    for name in ("megatron.core", "megatron.training"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"there is no {name}", name=name)


def _check(flags: Flags, num_ranks: int | None, pool: Pool, impl: str | None) -> None:
    """Let Megatron and this package check the flags at full size.

    Args:
        flags: The job's flags.
        num_ranks: Number of ranks of the job.
        pool: The pool of one rank.
        impl: Layers of the rehearsal; None without a rehearsal.

    Raises:
        ValueError: One of them rejects the flags.
    """
    typed = sides.user_flags(flags)
    words = as_words(sides.on_cpu(typed, impl) if impl else typed)
    if impl:
        words = tuple(with_cpu_flags(words, supported_on_cpu(words)))
    if num_ranks is None:
        num_ranks = ranks_of(flags)
    (why_not,) = pool.run(rejection, words, as_words(typed), num_ranks, timeout_s=TIMEOUT_S)
    if why_not:
        raise ValueError(f"on {num_ranks} ranks: {why_not}")


def _source(args: argparse.Namespace) -> Source:
    given = [name for name in ("flags", "script", "yaml") if getattr(args, name)]
    if len(given) != 1:
        raise ValueError(
            "give the flags of the job after --, or a script with --script, or a file with --yaml"
        )
    if args.script:
        return read_script(args.script)
    return read_yaml(args.yaml) if args.yaml else Source(tuple(args.flags))
