"""The report: a page that needs nothing but itself, whatever the texts in it, and that a browser draws."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pandas as pd
import pytest

from spec_lab.analysis import metrics, report
from spec_lab.core.terminal import short_path, visible
from spec_lab.results import run_state, sweep
from spec_lab.results.manifest import write_json
from spec_lab.results.result import number
from spec_lab.tasks.benchmark import run
from tests.analysis.report.parsed import HOSTILE, Parsed
from tests.labs import Repeat, lab, settings

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """A run of hostile prompts, outputs and names."""
    out = tmp_path_factory.mktemp("ran") / "run <b>&'\""
    run(lab(texts=("abc" + HOSTILE, "b c d", "d e f", "e f"), more_proposers={"longer": Repeat(4)}), settings(out), {})
    requests = pd.read_parquet(out / "requests.parquet")
    first = requests["request"] == 0
    requests.loc[first, "name"] = HOSTILE
    requests.loc[first, "text"] = "x" * 8 + HOSTILE
    requests.to_parquet(out / "requests.parquet")
    return out


@pytest.fixture(scope="module")
def page(ran) -> Path:
    return report.write(ran)


@pytest.fixture(scope="module")
def swept(ran, tmp_path_factory) -> Path:
    """A sweep: copies of the run with different speeds, one that failed, one that waits."""
    folder = tmp_path_factory.mktemp("swept")
    jobs = [[f"proposer.depth={depth}", f"proposer={name}"] for name in ("a", "b") for depth in (2, 4, 8)]
    sweep.plan(folder, [*jobs, ["proposer=waits"], ["proposer=fails"]])
    summary, facts = (json.loads((ran / name).read_text()) for name in ("summary.json", "manifest.json"))
    for index, (job, run_folder) in enumerate(zip(jobs, sweep.folders(folder, jobs), strict=True)):
        run_folder.mkdir()
        speed = 1.0 + index / 10
        summary["arms"]["repeat"]["speedup"] = {"mean": speed, "low": speed - 0.1, "high": speed + 0.1}
        write_json(run_folder / "summary.json", summary)
        write_json(run_folder / "manifest.json", facts)
        run_state.end(run_folder, job, "", 0, 1.0)
    (sweep.folders(folder, jobs)[0] / "report.html").write_text("its own")
    failed = folder / "proposer=fails"
    failed.mkdir()
    run_state.fail(failed, ["proposer=fails"], ValueError(HOSTILE), HOSTILE, 1.0)
    return folder


def charts_in(folder: Path) -> int:
    """How many figures the page of a run or sweep has."""
    return (folder / "report.html").read_text().count('<figure class="chart"><svg')


# What the page is ----------------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("which", ["page", "sweep"])
def test_nothing_is_fetched(which, page, swept):
    file = page if which == "page" else report.write(swept)
    parsed = Parsed(file)
    tags = {tag for tag, _ in parsed.tags}
    assert not tags & {"link", "img", "iframe", "object", "embed", "base", "form", "video", "audio", "source"}
    assert not parsed.values("src") and not parsed.values("srcset")
    assert parsed.values("href")
    for link in parsed.values("href"):
        assert (file.parent / unquote(link)).is_file()  # relative, and there
    assert all(link.startswith("#") for link in parsed.values("xlink:href"))
    assert set(re.findall(r"url\((.)", file.read_text())) <= {"#"}  # parts of the same figure
    assert "url(" not in file.read_text().partition("</style>")[0] and "@import" not in file.read_text()
    policy = next(attributes["content"] for tag, attributes in parsed.tags if "http-equiv" in attributes)
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy and "http" not in policy


def test_texts_do_not_break_out(page):
    parsed = Parsed(page)
    tags = [tag for tag, _ in parsed.tags]
    assert tags.count("script") == 3 and tags.count("style") == 1  # two that run, and the data of the steps
    assert not [attributes for _, attributes in parsed.tags if any(name.startswith("on") for name in attributes)]
    assert "</script><script>document.title='owned'</script>" in parsed.text  # shown as it is
    assert "{{7*7}}" in parsed.text
    raw = page.read_text(encoding="utf-8")
    assert not re.search("[\x00\u2028\u202e]", raw)
    assert "<U+202E>RTL␀" in parsed.text


def test_what_cannot_be_seen_is_named():
    assert visible("a\tb\n") == "a\tb\n"
    assert visible("\x00\x1b\x7f\u200b\u2066") == "␀␛␡<U+200B><U+2066>"
    assert visible("é שלום 🙂") == "é שלום 🙂"
    assert number(float("nan")) == number(None) == "" and number(1.005, ".1f") == "1.0"


def test_outputs_are_shaded_as_they_came(page, ran):
    raw = page.read_text(encoding="utf-8")
    steps, requests = (pd.read_parquet(ran / f"{name}.parquet") for name in ("steps", "requests"))
    articles = raw.split("<article>")[2:]  # but for the first prompt, the texts of which are not its own
    shaded = "".join(re.findall(r'<i class="a"[^>]*>(.*?)</i>', "".join(articles)))
    assert len(articles) == 3
    assert len(shaded) == steps[steps["request"] > 0]["accepted_kept"].sum() > 0  # a letter for each token
    assert raw.count('class="output"') == len(requests)


@pytest.mark.nightly
def test_paths_do_not_tell_of_the_machine(ran, tmp_path):
    assert short_path(str(tmp_path / "spec_lab/zoo/prompts/code.jsonl")) == "zoo/prompts/code.jsonl"
    assert short_path("/data/models/tiny/") == "models/tiny"
    assert [short_path(path) for path in ("Qwen/Qwen3-8B", "mine.jsonl", None)] == ["Qwen/Qwen3-8B", "mine.jsonl", ""]
    for name in ("forwards.parquet", "steps.parquet", "requests.parquet"):
        shutil.copy(ran / name, tmp_path)
    facts = json.loads((ran / "manifest.json").read_text())
    facts["config"] |= {"target": {"path": "/data/of/me/tiny"}, "prompts": {"path": "/data/of/me/code.jsonl"}}
    write_json(tmp_path / "manifest.json", facts)
    text = Parsed(report.write(tmp_path)).text
    assert "me/tiny" in text and "me/code.jsonl" in text and "/data" not in text


def columns(page: Path) -> list[str]:
    """Headings of the page's first table."""
    headings = re.findall(r"<th[^>]*>([^<]*)</th>", page.read_text().partition("<thead>")[2].partition("</thead>")[0])
    return [heading.replace("\u00a0", " ") for heading in headings]


def arm_row(page: Path, arm: str) -> dict[str, str]:
    """The arm's texts in the page's first table, by heading."""
    table = page.read_text().partition("<tbody>")[2].partition("</tbody>")[0]
    row = next(row for row in table.split("<tr>") if f"{arm}</td>" in row)
    texts = [re.sub("<[^>]*>", "", cell).strip() for cell in re.findall(r"<td.*?</td>", row, re.DOTALL)]
    return dict(zip(columns(page), texts, strict=True))


def test_the_table_of_arms_has_the_figures_of_the_metrics(page, ran):
    tables, row = metrics.load(ran), arm_row(page, "longer")
    figures = metrics.summarise(tables, "longer")
    assert (
        row["tau"] == f"{figures['tau_pooled']:.2f}" and row["acceptance rate"] == f"{figures['draft_token_rate']:.1%}"
    )
    assert row["speed-up [95 %]"] == f"{figures['speedup']['mean']:.2f}", "fewer than eight groups have no interval"
    assert row["mean of group speed-ups [95 %]"] == f"{figures['speedup_mean_of_groups']['mean']:.2f}"
    assert row["TTFT ms"] == f"{1e3 * figures['time_to_first_token']:.1f}"


def test_the_verdict_stands_above_the_table(page, ran):
    summary, parsed = json.loads((ran / "summary.json").read_text()), Parsed(page)
    text = " ".join(parsed.text.split())
    assert summary["verdict"] != "reliable" and f"Verdict: {summary['verdict']}: " in text, "two groups"
    assert text.index("fewer than the 8") < text.index("tokens/s")


def test_the_main_figures_come_first_in_few_columns(page, ran, swept):
    figures, parsed = metrics.summarise(metrics.load(ran), "longer"), Parsed(page)
    key = page.read_text().partition('<table class="key">')[2].partition("</table>")[0]
    assert re.findall(r"<th[^>]*>([^<]*)</th>", key) == ["arm", "speed-up", "tau", "acceptance", "lossless"]
    row = next(row for row in key.split("<tr>") if "longer</td>" in row)
    texts = [re.sub("<[^>]*>", "", cell).strip() for cell in re.findall(r"<td.*?</td>", row, re.DOTALL)]
    speedup, tau, rate = figures["speedup"]["mean"], figures["tau_pooled"], figures["draft_token_rate"]
    assert texts[:4] == ["longer", f"{speedup:.2f}", f"{tau:.2f}", f"{rate:.1%}"] and texts[4]
    assert parsed.text.index("acceptance") < parsed.text.index("The times are ") < parsed.text.index("Verdict")
    best = report.write(swept).read_text().partition('<table class="key">')[2].partition("</table>")[0]
    assert "1.50 <small>[1.40, 1.60]</small>" in best.split("<tr>")[2], "the fastest first"


def test_a_heading_names_the_run_its_task_and_its_folder(page, swept):
    def heading(file: Path) -> str:
        return " ".join(re.sub("<[^>]*>", " ", re.findall("<h1>(.*?)</h1>", file.read_text())[0]).split())

    assert heading(page).startswith("run: benchmark run ")
    assert heading(report.write(swept)) == f"toy: sweep over depth, proposer {swept.name}"
    run = swept / "proposer.depth=4,proposer=a"
    assert report._where(run) == f"run 2 of 8, proposer.depth=4 proposer=a, of {swept.name}"


def test_panels_that_stand_side_by_side_are_elements_that_wrap(page):
    charts = re.findall(r'<figure class="chart">(.*?)</figure>', page.read_text(), re.DOTALL)
    drawn = next(chart for chart in charts if "Conditional: accepted k" in chart)
    (left, width), (middle, other) = (map(float, view) for view in re.findall(r'viewBox="(\S+) 0 (\S+) \S+"', drawn))
    assert left == 0 and middle == width and other > 100, "next to each other they are the figure"
    assert drawn.count("<use ") > 1 and drawn.count('<use xlink:href="#acceptance-figure_1"/></svg>') == 1


def test_a_report_of_a_run_of_an_older_version_computes_its_verdict(ran, tmp_path):
    out = tmp_path / "older"
    shutil.copytree(ran, out)
    for name in ("summary", "manifest"):
        facts = json.loads((out / f"{name}.json").read_text())
        write_json(out / f"{name}.json", {key: value for key, value in facts.items() if not key.startswith("verdict")})
    requests = pd.read_parquet(out / "requests.parquet").drop(columns=["other_cores", "attempt"])
    requests.to_parquet(out / "requests.parquet")
    text = " ".join(Parsed(report.write(out)).text.split())
    assert "Verdict: " in text and "not recorded" in text and "fewer than the 8" in text


@pytest.mark.nightly
@pytest.mark.one_in(2)
@pytest.mark.parametrize("which", ["page", "sweep"])
def test_arms_are_shown_by_the_names_of_their_proposers(which, page, swept):
    text = Parsed(page if which == "page" else report.write(swept)).text
    assert "repeat" in text and "longer" in text


# Runs in every state -------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_killed_run_says_so_and_shows_its_groups(ran, tmp_path):
    for name in ("forwards.parquet", "steps.parquet", "requests.parquet", "manifest.json"):
        shutil.copy(ran / name, tmp_path)
    text = Parsed(report.write(tmp_path)).text
    assert "This run has not ended: 2 of 2 groups" in text and charts_in(tmp_path) >= 5


def test_a_run_without_rows_says_why_there_are_no_charts(ran, tmp_path):
    shutil.copy(ran / "manifest.json", tmp_path)
    parsed = Parsed(report.write(tmp_path))
    assert "No arm drafted anything." in parsed.text
    assert "No group of prompts is finished yet." in parsed.text
    assert not charts_in(tmp_path)


def left_by_another_task(folder: Path, manifest: Path, *files: str) -> Path:
    """Write the results of a task that is no run: a manifest and files of its own."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    shutil.copy(manifest, folder)
    return folder


@pytest.mark.parametrize(
    "files",
    [("certificate.json", "figures/convergence.png"), ("cost.parquet", "figures/cost.png", "summary.json"),
     ("parts/cost-0000-0001-000064.parquet",)],
)  # fmt: skip
def test_what_another_task_left_is_refused_by_name(files, ran, tmp_path):
    left_by_another_task(tmp_path, ran / "manifest.json", *files)
    with pytest.raises(ValueError, match=f"holds no rows of a run, .*{', '.join(files)}$"):
        report.write(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_task_that_is_done_and_left_nothing_is_refused(ran, tmp_path):
    left_by_another_task(tmp_path, ran / "manifest.json")
    report.write(tmp_path)  # a run that has just begun
    run_state.end(tmp_path, [], "", 0, 1.0)
    with pytest.raises(ValueError, match="manifest.json"):
        report.write(tmp_path)


# Sweeps --------------------------------------------------------------------------------------------------------------


def test_an_option_and_the_name_of_what_it_chose_are_told_apart(ran, tmp_path):
    jobs = [[f"constraint={name}", "target=/models/of/one/tiny"] for name in ("first", "second")]
    sweep.plan(tmp_path, jobs)
    summary = json.loads((ran / "summary.json").read_text()) | {"target": "/machine/spec_lab/zoo/target"}
    for index, (job, run_folder) in enumerate(zip(jobs, sweep.folders(tmp_path, jobs), strict=True)):
        run_folder.mkdir()
        for arm in summary["arms"].values():
            arm["constraint"] = f"named {index}"
        write_json(run_folder / "summary.json", summary)
        run_state.end(run_folder, job, "", 0, 1.0)
    parsed = Parsed(report.write(tmp_path))
    cells = re.findall(r"<td>(first|second|named \d)</td>", (tmp_path / "report.html").read_text())
    assert sorted(set(cells)) == ["first", "second"]
    assert "varied: constraint" in parsed.text
    assert re.search(r"target\s*one/tiny", parsed.text) and re.search(r"target_name\s*zoo/target", parsed.text)
    assert "/machine" not in parsed.text and "constraint_name" not in parsed.text


# A browser -----------------------------------------------------------------------------------------------------------


def browse(page: Path, folder: Path, *wanted: str) -> tuple[str, list[str]]:
    """Return the output of chromium, and the page's messages on its console."""
    quiet = "--disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
    command = [CHROMIUM, "--headless", "--no-sandbox", *quiet.split(), "--disable-sync", "--hide-scrollbars",
               f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--v=0",
               "--virtual-time-budget=20000", "--window-size=1240,3000", *wanted, page.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, errors="replace")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="NO BROWSER: install chromium; without one nobody has looked at the report"
)


@needs_browser
@pytest.mark.parametrize("which", ["page", "sweep"])
@pytest.mark.nightly
def test_a_browser_draws_every_chart(which, page, swept, tmp_path):
    file = page if which == "page" else report.write(swept)
    dom, output = browse(file, tmp_path, "--dump-dom")
    assert output == []
    assert dom.count('<figure class="chart"><svg') == charts_in(file.parent) >= 4
    assert "<title>owned" not in dom
