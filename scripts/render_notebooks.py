"""Execute notebooks, and write each as .ipynb with its outputs into the folder of its source.

``python scripts/render_notebooks.py`` renders every notebooks/*.py; ``python scripts/render_notebooks.py FILE ...``
renders the given ones. A notebook runs in a temporary directory, which is removed afterwards. What must hold after its
last cell is in tests/notebooks/NAME.py: it runs in the same kernel, and nothing is written if it fails.
"""

import argparse
import os
import re
import sys
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory

import jupytext
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 900  # time limit of a cell
CHECKS = ROOT / "tests" / "notebooks"


def render(source: Path, checks: str = "") -> NotebookNode:
    """Return the notebook of a py:percent file, executed with this interpreter and checkout.

    Args:
        source: the file.
        checks: code that runs after the last cell and is not shown.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell or a check fails.
        ValueError: a cell writes to stderr, or an output names a path of this machine.
    """
    notebook = jupytext.read(source)
    if checks:
        notebook.cells.append(new_code_cell(checks))
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # instead of a random one, which would change with every rendering
    with TemporaryDirectory(prefix="notebook-") as temporary:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm without widgets
            "TMPDIR": temporary,
        }
        client = NotebookClient(
            notebook,
            timeout=SECONDS,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,  # otherwise output is split at random places
            resources={"metadata": {"path": temporary}},
        )
        client.execute(env=environment)
    if checks:
        del notebook.cells[-1]
    if said := [output.text for output in outputs(notebook) if output.get("name") == "stderr"]:
        raise ValueError(f"{source} writes to stderr: {said[0]}")
    rename(notebook, temporary)
    if named := machine_paths(notebook, [temporary]):
        raise ValueError(f"outputs of {source} name paths of this machine ({', '.join(named)}): print something else")
    return notebook


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    """Return all outputs, in order."""
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def rename(notebook: NotebookNode, temporary: str) -> None:
    """Replace the notebook's temporary directory by ``notebook`` in all outputs: its name is random."""
    ours = re.compile(re.escape(temporary) + r"/tmp[a-z0-9_]{8}\b")  # as tempfile.mkdtemp names it
    for output in outputs(notebook):
        if "text" in output:
            output["text"] = ours.sub("notebook", output["text"])
        for kind, value in output.get("data", {}).items():
            if kind.startswith("text/"):
                output["data"][kind] = ours.sub("notebook", value)


def machine_paths(notebook: NotebookNode, others: Collection[str] = ()) -> list[str]:
    """Return the paths of this machine in the outputs: of this checkout, the interpreter, the user, and ``others``."""
    shown = repr([{**output, "data": without_images(output.get("data", {}))} for output in outputs(notebook)])
    paths = {str(ROOT), sys.prefix, str(Path.home()), *others}
    return sorted(path for path in paths if len(path) > 1 and path in shown)


def without_images(data: dict[str, str]) -> dict[str, str]:
    return {kind: value for kind, value in data.items() if not kind.startswith("image/")}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="*", help="py:percent files; default: notebooks/*.py")
    given = parser.parse_args(arguments)
    for source in given.sources:
        if source.suffix != ".py" or not source.is_file():
            parser.error(f"{source} is not a py:percent file: name a file such as notebooks/NAME.py")
    for source in given.sources or sorted((ROOT / "notebooks").glob("*.py")):
        pair, checks = source.with_suffix(".ipynb"), CHECKS / source.name
        jupytext.write(render(source, checks.read_text() if checks.is_file() else ""), pair)
        print(f"{pair}: {pair.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
