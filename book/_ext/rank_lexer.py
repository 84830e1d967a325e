"""Sphinx extension: highlight the body of a ``%%ranks`` cell as the Python it is, and tracebacks with any message.

Pygments' IPython lexer takes everything below an unknown cell magic for plain text. Its lexer of tracebacks takes the
message of an exception that has a cause for code, and stumbles over what is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ipython_pygments_lexers import IPython3Lexer, IPythonTracebackLexer
from pygments.token import Error, Keyword, Operator, Text

MAGIC = re.compile(r"\A(%%)(ranks)([^\n]*\n)")


class RankLexer(IPython3Lexer):  # type: ignore[misc]
    name = "IPython with rank cells"

    def get_tokens_unprocessed(self, text: str) -> Iterator[tuple[int, Any, str]]:
        magic = MAGIC.match(text)
        if magic is None:
            yield from super().get_tokens_unprocessed(text)
            return
        for group, token in enumerate((Operator, Keyword, Text), start=1):
            yield magic.start(group), token, magic.group(group)
        for index, token, value in super().get_tokens_unprocessed(text[magic.end() :]):
            yield index + magic.end(), token, value


class TracebackLexer(IPythonTracebackLexer):  # type: ignore[misc]
    name = "IPython traceback with any message"

    def get_tokens_unprocessed(self, text: str) -> Iterator[tuple[int, Any, str]]:
        for index, token, value in super().get_tokens_unprocessed(text):
            yield index, Text if token is Error else token, value


def setup(app: Any) -> dict[str, bool]:
    for alias in ("ipython", "ipython3"):
        app.add_lexer(alias, RankLexer)
    app.add_lexer("ipythontb", TracebackLexer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
