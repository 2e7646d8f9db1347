"""The report: one page that needs nothing else, readable on a phone, every chart drawn; and its tables as words."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from dflash.bench.protocol import Request, RequestFailed
from dflash.bench.record import LoadPart, RunRecord
from dflash.bench.report.difference import marked
from dflash.bench.report.series import columns, labelled, points, read_records, worst
from dflash.bench.report.tables import detail_table, markdown, summary_table
from dflash.bench.report.write import ALL_CHARTS, HTML_FILE, MARKDOWN_FILE, render_html, render_markdown, write_report
from dflash.bench.run import run_benchmark
from dflash.errors import DataError
from tests.bench.browser import Browser, find_browser
from tests.bench.fakes import FakeBackend, echo, questions, workload

WIDE, PHONE = (1280, 3000), (390, 6000)
CHANGED = "question 2.0?"
PROBE = """<script>
const charts = [...document.querySelectorAll("svg.chart")].map(svg => {
  const box = svg.getBoundingClientRect();
  return {name: svg.dataset.chart, x: box.x, y: box.y, width: box.width, height: box.height,
          letters: Math.min(...[...svg.querySelectorAll("text")].map(text => text.getBoundingClientRect().height))};
});
const found = {overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth, charts};
document.documentElement.setAttribute("data-found", JSON.stringify(found));
</script>"""
"""Measures the page from inside."""


def say(request: Request, form: str, call: int) -> str:
    """One question is answered differently with a draft, and with characters that HTML must not see."""
    text = echo(request, form, call)
    if form == "dflash" and request.messages[-1]["content"] == CHANGED:
        return text[:9] + "<script>alert(1)</script>"
    return text


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    folder = tmp_path_factory.mktemp("local")
    sets = [questions(4, name=name) for name in ("gsm8k", "mt-bench")]
    return run_benchmark("torch", FakeBackend(say=say), workload(*sets), folder, command="dflash bench").record


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """A run under load with failures."""

    def sometimes(request: Request, form: str, call: int) -> str:
        if call % 7 == 6:
            raise RequestFailed("server error", "HTTP 500 <b>")
        return echo(request, form, call)

    work = workload(questions(4), loads=[LoadPart(concurrency=number) for number in (1, 2, 4)])
    backend = FakeBackend(say=sometimes, max_concurrency=8)
    return run_benchmark("vllm", backend, work, tmp_path_factory.mktemp("served"), command="dflash bench").record


@pytest.fixture(scope="module")
def page(record: RunRecord, served: RunRecord, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_report([record, served], folder)
    return folder / HTML_FILE


@pytest.fixture(scope="module")
def browser() -> Browser:
    found = find_browser()
    if found is None:
        pytest.skip("NO CHROMIUM HERE: the report was not opened in a browser. `make test-report` fetches one.")
    return found


class Links(HTMLParser):
    """Everything that a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action", "srcset")
        ]


def test_the_page_needs_nothing_else(page: Path) -> None:
    """Guards against a report that is blank without a network, or tells others that it was opened."""
    text = page.read_text(encoding="utf-8")
    links = Links()
    links.feed(text)
    assert [link for link in links.found if not link.startswith(("#", "data:,"))] == []
    assert not {"script", "iframe", "img", "object"} & links.tags
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []


def test_all_charts_are_there(page: Path, record: RunRecord) -> None:
    """Guards against a chart that silently vanished; what has no figures is named instead."""
    text = page.read_text(encoding="utf-8")
    for title in ALL_CHARTS:
        assert f"<h3>{title}</h3>" in text
    alone = render_html([record])
    assert "<h3>Throughput over load</h3>" not in alone
    assert "Not drawn, because no record has the figures: Throughput over load." in alone


def test_ids_are_unique(page: Path) -> None:
    """Guards against charts that share clip paths: the second one is then cut by the first one's."""
    ids = re.findall(r'\bid="([^"]+)"', page.read_text(encoding="utf-8"))
    assert ids
    assert len(ids) == len(set(ids))


def test_answers_cannot_become_markup(page: Path) -> None:
    """Guards against a model's output that runs in the reader's browser."""
    text = page.read_text(encoding="utf-8")
    assert "<script>" not in text
    assert "alert" in text
    assert "HTTP 500 &lt;b&gt;" in text


def test_worst_prompts_start_with_changed_texts(record: RunRecord) -> None:
    """Guards against a changed text below slow but correct ones."""
    found = worst(labelled([record]))
    assert [bad.prompt_id for bad in found[:2]] == ["p2", "p2"]
    assert all(bad.position == 9 and bad.unit == "token" for bad in found[:2])
    assert all(bad.position is None for bad in found[2:])
    assert "script" in found[0].speculative and "script" not in found[0].plain


def test_marked_differences() -> None:
    """Guards against a diff that loses words or does not escape them."""
    assert str(marked("the <b> cat", "the <b> dog")) == "the &lt;b&gt; <del>cat</del><ins>dog</ins>"
    assert str(marked("same", "same")) == "same"


def test_points_repeat_the_records_figures(record: RunRecord) -> None:
    """Guards against a limit chart that computes something else than the table."""
    found = points(labelled([record]))
    assert len(found) == 8
    for point in found:
        assert point.limit == pytest.approx(3 * 8 / 11)
        assert 1.5 < point.measured <= 2.001
    assert [column.label for column in columns(labelled([record]))] == ["gsm8k", "mt-bench"]


def test_tables_in_words(record: RunRecord, served: RunRecord) -> None:
    """Guards against figures under wrong headings, and failures that only the record shows."""
    table = summary_table(record)
    row = dict(zip(table.headings, table.rows[2], strict=True))
    assert row["form"] == "dflash"
    assert row["acceptance length"] == "3.00"
    assert row["same output"] == "6 of 8"
    assert row["speed-up"].startswith(("1.9", "2.0"))
    assert table.rows[1][1] == "plain-exact, fastest"
    mean = dict(zip(table.headings, table.rows[-1], strict=True))
    assert (mean["data set"], mean["form"], mean["same output"]) == ("mean of 2 sets", "dflash", "12 of 16")
    assert (mean["acceptance length"], mean["tokens/s"]) == ("3.00", "–")
    assert mean["speed-up"].startswith(("1.9", "2.0"))
    assert [row[0] for row in summary_table(served).rows if row[0].startswith("mean")] == []
    assert "server error" in " ".join(cell for row in summary_table(served).rows for cell in row)
    assert "load" in detail_table(served).headings and "load" not in detail_table(record).headings
    lines = markdown(table).splitlines()
    assert len({line.count("|") for line in lines}) == 1


def test_markdown_names_what_ran(record: RunRecord, served: RunRecord, page: Path) -> None:
    """Guards against figures without command, weights and machine beside them."""
    text = (page.parent / MARKDOWN_FILE).read_text(encoding="utf-8")
    assert text == render_markdown([record, served])
    for part in ("command: dflash bench", "fake-target, SHA-256 000", "machine:", "| torch |", "4 of 5 prompts"):
        assert part in text


def test_an_incomplete_run_says_so(record: RunRecord) -> None:
    """Guards against a half run that looks whole."""
    stopped = record.model_copy(update={"finished": False, "stopped_by": "stopped by the user (Ctrl-C)"})
    assert "this run is not complete. stopped by the user" in render_html([stopped])


def test_reports_repeat_themselves(record: RunRecord, served: RunRecord, page: Path) -> None:
    """Guards against a page that changes from call to call (dates, random ids)."""
    assert render_html([record, served]) == page.read_text(encoding="utf-8")


def test_reading_records(record: RunRecord, tmp_path: Path) -> None:
    """Guards against records of other versions that are half understood, and errors without file and line."""
    path = tmp_path / "record.jsonl"
    path.write_text(record.model_dump_json() + "\n" + record.model_dump_json() + "\n", encoding="utf-8")
    assert read_records([tmp_path, path]) == [record] * 4
    assert [one.label for one in labelled([record, record])] == ["torch 1", "torch 2"]
    row = json.loads(record.model_dump_json())
    path.write_text(json.dumps(row | {"schema_version": "dflash-bench/99"}) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"record.jsonl:1: holds no benchmark record"):
        read_records([path])
    del row["cells"]
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match="cells: Field required"):
        read_records([path])
    path.write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="no records found"):
        read_records([path])


@pytest.mark.parametrize(("name", "size"), [("wide", WIDE), ("phone", PHONE)])
def test_in_a_browser(name: str, size: tuple[int, int], page: Path, browser: Browser) -> None:
    """Guards against a page that is broken where people read it: console errors, charts that are empty, letters too
    small to read, and a phone's screen that has to be pushed sideways."""
    probed = page.with_name(f"probed-{name}.html")
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"), encoding="utf-8")
    document, console = browser.document(probed, *size)
    assert console == []
    match = re.search(r'data-found="([^"]+)"', document)
    assert match is not None
    found = json.loads(match[1].replace("&quot;", '"'))
    assert found["overflow"] <= 0
    assert len(found["charts"]) == len(ALL_CHARTS)
    picture = page.with_name(f"{name}.png")
    assert browser.screenshot(page, picture, *size) == []
    with Image.open(picture) as image:
        pixels = image.convert("RGB")
    assert pixels.width == size[0]
    for chart in found["charts"]:
        box = (chart["x"], chart["y"], chart["x"] + chart["width"], chart["y"] + chart["height"])
        colours = pixels.crop(tuple(map(round, box))).getcolors(1 << 20)
        assert colours is not None
        drawn = sum(count for count, colour in colours if is_coloured(colour))
        assert drawn > 40, f"{chart['name']} shows nothing"
        assert chart["letters"] >= 9, f"the letters of {chart['name']} are too small"


def test_the_browser_hears_errors(browser: Browser, tmp_path: Path) -> None:
    """Guards against the test above passing because consoles are not heard at all."""
    page = tmp_path / "broken.html"
    page.write_text(
        "<!doctype html><title>x</title><script>console.error('told'); nothing()</script>", encoding="utf-8"
    )
    _, console = browser.document(page, 400, 300)
    assert any("told" in line for line in console)
    assert any("nothing is not defined" in line for line in console)


def is_coloured(colour: object) -> bool:
    """Whether a pixel belongs to what is drawn: axes, letters and ground are grey, black or white."""
    assert isinstance(colour, tuple)
    return bool(max(colour) - min(colour) > 60)
