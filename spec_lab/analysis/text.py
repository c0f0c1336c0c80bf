"""Figures as text, for the terminal and for pages: headings, formats, intervals, states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spec_lab.core.terminal import visible
from spec_lab.results.result import Cell, Value, cell, interval


@dataclass(frozen=True)
class FigureFormat:
    """How a figure is shown.

    Args:
        form: the format of its numbers.
        scale: its factor, such as 1000 to show seconds as milliseconds.
        meaning: a sentence on it, for those who see its column.
    """

    heading: str
    form: str = ".2f"
    scale: float = 1.0
    meaning: str = ""

    def cell(self, value: Value) -> Cell:
        """Return the cell of a value, or of an interval."""
        return cell(value, self.form, self.scale)

    def text(self, value: Value) -> str:
        """Return a value, or an interval, as text."""
        return self.cell(value).whole


COLUMNS = {
    "tokens_per_second": FigureFormat("tokens/s", ".1f"),
    "baseline_tokens_per_second": FigureFormat("baseline tokens/s", ".1f"),
    "speedup": FigureFormat(
        "speed-up [95 %]",
        meaning="Speed-up: total tokens per total seconds over the baseline's on the same groups of prompts, with its "
        "95 % interval over groups.",
    ),
    "speedup_with_prefill": FigureFormat("speed-up with prefill [95 %]"),
    "speedup_mean_of_groups": FigureFormat("mean of group speed-ups [95 %]"),
    "speedup_geometric_mean": FigureFormat("speed-up, geometric mean"),
    "time_to_first_token": FigureFormat("TTFT ms", ".1f", 1e3, "TTFT: mean time to the first token."),
    "time_per_output_token": FigureFormat("TPOT ms", ".2f", 1e3, "TPOT: mean time per output token."),
    "tau_pooled": FigureFormat(
        "tau", meaning="Tau: tokens per step, bonus included, those forced by a constraint left out."
    ),
    "tau_pooled_raw": FigureFormat("untruncated tau", meaning="Untruncated tau: before stop tokens and limits cut."),
    "expected_tau": FigureFormat(
        "expected tau", meaning="Expected tau: untruncated tau from the exact acceptance probabilities."
    ),
    "draft_token_rate": FigureFormat("acceptance rate", ".1%", meaning="Acceptance rate: accepted / drafted tokens."),
    "nodes_per_step": FigureFormat("nodes per step", ".1f"),
    "overhead": FigureFormat("overhead", ".1%", meaning="Overhead: share of decode time outside module calls."),
    "roofline_share": FigureFormat("roofline share [95 %]", ".1%"),
    "roofline_share_end_to_end": FigureFormat("roofline share, end to end [95 %]", ".1%"),
    "memory_bound_steps": FigureFormat("memory-bound steps", ".0%"),
    "baseline_roofline_share": FigureFormat("baseline roofline share", ".1%"),
    "repeated_8gram_share": FigureFormat(
        "repeated 8-grams", ".1%", meaning="Repeated 8-grams: share that occurred before in the same output."
    ),
    "identical_outputs": FigureFormat("identical outputs", ".1%"),
    "correct": FigureFormat("correct [95 %]", ".1%"),
    "correct_change": FigureFormat("change of correct [95 %]", "+.1%"),
    "correct_cut": FigureFormat("cut answers", ".1%"),
    "requests": FigureFormat("prompts", ".0f"),
}
"""The figures of ``metrics.summarise`` that tables show, the same in the terminal and on pages."""


OWN = "metrics."
"""Prefix of the names of own metrics (``metrics.user_metrics``), where they stand beside other figures."""


def column(name: str) -> FigureFormat:
    """Return how a figure of ``COLUMNS``, or of a metric of one's own, is shown."""
    return COLUMNS[name] if name in COLUMNS else FigureFormat(f"{name.removeprefix(OWN)} [95 %]", ".4g")


KEY_FIGURES = {"speedup": "speed-up", "tau_pooled": "tau", "draft_token_rate": "acceptance"}
"""Headings of the figures that a page shows first, short enough for a phone."""

MEANINGS = {figure.heading: figure.meaning for figure in COLUMNS.values() if figure.meaning}
"""Meanings of the columns, by heading."""


def accuracy_notes(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the share of correct answers of each arm, and its change from the baseline's, a sentence for each checker;
    nothing where no answer was checked.

    Args:
        arms: the figures of each arm; older ones may lack ``accuracy``.
    """
    accuracies = {name: arm.get("accuracy") or {} for name, arm in arms.items()}
    lines = []
    for checker in dict.fromkeys(checker for each in accuracies.values() for checker in each):
        parts = []
        for name, each in accuracies.items():
            if checker in each:
                change = interval(each[checker]["change"], "+.1%")
                cut = each[checker].get("cut") or 0.0
                part = f"{name} {interval(each[checker]['correct'], '.1%')}" + f" ({change})" * bool(change)
                parts.append(part + f", {cut:.1%} cut" * (cut > 0))
        checked = max(each[checker]["answers"] for each in accuracies.values() if checker in each)
        what = "whose code parses" if checker == "python_syntax" else "that are correct"
        lines.append(
            f"Share of {checked} answers {what}, by the checker {checker} [95 %]: {'; '.join(parts)}; in parentheses "
            "the change from the baseline's, paired."
            + " Answers that max_new_tokens cut may lack what the checker looks for."
            * any(" cut" in p for p in parts)
        )
    return lines


def margin_notes(margins: Mapping[str, Any]) -> list[str]:
    """Return by how much logits differ where greedy outputs first differ, as a sentence; nothing where none differ.

    Args:
        margins: ``output_margins`` of ``summary.json``.
    """
    each = [f"{name} {margin['median']:.2g} ({margin['largest']:.2g})" for name, margin in margins.items()]
    return [
        "Where outputs first differ from the baseline's, the target's logits of the two tokens differ by "
        f"{', '.join(each)}: median (largest)."
    ] * bool(each)


def losslessness(arm: Mapping[str, Any]) -> tuple[str, str]:
    """Return whether an arm preserves the target distribution, in a word or two, and why; nothing where unknown.

    Args:
        arm: its ``lossless``, ``invalid_text``, ``certified``, ``certificate`` and ``verifier`` in ``summary.json``, or
            its row of ``sweep.collect``; each may be missing.
    """
    lossless, certified, certificate = arm.get("lossless"), arm.get("certified"), arm.get("certificate") or {}
    verifier, refuted = arm.get("verifier_name", arm.get("verifier")), certificate.get("failure") or arm.get("refuted")
    if lossless is None or lossless != lossless:
        return "", ""
    if arm.get("invalid_text") is True:  # else NaN in a table, of other rows
        return "INVALID TEXT", (
            f"verifier '{verifier}' accepts drafted tokens whatever their probability: the text is not the model's, "
            "and only times and counts of tokens mean anything"
        )
    if not lossless:
        tv, size = certificate.get("worst_tv"), certificate.get("instances")
        worst = f"{size} toy models ({certificate.get('worst_instance')})"
        far = "" if tv is None else f": total variation up to {tv:.2g} on {worst}"
        return "lossy", f"verifier '{verifier}' does not preserve the target distribution{far}"
    if isinstance(refuted, str):
        return "NOT lossless", f"verifier '{verifier}' is declared lossless, but: {refuted}"
    if isinstance(certified, str) or certified is True:
        return "lossless", f"certified by enumeration ({certified})" if isinstance(certified, str) else "certified"
    missing = "; ".join(certificate.get("missing", ()))
    why = f"declared lossless, not enumerated ({missing}); +experiment=certify tests it by samples" if missing else ""
    return "not certified", why


BADGES = {"lossless": "good", "lossy": "warn", "NOT lossless": "bad", "INVALID TEXT": "bad", "not certified": "plain"}
"""CSS classes of the words of ``losslessness``."""


def lossless_cell(arm: Mapping[str, Any]) -> Cell:
    """Return the cell of an arm's ``losslessness``; empty where unknown."""
    word, why = losslessness(arm)
    return Cell(word, badge=BADGES.get(word, ""), title=why)


def verdict_line(summary: Mapping[str, Any]) -> str:
    """Return the verdict on the times of a result, such as "Verdict: doubtful: 4 groups, fewer than 8 ...".

    Args:
        summary: ``summary.json``, or another mapping with its ``verdict`` and ``verdict_reasons``; an older one lacks
            them.
    """
    word, reasons = summary.get("verdict"), summary.get("verdict_reasons") or ()
    if not word:
        return "Verdict: not recorded."
    why = "; ".join(visible(str(reason)) for reason in reasons)
    return f"Verdict: {word}{': ' * bool(why)}{why}."


def cache_notes(shares: Mapping[str, float | None]) -> list[str]:
    """Return a line that states how much of each arm's prompts came from the prefix cache; none without one."""
    each = [f"{name} {share:.0%}" for name, share in shares.items() if share is not None]
    return [f"Prompt tokens from the prefix cache: {', '.join(each)}."] if each else []


def kv_notes(dtype: str | None) -> list[str]:
    """Return a line that labels a KV cache in a dtype of its own, which is lossy; none where it has the model's."""
    if dtype is None:
        return []
    return [f"Keys and values in {dtype}: the target distribution of all arms is that of the model with this KV cache."]
