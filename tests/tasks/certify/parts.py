"""Verifiers and proposers that are not what they declare, and correct ones that are not shipped."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from spec_lab.cli.main import conf
from spec_lab.core.draft import Draft
from spec_lab.core.randomness import Key, Purpose
from spec_lab.core.shape import chain, forest
from spec_lab.decode.proposer import Proposer
from spec_lab.verify import Lenient, Token, Verdict, Verifier

VERIFIERS = {file.stem: instantiate(OmegaConf.load(file)) for file in sorted(Path(conf(), "verifier").glob("*.yaml"))}
"""Every shipped verifier."""

LOSSLESS = [
    (verifier, drawn) for verifier in VERIFIERS.values() if verifier.lossless for drawn in sorted(verifier.accepts)
]
"""Every shipped lossless verifier with every way of drawing it accepts."""


class Verifies(Verifier):
    """Token verification under another name."""

    name = "mine"
    accepts = Token.accepts
    lossless = True

    def __call__(self, draft, p):
        return Token()(draft, p)


class Claims(Verifies):
    """Lenience 0.9, declared lossless."""

    def __call__(self, draft, p):
        return Lenient(0.9)(draft, p)


class Forgets(Verifies):
    """Has an empty residual at the leaves."""

    def __call__(self, draft, p):
        verdict, leaf = Token()(draft, p), np.array([not len(children) for children in draft.shape.children])
        return Verdict(
            verdict.stop, lambda rows: verdict.residual(rows).masked_fill(torch.from_numpy(leaf[rows, None]), 0)
        )


class Uniform(Proposer):
    """Drafts one token from the uniform distribution, for any target."""

    name = "uniform"
    drawn = "iid"
    nodes = 1
    purpose = Purpose.DRAFT

    def propose(self, batch):
        count, v = len(batch.sequences), batch.target.vocabulary
        keys = [Key(*live.key, self.purpose) for live in batch.sequences]
        token = batch.draws.pick(torch.ones(count, v), keys)
        shape = forest((chain(1),) * count)
        return Draft(shape, token, self.drawn, *self.stated(count, v))

    def stated(self, count, v):
        q_row = np.append(np.arange(count), np.full(count, -1))
        return torch.full((count, v), 1 / v, dtype=torch.float64), q_row


class Misstates(Uniform):
    """States three times the probability for token 0."""

    name = "misstates"

    def stated(self, count, v):
        q, q_row = super().stated(count, v)
        q[:, 0] *= 3
        return q / q.sum(-1, keepdim=True), q_row


class Hotter:
    """A draft model that states the distribution of half its temperature."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def toy(self, target, draft, tree):
        return Hotter(self.inner.toy(target, draft, tree))

    def propose(self, batch):
        draft = self.inner.propose(batch)
        q = draft.q.square()
        return replace(draft, q=q / q.sum(-1, keepdim=True))
