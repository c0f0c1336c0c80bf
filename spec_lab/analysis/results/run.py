"""The result of ``task=benchmark``: speed, acceptance and time of every arm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from spec_lab.analysis import figures, metrics
from spec_lab.analysis.metrics import PHASES, Tables
from spec_lab.analysis.metrics.frames import Ranks
from spec_lab.analysis.policy_text import policy_note
from spec_lab.analysis.results.bounds import BOUNDS, NOTE, bounds_notes, bounds_table
from spec_lab.analysis.results.ranges import along_text
from spec_lab.analysis.results.reliability import MEANING, calibrations
from spec_lab.analysis.roofline_text import baseline_notes, roofline_notes
from spec_lab.analysis.text import (
    COLUMNS,
    KEY_FIGURES,
    MEANINGS,
    OWN,
    accuracy_notes,
    cache_notes,
    column,
    kv_notes,
    lossless_cell,
    losslessness,
    margin_notes,
    verdict_line,
)
from spec_lab.core.roofline import Roofline
from spec_lab.propose import trees
from spec_lab.results.manifest import finite
from spec_lab.results.old_names import target_dtype
from spec_lab.results.result import (
    INTERVAL,
    REAL,
    Cell,
    DataTable,
    Result,
    Section,
    cell,
    interval,
    number,
    read_run,
    run_title,
)

PARTS = {
    "?metrics": {str: INTERVAL},
    "?proposer": (str, None), "?verifier": (str, None), "?constraint": (str, None), "?lossless": (bool, None),
    "?invalid_text": (bool, None),
    "?certified": (str, bool, None), "?certificate": (None, {
        "?failure": (str, None), "?missing": [str], "?worst_tv": (float, None), "?worst_instance": (str, None),
        "?instances": int,
    }),
}  # fmt: skip
MARGIN = {"median": float, "largest": float}
SUMMARY = {
    **PARTS, "?arms": {str: PARTS}, "?output_margins": {str: MARGIN}, "?bounds": {str: BOUNDS},
    "?kv_dtype": (str, None), "?cached_prompt_shares": {str: REAL}, "?repeated_groups": {str: int},
    "?answers": {"cut": int, "answers": int, "continued": int, "limit": int}, "?own_metrics": {"failures": [str]},
}  # fmt: skip
"""Fields that are read of ``summary.json``; figures are computed from the rows."""

FIGURES = (
    "tokens_per_second", "speedup", "correct", "correct_change", "tau_pooled", "draft_token_rate",
    "time_to_first_token", "time_per_output_token", "tau_pooled_raw", "expected_tau", "nodes_per_step", "overhead",
    "repeated_8gram_share", "speedup_with_prefill", "speedup_mean_of_groups", "roofline_share",
    "roofline_share_end_to_end", "memory_bound_steps",
)  # fmt: skip
"""Columns of the table of arms."""

MAIN_FIGURES = FIGURES[:2] + FIGURES[4:8]
"""Those that every terminal shows."""

MAX_KEY = 8
"""Largest number of arms at the top of the page."""

ARMS = (
    "Every arm decoded the same prompts in one process; the arms alternated. Speed-up, tokens/s and tau leave out the "
    "prefill."
)
REDUCTION = (
    "Variance reduction: how many times more groups the untruncated tau would need for the precision of expected tau."
)
PEERS = "Total tokens per total seconds over each peer's on the same prompts, with 95 % intervals."
THROUGHPUT = (
    "First: decode speed of each group of prompts. Second: the speed-up, the arm's total tokens per total seconds over "
    "the baseline's, with its 95 % interval; small dots are the groups' ratios. An interval to the right of the dashed "
    "line is faster than the baseline on these prompts."
)
DEPTHS = "Of the steps of each arm, by the drafted tokens accepted in a row; bands: 95 % over groups."
SURVIVAL = "Of all steps, the share that accepted k drafted tokens or more."
CONDITIONAL = "Of the steps that accepted k - 1 and had a draft for k, the share that accepted it."
TOKENS = "Each bar holds all steps of an arm, divided by the number of tokens that they emitted; tau is the mean."
PHASE_TIME = (
    "Decode time per emitted token. Overhead is the share outside the module calls of target, draft and heads. "
    "Drafting pays if the whole bar is shorter than the baseline's."
)
COST = (
    "Time of the phase target in one forward, by the nodes drafted per sequence: median and quartiles. Contexts are "
    "pooled, and nodes are as the arms drafted them, so points differ in more than their nodes; "
    "+experiment=cost_of_nodes varies nodes alone."
)
PATHS = (
    "Each arm's draft tree, child ranks downwards and depth to the right, with the share of steps that accepted each "
    "node (before cuts). Hollow: never accepted. Where a tree is not fixed, only accepted nodes are drawn; of large "
    "trees the 64 nodes accepted most often."
)
CONFIDENCE = (
    "What a drafter states of its drafted tokens, its draft probability (at temperature 1 where it chose the likeliest "
    "tokens) or the prediction of its confidence head, against the exact probability that each is accepted given that "
    f"all above it are. {MEANING}"
)
STATED = {"draft": "", "greedy": ", likeliest tokens", "head": ", confidence head"}
"""How predictions of ``metrics.confidence`` are shown, behind their arm."""
NO_STEPS = "No finished group has a step after its prefill, so there is nothing to draw."

Arms = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class RunFiles:
    """The files of a run.

    Args:
        manifest, summary: their contents; the summary of a run that has not ended is empty.
        states: the entry of each arm in the summary; empty of a run that has not ended.
    """

    folder: Path
    manifest: Mapping[str, Any]
    summary: Mapping[str, Any]
    tables: Tables
    states: Arms

    @property
    def temperature(self) -> float:
        """The temperature of the requests; 0 where it is not recorded."""
        sampling = self.manifest.get("sampling") or self.manifest["config"].get("sampling") or {}
        return float(self.summary.get("temperature", sampling.get("temperature", 0.0)) or 0.0)

    @staticmethod
    def read(folder: Path) -> RunFiles:
        """Read a run.

        Raises:
            Unreadable: files that are not readable.
        """
        manifest, summary = read_run(folder, SUMMARY)
        for name in ("arms", "bounds", "output_margins", "cached_prompt_shares"):
            summary[name] = summary.get(name) or {}
        tables, recorded = metrics.load(folder), summary["arms"]
        return RunFiles(folder, manifest, summary, tables, {arm: recorded.get(arm, {}) for arm in metrics.arms(tables)})


def written(folder: Path) -> Result:
    """Return the result of a run that has just ended, with the figures that its summary holds."""
    run = RunFiles.read(folder)
    return result(run, run.summary["arms"], run.summary)


def computed(run: RunFiles) -> Result:
    """Return the result of a run of any version, in any state, with figures and verdict computed from its rows."""
    roofline = Roofline.of(run.manifest.get("roofline"))
    arms = {}
    for arm, state in run.states.items():
        decisions = {"decisions": policy_note(run.tables.steps, arm, run.manifest["proposers"].get(arm, {}))}
        arms[arm] = {**state, **finite(metrics.summarise(run.tables, arm, roofline=roofline)), **decisions}
    return result(run, arms, metrics.run_verdict(run.tables, run.manifest).summary())


def result(run: RunFiles, arms: Arms, judged: Mapping[str, Any]) -> Result:
    """Return the result of a run.

    Args:
        arms: state and figures of each arm, NaN as None.
        judged: ``verdict`` on its times and ``verdict_reasons``; older summaries lack them.
    """
    tables, bounds = run.tables, run.summary["bounds"]
    drafted = {arm: tree for arm, facts in run.manifest["proposers"].items() if (tree := _tree(facts.get("tree")))}
    depths, conditional, phases, seconds = (
        _depths(arms, "survival"), _depths(arms, "conditional"), _phases(arms, True), _phases(arms, False)
    )  # fmt: skip
    sections = [
        Section("Arms", ARMS, _arms(arms, run), notes=_notes(run, arms, judged), details=_details(run, arms)),
        Section("Speed-up", THROUGHPUT, None, {"throughput": partial(figures.throughput, tables)},
                missing="No arm was compared with a baseline in a full group of prompts, so there is no speed-up."),
        Section("Acceptance by depth", DEPTHS, None, {"acceptance": partial(figures.acceptance, tables)},
                missing="No arm drafted anything."),
        Section("Acceptance by depth: survival", SURVIVAL, depths),
        Section("Acceptance by depth: conditional", CONDITIONAL, conditional),
        *along_text(arms),
        Section("Tokens per step", TOKENS, None, {"tokens": partial(figures.tokens, tables)}, missing=NO_STEPS),
        Section("Time per token by phase", PHASE_TIME, None, {"phases": partial(figures.phases, tables)},
                missing=NO_STEPS),
        Section("Decode time by phase", "", phases),
        Section("Decode time by phase, seconds", "", seconds),
        Section("Time of the target by nodes", COST, None, {"cost": partial(figures.cost, tables)}, missing=NO_STEPS),
        Section("Accepted paths", PATHS, None, {"accepted_trees": partial(figures.accepted_trees, tables, drafted)},
                missing="No arm drafted anything that was accepted."),
    ]  # fmt: skip
    stated = {f"{arm}{STATED[by]}": facts for arm, values in arms.items()
              for by, facts in (values.get("confidence") or {}).items()}  # fmt: skip
    if stated:
        drawn = {"confidence": partial(figures.reliability, stated, "accepted")}
        table = calibrations(stated, "arm", "accepted", "acceptance")
        sections.append(Section("Calibration of the confidence", CONFIDENCE, table, drawn))
    if peers := metrics.speedups_over_peers(tables):
        rows = [
            [Cell(arm), *(cell(speedups[arm]) for speedups in peers.values())] for arm in next(iter(peers.values()))
        ]
        table = DataTable([("arm", False), *((peer, True) for peer in peers)], rows)
        sections.insert(1, Section("Speed-up over peers [95 %]", PEERS, table))
    if bounds:
        sections.append(
            Section("Bounds", NOTE, bounds_table(bounds), {"lost": partial(figures.lost, bounds)}, bounds_notes(bounds),
                    missing="No arm has bounds for its own verifier.")
        )  # fmt: skip
    return Result(
        run_title(run.manifest), _lead(run), sections, [_headline(arms) + verdict_line(judged)],
        _warnings(run),
        {"groups": str(tables.requests["group"].nunique())}, run.summary.get("constraint"),
        _key(arms, judged.get("verdict")),
    )  # fmt: skip


def _tree(text: Any) -> tuple[Ranks, ...]:
    """Return the draft tree of a manifest; empty where ``trees.parse`` cannot read it."""
    try:
        return trees.parse(text) if isinstance(text, str) and text else ()
    except ValueError:  # proposers of other packages may write their trees in another notation
        return ()


def _lead(run: RunFiles) -> str:
    config, requests, summary = run.manifest["config"], run.tables.requests, run.summary
    names = [facts.get("name") for facts in run.manifest["proposers"].values()]
    workloads = ", ".join(sorted(set(requests["workload"])))
    prompts = requests["request"].nunique()
    proposer = summary.get("proposer") or next(iter(names), "")
    parts = [
        f"proposer {proposer}" if proposer else "",
        f"verifier {summary['verifier']}" if summary.get("verifier") else "",
        f"constraint {summary['constraint']}" if summary.get("constraint", "none") != "none" else "",
        f"temperature {run.temperature:g}",
        f"batch size {config['batch_size']}" if "batch_size" in config else "",
        f"{prompts} prompt{'s' * (prompts != 1)} ({workloads})" if prompts else "",
        f"at most {config['max_new_tokens']} new tokens" if "max_new_tokens" in config else "",
    ]
    return ", ".join(part for part in parts if part)


def _warnings(run: RunFiles) -> list[str]:
    requests = run.tables.requests
    warnings, groups = [], requests["group"].nunique()
    if not run.states or not any(run.states.values()):
        of = f" of {run.manifest['groups']}" if run.manifest.get("groups") else ""
        warnings.append(
            f"This run has not ended: {groups}{of} groups of prompts are finished and shown here. Verifiers and "
            "certificates are known when it ends."
        )
    if broken := len(metrics.broken_groups(requests)):
        warnings.append(
            f"In {broken} of {groups} groups a request broke: they are left out of speeds and of the comparison of "
            "outputs; see 'errors' in summary.json."
        )
    if metrics.short_groups(requests) and requests["arm"].nunique() > 1:
        warnings.append("The last group has fewer prompts than the others: it is left out of all speeds.")
    warnings += run.summary.get("own_metrics", {}).get("failures", [])
    errors = [error for error in requests["error"].unique() if error]
    return warnings + errors[:5] + [f"and {len(errors) - 5} more errors"] * (len(errors) > 5)


def _key(arms: Arms, word: str | None) -> Section | None:
    """Return speed-up, tau, acceptance and losslessness of the arms that are compared with the baseline."""
    colour, main = figures.colours(arms), [arm for arm in arms if arm != "baseline"] or list(arms)
    rows = [
        [
            Cell(arm, colour=colour[arm]),
            *(COLUMNS[name].cell(arms[arm].get(name)) for name in KEY_FIGURES),
            lossless_cell(arms[arm]),
        ]
        for arm in main[:MAX_KEY]
    ]
    columns = [("arm", False), *((heading, True) for heading in KEY_FIGURES.values()), ("lossless", False)]
    how = [f"The first {MAX_KEY} of {len(main)} arms."] * (len(main) > MAX_KEY)
    how += [f"The times are {word}{':' * (word != 'reliable')}{' see below' * (word != 'reliable')}."] * bool(word)
    return Section("", " ".join(how), DataTable(columns, rows)) if rows else None


def _arms(arms: Arms, run: RunFiles) -> DataTable:
    """Return the table of arms; a summary of an older version may lack figures."""
    colour, rows = figures.colours(arms), []

    def known(name: str, end: str = "mean") -> bool:
        return any((values.get(name) or {}).get(end) is not None for values in arms.values())

    checked, reduced = known("correct"), known("calibration", "variance_reduction")
    names = [name for name in FIGURES if checked or not name.startswith("correct")]
    names += ["identical_outputs"] * (run.temperature == 0)
    user_names = list(dict.fromkeys(OWN + name for values in arms.values() for name in values.get("metrics") or {}))
    for arm, values in arms.items():
        facts = run.manifest["proposers"].get(arm, {})
        drawn = f" ({facts['drawn']})" if facts.get("drawn") and facts.get("name") != "none" else ""
        rows.append(
            [
                Cell(arm, colour=colour[arm]),
                Cell(f"{values.get('proposer') or facts.get('name', '')}{drawn}"),
                Cell(values.get("verifier") or ""),
                lossless_cell(values),
                *(COLUMNS[name].cell(values.get(name)) for name in names),
                *(column(name).cell((values.get("metrics") or {}).get(name.removeprefix(OWN))) for name in user_names),
                *[cell((values.get("calibration") or {}).get("variance_reduction"), ".1f")] * reduced,
            ]
        )
    columns = [(name, False) for name in ("arm", "proposer", "verifier", "losslessness")]
    columns += [(column(name).heading, True) for name in names + user_names] + [("variance reduction", True)] * reduced
    main = ["arm", *(column(name).heading for name in (*MAIN_FIGURES, *user_names))]
    more = [name for name, _ in columns if name not in main]
    return DataTable(columns, rows, more=more, meanings={**MEANINGS, "variance reduction": REDUCTION})


def _depths(arms: Arms, kind: str) -> DataTable:
    """Return rates of acceptance by depth; on a terminal, those that are conditional only where all is shown."""
    shown = {name: values[kind] for name, values in arms.items() if values.get(kind)}
    deepest = max(map(len, shown.values()), default=0)
    rows = [
        [Cell(name), *(cell(rate) for rate in [*rates, *[None] * deepest][:deepest])] for name, rates in shown.items()
    ]
    columns = [("arm", False), *((str(depth), True) for depth in range(1, deepest + 1))]
    return DataTable(columns, rows, more=[name for name, _ in columns] if kind == "conditional" else ())


def _phases(arms: Arms, share: bool) -> DataTable:
    """Return the decode time of each arm by phase: shares; or seconds, on a terminal only where all is shown."""
    timed = {name: values for name, values in arms.items() if values.get("decode_seconds")}
    rows = []
    for phase, label in PHASES.items():
        spent = [values["phase_seconds"][phase] for values in timed.values()]
        if any(spent):
            totals = [values["decode_seconds"] if share else 1 for values in timed.values()]
            parts = (part / total for part, total in zip(spent, totals, strict=True))
            rows.append([Cell(label), *(cell(part, ".1%" if share else ".2f") for part in parts)])
    columns = [("phase", False), *((name, True) for name in timed)]
    return DataTable(columns, rows, more=() if share else [name for name, _ in columns])


def _headline(arms: Arms) -> str:
    """Return the speed-up of the first arm as a sentence; nothing where there is none."""
    main, values = next(iter(arms.items()), ("", {}))
    speedup = interval(values.get("speedup"))
    return f"{main} is {speedup} times as fast as the baseline. " * bool(speedup)


def _notes(run: RunFiles, arms: Arms, judged: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know of this run, the most important first."""
    repeated = run.summary.get("repeated_groups")
    return [
        *_losslessness(arms),
        *(_identical(run, arms) if run.temperature == 0 else []),
        *baseline_notes(arms, judged),
        *kv_notes(run.summary.get("kv_dtype")),
        *(f"Policy of {name}: {values['decisions']}." for name, values in arms.items() if values.get("decisions")),
        *_cut(run.summary.get("answers")),
        *accuracy_notes(arms),
        *["One arm only, so no speed-up was measured."] * (len(arms) == 1),
        *([f"Decoded again, because they were disturbed: groups {', '.join(repeated)}."] if repeated else []),
    ]


def _details(run: RunFiles, arms: Arms) -> list[str]:
    """Return further facts: the prefill, estimates, caches, every arm's share of the roofline, and what bounds it."""
    main = next(iter(arms.values()), {})
    prefill, with_prefill = number(main.get("prefill_seconds")), interval(main.get("speedup_with_prefill"))
    more = f"; with the prefill, the speed-up is {with_prefill}" * bool(with_prefill)
    return [
        *[f"The prefill took {prefill} s{more}."] * bool(prefill),
        *_estimates(arms),
        *cache_notes(run.summary["cached_prompt_shares"]),
        *(roofline_notes(arms, limits) if (limits := run.manifest.get("roofline")) else []),
        *margin_notes(run.summary["output_margins"]),
    ]


def _cut(answers: Mapping[str, int] | None) -> list[str]:
    """Return how many answers of conversations ended at the limit; nothing where none did."""
    if not answers or not answers["cut"]:
        return []
    continued = answers["continued"]
    later = f"; later turns continue {continued} of them as they were cut" if continued else ""
    return [
        f"{answers['cut']} of {answers['answers']} answers ended at max_new_tokens={answers['limit']}{later}. Raise "
        "max_new_tokens for whole answers."
    ]


def _identical(run: RunFiles, arms: Arms) -> list[str]:
    """Return how many of the arms' outputs equal the baseline's, and why others do not; nothing where none were
    compared.
    """
    shares = {name: share for name, values in arms.items() if (share := values.get("identical_outputs")) is not None}
    if not shares:
        return []
    prompts = run.tables.requests["request"].nunique()
    lossy = {name for name in shares if arms[name].get("lossless") is False}
    different = [
        f"{name} {round(share * prompts)} of {prompts}{' (lossy verifier)' * (name in lossy)}"
        for name, share in shares.items()
        if share < 1
    ]
    if not different:
        return ["All outputs are identical to the baseline's."]
    line = f"Outputs identical to the baseline's: {', '.join(different)}"
    largest = {name: each["largest"] for name, each in run.summary["output_margins"].items() if name not in lossy}
    if not largest or None in largest.values():
        return [f"{line}."]
    quantized = "weights" in (run.manifest.get("target") or {})  # of llama.cpp
    dtype = "llama.cpp" if quantized else target_dtype(run.manifest) or "the target's data type"
    others = "the others" + f" of {', '.join(largest)}" * bool(lossy)
    line += f"; {others} first differ at tokens whose logits are within {max(largest.values()):.2g}, by rounding in "
    line += dtype
    return [f"{line}." if quantized or dtype == "float32" else line + "; target.dtype=float32 checks that."]


def _estimates(arms: Arms) -> list[str]:
    """Return how expected and untruncated tau compare."""
    lines = []
    if noise := [name for name, values in arms.items() if values.get("expected_kind") == "noise"]:
        lines.append(
            f"expected tau of {', '.join(noise)} is conditional on the noise that draft and target share: it equals "
            "untruncated tau."
        )
    calibration = {name: values["calibration"] for name, values in arms.items() if values.get("calibration")}
    reductions = [
        (name, difference["variance_reduction"])
        for name, difference in calibration.items()
        if difference["variance_reduction"]
    ]
    if reductions:
        factors = ", ".join(f"{name} {factor:.1f}" for name, factor in reductions)
        lines.append(f"Variance of untruncated tau over that of expected tau, over groups: {factors}.")
    if different := [
        f"{name} {interval(difference, '+.3f')}"
        for name, difference in calibration.items()
        if difference["low"] is not None and not difference["low"] <= 0 <= difference["high"]
    ]:
        lines.append(f"Untruncated tau differs from expected tau: {', '.join(different)}.")
    return lines


def _losslessness(arms: Arms) -> list[str]:
    """Return which arms preserve the target distribution, and which do not or are not certified."""
    states = {name: losslessness(arm) for name, arm in arms.items() if arm.get("certificate") is not None}
    lines = [f"{word}: {name}; {why}." for name, (word, why) in states.items() if word not in ("", "lossless")]
    if certified := [name for name, (word, _) in states.items() if word == "lossless"]:
        lines.append(f"Lossless, certified by enumeration: {', '.join(certified)}; +experiment=certify proves more.")
    return lines
