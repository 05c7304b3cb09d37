"""An HTML page as a tree, read by the standard library alone. A tag that isn't closed, or twice, is an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "input", "img", "br", "base", "embed"}


@dataclass
class Node:
    """An element; ``content`` holds its texts and elements in order."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    content: list[Node | str] = field(default_factory=list)

    def all(self, *tags: str, **attributes: str) -> list[Node]:
        """Elements below this one with one of the tags, if any are named, and these attributes (``class_``)."""
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [
            node
            for node in self._below()
            if (not tags or node.tag in tags) and wanted.items() <= node.attributes.items()
        ]

    def one(self, *tags: str, **attributes: str) -> Node:
        """The only such element."""
        (node,) = self.all(*tags, **attributes)
        return node

    def text(self) -> str:
        """All text in it, blanks as a reader sees them."""
        return " ".join(self.raw().split())

    def raw(self) -> str:
        """All text in it as it stands."""
        return "".join(part if isinstance(part, str) else part.raw() for part in self.content)

    def rows(self) -> list[list[str]]:
        """Of a table: the cells of its body."""
        return [[cell.text() for cell in row.all("th", "td")] for row in self.one("tbody").all("tr")]

    def _below(self) -> Iterator[Node]:
        for part in self.content:
            if isinstance(part, Node):
                yield part
                yield from part._below()


def read_html(text: str) -> Node:
    """The page's root."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert len(reader.open) == 1, f"not closed: {[node.tag for node in reader.open[1:]]}"
    return reader.open[0]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Node("")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"<{tag}> has an attribute twice: {names}"
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].content.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        node = self.open.pop()
        assert node.tag == tag, f"<{node.tag}> is closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        self.open[-1].content.append(data)
