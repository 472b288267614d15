"""Evaluates Megatron's list expressions of layers, such as `([0]*3+[1])*4`, within bounds.

Megatron checks the characters of such an expression and passes it to `eval`, which computes
`9**9**9` for hours, and `[0]*9999999999` until memory is used up.
"""

from __future__ import annotations

import ast
import re
from typing import Any

_MOST = 100_000
"""No model has so many layers."""

_MOST_CHARACTERS = 10_000


def evaluate_pattern(pattern: str) -> Any:
    """Return the value of an expression of numbers, lists, `+` and `*`.

    Raises:
        ValueError: It is something else, or its value is too large.
    """
    problem = f"{pattern[:40]!r} is no list of layers, such as [0,1,1] or ([0]*3+[1])*4"
    if re.search(r"[^,\d\[\]()+* ]", pattern) or len(pattern) > _MOST_CHARACTERS:
        raise ValueError(problem)
    try:
        return _value(ast.parse(pattern.strip(), mode="eval").body)
    # Python's parser raises MemoryError if an expression is nested too deeply.
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(problem) from error


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=elements):
            return [_value(element) for element in elements]
        case ast.Tuple(elts=elements):
            return tuple(_value(element) for element in elements)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _bounded(_value(left) + _value(right))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, other = _value(left), _value(right)
            # Before the product, which may not fit in memory.
            if _size(one) * _size(other) > _MOST:
                raise ValueError(f"a list of layers has more than {_MOST} elements")
            return one * other
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return +_value(operand)
    raise TypeError("it has another operator")


def _bounded(value: Any) -> Any:
    if _size(value) > _MOST:
        raise ValueError(f"a list of layers has more than {_MOST} elements")
    return value


def _size(value: Any) -> int:
    return value if isinstance(value, int) else len(value)
