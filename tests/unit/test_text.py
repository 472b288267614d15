"""Formatting and parsing of sizes, and formatting of lists."""

from __future__ import annotations

import pytest

from megatron_fsdp_v2._text import listed, parse_size, readable_size


def test_sizes_are_formatted_with_a_suitable_unit() -> None:
    numbers = (0, 1023, 1024, 1536 * 1024, 3 << 30, 5 << 40, 5000 << 40)
    texts = ["0 B", "1023 B", "1.00 KiB", "1.50 MiB", "3.00 GiB", "5.00 TiB", "5000.00 TiB"]
    assert [readable_size(number, digits=2) for number in numbers] == texts


def test_omitted_items_of_a_list_are_counted() -> None:
    assert listed([], 2) == ""
    assert listed(["a", "b"], 2) == "a, b"
    assert listed(range(5), 2) == "0, 1 and 3 more"
    assert listed("abc", 1, separator="; ") == "a; and 2 more"


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("2 MB", 2 * 10**6), ("1.5KiB", 1536), ("12", 12), ("0.1B", 1)],
)
def test_sizes_are_parsed_with_their_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0GB", "5G", "1e9", "5 PiB"])
def test_invalid_sizes_are_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size, such as 5GB or 500MiB"):
        parse_size(text)
