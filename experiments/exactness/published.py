"""How far from the target do rules sample by which published code verifies deterministic drafts?

On toys by enumeration, and along texts of the bundled target: python -m experiments.exactness.published.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

import spec_lab
from experiments import plots
from experiments.exactness.rules import last_tokens, next_tokens, rules, rules_of_sampled_drafts
from spec_lab.core.draft import Draft
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.proposer import Proposer
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.models.target import Target
from spec_lab.propose.recycling import Recycling
from spec_lab.propose.suffix import Suffix
from spec_lab.tasks.certify.certificate import prove
from spec_lab.tasks.certify.instances import STEPS, TOYS
from spec_lab.tasks.lab import requests_of
from spec_lab.text.prompts import jsonl
from spec_lab.verify import Match, Verdict, Verifier
from spec_lab.verify.transport import spechub_acceptance, transport_bound

ZOO = Path(spec_lab.__file__).parent / "zoo"


@dataclass
class Beside(Verifier):
    """Sample and match, which is lossless, measuring on each draft how far other rules are from p.

    Args:
        others: the rules by name.
        steps: for each of them (total variation of the step's first token, chance that a path is accepted wholly times
            the total variation of the token after it), of every step that drafted something.
    """

    others: dict[str, Verifier]
    steps: dict[str, list[tuple[float, float, float]]] = field(default_factory=lambda: defaultdict(list))

    name = "match"
    accepts = Match.accepts
    accepts_mixed = True
    lossless = True

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """Verify, and measure."""
        shape, token = draft.shape, draft.token.tolist()
        if shape.nodes:
            for name, rule in self.others.items():
                verdict = rule(draft, p)
                accepted = verdict.expected_accepted(shape)
                for root in range(shape.roots):
                    rows = [row for row in range(shape.rows) if shape.root[row] == root]
                    if len(rows) > 1:
                        first = next_tokens(verdict, shape, token, root, p.shape[-1])
                        ends = [row for row in rows if not len(shape.children[row]) and verdict.stop[row] > 1e-9]
                        bonus = sum(
                            float(verdict.stop[row]) * distance(last_tokens(verdict, row), p[row]) for row in ends
                        )
                        self.steps[name].append((distance(first, p[root]), bonus, float(accepted[root])))
        return Match()(draft, p)


def distance(estimate: np.ndarray, p: Tensor) -> float:
    """Total variation."""
    return float(np.abs(estimate - p.double().numpy()).sum() / 2)


def on_toys(temperature: float) -> pd.DataFrame:
    """Largest and mean total variation of a step's outputs over the enumerated instances."""
    rows = []
    for name, rule in rules(temperature).items():
        distances = [finding.tv for finding in prove("deterministic", rule, STEPS, Sampling(temperature)).findings]
        rows.append(
            {"rule": name, "temperature": temperature, "largest": max(distances), "mean": float(np.mean(distances))}
        )
    return pd.DataFrame(rows)


def on_chains() -> pd.DataFrame:
    """Total variation and accepted tokens of rules for sampled drafts, over the enumerated chains."""
    chains, rows = [instance for instance in STEPS if instance.chain], []
    for name, rule in rules_of_sampled_drafts().items():
        findings = prove("iid", rule, chains).findings
        distances, accepted = [finding.tv for finding in findings], [finding.accepted for finding in findings]
        rows.append({
            "rule": name, "largest": max(distances), "mean": np.mean(distances), "accepted": np.mean(accepted),
        })  # fmt: skip
    return pd.DataFrame(rows)


def of_two_siblings() -> pd.DataFrame:
    """Mean acceptance of two siblings over the toys of four tokens: SpecHub, and the most that any verifier accepts."""
    toys = [toy for toy in TOYS if toy.v == 4]
    pairs = [pair for toy in toys for length in (0, 1) for pair in zip(*toy.probabilities(length), strict=True)]
    p, q = (torch.from_numpy(np.array(values)) for values in zip(*pairs, strict=True))
    every = {
        "one draft, optimal transport (1 - TV)": transport_bound(p, q, 1, "iid"),
        "two drafts, iid, optimal transport": transport_bound(p, q, 2, "iid"),
        "two drafts, without replacement, optimal transport": transport_bound(p, q, 2, "without_replacement"),
        "SpecHub, two drafts of its own": spechub_acceptance(p, q),
    }
    return pd.DataFrame([{"drafts": name, "accepted": float(np.mean(values))} for name, values in every.items()])


def on_texts(target: Target, proposer: Proposer, temperature: float, limit: int, new: int) -> pd.DataFrame:
    """Mean total variation along sampled texts."""
    verifier = Beside(rules(temperature))
    sampling = Sampling(temperature)
    prompts = [
        prompt for kind in ("code", "json", "prose") for prompt in jsonl(str(ZOO / "prompts" / f"{kind}.jsonl"), limit)
    ]
    for request in tqdm(requests_of(target, prompts, sampling, new), desc=f"{proposer.name}, T = {temperature:g}"):
        for _ in fixed_group(Arm(target, proposer, verifier, CounterDraws(0)), [request]):
            pass
    rows = []
    for name, measured in verifier.steps.items():
        first, bonus, accepted = np.array(measured).T
        rows.append({
            "rule": name, "temperature": temperature, "proposer": proposer.name, "steps": len(measured),
            "first": first.mean(), "over_5": (first > 0.05).mean(), "bonus": bonus.mean(), "accepted": accepted.mean(),
        })  # fmt: skip
    return pd.DataFrame(rows)


def table(toys: pd.DataFrame, texts: pd.DataFrame) -> str:
    """The README's table at temperature 1: the largest and mean total variation of toys, and that of each proposer."""
    proposers = list(dict.fromkeys(texts["proposer"]))
    rows = [["rule", "toys: largest, mean", *proposers]]
    for name in dict.fromkeys(toys["rule"]):
        toy = plots.row_where(toys, rule=name, temperature=1) or {}
        first = [plots.row_where(texts, rule=name, proposer=proposer, temperature=1) or {} for proposer in proposers]
        cells = (shown(row["first"]) for row in first)
        rows.append([name, f"{shown(toy['largest'])}, {shown(toy['mean'])}", *cells])
    return plots.markdown(rows)


def shown(value: float) -> str:
    """A total variation; 0 where it is that of rounding."""
    return "0" if value < 1e-5 else f"{value:.3f}"


def main() -> None:
    """Measure, print, and write the CSV files and the tables of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=8, help="prompts of each kind of text")
    parser.add_argument("--new", type=int, default=64, help="tokens emitted for each")
    parser.add_argument("--tables", action="store_true", help="of the files as they are, without measuring")
    parser.add_argument("--toys", action="store_true", help="only sampled chains and pairs of siblings, in a minute")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    chosen = parser.parse_args()
    if not chosen.tables:
        for name, frame in (("chains", on_chains()), ("siblings", of_two_siblings())):
            frame.to_csv(chosen.out / f"{name}.csv", index=False, float_format="%.6g")
    if not chosen.tables and not chosen.toys:
        measure(chosen.limit, chosen.new, chosen.out)
    toys, texts = (pd.read_csv(chosen.out / f"{name}.csv") for name in ("toys", "texts"))
    plots.fill(chosen.out / "README.md", table(toys, texts), "published")
    chains, siblings = (pd.read_csv(chosen.out / f"{name}.csv") for name in ("chains", "siblings"))
    lines = [["rule", "largest, mean total variation", "accepted tokens"]]
    lines += [
        [row["rule"], f"{shown(row['largest'])}, {shown(row['mean'])}", f"{row['accepted']:.4f}"]
        for row in chains.to_dict("records")
    ]
    plots.fill(chosen.out / "README.md", plots.markdown(lines), "chains")
    lines = [
        ["two siblings", "acceptance"],
        *([row["drafts"], f"{row['accepted']:.3f}"] for row in siblings.to_dict("records")),
    ]
    plots.fill(chosen.out / "README.md", plots.markdown(lines), "siblings")


def measure(limit: int, new: int, out: Path) -> None:
    """Measure, print, and write ``toys.csv`` and ``texts.csv``."""
    toys = pd.concat([on_toys(temperature) for temperature in (1.0, 0.5)])
    print(toys.to_string(index=False, float_format="%.2g"))
    toys.to_csv(out / "toys.csv", index=False, float_format="%.6g")
    target = Target.load(str(ZOO / "target"), dtype="float32")
    proposers = (Suffix.load(target), Recycling.load(target), Medusa.load(target, str(ZOO / "medusa"), tree="4x2"))
    with torch.inference_mode():
        texts = pd.concat(
            [
                on_texts(target, proposer, temperature, limit, new)
                for temperature in (1.0, 0.5)
                for proposer in proposers
            ]
        )
    print(texts.to_string(index=False, float_format="%.3f"))
    texts.to_csv(out / "texts.csv", index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
