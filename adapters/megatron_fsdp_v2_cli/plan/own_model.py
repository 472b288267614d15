"""Models to plan that a user's function builds, on the meta device."""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

_OTHERS = re.compile(rf"site-packages|^<frozen|^{re.escape(__file__)}")
"""Files that are not the user's code."""


def model_arguments(given: Sequence[str]) -> dict[str, Any]:
    """Parse arguments of a function from a command line.

    Args:
        given: Words of the form `name=value`. A value that is a Python literal (`12`, `1e-5`,
            `True`, `None`, `[4, 8]`, `"8"`) is evaluated; any other value is a string.

    Returns:
        Values by name.

    Raises:
        ValueError: A word has another form, or a name is given twice.
    """
    found: dict[str, Any] = {}
    for word in given:
        name, joined, text = word.partition("=")
        name = name.strip()
        if not joined or not name.isidentifier():
            raise ValueError(f"--model-arg takes name=value, got {word!r}")
        if name in found:
            raise ValueError(f"--model-arg {name} was given twice")
        try:
            found[name] = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            found[name] = text
    return found


def build_on_meta(
    target: str, patterns: Sequence[str], arguments: Mapping[str, Any] | None = None
) -> tuple[nn.Module, list[nn.Module] | None]:
    """Call a user's function with the meta device as default.

    Args:
        target: `module:function`. It returns the model, or the model and its units.
        patterns: Patterns of names or classes of units; they replace the returned units.
        arguments: Arguments of the function, by name.

    Returns:
        The model and its units; None for the default ones.

    Raises:
        ValueError: The function does not exist, takes other arguments or returns no model, or a
            pattern matches no module.
    """
    function, arguments = _function(target), dict(arguments or {})
    _check_arguments(target, function, arguments)
    with _errors_of(target), torch.device("meta"):
        built = function(**arguments)
    units: list[nn.Module] | None = None
    if isinstance(built, tuple) and len(built) == 2:
        built, units = built[0], list(built[1])
    if not isinstance(built, nn.Module):
        raise ValueError(
            f"{target} must return an nn.Module, or a pair of it and its units; got "
            f"{type(built).__name__}"
        )
    if patterns:
        units = list(_matching(built, patterns))
    return built, units


def _check_arguments(
    target: str, function: Callable[..., Any], arguments: Mapping[str, Any]
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # Written in C without a signature; the call itself checks its arguments.
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"--model {target}{signature}: {error}; --model-arg NAME=VALUE gives an argument by "
            "name"
        ) from None


@contextlib.contextmanager
def _errors_of(target: str) -> Iterator[None]:
    """Convert an error of the user's code to a sentence with its line.

    Raises:
        ValueError: The code raised an error.
    """
    try:
        yield
    except ImportError as error:
        raise ValueError(f"--model {target}: {error}") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [
            f"{at.filename}, line {at.lineno}" for at in frames if not _OTHERS.search(at.filename)
        ]
        where = f" ({own[-1]})" if own else ""
        raise ValueError(f"--model {target}: {type(error).__name__}: {error}{where}") from error


def _function(target: str) -> Callable[..., Any]:
    module_name, _, name = target.partition(":")
    if not name or not all(map(str.isidentifier, module_name.split("."))):
        raise ValueError(
            f"--model takes module:function, such as models.llama:build, got {target!r}"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with _errors_of(target):
        module = importlib.import_module(module_name)
    function: Any = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"--model {target}: {module_name} has no function {name}")
    return function  # type: ignore[no-any-return]


def _matching(model: nn.Module, patterns: Sequence[str]) -> Iterator[nn.Module]:
    """Modules whose name or class matches, inner ones first."""
    unused = set(patterns)
    found = []
    for name, module in model.named_modules():
        matching = {
            pattern
            for pattern in patterns
            if name and (fnmatch.fnmatch(name, pattern) or type(module).__name__ == pattern)
        }
        unused -= matching
        if matching:
            found.append(module)
    if unused:
        raise ValueError(
            f"no module's name or class matches {', '.join(sorted(unused))}; names look like "
            f"{', '.join(name for name, _ in list(model.named_modules())[1:4])}"
        )
    yield from reversed(found)
