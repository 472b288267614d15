"""Parts of pages that programs write, between the comments `<part>: begin` and `<part>: end`."""


def with_part(page: str, part: str, text: str) -> str:
    """Return a page with another text in one of its parts.

    Args:
        page: The text of the page.
        part: Name of the part.
        text: Its new text, with a newline at the end.
    """
    begin, end = f"<!-- {part}: begin -->\n", f"<!-- {part}: end -->\n"
    before, rest = page.split(begin)
    return before + begin + text + end + rest.split(end)[1]
