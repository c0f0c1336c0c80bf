"""Notebooks: they execute on a run, show figures and no paths of a machine, and .ipynb and .py stay in step."""

import shutil
from pathlib import Path

import jupytext
import pytest
from rich.console import Console

from scripts.render_notebooks import ROOT, machine_paths, main
from spec_lab.run import run
from tests.labs import lab, settings

SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
LARGEST = 300_000  # bytes of a rendered notebook

pytestmark = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    assert run(lab(temperature=1.0), settings(out), {}, Console(quiet=True)) == 0
    return out


def cells(file: Path) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in jupytext.read(file).cells]


def check_rendered(file: Path, run_directory: Path) -> None:
    """All of its code was executed, in order, without errors; it shows figures as PNG; it is small."""
    notebook = jupytext.read(file)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any("image/svg+xml" in output.get("data", {}) for output in outputs)
    assert not machine_paths(notebook, run_directory)
    assert file.stat().st_size <= LARGEST


def test_a_notebook_executes_on_a_run(source, finished, tmp_path, capsys):
    copy = shutil.copy(source, tmp_path / source.name)
    main([str(finished), str(copy)])
    pair = Path(copy).with_suffix(".ipynb")
    assert str(pair) in capsys.readouterr().out
    assert cells(pair) == cells(source)
    check_rendered(pair, finished)


def test_the_rendered_notebook_is_in_step_with_its_source(source, tmp_path):
    pair = source.with_suffix(".ipynb")
    assert pair.exists(), "render it: python scripts/render_notebooks.py RUN"
    assert cells(pair) == cells(source), "render it again: python scripts/render_notebooks.py RUN"
    check_rendered(pair, tmp_path)


def test_paths_of_this_machine_are_seen_in_outputs(source, tmp_path):
    notebook = jupytext.read(source)
    code = next(cell for cell in notebook.cells if cell.cell_type == "code")
    picture = {"output_type": "display_data", "metadata": {}, "data": {"image/png": str(tmp_path)}}
    printed = {"output_type": "stream", "name": "stdout", "text": f"tables of {tmp_path}\n"}
    code.outputs = [picture]
    assert machine_paths(notebook, tmp_path) == []
    code.outputs = [picture, printed]
    assert machine_paths(notebook, tmp_path) == [str(tmp_path)]


def test_a_directory_without_a_run_is_refused(source, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path), str(source)])
    assert "holds no summary.json: give the directory of a finished run" in capsys.readouterr().err
