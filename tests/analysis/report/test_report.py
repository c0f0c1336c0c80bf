"""The report: a page that needs nothing but itself, whatever the texts in it, and that a browser draws."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from spec_lab.analysis import metrics, report
from spec_lab.analysis.figures import colours
from spec_lab.analysis.report.page import short_path
from spec_lab.analysis.text import number
from spec_lab.core.terminal import visible
from spec_lab.results import sweep
from spec_lab.results.manifest import write_json
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
    for place, job in enumerate(jobs):
        one = folder / sweep.folder_name(job)
        one.mkdir()
        speed = 1.0 + place / 10
        summary["arms"]["speculative"]["speedup"] = {"mean": speed, "low": speed - 0.1, "high": speed + 0.1}
        write_json(one / "summary.json", summary)
        write_json(one / "manifest.json", facts)
        sweep.end(one, job, "", 0, 1.0)
    (folder / sweep.folder_name(jobs[0]) / "report.html").write_text("its own")
    failed = folder / sweep.folder_name(["proposer=fails"])
    failed.mkdir()
    sweep.fail(failed, ["proposer=fails"], ValueError(HOSTILE), HOSTILE, 1.0)
    return folder


@pytest.mark.nightly
def test_the_page_states_by_what_margin_of_logits_outputs_differ(ran, tmp_path):
    out = tmp_path / "differs"
    shutil.copytree(ran, out)
    assert "logits of the two tokens" not in report.write(out).read_text()
    summary = json.loads((out / "summary.json").read_text())
    summary["output_margins"] = {"speculative": {"outputs": 2, "median": 0.0123, "largest": 0.5}}
    write_json(out / "summary.json", summary)
    assert "0.012 (0.5): median (largest)" in report.write(out).read_text()


@pytest.mark.nightly
def test_a_run_that_drafted_nothing_has_a_report(ran, tmp_path):
    out = tmp_path / "none"
    shutil.copytree(ran, out)
    facts = json.loads((out / "manifest.json").read_text())
    for one in facts["proposers"].values():
        one["tree"] = "none"  # of a Medusa run on a machine where no tree pays
    write_json(out / "manifest.json", facts)
    assert report.write(out).is_file()


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
    policy = next(found["content"] for tag, found in parsed.tags if "http-equiv" in found)
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy and "http" not in policy


def test_texts_do_not_break_out(page):
    parsed = Parsed(page)
    tags = [tag for tag, _ in parsed.tags]
    assert tags.count("script") == 3 and tags.count("style") == 1  # two that run, and the data of the steps
    assert not [found for _, found in parsed.tags if any(name.startswith("on") for name in found)]
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


def test_ids_are_unique_in_a_page(page):
    ids = Parsed(page).values("id")
    assert len(set(ids)) == len(ids) > 50


@pytest.mark.nightly
def test_paths_do_not_tell_of_the_machine(ran, tmp_path):
    assert short_path(str(tmp_path / "spec_lab/zoo/prompts/code.jsonl")) == "zoo/prompts/code.jsonl"
    assert short_path("/data/models/tiny/") == "models/tiny"
    assert [short_path(one) for one in ("Qwen/Qwen3-8B", "mine.jsonl", None)] == ["Qwen/Qwen3-8B", "mine.jsonl", ""]
    for name in ("rounds.parquet", "steps.parquet", "requests.parquet"):
        shutil.copy(ran / name, tmp_path)
    facts = json.loads((ran / "manifest.json").read_text())
    facts["config"] |= {"target": {"path": "/data/of/me/tiny"}, "prompts": {"path": "/data/of/me/code.jsonl"}}
    write_json(tmp_path / "manifest.json", facts)
    text = Parsed(report.write(tmp_path)).text
    assert "me/tiny" in text and "me/code.jsonl" in text and "/data" not in text


@pytest.mark.nightly
def test_a_tree_in_a_notation_of_another_package_is_left_out(ran, tmp_path):
    for name in ("rounds.parquet", "steps.parquet", "requests.parquet"):
        shutil.copy(ran / name, tmp_path)
    facts = json.loads((ran / "manifest.json").read_text())
    facts["proposers"] = {arm: {"tree": tree} for arm, tree in (("speculative", [[0]]), ("other", "left, right"))}
    write_json(tmp_path / "manifest.json", facts)
    assert report.write(tmp_path).is_file()


@pytest.mark.nightly
def test_the_variance_that_exact_acceptance_saves_has_a_column(ran, tmp_path):
    assert "variance reduction" not in columns(report.write(ran))  # at temperature 0 there is none
    steps = pd.read_parquet(ran / "steps.parquet")
    steps["expected_emitted"] = steps["emitted"] * 0.5 + 0.7
    steps.to_parquet(tmp_path / "steps.parquet")
    for name in ("rounds.parquet", "requests.parquet", "manifest.json"):
        shutil.copy(ran / name, tmp_path)
    reduction = metrics.calibration(metrics.decode_steps(steps, "speculative"))["variance_reduction"]
    assert reduction == pytest.approx(4)  # half the deviations
    assert arm_row(report.write(tmp_path), "repeat")["variance reduction"] == "4.0"


def columns(page: Path) -> list[str]:
    """Headings of the page's first table."""
    headings = re.findall(r"<th[^>]*>([^<]*)</th>", page.read_text().partition("</thead>")[0])
    return [one.replace("\u00a0", " ") for one in headings]


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


def test_a_report_of_a_run_of_an_older_version_computes_its_verdict(ran, tmp_path):
    out = tmp_path / "older"
    shutil.copytree(ran, out)
    for name in ("summary", "manifest"):
        facts = json.loads((out / f"{name}.json").read_text())
        write_json(out / f"{name}.json", {key: one for key, one in facts.items() if not key.startswith("verdict")})
    requests = pd.read_parquet(out / "requests.parquet").drop(columns=["other_cores", "attempt"])
    requests.to_parquet(out / "requests.parquet")
    text = " ".join(Parsed(report.write(out)).text.split())
    assert "Verdict: " in text and "not recorded" in text and "fewer than the 8" in text


@pytest.mark.nightly
@pytest.mark.one_in(2)
@pytest.mark.parametrize("which", ["page", "sweep"])
def test_arms_are_shown_by_the_names_of_their_proposers(which, page, swept):
    text = Parsed(page if which == "page" else report.write(swept)).text
    assert "repeat" in text and "longer" in text and "speculative" not in text


# Runs in every state -------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_killed_run_says_so_and_shows_its_groups(ran, tmp_path):
    for name in ("rounds.parquet", "steps.parquet", "requests.parquet", "manifest.json"):
        shutil.copy(ran / name, tmp_path)
    text = Parsed(report.write(tmp_path)).text
    assert "This run has not ended: 2 of 2 groups" in text and charts_in(tmp_path) >= 5


def test_a_run_without_rows_says_why_there_are_no_charts(ran, tmp_path):
    shutil.copy(ran / "manifest.json", tmp_path)
    parsed = Parsed(report.write(tmp_path))
    assert "No arm drafted anything." in parsed.text
    assert "No group of prompts is finished yet." in parsed.text
    assert not charts_in(tmp_path)


@pytest.mark.nightly
def test_a_baseline_alone_has_no_speed_up(ran, tmp_path):
    for name in ("rounds", "steps", "requests"):
        table = pd.read_parquet(ran / f"{name}.parquet")
        table[table["arm"] == "baseline"].to_parquet(tmp_path / f"{name}.parquet")
    shutil.copy(ran / "manifest.json", tmp_path)
    assert "No arm was compared with a baseline" in Parsed(report.write(tmp_path)).text


def left_by_another_task(folder: Path, manifest: Path, *files: str) -> Path:
    """What a task leaves that is no run: a manifest and files of its own."""
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
    sweep.end(tmp_path, [], "", 0, 1.0)
    with pytest.raises(ValueError, match="manifest.json"):
        report.write(tmp_path)


def test_neither_run_nor_sweep_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds neither a run"):
        report.write(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        report.write(tmp_path / "nowhere")


def test_papers_find_the_figures_beside_the_page(page):
    files = {file.name for file in (page.parent / "figures").iterdir()}
    assert {"acceptance.svg", "throughput.svg", "phases.svg", "tokens.svg", "cost.svg", "cost.png"} <= files


# Sweeps --------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_sweep_says_where_its_runs_stand(swept):
    parsed = Parsed(report.write(swept))
    assert "6 done" in parsed.text and "1 failed" in parsed.text and "1 pending" in parsed.text
    assert "document.title='owned'" in parsed.text  # the error, as text
    assert "By proposer.depth" in parsed.text
    links = {unquote(link) for link in parsed.values("href") if link.endswith("report.html")}
    assert links == {"proposer.depth=2,proposer=a/report.html"}


@pytest.mark.nightly
def test_a_sweep_has_filters_and_short_names_of_its_runs(swept, tmp_path):
    parsed = Parsed(report.write(swept))
    assert {"0", "1"} < {found["data-column"] for tag, found in parsed.tags if found.get("class") == "choice"}
    shared = [[f"seed={seed}", "proposer=a", "sampling.temperature=1"] for seed in (1, 2)]
    sweep.plan(tmp_path, shared)
    parsed = Parsed(report.write(tmp_path))
    assert "seed=1" in parsed.text and "proposer=a" not in parsed.text
    assert sweep.folder_name(shared[0]) in parsed.values("title")


def test_a_sweep_without_a_run_that_is_done_has_no_charts(tmp_path):
    sweep.plan(tmp_path, [["seed=1"]])
    parsed = Parsed(report.write(tmp_path))
    assert "No run is finished yet" in parsed.text and not charts_in(tmp_path)


@pytest.mark.nightly
def test_tasks_without_figures_are_rows_and_not_drawn(swept, ran, tmp_path):
    jobs = [["experiment=certify", f"task.samples={samples}"] for samples in (10, 20)]
    sweep.plan(tmp_path, jobs)
    for job in jobs:
        one = tmp_path / sweep.folder_name(job)
        one.mkdir()
        left_by_another_task(one, ran / "manifest.json", "certificate.json")
        sweep.end(one, job, "", 0, 1.0)
    alone = Parsed(report.write(tmp_path))
    assert "2 done" in alone.text and "No two runs with figures differ in task.samples alone" in alone.text
    assert not charts_in(tmp_path)
    depth = ["proposer.depth=2", "proposer=a"]
    sweep.plan(tmp_path, [depth])
    shutil.copytree(swept / sweep.folder_name(depth), tmp_path / sweep.folder_name(depth))
    mixed = Parsed(report.write(tmp_path))
    assert charts_in(tmp_path) == 2  # the run's: forest and scatter
    named = {*mixed.values("title"), *(Path(unquote(link)).parts[0] for link in mixed.values("href") if link[0] != "#")}
    assert {sweep.folder_name(job) for job in [*jobs, depth]} <= named


def test_an_option_and_the_name_of_what_it_chose_are_told_apart(ran, tmp_path):
    jobs = [[f"constraint={name}", "target=/models/of/one/tiny"] for name in ("first", "second")]
    sweep.plan(tmp_path, jobs)
    summary = json.loads((ran / "summary.json").read_text()) | {"target": "/machine/spec_lab/zoo/target"}
    for place, job in enumerate(jobs):
        one = tmp_path / sweep.folder_name(job)
        one.mkdir()
        for arm in summary["arms"].values():
            arm["constraint"] = f"named {place}"
        write_json(one / "summary.json", summary)
        sweep.end(one, job, "", 0, 1.0)
    parsed = Parsed(report.write(tmp_path))
    cells = re.findall(r"<td>(first|second|named \d)</td>", (tmp_path / "report.html").read_text())
    assert sorted(set(cells)) == ["first", "second"]
    assert "varied: constraint" in parsed.text
    assert re.search(r"target\s*one/tiny", parsed.text) and re.search(r"target_name\s*zoo/target", parsed.text)
    assert "/machine" not in parsed.text and "constraint_name" not in parsed.text


# A browser -----------------------------------------------------------------------------------------------------------


def browse(page: Path, folder: Path, *wanted: str) -> tuple[str, list[str]]:
    """What chromium prints, and what the page logged on the console."""
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


@pytest.mark.one_in(2)
@needs_browser
@pytest.mark.parametrize("which", ["page", "sweep"])
def test_a_browser_shows_a_page_that_is_not_blank(which, page, swept, tmp_path):
    file = page if which == "page" else report.write(swept)
    picture = tmp_path / "seen.png"
    _, output = browse(file, tmp_path, f"--screenshot={picture}")
    assert output == []
    seen = (imread(picture)[..., :3] * 255).round().astype(int)
    assert seen.shape[:2] == (3000, 1240)
    assert len(np.unique(seen @ np.array([1 << 16, 1 << 8, 1]))) > 200  # colours
    colour = to_rgb(colours(["repeat", "longer"])["repeat"])
    marks = (np.abs(seen - (np.array(colour) * 255)).sum(-1) < 12).sum()
    assert marks > 300


@needs_browser
def test_the_browser_would_tell_of_an_error(tmp_path):
    page = tmp_path / "wrong.html"
    page.write_text("<!DOCTYPE html><script>nowhere()</script>")
    assert "nowhere is not defined" in " ".join(browse(page, tmp_path, "--dump-dom")[1])


@pytest.mark.nightly
@pytest.mark.parametrize(("temperature", "says"), [(0.0, "100.0%"), (0.7, "n/a (temperature 0.7)")])
def test_identical_outputs_are_shown_at_temperature_0_only(tmp_path, temperature, says):
    run(lab(temperature=temperature), settings(tmp_path / "run"), {"sampling": {"temperature": temperature}})
    assert arm_row(report.write(tmp_path / "run"), "repeat")["identical outputs"] == says
