"""The verdict table."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from spec_lab.certify.exact import LOOPS, STEPS
from spec_lab.certify.outputs import EXACT
from spec_lab.certify.pair import Check, Pair
from spec_lab.certify.statistics import ALPHA, POWER


def show(pairs: Sequence[Pair], control: Check, samples: int, tokens: int, console: Console) -> None:
    """Print what was found out about each pair.

    Args:
        pairs: all of them.
        control: the joint law's test of a broken verifier.
        samples: texts decoded for each pair.
        tokens: tokens decoded with the real target for each lossless pair.
        console: where to.
    """
    table = Table(title="Certificates", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("pair", overflow="fold")
    table.add_column("verdict", overflow="fold")
    for name in ("exact TV", "outcomes", "sampled p", "seen", "real p", "seen"):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in pairs:
        table.add_row(pair.name, verdict(pair), *_figures(pair))
    console.print(table)
    console.print(
        f"exact TV: the largest total variation over {len(STEPS + LOOPS)} enumerated toy instances, in float64. "
        f"sampled p: {samples} texts of four tokens through the loop in float32, chi-square. real p: {tokens} tokens "
        "of the real target against plain forwards, the smallest p of the score tests. seen: the smallest total variation "
        f"that would have been rejected with power {POWER:g} at level {ALPHA:g}, Holm's correction over all tests of "
        f"the run left out. The control, a broken verifier, has p = {control.p_value:.1g}.",
        highlight=False,
    )
    for pair in pairs:
        for why in pair.proof.missing:
            console.print(f"{pair.name}: not enumerated: {why}", highlight=False)
        if pair.failed:
            console.print(f"{pair.name} FAILS: {pair.failed}", style="bold red", highlight=False)


def _figures(pair: Pair) -> list[str]:
    histogram, *scored = pair.checks
    worst, least = pair.proof.worst, min(scored, key=lambda check: check.p_value, default=None)
    return [
        f"{worst.tv:.1e}" if worst else "",
        str(sum(one.outcomes for one in pair.proof.findings) or ""),
        f"{histogram.p_value:.2g}",
        f"{histogram.detectable:.1%}",
        f"{least.p_value:.2g}" if least else "",
        f"{max(check.detectable for check in scored):.1%}" if scored else "",
    ]


def verdict(pair: Pair) -> str:
    """In a word or two."""
    if pair.failed:
        return "FAILS"
    if pair.certified:
        return {"exact": "lossless, proved", "sampled": "lossless, sampled"}[pair.certified]
    if pair.proof.worst is None:
        return "unknown"
    found = "lossy" if pair.proof.worst.tv > EXACT else "no bias found"
    return found if pair.proof.aimed is None else f"{found}, exact against its aim"
