"""Every option of every part, with invalid values and its bounds: it works and does not hang, or an error names it."""

import faulthandler
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from spec_lab.constrain import AppliedConstraint, ConstraintError, load
from spec_lab.constrain.controllers import banned, candidates, choices, pattern, template
from spec_lab.core.options import brief
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.propose.ngram import Ngram, NgramTree
from spec_lab.propose.trees import parse, width_of
from spec_lab.verify import Cascade, Lenient, Match, Relaxed, Token, Typical
from tests.constrain.parts import TOKENS, toy
from tests.propose.lab import draft_model
from tests.tiny import tiny_target

pytestmark = pytest.mark.nightly

HANGS = 120.0
"""Seconds after which one value's constructor, or the decoding of a few tokens with it, counts as hanging."""

NUMBERS = [0, 1, -1, 2, 3, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 4096, 2**20, 2**20 + 1, 2**31, 2**63, 10**30,
           10**400, 10**5000, 0.0, -0.0, 5e-324, 1e-300, 1e-45, 1e-30, 1e-6, 1e-4, 0.01, 0.5, 1.0, 100.0, 1e6, 1.1e6,
           1e30, 1e300, float("inf"), float("-inf"), float("nan")]  # fmt: skip
JUNK = [None, True, False, "", "0", "a", "nan", "\ud800", "\x00", "é" * 100, "9" * 5000, "x" * 10**6, [], [""], [[]],
        [None], ["a"], ["a", "a"], ["a"] * 300, ["a" * 10**6], ["a"] * 10**5, [1], {}, {"a": 1}, b"a", object(), (),
        ("a", "b"), [[0], [1]], [[0], [0, 0]], [[-1]], [[True]]]  # fmt: skip
TREES = ["1", "2x2", "1024", "1025", "1x" * 255 + "1", "1x" * 256 + "1", "32x31", "99999x99999", "0", "0 1",
         "0.0", "1 0", "0 0", "0x1", "x", "-1", "1.5", " 2x1 ", "²", "0 " * 2000, ".".join("0" * 300)]  # fmt: skip
PATTERNS = ["a", "a+", "(a|b)*", "(", "[", "a{1000}", "(a{30}){30}", "(a*)*", "\\", "a" * 200_000, "(" * 5000]


class Option(NamedTuple):
    """A part's constructor with one open option.

    Args:
        name: the option's name in errors, or several such names.
        make: of the option's value: the part.
        use: decodes with the part.
        values: in addition to those that every option gets.
    """

    name: str
    make: Callable[[Any], Any]
    use: Callable[[Any], None]
    values: tuple[Any, ...] = ()


def decoded(
    proposer: Any = None, verifier: Any = None, sampling: Sampling | None = None, constraint: Any = None
) -> None:
    """Decode three requests with a tiny model; none of them may end because of NaN."""
    target = tiny_target(vocab_size=len(TOKENS))
    wanted = [
        Request(
            n, f"r{n}", (n + 1, 2, 1, 2, 1), sampling or Sampling(1.0), 4, frozenset({0}) if constraint else frozenset()
        )
        for n in range(3)
    ]
    made = proposer or draft_model("2x1", vocab_size=len(TOKENS), temperature=1.0)  # trees at any temperature
    applied = None if constraint is None else AppliedConstraint(constraint)
    group = fixed_group(Arm(target, made, verifier or Token(), CounterDraws(0), applied), wanted)
    list(group)
    assert all(sequence.finish != "nan" for sequence in group.sequences)


def drafted(**options: Any) -> Any:
    """A tiny draft model of the same vocabulary."""
    return draft_model(vocab_size=len(TOKENS), **options)


def as_tree(choices: Any) -> None:
    """Decode with a tree, unless it is wider than the vocabulary or deeper than the model's context."""
    if width_of(choices) <= len(TOKENS) and len(choices) <= 128:
        decoded(drafted(tree=choices, drawn="deterministic"), Match())


SAMPLING = [
    Option(
        f"sampling.{name}",
        lambda value, n=name: Sampling(**{"temperature": 1.0, n: value}),
        lambda s: decoded(sampling=s),
    )
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
]
NGRAMS = [
    Option(
        f"proposer.{name}",
        lambda value, n=name, of=of: of.load(None, **{"depth": 3, n: value}),
        lambda made: decoded(made),
    )
    for of, names in (
        (Ngram, ("depth", "max_ngram", "min_ngram")),
        (NgramTree, ("nodes", "depth", "max_ngram", "min_ngram")),
    )
    for name in names
]
VERIFIERS = [
    Option(f"verifier.{name}", make, lambda made: decoded(verifier=made, proposer=drafted(tree="1x1")))
    for name, make in (
        ("lenience", Lenient),
        ("top", lambda value: Relaxed(value, 0.5)),
        ("delta", lambda value: Relaxed(2, value)),
        ("epsilon", lambda value: Typical(value, 0.5)),
        ("delta", lambda value: Typical(0.5, value)),
        ("alpha", lambda value: Cascade(value)),
        ("rule", lambda value: Cascade(0.1, value)),
    )
]
CONTROLLERS = [
    Option(f"constraint.{name}", make, lambda made: decoded(constraint=made), values)
    for name, make, values in (
        ("count", lambda value: candidates.load(toy(), value), ()),
        ("by", lambda value: candidates.load(toy(), 2, value), ("sum", "mean")),
        ("strings", lambda value: banned.load(toy(), value), (["ab"] * 3, ["a" * 5000], ["b"] * 257)),
        ("choices", lambda value: choices.load(toy(), value), (["ab", "ac"], ["a" * 3000])),
        ("choice", lambda value: load.choice(toy(), value), (["ab", "ac"], ["a" * 3000])),
        ("pattern|regex", lambda value: pattern.load(toy(), value), tuple(PATTERNS)),
        (
            "parts",
            lambda value: template.load(toy(), value),
            (["a", {"max_tokens": 2}], [{"max_tokens": 2, "stop": "b"}] * 3),
        ),
        ("lines", lambda value: load.json_schema(toy(), {"type": "integer"}, lines=value), ()),
    )
]
LARGEST = [
    Option(
        "constraint.parts",
        lambda value: template.load(toy(), [{"max_tokens": value}]),
        lambda made: decoded(constraint=made),
    ),
    Option("constraint.parts", lambda value: template.load(toy(), [{"max_tokens": 1, "stop": value}]), lambda _: None),
]
TREE = [Option("proposer.tree", parse, as_tree, tuple(TREES))]
OPTIONS = [*SAMPLING, *NGRAMS, *VERIFIERS, *CONTROLLERS, *LARGEST, *TREE]


@contextmanager
def watched() -> Iterator[None]:
    """End the process, with a traceback, where the block hangs."""
    faulthandler.dump_traceback_later(HANGS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def mixed(rng: random.Random) -> Any:
    """A random value: a number of any size, random text, or a list of either."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randrange(-(2 ** rng.randrange(1, 200)), 2 ** rng.randrange(1, 200))
    if kind == 1:
        return rng.choice([-1, 1]) * 10.0 ** rng.uniform(-320, 308)
    if kind == 2:
        return "".join(chr(rng.choice([rng.randrange(128), rng.randrange(0x300)])) for _ in range(rng.randrange(30)))
    if kind == 3:
        return "".join(rng.choice("0123456789x. ab(){}[]|*+?^$\\,-") for _ in range(rng.randrange(20)))
    return [mixed(rng) for _ in range(rng.randrange(4))]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_an_option_works_or_is_refused_by_name(option):
    rng, names = random.Random(option.name), option.name.split(".")[-1].split("|")
    for value in [*NUMBERS, *JUNK, *option.values, *(mixed(rng) for _ in range(40))]:
        with watched():
            refused = None
            try:
                made = option.make(value)
            except ValueError as error:
                refused = str(error)
            except Exception as error:
                raise AssertionError(f"{option.name}={brief(value)}: {type(error).__name__}: {error}") from error
            if refused is not None:
                assert any(name in refused for name in names), f"{brief(value)}: {refused[:300]}"
                assert len(refused) < 1000, brief(value)
                continue
            try:
                option.use(made)
            except (ValueError, ConstraintError) as error:
                raise AssertionError(f"{option.name}={brief(value)} was taken, then: {error}") from error
