"""Sphinx extension: "chapter 12", "Chapters 12 and 13", "chapters 02 to 15" in running text lead to those chapters.

A chapter's number is its file's: 12_gather is chapter 12, 04_communication is chapter 4 or 04. A number without a file
is a warning. Code, headings and what is a link already stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
MENTION = re.compile(
    r"\bchapter\s+\d{1,2}\b|\bchapters\s+\d{1,2}\b(?:(?:,|\s*[-–]|,?\s+(?:and|or|to))\s*\d{1,2}\b)*", re.IGNORECASE
)
NUMBER = re.compile(r"\d+")
NO_PROSE = (nodes.literal, nodes.FixedTextElement, nodes.title, nodes.reference, nodes.raw, nodes.math, nodes.Invisible)
NO_PROSE += (addnodes.pending_xref, addnodes.desc_signature, addnodes.download_reference)


def links(text: str) -> Iterator[tuple[str, int | None]]:
    """The text in pieces, each with the number of the chapter that it should lead to, or None.

    The first link of a mention takes in the word: "chapters 02", " to ", "15".
    """
    end = 0
    for mention in MENTION.finditer(text):
        numbers = list(NUMBER.finditer(text, *mention.span()))
        for begin, number in zip([mention.start(), *(n.start() for n in numbers[1:])], numbers, strict=True):
            if begin > end:
                yield text[end:begin], None
            yield text[begin : number.end()], int(number[0])
            end = number.end()
    if end < len(text):
        yield text[end:], None


def pages_of_chapters(names: Iterator[str]) -> dict[int, str]:
    """Number of each chapter, and its page."""
    numbered = {name: re.match(r"(\d+)_", PurePosixPath(name).name) for name in names}
    return {int(number[1]): name for name, number in numbered.items() if number}


class LinkChapters(SphinxTransform):
    """Turn mentions into references, which are resolved as those of {doc} are."""

    default_priority = 850

    def apply(self, **options: Any) -> None:
        pages = pages_of_chapters(iter(self.env.found_docs))
        for text in list(self.document.findall(nodes.Text)):
            if not MENTION.search(text) or inside(text, NO_PROSE):
                continue
            pieces: list[nodes.Node] = []
            for piece, number in links(text):
                if number is None:
                    pieces.append(nodes.Text(piece))
                elif number in pages:
                    pieces.append(self.reference(piece, pages[number]))
                else:
                    LOGGER.warning("there is no chapter %d", number, location=text.parent, type="chapters")
                    pieces.append(nodes.Text(piece))
            text.parent.replace(text, pieces)

    def reference(self, text: str, page: str) -> nodes.Node:
        target = {"refdomain": "std", "reftype": "doc", "reftarget": f"/{page}", "refdoc": self.env.docname}
        xref = addnodes.pending_xref("", **target, refexplicit=True, refwarn=True)
        xref += nodes.inline("", text, classes=["std", "std-doc"])
        return xref


def inside(node: nodes.Node, kinds: tuple[type, ...]) -> bool:
    while node := node.parent:
        if isinstance(node, kinds):
            return True
    return False


def setup(app: Any) -> dict[str, bool]:
    app.add_transform(LinkChapters)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
