"""Metrics of a user's own (``conf/metrics``): functions of a run's rows, whose values stand beside the built-in ones.

A metric is a function ``f(tables, arm, **options)`` that returns numbers by name. A value for the whole arm is a float.
A value for each request is a pandas Series indexed by the number of the request: its figure is the mean with its
interval over groups, and ``spec-lab compare`` pairs it by prompt. A name is left out where an arm has no value.

The values are computed when a run has been measured, so that an error in a metric costs only its values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from numbers import Real
from typing import Any

import pandas as pd

from spec_lab.analysis.metrics.intervals import Interval, cluster_interval
from spec_lab.analysis.metrics.speed import broken_groups
from spec_lab.analysis.metrics.summary import summarise
from spec_lab.analysis.text import COLUMNS
from spec_lab.core.faults import described, location
from spec_lab.core.options import WrongOption
from spec_lab.core.terminal import visible
from spec_lab.results.table_parts import Rows
from spec_lab.results.writer import Tables

Metric = Callable[[Tables, str], Mapping[str, float | pd.Series]]
"""Returns the values of an arm by name, given a run's rows and the arm's key in them."""

WHOLE = -1
"""Stands in the column ``request`` of a value of a whole arm."""

HEADINGS = ("arm", "run", "proposer", "verifier", "losslessness", "verdict")
"""Headings of tables beside the figures'."""


@dataclass(frozen=True)
class OwnMetrics:
    """The values of a run's own metrics.

    Args:
        figures: what ``summary.json`` holds, by arm and name: ``mean``, ``low`` and ``high``; NaN where there is no
            interval.
        rows: what ``metrics.parquet`` holds (``results.schema.METRICS``, without ``id``).
        failures: what could not be computed, and why, a sentence each.
    """

    figures: Mapping[str, Mapping[str, Mapping[str, float]]]
    rows: Rows
    failures: Sequence[str]


def own_metrics(metrics: Mapping[str, Metric], tables: Tables, arms: Sequence[str]) -> OwnMetrics:
    """Compute the values of a measured run; whatever a metric raises or returns, those of the others are kept.

    Args:
        metrics: by the name of their part: ``metrics.NAME`` of the configuration.
        tables: the run's rows; metrics get those of groups in which no request broke.
    """
    broken = broken_groups(tables.requests)
    tables = Tables(
        **{
            name: frame[~frame["group"].isin(broken)] if broken and "group" in frame else frame
            for name, frame in vars(tables).items()
        }
    )
    figures: dict[str, dict[str, Mapping[str, float]]] = {arm: {} for arm in arms}
    rows: Rows = []
    failures: dict[str, list[str]] = {}
    for part, metric in metrics.items():
        for arm in arms:
            try:
                returned = _called(part, metric, tables, arm)
            except WrongOption as error:
                failures.setdefault(str(error), []).append(arm)
                continue
            for name, value in returned.items():
                try:
                    _check_name(part, name, figures[arm])
                    values = _checked(part, name, value, tables, arm)
                except WrongOption as error:
                    failures.setdefault(str(error), []).append(arm)
                    continue
                key = {"arm": arm, "metric": name}
                rows += [{**key, "request": request, "value": number} for request, number in values.items()]
                figures[arm][name] = _interval(values, tables)._asdict()
    told = [f"{message} (arms: {', '.join(of)})" for message, of in failures.items()]
    return OwnMetrics(figures, rows, told)


def returned_names(metrics: Mapping[str, Metric]) -> list[str] | None:
    """Return the names of the values that metrics return, from a run without rows; None where one raises without rows,
    so that its names are known only at the end of the run.

    Raises:
        WrongOption: a metric returns no mapping, or a name that it cannot have; names the part.
    """
    names: dict[str, str] = {}
    every = True
    for part, metric in metrics.items():
        try:
            returned = _called(part, metric, Tables.empty(), "")
        except _Raised:
            every = False
            continue
        for name in returned:
            _check_name(part, name, names)
            names[name] = part
    return list(names) if every else None


class _Raised(WrongOption):
    """A metric raised an error."""


def _called(part: str, metric: Metric, tables: Tables, arm: str) -> Mapping[Any, Any]:
    """Return what a metric returns.

    Raises:
        _Raised: it raised an error; names the part, the error, and where it was raised.
        WrongOption: it returned something else than a mapping.
    """
    function: Any = metric.func if isinstance(metric, partial) else metric
    copied = Tables(**{name: frame.copy(deep=False) for name, frame in vars(tables).items()})  # it may add columns
    try:
        returned = metric(copied, arm)
    except (Exception, SystemExit) as error:
        where = location(error, str(function.__module__))
        raise _Raised(visible(f"metrics.{part} raised {described(error)}{where}{_nearest(error, tables)}")) from error
    if not isinstance(returned, Mapping):
        raise WrongOption(
            f"metrics.{part} returned an object of type {type(returned).__name__}: return values by name, a dict of "
            "numbers, or of pandas Series with a number for each request"
        )
    return returned


def _nearest(error: BaseException, tables: Tables) -> str:
    """Return which column was meant, where the error is that a table does not have one; else nothing."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    every = {column: table for table, frame in vars(tables).items() for column in frame}
    if not isinstance(name, str) or name in every:
        return ""
    near = get_close_matches(name, every, 1)
    return f": no table has a column {name!r}" + (f"; {every[near[0]]} has {near[0]!r}" if near else "")


@cache
def _taken() -> frozenset[str]:
    """Return the names and headings of the figures that every run has."""
    headings = {figure.heading.removesuffix(" [95 %]") for figure in COLUMNS.values()}
    return frozenset({*summarise(Tables.empty(), ""), *COLUMNS, *headings, *HEADINGS})


def _check_name(part: str, name: Any, others: Mapping[str, Any]) -> None:
    """Refuse the name of a value that is no word, or that another value has.

    Args:
        part: that returned it.
        others: values that are known, by name.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name):
        raise WrongOption(
            visible(f"metrics.{part}: {name!r:.80} cannot be the name of a value: use at most 64 letters, digits and ")
            + "underscores, a letter first"
        )
    if name.endswith(("_low", "_high")):
        raise WrongOption(
            f"metrics.{part}: {name} is named like the bound of an interval in the tables of sweeps: choose a name "
            "that does not end with _low or _high"
        )
    if name in _taken():
        raise WrongOption(f"metrics.{part}: {name} is the name of a figure that every run has: choose another name")
    if name in others:
        raise WrongOption(f"metrics.{part}: another metric returns a value of the name {name}: choose another name")


def _checked(part: str, name: str, value: Any, tables: Tables, arm: str) -> dict[int, float]:
    """Return a value by request; that of a whole arm by ``WHOLE``."""
    where = f"metrics.{part}: {name}"
    if not isinstance(value, pd.Series):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise WrongOption(
                f"{where} is an object of type {type(value).__name__}: return a number, or a pandas Series with a "
                "number for each request"
            )
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise WrongOption(f"{where} is {number}: leave the name out where an arm has no value")
        return {WHOLE: number}
    try:
        if value.dtype.kind == "c":
            raise TypeError("complex ones have no order")
        numbers = value.astype(float)
    except (OverflowError, TypeError, ValueError) as error:
        raise WrongOption(
            f"{where} has values that are no real numbers ({error}): return a number for each request"
        ) from error
    known = set(tables.requests.loc[tables.requests["arm"] == arm, "request"])
    if unknown := [index for index in numbers.index if index not in known]:
        raise WrongOption(
            f"{where} has an index {unknown[0]!r:.80}, which is not the number of a request: index it by the column "
            "'request', as with .set_index('request') or .groupby('request')"
        )
    if numbers.index.has_duplicates:
        raise WrongOption(
            f"{where} has several values for request {numbers.index[numbers.index.duplicated()][0]}: return one for "
            "each, as with .groupby('request').mean()"
        )
    if len(wrong := numbers[~numbers.map(math.isfinite)]):
        raise WrongOption(
            f"{where} is {wrong.iloc[0]} for request {wrong.index[0]}: leave requests out that have no value, as with "
            ".dropna()"
        )
    if not len(numbers):
        raise WrongOption(f"{where} has no request: leave the name out where an arm has no value")
    return {int(request): float(number) for request, number in numbers.items()}


def _interval(values: Mapping[int, float], tables: Tables) -> Interval:
    """Return the mean over requests with its 95 % interval over groups; a value of a whole arm without bounds."""
    groups = dict(zip(tables.requests["request"], tables.requests["group"], strict=True))
    clusters = [groups.get(request, 0) for request in values]
    return cluster_interval(list(values.values()), [1.0] * len(values), clusters)
