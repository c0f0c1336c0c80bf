"""The verdict table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from spec_lab.tasks.certify.certificate import every
from spec_lab.tasks.certify.outputs import EXACT
from spec_lab.tasks.certify.pair import Check, Pair
from spec_lab.tasks.certify.statistics import ALPHA, POWER
from spec_lab.verify import chains_only


def show(
    pairs: Sequence[Pair],
    broken: Mapping[str, str],
    left_out: Sequence[str],
    control: Check,
    samples: int,
    masks: Mapping[str, Any] | None,
    console: Console,
) -> None:
    """Print what was found out about each pair.

    Args:
        pairs: those that were examined.
        broken: those that failed on a toy, each with the reason.
        left_out: those that do not fit, in words.
        control: the joint law's test of a broken verifier.
        samples: texts decoded for each pair.
        masks: what comparing the masks of the run's own constraint found; None where none were compared.
        console: where to.
    """
    table = Table(title="Certificates", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for name in ("proposer", "drawn", "verifier", "verdict"):
        table.add_column(name, overflow="fold")
    for name in ("TV", "p texts", "p model"):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in pairs:
        said = "masks are wrong" if masks and masks["failed"] and pair.verifier.lossless else verdict(pair)
        table.add_row(pair.proposer.name, pair.proposer.drawn, pair.verifier.name, said, *_figures(pair))
    console.print(table)
    console.print(_notes(pairs, control, samples), highlight=False)
    if masks is not None:
        console.print(_masks(masks), highlight=False, markup=False)
    if left_out:
        console.print(f"Left out, as the verifier cannot judge such drafts: {'; '.join(left_out)}.", highlight=False)
    if control.p_value >= ALPHA:
        console.print("The control was not found: so few samples show nothing. Raise task.samples.", style="bold red")
    for pair in pairs:
        if chains_only(pair.verifier):
            console.print(f"{pair.name}: of chains only, as the verifier declares.", highlight=False)
        for why in pair.proof.missing:
            console.print(f"{pair.name}: not enumerated: {why}", highlight=False)
        if pair.failed:
            console.print(f"{pair.name} FAILS: {pair.failed}", style="bold red", highlight=False)
    for name, why in broken.items():
        console.print(f"{name} FAILS: {why}", style="bold red", highlight=False, markup=False)
    if masks is not None and masks["failed"]:
        what = f"FAILS: {masks['failed']}. Where masks are wrong, no pair is lossless under this constraint."
        console.print(what, style="bold red", highlight=False, markup=False)


def _masks(masks: Mapping[str, Any]) -> str:
    """What was compared, in words."""
    prompts, refused = masks["refused_prompts"], ""
    if prompts:
        refused = f"; {prompts} prompt{'s' if prompts > 1 else ''} refused: {masks['refusal']}"
    if not masks["rows"]:
        return f"Masks: no masks were compared, as the constraint refuses every prompt{refused}."
    return (
        f"Masks: {masks['rows']} rows of random drafts under the run's own constraint and vocabulary compared with "
        f"states that saw no draft ({masks['steps']} steps, {masks['texts']} texts of up to {masks['longest']} "
        f"tokens): {masks['different'] or 'none'} differ{refused}."
    )


def _figures(pair: Pair) -> list[str]:
    texts, *scored = pair.checks
    tv = f"{pair.proof.worst.tv:.2g}" if pair.proof.worst else ""
    if tv and pair.proof.drafts == "reference":
        tv += " r"
    if pair.proof.worst is None and not pair.verifier.lossless:
        tv = f"{pair.distance:.2g} *"
    least = min((check.p_value for check in scored), default=None)
    return [tv, f"{texts.p_value:.2g}", "" if least is None else f"{least:.2g}"]


def _notes(pairs: Sequence[Pair], control: Check, samples: int) -> str:
    lines = [
        f"TV: the largest distance of the output's law from the target's over {len(every())} toy instances, "
        "enumerated in float64, trees to depth 3 (*: of sampled texts, as its noise cannot be enumerated; "
        "r: of a reference's drafts in place of the proposer's own).",
        f"p texts: chi-square of {samples} texts of four tokens through the loop in float32, with the proposer's own "
        f"tree, which would have seen a "
        f"distance of {max(pair.checks[0].detectable for pair in pairs):.1%}; of the control, a broken verifier, "
        f"{control.p_value:.1g}.",
    ]
    scored = [check for pair in pairs for check in pair.checks[1:]]
    if scored:
        each = {check.name: [one for one in scored if one.name == check.name] for check in scored}
        tests = [
            f"{name} {max(one.detectable for one in ones):.1%} ({min(one.samples for one in ones)} tokens or more)"
            for name, ones in each.items()
        ]
        lines.append(
            "p model: the smallest of the score tests on tokens of the real target against plain forwards, which would "
            f"have seen, per token, {', '.join(tests)}."
        )
    lines.append(f"Would have seen: with power {POWER:g} at level {ALPHA:g}, before Holm's correction over all tests.")
    return "\n".join(lines)


def verdict(pair: Pair) -> str:
    """In a word or two."""
    if pair.failed:
        return "FAILS"
    if pair.certified:
        return {"exact": "lossless, proved", "sampled": "lossless, sampled"}[pair.certified]
    worst = pair.proof.worst
    biased = worst.tv > EXACT if worst else pair.checks[0].p_value < ALPHA
    found = "lossy" if biased else "no bias found"
    return found if pair.proof.aimed is None else f"{found}, exact against its aim"
