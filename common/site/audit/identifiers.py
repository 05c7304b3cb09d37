"""Personal identifiers in texts, by pattern.

Patterns find what is written as such things are written; they find no name without a title, and what they find need
not be anybody's. A new kind is one entry in `KINDS`. No pattern takes more than linear time, whatever the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of identifier.

    Attributes
    ----------
    hint
        What every text with one has, and is quick to look for.
    pattern
        Its group ``id``, or else all of it, is the identifier.
    key
        What makes two ways to write it one.
    holds
        Whether a key is one, beyond the pattern: a checksum.
    identifying
        Whether one by itself may point to a person. Dates, surnames and web addresses are counted only.
    """

    name: str
    hint: re.Pattern[str]
    pattern: re.Pattern[str]
    key: Callable[[str], str]
    holds: Callable[[str], bool] = bool
    identifying: bool = True


@dataclass(frozen=True, repr=False)
class Identifier:
    """One identifier in a text. Private where the text is, or where a document has it too.

    Attributes
    ----------
    kind
        What it is, in words.
    written
        As the text writes it.
    key
        The same for all ways to write it. Kinds share one where it may stand for the same: a date, a number.
    """

    kind: str
    written: str
    key: str

    def __repr__(self) -> str:
        return f"Identifier(<{self.kind}>)"


def nhs_number(digits: str) -> bool:
    """Whether ten digits carry the check digit of an NHS number (modulus 11)."""
    rest = 11 - sum(int(digit) * weight for digit, weight in zip(digits, range(10, 1, -1), strict=False)) % 11
    return len(digits) == 10 and rest % 11 == int(digits[9])


def identifiers(text: str) -> Iterator[Identifier]:
    """The identifiers of a text as it looks. What one kind has taken, later kinds don't see."""
    taken = bytearray(len(text))
    for kind in KINDS:
        for match in kind.pattern.finditer(text) if kind.hint.search(text) else ():
            start, end = match.span()
            written = match["id" if "id" in match.re.groupindex else 0]
            key = kind.key(written)
            if kind.holds(key) and not any(taken[start:end]):
                taken[start:end] = b"\1" * (end - start)
                yield Identifier(kind.name, written, key)


def keys_of(text: str) -> set[str]:
    """Keys of all that a text has; of a name its title may be missing."""
    found = {identifier.key for identifier in identifiers(text)}
    return found | {_name(match[1]) for match in _TWO_NAMES.finditer(text)}


def _digits(written: str) -> str:
    return "".join(c for c in written if c.isdecimal())


def _phone(written: str) -> str:
    # With the country's code or without: the last nine digits are the same.
    return f"phone {_digits(written)[-9:]}"


def _date(written: str) -> str:
    """Day and month in either order, and two digits of the year: 12/03/1950 is March 12th, 1950."""
    parts = re.findall(r"\d+|[a-z]{3,}", written.casefold())
    numbers = [int(part) if part.isdecimal() else _MONTHS.index(part[:3]) // 3 + 1 for part in parts]
    year = numbers.pop(0 if numbers[0] > 31 else -1)
    return f"date {min(numbers)} {max(numbers)} {year % 100}"


def _name(written: str) -> str:
    return "name " + written.casefold().replace("’", "'").removesuffix("'s")


_MONTHS = "janfebmaraprmayjunjulaugsepoctnovdec"
_MONTH = r"(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]{0,6}\.?"
_DATE = (
    r"(?<![\d./-])(?:\d{1,2}(?P<mark>[./-])\d{1,2}(?P=mark)(?:\d{4}|\d\d)|\d{4}-\d{1,2}-\d{1,2}"
    rf"|\d{{1,2}}(?:st|nd|rd|th)? (?:of )?{_MONTH},? \d{{4}}|\b{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}})"
    r"(?!\d|[./-]\d)"
)
_BORN = r"\b(?:d\.?o\.?b\b\.?|date of birth|birth ?date|born)\W{0,3}(?:on |is |was |the ){0,2}"

_WORD = r"[A-ZÀ-ÖØ-Þ][\w'’-]{1,30}"
_TWO_NAMES = re.compile(rf"\b(?=({_WORD} {_WORD})(?![\w'’-]))")
_TITLE = r"\b(?:M[Rr]|M[Rr][Ss]|M[Ss]|Miss|MISS|Mx|D[Rr]|Prof|PROF|Professor|Sir|Dame|Lady|Lord)\.? "

_FULL_NAME = "full name after a title"
_TITLES = re.compile("[DLMPS]")

_AREAS = (
    "AB|AL|BA|BB|BD|BH|BL|BN|BR|BS|BT|CA|CB|CF|CH|CM|CO|CR|CT|CV|CW|DA|DD|DE|DG|DH|DL|DN|DT|DY|EC|EH|EN|"
    "EX|FK|FY|GL|GU|GY|HA|HD|HG|HP|HR|HS|HU|HX|IG|IM|IP|IV|JE|KA|KT|KW|KY|LA|LD|LE|LL|LN|LS|LU|ME|MK|ML|"
    "NE|NG|NN|NP|NR|NW|OL|OX|PA|PE|PH|PL|PO|PR|RG|RH|RM|SA|SE|SG|SK|SL|SM|SN|SO|SP|SR|SS|ST|SW|SY|TA|TD|"
    "TF|TN|TQ|TR|TS|TW|UB|WA|WC|WD|WF|WN|WR|WS|WV|YO|ZE|B|E|G|L|M|N|S|W"
)
"""Of British postcodes: without them, half of immunology looks like one."""

_SEVEN_DIGITS = re.compile(r"\d(?:[ .()-]{0,2}\d){6}")

KINDS = (
    Kind(
        "e-mail address",
        re.compile("@"),
        re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}"),
        str.casefold,
    ),
    Kind(
        "web address",
        re.compile(r"://|[wW]{3}\."),
        re.compile(r"(?i)\b(?:https?://|www\.)[^\s<>\"']{3,500}"),
        lambda written: written.casefold().rstrip(".,;:)"),
        identifying=False,
    ),
    Kind(
        "date of birth",
        re.compile(r"[oO][rR][nN]\b|[bB](?:irth|IRTH)|[dD]\.?[oO]\.?[bB]"),
        re.compile(rf"(?i){_BORN}(?P<id>{_DATE})"),
        _date,
    ),
    Kind(
        "full date",
        re.compile(r"\d[./-]\d\d?[./-]\d|[12]\d{3}(?!\d)"),
        re.compile(rf"(?i){_DATE}"),
        _date,
        identifying=False,
    ),
    Kind(
        "US social security number",
        _SEVEN_DIGITS,
        re.compile(r"(?<![\d-])(?!000|666|9)\d{3}(?P<mark>[ -])(?!00)\d\d(?P=mark)(?!0000)\d{4}(?![\d-])"),
        _digits,
    ),
    Kind("NHS number", _SEVEN_DIGITS, re.compile(r"(?<![\d+])\d{3}[ -]?\d{3}[ -]?\d{4}(?!\d)"), _digits, nhs_number),
    Kind(
        "phone number",
        _SEVEN_DIGITS,
        re.compile(
            r"(?<![\w+])(?:\+44 ?(?:\(0\) ?)?|\(?0)[1-9](?:[ ()-]{0,2}\d){8,9}(?!\d)"
            r"|(?<![\w+])(?:\+?1[ .-]?)?\(?[2-9]\d\d\)?[ .-][2-9]\d\d[ .-]\d{4}(?!\d)"
            r"|(?<![\w+])\+[1-9](?:[ .()-]{0,2}\d){7,14}(?!\d)"
        ),
        _phone,
    ),
    Kind(
        "postcode",
        re.compile(r"\d[A-Z]{2}\b|[A-Z]{2} \d{5}"),
        re.compile(rf"\b(?:(?:{_AREAS})\d[A-Z\d]? ?\d[A-Z]{{2}}|[A-Z]{{2}} \d{{5}}(?:-\d{{4}})?)\b"),
        lambda written: f"code {written.replace(' ', '')}",
    ),
    Kind("long number", _SEVEN_DIGITS, re.compile(r"(?<!\d)\d{7,}"), _digits),
    Kind(_FULL_NAME, _TITLES, re.compile(rf"{_TITLE}(?P<id>{_WORD} {_WORD})"), _name),
    Kind("surname after a title", _TITLES, re.compile(rf"{_TITLE}(?P<id>{_WORD})"), _name, identifying=False),
)
"""Kinds of identifiers, those that say more first."""
