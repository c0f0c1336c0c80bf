"""Rounding, large vocabularies, -inf, denormals: every verifier with every way of drawing, against itself in double."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor

from spec_lab.analysis import metrics
from spec_lab.core.draft import Draft
from spec_lab.core.history import History
from spec_lab.core.probabilities import Sampling, argmax_of_finite, finite_, likeliest, logits_to_probs
from spec_lab.core.randomness import CounterDraws, Key, Purpose
from spec_lab.core.shape import Shape, chain, forest, tree
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.proposer import Proposer
from spec_lab.drafters.medusa.network import Heads
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.propose import Null
from spec_lab.propose.trees import parse
from spec_lab.results import writer
from spec_lab.results.writer import Recorder, load
from spec_lab.text.prompts import Prompt
from spec_lab.verify import (
    Cascade,
    Diversed,
    Gumbel,
    KSeq,
    Lenient,
    Match,
    Relaxed,
    Token,
    Traversal,
    Typical,
    choose,
)  # fmt: skip
from tests.distributions import twin, twin_zoo
from tests.propose.lab import PROMPTS, decode, draft_model, emitted, plain_greedy, requests
from tests.tiny import VOCABULARY, tiny_target
from tests.verify.test_twins import joint

VERIFIERS = (
    Token(), Traversal(), Match(), KSeq(), Gumbel(), Lenient(0.7), Lenient(1.0), Typical(), Relaxed(),
    Cascade(rule="chow"), Cascade(rule="diff"), Cascade(rule="opt"), Diversed(),
)  # fmt: skip
PAIRS = [(verifier, drawn) for verifier in VERIFIERS for drawn in sorted(verifier.accepts)]
EACH = pytest.mark.parametrize(("verifier", "drawn"), PAIRS, ids=[f"{v.name}-{drawn}" for v, drawn in PAIRS])
WIDTHS = pytest.mark.parametrize("width", [50, 131072])

SHAPE = forest((chain(3), tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)))))
EXPANDED = np.unique(SHAPE.parent)


# Inputs. Each function returns p [R, V] and q [E, V], float32.


def pair_of_logits(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The target's and the draft's logits; those of the same row are similar."""
    generator = torch.Generator().manual_seed(width)
    x = 3 * torch.randn(SHAPE.rows, width, generator=generator)
    y = x[EXPANDED] + 0.7 * torch.randn(len(EXPANDED), width, generator=generator)
    return x.to(dtype), y.to(dtype)


def warm(x: Tensor, temperature: float = 1.0) -> Tensor:
    return logits_to_probs(x, [Sampling(temperature)])


def single(width: int) -> tuple[Tensor, Tensor]:
    x, y = pair_of_logits(width, torch.float32)
    return warm(x), warm(y)


def half(width: int) -> tuple[Tensor, Tensor]:
    x, y = pair_of_logits(width, torch.bfloat16)
    return warm(x), warm(y)


def forbidden(width: int) -> tuple[Tensor, Tensor]:
    """-inf logits of a third of the tokens, of different ones in target and draft."""
    x, y = pair_of_logits(width, torch.bfloat16)
    x[:, ::3], y[:, 1::3] = -torch.inf, -torch.inf
    return warm(x), warm(y)


def equal(width: int) -> tuple[Tensor, Tensor]:
    p = single(width)[0]
    return p, p[EXPANDED].clone()


def close(width: int) -> tuple[Tensor, Tensor]:
    """A relative 1e-7, about one unit in the last place."""
    p = single(width)[0]
    sign = torch.randint(0, 2, (len(EXPANDED), width), generator=torch.Generator().manual_seed(0)) * 2 - 1
    q = (p[EXPANDED].double() * (1 + 1e-7 * sign)).float()
    assert (p[EXPANDED] != q).any()
    return p, q


def denormal(width: int) -> tuple[Tensor, Tensor]:
    """Half of the tokens have masses of about 1e-40, a different half in target and draft."""
    p, q = single(width)
    p[:, ::2] *= 1e-38
    q[:, ::2] *= 1e-38
    q[:, :: width // 5] = 3e-41
    p, q = (x / x.sum(-1, keepdim=True) for x in (p, q))
    assert ((p > 0) & (p < 1e-38)).any() and ((q > 0) & (q < 1e-38)).any()
    return p, q


def cold(width: int) -> tuple[Tensor, Tensor]:
    """Drafts so peaked that a second sibling is drawn from 1e-20 to 1e-45 of the mass."""
    x, y = pair_of_logits(width, torch.float32)
    q, top = logits_to_probs(y, [Sampling()]), y.topk(3).indices
    for row in range(len(q)):
        q[row, top[row, 1]], q[row, top[row, 2]] = 10.0 ** -(20.0 + 3 * row), 1e-44
    p = warm(x)
    p[EXPANDED] = 0.5 * p[EXPANDED] + 0.5 * warm(y, 2.0)
    return p, q


def one_hot_target(width: int) -> tuple[Tensor, Tensor]:
    """All of p on a token without mass under q."""
    q = single(width)[1]
    q[:, 7] = 0.0
    p = torch.zeros(SHAPE.rows, width)
    p[:, 7] = 1.0
    return p, q / q.sum(-1, keepdim=True)


def one_hot_draft(width: int) -> tuple[Tensor, Tensor]:
    p, q = single(width)
    return p, torch.zeros_like(q).scatter_(1, q.argmax(-1, keepdim=True), 1.0)


CASES = {
    case.__name__: case
    for case in (single, half, forbidden, equal, close, denormal, cold, one_hot_target, one_hot_draft)
}  # fmt: skip


@lru_cache(maxsize=8)
def drafted(case: str, width: int, drawn: str) -> tuple[Draft, Tensor]:
    """A draft drawn from q as declared, without nodes beyond the support, and p of its rows."""
    p, q = CASES[case](width)
    rng, q_row = np.random.default_rng(0), np.full(SHAPE.rows, -1)
    q_row[EXPANDED] = np.arange(len(EXPANDED))
    noise = torch.from_numpy(CounterDraws(0).race(width, [Key(0, 0, 0, Purpose.RACE, r) for r in range(len(q))]))
    token, live = np.zeros(SHAPE.nodes, dtype=np.int64), np.ones(SHAPE.rows, dtype=bool)
    for parent in EXPANDED:
        left = q[q_row[parent]].double().numpy().copy()
        race = np.where(left > 0, np.log(np.maximum(left, 1e-300)) + noise[q_row[parent]].numpy(), -np.inf)
        for child in SHAPE.children[parent]:
            node = child - SHAPE.roots
            if left.sum() == 0:
                live[child] = False
                continue
            if drawn == "deterministic":
                token[node] = left.argmax()
            elif drawn == "gumbel":
                token[node] = race.argmax()
            else:
                token[node] = rng.choice(width, p=left / left.sum())
            race[token[node]] = -np.inf
            if drawn != "iid":
                left[token[node]] = 0.0
    shape, kept = SHAPE.keep(live)
    rows = np.concatenate([np.arange(SHAPE.roots), SHAPE.roots + kept])
    if drawn == "deterministic":
        return Draft(shape, torch.from_numpy(token[kept])), p[rows]
    extra = noise if drawn == "gumbel" else None
    return Draft(shape, torch.from_numpy(token[kept]), drawn, q, q_row[rows], extra), p[rows]


def in_double(draft: Draft) -> Draft:
    q = None if draft.q is None else draft.q.double()
    return Draft(draft.shape, draft.token, draft.drawn, q, draft.q_row, draft.noise)


def sums(shape: Shape, stop: np.ndarray) -> np.ndarray:
    return np.bincount(shape.root, weights=stop, minlength=shape.roots)


def tolerance(verifier) -> float:
    """TV of one step; K-SEQ's rho has half the digits where p is nearly q."""
    return 1e-3 if isinstance(verifier, KSeq) else 2e-6


def at_every_width():
    """Every pair at both sizes of vocabulary; at the larger, the short run has one pair of each verifier."""
    for verifier, drawn in PAIRS:
        usual = "without_replacement" if "without_replacement" in verifier.accepts else min(verifier.accepts)
        for width in (50, 131072):
            marks = [pytest.mark.nightly] if width > 50 and drawn != usual else []
            yield pytest.param(verifier, drawn, width, id=f"{verifier.name}-{drawn}-{width}", marks=marks)


@pytest.mark.each_value
@pytest.mark.parametrize(("verifier", "drawn", "width"), list(at_every_width()))
@pytest.mark.parametrize("case", CASES)
def test_a_step_in_single_precision(verifier, drawn, width, case):
    draft, p = drafted(case, width, drawn)
    shape = draft.shape
    assert p.dtype == torch.float32
    assert (p.double().sum(-1) - 1).abs().max() < 1e-6
    verdict = verifier(draft, p)
    assert np.isfinite(verdict.stop).all() and (verdict.stop >= 0).all() and (verdict.stop <= 1 + 1e-6).all()
    np.testing.assert_allclose(sums(shape, verdict.stop), 1.0, rtol=0, atol=1e-6)
    residual = verdict.residual(np.arange(shape.rows))
    assert residual.isfinite().all() and (residual >= 0).all()
    assert (residual[torch.from_numpy(verdict.stop > 1e-6)].sum(-1) > 0).all()
    assert not (residual[p == 0] > 0).any(), "what p forbids is never emitted"
    held = p[torch.from_numpy(shape.parent), draft.token].numpy()
    assert (verdict.stop[shape.roots :][held == 0] == 0).all(), "nor accepted"
    for number in range(20 if width < 1000 else 2):
        row, token, _ = choose(verdict, shape, p, CounterDraws(number), [(h, 0, 0) for h in range(shape.roots)])
        assert (p[torch.from_numpy(row), torch.from_numpy(token)] > 0).all()

    double = verifier(in_double(draft), p.double())
    apart = 0.5 * np.abs(joint(draft, verdict) - joint(draft, double)).sum(-1)
    assert sums(shape, apart).max() < tolerance(verifier)


DIRECT = [
    (Token(), twin.token), (Lenient(1.0), twin.token), (Traversal(), twin.traversal), (Match(), twin.match),
    (KSeq(), twin_zoo.kseq),
]  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("verifier", "direct", "drawn"),
    [(v, direct, drawn) for v, direct in DIRECT for drawn in sorted(v.accepts - {"gumbel"})],
    ids=lambda x: getattr(x, "name", x if isinstance(x, str) else ""),
)
@pytest.mark.parametrize("case", CASES)
def test_a_step_in_single_precision_equals_the_paper_s_in_double(verifier, direct, drawn, case):
    draft, p = drafted(case, 50, drawn)
    stop, emit = direct(in_double(draft), p.double().numpy())
    apart = 0.5 * np.abs(joint(draft, verifier(draft, p)) - stop[:, None] * emit).sum(-1)
    assert sums(draft.shape, apart).max() < tolerance(verifier)


@EACH
@WIDTHS
def test_a_target_certain_of_an_undrafted_token_emits_it(verifier, drawn, width):
    draft, p = drafted("one_hot_target", width, drawn)
    roots, verdict = np.arange(draft.shape.roots), verifier(draft, p)
    if isinstance(verifier, Cascade):  # its own distribution need not be p
        return
    assert verdict.stop[roots].tolist() == [1.0, 1.0]
    token = choose(verdict, draft.shape, p, CounterDraws(0), [(h, 0, 0) for h in roots]).token
    assert token.tolist() == [7, 7]
    residual = verdict.residual(roots)
    assert (residual[:, 7] > 0).all() and (residual.sum(-1) == residual[:, 7]).all()


@pytest.mark.parametrize(("verifier", "drawn"), [(v, d) for v, d in PAIRS if v.lossless and d != "deterministic"])
@WIDTHS
@pytest.mark.parametrize("case", ["equal", "close"])
def test_a_draft_that_is_nearly_the_target_is_accepted(verifier, drawn, width, case):
    if verifier.name == "match":  # it ignores q
        return
    draft, p = drafted(case, width, drawn)
    ends = np.setdiff1d(np.arange(draft.shape.rows), EXPANDED)
    accepted = sums(draft.shape, np.where(np.isin(np.arange(draft.shape.rows), ends), verifier(draft, p).stop, 0.0))
    exactly = case == "equal" and verifier.name != "kseq"
    assert (accepted >= (1.0 if exactly else 1 - 1e-5)).all()


@pytest.mark.parametrize("verifier", [Token(), Traversal(), Lenient(1.0)], ids=lambda v: v.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rest", [1e-20, 1e-31, 1e-36, 1e-40, 1e-44])
@pytest.mark.parametrize("first", [0.0, 0.1])
def test_the_renormalized_rest_of_a_peaked_draft_is_a_distribution(verifier, dtype, rest, first):
    """Given the first, the second is certain: if rejected, it may not be emitted, however small its q was."""
    q = torch.tensor([[1.0, rest, 0.0, 0.0]], dtype=dtype)
    p = torch.tensor([[first, 0.2, 0.3, 0.5 - first]], dtype=dtype).expand(3, 4)
    draft = Draft(tree(((0,), (1,))), torch.tensor([0, 1]), "without_replacement", q, np.array([0, -1, -1]))
    verdict = verifier(draft, p)
    np.testing.assert_allclose(verdict.stop, [0.8 - first, first, 0.2], rtol=0, atol=1e-6)
    residual = verdict.residual(np.array([0]))[0].double()
    np.testing.assert_allclose(residual / residual.sum(), [0, 0, *(p[0, 2:] / p[0, 2:].sum())], rtol=0, atol=1e-6)


# Logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("row", "well"),
    [
        ([1.0, 2.0, 3.0], True),
        ([-torch.inf, 2.0, -torch.inf], True),
        ([-3e38, -3e38, -3e38], True),  # their sum overflows in single precision
        ([3e38, 3e38, 1.0], True),
        ([-torch.inf] * 3, False),
        ([torch.inf, 0.0, 0.0], False),
        ([torch.inf, -torch.inf, 0.0], False),
        ([torch.nan, 1.0, 2.0], False),
        ([-torch.inf, torch.nan, -torch.inf], False),
    ],
)
def test_minus_infinity_is_no_mass_and_other_non_finite_logits_are_errors(dtype, row, well):
    logits = torch.tensor([[0.0, 1.0, 2.0], row, [-torch.inf, 0.0, 1.0]], dtype=dtype)
    kept = logits.clone()
    greedy = argmax_of_finite(kept)[1]
    broken = finite_(logits)
    assert (greedy is None) if well else greedy.tolist() == [False, True, False]
    assert torch.equal(logits[[0, 2]], kept[[0, 2]])
    assert logits[1].tolist() == (kept[1].tolist() if well else [0.0] * 3)
    assert broken is None if well else broken.tolist() == [False, True, False]


def test_the_arg_max_of_many_logits_in_half_precision_is_that_of_each_row():
    logits = torch.randn(5, 300_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[3, 17] = torch.nan
    token, without = argmax_of_finite(logits)
    assert token[[0, 1, 2, 4]].tolist() == [int(logits[row].float().argmax()) for row in (0, 1, 2, 4)]
    assert without.tolist() == [False, False, False, True, False]
    assert argmax_of_finite(logits[:3])[1] is None


SAMPLINGS = [
    Sampling(),
    Sampling(1.0),
    Sampling(1e-3),
    Sampling(1e-30),
    Sampling(1.0, top_k=5),
    Sampling(1.0, top_k=40),
    Sampling(0.8, top_p=0.7),
    Sampling(1.0, min_p=0.2),
    Sampling(1.0, repetition_penalty=1.7),
    Sampling(0.0, repetition_penalty=0.5),
    Sampling(0.7, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("alive", [1, 20])
def test_minus_infinities_leave_the_distribution_of_the_rest(sampling, dtype, alive):
    generator = torch.Generator().manual_seed(alive)
    some = (3 * torch.randn(4, alive, generator=generator)).to(dtype)
    seen = torch.rand(4, 60, generator=generator) < 0.5
    where = torch.randperm(60, generator=generator)[:alive].sort().values
    logits = torch.full((4, 60), -torch.inf, dtype=dtype)
    logits[:, where] = some
    got, wanted = (logits_to_probs(x, [sampling], History(s)) for x, s in ((logits, seen), (some, seen[:, where])))
    torch.testing.assert_close(got[:, where], wanted, rtol=1e-5, atol=1e-7)
    assert got.isfinite().all() and (got.sum(-1) - 1).abs().max() < 1e-6
    got[:, where] = 0.0
    assert (got == 0).all()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_mask_that_allows_only_tokens_without_mass_leaves_a_dead_row(sampling):
    """None of them illegal, as the arg max of an empty row would be."""
    logits = torch.tensor([[1.0, -torch.inf, -torch.inf], [1.0, 2.0, -torch.inf]])
    mask = torch.tensor([[False, True, True], [False, True, True]])
    got = logits_to_probs(logits, [sampling], History(torch.zeros(2, 3, dtype=torch.bool)), mask=mask)
    assert got.tolist() == [[0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("width", [1, 2, 4, 6, 8])
def test_the_likeliest_are_distinct_also_among_minus_infinities(width):
    x = torch.full((2, 9), -torch.inf)
    x[0, 5], x[1, [3, 0, 8]] = 1.0, torch.tensor([1.0, 3.0, 2.0])
    tokens = likeliest(x, width).tolist()
    assert tokens[0][0] == 5 and tokens[1][:3] == [0, 8, 3][:width]
    assert all(len(set(row)) == width for row in tokens)


# The loop

BANNED = tuple(range(40, VOCABULARY))


def without_banned(module, _inputs, output):
    """The logits of a model with a padded vocabulary."""
    output = output.clone()
    output[..., list(BANNED)] = -torch.inf
    return output


def pads(target_or_lm):
    lm = getattr(target_or_lm, "lm", target_or_lm)
    lm.model.get_output_embeddings().register_forward_hook(without_banned)
    return target_or_lm


PADDED = (tuple(t % 40 for t in PROMPTS[0]), tuple(t % 40 for t in PROMPTS[1]))


def padded(name: str, target):
    """A proposer whose logits also contain -inf."""
    if name == "none":
        return Null()
    if name == "medusa":
        return Medusa(Heads.random(target, 2, trunk=False), parse("3x2"))
    tree_, drawn = name.split()
    proposer = draft_model(tree_, drawn, 1.0 if drawn in ("without_replacement", "iid") else None)
    pads(proposer.lm)
    return proposer


@pytest.mark.each_value
@pytest.mark.parametrize(
    "name", ["none", "medusa", "1x1x1 iid", "2x2 without_replacement", "3x2 deterministic", "1x1 gumbel"]
)
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(1.0), Sampling(1e-3), Sampling(1.5, top_k=50, repetition_penalty=1.5), Sampling(2.0, 0, 0.9)],
    ids=["cold", "warm", "chilly", "penalised", "truncated"],
)
def test_a_model_with_a_padded_vocabulary_decodes(name, sampling):
    target = pads(tiny_target())
    truth = [plain_greedy(target.lm.model, prompt, 12) for prompt in PADDED]
    verifier = Gumbel() if name.endswith("gumbel") else Token()
    group, infos = decode(target, padded(name, target), requests(sampling, 12, PADDED), verifier)
    assert group.errors == {} and [s.finish for s in group.sequences] == ["length"] * 2
    assert not {*BANNED} & {token for text in emitted(group) for token in text}
    assert name == "none" or any(info.draft.shape.nodes for info in infos)
    if sampling.temperature == 0:
        assert emitted(group) == truth


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf], ids=["nan", "inf", "only -inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_are_reported_with_request_and_step(poison, temperature):
    target, calls = tiny_target(), []
    healthy, _ = decode(target, Null(), requests(Sampling(temperature), 8))

    def spoil(module, _inputs, output):
        calls.append(output)
        if len(calls) != 4:
            return output
        output = output.clone()
        output[..., 1, :] = poison
        return output

    target.lm.model.get_output_embeddings().register_forward_hook(spoil)
    group, _ = decode(target, Null(), requests(Sampling(temperature), 8))
    assert [s.finish for s in group.sequences] == ["length", "nan", "length"]
    assert emitted(group) == [well if n != 1 else well[:3] for n, well in enumerate(emitted(healthy))]
    message = "request 'p1', step 3: the target's logits are NaN or infinite; it ends with the 3 tokens emitted so far"
    assert group.errors == {group.sequences[1]: message}


def test_medusa_heads_with_nan_logits_change_no_output():
    target = tiny_target()
    truth = [plain_greedy(target.lm.model, prompt, 12) for prompt in PROMPTS]
    heads = Heads.random(target, 2, trunk=False)
    heads.bias.fill_(torch.nan)
    group, _ = decode(target, Medusa(heads, parse("3x2")), requests(new=12))
    assert emitted(group) == truth and group.errors == {}


# The counter of empty residuals


@pytest.mark.each_value
@pytest.mark.parametrize(("verifier", "drawn"), PAIRS, ids=[f"{v.name}-{drawn}" for v, drawn in PAIRS])
def test_no_residual_is_empty_in_double_precision(verifier, drawn):
    target = tiny_target()
    proposer = draft_model("2x2x1", drawn, temperature=1.5)
    _, infos = decode(target, proposer, requests(Sampling(1.0), 16), verifier)
    steps = [step for step in writer.rows_of(infos, 0, "repeat")[1] if step["nodes"]]
    assert steps and not any(step["empty_residual"] for step in steps)
    drafter = draft_model("2x2x1", drawn, lm=tiny_target().lm)  # p = q: everything or almost everything is accepted
    _, infos = decode(target, drafter, requests(Sampling(1.0), 16), verifier)
    assert not any(info.empty.any() for info in infos)


class Last:
    """Draws that stop at the root whenever that has any probability."""

    def __init__(self) -> None:
        self.usual = CounterDraws(0)

    def pick(self, weights, keys):
        picked = self.usual.pick(weights, keys)
        if keys[0].purpose == Purpose.STOP:
            picked = torch.where(weights[:, 0] > 0, 0, picked)
        return picked


class Support(Proposer):
    """Drafts the whole support of p, its top ten, whose float32 sum may be below 1."""

    name, drawn, nodes = "support", "deterministic", 10

    def __init__(self, target) -> None:
        self.target = target

    def propose(self, batch):
        tokens = []
        for sequence in batch.sequences:
            logits = self.target.lm.model(torch.tensor([sequence.tokens]), use_cache=False).logits[0, -1]
            tokens += logits.topk(10).indices.tolist()
        shape = tree(tuple((rank,) for rank in range(10)))
        return Draft(forest((shape,) * len(batch.sequences)), torch.tensor(tokens))


def test_an_empty_residual_in_single_precision_is_counted_up_to_the_summary(tmp_path):
    target = tiny_target(dtype=torch.float32)
    wanted = requests(Sampling(1.0, top_k=10), 12)
    group = fixed_group(Arm(target, Support(target), Token(), Last()), wanted)
    infos = list(group)
    empty = np.array([flag for info in infos for flag in info.empty])
    assert 0 < empty.sum() < len(empty)
    assert group.errors == {} and all(len(text) == 12 for text in emitted(group))
    forwards, steps = writer.rows_of(infos, 0, "repeat")
    assert [step["empty_residual"] for step in steps] == empty.tolist()
    outcomes = writer.outcomes(group.sequences, infos, group.errors)
    asked = [
        writer.request_row(outcome, Prompt(outcome.request.name, "x"), "x", [], 0, 0, "repeat", 0)
        for outcome in outcomes
    ]
    Recorder(tmp_path).write(0, forwards, steps, asked)
    Recorder(tmp_path).gather()
    summary = metrics.summarise(load(tmp_path), "repeat")
    assert 0 < summary["empty_residuals"] <= empty.sum()
