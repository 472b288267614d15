"""Which rank of a training that hangs differs from the others, and at which unit.

Ranks of a process group issue the same collectives in the same order. So the cause of a hang is a
rank that issued another one at some number, one that has issued fewer, or one that wrote no file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OWN_FRAMES = 3


@dataclass(frozen=True)
class RankReport:
    """The file of one rank; see `megatron_fsdp_v2.diagnostics.watch_collectives`.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks of the job.
        reason: Why it was written.
        stack: Where the main thread was, the innermost call last.
        ranks: Global ranks of every process group, by its name.
        entries: Collectives of every process group, by number.
    """

    rank: int
    world_size: int
    reason: str
    stack: Sequence[str]
    ranks: Mapping[str, Sequence[int]]
    entries: Mapping[str, Mapping[int, Mapping[str, Any]]]


def read(paths: Sequence[Path]) -> list[RankReport]:
    """Read the files, or all files of folders.

    Raises:
        ValueError: There is no file, a file is no report, or two are of one rank.
        OSError: A file cannot be read.
    """
    files = [
        file
        for path in paths
        for file in (sorted(path.glob("rank_*.json")) if path.is_dir() else [path])
    ]
    if not files:
        raise ValueError(
            f"{', '.join(map(str, paths))} has no file rank_<rank>.json; call "
            "megatron_fsdp_v2.diagnostics.watch_collectives on every rank, or train Megatron with "
            "--fsdp-hang-reports FOLDER"
        )
    reports = [_report(file) for file in files]
    if len({report.rank for report in reports}) < len(reports):
        raise ValueError("two of the files are of the same rank; give those of one run")
    return sorted(reports, key=lambda report: report.rank)


def _report(path: Path) -> RankReport:
    try:
        data = json.loads(path.read_text())
        entries: dict[str, dict[int, Mapping[str, Any]]] = {}
        for entry in data["entries"]:
            entries.setdefault(entry["group"], {})[entry["number"]] = entry
        return RankReport(
            data["rank"], data["world_size"], data["reason"], data["stack"], data["ranks"], entries
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no report of a rank: {error!r}") from None


def lines(reports: Sequence[RankReport]) -> Iterator[str]:
    """Yield what is wrong, in a sentence, and what every rank did last."""
    yield _verdict(reports)
    yield ""
    for report in reports:
        latest = max(
            (entry for numbered in report.entries.values() for entry in numbered.values()),
            key=lambda entry: float(entry["at"]),
            default=None,
        )
        did = "issued no collective" if latest is None else f"issued last: {_described(latest)}"
        yield f"rank {report.rank} ({report.reason}) {did}"
        for frame in report.stack[-_OWN_FRAMES:]:
            yield f"    {frame}"


def _verdict(reports: Sequence[RankReport]) -> str:
    by_rank = {report.rank: report for report in reports}
    absent = sorted(set(range(reports[0].world_size)) - by_rank.keys())
    found = [
        verdict
        for group in dict.fromkeys(name for report in reports for name in report.entries)
        if (verdict := _of_group(group, by_rank)) is not None
    ]
    gone = ""
    if absent:
        gone = f"{listed(absent)} wrote no file, and {'has' if len(absent) == 1 else 'have'} ended"
    if found:
        _, sentence = min(found)
        return f"{sentence} {gone}." if gone else sentence
    if gone:
        return f"{gone}: the first error in the logs of {listed(absent)} is the cause."
    return (
        "No rank differs: all have issued the same collectives. The last one is slow, or all ranks "
        "wait for something else; the stacks below say where they are."
    )


type _Entries = Mapping[int, Mapping[int, Mapping[str, Any]]]
"""Collectives of one process group, by rank and number."""


def _of_group(group: str, by_rank: Mapping[int, RankReport]) -> tuple[float, str] | None:
    """Return when and how ranks of a process group first differ; None if they do not."""
    members = next(r.ranks[group] for r in by_rank.values() if group in r.ranks)
    entries = {rank: by_rank[rank].entries.get(group, {}) for rank in members if rank in by_rank}
    return _other_collectives(group, entries) or _fewer_collectives(group, entries, by_rank)


def _other_collectives(group: str, entries: _Entries) -> tuple[float, str] | None:
    """Return when and how ranks first issued different collectives at one number."""
    for number in sorted({number for numbered in entries.values() for number in numbered}):
        there = {rank: numbered[number] for rank, numbered in entries.items() if number in numbered}
        kinds = {rank: (e["kind"], e["name"], e["nbytes"]) for rank, e in there.items()}
        usual, times = Counter(kinds.values()).most_common(1)[0]
        others = [rank for rank, kind in kinds.items() if kind != usual]
        if not others:
            continue
        same = [rank for rank in kinds if rank not in others]
        verdict = f"{listed(others)} ran other units than the others."
        if times * 2 == len(kinds):
            verdict = "Ranks run different units."
        return min(float(entry["at"]) for entry in there.values()), (
            f"{listed(others)} issued {_described(there[others[0]])}, where {listed(same)} issued "
            f"{_described(there[same[0]])} (number {number} of process group {group}). {verdict}"
        )
    return None


def _fewer_collectives(
    group: str, entries: _Entries, by_rank: Mapping[int, RankReport]
) -> tuple[float, str] | None:
    """Return when and how a rank stayed behind the others."""
    last = {rank: max(numbered, default=0) for rank, numbered in entries.items()}
    most = max(last.values())
    ahead = [rank for rank, number in last.items() if number == most]
    if len(ahead) == len(last):
        return None
    first = min(last, key=last.__getitem__)
    waited = entries[ahead[0]].get(last[first] + 1)
    when = 0.0 if waited is None else float(waited["at"])
    what = "a later collective" if waited is None else _described(waited)
    where = next(reversed(by_rank[first].stack), "unknown")
    return when, (
        f"{listed([first])} has not issued {what}, in which {listed(ahead)} "
        f"{'waits' if len(ahead) == 1 else 'wait'} (number {last[first] + 1} of process group "
        f"{group}). It is at {where}."
    )


def _described(entry: Mapping[str, Any]) -> str:
    number, kind = entry["passed"]
    unit = str(entry["name"]).rpartition("/")[0] or entry["name"]
    what = str(entry["kind"]).replace("_", "-")
    place = f", pass {number}" + (f" ({kind})" if kind else "")
    return f"the {what} of {unit or 'the root'} ({entry['nbytes']:,} bytes{place})"


def listed(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0, 1 and 5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
