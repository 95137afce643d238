"""`tierstore report`: one page that needs nothing else, says what is there and what is not, and obeys no name."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.unit.runs import HOSTILE, record_of, write
from tierstore.cli import main
from tierstore.history import Interval
from tierstore.report.charts import duration, pressure, residency, stacked
from tierstore.report.page import page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOID = {"meta", "img", "link", "br", "input"}


MEASURE = """
addEventListener("load", () => {
  const style = element => element.ownerDocument.defaultView.getComputedStyle(element);
  document.title = JSON.stringify(Array.from(frames, frame => ({
    over: frame.document.documentElement.scrollWidth - frame.document.documentElement.clientWidth,
    back: style(frame.document.body).backgroundColor,
    marks: Array.from(frame.document.querySelectorAll(".mark"),
      mark => [mark.classList[1], style(mark).stroke, style(mark).strokeDasharray]),
  })));
});
"""
"""A script of the test's, not of the page's: how wide each frame is, and what is seen of its marks."""


def browse(folder: Path, text: str, scheme: str = "light") -> subprocess.CompletedProcess[str]:
    """Show a page in a browser; answer what became of it, and what the browser said."""
    (folder / "page.html").write_text(text)
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--enable-logging=stderr", "--window-size=1400,1600", "--dump-dom"]
    command += [f"--blink-settings=preferredColorScheme={int(scheme == 'light')}", (folder / "page.html").as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)


class Tags(HTMLParser):
    """The tags of a page, their attributes, and its text; sees that they are nested well."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data + " "


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["report", *arguments])
    return int(exit_.value.code or 0)


def test_page_has_every_section_and_needs_nothing_else():
    found = Tags(page(record_of()))
    sections = ["Where chunks were", "What a step's time went into", "Bandwidth of each route", "Pressure", "Decisions"]
    for words in (
        *sections,
        "cpu has room here: spill",
        "layers.3.here",
        "nvme->cpu: 1.50 GB/s on average",
        "steps 60",
    ):
        assert words in " ".join(found.words.split())
    names = {tag for tag, _ in found.tags}
    assert not names & {"script", "link", "img", "iframe", "object"}
    assert not any({"src", "href"} & attributes.keys() for _, attributes in found.tags)
    assert "prefers-color-scheme: dark" in found.words and "url(" not in found.words and "@import" not in found.words


def test_names_are_shown_and_never_obeyed():
    plain, hostile = Tags(page(record_of())), Tags(page(record_of(words=HOSTILE)))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]
    assert [set(one) for _, one in hostile.tags] == [set(one) for _, one in plain.tags]
    assert HOSTILE in hostile.words


def test_hostile_tier_and_route_names_stay_words():
    record = record_of(samples=3)
    interval = Interval(1.0, 1, 1.0, 1.0, 1.0, {HOSTILE: 5})
    strange = tuple(
        replace(sample, interval=interval, used_bytes={HOSTILE: 1}, rows=({HOSTILE: 4},)) for sample in record.samples
    )
    text = page(replace(record, samples=strange))
    assert not {"script", "img"} & {tag for tag, _ in Tags(text).tags}


@pytest.mark.parametrize("samples", [0, 1, 2])
def test_short_runs_have_a_page_that_says_what_there_is_not(samples):
    words = Tags(page(record_of(samples=samples, decisions=0))).words
    assert ("None was measured" in words) == (samples == 0) and "None." in words
    assert ("No step was recorded" in words) == (samples == 0) == ("There were no chunks" in words)
    assert ("Nothing was moved" in words) == (samples == 0)


def test_run_without_measured_pressure_says_so_and_has_no_chart_of_it():
    found = Tags(page(record_of(is_measured=False)))
    assert "None was measured" in found.words and sum(tag == "svg" for tag, _ in found.tags) == 4


def test_slow_route_is_told_in_a_unit_that_shows_it():
    record = record_of(samples=2)
    slow = tuple(
        replace(one, interval=Interval(2.0, 1, 1.0, 0.0, 0.0, {"cpu->nvme": 5 * 10**6})) for one in record.samples
    )
    assert "cpu->nvme: 2.50 MB/s on average" in Tags(page(replace(record, samples=slow))).words


def test_pressure_is_told_by_tier_with_what_was_done_because_of_it():
    words = " ".join(Tags(page(record_of())).words.split())
    for shown in (
        "cpu: at most 88 %, 90 % at the end the container's limit (cgroup v2) here; tasks waited 12.5 % of ten seconds",
        "60 chunks were spilled, 0 promoted",
        "spill offload promote reload",
        "28 s to 30 s, up to step 15: 80.0 %, at most 88.0 %, 1 x spill",
    ):
        assert shown in words


def test_pressure_is_as_high_as_its_share_and_marked_where_something_was_decided():
    sample = record_of(samples=2).samples[0]
    samples = [
        replace(sample, seconds=10.0 * (number + 1), pressure={"cpu": now}, most_pressure={"cpu": most})
        for number, (now, most) in enumerate([(0.25, 0.5), (0.75, 2.0)])
    ]
    picture = pressure(samples, "cpu", {"spill": [10.0], "promote": [15.0, 99.0]})

    def heights(name: str) -> list[float]:
        path = picture.split(f'class="{name}" d="M')[1].split("z")[0].replace("L", " ").split()
        return [float(y) for y in path[1:8:2]]

    assert heights("cpu now") == [300, 300, 100, 100]
    assert heights("cpu most") == [200, 200, 0, 0]  # nothing is fuller than full
    assert 'class="mark spill" d="M500 0V400"' in picture
    assert 'class="mark promote" d="M750 0V400M1000 0V400"' in picture


def test_largest_record_has_a_page_of_a_few_hundred_kilobytes():
    assert len(page(record_of(samples=240))) < 500_000


def test_residency_covers_the_whole_height_in_each_column():
    """Heights of all bands, by column, add up to the picture's."""
    samples = record_of(samples=7).samples
    picture = residency(samples, 96)
    bands = [part for line in picture.split('d="')[1:] for part in line.split('"')[0].split("z") if "V" in part]
    heights: dict[str, float] = {}
    for band in bands:
        start, rest = band[1:].split(" ", 1)
        top, bottom = rest.split("H")[0], rest.split("V")[1].split("H")[0]
        heights[start] = heights.get(start, 0.0) + float(bottom) - float(top)
    assert len(heights) == 7
    assert all(height == pytest.approx(400, abs=0.5) for height in heights.values())


def test_stacked_values_reach_as_high_as_their_sum():
    picture = stacked(record_of(samples=2).samples, {"update": [1.0, 3.0], "wait for read": [1.0, 1.0]}, "ms", "split")
    wait = picture.split('class="wait-for-read" d="M')[1].split("z")[0].replace("L", " ").split()
    assert [float(y) for y in wait[1::2]] == pytest.approx(
        [400 * (1 - value / 4.2) for value in (2, 2, 4, 4, 3, 3, 1, 1)], abs=0.1
    )


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.25, "0.25 s"), (59.4, "59.4 s"), (61, "1:01 min"), (3601, "1:00:01 h")]
)
def test_durations_are_in_words(seconds, words):
    assert duration(seconds) == words


def test_command_writes_beside_the_record_or_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record = write(tmp_path / "run.json", record_of())
    assert call(str(record)) == 0 and capsys.readouterr().out.strip() == str(tmp_path / "run.html")
    assert call(str(record), "-o", str(tmp_path / "page.html")) == 0
    assert (tmp_path / "page.html").read_text() == (tmp_path / "run.html").read_text()


@pytest.mark.parametrize("target", ["missing/page.html", "run.json", "."])
def test_page_that_cannot_be_written_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str], target):
    record = write(tmp_path / "run.json", record_of())
    before = record.read_text()
    assert call(str(record), "-o", str(tmp_path / target)) == 2
    assert "-o" in capsys.readouterr().err and record.read_text() == before


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
def test_browser_shows_the_page_without_running_what_it_names(tmp_path: Path):
    """A name that ran would change the title, and what the page loads would be refused and told."""
    words = "<script>document.title='obeyed'</script><img src=x onerror=\"document.title='obeyed'\">"
    done = browse(tmp_path, page(record_of(words=words)))
    found = Tags(done.stdout)
    assert "<title>obeyed" not in done.stdout and "script" not in {tag for tag, _ in found.tags}
    assert sum(tag == "svg" for tag, _ in found.tags) == 7
    assert "CONSOLE" not in done.stderr  # no refused load, no error


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_fits_the_page_into_any_width_and_draws_each_mark(tmp_path: Path, scheme: str):
    """Frames of a phone's and a desk's width, measured where they are shown."""
    words = "a_very_long_name_without_a_place_to_break_it_" * 6
    text = page(record_of(words=words)).replace("default-src 'none'; style-src", "style-src")
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{escape(text)}"></iframe>' for width in (360, 1000))
    done = browse(tmp_path, f"<title></title>{frames}<script>{MEASURE}</script>", scheme)
    told = json.loads(unescape(done.stdout.split("<title>")[1].split("</title>")[0]))
    assert [frame["over"] for frame in told] == [0, 0]
    for frame in told:
        assert frame["back"] == {"light": "rgb(251, 251, 250)", "dark": "rgb(20, 23, 26)"}[scheme]
        assert sorted({kind for kind, *_ in frame["marks"]}) == ["offload", "promote", "reload", "spill"]
        looks = {kind: look for kind, *look in frame["marks"]}
        assert len({tuple(look) for look in looks.values()}) == 4 and "none" not in {look[0] for look in looks.values()}
