"""Search for the best options (``hydra/sweeper=search``): Optuna chooses the runs of a sweep one after the other.

Each trial is one run of the sweep, in a folder of its own, so every command that reads sweeps reads searches. Optuna's
trials are kept in ``study.jsonl`` in the sweep's directory (Optuna's journal format). Only the process that searches
writes it; the runs leave their files as in any sweep. A kill at any moment is safe: the same command tries those trials
again whose end was not recorded, and takes the value from the run's files where the run has ended.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from filelock import FileLock, Timeout
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Transformer
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.errors import HydraException, InstantiationException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from spec_lab.cli.build import own_metrics
from spec_lab.cli.redaction import overrides_of
from spec_lab.cli.refusals import Refused, reason
from spec_lab.core.options import brief, one_of, whole
from spec_lab.results import run_figures, run_names, run_state, sweep

SHARED_OVERRIDES, RETRIES = "given", "retries"
"""User attributes of a trial: the overrides that all trials share, and the number of the trial that it repeats."""


# The value of a run ------------------------------------------------------------------------------------------------


def result(objective: str, out: Path) -> float | None:
    """Return the figure ``objective`` of the run in ``out``; None unless the run ended with exit code 0 and has it."""
    how = run_state.ended(out)
    if how is None or how["state"] != "done" or how["code"]:
        return None
    figure: Any = run_figures.left_behind(out)
    for name in objective.split("."):
        figure = figure.get(name) if isinstance(figure, Mapping) else None
    return float(figure) if isinstance(figure, int | float) else None


def figures(config: DictConfig, objective: str) -> list[str]:
    """Return the figures that can be an objective, named as in ``summary.json``, with dots where they are nested.

    Args:
        config: of the search; the names of its own metrics are known only if they return values for a run without rows.
        objective: taken for a figure if it is an own metric's and these are not known.

    Raises:
        Refused: the metrics cannot be built, or return a name that they cannot have.
    """
    from spec_lab.analysis import metrics
    from spec_lab.analysis.text import OWN

    names = metrics.returned_names(own_metrics(config))
    known = [objective] * objective.startswith(OWN) if names is None else [f"{OWN}{name}.mean" for name in names]
    return [*_numbers(metrics.summarise(metrics.Tables.empty(), "")), *known]


def _numbers(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{name}.")
        elif isinstance(value, int | float):
            yield above + name


# Checks before anything runs ---------------------------------------------------------------------------------------


def searches(config: DictConfig) -> bool:
    """Return whether the sweep is a search."""
    return str(config.hydra.sweeper["_target_"]).endswith(".Search")


def check(config: DictConfig) -> None:
    """Check the options of a search, and that they fit the trials in its directory. Other sweeps pass.

    Raises:
        ValueError: an option is wrong, or Optuna is not installed; names it.
    """
    if not searches(config):
        return
    sweeper, out = config.hydra.sweeper, Path(config.hydra.sweep.dir)
    whole("hydra.sweeper.n_trials", sweeper.n_trials)
    whole("hydra.sweeper.n_jobs", sweeper.n_jobs)
    if not OmegaConf.is_dict(sweeper.sampler) or "_target_" not in sweeper.sampler:
        raise ValueError(f"hydra.sweeper.sampler must be a mapping with _target_, not {brief(sweeper.sampler)}")
    _sampler(sweeper.sampler, 0)
    one_of("hydra.sweeper.direction", sweeper.direction, ("maximize", "minimize"))
    searched, given = _space(config)
    objective = "null" if sweeper.objective is None else str(sweeper.objective)
    task = OmegaConf.select(config, "task._target_")
    decoding = task == "spec_lab.tasks.benchmark.run"  # the figures of other tasks are not known here
    known = figures(config, objective) if decoding else ()
    if known and objective not in known:
        near = get_close_matches(objective, known, 3) or ["speedup.mean", "tokens_per_second", "tau_pooled"]
        raise ValueError(
            f"hydra.sweeper.objective={objective} is not a figure of summary.json; choose {', '.join(near)} or another"
        )
    if decoding and "speedup" in objective:
        other = "or search for hydra.sweeper.objective=tokens_per_second"
        if config.get("baseline") is False:
            raise ValueError(
                f"hydra.sweeper.objective={objective} compares with the baseline: set baseline=true, {other}"
            )
        if str(OmegaConf.select(config, "proposer._target_")).endswith(".Null.load"):
            raise ValueError(
                f"hydra.sweeper.objective={objective} compares with the baseline: choose a proposer, {other}"
            )
    # Checked after objective, which is its default.
    if not isinstance(sweeper.study_name, str) or not sweeper.study_name:
        raise ValueError(f"hydra.sweeper.study_name must be a text that is not empty, not {brief(sweeper.study_name)}")
    if out.is_dir():
        with _locked(out):
            _check_comparable(_study(config), searched, given)


def _check_comparable(study: Any, searched: Mapping[str, Any], given: Sequence[str]) -> None:
    """Check that new trials can be compared with those of the study."""
    from optuna.distributions import check_distribution_compatibility
    from optuna.trial import TrialState

    other = (
        "choose another output_dir=DIR, or another study with hydra.sweeper.study_name=NAME "
        f"(this one is {study.study_name})"
    )
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        was, now = run_names.identifying(trial.user_attrs[SHARED_OVERRIDES]), run_names.identifying(given)
        if was != now:
            there, here = (
                " ".join(sorted({*run} - {*other_run})) or "nothing" for run, other_run in ((was, now), (now, was))
            )
            raise ValueError(f"the search began with {there}, not with {here}: {other}")
        for name in searched.keys() & trial.distributions.keys():
            try:
                check_distribution_compatibility(trial.distributions[name], searched[name])
            except ValueError as error:
                raise ValueError(f"the search began with other choices for {name}: {other}") from error


# The search space --------------------------------------------------------------------------------------------------


def _space(config: DictConfig) -> tuple[dict[str, Any], list[str]]:
    """Return the distributions of the options that are searched, by name, and the overrides that all trials share."""
    _installed()
    params = [f"{name}={value}" for name, value in (config.hydra.sweeper.params or {}).items()]
    searched: dict[str, Any] = {}
    given: dict[str, str] = {}
    for override in OverridesParser.create().parse_overrides([*params, *overrides_of(config.hydra)]):
        name = override.get_key_element()
        if override.is_sweep_override():
            searched[name] = _distribution(override)
        else:
            given[name] = f"{name}={override.get_value_element_as_str()}"
    searched = {name: distribution for name, distribution in searched.items() if name not in given}
    if not searched:
        ranges = "'proposer.max_nodes=int(interval(1,64))' or proposer.max_depth=1,2,3"
        raise ValueError(f"a search requires an option with a range or with choices, such as {ranges}")
    if wrong := [name for name in searched if not run_names.identifying([name])]:
        raise ValueError(f"{wrong[0]} cannot be searched: it does not distinguish runs")
    return searched, list(given.values())


def _distribution(override: Override) -> Any:
    """Return Optuna's distribution for a swept override: intervals and ranges of numbers, or a list of choices."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value: Any = override.value()
    try:
        if isinstance(value, IntervalSweep):
            whole_numbers = isinstance(value.start, int) and isinstance(value.end, int)
            kind = IntDistribution if whole_numbers else FloatDistribution
            return kind(value.start, value.end, log="log" in value.tags)
        if isinstance(value, RangeSweep) and not value.shuffle:  # without its end, as in a sweep
            ends: Any = (value.start, value.stop, value.step)
            if all(isinstance(end, int) for end in ends):
                values = range(*ends)
                return IntDistribution(min(values), max(values), step=abs(value.step))
        choices = override.sweep_iterator()
        return CategoricalDistribution([x if isinstance(x, int | float) else Transformer.str(x) for x in choices])
    except (HydraException, TypeError, ValueError) as error:
        raise ValueError(f"a search requires ranges or choices: {override.input_line}: {reason(error)}") from error


# The search --------------------------------------------------------------------------------------------------------


def search(context: HydraContext, task: TaskFunction, config: DictConfig) -> None:
    """Run the trials that are missing, ``n_jobs`` at a time.

    Args:
        context: Hydra's config loader and callbacks.
        task: runs a composed config.
        config: the sweep's.

    Raises:
        Refused: another process searches in the same directory; ``study.jsonl`` cannot be used; no trial has a value.
    """
    out, options = Path(config.hydra.sweep.dir), config.hydra.sweeper
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
    try:
        searched, given = _space(config)
        with _locked(out):
            study = _study(config)
            study.sampler = _sampler(options.sampler, len(study.trials))
            left = options.n_trials - _requeue(study, config, out)
            number = 0
            while left > 0:
                trials = [study.ask(searched) for _ in range(min(left, options.n_jobs))]
                for trial in trials:
                    trial.set_user_attr(SHARED_OVERRIDES, given)
                values = launch(launcher, config, [_overrides(trial.params, given) for trial in trials], number)
                exhausted = [_tell(study, *pair) for pair in zip(trials, values, strict=True)]
                number += len(trials)
                left = 0 if any(exhausted) else left - len(trials)
            best = _best(study)
            if best is None:
                raise ValueError(
                    f"no trial has a value for {options.objective}: spec-lab state {out} prints what failed"
                )
            results = {"name": "optuna", "best_params": best.params, "best_value": best.value}
            OmegaConf.save(OmegaConf.create(results), out / "optimization_results.yaml")
    except ValueError as error:
        raise Refused(f"spec_lab: {reason(error)}") from error


def launch(launcher: Launcher, config: DictConfig, trials: Sequence[Sequence[str]], number: int) -> list[float | None]:
    """Run trials, each given by its overrides; trials with the same overrides share one run.

    Args:
        trials: their overrides.
        number: of trials that this command ran before.

    Returns:
        The value of each trial, from its run's files; None where the run failed.
    """
    out, objective = Path(config.hydra.sweep.dir), str(config.hydra.sweeper.objective)
    runs = list(dict.fromkeys(tuple(trial) for trial in trials))
    sweep.plan(out, runs)
    returns = dict(zip(runs, launcher.launch(runs, initial_job_idx=number), strict=True))
    values = {
        run: None if returned.status is JobStatus.FAILED else result(objective, folder)
        for (run, returned), folder in zip(returns.items(), sweep.folders(out, runs), strict=True)
    }
    return [values[tuple(trial)] for trial in trials]


def _overrides(params: Mapping[str, Any], given: Sequence[str]) -> list[str]:
    """Return the overrides of the run with these parameters."""
    return [*(f"{name}={value}" for name, value in params.items()), *given]


def _tell(study: Any, trial: Any, value: float | None) -> bool:
    """Record a trial's value, or that it failed; returns whether the sampler has tried everything there is."""
    from optuna.trial import TrialState

    failed = value is None or isnan(value)
    try:
        study.tell(trial, None if failed else value, TrialState.FAIL if failed else TrialState.COMPLETE)
    except RuntimeError as error:  # GridSampler and BruteForceSampler stop the study when they have tried everything
        if "Study.stop" not in str(error):
            raise
        return True
    return False


def _requeue(study: Any, config: DictConfig, out: Path) -> int:
    """Put trials whose end was not recorded back into the queue; returns the number of trials that have ended.

    A trial has ended if it has a value, or if its run failed and ``retry`` is false. Of other trials this process or
    the run's was killed: they count as failed, and a new trial with their parameters takes their place. Its run
    resumes from its finished groups, or has ended meanwhile.
    """
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    trials = study.get_trials(deepcopy=False)
    replaced = {trial.user_attrs.get(RETRIES) for trial in trials}
    ended = 0
    for trial in trials:
        if trial.state is TrialState.COMPLETE:
            ended += 1
        elif trial.state is TrialState.FAIL and trial.params and trial.number not in replaced:
            run = _overrides(trial.params, trial.user_attrs.get(SHARED_OVERRIDES, ()))
            folder = sweep.folders(out, [run])[0]
            how = run_state.ended(folder)
            failed = how is not None and how["state"] == "failed"
            if (
                how is None
                or result(str(config.hydra.sweeper.objective), folder) is not None
                or (failed and config.get("retry"))
            ):
                study.enqueue_trial(trial.params, user_attrs={RETRIES: trial.number})
            else:
                ended += 1
    return ended


def _sampler(named: DictConfig, tried: int) -> Any:
    """Build the sampler. Its seed is moved by the number of trials so far: the same one would repeat the same draws."""
    optuna = _installed()
    seed = named.get("seed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            made = instantiate(named) if seed is None else instantiate(named, seed=seed + tried)
    except (InstantiationException, TypeError, ValueError) as error:
        target = f"hydra.sweeper.sampler._target_={named['_target_']}"
        raise ValueError(f"{target} cannot be built: {reason(error)}; choose a sampler of optuna.samplers") from error
    if not isinstance(made, optuna.samplers.BaseSampler):
        raise ValueError(
            f"hydra.sweeper.sampler._target_={named['_target_']} makes an object of type {type(made).__name__}, not a "
            "sampler of Optuna; choose one such as optuna.samplers.TPESampler"
        )
    return made


def tpe(seed: int | None = None, n_startup_trials: int = 8, **options: Any) -> Any:
    """Build Optuna's TPE sampler for few, slow trials: multivariate, and aware of the trials that run at the same time.

    Args:
        seed: of its draws.
        n_startup_trials: trials drawn at random before the model is used.
        options: of ``optuna.samplers.TPESampler``.
    """
    usual = {"multivariate": True, "constant_liar": True, "n_startup_trials": n_startup_trials}
    return _installed().samplers.TPESampler(seed=seed, **(usual | options))


def print_best(config: DictConfig) -> None:
    """Print the best trial of a search in one line; print nothing for other sweeps."""
    if searches(config) and (best := _best(study := _study(config))):
        from optuna.trial import TrialState

        number = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
        chosen = " ".join(f"{name}={value}" for name, value in best.params.items())
        what = f"best {config.hydra.sweeper.objective} of {number} trials"
        print(f"{config.hydra.sweep.dir}: {what}: {best.value:.4g} with {chosen}")


# Optuna ------------------------------------------------------------------------------------------------------------


def _installed() -> Any:
    """Return Optuna."""
    try:
        import optuna
        import optuna.storages.journal  # since Optuna 4
    except ImportError as error:
        raise ValueError(
            f"hydra/sweeper=search requires the extra search ({error}): pip install 'spec-lab[search]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _study(config: DictConfig) -> Any:
    """Return the study in ``study.jsonl``, made if there is none."""
    optuna = _installed()
    options, file = config.hydra.sweeper, Path(config.hydra.sweep.dir, "study.jsonl")
    no_lock = SimpleNamespace(acquire=lambda: True, release=lambda: None)  # ``_locked`` excludes other processes
    try:
        _cut_unfinished_line(file)
        backend = optuna.storages.journal.JournalFileBackend(str(file), lock_obj=no_lock)
        storage, name = optuna.storages.JournalStorage(backend), options.study_name
        if name not in optuna.get_all_study_names(storage):
            optuna.create_study(storage=storage, study_name=name, direction=options.direction)
        study = optuna.load_study(storage=storage, study_name=name)
    except (AssertionError, KeyError, OSError, TypeError, ValueError, optuna.exceptions.OptunaError) as error:
        raise ValueError(f"{file} is not a journal of Optuna ({reason(error)}); remove it and search again") from error
    if study.direction.name.lower() != options.direction:
        raise ValueError(
            f"hydra.sweeper.direction must be {study.direction.name.lower()}, as when the search began, not "
            f"{options.direction}; to change it, choose another output_dir=DIR"
        )
    return study


def _cut_unfinished_line(file: Path) -> None:
    """Remove a last line without line feed, which a crash or a full disk may leave."""
    text = file.read_bytes() if file.exists() else b""
    begins = b'{"op_code":'
    if not text.startswith(begins[: len(text)]):
        raise ValueError(f"it begins with {text[:20]!r}")
    if text and not text.endswith(b"\n"):
        with open(file, "r+b") as stream:
            stream.truncate(text.rfind(b"\n") + 1)


def _best(study: Any) -> Any | None:
    """Return the best trial, or None where none has a value."""
    from optuna.trial import TrialState

    return study.best_trial if study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)) else None


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Exclude other processes from the search in ``out`` while inside."""
    try:
        lock = FileLock(out / ".search.lock").acquire(blocking=False)
    except Timeout as error:
        raise ValueError(f"the search in {out} is locked by another process; wait for it, or end it") from error
    with lock:
        yield
