"""Times this package beside Megatron's own data parallelism, in Megatron's training loop.

    python -m benchmarks.megatron
    python -m benchmarks.megatron --rounds 1 --iters 20

Every run is a command line of Megatron's, in separate processes; runs take turns. The time of an
iteration is the median of those that Megatron logs, without the first ones; a row is the median of
its runs. Losses must agree with those of the row that it is compared with.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import report

MODEL = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --transformer-impl local "
    "--attention-dropout 0 --hidden-dropout 0 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 256 --lr 1e-3 --lr-decay-style constant --eval-interval 100000 --eval-iters 0 "
    "--log-interval 1 --overlap-grad-reduce"
)
OURS = (
    "--use-megatron-fsdp --use-fsdp-fully-shard-api --ckpt-format fsdp_dtensor "
    "--data-parallel-sharding-strategy"
)
DDP, SHARDED = "Megatron's DDP", "Megatron's distributed optimizer"
ROWS = {
    DDP: ("", DDP),
    "ours, no_shard": (f"{OURS} no_shard", DDP),
    SHARDED: ("--use-distributed-optimizer", SHARDED),
    "ours, optim": (f"{OURS} optim", SHARDED),
    "ours, optim_grads": (f"{OURS} optim_grads", SHARDED),
    "ours, optim_grads_params": (f"{OURS} optim_grads_params", SHARDED),
}
"""Flags of each row, and the row to compare it with."""
WARMUP = 10
"""First iterations of a run, whose times are ignored."""
TOLERANCE = 2e-6
"""Relative tolerance of losses, which Megatron prints with seven digits."""
_ELAPSED = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")
_LOSS = re.compile(r"lm loss: ([0-9.E+-]+)")


@dataclass(frozen=True)
class Run:
    """Values that one run logged.

    Attributes:
        iteration_ms: Median time of an iteration.
        losses: Loss of every iteration.
    """

    iteration_ms: float
    losses: Sequence[float]


def main(words: list[str] | None = None) -> None:
    """Run the command line; print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.megatron",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each row")
    parser.add_argument("--iters", type=int, default=60, help=f"of a run, more than {WARMUP}")
    parser.add_argument("--rows", nargs="+", metavar="WORD", help="those with one of these")
    parser.add_argument("--flags", default="", help="more flags for every row of ours")
    args = parser.parse_args(words)
    if args.iters <= WARMUP:
        parser.error(f"--iters must be more than {WARMUP}, got {args.iters}")
    chosen = [name for name in ROWS if _is_chosen(name, args.rows)]
    found: dict[str, list[Run]] = {name: [] for name in chosen}
    for _ in range(args.rounds):
        for name in chosen:
            found[name].append(_run(name, args))
    report.show([_table(found)])


def _is_chosen(name: str, words: list[str] | None) -> bool:
    return not words or any(word in name for word in words)


def _run(name: str, args: argparse.Namespace) -> Run:
    flags, peer = ROWS[name]
    more = args.flags if peer != name else ""
    steps = f"--global-batch-size {2 * args.ranks} --train-iters {args.iters}"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    script = ["-m", "megatron_fsdp_v2_mcore.pretrain_gpt", "--cpu-rehearsal"]
    typed = f"{MODEL} {steps} {flags} {more}".split()
    done = subprocess.run(
        [sys.executable, *launcher, *script, *typed], capture_output=True, text=True, check=False
    )
    times = [float(text) for text in _ELAPSED.findall(done.stdout)][WARMUP:]
    if done.returncode or not times:
        raise SystemExit(f"{name} failed with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return Run(statistics.median(times), [float(text) for text in _LOSS.findall(done.stdout)])


def _table(found: dict[str, list[Run]]) -> report.Table:
    medians = {n: statistics.median(run.iteration_ms for run in runs) for n, runs in found.items()}
    rows = []
    for name, runs in found.items():
        peer = ROWS[name][1]
        over = f"{medians[name] / medians[peer]:.2f}" if peer in found and peer != name else "-"
        times = [run.iteration_ms for run in runs]
        spread = f"{min(times):.1f} to {max(times):.1f}"
        rows.append(
            (name, f"{medians[name]:.1f}", spread, over, _losses(runs, found.get(peer, runs)))
        )
    head = ("", "iteration ms", "runs", "over Megatron's", "losses")
    return report.Table("Megatron's training loop: 8 layers x 256, fp32", head, rows)


def _losses(mine: Sequence[Run], theirs: Sequence[Run]) -> str:
    """Return the last column of the table: whether the printed losses agree."""
    pairs = zip(mine[0].losses, theirs[0].losses, strict=True)
    difference = max(abs(a - b) / b for a, b in pairs)
    return "agree" if difference < TOLERANCE else f"DIFFER by {difference:.0e}"


if __name__ == "__main__":
    main()
