"""One job of Hydra: a single run, or one run of a sweep."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spec_lab.cli import interrupt
from spec_lab.cli.build import build
from spec_lab.cli.redaction import overrides_of, without_values, written
from spec_lab.cli.refusals import Refused, reason, refusing
from spec_lab.cli.start import REUSED, start
from spec_lab.core.faults import described, location, of_a_part
from spec_lab.core.files import read_json
from spec_lab.results import run_figures, run_state, sweep


def job(config: DictConfig) -> None:
    """Run one composed config: a single run, or one run of a sweep."""
    try:
        with refusing():
            (alone if OmegaConf.is_missing(HydraConfig.get().job, "num") else run_of_sweep)(config)
    except Exception:
        if interrupt.interrupted():  # some libraries turn a KeyboardInterrupt into another error
            raise KeyboardInterrupt from None
        raise


def alone(config: DictConfig) -> None:
    """Run a single run; a run that is refused leaves no files.

    Raises:
        Refused: an invalid option or part, or files that cannot be read or written; the message is one line.
        SystemExit: the run ended with an exit code other than 0.
    """
    out = Path(HydraConfig.get().runtime.output_dir)
    interrupt.change(interrupt.Leave(folder=str(out)))
    try:
        with run_state.holding(out):
            code = carry_out(config, out)
    except (Refused, OSError, ValueError, run_state.Locked, OmegaConfBaseException) as error:
        with suppress(OSError):
            out.rmdir()  # Hydra made it
        message = without_values(config, reason(error))
        if isinstance(error, Refused) and message == str(error):
            raise
        message = message.removeprefix("spec_lab: ")
        if of_a_part(error):
            message += ". Set HYDRA_FULL_ERROR=1 to see the traceback"
        raise Refused(f"spec_lab: {message}") from (None if isinstance(error, OmegaConfBaseException) else error)
    if code:
        sys.exit(code)


def run_of_sweep(config: DictConfig) -> None:
    """Run one run of a sweep: a finished run is skipped, a stopped one resumed.

    A failure is recorded in the run's folder and does not end the sweep.

    Raises:
        Refused: a run that was done before with another configuration cannot be run in the same folder.
        SystemExit: Ctrl-C.
    """
    facts = HydraConfig.get()
    out, overrides, began = Path(facts.runtime.output_dir), overrides_of(facts), time.perf_counter()

    def say(what: str) -> None:
        print(f"{sweep.which_run(out)}: {what}", file=sys.stderr, flush=True)

    try:
        # On a cluster the run's previous job may not have released the lock yet.
        patience = 120 if str(facts.launcher["_target_"]).endswith(".Cluster") else 1
        with run_state.holding(out, patience):
            if known := before(config, out):
                return say(known)
            state = (run_state.ended(out) or {"state": ""})["state"]
            done = state == "done"
            if not done:
                run_state.begin(out)
            try:
                code = carry_out(config, out, overrides, retried=state == "failed")
            except Exception as error:
                if interrupt.interrupted():
                    raise KeyboardInterrupt from None
                message = without_values(config, reason(error).removeprefix("spec_lab: "))
                if done:  # with another configuration: its files stay
                    raise Refused(f"spec_lab: {sweep.which_run(out)}: {message}") from error
                try:
                    hide = partial(without_values, config)
                    run_state.fail(out, overrides, error, message, time.perf_counter() - began, hide)
                except OSError as full:
                    message += f"; the failure could not be recorded in {out} ({full.strerror})"
                return say(f"failed: {message}")
            if code == run_state.INTERRUPTED:
                sys.exit(code)
            say(f"done in {time.perf_counter() - began:.1f} s" + f", exit code {code}" * bool(code))
    except run_state.Locked:
        say("skipped: locked by another process")


def before(config: DictConfig, out: Path) -> str:
    """Return why the run in ``out`` is skipped: it is done, or it failed without ``retry``. Empty if it must run."""
    how = run_state.ended(out)
    if how is None:
        return ""
    if how["state"] == "done":
        return "done before" if unchanged(config, out, how) else ""
    return "" if config.get("retry") else f"failed before ({how['error']}); retry=true tries again"


def carry_out(config: DictConfig, out: Path, overrides: Sequence[str] | None = None, retried: bool = False) -> int:
    """Build and run the task, and record that the run is done; return its exit code.

    Args:
        overrides: the run's overrides if it belongs to a sweep; None for a single run.
        retried: whether it failed before.
    """
    began = time.perf_counter()
    try:
        code = start(config, out, overrides, retried)
    except SystemExit as error:  # of a part's code: nothing here raises it
        raise Refused(
            f"spec_lab: a part ended the run by {described(error)}{location(error, __name__)}: let it raise another "
            "error"
        ) from error
    wrote = any(file.name != ".lock" for file in out.iterdir())  # some tasks write no files
    if code != run_state.INTERRUPTED and wrote:
        run_state.end(out, overrides or (), identity(config), code, time.perf_counter() - began)
    return code


def identity(config: DictConfig) -> str:
    """Return a hash of the configuration without the options that only name where results go."""
    from spec_lab.results.manifest import digest

    return digest(_resolved(config))


def unchanged(config: DictConfig, out: Path, how: Mapping[str, Any]) -> bool:
    """Return whether a finished run has this configuration, these prompts and the same code from other packages, and
    the values of these metrics.
    """
    from spec_lab.results.manifest import digest, same_code
    from spec_lab.results.sources import code
    from spec_lab.text.prompts import digest as of_prompts

    begun, resolved = read_json(out / "manifest.json") or {}, _resolved(config)
    named = {"metrics": written(config).get("metrics") or None}
    computed = run_figures.left_behind(out).get("own_metrics") or {}
    return (
        how.get("config_sha256") == digest(resolved)
        and named["metrics"] == computed.get("config")
        and code(named, (), REUSED) == computed.get("code", {})
        and ("prompts_sha256" not in begun or begun["prompts_sha256"] == of_prompts(build(config, "prompts")))
        and same_code(begun, resolved, REUSED)
    )


def _resolved(config: DictConfig) -> Any:
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
