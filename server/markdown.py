"""Text of any origin inside Markdown: synthetic texts, names and titles are data, and nothing in them has an effect."""

from __future__ import annotations


def printable(text: str) -> str:
    """One line without control characters; those that turn the direction of writing are such too."""
    return "".join(c if c.isprintable() else " " for c in text)


def escaped(text: str) -> str:
    """Text inside a Markdown table or list: nothing in it may become structure."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>#|!~$&" else c for c in printable(text))


def code(text: str) -> str:
    """Text between backticks, where a backslash escapes nothing."""
    return printable(text).replace("`", "'")


def excerpt(text: str, characters: int) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(printable(text).split())
    return line if len(line) <= characters else f"{line[: characters - 1].rstrip()}…"
