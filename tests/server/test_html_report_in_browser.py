"""The HTML report as a browser shows it: on a desk, a phone and paper, in the dark, by keyboard, and under attack."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from server.html_report import write_html_report
from server.quality import Quality, QualityNumber, write_quality
from tests.finished_run import finished_run, hostile_run

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}
LONG_NAMES = (
    "waiting time",
    "parking",
    "food and drink",
    "discharge and transport home from the ward",
    "pain",
    "other",
)

FLAWS = """
() => {
  const flaws = [];
  for (const svg of document.querySelectorAll('svg.chart')) {
    if (!svg.checkVisibility()) continue;
    const figure = svg.closest('figure').id;
    const scale = svg.getScreenCTM().a;
    if (scale < 0.9 || scale > 1.2) flaws.push(`${figure}: shrunk or blown up, ${scale}`);
    const shown = [...svg.querySelectorAll('text')].map((text) => [text, text.getBoundingClientRect()]);
    for (const [text, box] of shown) {
      if (box.left < 0 || box.right > innerWidth) flaws.push(`${figure}: '${text.textContent}' is cut`);
      const size = parseFloat(getComputedStyle(text).fontSize) * scale;
      if (size < 10.5) flaws.push(`${figure}: '${text.textContent}' is tiny`);
    }
    shown.forEach(([one, a], i) => shown.slice(i + 1).forEach(([other, b]) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 3) flaws.push(`${figure}: '${one.textContent}' on '${other.textContent}'`);
    }));
  }
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) flaws.push(`the page is ${wide} wide`);
  return flaws;
}
"""


class Shown:
    """A report open in the browser, and all that it did."""

    def __init__(self, page: Page, file: Path) -> None:
        self.page = page
        self.console: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.console.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.console.append(f"error: {error}"))
        page.on("request", lambda request: self.requests.append(request.url))
        page.add_init_script(
            "window.violations = [];"
            "document.addEventListener('securitypolicyviolation', (e) => window.violations.push(e.violatedDirective));"
        )
        page.goto(file.resolve().as_uri())

    def did_nothing(self) -> None:
        """No message, no request but for itself, no violation of its own policy, no script of a text."""
        assert self.console == []
        assert [url for url in self.requests if not url.startswith("data:")] == self.requests[:1]
        assert self.page.evaluate("window.violations") == []
        assert self.page.evaluate("window.hit") is None


Open = Callable[..., Shown]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM:
        if os.environ.get("CI") and not os.environ.get("FEDCORPUS_NO_BROWSER"):
            pytest.fail("no Chromium on PATH; CI installs one, or sets FEDCORPUS_NO_BROWSER where it can't")
        pytest.skip("no Chromium on PATH (on Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def shown(browser: Browser) -> Iterator[Open]:
    contexts = []

    def show(file: Path, viewport: Mapping[str, int] = DESK, **options: Any) -> Shown:
        context = browser.new_context(viewport=dict(viewport), **options)
        contexts.append(context)
        return Shown(context.new_page(), file)

    yield show
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six codes, a hole, a silent site, an evaluation."""
    space = finished_run(
        tmp_path_factory.mktemp("report") / "run",
        values=LONG_NAMES, weak=3, silent=("weak-2",), wanted=4, made=(4, 4, 4, 2, 4, 0), rounds=12,
    )  # fmt: skip
    fields = {"floor": 0.0, "ceiling": 1.0, "direction": "higher"}
    numbers = [
        {
            "name": "accuracy of a classifier that was trained on the corpus alone",
            "value": 0.7,
            "low": 0.6,
            "high": 0.8,
        },
        {"name": "beyond its range", "value": 3.0},
    ]
    write_quality(space, Quality(numbers=tuple(QualityNumber.model_validate(fields | number) for number in numbers)))
    return write_html_report(space)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 codes, 300 sites, 40 rounds."""
    return write_html_report(
        finished_run(
            tmp_path_factory.mktemp("crowded") / "run",
            values=[f"code number {i}" for i in range(200)], profile=list(range(200)), wanted=list(range(200)), made=1,
            strong=150, weak=150, silent=("strong-149",), rounds=40, per_code=4, votes=1000,
        )
    )  # fmt: skip


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("name", ["report", "crowded"])
def test_nothing_overlaps_is_cut_tiny_or_wider_than_the_page(
    name: str, request: pytest.FixtureRequest, shown: Open, viewport: Mapping[str, int]
) -> None:
    opened = shown(request.getfixturevalue(name), viewport)
    assert opened.page.evaluate(FLAWS) == []
    assert opened.page.locator("svg.chart:visible").count() == (8 if name == "report" else 7)
    opened.did_nothing()


def test_a_flaw_would_be_found(report: Path, shown: Open) -> None:
    """The twin: a page with charts of a desk on a phone."""
    page = shown(report, PHONE).page
    page.evaluate(
        "for (const [from, to] of [['.narrow', 'none'], ['.wide', 'block']])"
        "document.querySelectorAll(from).forEach((e) => { e.style.display = to; })"
    )
    flaws = "\n".join(page.evaluate(FLAWS))
    assert "shrunk or blown up" in flaws
    assert "is tiny" in flaws


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_dark_is_dark(report: Path, shown: Open, viewport: Mapping[str, int]) -> None:
    opened = shown(report, viewport, color_scheme="dark")
    of_what = "(s) => getComputedStyle(document.querySelector(s)).{}"
    assert opened.page.evaluate(of_what.format("backgroundColor"), "body") == "rgb(21, 24, 27)"
    assert opened.page.evaluate(of_what.format("fill"), ".wide text.f-ink, .wide .f-ink text, .wide .f-ink") == (
        "rgb(235, 232, 226)"
    )
    opened.did_nothing()


def test_texts_are_found_by_code_and_words_with_the_keyboard_alone(report: Path, shown: Open) -> None:
    page = shown(report).page
    status, visible = page.locator("#found"), page.locator("#texts > li:visible")
    assert status.inner_text() == "18 of 18 texts shown"
    _tab_to(page, "by-code")
    page.keyboard.type("topic=parking")
    assert status.inner_text() == "4 of 18 texts shown"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "by-words"
    page.keyboard.type("TWO")
    assert {text.split("\n")[-1] for text in visible.all_inner_texts()} == {"Two."}
    page.keyboard.type(" and nothing")
    assert status.inner_text() == "0 of 18 texts shown"
    assert page.locator("#none").is_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert status.inner_text() == "18 of 18 texts shown"


def _tab_to(page: Page, name: str) -> None:
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == name:
            return
    raise AssertionError(f"no tab leads to {name}")


def test_the_keyboard_skips_to_the_report_and_opens_a_table(report: Path, shown: Open) -> None:
    page = shown(report).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    page.keyboard.press("Enter")
    assert page.locator("#figure-composition table").is_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "region", "what scrolls can be reached"


def test_a_screen_reader_is_told_what_is_there(report: Path, shown: Open) -> None:
    tree = shown(report).page.locator("body").aria_snapshot()
    for named in (
        'navigation "Contents"', 'combobox "Code"', 'searchbox "Words"', 'img "Privacy cost of a site over the study',
        'table "Every release', 'columnheader "numbers"', 'rowheader "strong-0"', 'region "What left each site"',
    ):  # fmt: skip
        assert named in tree, named


def test_without_scripts_all_texts_are_there(report: Path, shown: Open) -> None:
    page = shown(report, java_script_enabled=False).page
    assert page.locator("#texts > li:visible").count() == 18
    assert not page.locator(".tools").is_visible()


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_hostile_texts_and_names_have_no_effect(tmp_path: Path, shown: Open, viewport: Mapping[str, int]) -> None:
    opened = shown(write_html_report(hostile_run(tmp_path)), viewport)
    page = opened.page
    assert page.locator("h1").count() == 1
    assert page.evaluate(FLAWS) == []
    texts = "\n".join(page.locator("#texts .text").all_inner_texts())
    assert "<script>window.hit = 1</script>" in texts
    assert "abc U+202Egnp.exeU+202C U+2066xU+2069 U+200F" in texts
    page.locator("#by-words").fill("window.hit")
    assert 0 < page.locator("#texts > li:visible").count() < page.locator("#texts > li").count()
    opened.did_nothing()


def test_a_script_that_gets_in_would_be_stopped_by_the_policy(report: Path, tmp_path: Path, shown: Open) -> None:
    """The twin: with the escaping undone, the page's own policy still lets nothing run or load."""
    broken = tmp_path / "broken.html"
    planted = '<script>window.hit = 1</script><p style="color:red">x</p><img src="http://127.0.0.1:9/x.png">'
    broken.write_text(report.read_text(encoding="utf-8").replace("<main", f"{planted}<main", 1), encoding="utf-8")
    opened = shown(broken)
    assert opened.page.evaluate("window.hit") is None
    assert set(opened.page.evaluate("window.violations")) == {"script-src-elem", "style-src-attr", "img-src"}
    with pytest.raises(AssertionError):
        opened.did_nothing()


def test_it_prints_in_full_on_paper(report: Path, crowded: Path, shown: Open) -> None:
    opened = shown(report, color_scheme="dark")
    page = opened.page
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(28, 33, 38)", "dark ink on paper"
    assert not page.locator("nav").is_visible()
    assert page.locator("#record table").evaluate_all("all => all.every((t) => t.getBoundingClientRect().height > 0)")
    assert not page.locator("#figure-cost table").is_visible(), "its chart says it"
    assert page.pdf(format="A4").startswith(b"%PDF")
    page = shown(crowded).page
    assert not page.locator("#releases table").is_visible()
    page.emulate_media(media="print")
    assert page.locator("#releases table").is_visible(), "what is folded on the screen isn't on paper"
