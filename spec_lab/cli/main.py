"""The entry point of the command line. Configs end here: other packages receive typed objects.

torch and transformers are imported inside the job, so that ``--cfg job`` and ``--help`` answer at once.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

import spec_lab
from spec_lab.cli import interrupt
from spec_lab.cli.build import apply_constraint, build, option_names
from spec_lab.cli.bundled import PACKAGE, check_installed, choices, conf, zoo
from spec_lab.cli.config_checks import PARTS_RENAMED, groups, renamed, top_level_options
from spec_lab.cli.config_source import check_config_files
from spec_lab.cli.jobs import job
from spec_lab.cli.misspelt import Composer, of_choice, suggestion, undashed
from spec_lab.cli.preflight import Preflight, check_workers
from spec_lab.cli.redaction import as_given, moved, unquoted
from spec_lab.cli.refusals import reason
from spec_lab.models import ranks
from spec_lab.results import sweep

__all__ = [
    "Preflight", "apply_constraint", "build", "conf", "job", "main", "option_names", "quote_prompt",
    "top_level_options", "zoo",
]  # fmt: skip

OmegaConf.register_new_resolver("zoo", zoo, replace=True)
OmegaConf.register_new_resolver(
    "folder_name", lambda given, folder: sweep.folders(Path(folder), [as_given(given)])[0].name, replace=True
)

LONGEST_NAME = 200
"""Maximum number of characters of the name of an option of a config group."""

VERBOSE = ("-v", "--verbose")
"""Flags that stand for the option ``verbose=true``; Hydra has no flags of these names."""

SHORT_RUNS = ("train", "check", "check-drafter", "recommend")
"""Commands that are short for a run (``commands.SHORT``)."""


def quote_prompt(option: str) -> str:
    """Quote the text of ``task.prompt=TEXT``, which may hold Hydra's special characters; return others as is."""
    name, equals, text = option.partition("=")
    quoted = len(text) > 1 and text[0] in "\"'" and text[0] == text[-1]
    if name != "task.prompt" or quoted or text in ("", "null"):
        return option
    text = re.sub(r"(\\*)(\$\{)", r"\1\1\\\2", text)  # for OmegaConf
    text = re.sub(r'(\\*)("|\Z)', lambda quoted: quoted[1] * 2 + ('\\"' if quoted[2] else ""), text)  # for Hydra
    return f'{name}{equals}"{text}"'


def replace_flags(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with ``verbose=true`` before the first override in place of the flags ``VERBOSE``.

    Hydra requires that no flag stands between two overrides.
    """
    kept = [argument for argument in arguments if argument not in VERBOSE]
    if len(kept) < len(arguments):
        overrides = (
            n for n, argument in enumerate(kept) if argument[:1] != "-" and ("=" in argument or argument[:1] == "~")
        )
        kept.insert(next(overrides, 0), "verbose=true")
    return kept


def config_folders(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without ``--config-dir DIR``, which may stand anywhere, and the folders that it names."""
    rest, folders, words = list[str](), list[str](), iter(arguments)
    for word in words:
        flag, equals, folder = word.partition("=")
        if flag not in ("--config-dir", "-cd"):
            rest.append(word)
        elif equals or (folder := next(words, "")):
            folders.append(folder)
        else:
            rest.append(word)
    return rest, folders


def in_place(folders: Sequence[str]) -> list[str]:
    """Return the arguments that name folders of configs, for the end of a command line, where Hydra reads them."""
    return [f"--config-dir={folder}" for folder in folders]


def check_overrides(arguments: Sequence[str]) -> None:
    """Check overrides for which Hydra would print a traceback or an unclear message.

    Raises:
        ValueError: an option is written with dashes, or was renamed; an override is not readable; the value of a config
            group is empty, null, a number or a bool; a file that it names in ``--config-dir`` cannot be composed; a
            number of workers is not a whole number. The message names the option or the file.
    """
    if message := undashed(arguments, get_args_parser()._option_string_actions):
        raise ValueError(message)
    files = {*groups(), "experiment"}
    bundled = not re.search(r"^(--config-|-c[dnp]\b|\+*hydra\.searchpath)", "\n".join(arguments), re.MULTILINE)
    folders = [folder for _, folder in re.findall(r"^(--config-dir|-cd)[=\n](.+)$", "\n".join(arguments), re.MULTILINE)]
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        if argument.startswith("-"):
            continue
        path = option.lstrip("+~").rpartition("@")[2]
        if (message := renamed(path)) and path.partition(".")[0] not in PARTS_RENAMED:
            raise ValueError(message)
        if not equals:
            continue
        if not option.lstrip("+~").partition("@")[0]:
            raise ValueError(f"{argument} names no option: write NAME=VALUE without spaces")
        try:
            read = OverridesParser.create().parse_rule(argument, "override")
        except HydraException as error:
            message = str(error).splitlines()[0] if str(error) else "it does not parse"
            raise ValueError(
                f"{argument} is not readable ({message}): quote the value, as in '{option}=\"...\"'"
            ) from error
        try:
            swept = islice(read.sweep_iterator(), 1000) if read.is_discrete_sweep() else [read.value()]
            values = [unquoted(value) for value in swept]
        except (HydraException, TypeError, ValueError):
            continue  # a glob, which needs the configs, or an invalid range: checked when the sweep is composed
        if option == "hydra.launcher.n_jobs":
            check_workers(values)
        group = option.lstrip("+~").partition("@")[0]
        if group not in files:
            continue
        if None in values:
            raise ValueError(f"{option.lstrip('+')} cannot be null: name a file of conf/{group}")
        if argument.startswith("~"):
            continue
        for value in values:
            names = value if isinstance(value, list) else [value]
            for name in map(unquoted, names):
                if isinstance(name, str) and "${" in name and group != "experiment":
                    raise ValueError(_not_an_option(option.lstrip("+"), group, name))
                if not isinstance(name, dict) and not (isinstance(name, str) and 0 < len(name) <= LONGEST_NAME):
                    raise ValueError(_not_an_option(option.lstrip("+"), group, name))
                if isinstance(name, str) and bundled and name not in choices(group):
                    raise ValueError(of_choice(group, name, choices(group)))
                for folder in folders if isinstance(name, str) else ():
                    quoted = QuotedString(name, Quote.single).with_quotes()
                    _check_own(Path(folder, group, f"{name}.yaml"), folder, f"{option}={quoted}")


def _check_own(file: Path, folder: str, choice: str) -> None:
    """Refuse a config file of the user's for which Hydra would print a traceback: no YAML, defaults in a circle, ...

    Args:
        file: it, if it exists.
        folder: of ``--config-dir``.
        choice: the override that names it.
    """
    if not file.exists():
        return
    try:
        with hydra.initialize_config_dir(conf(), version_base="1.3"):
            hydra.compose("config", [f"hydra.searchpath=['file://{Path(folder).resolve()}']", choice])
    except HydraException:  # is printed in one line when it occurs again
        return
    except Exception as error:  # of YAML, OmegaConf or Hydra
        raise ValueError(f"the config {file} cannot be read ({reason(error)[:300]}): correct it") from error


@contextmanager
def composing(given: Namespace) -> Iterator[Hydra]:
    """Set Hydra up with the folders of configs that a command line names; restore what was there before."""
    path = str(Path(conf(), given.config_path or ""))
    folders = create_config_search_path(path)
    if given.config_dir:
        url = f"file://{Path(given.config_dir).resolve()}"
        folders.prepend("command-line", url, SearchPathQuery(provider="schema"))  # as Hydra does
    with hydra.initialize_config_dir(path, version_base="1.3"):
        GlobalHydra.instance().clear()
        yield Hydra.create_main_hydra2("spec_lab", folders)


def check_composition(arguments: Sequence[str]) -> None:
    """Refuse overrides and configs of the user's that Hydra cannot compose, with those that their ``defaults`` include.

    Hydra would print several lines of advice on an option that does not exist, and a traceback for YAML that is not
    valid, defaults in a circle, ...

    Raises:
        ValueError: Hydra cannot compose them. With ``HYDRA_FULL_ERROR=1`` Hydra says so itself.
    """
    given, _ = get_args_parser().parse_known_args(arguments)
    if given.shell_completion or os.environ.get("HYDRA_FULL_ERROR") == "1":
        return
    path = str(Path(conf(), given.config_path or ""))
    paths = [override for override in given.overrides if override.startswith("hydra.searchpath=")]
    if not Path(path).is_dir() or not Path(given.config_dir or path).is_dir():
        return  # Hydra's own message is clear
    try:
        with composing(given) as composed:
            loader = composed.config_loader

            def compose(overrides: list[str]) -> DictConfig:
                load = partial(loader.load_configuration, given.config_name or "config", overrides)
                if given.multirun or re.search(r"=.*[,(]", "\n".join(overrides)):  # perhaps several values
                    config = load(run_mode=RunMode.MULTIRUN, validate_sweep_overrides=False)
                    if given.multirun or config.hydra.mode == RunMode.MULTIRUN:  # an experiment may say so
                        return config
                return load(run_mode=RunMode.RUN)

            try:
                compose(given.overrides)
            except HydraException as error:
                for option in (override.lstrip("+~").partition("=")[0] for override in given.overrides):
                    if (message := renamed(option)) and f"'{option}'" in str(error):
                        raise ValueError(message) from error
                composer = Composer(compose, loader.get_group_options)
                raise ValueError(suggestion(error, given.overrides, composer)) from error
    except ValueError:
        raise
    except Exception as error:  # of YAML, OmegaConf or Hydra
        where = given.config_dir or given.config_path or given.config_name or (paths or ["the command line"])[0]
        raise ValueError(
            f"the configs of {where} cannot be composed ({reason(error)[:300]}): correct the file, or one that its "
            "defaults include"
        ) from error


def checked_line(arguments: Sequence[str]) -> list[str]:
    """Return the command line of a run as Hydra reads it: without secrets and with options in place of our flags.

    Raises:
        ValueError: it is not readable, or Hydra cannot compose it.
    """
    plugins = str(PACKAGE / "cli" / "plugins")  # where Hydra finds our launcher
    if plugins not in sys.path:
        sys.path.append(plugins)
    line = moved(replace_flags(arguments))
    check_config_files()
    check_installed()
    check_overrides(line)
    check_composition(line)
    return line


def _not_an_option(option: str, group: str, value: object) -> str:
    """Return the message for a value of a config group that is not the name of an option."""
    shown = str(value).lower() if isinstance(value, bool) else str(value)[:40]
    names = ", ".join(choices(group))
    number = isinstance(value, int | float)
    quotes = f"; if a config file of yours has this name, quote it: \"{option}='{shown}'\"" if number else ""
    return f"{option}={shown} is not an option of conf/{group}; the options are {names}{quotes}"


def main() -> None:
    """Run the console script. With torchrun, rank 0 runs the command and the other ranks serve it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported, later
    if ranks.rank():
        interrupt.change(interrupt.Leave("", stage="worker"))
        from spec_lab.models.loading import follow

        return follow()
    try:
        command_line()
    except SystemExit as left:
        if left.code or ranks.size() == 1:  # after an error torchrun ends the other ranks
            raise
    if ranks.size() > 1:
        from spec_lab.models.tensor_parallel import join

        join().leave()


def command_line() -> None:
    """Run the command in ``sys.argv``."""
    if "--version" in sys.argv[1:]:
        print(f"spec_lab {spec_lab.__version__}")
        return
    if {"-sc", "--shell-completion"} & {*sys.argv[1:]} and "COMP_LINE" in os.environ:
        from spec_lab.cli.commands import complete, training_line

        os.environ["COMP_LINE"] = training_line(os.environ["COMP_LINE"])
        candidates, hydras_too = complete(os.environ["COMP_LINE"])
        print(*candidates, sep="\n")
        if not hydras_too:
            return
        os.environ["COMP_LINE"] = re.sub(r"(?<=\s)(-v|--verbose)(?!\S)", "verbose=true", os.environ["COMP_LINE"])
    if sys.argv[1:2] == ["help"]:  # help COMMAND is COMMAND --help
        sys.argv[1:] = [*sys.argv[2:], "--help"]
    rest, folders = config_folders(sys.argv[1:])
    if rest and rest[0] in SHORT_RUNS:
        from spec_lab.cli.commands import SHORT

        rest = SHORT[rest[0]](rest)
    if not (rest and rest[0].isidentifier()):  # a run; another command reads its own flags
        sys.argv[1:] = [*rest, *in_place(folders)]
    if {"-h", "--help"} & {*sys.argv[1:]} and not sys.argv[1].isidentifier():
        from rich.console import Console

        from spec_lab.cli import help as pages

        overrides = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
        sys.exit(pages.show(overrides, Console(markup=False), folders))
    if not {"-m", "--multirun"} & set(sys.argv):
        sys.argv[1:] = [quote_prompt(option) for option in sys.argv[1:]]
    if re.match(r"[^\W\d][\w-]*$", "".join(sys.argv[1:2])):  # Hydra's options have a "=", or begin with "-", "+" or "~"
        from spec_lab.cli.commands import command

        try:
            with interrupt.Raising():
                sys.exit(command(sys.argv[1:]))
        except KeyboardInterrupt:
            print("\nInterrupted.", file=sys.stderr)
            sys.exit(interrupt.CODE)
    try:
        sys.argv[1:] = checked_line(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"spec_lab: {reason(error)}")
    try:
        hydra.main(version_base="1.3", config_path=conf(), config_name="config")(job)()
    except KeyboardInterrupt:
        many = {"-m", "--multirun"} & set(sys.argv)
        print("\nInterrupted." if many else "\nInterrupted before anything was decoded.", file=sys.stderr)
        sys.exit(interrupt.CODE)
    except InterpolationResolutionError as error:  # hydra.run.dir is composed before any callback
        sys.exit(f"spec_lab: output_dir must name a directory ({reason(error)}); set output_dir=DIR")
