"""Search: a sweep whose runs Optuna chooses as it goes (``hydra/sweeper=search``), for the best value of a figure.

Optuna's sweeper draws trials and keeps them in a storage; each trial is one run of the sweep, in a folder of its own.
Here is what joins the two, so that a kill at any moment leaves nothing to mend: what a run is worth, which trials are
missing, and which are tried again because nobody was left to say how they ended. Only the process that searches opens
the storage; the runs, wherever they are, leave their files as in any sweep.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import InstantiationException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from spec_lab.cli.build import Refused, reason
from spec_lab.cli.redaction import overrides_of
from spec_lab.core.options import one_of, whole
from spec_lab.results import sweep

AGAIN = "again"
"""What Optuna's trial keeps the number of the trial under whose parameters it tries again."""


# What a run is worth -----------------------------------------------------------------------------------------------


def result(config: DictConfig, out: Path) -> float | None:
    """``config.objective`` of the run in ``out``; None unless it went well and has that figure.

    Args:
        config: the run's.
        out: its directory.
    """
    how = sweep.ended(out)
    if how is None or how["state"] != "done" or how["code"]:
        return None
    found: Any = sweep.left_behind(out)
    for name in str(config.get("objective")).split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) else None


def figures() -> list[str]:
    """The figures that can be an objective, named as in ``summary.json``, with dots where they are nested."""
    from spec_lab.analysis import metrics
    from spec_lab.results import writer

    nothing = writer.Tables(**{name: writer.schema(name).empty_table().to_pandas() for name in writer.SCHEMAS})
    return list(_numbers(metrics.summarise(nothing, "speculative")))


def _numbers(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{name}.")
        elif isinstance(value, int | float):
            yield above + name


# Before anything runs ----------------------------------------------------------------------------------------------


def searches(config: DictConfig) -> bool:
    """Whether the sweep is a search."""
    return str(config.hydra.sweeper["_target_"]).endswith(".Search")


def check(config: DictConfig) -> None:
    """Refuse a search that cannot be, or that does not go with what its storage holds. Other sweeps pass.

    Raises:
        ValueError: says which option is wrong, or what is not installed.
    """
    if not searches(config):
        return
    sweeper, out = config.hydra.sweeper, Path(config.hydra.sweep.dir)
    whole("hydra.sweeper.n_trials", sweeper.n_trials)
    whole("hydra.sweeper.n_jobs", sweeper.n_jobs)
    if not isinstance(sweeper.storage, str):
        raise ValueError(f"hydra.sweeper.storage must be a URL, such as sqlite:///study.db, not {sweeper.storage!r}")
    if not OmegaConf.is_dict(sweeper.sampler) or "_target_" not in sweeper.sampler:
        raise ValueError(f"hydra.sweeper.sampler must be a mapping with _target_, not {sweeper.sampler!r}")
    _sampler(sweeper.sampler, 0)
    one_of("hydra.sweeper.direction", sweeper.direction, ("maximize", "minimize"))
    searched, given = _space(config)
    objective, task = str(config.get("objective")), OmegaConf.select(config, "task._target_")
    known = figures() if task == "spec_lab.tasks.benchmark.run" else ()  # of other tasks it shows at the end
    if known and objective not in known:
        near = get_close_matches(objective, known, 3) or ["speedup.mean", "tokens_per_second", "tau_pooled"]
        raise ValueError(f"objective: there is no figure {objective}; there are {', '.join(near)} and others")
    if task == "spec_lab.tasks.benchmark.run" and "speedup" in objective:
        other = "or search for objective=tokens_per_second"
        if config.get("baseline") is False:
            raise ValueError(f"objective={objective} compares with the baseline: set baseline=true, {other}")
        if str(OmegaConf.select(config, "proposer._target_")).endswith(".Null.load"):
            raise ValueError(f"objective={objective} compares with the baseline: choose a proposer, {other}")
    # Checked after objective, which is its default.
    if not isinstance(sweeper.study_name, str) or not sweeper.study_name:
        raise ValueError(f"hydra.sweeper.study_name must be a text that is not empty, not {sweeper.study_name!r}")
    if out.is_dir():
        with _alone(out):
            _agree(_study(config), searched, given)


def _space(config: DictConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """The options that are searched, with their distributions, and those that are given: as the sweeper reads them.

    Raises:
        ValueError: it is not installed; nothing is searched, or what cannot be.
    """
    with _installed():
        from hydra_plugins.hydra_optuna_sweeper._impl import create_params_from_overrides
    params = [f"{name}={value}" for name, value in (config.hydra.sweeper.params or {}).items()]
    try:
        with _quiet():
            searched, given = create_params_from_overrides([*params, *overrides_of(config.hydra)])
    except (AssertionError, NotImplementedError) as error:
        raise ValueError(f"a search takes ranges and choices of numbers and texts: {reason(error)}") from error
    searched = {name: one for name, one in searched.items() if name not in given}
    if not searched:
        ranges = "'proposer.max_nodes=int(interval(1,64))' or proposer.max_depth=1,2,3"
        raise ValueError(f"a search needs an option with a range or with choices, such as {ranges}")
    if wrong := [name for name in searched if not sweep.own([name])]:
        raise ValueError(f"{wrong[0]} cannot be searched: another value of it makes no other run")
    return searched, given


def _agree(study: Any, searched: Mapping[str, Any], given: Mapping[str, str]) -> None:
    """Refuse to add to a study what does not compare with what it holds.

    Raises:
        ValueError: says what differs.
    """
    from optuna.distributions import check_distribution_compatibility
    from optuna.trial import TrialState

    other = (
        "choose another output_dir=DIR, or another study with hydra.sweeper.study_name=NAME "
        f"(this one is {study.study_name})"
    )
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        was, now = _overrides(trial.user_attrs), _overrides(given)
        if was != now:
            there, here = (
                " ".join(sorted({*one} - {*another})) or "nothing" for one, another in ((was, now), (now, was))
            )
            raise ValueError(f"the search was begun with {there}, not with {here}: {other}")
        for name in searched.keys() & trial.distributions.keys():
            try:
                check_distribution_compatibility(trial.distributions[name], searched[name])
            except ValueError as error:
                raise ValueError(f"the search was begun with other choices for {name}: {other}") from error


def _overrides(options: Mapping[str, Any]) -> tuple[str, ...]:
    return sweep.own(f"{name}={value}" for name, value in options.items())


# The search --------------------------------------------------------------------------------------------------------


def search(context: HydraContext, task: TaskFunction, config: DictConfig, arguments: Sequence[str]) -> None:
    """Run the trials that are missing.

    Args:
        context: how configs are composed, and who is told of jobs.
        task: what carries a composed config out.
        config: the sweep's.
        arguments: the overrides on the command line.

    Raises:
        Refused: another process is at it; the storage cannot be used; no trial has a value.
    """
    out, options = Path(config.hydra.sweep.dir), config.hydra.sweeper
    try:
        with _installed():
            from hydra_plugins.hydra_optuna_sweeper.optuna_sweeper import OptunaSweeper
        with _alone(out), _quiet():
            study = _study(config)
            missing = max(0, options.n_trials - _go_on(study, config, out))
            optuna = OptunaSweeper(
                sampler=_sampler(options.sampler, len(study.trials)), direction=options.direction,
                storage=options.storage, study_name=options.study_name, n_trials=missing, n_jobs=options.n_jobs,
                params=options.params, search_space=None, custom_search_space=None,
                max_failure_rate=1.0,  # a trial that fails is recorded, and spares the others
            )  # fmt: skip
            optuna.setup(hydra_context=context, task_function=task, config=config)
            optuna.sweeper.launcher = Runs(optuna.sweeper.launcher, config)
            try:
                optuna.sweep(list(arguments))
            except ValueError as error:
                if {trial.state.name for trial in study.trials} != {"FAIL"}:
                    raise
                what = f"no trial has a value for {config.objective}: spec-lab state {out} says what failed"
                raise ValueError(what) from error  # Optuna's sweeper looks for the best at its end
    except ValueError as error:
        raise Refused(f"spec_lab: {reason(error)}") from error


@dataclass(frozen=True)
class Runs:
    """A launcher for trials: each is a run of the sweep, carried out once however many trials of a batch ask for it.

    Args:
        launcher: carries them out.
        config: the sweep's.
    """

    launcher: Launcher
    config: DictConfig

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """What became of each, in their order. See ``Launcher``."""
        out, runs = Path(self.config.hydra.sweep.dir), list(dict.fromkeys(tuple(one) for one in job_overrides))
        sweep.plan(out, runs)
        returns = dict(zip(runs, self.launcher.launch(runs, initial_job_idx=initial_job_idx), strict=True))
        for run, one in returns.items():
            if one.status is JobStatus.COMPLETED and one.return_value is None:  # of a run that had ended before
                one.return_value = result(self.config, out / sweep.folder_name(run))
        return [returns[tuple(one)] for one in job_overrides]


def _go_on(study: Any, config: DictConfig, out: Path) -> int:
    """Let the trials of which nobody could say how they ended wait to be tried again; returns how many have ended.

    A trial has ended if it has a value, or if its run failed and is not to be tried again. The others were cut short:
    this process or the run's was killed. They count as failed, and a new trial with their parameters takes their place:
    its run goes on from its finished groups, or has ended meanwhile.
    """
    from optuna.trial import TrialState, create_trial

    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    trials = study.get_trials(deepcopy=False)
    replaced = {trial.system_attrs.get(AGAIN) for trial in trials}
    ended = 0
    for trial in trials:
        chosen = trial.params or trial.system_attrs.get("fixed_params")
        if trial.state is TrialState.COMPLETE:
            ended += 1
        elif trial.state is TrialState.FAIL and chosen and trial.number not in replaced:
            folder = out / sweep.folder_name([f"{name}={value}" for name, value in (chosen | trial.user_attrs).items()])
            how = sweep.ended(folder)
            again = (
                how is None or result(config, folder) is not None or (how["state"] == "failed" and config.get("retry"))
            )
            ended += not again
            if again:
                known = {"fixed_params": chosen, AGAIN: trial.number}
                study.add_trial(create_trial(state=TrialState.WAITING, system_attrs=known))
    return ended


def _sampler(named: DictConfig, tried: int) -> Any:
    """The sampler, with a seed for each beginning: the same seed would draw the same trials again.

    Raises:
        ValueError: it cannot be built, or is not a sampler of Optuna.
    """
    with _installed():
        import optuna
    seed = named.get("seed")
    try:
        with _quiet():
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


def tell(config: DictConfig) -> None:
    """Print the best trial of a search in one line. Of other sweeps there is nothing to tell."""
    if searches(config):
        from optuna.trial import TrialState

        study = _study(config)
        best, number = study.best_trial, len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
        chosen = " ".join(f"{name}={value}" for name, value in best.params.items())
        print(f"{config.hydra.sweep.dir}: best {config.objective} of {number} trials: {best.value:.4g} with {chosen}")


# Optuna ------------------------------------------------------------------------------------------------------------


def _study(config: DictConfig) -> Any:
    """The study in the storage, made if there is none.

    Raises:
        ValueError: the storage cannot be used; the study looks the other way.
    """
    options = config.hydra.sweeper
    with _installed():
        import optuna
        from sqlalchemy.exc import SQLAlchemyError
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with _quiet():
            return optuna.create_study(
                storage=options.storage,
                study_name=options.study_name,
                directions=[options.direction],
                load_if_exists=True,
            )
    except ValueError as error:
        raise ValueError(f"hydra.sweeper.direction: the search was not begun to {options.direction}") from error
    except (optuna.exceptions.OptunaError, SQLAlchemyError) as error:
        raise ValueError(f"hydra.sweeper.storage: {options.storage} cannot be used: {reason(error)}") from error


@contextmanager
def _installed() -> Iterator[None]:
    """While inside, what is missing is said with the extra that brings it."""
    try:
        with _quiet():
            yield
    except ImportError as error:
        raise ValueError(
            f"hydra/sweeper=search needs what is not installed ({error}): pip install 'spec-lab[search]'"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """While inside, Optuna and its storage do not warn that they will change: their versions are pinned."""
    with warnings.catch_warnings():
        for module in ("optuna", "sqlalchemy", "hydra_plugins", __name__):
            warnings.filterwarnings("ignore", module=module)
        yield


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """While inside, no other process searches in ``out``.

    Raises:
        ValueError: one does.
    """
    try:
        lock = FileLock(out / ".search.lock").acquire(blocking=False)
    except Timeout as error:
        raise ValueError(f"another process is at the search in {out}") from error
    with lock:
        yield
