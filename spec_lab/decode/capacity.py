"""Whether a target returns what a proposer requires, and how many rows, cells and sequences their forwards have."""

from __future__ import annotations

from spec_lab.decode.proposer import Proposer
from spec_lab.models.target import Target
from spec_lab.runners.runner import ABILITIES


def check_requires(proposer: Proposer, target: Target) -> None:
    """Refuse a proposer that requires what the target does not return.

    Raises:
        ValueError: names the proposer and what is missing.
    """
    has_abilities = target.lm.capabilities.abilities
    for name in sorted(proposer.requires.abilities - has_abilities):
        raise ValueError(
            f"proposer '{proposer.name}' requires {name} of the target ({ABILITIES[name]}), whose runner has "
            f"{', '.join(sorted(has_abilities)) or 'no such ability'}. Choose another proposer, or another target."
        )
    if not 0 <= proposer.requires.top_k <= target.vocabulary:
        raise ValueError(
            f"proposer '{proposer.name}' requires the top_k={proposer.requires.top_k} likeliest tokens of each row, "
            f"but the target has {target.vocabulary} tokens: require between 0 and {target.vocabulary} of them."
        )
    last = target.lm.capabilities.hidden_layers
    for layer in proposer.requires.hidden:
        if not last or not -last - 1 <= layer <= last:
            has = f"hidden states 0 to {last}, and -1 after the final norm" if last else "no hidden states"
            raise ValueError(
                f"proposer '{proposer.name}' requires hidden state {layer} of the target, whose runner returns {has}. "
                "Choose another proposer, or another target."
            )
    most = target.lm.capabilities.rollback
    if most is not None and proposer.branches:
        raise ValueError(
            f"proposer '{proposer.name}' drafts trees, but the target has recurrent layers, whose runner can take back "
            "rejected tokens of a chain only. Choose a proposer that drafts chains."
        )
    if most is not None and proposer.nodes > most:
        raise ValueError(
            f"proposer '{proposer.name}' drafts up to {proposer.nodes} tokens, but the target's runner can take back "
            f"{most}: set proposer.depth to at most {most}, or target.snapshots to {proposer.nodes}."
        )


def max_at_once(proposer: Proposer, target: Target) -> int | None:
    """Return the maximum number of sequences in a forward with draft trees of the proposer's size; None: no limit."""
    has = target.lm.capabilities
    if has.leaves is None or proposer.branches is False:
        return has.sequences
    fit = max(1, has.leaves // max(1, proposer.nodes))
    return fit if has.sequences is None else min(fit, has.sequences)


def max_rows(proposer: Proposer, forces: bool) -> int:
    """Return the maximum number of rows that a proposer adds to a forward for one sequence.

    Args:
        forces: whether a constraint that applies to the draft fast-forwards forced tokens.
    """
    return proposer.nodes + (proposer.forced_nodes if forces else 0)


def max_cells(proposer: Proposer, forces: bool) -> int:
    """Return the maximum number of the target's KV cells that one draft tree uses. Arguments as in ``max_rows``."""
    return max(proposer.target_cells, max_rows(proposer, forces))
