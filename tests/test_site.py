"""The built site in a browser: it asks nobody else for anything, reports no error, and fits a phone.

Each page is loaded twice: from a local server, as it would be published, on a desktop; and from its file, as after
`make book`, on a phone in the dark.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from playwright.sync_api import Browser, Page, Route, sync_playwright

pytestmark = pytest.mark.site

SITE = Path(__file__).resolve().parent.parent / "_build" / "html"
DESKTOP: Any = {"width": 1360, "height": 900}
PHONE: Any = {"width": 390, "height": 844}
# Everything a page names: links, images, scripts, styles, as absolute addresses.
TARGETS = "[...document.querySelectorAll('[href], [src]')].map(node => node.href?.baseVal ?? node.href ?? node.src)"
IDS = "[...document.querySelectorAll('[id]')].map(node => node.id)"
# What sticks out to the right although no box around it scrolls.
TOO_WIDE = """[...document.querySelectorAll('.bd-article *')].filter(node => {
    for (let box = node.parentElement; box && box !== document.body; box = box.parentElement)
        if (getComputedStyle(box).overflowX !== 'visible') return false;
    return node.getBoundingClientRect().right > innerWidth + 1;
}).slice(0, 5).map(node => `${node.tagName}: ${node.textContent.trim().slice(0, 60)}`)"""
WIDGETS = "script[type='application/vnd.jupyter.widget-view+json']"


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
    assert (SITE / "index.html").is_file(), f"there is no site in {SITE}: run `make book`, or `make test site`"
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
    program = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
    assert program, "the site is looked at in Chromium: install the package `chromium`"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def load(page: Page, address: str) -> None:
    """Open `address` and wait until formulas and widgets are drawn."""
    page.goto(address, wait_until="load")
    page.evaluate("window.MathJax?.startup?.promise")
    if page.locator(WIDGETS).count():
        page.locator(".cell_output .jupyter-widgets").first.wait_for()


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
    toc = (SITE.parent.parent / "_toc.yml").read_text()
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
