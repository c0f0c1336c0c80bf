"""A draft model whose tokenizer shares few tokens: its drafts are translated as text, and cost acceptance only."""

import pytest

from spec_lab.core.options import WrongOption
from spec_lab.core.probabilities import Sampling
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.drafters.draft_model.retokenized import Tokens
from spec_lab.drafters.draft_model.strings import StringTokens, strings
from spec_lab.drafters.draft_model.vocabularies import intersect
from tests.drafters.small_tokenizers import PROSE, byte_level, letters
from tests.drafters.test_vocabularies import (
    CODE_BYTES,
    PAIRS,
    PROSE_BYTES,
    encode,
    made,
    saved,
    target_of,
    tokens_of,
    wanted,
)
from tests.propose.lab import COLD, batch_of, decode, emitted, plain_greedy, requests

PENALISED = Sampling(0.8, repetition_penalty=1.2)
TREES = {
    "chain": {"depth": 4}, "confident chain": {"depth": 4, "confidence": 0.05},
    "tree": {"tree": "0 1 2 0.0 0.1 1.0 0.0.0 0.1.0"},
    "reranked": {"nodes": 9, "children": 3, "width": 3, "max_depth": 4, "rerank": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return made(PAIRS, tmp_path_factory)


def loaded(pair, **options):
    target, path = pair
    return DraftModel.load(target, path, vocabularies="strings", **{"drawn": "deterministic"} | options)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("way", TREES)
@pytest.mark.each_value
def test_greedy_drafting_emits_the_target_s_tokens(pairs, name, way):
    target, asked = pairs[name][0], wanted(PAIRS[name][0])
    proposer = loaded(pairs[name], **TREES[way])
    group, steps = decode(target, proposer, asked)
    assert emitted(group) == [plain_greedy(target.lm.model, request.tokens, 16) for request in asked]
    drafted = [info.draft.shape for info in steps]
    assert sum(shape.nodes for shape in drafted) > 30
    assert max(shape.deepest for shape in drafted) <= proposer.plan.depth
    assert max(len(rows) - 1 for shape in drafted for rows in shape.trees) <= proposer.nodes
    assert not proposer.lm.cells.references.any()


def test_a_batch_decodes_as_its_requests_alone(pairs):
    pair = pairs["bytes, sentencepiece"]
    asked = wanted(CODE_BYTES, PENALISED, 12)
    together = emitted(decode(pair[0], loaded(pair, **TREES["tree"]), asked)[0])
    alone = [emitted(decode(pair[0], loaded(pair, **TREES["tree"]), [request])[0])[0] for request in asked]
    assert together == alone


@pytest.mark.parametrize("name", PAIRS)
def test_the_draft_model_s_likeliest_tokens_are_drafted_as_text(pairs, name):
    target, path = pairs[name]
    proposer = loaded((target, path), depth=3)
    prompt = target.tokenizer("Then they thought of it")["input_ids"]
    drafted = proposer.propose(batch_of(target, requests(COLD, 9, [prompt]), proposer)).token.tolist()
    text = plain_greedy(proposer.lm.model, proposer.vocabularies.read(prompt), 3)
    assert drafted == proposer.vocabularies.write(prompt, text)[:3]


# The translation -----------------------------------------------------------------------------------------------------


def translated(target, draft, above, below):
    """Return the draft after one text of the other, which the draft model has drafted."""
    between = strings(target_of(target), tokens_of(draft))
    drafted = encode(draft, below)
    if tokens_of(draft).begins_with_space:  # it would put another one before the text
        drafted = encode(draft, above + below)[len(encode(draft, above)) :]
    return between.write(encode(target, above), drafted)


@pytest.mark.parametrize("name", ["bytes, bytes", "bytes, sentencepiece"])
@pytest.mark.parametrize("words", ["Then they| thought: that", "It is|. There", "in|\n  return", "the naïve| café"])
def test_a_text_is_split_as_the_target_splits_the_whole(name, words):
    target, draft = PAIRS[name]
    above, below = words.split("|")
    whole = encode(target, above + below)
    assert translated(target, draft, above, below) == whole[len(encode(target, above)) :]


def test_a_sentencepiece_target_gets_no_space_within_a_word():
    target, draft = PAIRS["sentencepiece, bytes"]
    for above, below in (("Then they", " thought"), ("the", "re"), ("1", "23 is")):
        tokens = translated(target, draft, above, below)
        pieces = Tokens(target, len(target), frozenset(), "target").pieces
        assert b"".join(pieces[token] for token in tokens) == below.encode()


def test_what_would_be_joined_with_the_text_above_is_split_by_itself():
    assert len(encode(PROSE_BYTES, " there")) == len(encode(PROSE_BYTES, " the")) == 1
    assert translated(PROSE_BYTES, CODE_BYTES, "It is the", "re is") == encode(PROSE_BYTES, "re is")


def test_a_character_that_is_not_complete_and_what_follows_a_special_token_are_left_out():
    between = strings(target_of(PROSE_BYTES), tokens_of(CODE_BYTES))
    single = encode(CODE_BYTES, "漢")
    assert len(single) == 3
    above = encode(PROSE_BYTES, "It is")
    for cut, text in ((3, " 漢"), (2, " "), (1, " ")):
        assert between.write(above, [*encode(CODE_BYTES, " "), *single[:cut]]) == encode(PROSE_BYTES, text)
    ends = [CODE_BYTES.eos_token_id, *encode(CODE_BYTES, " more")]
    assert between.write(above, [*encode(CODE_BYTES, " there"), *ends]) == [
        *encode(PROSE_BYTES, " there"), PROSE_BYTES.eos_token_id,
    ]  # fmt: skip
    assert between.write(above, [CODE_BYTES.pad_token_id]) == []


def test_the_toy_has_two_tokenizers():
    toy = StringTokens(list, list, (), (), {}).toy(5)
    assert toy.target == [b"a", b"b", b"c", b"ab", b"bc"] and toy.draft == [b"b", b"c", b"a", b"bc", b"ca"]
    assert toy.read([0, 1, 2, 3]) == [2, 3, 2, 0]  # "abcab"
    assert toy.write([0], [3, 2]) == [4, 0], "b would be joined with the a above"
    assert toy.write([2], [3, 2]) == [4, 0]


# Options -------------------------------------------------------------------------------------------------------------


def test_few_shared_tokens_suffice(tmp_path):
    few = letters([*dict.fromkeys("ItĠis2024;f(x)=y.ĊEndThe"), *(f"zq{n}" for n in range(6000)), "</s>"])
    target = target_of(few)
    path = saved(tmp_path, byte_level(PROSE, 0))
    with pytest.raises(ValueError, match=r"shares .* proposer\.vocabularies=strings"):
        intersect(target, tokens_of(byte_level(PROSE, 0)))
    proposer = loaded((target, path), depth=3)
    assert proposer.facts["vocabularies"] == "strings"
    prompt = few("It is")["input_ids"]
    group, _ = decode(target, proposer, requests(COLD, 6, [prompt]))
    assert emitted(group) == [plain_greedy(target.lm.model, prompt, 6)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drawn": "iid", "depth": 2}, r"drawn is iid: set proposer\.drawn=deterministic"),
        ({"tokens": 9, "depth": 2}, r"tokens is 9: set proposer\.tokens=null"),
        ({"tree": "400x1"}, r"does not fit a vocabulary"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(pairs, options, message):
    with pytest.raises(WrongOption, match=message):
        loaded(pairs["sentencepiece, bytes"], **options)
