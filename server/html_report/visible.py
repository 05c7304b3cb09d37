"""Texts of strangers, made visible: what a reader can't see, or what would move other characters, becomes a token."""

from __future__ import annotations

import re
import unicodedata

from markupsafe import Markup, escape

_LAYOUT = "\n\t"
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories without a shape of their own: controls, bidi marks, zero widths, surrogates, line separators."""

_FILLERS = {0x115F, 0x1160, 0x3164, 0xFFA0, 0x2800}
"""Letters and symbols that are drawn as nothing."""


def is_hidden(character: str) -> bool:
    """Whether nothing would be seen of a character, or it would act on others."""
    if character in _LAYOUT:
        return False
    return unicodedata.category(character) in _HIDDEN or ord(character) in _FILLERS


def token(character: str) -> str:
    """A hidden character by its number, e.g. ``U+202E``."""
    return f"U+{ord(character):04X}"


def plain(text: str) -> str:
    """One line of plain text for a chart, an attribute or a title, hidden characters as ``[U+202E]``."""
    shown = "".join(f"[{token(c)}]" if is_hidden(c) else c for c in text)
    # Not str.split(): a space that mustn't break, as in a percentage, stays one.
    return re.sub(r"[ \t\n]+", " ", shown).strip()


def shortened(text: str, characters: int) -> str:
    """As `plain`, cut to so many characters."""
    line = plain(text)
    return line if len(line) <= characters else f"{line[: characters - 1].rstrip()}…"


def marked(text: str) -> Markup:
    """Markup of a text: everything escaped, isolated from the direction of what is around it, hidden characters shown.

    Line breaks and tabs stay.
    """
    parts: list[str] = []
    for character in text.replace("\r\n", "\n"):
        if is_hidden(character):
            name = unicodedata.name(character, "no name").lower()
            parts.append(f'<span class="token" title="{escape(name)}">{token(character)}</span>')
        else:
            parts.append(str(escape(character)))
    # Made of escaped parts only.
    return Markup(f'<bdi dir="auto">{"".join(parts)}</bdi>')  # noqa: S704
