"""Every optimizer class of several packages matches its unsharded run or is rejected by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib.metadata import version

import pytest

from tests.clients.optimizers import PACKAGES, USAGES, Outcome, Usage, classes, outcome
from tests.clients.table import pinned
from tests.pages import cells_of, check_part, table
from tests.processes import ROOT
from tests.ranks import RankPools, rank_pools

PAGE = "docs/optimizers.md"
PART = "optimizers"
CASES = [f"{module}.{name}" for module in PACKAGES for name in classes(module)]
_HEAD = ("module", "version", "classes", "sharded")
_BEGIN, _END = f"<!-- {PART}: begin -->\n", f"\n<!-- {PART}: end -->\n"

type Rows = dict[str, str]


def _page_rows() -> Rows:
    """Return the text of the page for each class."""
    part = (ROOT / PAGE).read_text().partition(_BEGIN)[2].partition(_END)[0]
    rows: Rows = {}
    for line in part.splitlines()[2:]:
        module, _, names, text = cells_of(line)
        rows.update((f"{module.strip('`')}.{name}", text) for name in names.split(", "))
    return rows


def _text(rows: Mapping[str, str]) -> str:
    lines = []
    for module, package in PACKAGES.items():
        names: dict[str, list[str]] = defaultdict(list)
        for name in classes(module):
            names[rows.get(f"{module}.{name}", "unknown")].append(name)
        installed = version(package).partition("+")[0]
        for text in sorted(names, key=lambda text: (not text.startswith("right"), text)):
            lines.append((f"`{module}`", installed, ", ".join(names[text]), text))
    return table(_HEAD, lines)


@pytest.fixture(scope="module")
def clients() -> Iterator[RankPools]:
    """Yield rank pools by world size, forked from a process that has imported the packages."""
    with rank_pools(["tests.clients.preloaded_optimizers"]) as pools:
        yield pools


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[Rows]:
    """Yield the rows of the page; `--write-docs` stores the results of the tests there."""
    rows = _page_rows() if (ROOT / PAGE).read_text().count(_BEGIN) else {}
    yield rows
    if request.config.getoption("--write-docs"):
        check_part(request, PAGE, PART, _text(rows))


def _is_named(qualified: str, text: str) -> bool:
    """Return whether an error is this package's, which names the optimizer."""
    name = qualified.rpartition(".")[2]
    return f".{name} cannot step sharded parameters" in text


def _row(qualified: str, found: Outcome) -> str:
    ranks = USAGES.get(qualified, Usage()).ranks
    of_few = "" if len(ranks) > 1 else " on 2 ranks; rounding of a mean over 3 moves it far"
    return found.row + of_few


@pytest.mark.functional
@pytest.mark.parametrize("qualified", CASES)
def test_optimizer_matches_unsharded_or_is_rejected_by_name(
    request: pytest.FixtureRequest, clients: RankPools, rows: Rows, qualified: str
) -> None:
    found: list[Outcome] = [
        o for n in USAGES.get(qualified, Usage()).ranks for o in clients(n).run(outcome, qualified)
    ]
    verdicts = {each.verdict for each in found}
    assert len(verdicts) == 1 and "wrong" not in verdicts, found
    if verdicts == {"rejected"}:
        assert all(each.step == 0 and _is_named(qualified, each.text) for each in found), found
    if request.config.getoption("--write-docs"):
        rows[qualified] = _row(qualified, found[0])
    assert {_row(qualified, each) for each in found} == {rows.get(qualified)}, (
        "run pytest tests/clients/test_optimizers.py --write-docs"
    )


def test_page_lists_every_installed_class(request: pytest.FixtureRequest, rows: Rows) -> None:
    if request.config.getoption("--write-docs"):
        pytest.skip("the table is being written")
    assert list(rows) and rows.keys() == set(CASES)
    assert (ROOT / PAGE).read_text().count(_text(rows)) == 1


def test_installed_versions_match_the_pinned_ones() -> None:
    assert {name: version(name) for name in pinned()} == pinned()
