"""Every family with recurrent layers: loading, the self-check, and greedy decoding with chains against transformers."""

import dataclasses

import numpy as np
import pytest
import torch

from spec_lab.core.draft import Draft
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.shape import chain, forest
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine, Limits
from spec_lab.decode.proposer import Proposer
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.models.self_check import self_check
from spec_lab.models.support import NO_LIMIT, Unsupported
from spec_lab.models.target import Target
from spec_lab.propose.ngram import Ngram
from spec_lab.propose.suffix import Suffix
from spec_lab.runners.attention import layers_without_cells
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.recurrent import Advance
from spec_lab.verify import Token
from tests.checkpoints import saved
from tests.propose.lab import draft_model, requests
from tests.recurrent import FAMILIES, TOKENWISE
from tests.tiny import CONTEXT, VOCABULARY

DEPTH, NEW = 4, 24
PROMPTS = ((3, 14, 15, 9, 26, 5), (2, 7), tuple(range(1, 41)), (8,))


def families(*short):
    """Every family, of which the short run has these."""
    marks = {name: [] if name in short else [pytest.mark.nightly] for name in FAMILIES}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in marks.items()])


@dataclasses.dataclass
class Foretold(Proposer):
    """Drafts chains of which any number of tokens is right, the others wrong."""

    future: list[list[int]]  # of each request
    name: str = "foretold"
    drawn: str = "deterministic"
    nodes: int = DEPTH
    branches: bool = False

    def propose(self, batch):
        tokens = []
        for sequence in batch.sequences:
            done = len(sequence.emitted)
            right = np.random.default_rng([sequence.request.id, sequence.step]).integers(DEPTH + 1)
            coming = [*self.future[sequence.request.id][done:], *[0] * DEPTH][:DEPTH]
            tokens += [(token + (number >= right)) % VOCABULARY for number, token in enumerate(coming)]
        return Draft(forest((chain(DEPTH),) * len(batch.sequences)), torch.tensor(tokens))


def generated(model):
    """The greedy output of transformers' own loop for each prompt."""
    texts = []
    for prompt in PROMPTS:
        out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, use_cache=True)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def target_of(lm):
    return Target(lm, None, "recurrent", CONTEXT, "", 0.0)


def decoded(lm, proposer, limits):
    """Return the tokens of each request, and how often each number of tokens was accepted."""
    engine = Engine(Arm(target_of(lm), proposer, Token(), CounterDraws(0)), limits=limits)
    for request in requests(new=NEW, prompts=PROMPTS):
        engine.add(request)
    counts = np.zeros(DEPTH + 1, dtype=int)
    for info in engine:
        for done in info.committed:
            counts[len(done.path)] += 1
    assert not engine.errors
    return [sequence.emitted for sequence in sorted(engine.sequences, key=lambda sequence: sequence.request.id)], counts


@families("qwen3_next")
@pytest.mark.parametrize(
    "limits", [pytest.param(Limits(), marks=pytest.mark.nightly), Limits(2, 7)], ids=["all", "continuous"]
)
def test_greedy_chains_are_what_transformers_generates(name, limits):
    """With drafts of which each number of tokens is accepted, in batches whose sequences come and go."""
    expected = generated(FAMILIES[name]())
    texts, counts = decoded(CausalLM(FAMILIES[name](), chunk=16), Foretold(expected), limits)
    assert texts == expected and counts.all()


@families()
def test_proposers_of_chains_decode_what_transformers_generates(name):
    expected = generated(FAMILIES[name]())
    lm = CausalLM(FAMILIES[name]())
    itself = draft_model("1x1x1", lm=CausalLM(FAMILIES[name]()))
    accepted = {}
    for proposer in (Ngram(DEPTH, 2, 1), Suffix.load(target_of(lm), nodes=DEPTH, depth=DEPTH), itself):
        texts, counts = decoded(lm, proposer, Limits(3))
        assert texts == expected
        accepted[proposer.name] = counts[1:].sum()
    assert accepted[itself.name]


@families("lfm2")
def test_a_checkpoint_loads_and_passes_its_self_check(name, tmp_path):
    model = FAMILIES[name]()
    saved(tmp_path, model)
    dtype = str(model.dtype).removeprefix("torch.")
    target = Target.load(str(tmp_path), dtype=dtype)
    attends = len(layers_without_cells(model.config)) < model.config.num_hidden_layers
    assert target.self_check < 1e-4 and target.context == (CONTEXT if attends else NO_LIMIT)
    assert target.lm.facts["packed"] == (dtype == "float32" and torch.backends.mkldnn.is_available())
    assert target.lm.recurrence.tokenwise == (name in TOKENWISE)
    assert target.lm.capabilities.hidden_layers == (model.config.num_hidden_layers if attends else 0)
    rounded = Target.load(str(tmp_path), dtype="bfloat16")
    assert 1e-3 < rounded.self_check < rounded.tolerance
    with pytest.raises(
        Unsupported, match=r"target\.attention=dense_mask does not support models with recurrent layers"
    ):
        Target.load(str(tmp_path), dtype=dtype, attention="dense_mask")
    draft = DraftModel.load(target, str(tmp_path), depth=3)
    assert draft.sha256 == target.sha256
    with pytest.raises(ValueError, match="recurrent layers, .* proposer=draft_chain"):
        DraftModel.load(target, str(tmp_path), tree="2x2")


@families("lfm2", "qwen3_next")
def test_the_self_check_finds_states_that_are_not_restored(name, monkeypatch):
    original = Advance.__call__

    def unrestored(self, *rows):
        return original(dataclasses.replace(self, restore=False), *rows)

    monkeypatch.setattr(Advance, "__call__", unrestored)
    with pytest.raises(Unsupported, match="decodes forests wrongly"):
        self_check(FAMILIES[name](), "per_sequence")


@pytest.mark.parametrize("option", ["attention=dense_mask", "graphs=true", "kv_dtype=float16"])
def test_options_that_recurrent_layers_rule_out_are_refused_by_name(option, tmp_path):
    name, value = option.split("=")
    saved(tmp_path, FAMILIES["lfm2"]())
    with pytest.raises(Unsupported, match=rf"target\.{name}.*recurrent layers \(model type 'lfm2'\)"):
        Target.load(str(tmp_path), dtype="float64", **{name: {"true": True}.get(value, value)})
