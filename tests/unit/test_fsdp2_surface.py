"""`docs/coming_from_fsdp2.md` has a correct row for every public name of torch's FSDP2.

The tests read torch's own signatures, so that they detect additions in a new version.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import Counter

import pytest
from torch.distributed import fsdp

from megatron_fsdp_v2 import FSDPModule, fully_shard
from megatron_fsdp_v2.runtime.fsdp2 import REJECTED_METHODS
from tests.fsdp2_suite import differences as fsdp2_suite
from tests.pages import rows_of, section
from tests.upstream_suite import differences as upstream_suite

PAGE = "docs/coming_from_fsdp2.md"
STATUS = ("supported", "differs", "rejected")
ARGUMENTS = set(inspect.signature(fsdp.fully_shard).parameters)
FIELDS = {field.name for field in dataclasses.fields(fsdp.MixedPrecisionPolicy)}
METHODS = {name for name in vars(fsdp.FSDPModule) if not name.startswith("_")}
NAMES = {
    "Arguments": ARGUMENTS | FIELDS,
    "Methods": METHODS,
    "Functions and classes": set(fsdp.__all__),
}
"""Names that have a row, by heading."""


def _rows(title: str) -> dict[str, str]:
    """Return the status by name from the tables below a heading."""
    found: dict[str, str] = {}
    for cells in rows_of(section(PAGE, title)):
        if len(cells) > 2 and cells[1] in STATUS:
            names = re.findall(r"`([\w.]+)`", cells[0])
            assert names and not found.keys() & set(names), cells
            found |= dict.fromkeys(names, cells[1])
    return found


@pytest.mark.parametrize("title", NAMES)
def test_every_name_of_fsdp2_has_a_row(title: str) -> None:
    assert len(NAMES[title]) > 5
    assert NAMES[title] - _rows(title).keys() == set()


def test_every_argument_is_accepted_and_every_method_overridden() -> None:
    assert ARGUMENTS - inspect.signature(fully_shard).parameters.keys() == set()
    theirs = vars(fsdp.FSDPModule)
    assert [name for name in METHODS if getattr(FSDPModule, name) is theirs[name]] == []
    rows = _rows("Methods")
    rejected = {name for name in REJECTED_METHODS if not name.startswith("_")}
    assert {name for name, status in rows.items() if status == "rejected"} == rejected
    # Also methods of newer versions, which the installed torch lacks.
    assert {name for name in rows if not callable(getattr(FSDPModule, name, None))} == set()


def test_methods_accept_the_arguments_of_fsdp2() -> None:
    for name, method in inspect.getmembers(fsdp.FSDPModule, inspect.isfunction):
        if name.startswith("_") or name in REJECTED_METHODS:
            continue
        theirs = inspect.signature(method).parameters.values()
        ours = inspect.signature(getattr(FSDPModule, name)).parameters
        assert [p.name for p in theirs if p.name not in ours] == [], name
        for parameter in theirs:
            assert ours[parameter.name].kind == parameter.kind, f"{name}({parameter.name})"


SUITES = {
    (PAGE, "FSDP2's own tests"): (
        Counter(
            (name.partition(".py")[0].removeprefix("test_fully_shard_"), fsdp2_suite.column_of(why))
            for name, why in fsdp2_suite.expected().items()
        ),
        fsdp2_suite.REASONS,
        set().union(*fsdp2_suite.expected().values()),
    ),
    ("docs/tested.md", "Megatron-FSDP's own tests"): (
        Counter(
            (name.partition(".py")[0].removeprefix("mfsdp_v2/test_"), upstream_suite.column_of(why))
            for name, why in upstream_suite.expected().items()
        ),
        upstream_suite.REASONS,
        set(upstream_suite.expected().values()),
    ),
}
"""By page and heading: numbers of listed tests by file and column, the reasons, and those met."""


@pytest.mark.parametrize("where", SUITES)
def test_result_counts_of_their_own_tests_match_the_list_of_differences(
    where: tuple[str, str],
) -> None:
    rows = rows_of(section(*where))
    (head,) = (row for row in rows if row[0] == "file")
    lines = [row for row in rows if len(row) == len(head)]
    files = {line[0]: dict(zip(head, line, strict=True)) for line in lines[2:-1]}
    listed, _, _ = SUITES[where]
    assert {file for file, _ in listed} <= {name.strip("`") for name in files}
    columns = head[head.index("pass") + 1 :]
    for name, row in files.items():
        assert [int(row[c]) for c in columns] == [listed[name.strip("`"), c] for c in columns], name
        assert int(row["tests"]) == int(row["pass"]) + sum(int(row[c]) for c in columns), name
    numbers = [sum(int(row[column]) for row in files.values()) for column in head[1:]]
    assert lines[-1] == ("all", *map(str, numbers))


@pytest.mark.parametrize("where", SUITES)
def test_every_reason_for_a_difference_from_their_own_tests_is_on_the_page(
    where: tuple[str, str],
) -> None:
    _, reasons, met = SUITES[where]
    assert {(why.kind, why.text) for why in reasons.values()} <= set(rows_of(section(*where)))
    assert met == reasons.keys(), "reasons that are unknown or not met"
