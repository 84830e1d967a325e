"""figures.py: drawings say in words what they show, and an explorer holds a drawing for every choice."""

import re
from xml.etree import ElementTree

import pytest

from minizero.figures import COLORS, explorer, line, rect, svg, text

pytestmark = pytest.mark.ch00


def test_a_drawing_is_valid_xml_with_a_text_alternative() -> None:
    drawing = svg(
        100,
        50,
        'ranks < 4 & "more"',
        rect(1, 2.5, 3, 4, "gradients", stroke_width=2),
        line(0, 0, 5, 5, "communication"),
        text(1, 2, "a < b & c", text_anchor="middle"),
    )
    root = ElementTree.fromstring(drawing)
    title, box, path, words = list(root)
    assert root.get("role") == "img"
    assert (title.get("id"), title.text) == (root.get("aria-labelledby"), 'ranks < 4 & "more"')
    assert (box.get("fill"), box.get("stroke-width"), box.get("y")) == (COLORS["gradients"], "2", "2.5")
    assert (path.get("stroke"), path.get("d")) == (COLORS["communication"], "M0 0L5 5")
    assert (words.text, words.get("fill"), words.get("text-anchor")) == ("a < b & c", "currentColor", "middle")


def test_two_drawings_have_ids_of_their_own() -> None:
    first, second = (re.findall(r'id="([^"]+)"', svg(1, 1, "same words")) for _ in range(2))
    assert set(first).isdisjoint(second)


def test_a_drawing_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="alt must say in words"):
        svg(1, 1, "  ")


def test_an_explorer_shows_the_drawing_of_the_values_chosen() -> None:
    box = explorer(
        lambda stage, ranks: f"stage {stage} on {ranks}", stage=("ZeRO stage", range(4)), ranks=("ranks", [1, 8], 8)
    )
    stage, ranks, outer = box.children
    assert [slider.description for slider in (stage, ranks)] == ["ZeRO stage", "ranks"]
    assert [label for label, _ in ranks.options] == ["1", "8"]
    assert (stage.value, ranks.value) == (0, 8)
    for i in range(4):
        inner = outer.children[i]
        assert [html.value for html in inner.children] == [f'<div class="frame">stage {i} on {n}</div>' for n in (1, 8)]
        # what the page follows without a kernel: each slider leads to the stacks of its level
        assert (outer.selected_index, inner.selected_index) == (0, 1)


def test_an_explorer_with_nothing_to_choose_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks needs a label and at least two values"):
        explorer(lambda ranks: "", ranks=("ranks", [4]))
