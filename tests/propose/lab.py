"""Shared by tests of decoding and proposing: decoding with tiny models, and recording draws."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from spec_lab.core.history import History
from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.readback import Readback
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.proposer import Observation
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.drafters.cascade import DraftCascade
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.models.target import Target
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.verify import Token
from tests.tiny import CONTEXT, tiny_model

PROMPTS = ((3, 14, 15, 9, 26, 5), (2, 7, 18), (31, 41, 5, 9, 2, 6, 5, 35, 8))
WARM = Sampling(1.0)
COLD = Sampling()


def bare_batch(keys, vocabulary, draws=None, masks=None, recorded=False):
    """Return the batch that a grower reads, for a drafter that is a table: sequences of one token with these keys."""
    prompt = SimpleNamespace(tokens=[1])
    return SimpleNamespace(
        target=SimpleNamespace(vocabulary=vocabulary), device=torch.device("cpu"), read=Readback(), draws=draws,
        draft_masks=masks, sequences=[SimpleNamespace(tokens=[1], request=prompt, key=key) for key in keys],
        measure=None, recorded=recorded,
    )  # fmt: skip


def requests(sampling=COLD, new=20, prompts=PROMPTS, stop=frozenset()):
    return [Request(i, f"p{i}", tuple(prompt), sampling, new, stop) for i, prompt in enumerate(prompts)]


def decode(target, proposer, wanted, verifier=None, seed=0):
    """The engine after decoding, and its steps."""
    group = fixed_group(Arm(target, proposer, verifier or Token(), CounterDraws(seed)), wanted)
    steps = list(group)
    return group, steps


def emitted(group):
    return [s.emitted for s in sorted(group.sequences, key=lambda s: s.request.id)]


def plain_greedy(model, prompt, count):
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def plain_logits(model, tokens):
    """Logits after ``tokens``, by a forward without a KV cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def plain_probabilities(model, tokens, sampling):
    """The probabilities after ``tokens``, all of which are in a repetition penalty's history."""
    logits = plain_logits(model, tokens)[None]
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    seen[0, tokens] = True
    return logits_to_probs(logits, [sampling], History(seen))[0]


def draft_model(tree="1x1x1", drawn="iid", temperature=None, context=CONTEXT, lm=None, **changes):
    lm = lm or CausalLM(tiny_model(**{"seed": 1, "num_hidden_layers": 1} | changes))
    return DraftModel(lm, context, TreePlan(parse(tree), drawn, temperature))


def cascade(inner, lm, depth=3, drawn="iid", temperature=None, verifier=None, context=CONTEXT, kind=DraftCascade):
    parts = Arm(Target(lm, None, "tiny-draft", context, "", 0.0), inner, verifier or Token(), CounterDraws(0))
    return kind(parts, depth, drawn, temperature)


def batch_of(target, wanted, proposer, draws=None):
    """A batch without an engine, for a proposer that is driven by hand."""
    sequences = [
        SequenceState(request, target.lm.open(), list(request.tokens), state=proposer.init(request))
        for request in wanted
    ]
    return Batch(target, sequences, draws or CounterDraws(0))


def fork_of(sequence, proposer, tokens=None, number=1):
    """A fork of a sequence, for a proposer that is driven by hand."""
    text = list(sequence.tokens if tokens is None else tokens)
    return SequenceState(
        sequence.request, sequence.kv.fork(), text, lineage=(number,), state=proposer.fork(sequence.state)
    )


def observations(sequences, output, starts):
    """The observations after a step in which every sequence only computed its pending tokens."""
    return [
        Observation(sequence, start, sequence.tokens[start:], hidden)
        for sequence, hidden, start in zip(sequences, output.pending, starts, strict=True)
    ]


def calls(info):
    """How often a step called the proposer's own modules."""
    return sum(name == "propose_forward" for name, _, _ in info.spans)


def path_tokens(draft, row):
    return [int(draft.token[node - draft.shape.roots]) for node in draft.shape.path(row)]


def expanded(draft, sequences):
    """Each row that has children: the row, its sequence, the text that ends with it, its children's tokens."""
    shape = draft.shape
    for root, sequence in enumerate(sequences):
        for row in shape.trees[root].tolist():
            if len(shape.children[row]):
                children = draft.token[shape.children[row] - shape.roots].tolist()
                yield row, sequence, sequence.tokens + path_tokens(draft, row), children


def steps_after_texts(target, proposer, wanted):
    """Decode; yield every step with the texts before it, as sequences with ``tokens``."""
    texts = {request.id: list(request.tokens) for request in wanted}
    for info in fixed_group(Arm(target, proposer, Token(), CounterDraws(3)), wanted):
        yield info, [SimpleNamespace(tokens=texts[sequence.request.id]) for sequence in info.sequences]
        texts |= {sequence.request.id: list(sequence.tokens) for sequence in info.sequences}


def rejected(info, depth):
    """How many sequences of a step got less than the whole depth of their draft tree."""
    return sum(len(done.path) < depth for done in info.committed)


def compare_stated(target, proposer, wanted, expected, each=lambda info: None, **options):
    """Compare every stated distribution with plain forwards, and that the drafter's KV cache is freed at the end.

    Args:
        target: the target.
        proposer: which states distributions, with trees of depth 3.
        wanted: requests at the settings ``WARM``.
        expected: committed tokens and a drafted path -> logits ``[V]`` after them.
        each: called with every step.
        options: of the comparison.

    Returns:
        The number of distributions, and of rejections.
    """
    compared, rejections = 0, 0
    for info, before in steps_after_texts(target, proposer, wanted):
        for row, sequence, text, _ in expanded(info.draft, before):
            logits = expected(sequence.tokens, text[len(sequence.tokens) :])
            p = logits_to_probs(logits[None], [WARM])[0]
            torch.testing.assert_close(info.draft.q[info.draft.q_row[row]], p, rtol=0, **({"atol": 1e-6} | options))
            compared += 1
        rejections += rejected(info, 3)
        each(info)
    assert proposer.lm is None or not proposer.lm.cells.references.any()
    return compared, rejections


@dataclass
class Recording:
    """Counter draws that record every pick."""

    seed: int = 0
    picks: list = field(default_factory=list)  # (weights [V], key, index)

    def pick(self, weights, keys):
        picked = CounterDraws(self.seed).pick(weights, keys)
        self.picks += [(w.clone(), key, int(i)) for w, key, i in zip(weights, keys, picked, strict=True)]
        return picked
