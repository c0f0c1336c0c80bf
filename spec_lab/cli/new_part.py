"""``spec-lab new KIND NAME``: a package with a part of one's own, its config, and a test that passes."""

from __future__ import annotations

import argparse
import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import NamedTuple

from rich.console import Console

from spec_lab.analysis.console import say
from spec_lab.cli.bundled import choices

NAME = re.compile(r"[a-z][a-z0-9_]{0,49}")

PROJECT = Template("""[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "$name"
version = "0.1.0"
description = "A $kind for spec_lab"
requires-python = ">=3.11"
dependencies = ["spec-lab"]

[project.entry-points."spec_lab.conf"]  # where spec_lab finds the config, once the package is installed
$name = "$name.conf"

[tool.hatch.build.targets.wheel]
packages = ["$name"]

[tool.pytest.ini_options]
pythonpath = ["."]
""")


class Kind(NamedTuple):
    """A kind of part that can be begun.

    Args:
        group: of its config.
        source: its module.
        config: below ``_target_``.
        test: a test that passes.
        target: what the config names in the module.
        head: first line of the config.
    """

    group: str
    source: str
    config: str
    test: str
    target: str = "$title"
    head: str = ""


PROPOSER = Kind(
    "proposer",
    '''"""The proposer ``$name``."""

from typing import Annotated

import torch

from spec_lab.core.draft import Draft
from spec_lab.core.options import Whole
from spec_lab.core.shape import chain, forest
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.propose import Proposer


class $title(Proposer):
    """Drafts the last token again, ``depth`` times.

    Args:
        target: that it drafts for.
        depth: most tokens drafted in a step.
    """

    name = "$name"
    drawn = "deterministic"  # as a function of the text; sampled drafts carry their distributions q
    branches = False  # it drafts chains

    def __init__(self, target: Target, depth: Annotated[int, Whole(1, 256)] = 2) -> None:
        self.nodes = depth

    def propose(self, batch: Batch) -> Draft:
        """Return a chain for each sequence, no deeper than context and policy allow."""
        depths = [min(self.nodes, room) for room in batch.room()]
        tokens = [
            token
            for sequence, depth in zip(batch.sequences, depths, strict=True)
            for token in sequence.tokens[-1:] * depth
        ]
        shape = forest(tuple(chain(depth) for depth in depths))
        return Draft(shape, torch.tensor(tokens, dtype=torch.long, device=batch.device))
''',
    "depth: 2                   # most tokens drafted in a step\n",
    '''"""Outputs with the drafts of ``$name`` follow the target: every outcome on toy models is enumerated."""

from $name.part import $title
from spec_lab.testing import assert_lossless


def test_outputs_follow_the_target() -> None:
    assert_lossless(proposer=$title)
''',
)

VERIFIER = Kind(
    "verifier",
    '''"""The verifier ``$name``."""

import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.verify import Verdict, Verifier


class $title(Verifier):
    """Draws each token from the target, and follows the draft while it holds the drawn token."""

    name = "$name"
    accepts = frozenset({"iid", "without_replacement", "deterministic"})  # the ways of drawing for which it is correct
    lossless = True

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """Return where the accepted path ends, and what is emitted there, for target probabilities ``p`` ``[R, V]``."""
        shape, left = draft.shape, p.clone()  # [R, V] each row's p without the tokens of its children
        reach = torch.ones_like(p[:, 0])  # [R] the probability that the path reaches a row; it starts at the roots
        edges = zip(shape.parent.tolist(), draft.token.tolist(), strict=True)
        for row, (parent, token) in enumerate(edges, start=shape.roots):  # parents come before their children
            reach[row] = reach[parent] * left[parent, token]
            left[parent, token] = 0.0
        stop = reach * left.sum(-1)
        return Verdict(stop.double().cpu().numpy(), lambda rows: left[torch.from_numpy(rows).to(p.device)])
''',
    "",
    '''"""``$name`` keeps the target's distribution: every outcome on toy models is enumerated."""

from $name.part import $title
from spec_lab.testing import assert_lossless


def test_outputs_follow_the_target() -> None:
    assert_lossless($title())
''',
)

CONSTRAINT = Kind(
    "constraint",
    '''"""The constraint ``$name``."""

from dataclasses import dataclass

import numpy as np

from spec_lab.constrain.protocol import Constraint, ConstraintState, full_mask, mask_of
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.request import Request


@dataclass
class After(ConstraintState):
    """The state after a token.

    Args:
        token: it.
        words: ``[W]`` the mask that allows every token.
        vocabulary: V.
    """

    token: int
    words: np.ndarray
    vocabulary: int

    def fork(self) -> "After":
        """Return an independent copy: drafts are tried on copies."""
        return After(self.token, self.words, self.vocabulary)

    def advance(self, token: int) -> None:
        """Append a token."""
        self.token = token

    def mask(self) -> np.ndarray:
        """Return the tokens that may come next, as packed bits ``[W]``."""
        return self.words & ~mask_of([self.token], self.vocabulary)


class $title(Constraint):
    """No token comes twice in a row.

    Args:
        vocabulary: the target's.
    """

    name = "$name"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary.size

    def start(self, request: Request) -> After:
        """Return the state at the end of a prompt."""
        return After(request.tokens[-1], full_mask(self.vocabulary), self.vocabulary)

    def toy(self, vocabulary: Vocabulary) -> "$title":
        """Return the same constraint over the few tokens of a toy model."""
        return $title(vocabulary)
''',
    "",
    '''"""Outputs under ``$name`` have the masked distribution: every outcome on toy models is enumerated."""

from $name.part import $title
from spec_lab.testing import assert_lossless


def test_outputs_have_the_masked_distribution() -> None:
    assert_lossless(constraint=$title)
''',
)

POLICY = Kind(
    "policy",
    '''"""The policy ``$name``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from spec_lab.core.limit import Limit
from spec_lab.core.options import Whole
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.policy.policy import DraftOutcome, Policy


@dataclass
class Depth:
    """The depth of a sequence's next draft."""

    value: int


class $title(Policy):
    """One level more after a draft that was wholly accepted, half as many after another.

    Args:
        target, proposer: what it decides for.
        start: levels of the first draft.
    """

    name = "$name"

    def __init__(self, target: Target, proposer: Proposer, start: Annotated[int, Whole(1, 64)] = 4) -> None:
        self.start = start

    def init(self, request: Request) -> Depth:
        """Return the state of a new sequence."""
        return Depth(self.start)

    def decide(self, batch: Batch, states: Sequence[Depth]) -> list[Limit]:
        """Return a limit for each sequence."""
        return [Limit(state.value) for state in states]

    def learn(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Change the depths by what came of the last drafts."""
        for outcome in outcomes:
            if outcome.drafted:
                whole = outcome.accepted >= outcome.drafted
                outcome.state.value = outcome.state.value + 1 if whole else max(1, outcome.state.value // 2)

    def toy(self) -> "$title":
        """Return the same policy with a depth that cuts some drafts of toys, whose trees have one to three levels."""
        return $title(None, None, start=1)
''',
    "start: 4                   # levels of the first draft\n",
    '''"""``$name`` decides from the past, and outputs follow the target whatever it decides."""

from types import SimpleNamespace

from $name.part import Depth, $title
from spec_lab.policy.policy import DraftOutcome


def outcome(state: Depth, accepted: int) -> DraftOutcome:
    return DraftOutcome(state, limit=None, drafted=3, nodes=3, accepted=accepted, live=1)


def test_the_depth_rises_by_one_and_is_halved() -> None:
    policy = $title(target=None, proposer=None, start=4)
    state = policy.init(SimpleNamespace())
    policy.learn([outcome(state, accepted=3)])
    assert [limit.depth for limit in policy.decide(None, [state])] == [5]
    policy.learn([outcome(state, accepted=1)])
    assert [limit.depth for limit in policy.decide(None, [state])] == [2]
''',
)

METRIC = Kind(
    "metrics",
    '''"""The metric ``$name``."""

import pandas as pd

from spec_lab.analysis.metrics import Tables


def $name(tables: Tables, arm: str, shortest: int = 1) -> dict[str, pd.Series]:
    """Return the characters of an output's token, of each request.

    Args:
        tables: the run's rows.
        arm: key of the arm.
        shortest: tokens of an output; shorter ones have no value.
    """
    rows = tables.requests[tables.requests["arm"] == arm].set_index("request")
    tokens = rows["tokens"].map(len)
    return {"$name": (rows["text"].str.len() / tokens)[tokens >= shortest]}
''',
    "shortest: 1                # tokens of an output; shorter ones have no value\n",
    '''"""``$name`` by hand."""

import pandas as pd

from $name.part import $name
from spec_lab.analysis.metrics import Tables


def test_characters_are_counted_by_request() -> None:
    requests = pd.DataFrame(
        {"arm": ["a", "a", "b"], "request": [0, 1, 0], "text": ["abcd", "", "abc"], "tokens": [[1, 2], [], [1]]}
    )
    (values,) = $name(Tables(pd.DataFrame(), pd.DataFrame(), requests), "a").values()
    assert values.to_dict() == {0: 2.0}
''',
    "$name",
    "# @package metrics.$name\n",
)

KINDS = {"proposer": PROPOSER, "verifier": VERIFIER, "constraint": CONSTRAINT, "policy": POLICY, "metric": METRIC}
"""Each kind by its name on the command line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("kind", choices=tuple(KINDS), help="what to write")
    parser.add_argument("name", metavar="NAME", help="of the part and of its package, such as my_drafter")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder to make (NAME, in the working directory)")


def run(given: argparse.Namespace, console: Console) -> int:
    """Write a package with a part of your own: a proposer, verifier, ..., its config and a test that passes."""
    folder = given.out or Path(given.name)
    for file in write(given.kind, given.name, folder):
        say(console, str(file), wrap=False)
    test, chosen = f"cd {folder} && python -m pytest", f"{KINDS[given.kind].group}={given.name}"
    say(console, f"Test it: {test}. Install it: pip install -e {folder}. Run it: spec-lab {chosen}", wrap=False)
    return 0


def write(kind: str, name: str, folder: Path) -> list[Path]:
    """Write a package into a new folder; return its files.

    Args:
        kind: of ``KINDS``.
        name: of the part and the package.
        folder: must not exist, in a folder that does.

    Raises:
        ValueError: a name that is not possible, or that something else has.
        OSError: the folder exists, or cannot be written.
    """
    part = KINDS[kind]
    check_name(kind, name)
    if folder.exists():
        raise FileExistsError(f"{folder} exists: choose another name, or another folder with --out DIR")
    values = {"name": name, "kind": kind, "title": "".join(word.capitalize() for word in name.split("_"))}
    meaning = f"# Describe it here: spec-lab explain {part.group}={name} prints this line.\n"
    config = f"{part.head}{meaning}_target_: $name.part.{part.target}\n{part.config}"
    texts = {
        "pyproject.toml": PROJECT.substitute(values),
        f"{name}/__init__.py": "",
        f"{name}/part.py": Template(part.source).substitute(values),
        f"{name}/conf/{part.group}/{name}.yaml": Template(config).substitute(values),
        f"tests/test_{name}.py": Template(part.test).substitute(values),
    }
    folder.mkdir()
    for file, text in texts.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    return [folder / file for file in texts]


def check_name(kind: str, name: str) -> None:
    """Refuse a name that is no name of a package, or that a module or a config has.

    Raises:
        ValueError: says why.
    """
    if not NAME.fullmatch(name) or keyword.iskeyword(name) or name.endswith("_"):
        raise ValueError(
            f"{name!r} cannot be the name of a package: write lower-case letters, digits and underscores, a letter "
            "first, at most 50, such as my_drafter"
        )
    if name in choices(KINDS[kind].group):
        raise ValueError(f"{KINDS[kind].group}={name} exists: choose another name")
    if find_spec(name) is not None:
        raise ValueError(f"there is a module {name} already, which the package would hide: choose another name")
