"""What a certificate looks like: the table of results, and the convergence of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from spec_lab.tasks.certify.outputs import EXACT
from spec_lab.tasks.certify.pair import Check, Pair
from spec_lab.tasks.certify.significance import ALPHA, POWER, distance, expected_distance

Texts = tuple[np.ndarray, np.ndarray]
"""Numbers of sampled texts, and their exact distribution."""


def show(
    pairs: Sequence[Pair],
    broken: Mapping[str, str],
    left_out: Sequence[str],
    control: Check,
    samples: int,
    masks: Mapping[str, Any] | None,
    console: Console,
) -> None:
    """Print the results of each pair.

    Args:
        pairs: those that were examined.
        broken: those that failed on a toy, each with the reason.
        left_out: the names of those that do not fit.
        control: the test of a wrong verifier's texts.
        samples: texts decoded for each pair.
        masks: the comparison of the masks of the run's own constraint; None where none were compared.
        console: where to print.
    """
    table = Table(title="Certificates", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for name in ("proposer", "drawn", "verifier", "result"):
        table.add_column(name, overflow="fold")
    for name in ("TV", "p texts", "p model"):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in pairs:
        found = "masks are wrong" if masks and masks["failed"] and pair.verifier.lossless else pair.result
        table.add_row(pair.proposer.name, pair.proposer.drawn, pair.verifier.name, found, *_numbers(pair))
    console.print(table)
    console.print(_notes(pairs, control, samples), highlight=False)
    if masks is not None:
        console.print(_masks(masks), highlight=False, markup=False)
    if left_out:
        console.print(
            f"Left out, as the verifier does not support such drafts: {'; '.join(left_out)}.", highlight=False
        )
    if control.p_value >= ALPHA:
        console.print("The control was not detected: too few samples. Raise task.samples.", style="bold red")
    for pair in pairs:
        if pair.verifier.chains_only:
            console.print(f"{pair.name}: chains only, as the verifier declares.", highlight=False)
        for why in pair.proof.missing:
            console.print(f"{pair.name}: not enumerated: {why}", highlight=False)
        if pair.failed:
            console.print(f"{pair.name} FAILS: {pair.failed}", style="bold red", highlight=False)
    for name, why in broken.items():
        console.print(f"{name} FAILS: {why}", style="bold red", highlight=False, markup=False)
    if masks is not None and masks["failed"]:
        what = f"FAILS: {masks['failed']}. Where masks are wrong, no pair is lossless under this constraint."
        console.print(what, style="bold red", highlight=False, markup=False)


def _numbers(pair: Pair) -> list[str]:
    texts, *scored = pair.checks
    tv = f"{pair.proof.worst.tv:.2g}" if pair.proof.worst else ""
    if tv and pair.proof.drafts == "reference":
        tv += " r"
    if pair.proof.worst is None and not pair.verifier.lossless:
        tv = f"{pair.distance:.2g} *"
    least = min((check.p_value for check in scored), default=None)
    return [tv, f"{texts.p_value:.2g}", "" if least is None else f"{least:.2g}"]


def _notes(pairs: Sequence[Pair], control: Check, samples: int) -> str:
    numbers = sorted({len(pair.proof.findings) for pair in pairs if pair.proof.findings}) or [0]
    counted = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"  # chains only, fewer
    lines = [
        f"TV: enumerated, not sampled. Largest total variation between the distributions of the output and of the "
        f"target over {counted} toy instances in float64, trees to depth 3; exact up to {EXACT:g} "
        "(*: of sampled texts, as Gumbel noise cannot be enumerated; r: a reference drafts in place of the proposer).",
        f"p texts: sampled. Chi-square of {samples} texts of four toy tokens from the decode loop in float32, with the "
        f"proposer's own tree; detects a TV of {max(pair.checks[0].detectable for pair in pairs):.1%}. The control, a "
        f"wrong verifier, has p = {control.p_value:.1g}.",
    ]
    scored = [check for pair in pairs for check in pair.checks[1:]]
    if scored:
        each = {check.name: [one for one in scored if one.name == check.name] for check in scored}
        tests = [
            f"{name} {max(one.detectable for one in ones):.1%} ({min(one.samples for one in ones)} tokens or more)"
            for name, ones in each.items()
        ]
        lines.append(
            "p model: sampled. Smallest p-value of the score tests of the real target's tokens against plain forwards, "
            f"which detect a TV per token of: {', '.join(tests)}."
        )
    lines.append(f"Detects: with power {POWER:g} at level {ALPHA:g}, before Holm's correction over all tests.")
    return "\n".join(lines)


def _masks(masks: Mapping[str, Any]) -> str:
    """Describe the comparison of masks."""
    prompts, refused = masks["refused_prompts"], ""
    if prompts:
        refused = f"; {prompts} prompt{'s' if prompts > 1 else ''} refused: {masks['refusal']}"
    if not masks["rows"]:
        return f"Masks: no masks were compared, as the constraint refuses every prompt{refused}."
    return (
        f"Masks: sampled. {masks['rows']} rows of random drafts under the run's own constraint and vocabulary compared "
        f"with states that processed no draft ({masks['steps']} steps, {masks['texts']} texts of up to "
        f"{masks['longest']} tokens): {masks['different'] or 'none'} differ{refused}."
    )


# The figure ----------------------------------------------------------------------------------------------------------


def convergence(pairs: Sequence[tuple[str, bool, Texts]], control: Texts) -> dict[str, Any]:
    """Return how the distance of sampled texts from the target's distribution falls with their number.

    Args:
        pairs: for each its verifier's name, whether that is declared lossless, and the texts.
        control: texts of a wrong verifier.

    Returns:
        ``sizes``, numbers of samples; the total variation at each of them: ``expected`` of samples of the target's
        distribution, ``pairs``, and ``control``.
    """
    sizes = _sizes(len(control[0]))
    return {
        "sizes": sizes.tolist(),
        "expected": expected_distance(control[1], sizes).tolist(),
        "pairs": [
            {"verifier": name, "lossless": lossless, "distances": _distances(*texts, sizes)}
            for name, lossless, texts in pairs
        ],
        "control": _distances(*control, sizes),
    }


def _sizes(samples: int) -> np.ndarray:
    return np.unique(np.geomspace(min(100, samples), samples, 40).astype(int))


def _distances(texts: np.ndarray, expected: np.ndarray, sizes: np.ndarray) -> list[float]:
    counts, begun, found = np.zeros(len(expected), dtype=np.int64), 0, []
    for size in sizes:
        counts += np.bincount(texts[begun:size], minlength=len(expected))
        begun = size
        found.append(distance(counts, expected))
    return found
