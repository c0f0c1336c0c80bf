"""The card of a trained drafter: ``README.md`` in its folder, as model hubs show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from spec_lab.analysis.markdown import document
from spec_lab.analysis.results import training
from spec_lab.core.terminal import short_path
from spec_lab.results.result import ended_run

FRONT = "---\ntags:\n- speculative-decoding\n---\n\n"
"""Metadata that model hubs read."""


def card(folder: Path, overrides: Sequence[str]) -> str:
    """Return the card: tau, acceptance by draft position, the command, target, data, hashes and the machine.

    Args:
        folder: of the training, which has ended.
        overrides: the options of its command line.

    Raises:
        ValueError: the training has not ended.
        Unreadable: files that are not those of a training.
    """
    from spec_lab.analysis.report.facts import facts

    manifest, summary = ended_run(folder, training.SUMMARY)
    target = short_path((manifest["config"].get("target") or {}).get("path")) or summary.get("target", "")
    result = training.result(folder)
    shown = replace(
        result,
        title=f"{summary['drafter']} drafter for {target}",
        lead=f"Tau {1 + summary['measured_length']:.2f}: tokens per step, bonus included, of a chain of "
        f"{len(summary['accepted'])} on held-out prompts at temperature {summary['temperature']:g}, measured by "
        f"decoding. {summary['parameters'] / 1e6:.2f} M parameters. Trained and measured with spec_lab.",
        sections=result.sections[:1],
    )
    more = {
        "answers learned from": summary["texts"],
        "training steps": summary["steps"],
        "target, SHA-256": (manifest.get("weights_sha256") or {}).get("target"),
        "weights of this drafter, SHA-256": summary["sha256"],
        **{name: value for name, value in result.facts.items() if name != "texts"},
    }
    return FRONT + document(shown, facts(manifest, **more), overrides)
