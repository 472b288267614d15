"""Which rank of a training that hangs differs from the others, and at which unit.

Ranks of a process group issue the same collectives in the same order. So the cause of a hang is a
rank that issued another one at some number, one that has issued fewer, or one that has no file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from megatron_fsdp_v2_cli.hang.files import Call, Calls, RankReport

_OWN_FRAMES = 3
_MOST_PLACES = 12
"""Places that are printed."""
_MOST_RANGES = 8
"""Ranges of ranks that are printed of each."""


def lines(reports: Sequence[RankReport], *, whole: bool = False) -> Iterator[str]:
    """Yield what is wrong, in a sentence, and what ranks did last, by place.

    Args:
        reports: Those of all ranks, in the order of ranks.
        whole: Whether all places and ranks are printed, however many there are.
    """
    most_ranges = len(reports) if whole else _MOST_RANGES
    yield _verdict(reports, most_ranges)
    yield ""
    places: dict[tuple[str, ...], list[RankReport]] = {}
    for report in reports:
        did = "issued no collective"
        if report.calls.latest is not None:
            did = f"issued last: {_described(report.calls.latest)}"
        places.setdefault((did, *report.stack[-_OWN_FRAMES:]), []).append(report)
    # The cause is more likely where few ranks are.
    order = sorted(places.items(), key=lambda item: len(item[1]))
    shown = order if whole else order[:_MOST_PLACES]
    for (did, *frames), there in shown:
        yield f"{listed([report.rank for report in there], most_ranges)} {did}"
        if reason := there[0].reason:
            yield f"    rank {there[0].rank} reported: {reason}"
        for frame in frames:
            yield f"    {frame}"
    left = order[len(shown) :]
    if left:
        num_ranks = sum(len(there) for _, there in left)
        yield f"and {len(left):,} more places of {num_ranks:,} ranks; --all prints them"


def _verdict(reports: Sequence[RankReport], most_ranges: int) -> str:
    by_rank = {report.rank: report for report in reports}
    absent = sorted(set(range(reports[0].world_size)) - by_rank.keys())
    silent = [report.rank for report in reports if report.reason is None]
    found = [
        verdict
        for group in dict.fromkeys(name for report in reports for name in report.calls.of_groups)
        if (verdict := _of_group(group, by_rank, most_ranges)) is not None
    ]
    sentences = [
        min(found)[1]
        if found
        else "No rank differs: all have issued the same collectives. The last one is slow, or all "
        "ranks wait for something else; the stacks below say where they are."
    ]
    if silent and len(silent) < len(reports):
        ended = listed(silent, most_ranges)
        sentences.append(
            f"Others wrote a report and {ended} did not: if {ended} ended, the first error in the "
            f"log is the cause."
        )
    if absent:
        has = "has" if len(absent) == 1 else "have"
        sentences.append(f"{listed(absent, most_ranges)} {has} no file.")
    return " ".join(sentences)


type _Members = Mapping[Calls, Sequence[int]]
"""Ranks of a process group, ascending, by what they issued."""


def _of_group(
    group: str, by_rank: Mapping[int, RankReport], most_ranges: int
) -> tuple[float, str] | None:
    """Return when and how ranks of a process group first differ; None if they do not."""
    known = (report.calls.ranks for report in by_rank.values())
    members: dict[Calls, list[int]] = {}
    for rank in sorted(next(ranks[group] for ranks in known if group in ranks)):
        if rank in by_rank:
            members.setdefault(by_rank[rank].calls, []).append(rank)
    return _other_collectives(group, members, by_rank, most_ranges) or _fewer_collectives(
        group, members, by_rank, most_ranges
    )


def _other_collectives(
    group: str, members: _Members, by_rank: Mapping[int, RankReport], most_ranges: int
) -> tuple[float, str] | None:
    """Return when and how ranks first issued different collectives at one number."""
    issued = {calls: calls.of_groups.get(group, {}) for calls in members}
    for number in sorted(set[int]().union(*issued.values())):
        there = {
            calls: numbered[number] for calls, numbered in issued.items() if number in numbered
        }
        ranks_of: dict[tuple[str, str, int], list[int]] = {}
        for calls, call in there.items():
            ranks_of.setdefault((call.kind, call.name, call.nbytes), []).extend(members[calls])
        if len(ranks_of) == 1:
            continue
        same = max(ranks_of.values(), key=len)
        others = sorted(rank for ranks in ranks_of.values() if ranks is not same for rank in ranks)
        verdict = f"{listed(others, most_ranges)} ran other units than the others."
        if len(same) == len(others):
            verdict = "Ranks run different units."
        first, usual = (there[by_rank[ranks[0]].calls] for ranks in (others, same))
        when = min(
            by_rank[rank].times[c.place] for calls, c in there.items() for rank in members[calls]
        )
        return when, (
            f"{listed(others, most_ranges)} issued {_described(first)}, where "
            f"{listed(sorted(same), most_ranges)} issued {_described(usual)} (number {number} of "
            f"process group {group}). {verdict}"
        )
    return None


def _fewer_collectives(
    group: str, members: _Members, by_rank: Mapping[int, RankReport], most_ranges: int
) -> tuple[float, str] | None:
    """Return when and how a rank stayed behind the others."""
    last = {calls: max(calls.of_groups.get(group, {}), default=0) for calls in members}
    most, least = max(last.values()), min(last.values())
    if most == least:
        return None
    ahead = sorted(rank for calls in members if last[calls] == most for rank in members[calls])
    behind = sorted(rank for calls in members if last[calls] == least for rank in members[calls])
    report = by_rank[ahead[0]]
    waited = report.calls.of_groups[group].get(least + 1)
    when = 0.0 if waited is None else report.times[waited.place]
    what = "a later collective" if waited is None else _described(waited)
    where = next(reversed(by_rank[behind[0]].stack), "")
    return when, (
        f"{listed(behind, most_ranges)} {'has' if len(behind) == 1 else 'have'} not issued {what}, "
        f"in which {listed(ahead, most_ranges)} {'waits' if len(ahead) == 1 else 'wait'} (number "
        f"{least + 1} of process group {group})."
        + (f" {listed(behind[:1], 1)} is at {where}." if where else "")
    )


def _described(call: Call) -> str:
    number, kind = call.passed
    unit = call.name.rpartition("/")[0] or call.name
    what = call.kind.replace("_", "-")
    place = f", pass {number}" + (f" ({kind})" if kind else "")
    return f"the {what} of {unit or 'the root'} ({call.nbytes:,} bytes{place})"


def listed(ranks: Sequence[int], most: int) -> str:
    """Return `rank 3`, or `ranks 0-2, 5 and 7`.

    Args:
        ranks: Ascending.
        most: Number of ranks or ranges to list; the number of other ranks stands behind them.
    """
    found: list[str] = []
    num_listed = 0
    for _, numbered in itertools.groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in numbered]
        parts = [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
        if len(found) + len(parts) > most:
            break
        found += parts
        num_listed += len(run)
    if num_listed < len(ranks):
        found.append(f"{len(ranks) - num_listed:,} others")
    first, last = ", ".join(found[:-1]), found[-1]
    return f"rank{'s' if len(ranks) > 1 else ''} {f'{first} and {last}' if first else last}"
