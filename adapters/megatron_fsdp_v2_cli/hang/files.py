"""The files of `watch_collectives`: what every rank communicated, and where it was."""

from __future__ import annotations

import array
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Call(NamedTuple):
    """A collective that a rank issued.

    Attributes:
        name: Name of the communicated buffers, such as `layers.3/0`.
        kind: Its kind.
        nbytes: Bytes of the larger one of its tensors.
        passed: Number of the pass, and its kind.
        place: Index of its time in `RankReport.times`.
    """

    name: str
    kind: str
    nbytes: int
    passed: tuple[int, str]
    place: int


@dataclass(frozen=True, eq=False)
class Calls:
    """The latest collectives of the ranks that issued the same ones.

    Attributes:
        ranks: Global ranks of every process group, by its name.
        of_groups: Collectives of every process group, by number.
        latest: The latest one; None if there is none.
    """

    ranks: Mapping[str, Sequence[int]]
    of_groups: Mapping[str, Mapping[int, Call]]
    latest: Call | None


@dataclass(frozen=True, eq=False)
class RankReport:
    """The files of one rank; see `megatron_fsdp_v2.diagnostics.watch_collectives`.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks of the job.
        calls: Its collectives; one object for all ranks that issued the same ones.
        times: Seconds since the epoch of its collectives.
        reason: Why it wrote a report; None if it wrote none.
        stack: Where the main thread was then, the innermost call last.
    """

    rank: int
    world_size: int
    calls: Calls
    times: Sequence[float]
    reason: str | None
    stack: Sequence[str]


def read(paths: Sequence[Path]) -> list[RankReport]:
    """Read the files, or all files of folders.

    Raises:
        ValueError: There is no file, a file is no record of a rank, or two are of one rank.
        OSError: A file cannot be read.
    """
    found = [file for path in paths for file in (path.glob("rank_*") if path.is_dir() else [path])]
    # A rank may have written a report, too.
    files = dict.fromkeys(file.with_suffix(".ring") for file in found)
    if not files:
        raise ValueError(
            f"{', '.join(map(str, paths))} has no file rank_<rank>.ring; call "
            "megatron_fsdp_v2.diagnostics.watch_collectives on every rank, or train Megatron with "
            "--fsdp-hang-reports FOLDER"
        )
    known: dict[tuple[bytes, ...], Calls] = {}
    reports = [_report(file, known) for file in files]
    if len({report.rank for report in reports}) < len(reports):
        raise ValueError("two of the files are of the same rank; give those of one run")
    return sorted(reports, key=lambda report: report.rank)


def _report(path: Path, known: dict[tuple[bytes, ...], Calls]) -> RankReport:
    reason, stack = None, []
    written, copied = path.with_suffix(".json"), path.with_suffix(".reported")
    data = (copied if copied.exists() and written.exists() else path).read_bytes()
    try:
        header = json.loads(data.partition(b"\n")[0])
        begin, end = header["begin"], header["end"]
        # Each entry is four integers and a time, of which the first two are half as wide.
        entries = array.array("Q", data[begin:end])
        columns = *(entries[place::4].tobytes() for place in range(3)), data[end:]
        if columns not in known:
            known[columns] = _calls(header["entry"], data[begin:end], data[end:])
        times = array.array("d", entries[3::4].tobytes())
        if written.exists():
            report = json.loads(written.read_text())
            reason, stack = report["reason"], report["stack"]
        rank, world_size = header["rank"], header["world_size"]
        return RankReport(rank, world_size, known[columns], times, reason, stack)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise ValueError(f"{path} is no record of a rank: {error!r}") from None


def _calls(entry: str, entries: bytes, descriptions: bytes) -> Calls:
    """Decode entries."""
    lines = [json.loads(line) for line in descriptions.splitlines()]
    known = [line["entry"] for line in lines if "entry" in line]
    of_groups: dict[str, dict[int, Call]] = {}
    latest: tuple[float, Call] | None = None
    for place, fields in enumerate(struct.iter_unpack(entry, entries)):
        number, passed, description, nbytes, at = fields
        if not number:
            break
        group, name, kind, pass_kind = known[description]
        call = Call(name, kind, nbytes, (passed, pass_kind), place)
        of_groups.setdefault(group, {})[number] = call
        if latest is None or at >= latest[0]:
            latest = at, call
    ranks = {line["group"]: line["ranks"] for line in lines if "group" in line}
    return Calls(ranks, of_groups, None if latest is None else latest[1])
