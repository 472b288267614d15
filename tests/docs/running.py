"""Execution of python blocks on existing ranks."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from pathlib import Path
from typing import Any

from tests.docs.given import prepare


def load(name: str) -> Any:
    """Return the function that `module:function` names.

    Raises:
        ValueError: The function does not exist.
    """
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r} names no function: {error}") from None


def run_page(blocks: list[tuple[str, int, str, str]], folder: str) -> None:
    """Run the python blocks of one page on this rank, in their order on the page.

    Blocks share a namespace, except blocks with a `given` comment.

    Args:
        blocks: Page, line, code, and the function of the `given` comment, or "".
        folder: Working folder of the blocks, for all ranks.
    """
    names: dict[str, Any] = {}
    before = Path.cwd()
    os.chdir(folder)
    try:
        for page, line, code, given in blocks:
            space = dict(load(given)()) if given else names
            try:
                prepare(code, space)
                # With empty lines before the code, line numbers in errors are those of the page.
                compiled = compile("\n" * (line - 1) + code, page, "exec")
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compiled, space)
            except Exception as error:
                raise AssertionError(f"{page}:{line}: the example fails") from error
    finally:
        os.chdir(before)
