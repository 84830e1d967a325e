"""The built site in a browser: it asks nobody else for anything, reports no error, and fits a phone.

Each page is loaded twice: from a local server, as it would be published, on a desktop; and from its file, as after
`make book`, on a phone in the dark.
"""

from __future__ import annotations

import gzip
import html
import json
import re
import shutil
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe
from bs4 import BeautifulSoup, Tag
from playwright.sync_api import Browser, Page, Route, sync_playwright
from repository import ROOT

pytestmark = pytest.mark.site

SITE = ROOT / "_build" / "html"
SYSTEM_BROWSERS = ["chromium", "chromium-browser", "google-chrome"]
DESKTOP: Any = {"width": 1360, "height": 900}
PHONE: Any = {"width": 390, "height": 844}
WIDE: Any = {"width": 1680, "height": 1050}
# Everything a page names: links, images, scripts, styles, as absolute addresses.
TARGETS = "[...document.querySelectorAll('[href], [src]')].map(node => node.href?.baseVal ?? node.href ?? node.src)"
IDS = "[...document.querySelectorAll('[id]')].map(node => node.id)"
# What sticks out to the right although no box around it scrolls.
TOO_WIDE = """[...document.querySelectorAll('.bd-article *')].filter(node => {
    for (let box = node.parentElement; box && box !== document.body; box = box.parentElement)
        if (getComputedStyle(box).overflowX !== 'visible') return false;
    return node.getBoundingClientRect().right > innerWidth + 1;
}).slice(0, 5).map(node => `${node.tagName}: ${node.textContent.trim().slice(0, 60)}`)"""
# How many characters of a cell's code are in sight.
COLUMNS = """node => {
    const style = getComputedStyle(node), pen = document.createElement('canvas').getContext('2d');
    pen.font = `${style.fontSize} ${style.fontFamily}`;
    const inside = node.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    return Math.floor(inside / pen.measureText('0').width);
}"""
WIDGETS = "script[type='application/vnd.jupyter.widget-view+json']"
PAGE_LIMIT = 1_500_000  # bytes of a page, compressed, without what all pages share
# An explorer's drawing that can be seen, by its text alternative.
SHOWN = """box => [...box.querySelectorAll('.frame svg')].filter(svg => svg.getBoundingClientRect().width > 0)
    .map(svg => svg.textContent)"""


class Visit(NamedTuple):
    """What one page asked for, reported and contains."""

    foreign: list[str]
    errors: list[str]
    targets: list[str]
    ids: set[str]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """Address of a local server for the site."""
    assert (SITE / "index.html").is_file(), f"there is no site in {SITE}: run `make book`, or `make test`"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def pages(site: str) -> list[str]:
    """Every page with text, as a path in the site."""
    return sorted(str(file.relative_to(SITE)) for file in (SITE / "book").glob("*.html"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        candidates = [*map(shutil.which, SYSTEM_BROWSERS), playwright.chromium.executable_path]
        program = next((path for path in candidates if path and Path(path).is_file()), None)
        assert program, "no browser: install the package `chromium`, or run `.venv/bin/playwright install chromium`"
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def load(page: Page, address: str) -> None:
    """Open `address` and wait until formulas and widgets are drawn."""
    page.goto(address, wait_until="load")
    page.evaluate("window.MathJax?.startup?.promise")
    for view in page.locator(WIDGETS).all():
        view.locator("xpath=preceding-sibling::*[@class='widget-subarea']").wait_for()


def visit(browser: Browser, site: str, address: str) -> Visit:
    foreign: list[str] = []
    errors: list[str] = []

    def only_the_site(route: Route) -> None:
        if route.request.url.startswith((site, "data:", "blob:")):
            route.continue_()
        else:
            foreign.append(route.request.url)
            route.abort()

    page = browser.new_page(viewport=DESKTOP)
    page.route("**/*", only_the_site)
    page.on(
        "response", lambda response: errors.append(f"{response.status} {response.url}") if not response.ok else None
    )
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    load(page, f"{site}/{address}")
    seen = Visit(foreign, errors, page.evaluate(TARGETS), set(page.evaluate(IDS)))
    page.close()
    return seen


@pytest.fixture(scope="module")
def visits(browser: Browser, site: str, pages: list[str]) -> dict[str, Visit]:
    return {address: visit(browser, site, address) for address in pages}


def test_every_page_of_the_toc_is_there(pages: list[str]) -> None:
    toc = (ROOT / "_toc.yml").read_text()
    assert pages == sorted(f"book/{name}.html" for name in re.findall(r"\bbook/(\w+)", toc))


def test_no_request_leaves_the_site(visits: dict[str, Visit]) -> None:
    assert {address: seen.foreign for address, seen in visits.items() if seen.foreign} == {}


def test_no_page_reports_an_error(visits: dict[str, Visit]) -> None:
    assert {address: seen.errors for address, seen in visits.items() if seen.errors} == {}


def test_no_internal_link_is_dead(visits: dict[str, Visit], site: str) -> None:
    dead = []
    for address, seen in visits.items():
        for target in seen.targets:
            path, _, anchor = target.removeprefix(f"{site}/").partition("#")
            path = path.partition("?")[0]
            anchors = visits[path].ids if path in visits and anchor else {anchor}
            if target.startswith(site) and (not (SITE / path).exists() or anchor not in anchors):
                dead.append(f"{address} -> {target.removeprefix(site)}")
    assert dead == []


def test_no_page_scrolls_sideways_on_a_phone(browser: Browser, pages: list[str]) -> None:
    page = browser.new_page(viewport=PHONE, color_scheme="dark")
    too_wide = {}
    for address in pages:
        load(page, (SITE / address).as_uri())
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        if page.evaluate("document.documentElement.scrollWidth") > PHONE["width"]:
            too_wide[address] = page.evaluate(TOO_WIDE)
    page.close()
    assert too_wide == {}


def test_a_wide_screen_shows_whole_lines_of_the_package(browser: Browser) -> None:
    page = browser.new_page(viewport=WIDE)
    load(page, (SITE / "book/12_gather.html").as_uri())
    columns = page.locator("div.cell_input pre").first.evaluate(COLUMNS)
    page.close()
    assert columns >= 120  # pyproject.toml's line-length


def words(page: Path) -> Tag:
    """What a page says beside its menus."""
    article = BeautifulSoup(page.read_text(), "html.parser").select_one("article")
    assert article is not None
    return article


def test_every_mention_of_a_chapter_leads_to_it(pages: list[str]) -> None:
    """ "Chapters 12 and 13" in running text; what stands in code, in headings and in cells' outputs needs no link."""
    mention = re.compile(r"\bchapters?\s+\d+", re.IGNORECASE)
    linked, bare = 0, []
    for address in pages:
        for text in words(SITE / address).find_all(string=mention):
            link = text.find_parent("a")
            if link is not None:
                linked += 1
                number = re.search(r"\d+", text)
                assert number
                assert re.search(rf"\b{int(number[0]):02}_\w+\.html|#", str(link["href"])), f"{address}: {link}"
            elif not text.find_parent(["code", "pre", "h1", "h2", "h3", "h4"]):
                bare.append(f"{address}: {' '.join(text.split())[:90]}")
    assert bare == []
    assert linked > 50


def test_the_number_of_a_chapter_is_seen_in_title_sidebar_and_table(pages: list[str]) -> None:
    intro = BeautifulSoup((SITE / "book" / "intro.html").read_text(), "html.parser")
    for address in pages:
        number = re.match(r"book/(\d\d)_", address)
        if number:
            page = BeautifulSoup((SITE / address).read_text(), "html.parser")
            name = Path(address).name
            places = page.select("head title, article h1") + intro.select(
                f"article table a[href='{name}'], nav a[href='{name}']"
            )
            assert len(places) == 4
            assert [place.text for place in places if not place.text.strip().startswith(f"{number[1]} · ")] == []


def test_no_page_names_a_folder_of_the_machine_that_built_it(pages: list[str]) -> None:
    folders = {str(ROOT), sys.prefix, str(Path.home()), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")}
    patterns = [rf"{re.escape(folder)}/" for folder in folders if folder not in ("/", "/usr")]
    patterns += [rf"{re.escape(folder)}/(tmp\w{{8}}|ipykernel_)" for folder in {"/tmp", tempfile.gettempdir()}]
    found = []
    for address in pages:
        text = html.unescape(re.sub(r"</?span[^>]*>", "", (SITE / address).read_text()))
        found += [
            f"{address}: {text[max(0, m.start() - 40) : m.end() + 40]}" for m in re.finditer("|".join(patterns), text)
        ]
    assert found == []


def test_an_expected_error_is_a_few_lines(pages: list[str]) -> None:
    long = []
    for address in pages:
        for shown in words(SITE / address).select(".output.traceback"):
            lines = shown.text.strip().splitlines()
            if len(lines) > 30:
                long.append(f"{address}: {len(lines)} lines, {lines[-1][:60]}")
    assert long == []


def test_F101_every_page_says_with_which_version_it_was_made(pages: list[str]) -> None:
    version = re.search('^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    pages = [address for address in pages if f"<p>Made with minizero {version[1]}" not in (SITE / address).read_text()]
    assert pages == []


# ---- what a reader does on a page


def explorers(page: Page) -> list[Any]:
    """The boxes of a page that hold sliders and a drawing."""
    return page.locator(".cell_output .widget-vbox:has(.noUi-handle)").all()


def test_F57_every_slider_changes_its_drawing_by_keyboard_and_by_mouse(browser: Browser, pages: list[str]) -> None:
    """From the file, without a server and without a kernel."""
    page = browser.new_page(viewport=PHONE)
    moved = []
    for address in pages:
        load(page, (SITE / address).as_uri())
        for box in explorers(page):
            for handle in box.locator(".noUi-handle").all():
                assert handle.get_attribute("aria-label"), f"{address}: a slider has no name"
                handle.scroll_into_view_if_needed()
                handle.press("Home")
                first = box.evaluate(SHOWN)
                assert len(first) == 1, f"{address}: {len(first)} drawings at a time"
                handle.press("ArrowRight")
                by_key = box.evaluate(SHOWN)
                handle.press("Home")
                assert box.evaluate(SHOWN) == first
                place = handle.bounding_box()
                assert place is not None
                page.mouse.move(place["x"] + 5, place["y"] + 5)
                page.mouse.down()
                page.mouse.move(PHONE["width"], place["y"] + 5, steps=4)
                page.mouse.up()
                by_mouse = box.evaluate(SHOWN)
                assert first != by_key != [], f"{address}: ArrowRight changes nothing"
                assert first != by_mouse != [], f"{address}: the mouse changes nothing"
                moved.append((address, handle.get_attribute("aria-label")))
    page.close()
    assert len({address for address, _ in moved}) >= 3, f"explorers were found here only: {moved}"


# A listing has hundreds of spans in a handful of colours. axe computes the contrast of each, nine tenths of its time;
# one of each kind is enough.
ONE_OF_EACH_KIND = """() => {
  const seen = new Set();
  const again = [...document.querySelectorAll(".highlight span")].filter(span => {
    const style = getComputedStyle(span), box = span.closest(".cell_input, .cell_output, .highlight");
    return seen.size === seen.add([style.color, style.backgroundColor, box.className].join()).size;
  });
  for (const span of again) span.replaceWith(...span.childNodes);
}"""


@pytest.mark.parametrize(("scheme", "size"), [("light", DESKTOP), ("dark", PHONE)])
def test_axe_finds_nothing_serious(browser: Browser, pages: list[str], scheme: Any, size: Any) -> None:
    page = browser.new_page(viewport=size, color_scheme=scheme)
    found = []
    for address in pages:
        load(page, (SITE / address).as_uri())
        page.evaluate(ONE_OF_EACH_KIND)
        for violation in Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]:
            if violation["impact"] in ("serious", "critical"):
                where = [node["target"][0] for node in violation["nodes"][:3]]
                found.append(f"{address}: {violation['id']}, {len(violation['nodes'])} times: {where}")
    page.close()
    assert found == []


def test_every_picture_says_in_words_what_it_shows(browser: Browser, pages: list[str]) -> None:
    page = browser.new_page(viewport=DESKTOP)
    silent = []
    for address in pages:
        load(page, (SITE / address).as_uri())
        for picture in page.locator(".bd-article img, .bd-article svg[role=img]").all():
            words = picture.get_attribute("alt") or picture.text_content() or ""
            if len(words.split()) < 4 or words.endswith((".svg", ".png")):
                silent.append(f"{address}: {words!r}")
    page.close()
    assert silent == []


def test_search_finds_a_term(browser: Browser, site: str) -> None:
    page = browser.new_page(viewport=DESKTOP)
    page.goto(f"{site}/search.html?q=reshard")
    page.locator("#search-results a[href*='12_gather']").first.wait_for(timeout=10_000)
    page.close()


def test_a_page_weighs_little(pages: list[str]) -> None:
    heavy = {}
    for address in pages:
        text = (SITE / address).read_bytes()
        pictures = re.findall(rb'src="(?:\.\./)+(_images/[^"]+)"', text)
        files = [text, *((SITE / picture.decode()).read_bytes() for picture in pictures)]
        weight = sum(len(gzip.compress(file)) for file in files)
        print(f"{weight / 1e3:8.1f} kB  {address}")
        if weight > PAGE_LIMIT:
            heavy[address] = weight
    assert heavy == {}


def test_the_download_of_a_chapter_is_its_notebook(pages: list[str]) -> None:
    for notebook in sorted((ROOT / "book").glob("*.ipynb")):
        page = (SITE / "book" / f"{notebook.stem}.html").read_text()
        link = f"_sources/book/{notebook.name}"
        assert f'href="../{link}"' in page
        given, ours = (nbformat.reads(file.read_text(), as_version=4) for file in (SITE / link, notebook))
        assert [cell.source for cell in given.cells] == [cell.source for cell in ours.cells]
        assert json.dumps(given.metadata.kernelspec) == json.dumps(ours.metadata.kernelspec)
