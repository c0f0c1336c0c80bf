"""Colours of all figures: one for each proposer and arm, on white paper and on a dark page."""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Iterable, Sequence
from zlib import crc32

COLOURS = (
    "#1f6fb2", "#d1662a", "#2f8f57", "#8457a8", "#b03a5b", "#7a6a3c", "#3aa0a8", "#b07c00", "#5b6fd6", "#a05a2c",
    "#4f7f1f", "#c050a0",
)  # fmt: skip
GREY = "#8a8a8a"
BASELINE = "#4d4d4d"
GRID = "#e6e6e6"

PROPOSERS = {
    "medusa": COLOURS[0], "draft_chain": COLOURS[1], "draft_model": COLOURS[1], "draft_tree": COLOURS[4],
    "draft_best_first": "#cc7788", "draft_reranked": "#f0284f",
    "ngram": COLOURS[2], "ngram_chain": COLOURS[2], "ngram_tree": COLOURS[6],
    "eagle": "#500a8c", "eagle3": "#cc66ee", "hydra": "#889900", "mtp": "#00aa22", "pard": "#f0309a",
    "block": "#12306a", "suffix": "#6b4226", "sam": "#b5843c", "rest": "#9988cc", "recycling": "#557788",
    "peagle": "#7030c0", "jacobi": "#6677cc", "lookahead": "#3399dd", "pld_plus": "#887700", "union": "#d00000",
    "best_of": "#996655", "cascade": "#8a2be2", "early_exit": "#006d5b", "kangaroo": "#c04a00", "skip": "#9e5f8a",
    "sparse_kv": "#3d7f99", "triforce": "#1d5570",
}  # fmt: skip
"""Fixed colours of the bundled proposers, by the name in their records or of their config."""

PHASES = {
    "target_forward": "#1f6fb2",
    "propose_forward": "#2f8f57",
    "target_rest": "#8fb8d8",
    "propose_rest": "#97c7ab",
    "mask_wait": "#c9b458",
    "probabilities": "#d1662a",
    "verify": "#b03a5b",
    "commit": "#8457a8",
    "between": "#8a8a8a",
}
"""Colour of each phase (``metrics.PHASES``), in stacking order."""

LOSSLESS, LOSSY = "token traversal match kseq gumbel", "lenient cascade typical relaxed diversed fly synthetic"
VERIFIERS = dict(zip(f"{LOSSLESS} {LOSSY}".split(), COLOURS, strict=True))
"""Fixed colours of the bundled verifiers."""

SHADES = ("#3b3f8f", "#2f6fb0", "#1f8a94", "#2f8f57", "#85801a", "#b8701a", "#c0504a", "#a03a7a")
"""Colours of draft positions, in order."""

SEQUENCE = ("#dfe5ea", "#b9d3ea", "#8fb8dc", "#629bcb", "#3778af", "#22639c", "#114a7d", "#06315c")
"""Colours of 0, 1, 2, ... tokens; the last one stands for all larger numbers."""

LIGHT_SEQUENCE = 4
"""Number of colours of ``SEQUENCE``, from the first, on which black text is legible; on the others it is white."""

ON_DARK_SEQUENCE = ("#3a4048", "#34526e", "#2c5f8c", "#2668a0", "#5c9bd0", "#7db5e2", "#a5cdee", "#d2e6f7")
"""``SEQUENCE`` on a dark page, where black and white text change places."""

DARK_PAGE = "#1c1f24"
"""Background of figures on a dark page: ``--card`` of ``report/page.css``."""

DASHES = ("-", "--", ":", "-.")

HUES, LUMINANCES = 24, (0.09, 0.16, 0.26)
"""Number of hues and relative luminances of the colours of arms without a fixed one (WCAG 2)."""


def colour(arm: str) -> str:
    """Return the colour of an arm: the same in every figure, whatever other arms stand beside it.

    Bundled proposers have fixed colours (``PROPOSERS``), the baseline is dark grey, and any other name determines one
    of ``HUES`` x ``LUMINANCES`` colours. Two names may have the same or a similar colour; ``dashes`` tells them apart.
    """
    if arm == "baseline":
        return BASELINE
    if arm in PROPOSERS:
        return PROPOSERS[arm]
    number = crc32(arm.encode(errors="surrogatepass"))
    return _with_luminance(number % HUES / HUES, 0.62, LUMINANCES[number // HUES % len(LUMINANCES)])


def colours(arms: Iterable[str]) -> dict[str, str]:
    """Return the colour of each arm, and of the baseline."""
    return {arm: colour(arm) for arm in (*dict.fromkeys(arms), "baseline")}


def dashes(arms: Iterable[str]) -> dict[str, str]:
    """Return the line style of each arm: solid, but different among arms of one colour."""
    used = Counter[str]()
    colours = {}
    for arm in dict.fromkeys(arms):
        colours[arm] = DASHES[used[colour(arm)] % len(DASHES)]
        used[colour(arm)] += 1
    return colours


def verifier_colour(name: str) -> str:
    """Return the colour of a verifier."""
    return VERIFIERS[name] if name in VERIFIERS else colour(name)


def option_colours(categories: Sequence[str]) -> dict[str, str]:
    """Return a colour for each value of an option."""
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(categories)}


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour such as "#1f6fb2" (WCAG 2), from 0 (black) to 1 (white)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str, other: str) -> float:
    """Return the contrast ratio of two colours (WCAG 2), from 1 to 21."""
    darker, lighter = sorted((luminance(first), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def on_dark(colour: str) -> str:
    """Return a colour as it is on a dark page: the same hue, light enough for a contrast of 4.5."""
    if colour in SEQUENCE:
        return ON_DARK_SEQUENCE[SEQUENCE.index(colour)]
    least = 4.55 * (luminance(DARK_PAGE) + 0.05) - 0.05
    if luminance(colour) >= least:
        return colour
    hue, _, saturation = colorsys.rgb_to_hls(*(int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)))
    return _with_luminance(hue, min(saturation, 0.85), least)


def _with_luminance(hue: float, saturation: float, wanted: float) -> str:
    """Return the colour of a hue and saturation (HLS) whose relative luminance is at least the one that is wanted."""
    for step in range(201):
        parts = colorsys.hls_to_rgb(hue, step / 200, saturation)
        candidate = "#" + "".join(f"{round(255 * part):02x}" for part in parts)
        if luminance(candidate) >= wanted:
            break
    return candidate
