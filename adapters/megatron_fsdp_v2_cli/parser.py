"""The parser of all commands: its errors suggest what may have been meant."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Iterator
from typing import NoReturn, override


class Parser(argparse.ArgumentParser):
    """A parser whose errors suggest what may have been meant."""

    @override
    def error(self, message: str) -> NoReturn:
        super().error(message + did_you_mean(message, _words_of(self)))


def did_you_mean(message: str, known: Iterable[str]) -> str:
    """Return the end of a parser's message: the word that was meant; empty if none is close.

    Args:
        message: A message of `argparse`.
        known: Options and choices of the parser.
    """
    found = re.search(r"invalid choice: '([^']*)'|unrecognized arguments: (\S+)", message)
    if found is None:
        return ""
    wrong = (found[1] or found[2]).partition("=")[0]
    close = difflib.get_close_matches(wrong, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _words_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options and choices of a parser, and those of its subparsers."""
    for action in parser._actions:
        yield from action.option_strings
        yield from map(str, action.choices or ())
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _words_of(below)
