# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Is it lossless?
#
# Lossless means: the output has the target's distribution, whatever the drafts were. The texts of two runs cannot show
# it, because at temperature 1 they differ anyway. Here it is shown by hand for one draft, by enumeration for several
# steps, and by samples for the real models.

# %%
import os
import sys
import tempfile
from pathlib import Path

os.chdir(tempfile.mkdtemp())
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # "python" below is this one
os.environ["COLUMNS"] = "100"

# %% [markdown]
# ## A verifier returns probabilities
#
# One draft token, over a vocabulary of three. The draft model drew it from the draft probabilities `q`. `p` are the
# target probabilities: the first row before the draft token, the second row after it. A verifier returns no decision
# but its probabilities: `stop`, that the accepted path ends at each row (row 0: nothing accepted, row 1: the token),
# and `residual`, the distribution of the token that is emitted there.

# %%
import numpy as np
import torch

from spec_lab.core.draft import Draft
from spec_lab.core.shape import chain
from spec_lab.verify import Token

p = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]], dtype=torch.float64)
q = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64)


def drafted(token: int) -> Draft:
    """Return the draft of one token, drawn from q; ``q_row``: row 0 of q was used at row 0 of p."""
    return Draft(chain(1), torch.tensor([token]), "iid", q, q_row=np.array([0, -1]))


verdict = Token()(drafted(0), p)
print("stop    ", verdict.stop.round(4))
print("residual", verdict.residual(np.array([0]))[0].numpy().round(4), "after a rejection: max(p - q, 0)")

# %% [markdown]
# ## The distribution of the output
#
# The first output token is the draft token if it is accepted, else a token from the residual. Summed over all possible
# draft tokens, its distribution must be the target's. `Control` is a broken verifier: after a rejection it samples from
# `p` instead of the residual.

# %%
from spec_lab.tasks.certify.certificate import Control


def first_token(verifier) -> np.ndarray:
    """Return the distribution of the first output token."""
    distribution = np.zeros(3)
    for token in range(3):
        verdict = verifier(drafted(token), p)
        emitted = verdict.residual(np.array([0]))[0].numpy()
        distribution += float(q[0, token]) * verdict.stop[0] * emitted / max(emitted.sum(), 1e-300)  # rejected
        distribution[token] += float(q[0, token]) * verdict.stop[1]  # accepted
    return distribution


print("target ", p[0].numpy())
print("token  ", first_token(Token()).round(4))
print("control", first_token(Control()).round(4))

# %% [markdown]
# ## Enumeration
#
# The same sum can be computed for the real code. A toy target and a toy draft model over four tokens have probabilities
# that depend on the whole text. With them every draft, every acceptance and every emitted token of the real proposer,
# runner, verifier and engine is enumerated. Below are six instances of each pair: single steps with chains and trees,
# and several steps that emit three tokens. TV is the largest total variation between the output distribution and the
# target's, over the six instances.

# %%
import pandas as pd

from spec_lab.tasks.certify.certificate import prove
from spec_lab.tasks.certify.instances import QUICK
from spec_lab.verify import KSeq, Lenient, Match, Traversal

pairs = [
    ("iid", Token()),
    ("without_replacement", Token()),
    ("without_replacement", Traversal()),
    ("iid", KSeq()),
    ("deterministic", Match()),
    ("iid", Lenient(0.5)),
    ("iid", Control()),
]
proofs = [(drawn, verifier, prove(drawn, verifier, QUICK)) for drawn, verifier in pairs]
rows = [
    {"drawn": drawn, "verifier": rule.name, "declared": "lossless" if rule.lossless else "lossy"}
    | {"outcomes": sum(finding.outcomes for finding in proof.findings), "TV": f"{proof.worst.tv:.2g}"}
    for drawn, rule, proof in proofs
]
pd.DataFrame(rows)

# %% [markdown]
# A distance of 1e-16 is rounding in double precision; nothing was sampled. For a pair that fails, the proof names the
# text after which the distribution is wrong, and the error:

# %%
control = proofs[-1][-1]
print(f"{control.failure.instance}: {control.failure.wrong}")

# %% [markdown]
# ## By samples
#
# Enumeration needs toy models. Samples do not, but they show less: the empirical distribution of n samples has a
# distance of about 1/sqrt(n) from the distribution that they were drawn from. This is the noise floor (grey; a little
# too high at first, while many of the texts have not occurred). The distance of a lossless pair decreases along the
# noise floor; the distance of a biased one stays at its bias. Here: texts of four tokens from the engine in single
# precision.

# %%
from IPython.display import display

from spec_lab.analysis import figures
from spec_lab.tasks.certify.convergence import convergence
from spec_lab.tasks.certify.sampled import joint
from spec_lab.tasks.certify.significance import distance, expected_distance

# %matplotlib inline


def relative_distance(texts: np.ndarray, p: np.ndarray) -> float:
    """Return the distance of the sampled distribution from ``p``, as a multiple of the noise floor."""
    return distance(np.bincount(texts, minlength=len(p)), p) / float(expected_distance(p, len(texts)))


samples = 4000
lossless = joint("iid", Token(), samples, seed=0)
lossy = joint("iid", Lenient(0.5), samples, seed=0)
broken = joint("iid", Control(), samples, seed=0)
distances = {
    name: relative_distance(*of) for name, of in (("token", lossless), ("lenient", lossy), ("control", broken))
}
print("multiples of the noise floor:", {name: round(multiple, 2) for name, multiple in distances.items()})
curves = convergence([("token", True, lossless), ("lenient", False, lossy)], broken)
figure = figures.convergence(curves)
display(figure)

# %% [markdown]
# ## The command
#
# `+experiment=certify` does all of this for any pair that can be run, including your own: more and larger instances, a
# chi-square test of texts, and score tests of tokens of the real models, each with the smallest bias that it would have
# detected. With the few tokens here the score tests detect large biases only; the default is 2000.

# %%
import spec_lab

run = spec_lab.run(
    "+experiment=certify proposer=draft_chain proposer.drawn=deterministic verifier=token "
    "task.samples=2000 task.tokens=256 prompts.limit=8 max_new_tokens=16 threads=1 output_dir=certified"
)

# %%
import json

certificate = json.loads(Path("certified/certificate.json").read_text())
(pair,) = certificate["pairs"]
print(pair["certified"], pair["exact"]["worst_tv"], [check["name"] for check in pair["sampled"]])

# %% [markdown]
# `certified/figures/convergence.png` is the figure above. The exit code is 1 where a verifier that declares itself
# lossless is not. Every ordinary run also enumerates a few instances of its own pair: `certified` in its
# `summary.json`. How the proof works, and all pairs: `experiments/exactness`.
