"""Figures of a certificate, from ``certificate.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from spec_lab.analysis.figures import palette, style
from spec_lab.analysis.figures.style import STYLE
from spec_lab.analysis.figures.ticks import log_axis


@rc_context(STYLE)
def convergence(curves: Mapping[str, Any]) -> Figure | None:
    """Draw the total variation between the empirical distribution and the target's against the number of samples.

    Of a lossless pair it falls as 1 / sqrt(n); of a biased one it stops at the bias. Pairs of one verifier share a
    colour; the control is a wrong verifier. None without a distance above 0, which logarithmic axes need.

    Args:
        curves: ``convergence`` of ``certificate.json``.
    """
    sizes, pairs = curves["sizes"], curves["pairs"]
    if not any([*curves["expected"], *curves["control"], *(value for pair in pairs for value in pair["distances"])]):
        return None
    names = list(dict.fromkeys(pair["verifier"] for pair in pairs))
    of_name = {name: [pair for pair in pairs if pair["verifier"] == name] for name in names}
    labels, cut = {}, style.short(names)
    for name, of_verifier in of_name.items():
        more = f", {len(of_verifier)} pairs" if len(of_verifier) > 1 else ""
        labels[name] = f"{cut[name]}{'' if of_verifier[0]['lossless'] else ' (lossy)'}{more}"
    same, control = "samples of the target's distribution: 1/sqrt(n)", "control: emits from p after a rejection"
    every = [same, *labels.values(), control]
    figure, (axes,) = style.panels(
        1, 5.0, style.legend_height(3.4, every), left=0.8, right=style.legend_width(every), top=0.4
    )
    axes.plot(sizes, curves["expected"], color="black", lw=6, alpha=0.15, label=same)
    for name, of_verifier in of_name.items():
        for number, pair in enumerate(of_verifier):
            dash = "-" if pair["lossless"] else "--"
            axes.plot(sizes, pair["distances"], lw=1.2, ls=dash, color=palette.verifier_colour(name),
                      label=labels[name] if not number else None)  # fmt: skip
    axes.plot(sizes, curves["control"], color="black", lw=2, ls=":", label=control)
    axes.set(xscale="log", yscale="log", xlabel="sampled texts of four tokens (256 are possible)")
    axes.set(ylabel="total variation from the target's distribution")
    axes.set_title("Outputs of lossless pairs converge to the target's distribution")
    log_axis(axes.xaxis)
    log_axis(axes.yaxis)
    style.legend_right(axes)
    return figure


@rc_context(STYLE)
def detectable(pairs: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Draw the smallest bias that each sampled test of each pair would have detected; None without one.

    Args:
        pairs: ``pairs`` of ``certificate.json``.
    """
    known = [(pair_name(pair), check["name"], check["detectable"]) for pair in pairs for check in pair["sampled"]
             if check["detectable"] is not None]  # fmt: skip
    tests = list(dict.fromkeys(test for _, test, _ in known))
    if not tests:
        return None
    names = style.short(dict.fromkeys(pair_name(pair) for pair in pairs), 48)
    labels = style.short(tests, 48)
    height = max(style.ROW * len(names) + 0.2, 0.18 * len(tests) + 0.3)
    figure, (axes,) = style.panels(
        1, 4.6, height, left=style.text_width(names.values()) + 0.1, right=style.legend_width(labels.values())
    )
    colour = palette.option_colours(tests)
    for test in tests:
        detected_by = {pair: detected for pair, name, detected in known if name == test}
        places = [list(names).index(name) for name in detected_by]
        axes.plot(
            [100 * share for share in detected_by.values()], places, "D", ms=5, color=colour[test], label=labels[test]
        )
    style.rows(axes, list(names.values()))
    axes.set_xlim(0, None)
    axes.set_xlabel("smallest detectable total variation, %")
    axes.set_title("Sampled tests: a larger bias would have been detected")
    style.legend_right(axes)
    return figure


def pair_name(pair: Mapping[str, Any]) -> str:
    """Return a pair in words, as ``certify`` prints it."""
    return f"{pair['proposer']} ({pair['drawn']}), {pair['verifier']}"
