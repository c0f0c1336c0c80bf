"""The tables of a run on Weights & Biases, of bounded size: sample outputs, steps and acceptance by depth."""

from __future__ import annotations

import json

import pandas as pd

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics import Tables
from spec_lab.analysis.metrics.frames import by_depth, spans

MAX_ROWS = 500
"""Most rows of the table of requests: those of the first prompts."""

MAX_STEPS = 1000
"""Most rows of the table of steps: those of the first prompts."""

MAX_LETTERS = 600
"""Most letters of a text in a table: the last of a prompt, the first of an output."""

STEP_COLUMNS = ("context", "nodes", "depth", "accepted", "expected_accepted", "emitted_kept", "finish")
LIST_COLUMNS = ("path", "draft_tokens", "draft_p", "draft_q")


def requests(tables: Tables, max_rows: int = MAX_ROWS, max_letters: int = MAX_LETTERS) -> pd.DataFrame:
    """Return one row for each prompt and arm (each sequence of a fork): texts, tokens, tau, speed, finish reason.

    All arms of a prompt are shown or none, with at most ``max_rows`` rows together.
    """
    shown = _first_prompts(tables.requests.sort_values(["request", "order", "sequence"], kind="stable"), max_rows)
    steps = {
        key: rows
        for arm in metrics.arms(tables)
        for key, rows in metrics.decode_steps(tables.steps, arm).groupby(["request", "arm", "sequence"])
    }
    rows = []
    for output in shown.itertuples(index=False):
        of_sequence = steps.get((output.request, output.arm, output.sequence))
        rows.append(
            {
                "request": int(output.request),
                "name": output.name,
                "workload": output.workload,
                "arm": output.arm,
                "sequence": int(output.sequence),
                "prompt": output.prompt if len(output.prompt) <= max_letters else "…" + output.prompt[-max_letters:],
                "text": output.text if len(output.text) <= max_letters else output.text[:max_letters] + "…",
                "tokens": int(output.prefill_tokens + output.decode_tokens),
                "tau": None if of_sequence is None else metrics.tau_pooled(of_sequence),
                "tokens_per_second": metrics.ratio(output.decode_tokens, output.decode_seconds),
                "finish": output.finish,
                "error": output.error,
            }
        )
    return pd.DataFrame(rows, columns=list(rows[0]) if rows else ["request"]).astype(object)


def steps(tables: Tables, max_rows: int = MAX_STEPS, max_letters: int = MAX_LETTERS) -> pd.DataFrame:
    """Return one row for each step of each sequence after the prefill: its draft, what was accepted, its text.

    ``accepted_text`` is the text of accepted draft tokens, ``other_text`` that of the bonus or recovered token and of
    forced ones. Drafted tokens and their probabilities are shown where they are recorded, as JSON. All steps of a
    prompt are shown or none, with at most ``max_rows`` rows together.
    """
    every = pd.concat([metrics.decode_steps(tables.steps, arm) for arm in metrics.arms(tables)] or [tables.steps])
    order = [name for name in ("request", "arm", "sequence", "forward") if name in every]
    shown = _first_prompts(every.sort_values(order, kind="stable", ignore_index=True), max_rows)
    texts: dict[tuple[int, str, int, int], dict[str, str]] = {}
    for request, arm, sequence in shown[["request", "arm", "sequence"]].drop_duplicates().itertuples(index=False):
        for span in spans(tables, request, arm, sequence):
            of_step = texts.setdefault((request, arm, sequence, span.forward), {"accepted": "", "other": ""})
            of_step["accepted" if span.kind == "accepted" else "other"] += span.text[:max_letters]
    of_steps = [texts.get(key, {}) for key in zip(*(shown[name] for name in order), strict=True)]
    table = shown[[*order, *(name for name in STEP_COLUMNS if name in shown)]].rename(columns={"forward": "step"})
    for kind in ("accepted", "other"):
        table[f"{kind}_text"] = [of_step.get(kind, "") for of_step in of_steps]
    for name in LIST_COLUMNS:
        if name in shown:
            table[name] = [None if values is None else json.dumps(_rounded(values)) for values in shown[name]]
    return table.astype(object)


def depths(tables: Tables) -> pd.DataFrame:
    """Return acceptance by depth of each arm that drafts (``metrics.frames.by_depth``)."""
    return by_depth(tables).astype(object)


def _first_prompts(rows: pd.DataFrame, max_prompts: int) -> pd.DataFrame:
    """Return the rows of the first prompts, at most ``max_prompts``."""
    count = rows.groupby("request", sort=True).size().cumsum()
    return rows[rows["request"].isin(count.index[count <= max_prompts])]


def _rounded(values: object) -> list[float | int | None]:
    """Return a list of numbers with four decimals, None for those that are not numbers."""
    rounded = []
    for value in list(values):  # type: ignore[call-overload]
        number = None if value is None else float(value)
        rounded.append(
            None if number is None or number != number else int(value) if number == value // 1 else round(number, 4)
        )
    return rounded
