"""Untrusted run folders: whatever their files hold, commands name the fault and touch nothing outside."""

import io
import json
import os
import random
import shutil
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from spec_lab.cli.commands import command
from spec_lab.cli.main import main
from spec_lab.results import sweep
from tests import checkpoints

pytestmark = pytest.mark.nightly

SEEDS = int(os.environ.get("SPEC_LAB_FUZZ", "150"))
SECONDS = 120
"""Seconds, more than any command needs: a file that blocks would block for ever."""

VALUES = [
    None, True, 0, -1, 2**62, 10**30, 1.5, -1e300, float("nan"), float("inf"), "", "banana", "../../canary", "/etc",
    "a\x1b[31mred\x1b[0m", "\x07\x00", "\ud800", "語" * 300, [], {}, [None], [[]], {"a": None}, {"mean": "x"},
    {"mean": [], "low": {}, "high": None}, ["a", 1], {"low": 1}, "<script>alert(1)</script>", "1/0",
]  # fmt: skip
TEXTS = [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 200_000, b'{"a":' * 100_000, b'{"a": ' + b"9" * 9000 + b"}"]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A sweep of two finished runs, an unfinished one and a pending one."""
    folder = tmp_path_factory.mktemp("originals")
    texts = checkpoints.TEXTS[:2]
    some = [one for one in checkpoints.short_runs(folder, texts) if not one.startswith(("baseline=", "output_dir="))]
    out = folder / "swept"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sys.argv", ["spec-lab", "--multirun", *some, f"output_dir={out}", "seed=1,2", "proposer.depth=2"]
        )
        try:
            main()
        except SystemExit as left:
            code = left.code
        else:
            code = 0
    assert not code
    half = Path(shutil.copytree(out / sweep.runs(out)[0].folder.name, out / "half"))
    (half / "parts").mkdir()
    for file in [*half.glob("*.parquet")]:
        file.rename(half / "parts" / f"{file.stem}-000000.parquet")
    for name in ("summary.json", "ended.json"):
        (half / name).unlink()
    sweep.queue(half, "Slurm", "12")
    return out


def files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*.[jp]*") if file.is_file() and not file.is_symlink())


def places(value, above=()):
    """Every path of a tree."""
    yield above
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*above, key))


def spoil_json(file: Path, generator: random.Random) -> None:
    if generator.random() < 0.15:
        return spoil_bytes(file, generator)
    value = json.loads(file.read_text())
    for _ in range(generator.choice((1, 1, 1, 3))):
        *above, last = generator.choice([one for one in places(value) if one] or [("new",)])
        inner = value
        for key in above:
            inner = inner[key]
        if generator.random() < 0.2:
            del inner[last]
        else:
            inner[last] = generator.choice(VALUES)
    file.write_text(json.dumps(value))


def spoil_bytes(file: Path, generator: random.Random) -> None:
    whole = file.read_bytes()
    kind = generator.randrange(3)
    if kind == 0:
        file.write_bytes(generator.choice(TEXTS))
    elif kind == 1:
        file.write_bytes(whole[: generator.randrange(len(whole) + 1)])
    else:
        place = generator.randrange(max(1, len(whole)))
        file.write_bytes(whole[:place] + generator.randbytes(8) + whole[place + 8 :])


def spoil_table(file: Path, generator: random.Random) -> None:
    if generator.random() < 0.3:
        return spoil_bytes(file, generator)
    table = pq.read_table(file)
    name = generator.choice(table.column_names)
    place = table.column_names.index(name)
    values = table[name].to_pylist()
    kind = generator.randrange(6)
    if kind == 0:
        table = table.drop_columns([name])
    elif kind == 1:
        table = table.rename_columns([one if one != name else "other" for one in table.column_names])
    elif kind == 2:
        table = table.set_column(place, name, pa.array([None] * len(values), table[name].type))
    elif kind == 3:
        table = table.set_column(place, name, pa.array([str(one) for one in values]))
    elif kind == 4:
        table = table.slice(0, generator.randrange(len(values) + 1))
    else:
        odd = {"int64": [-1, 0, 7, 2**40], "double": [-1.0, float("nan"), 1e300, float("inf")], "bool": [True, False]}
        chosen = odd.get(str(table[name].type), ["", "a\x1b[31m", "語", "baseline", "../.."])
        if pa.types.is_list(table[name].type):
            chosen = [[], [-1], [2**40], [0, 0, 0, 0, 0]]
        values = [generator.choice(chosen) if generator.random() < 0.5 else one for one in values]
        table = table.set_column(place, name, pa.array(values, table[name].type))
    pq.write_table(table, file)


def replace_by(file: Path, canary: Path, generator: random.Random) -> None:
    """Something else under a file's name, or under one that commands write."""
    kind = generator.randrange(7)
    if kind < 4:
        file.unlink()
    if kind == 0:
        os.mkfifo(file)
    elif kind == 1:
        file.mkdir()
    elif kind == 2:
        file.symlink_to(generator.choice([canary / "mine", "/dev/zero", file]))
    elif kind == 4:
        for name in (".report.html.tmp", ".table.csv.tmp", ".table.parquet.tmp", "report.html", "table.csv", ".lock"):
            with_link = file.parent / name
            if not os.path.lexists(with_link):
                with_link.symlink_to(canary / "mine")
    elif kind == 5:
        for name in ("figures", "parts", "wandb"):
            if not os.path.lexists(file.parent / name):
                (file.parent / name).symlink_to(canary / "folder")
    elif kind == 6:
        os.mkfifo(file.parent / generator.choice(["queued.json", "certificate.json", "steps-x.parquet"]))


def spoil(folder: Path, canary: Path, generator: random.Random) -> None:
    file = generator.choice(files_in(folder))
    if generator.random() < 0.15:
        replace_by(file, canary, generator)
    else:
        try:
            (spoil_json if file.suffix == ".json" else spoil_table)(file, generator)
        except (ValueError, OSError, LookupError, TypeError):  # it was damaged before
            spoil_bytes(file, generator)


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(one): (one.stat().st_mtime_ns, one.read_bytes()) for one in folder.rglob("*") if one.is_file()}


def carry_out(*arguments: str) -> tuple[int, str]:
    """Exit code and output."""
    output = io.StringIO()

    def late(*_):
        raise AssertionError(f"{arguments} takes too long")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with redirect_stdout(output), redirect_stderr(output):
            code = command(arguments, Console(file=output, markup=False, width=200))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return code, output.getvalue()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_commands_name_the_fault_and_touch_nothing_outside(originals, tmp_path, monkeypatch, seed):
    generator = random.Random(seed)
    canary = tmp_path / "canary"
    (canary / "folder").mkdir(parents=True)
    (canary / "mine").write_text("mine")
    shutil.copy(next(originals.glob("*/requests.parquet")), canary / "folder" / "requests-000000.parquet")
    before = state_of(canary)
    folder = tmp_path / "given" / "swept"
    shutil.copytree(originals, folder)
    for _ in range(generator.choice((1, 1, 2))):
        spoil(folder, canary, generator)
    runs = sorted(str(one) for one in folder.iterdir() if one.is_dir())
    commands = [
        ("state", str(folder)),
        ("collect", str(folder)),
        ("compare", str(folder)),
        ("compare", *runs[:2]),
        ("compare", runs[-1], runs[0]),
    ]
    if seed % 3 == 0:
        commands += [("report", str(folder), *runs)]
    if seed % 10 == 0:
        monkeypatch.setenv("WANDB_SILENT", "true")
        commands += [("track", "--mode", "offline", str(folder))]
    for one in commands:
        code, output = carry_out(*one)
        assert code in (0, 1), output
        assert not set(output) & {"\x1b", "\x07", "\x00"}, output
        assert code == 0 or "spec_lab: " in output, output
        assert "Traceback" not in output, output
    assert state_of(canary) == before
    assert sorted(one.name for one in (tmp_path / "given").iterdir()) == ["swept"]
