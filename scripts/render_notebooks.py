"""Execute notebooks against a run, and write each as .ipynb with its outputs beside its source.

``python scripts/render_notebooks.py outputs/notebook`` renders every notebooks/*.py; others may be named after the run.
The run itself: ``python -m spec_lab +experiment=medusa_tree out=outputs/notebook``.
"""

import argparse
import os
import sys
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 300  # most for a cell


def render(source: Path, run: Path) -> NotebookNode:
    """The notebook of a py:percent file, executed with this interpreter and checkout on the run's directory.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
        ValueError: an output names a path of this machine.
    """
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # else random, and every rendering a change
    environment = os.environ | {
        "RUN": str(run.resolve()),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm without widgets
    }
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(source.parent)}},
    )
    client.execute(env=environment)
    if named := machine_paths(notebook, run):
        raise ValueError(f"outputs of {source} name paths of this machine ({', '.join(named)}): print something else")
    return notebook


def machine_paths(notebook: NotebookNode, run: Path) -> list[str]:
    """The paths of this machine that outputs name: of the run, this checkout, the interpreter, the user."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = repr([{**output, "data": without_images(output.get("data", {}))} for output in outputs])
    paths = {str(run.resolve()), str(ROOT), sys.prefix, str(Path.home())}
    return sorted(path for path in paths if len(path) > 1 and path in shown)


def without_images(data: dict[str, str]) -> dict[str, str]:
    return {kind: value for kind, value in data.items() if not kind.startswith("image/")}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of a finished run")
    parser.add_argument("sources", type=Path, nargs="*", help="py:percent files; default: notebooks/*.py")
    given = parser.parse_args(arguments)
    if not (given.run / "summary.json").is_file():
        parser.error(f"{given.run} holds no summary.json: give the directory of a finished run")
    for source in given.sources or sorted((ROOT / "notebooks").glob("*.py")):
        pair = source.with_suffix(".ipynb")
        jupytext.write(render(source, given.run), pair)
        print(f"{pair}: {pair.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
