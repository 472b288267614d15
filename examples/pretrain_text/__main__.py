"""The command line: text, dataset, first run, resumed run, summary."""

import argparse
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from examples.pretrain_text import dataset as datasets
from examples.pretrain_text.launch import RunFailedError, run, training_command
from examples.pretrain_text.report import Results, draw, show_summary
from examples.pretrain_text.settings import (
    DDP,
    Settings,
    first_run_flags,
    second_run_flags,
)
from examples.pretrain_text.text import TextError, collect
from examples.pretrain_text.training_log import compare_resumed
from megatron_fsdp_v2._picture import picture_style


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of the command line.

    Returns:
        The parser.
    """
    parser = argparse.ArgumentParser(
        prog="python -m examples.pretrain_text",
        description="Pretrain a small GPT on real text, save, resume, and show the result.",
    )
    parser.add_argument(
        "--strategy",
        default="optim_grads_params",
        help=f"sharding strategy; {DDP} runs Megatron's own DDP for comparison",
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks")
    parser.add_argument("--iters", type=int, default=120, help="iterations of the first run")
    parser.add_argument("--out", type=Path, default=Path("out/pretrain"), help="where files go")
    parser.add_argument("--text", help="file or folder of text; default: the Python library")
    return parser


def read_settings(args: argparse.Namespace, num_gpus: int) -> Settings:
    """Checks the command line against the machine.

    Args:
        args: The parsed command line.
        num_gpus: CUDA devices of this machine; 0 means a CPU rehearsal.

    Returns:
        The settings.

    Raises:
        ValueError: The settings are invalid, or need more GPUs than the machine has.
    """
    if 0 < num_gpus < args.ranks:
        raise ValueError(
            f"RANKS={args.ranks}, but this machine has {num_gpus} GPUs and every rank needs one: "
            f"use at most {num_gpus} ranks, or hide the GPUs with CUDA_VISIBLE_DEVICES= to "
            "rehearse on the CPU."
        )
    return Settings(args.strategy, args.ranks, args.iters, args.out.resolve(), num_gpus == 0)


def prepare(console: Console, settings: Settings, text: str | None) -> datasets.Dataset:
    """Collects the text and makes the dataset.

    Args:
        console: Output for progress.
        settings: The run.
        text: The user's choice of text, or None.

    Returns:
        The dataset.
    """
    console.print("step 1 of 3: text")
    corpus = collect(text)
    dataset = datasets.build(corpus.documents, settings.out / "data")
    skipped = f", {corpus.num_skipped} files skipped" if corpus.num_skipped else ""
    console.print(
        f"  {corpus.source}, {corpus.nbytes / 1e6:.1f} MB in {corpus.num_files} files{skipped}"
    )
    console.print(
        f"  {dataset.num_tokens:,} tokens {'written' if dataset.is_new else 'found'} "
        f"at {dataset.prefix}"
    )
    return dataset


def train(console: Console, settings: Settings, dataset: datasets.Dataset) -> Results:
    """Runs both trainings and compares them.

    Args:
        console: Output for progress.
        settings: The run.
        dataset: The dataset to train on.

    Returns:
        The results.
    """
    # Checkpoints of an earlier run would be mistaken for checkpoints of this run.
    shutil.rmtree(settings.checkpoints, ignore_errors=True)
    console.print(f"step 2 of 3: train {settings.iters} iterations, save after {settings.half_way}")
    first = run(
        console,
        "first run",
        training_command(settings.ranks, first_run_flags(settings, dataset)),
        settings.first_log,
        range(1, settings.iters + 1),
        settings.ranks,
    )
    expected = range(settings.half_way + 1, settings.resumed_until + 1)
    console.print(f"step 3 of 3: resume, and repeat iterations up to {settings.resumed_until}")
    resumed = run(
        console,
        "resumed run",
        training_command(settings.ranks, second_run_flags(settings, dataset)),
        settings.out / "resumed_run.log",
        expected,
        settings.ranks,
    )
    proof = compare_resumed(first.losses, resumed.losses, expected)
    picture = settings.out / "loss.png"
    with picture_style():
        draw(settings, first.losses, resumed.losses, picture)
    return Results(settings, first, resumed, proof, picture)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example.

    Args:
        argv: The arguments; those of the process if None.

    Returns:
        0 if both runs succeeded and the resumed run repeated the first run.
    """
    args = build_parser().parse_args(argv)
    # Paths are neither wrapped nor parsed as markup.
    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        settings = read_settings(args, torch.cuda.device_count())
        results = train(console, settings, prepare(console, settings, args.text))
    except RunFailedError as failure:
        sys.stderr.write("\n".join([*failure.last_lines, "", str(failure), ""]))
        return 1
    except (TextError, ValueError) as error:
        sys.stderr.write(f"pretrain: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("pretrain: interrupted\n")
        return 130
    show_summary(console, results)
    return 0 if results.proof.holds else 1


if __name__ == "__main__":
    # By default SIGTERM would end this process at once and leave its children running.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    sys.exit(main())
