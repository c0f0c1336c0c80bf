"""Checks before a command's first run, and the summary after a sweep's last run."""

from __future__ import annotations

import atexit
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spec_lab.cli import interrupt, search
from spec_lab.cli.config_checks import CHECK, STREAM, check_options, groups
from spec_lab.cli.redaction import blank, overrides_of, without_values
from spec_lab.cli.refusals import Refused, reason
from spec_lab.core.options import Folder, accept, brief, whole
from spec_lab.models import ranks
from spec_lab.results import run_names, run_state, sweep

MAX_RUNS = 100_000
"""Maximum number of runs of a sweep."""

MAX_COMPOSED = 100
"""Maximum number of runs of a sweep that are composed before the first one begins, but for choices of config groups."""

MAX_WORKERS = 1024
"""Maximum number of processes of ``hydra/launcher=joblib``."""

SUBDIR = "${folder_name:${hydra:overrides.task},${hydra:sweep.dir}}"
"""``hydra.sweep.subdir`` in ``conf/config.yaml``."""


class Preflight(Callback):
    """Checks the output directory and a sweep's options before Hydra uses them."""

    def __init__(self) -> None:
        self.made: list[Path] = []

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Check the name and the output directory of a single run."""
        check_name(config.get("name"))
        self.made = _check_folders(config, "hydra.run.dir")
        atexit.register(self.on_run_end)  # Hydra does not call it after an exit code

    def on_run_end(self, **_: Any) -> None:
        """Remove the output directory of a single run that wrote nothing."""
        for folder in self.made:
            with suppress(OSError):
                folder.rmdir()

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Check a sweep's options and record its runs in ``sweep.json``."""
        check_sweeper(config)
        if config.get("overwrite"):
            raise SystemExit(
                "spec_lab: overwrite=true is for single runs: for a sweep choose another output_dir=DIR; retry=true "
                "runs failed runs again, also with changed parts"
            )
        check_name(config.get("name"))
        out, jobs = Path(config.hydra.sweep.dir), asked(config)
        alike = {override for job in jobs for override in job if not run_names.identifying([override])}
        for option, values in Counter(map(run_names.key, alike)).items():
            if values > 1:
                raise SystemExit(f"spec_lab: {option} cannot be swept: it does not distinguish runs")
        if ranks.size() > 1 and not str(config.hydra.launcher["_target_"]).endswith(".BasicLauncher"):
            raise SystemExit(
                "spec_lab: under torchrun the runs of a sweep cannot run in parallel: set hydra/launcher=basic"
            )
        _check_folders(config, "hydra.sweep.dir")
        try:
            search.check(config)
            for overrides in _first_uses(jobs, {*groups(), "experiment"}):
                check_composed(config, overrides)
            sweep.plan(out, jobs)
        except HydraException as error:
            raise SystemExit(f"spec_lab: {str(error).strip()}") from error
        except (OSError, ValueError) as error:
            raise SystemExit(f"spec_lab: {reason(error)}") from error
        blank(config)
        atexit.register(print_resume_hint, out)
        leave = interrupt.Leave(f"Interrupted.\n{_resume_hint(out)}")
        if str(config.hydra.launcher["_target_"]).endswith(".BasicLauncher"):
            interrupt.change(leave)
        else:  # other launchers, plugins of Hydra, end their workers, or print what happens to their jobs
            interrupt.change(interrupt.Raise("hydra_plugins", leave))
            if interrupt.raises() and str(config.hydra.launcher["_target_"]).endswith(".JoblibLauncher"):
                from joblib.externals.loky.backend.resource_tracker import ensure_running

                ensure_running()  # see keep_from_workers
                interrupt.keep_from_workers()

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print the state and the results of a sweep; exit with 1 unless every requested run ended with 0."""
        from spec_lab.cli.sweep_tables import print_results, print_sweep

        atexit.unregister(print_resume_hint)
        out, code = Path(config.hydra.sweep.dir), 1
        try:
            names = {folder.name for folder in sweep.folders(out, asked(config))}
            mine = [run for run in sweep.runs(out) if run.folder.name in names or not names]
            code = int(len(mine) < len(names) or any(run.state != "done" or run.code for run in mine))
            print_results(out, verbose=bool(config.get("verbose")))
            print_sweep(out)
            search.print_best(config)
        except Exception as error:  # Hydra would only warn, and exit with 0
            code = 1
            print(f"spec_lab: {reason(error)}", file=sys.stderr)
        if code:
            raise SystemExit(code)


def _first_uses(jobs: Iterable[Sequence[str]], files: Collection[str]) -> Iterator[list[str]]:
    """Yield the first of a sweep's runs, and each with a value that no run before it has: all that choose another file
    of a config group (``files``), and others up to ``MAX_COMPOSED``.
    """
    seen, composed = set[str](), 0
    for number, overrides in enumerate(jobs):
        new = {*overrides} - seen
        chosen = any(run_names.key(override).partition("@")[0] in files for override in new)
        if not number or chosen or (new and composed < MAX_COMPOSED):
            seen |= new
            composed += 1
            yield [*overrides]


def check_composed(config: DictConfig, overrides: list[str]) -> None:
    """Compose a run of a sweep, and check its options as the run itself does first.

    Raises:
        HydraException: it has no such option.
        SystemExit: an option that nothing reads, or a value that an option cannot have.
        ValueError: a config file of the user's is no YAML, its defaults lead back to itself, ...
    """
    try:
        composed = GlobalHydra.instance().config_loader().load_sweep_config(config, overrides)
    except HydraException:
        raise
    except Exception as error:  # of YAML, OmegaConf or Hydra
        raise ValueError(
            f"the configs of {' '.join(overrides)[:300]} cannot be composed ({reason(error)[:300]}): correct the file "
            "or leave it out"
        ) from error
    composed = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    try:
        check_options(composed)
    except Refused as error:
        raise SystemExit(without_values(composed, str(error))) from error
    except OmegaConfBaseException:  # of an interpolation, which may be resolved in the run only: there it is refused
        pass


def check_sweeper(config: DictConfig) -> None:
    """Refuse options of Hydra that a sweep does not support.

    Raises:
        SystemExit: names the option.
    """
    subdir: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    if subdir["subdir"] != SUBDIR:
        raise SystemExit("spec_lab: hydra.sweep.subdir cannot be set: each run's folder is named after its options")
    try:
        if config.hydra.sweeper.get("max_batch_size") is not None:
            whole("hydra.sweeper.max_batch_size", config.hydra.sweeper.max_batch_size, otherwise=", or null for all")
        check_workers([config.hydra.launcher.get("n_jobs", 1)])
    except OmegaConfBaseException as error:  # some are ValueErrors
        option = error.full_key or "hydra.launcher.n_jobs"
        raise SystemExit(f"spec_lab: {option} cannot be resolved: {reason(error)}") from None
    except ValueError as error:
        raise SystemExit(f"spec_lab: {reason(error)}") from error


def check_workers(values: Iterable[Any]) -> None:
    """Check values of ``hydra.launcher.n_jobs``; a text with an interpolation passes, since it is not resolved yet.

    Raises:
        ValueError: one is not a number of processes from 1 to ``MAX_WORKERS``, or its negative.
    """
    for value in values:
        if isinstance(value, str) and "${" in value:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= abs(value) <= MAX_WORKERS:
            raise ValueError(
                f"hydra.launcher.n_jobs must be a number of processes up to {MAX_WORKERS}, or -1 for one per core, "
                f"not {brief(value)}"
            )


def print_resume_hint(out: Path) -> None:
    """Print how to resume a sweep whose command ended early: by Ctrl-C, or because a worker was killed."""
    print(_resume_hint(out), file=sys.stderr)


def _resume_hint(out: Path) -> str:
    return f"The sweep in {out} is not finished; the same command with output_dir={out} resumes it."


def asked(config: DictConfig) -> list[list[str]]:
    """Return the overrides of each run that a sweep's command requests; an empty list for a search."""
    if not str(config.hydra.sweeper["_target_"]).endswith(".BasicSweeper"):
        return []
    params: Any = OmegaConf.to_container(config.hydra.sweeper.params or OmegaConf.create({}), resolve=False)
    given = [f"{name}={value}" for name, value in params.items()] + overrides_of(config.hydra)
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())  # glob(*) lists a group's options
    overrides, number = parser.parse_overrides(given), 1
    for override in overrides:
        if override.is_sweep_override():
            number *= _values(override)
    if number > MAX_RUNS:
        raise SystemExit(f"spec_lab: the sweep has more than {MAX_RUNS} runs; name fewer values")
    batches = BasicSweeper.split_arguments(overrides, None)
    return [job for batch in batches for job in batch]


def _values(override: Override) -> int:
    """Return the number of values of a swept option, counted up to ``MAX_RUNS`` + 1."""
    if not override.is_discrete_sweep():
        raise SystemExit(
            f"spec_lab: {override.input_line}: an interval requires a search (hydra/sweeper=search); a sweep requires "
            "a list of values, such as range(1,9) or 1,2,4"
        )
    try:
        number = sum(1 for _ in islice(override.sweep_iterator(), MAX_RUNS + 1))
    except (HydraException, ValueError) as error:
        raise SystemExit(f"spec_lab: {override.input_line}: {reason(error)}") from error
    if not number:
        raise SystemExit(f"spec_lab: {override.input_line} has no values; see the files of conf")
    return number


def check_name(given: Any) -> None:
    """Exit with code 1 unless the experiment's name can name a folder; see ``options.file_name``."""
    try:
        accept("name", given, Annotated[str, Folder()])
    except ValueError as error:
        raise SystemExit(f"spec_lab: {error}") from error


def _check_folders(config: DictConfig, option: str) -> list[Path]:
    """Check ``output_dir``, and Hydra's option where it names another folder; return those that are missing."""
    out, hydra_dir = config.get("output_dir"), OmegaConf.select(config, option)
    missing = check_writable(out) + (check_writable(hydra_dir, option) if str(hydra_dir) != str(out) else [])
    writes = OmegaConf.select(config, "task._target_") not in (CHECK, STREAM)
    if writes and run_state.is_unrelated(Path(str(hydra_dir))):
        name = "output_dir" if str(hydra_dir) == str(out) else option
        raise SystemExit(f"spec_lab: {name}={hydra_dir} is not a run's folder and not empty: choose a new {name}=DIR")
    return missing


def check_writable(out: Any, option: str = "output_dir") -> list[Path]:
    """Exit with code 1 unless ``out`` can be created and written to. Folders created by the check are removed again.

    Args:
        option: its name, for messages.

    Returns:
        The folders that are missing, the innermost first.
    """
    if not isinstance(out, str | int | float) or not str(out).strip():
        raise SystemExit(f"spec_lab: {option} must name a directory, not {out!r}; choose another {option}=DIR")
    folder, made = Path(str(out)).absolute(), []
    existing = folder
    try:
        existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        if not existing.exists():
            raise FileNotFoundError(0, f"is a symlink to {os.readlink(existing)}, which leads nowhere")
        if not existing.is_dir():
            raise NotADirectoryError(0, "is not a directory")
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise SystemExit(
            f"spec_lab: cannot write to {option}={out}: {existing} {why}; choose another {option}=DIR"
        ) from error
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()
    return made
