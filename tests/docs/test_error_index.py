"""The page of errors has every message of the sources."""

from __future__ import annotations

import ast

import pytest

from tests.pages import check_page
from tools.error_index import messages, page

SOURCE = """
def check(size, names):
    if not names:
        text = f"{type(size).__name__} is not "
        raise ValueError(text + "a size")
    raise torch.nope.NoError(f"{names[0]} is 'taken' by {_first(size)}")

def _first(size):
    return f"the first of {size.value}"
"""


def test_messages_are_templates_of_the_raised_text() -> None:
    assert set(messages(ast.parse(SOURCE))) == {
        ("ValueError", "{type} is not a size"),
        ("NoError", "{names} is 'taken' by the first of {value}"),
    }


def test_page_lists_every_error_message(request: pytest.FixtureRequest) -> None:
    check_page(request, "docs/errors.md", page())
