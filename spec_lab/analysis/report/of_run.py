"""The page about one run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from spec_lab.analysis import figures, metrics
from spec_lab.analysis.metrics import Tables, frames
from spec_lab.analysis.metrics.frames import Ranks
from spec_lab.analysis.report import charts
from spec_lab.analysis.report.page import Figure, placed, render
from spec_lab.core.files import Unreadable, expect, read_json
from spec_lab.engine.request import FINISHES
from spec_lab.propose import trees
from spec_lab.results import sweep
from spec_lab.results.manifest import begun

MOST_PROMPTS = 50
MOST_LETTERS = 600_000
"""Letters of all outputs shown; what exceeds it makes a page that browsers are slow to open."""
MOST_OF_A_PROMPT = 600, 12
"""Letters and lines of a prompt's end that are shown."""

PARTS = {
    "?proposer": (str, None),
    "?verifier": (str, None),
    "?constraint": (str, None),
    "?lossless": (bool, None),
    "?certified": (str, bool, None),
    "?certificate": (None, {"?failure": (str, None), "?missing": [str]}),
}
"""What is shown of ``summary.json``."""

MARKS = {"accepted": "a", "forced": "f", "bonus": "", "prefill": "", "unknown": ""}
"""How each kind of span is marked in the page."""


def page(folder: Path) -> str:
    """The text of the page; draws the figures for papers into ``figures/`` as well.

    Raises:
        ValueError: what is there has no rows of a run and will have none; files that are not readable.
    """
    begin = begun(folder)
    if begin is None:
        raise ValueError(f"{folder} holds no manifest.json, so it holds no run")
    summary, tables = _summary(folder), metrics.load(folder)
    if not len(tables.requests):
        _not_of_another_task(folder)
    arms = metrics.arms(tables)
    drafted = {arm: tree for arm, one in begin["proposers"].items() if (tree := _tree(one.get("tree")))}
    drawn = figures.draw_all(tables, folder / "figures", drafted)
    colours = figures.colours(arms)
    table = [_arm(tables, arm, colours[arm], begin, summary) for arm in arms]
    prompts, cut = _prompts(tables, arms)
    return render(
        "run",
        _figures(tables, colours, drafted),
        drawn,
        title=f"{begin['config'].get('name', 'run')}: {folder.resolve().name}",
        lead=_lead(begin, summary, tables),
        warnings=_warnings(begin, summary, tables),
        arms=table,
        reduced=any(isfinite(one["figures"]["calibration"]["variance_reduction"]) for one in table),
        temperature=_temperature(begin, summary),
        against=metrics.against(tables),
        prompts=prompts,
        cut=cut,
        constrained=summary.get("constraint", "none") != "none",
        ran=_ran(begin, summary, tables),
    )


def _figures(tables: Tables, colours: Mapping[str, str], drafted: Mapping[str, tuple[Ranks, ...]]) -> list[Figure]:
    each, means = frames.throughput(tables), frames.speedups(tables)
    depths, given = frames.by_depth(tables), frames.tokens_per_step(tables)
    spent, nodes = frames.time_by_phase(tables), frames.cost_of_nodes(tables)
    grown = {
        arm: frames.accepted_tree(metrics.decode_steps(tables.steps, arm), drafted.get(arm, ())) for arm in colours
    }
    grown = {arm: own for arm, own in grown.items() if len(own)}
    kinds = {
        "survival": "depth k: steps that accepted k or more / all steps",
        "conditional": "depth k: accepted k / reached k",
    }

    nothing = "No finished group has a step after its prefill, so there is nothing to draw."
    return [
        Figure(
            "Speed-up",
            "Ticks: each group of prompts. Diamond and bar: their mean with its 95 % bootstrap interval. An interval "
            "that lies right of the dashed line is faster than the baseline on these prompts.",
            [("", charts.speedups(each, means, colours))] if len(means) else [],
            why="No arm was compared with a baseline in a full group of prompts, so there is no speed-up.",
            files=["throughput"],
        ),
        Figure(
            "Acceptance by depth",
            "Left: of all steps, how many accepted k drafted tokens or more. Right: of the steps that accepted k - 1 "
            "and had a draft for k, how many accepted it. Bands: 95 % over groups. A click in a legend picks an arm.",
            [(kind.capitalize(), charts.depth(depths, kind, colours, x)) for kind, x in kinds.items() if len(depths)],
            why="No arm drafted anything.",
            layout="columns-2",
            files=["acceptance"],
        ),
        Figure(
            "Tokens that a step gave",
            "Each bar is all steps of an arm, cut by how many tokens they gave; tau is the mean. Two arms of the same "
            "tau may differ: steady, or now and then a lot.",
            [("", charts.tokens(given))] if len(given) else [],
            why=nothing,
            files=["tokens"],
        ),
        Figure(
            "Where the time goes",
            "Decode time per emitted token, by phase. Overhead is the share outside the module calls of target, draft "
            "and heads. A draft pays if the whole bar is shorter than the baseline's.",
            [("", charts.phases(spent))] if len(spent) else [],
            why=nothing,
            files=["phases"],
        ),
        Figure(
            "Time of the target by nodes",
            "Time of the phase target alone in a round, by the nodes drafted per sequence: median and quartiles, "
            "larger where more rounds were measured. Contexts are pooled, and nodes are as the arms came to draft "
            "them, so points differ in more than their nodes; +experiment=cost_of_nodes varies nodes alone.",
            [("", charts.cost(nodes, colours))] if len(nodes) else [],
            why=nothing,
            files=["cost"],
        ),
        Figure(
            "Accepted paths",
            "Each arm's draft tree, ranks downwards and depth to the right, with the share of steps that accepted each "
            "node (before cuts). Hollow: never accepted, so perhaps not worth its cost. Where a tree is not fixed, "
            "only what was accepted is drawn; of large trees the 64 nodes accepted most often.",
            [(arm, charts.tree(own, colours[arm])) for arm, own in grown.items()],
            why="No arm drafted anything that was accepted.",
            layout="flow",
            files=["accepted_trees"],
        ),
    ]


def _not_of_another_task(folder: Path) -> None:
    """Refuse what is no run, or has ended without rows; a run whose first group is not finished has left nothing yet.

    Raises:
        ValueError: it is such a directory; names what there is.
    """
    every = [file for place in (".", "parts", "figures") for file in (folder / place).glob("*.*") if file.is_file()]
    own = re.compile(r"\.|(manifest|ended)\.json$|report\.html$|(rounds|steps|requests)[-.]")
    left = sorted(str(file.relative_to(folder)) for file in every if not own.match(file.name))
    how = sweep.ended(folder)
    if left or (how and how["state"] == "done"):
        what = ", ".join(left[:6]) + f" and {len(left) - 6} more" * (len(left) > 6)
        raise ValueError(
            f"{folder} holds no rows of a run, of which a report is made; "
            + (f"what its task has left is in {what}" if left else "its task has left nothing but the manifest")
        )


def _summary(folder: Path) -> dict[str, Any]:
    """What ``summary.json`` says; nothing of a run that has not ended.

    Raises:
        Unreadable: it says something else than a run's.
    """
    file = folder / "summary.json"
    try:
        found = read_json(file) or {}
        expect(found, {**PARTS, "?arms": {str: PARTS}}, "")
    except ValueError as error:
        why = str(error) if str(file) in str(error) else f"{file} is not readable ({error})"
        raise Unreadable(f"{why}; give the run's command again to make it anew") from error
    return found


def _temperature(begin: Mapping[str, Any], summary: Mapping[str, Any]) -> float:
    """The temperature of the requests; 0 where the run does not say."""
    said = summary.get("temperature", begin["config"].get("sampling", {}).get("temperature", 0.0))
    return float(said or 0.0)


def _tree(told: Any) -> tuple[Ranks, ...]:
    """The draft tree that a manifest tells of; empty where it is not written as ``trees.parse`` reads it."""
    try:
        return trees.parse(told) if isinstance(told, str) and told else ()
    except ValueError:  # a proposer of another package may write its trees otherwise
        return ()


def _arm(tables: Tables, arm: str, colour: str, begin: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table of arms."""
    said = summary.get("arms", {}).get(arm, {})
    proposer = begin["proposers"].get(arm, {})
    drawn = f" ({proposer['drawn']})" if proposer.get("drawn") and proposer.get("name") != "none" else ""
    return {
        "name": arm,
        "colour": colour,
        "proposer": f"{said.get('proposer') or proposer.get('name', '')}{drawn}",
        "verifier": said.get("verifier") or "",
        "law": _law(said),
        "figures": metrics.summarise(tables, arm),
    }


def _law(said: Mapping[str, Any]) -> dict[str, str]:
    """Whether an arm has the target's law, in a word, and why."""
    lossless, certificate = said.get("lossless"), said.get("certificate") or {}
    if lossless is None:
        return {"word": "", "mark": "", "why": "", "grade": ""}
    if not lossless:
        why = f"verifier '{said.get('verifier')}' does not keep the target's law"
        return {"word": "lossy", "mark": "lossy", "why": why, "grade": ""}
    if certificate.get("failure"):
        return {
            "word": "NOT lossless",
            "mark": "broken",
            "why": f"declared lossless, but: {certificate['failure']}",
            "grade": "",
        }
    if said.get("certified"):
        return {"word": "lossless", "mark": "lossless", "why": "", "grade": said["certified"]}
    missing = "; ".join(certificate.get("missing", ()))
    why = f"declared lossless, not enumerated ({missing}); +experiment=certify tests it by samples" if missing else ""
    return {"word": "not certified", "mark": "", "why": why, "grade": ""}


def _lead(begin: Mapping[str, Any], summary: Mapping[str, Any], tables: Tables) -> str:
    config, requests = begin["config"], tables.requests
    parts = [
        f"proposer {summary.get('proposer') or begin['proposers'].get('speculative', {}).get('name', 'none')}",
        f"verifier {summary['verifier']}" if summary.get("verifier") else "",
        f"constraint {summary['constraint']}" if summary.get("constraint", "none") != "none" else "",
        f"temperature {config['sampling']['temperature']:g}" if "sampling" in config else "",
        f"batch {config['batch_size']}" if "batch_size" in config else "",
        f"{requests['request'].nunique()} prompts ({', '.join(sorted(set(requests['workload'])))})"
        if len(requests)
        else "",
        f"at most {config['max_new_tokens']} tokens" if "max_new_tokens" in config else "",
    ]
    return ", ".join(part for part in parts if part)


def _warnings(begin: Mapping[str, Any], summary: Mapping[str, Any], tables: Tables) -> list[str]:
    said = []
    groups = tables.requests["group"].nunique()
    if not summary:
        of = f" of {begin['groups']}" if begin.get("groups") else ""
        said.append(
            f"This run has not ended: {groups}{of} groups of prompts are finished, and this page shows those. "
            "Verifiers and certificates are stated when it ends."
        )
    if broken := len(metrics.broken_groups(tables.requests)):
        said.append(f"In {broken} of {groups} groups a request broke: they are left out of speeds.")
    if metrics.short_groups(tables.requests):
        said.append("The last group has fewer prompts than the others: it is left out of the speed-ups.")
    errors = [one for one in tables.requests["error"].unique() if one]
    return said + errors[:5] + [f"and {len(errors) - 5} more errors"] * (len(errors) > 5)


def _ran(begin: Mapping[str, Any], summary: Mapping[str, Any], tables: Tables) -> dict[str, Any]:
    """What ran, where: names and values; empty ones are left out."""
    config, machine, versions = begin["config"], begin.get("machine", {}), begin.get("versions", {})
    sampling = {key: value for key, value in (config.get("sampling") or {}).items() if key[0] != "_"}
    target, prompts = config.get("target") or {}, config.get("prompts") or {}
    numbers = (target.get("dtype"), _device(target, begin.get("ranks", 1)), target.get("attention"))
    memory = f", {machine['memory_gib']} GiB" if machine.get("memory_gib") else ""
    return {
        "experiment": config.get("name"),
        "model": placed(target.get("path")),
        "numbers, device": ", ".join(str(one) for one in numbers if one),
        "proposers": "; ".join(f"{arm}: {one.get('name')}" for arm, one in begin["proposers"].items()),
        "constraint": summary.get("constraint"),
        "sampling": ", ".join(f"{key} {value}" for key, value in sampling.items()),
        "prompts": placed(prompts.get("path")) or prompts.get("_target_"),
        "prompts, SHA-256": begin.get("prompts_sha256"),
        "batch size": config.get("batch_size"),
        "seed": str(begin.get("seed", "")),
        "groups": f"{tables.requests['group'].nunique()}",
        "processor": f"{machine.get('processor', '')}, {machine.get('cores')} cores{memory}",
        "GPUs": ", ".join(machine.get("gpus") or ()),
        "threads": begin.get("threads"),
        "system": machine.get("system"),
        "commit": begin.get("commit"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }  # fmt: skip


def _device(target: Mapping[str, Any], ranks: int) -> str | None:
    """Where the target was, in words: null means what it means to ``Target.load``. None of a target that has none."""
    if target.get("device_map"):
        return f"device map {target['device_map']}"
    if target.get("tensor_parallel"):
        return f"{ranks} ranks"
    return target["device"] or "cpu" if "device" in target else None


def _prompts(tables: Tables, arms: list[str]) -> tuple[list[dict[str, Any]], str]:
    """The first prompts with every arm's output in pieces, and in words how many were left out."""
    every = list(dict.fromkeys(tables.requests["request"]))
    shown: list[dict[str, Any]] = []
    letters = 0
    for request in every[:MOST_PROMPTS]:
        own = Tables(tables.rounds, *(one[one["request"] == request] for one in (tables.steps, tables.requests)))
        letters += int(own.requests["text"].str.len().sum())
        if shown and letters > MOST_LETTERS:
            break
        shown.append(_prompt(own, arms))
    if len(shown) == len(every):
        return shown, f"All {len(every)} prompts."
    return shown, f"The first {len(shown)} of {len(every)} prompts; the others are in requests.parquet."


def _prompt(own: Tables, arms: list[str]) -> dict[str, Any]:
    """One prompt; ``own`` has the rows of its request."""
    first = own.requests.iloc[0]
    outputs = []
    for number, arm in enumerate(arms):
        rows = own.requests[own.requests["arm"] == arm].sort_values("sequence")
        steps = metrics.decode_steps(own.steps, arm)
        for row in rows.to_dict("records"):
            pieces = frames.spans(own, row["request"], arm, row["sequence"])
            outputs.append({"arm": number, "about": _about(row, steps, len(rows)), "pieces": _marked(pieces)})
    about = ", ".join(str(first[name]) for name in ("workload", "source") if first[name])
    return {"name": first["name"], "about": about, "end": _end(str(first["prompt"])), "outputs": outputs}


def _end(prompt: str) -> str:
    """What is shown of a prompt."""
    letters, lines = MOST_OF_A_PROMPT
    end = "\n".join(prompt.split("\n")[-lines:])[-letters:]
    return prompt if len(end) == len(prompt) else f"…\n{end}"


def _about(row: Mapping[str, Any], steps: Any, sequences: int) -> str:
    """What is to be said of one output."""
    own = steps[steps["sequence"] == row["sequence"]]
    fork = f"Sequence {row['sequence']}{'' if row['kept'] else ', not kept'}: " if sequences > 1 else ""
    tau = metrics.tau_pooled(own)
    said = [
        f"{fork}{len(row['tokens'])} tokens",
        f"{len(own)} steps after the prefill, {tau:.2f} tokens a step" if len(own) else "",
        f"ended: {FINISHES.get(row['finish'], row['finish'])}" if row["finish"] else "",
        f"breaks its constraint after {row['violated']} tokens" if row["violated"] >= 0 else "",
        row["error"],
    ]
    return ", ".join(part for part in said if part)


def _marked(pieces: list[frames.Span]) -> list[tuple[str, str]]:
    """Mark and text of each piece; a piece that begins a step and is not shaded is marked 's'."""
    marked, last = [], -1
    for piece in pieces:
        mark = MARKS[piece.kind]
        if not mark and piece.round != last and piece.round > 0:
            mark = "s"
        last = piece.round
        marked.append((mark, piece.text))
    return marked
