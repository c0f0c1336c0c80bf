"""Other decoding on llama.cpp as arms: what is refused, and how its tokens are split and timed. The rest is nightly."""

from itertools import count

import numpy as np
import pytest

from spec_lab.core.probabilities import Sampling
from spec_lab.core.request import Request
from spec_lab.tasks import peers_llama
from spec_lab.tasks.peers_llama import GreedyDraft, GrowingLlama, LlamaGenerate, LlamaLoop, timed
from tests.tiny import tiny_target

REQUEST = Request(0, "one", (1, 2, 3), Sampling(), 5, frozenset({7}))


@pytest.mark.parametrize(
    ("arm", "sampling", "named"),
    [
        (LlamaGenerate.plain, Sampling(repetition_penalty=1.2), "sampling.repetition_penalty"),
        (LlamaGenerate.plain, Sampling(0.7, top_k=5), r"sampling\.temperature.*0\.7"),
        (LlamaGenerate.plain, Sampling(1.5, min_p=0.1), r"sampling\.temperature.*1\.5"),
        (LlamaGenerate.plain, Sampling(1.0, top_p=0.9), r"target=gguf"),
        (LlamaLoop, Sampling(1.0, top_p=0.9), "top_p"),
        (LlamaLoop, Sampling(repetition_penalty=1.2), "repetition_penalty"),
    ],
    ids=["generate, penalty", "top_k, warm", "min_p, warm", "top_p as in spec_lab", "loop, top_p", "loop, penalty"],
)
def test_sampling_that_llama_cpp_does_otherwise_is_refused(arm, sampling, named):
    with pytest.raises(ValueError, match=named):
        arm(tiny_target(), sampling, 0)


@pytest.mark.parametrize(("drafts", "all_logits"), [(None, None), (object, True)])
def test_there_is_room_for_the_logits_of_a_prompt_longer_than_a_batch_where_something_drafts(
    monkeypatch, drafts, all_logits
):
    monkeypatch.setattr(peers_llama, "require_llama_cpp", lambda target: None)
    monkeypatch.setattr(peers_llama, "llama_of", lambda target, size, **more: more.get("logits_all"))
    make = LlamaGenerate(tiny_target(), Sampling(), 0, drafts and (lambda size: drafts())).llama.make
    assert make(1024) is all_logits


@pytest.mark.parametrize(
    ("stream", "tokens", "why"), [([4, 5, 6, 8, 9], [4, 5, 6, 8, 9], "length"), ([4, 7, 6], [4, 7], "stop")], ids=str
)
def test_the_first_token_belongs_to_the_prefill(stream, tokens, why):
    timing = timed(REQUEST, iter(stream), 0.0)
    assert timing.tokens == tokens and timing.finish == why
    assert (timing.prefill_tokens, timing.decode_tokens) == (1, len(tokens) - 1)
    assert timing.prefill_seconds > 0 and timing.decode_seconds >= 0


def request(length, new):
    return Request(0, "one", (1,) * length, Sampling(), new, frozenset())


def test_a_kv_cache_has_room_for_the_longest_request_and_grows_with_longer_ones():
    sizes = []
    llama = GrowingLlama(tiny_target(), lambda size: sizes.append(size) or len(sizes), 9)
    for length, new, made in ((3, 5, 1), (60, 180, 1), (60, 999, 2), (60, 4, 2)):
        assert llama.for_requests([request(length, new), request(2, 1)]) == made
    assert sizes == [256, 512], "the target's context of 256 tokens limits the third request"


class Counts:
    """A model that continues every text with 10, 11, 12, .."""

    def n_ctx(self):
        return 8

    def generate(self, tokens, temp):
        assert temp == 0
        yield from count(10)


@pytest.mark.parametrize(("length", "drafted"), [(3, [10, 11, 12]), (5, [10, 11]), (7, []), (8, [])])
def test_a_draft_ends_where_the_context_does(length, drafted):
    drafted_ids = GreedyDraft(Counts(), 3)(np.arange(length, dtype=np.intc))
    assert drafted_ids.tolist() == drafted and drafted_ids.dtype == np.intc


def test_the_draft_model_computes_a_new_prompt_before_the_first_token():
    """It is part of the prefill, which Llama.generate alone would leave to the first draft."""
    calls = []

    class Draft(Counts):
        def reset(self):
            calls.append("reset")

        def eval(self, tokens):
            calls.append(tuple(tokens))

    class Both:
        draft_model = GreedyDraft(Draft(), 2)

        def reset(self):
            calls.append("target reset")

        def set_seed(self, seed):
            pass

        def generate(self, tokens, **_):
            calls.append("generate")
            yield from count(20)

    arm = object.__new__(LlamaGenerate)
    arm.sampling, arm.seed, arm.target = Sampling(), 0, tiny_target()
    arm._one(Both(), REQUEST)
    assert calls == ["target reset", "reset", REQUEST.tokens, "generate"]
