"""A draft model with another tokenizer: what it reads and may draft, exactly as by plain forwards over whole texts."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from spec_lab.core.history import History
from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.drafters.draft_model.retokenized import Tokens
from spec_lab.drafters.draft_model.vocabularies import intersect
from spec_lab.verify import Gumbel, KSeq, Match, Token, Traversal
from tests.drafters.small_tokenizers import CODE, PROSE, byte_level, letters, sentencepiece
from tests.drafters.test_draft_model import tokenizer_of
from tests.oracles import vocabularies as oracle
from tests.propose.lab import (
    COLD,
    WARM,
    batch_of,
    decode,
    emitted,
    expanded,
    fork_of,
    path_tokens,
    plain_greedy,
    requests,
)
from tests.tiny import tiny_model, tiny_target

TREE = "0 1 2 0.0 0.1 1.0 0.0.0 0.1.0"
PROSE_BYTES = byte_level(PROSE, 60, begin=True)
CODE_BYTES = byte_level(CODE, 90, ("</s>", "<s>", "<pad>"), pad_token="<pad>")
PROSE_PIECES = sentencepiece(PROSE, 50)
PAIRS = {  # target, draft
    "bytes, bytes": (PROSE_BYTES, CODE_BYTES),
    "bytes, sentencepiece": (CODE_BYTES, PROSE_PIECES),
    "sentencepiece, bytes": (PROSE_PIECES, PROSE_BYTES),
}
TEXTS = ("Then they thought of it", "é: the naïve 漢字 there", "  return [x for x in thing]\n")


def target_of(tokenizer, vocabulary=None, **changes):
    """A tiny target; of ids beyond its tokenizer's it emits none."""
    made = tiny_target(vocab_size=vocabulary or len(tokenizer), **changes)
    return replace(made, tokenizer=tokenizer)


def saved(folder, tokenizer, vocabulary=None, **changes):
    model = tiny_model(vocab_size=vocabulary or len(tokenizer), **{"seed": 1, "num_hidden_layers": 1} | changes)
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def made(pairs, tmp_path_factory):
    """The target and the draft model's folder of each pair of tokenizers."""
    return {
        name: (target_of(target), saved(tmp_path_factory.mktemp("draft"), draft))
        for name, (target, draft) in pairs.items()
    }


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return made(PAIRS, tmp_path_factory)


def loaded(pair, **options):
    target, path = pair
    return DraftModel.load(target, path, vocabularies="intersect", **{"depth": 3} | options)


def wanted(tokenizer, sampling=COLD, new=16):
    return requests(sampling, new, [tokenizer(text)["input_ids"] for text in TEXTS])


def stated(pair, proposer, text, path, sampling):
    """q after a text and a drafted path, by plain forwards over the whole text."""
    target, special = pair[0], {}
    draft = SimpleNamespace(model=proposer.lm.model, tokenizer=proposer.draft_tokenizer)
    ordinary = oracle.shared(target.tokenizer, draft.tokenizer)
    for name in ("<s>", "</s>", "<unk>"):
        ids = [tokenizer.get_vocab().get(name) for tokenizer in (target.tokenizer, draft.tokenizer)]
        if None not in ids:
            special[ids[0]] = ids[1]
    read = oracle.read(target.tokenizer, draft.tokenizer, text, special.items())
    every = ordinary | special
    logits = oracle.logits(draft.model, read + [every[token] for token in path], every, target.vocabulary)
    seen = torch.zeros(1, target.vocabulary, dtype=torch.bool)
    seen[0, [*text, *path]] = True
    return logits_to_probs(logits[None], [sampling], History(seen))[0]


def compare(pair, proposer, draft, before, sampling):
    """Compare every stated distribution with the oracle's; return how many there are."""
    count = 0
    for row, sequence, text, children in expanded(draft, before):
        expected = stated(pair, proposer, sequence.tokens, text[len(sequence.tokens) :], sampling)
        torch.testing.assert_close(draft.q[draft.q_row[row]], expected, rtol=0, atol=1e-6)
        assert all(expected[token] > 0 for token in children)
        count += 1
    return count


WAYS = {
    "chain": {"depth": 3},
    "tree without": {"depth": None, "tree": TREE, "drawn": "without_replacement", "temperature": 1.0},
    "tree iid": {"depth": None, "tree": TREE, "drawn": "iid", "temperature": 1.5},
    "gumbel": {"depth": 3, "drawn": "gumbel"},
    "best first": {"depth": None, "nodes": 7, "drawn": "without_replacement", "temperature": 1.0},
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.each_value
def test_every_stated_distribution_is_that_of_plain_forwards_over_the_text_tokenized_again(pairs, name, way):
    sampling = Sampling(1.0, repetition_penalty=1.1)
    proposer, asked = loaded(pairs[name], **WAYS[way]), wanted(PAIRS[name][0], sampling, 9)
    proposer.draft_tokenizer = PAIRS[name][1]
    texts, compared, rejected = {request.id: list(request.tokens) for request in asked}, 0, 0
    verifier = Gumbel() if way == "gumbel" else Token()
    warp = replace(sampling, temperature=proposer.plan.temperature or 1.0)
    for info in fixed_group(Arm(pairs[name][0], proposer, verifier, CounterDraws(3)), asked):
        before = [SimpleNamespace(tokens=texts[sequence.request.id]) for sequence in info.sequences]
        compared += compare(pairs[name], proposer, info.draft, before, warp)
        rejected += sum(len(done.path) < info.draft.shape.depth.max() for done in info.committed)
        texts |= {sequence.request.id: list(sequence.tokens) for sequence in info.sequences}
    assert compared > 30 and rejected > 3
    assert not proposer.lm.cells.references.any()


@st.composite
def histories(draw):
    """Any change of a sequence between two proposals; ``other`` is any text."""
    kinds = st.sampled_from(["accept", "accept", "rewind", "replace", "fork", "other"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 6), st.integers(0, 300), st.text(max_size=3)), max_size=6))


@pytest.mark.nightly
@pytest.mark.parametrize("name", PAIRS)
@given(history=histories())
@settings(max_examples=8)
@pytest.mark.one_in(3)
def test_distributions_are_right_after_any_history(pairs, name, history):
    target, proposer = pairs[name][0], loaded(pairs[name], **WAYS["tree without"])
    proposer.draft_tokenizer = PAIRS[name][1]
    batch = batch_of(target, wanted(PAIRS[name][0], WARM)[1:2], proposer)
    for step, (what, number, token, text) in enumerate([("accept", 0, 0, ""), *history]):
        draft = proposer.propose(batch)
        compare(pairs[name], proposer, draft, batch.sequences, WARM)
        index = number % len(batch.sequences)
        seq = batch.sequences[index]
        if what == "accept":
            rows = draft.shape.trees[index]
            seq.tokens += [*path_tokens(draft, int(rows[number % len(rows)])), token]
        elif what == "rewind":
            del seq.tokens[max(1, len(seq.tokens) - number) :]
        elif what == "replace":
            seq.tokens[-min(number, len(seq.tokens) - 1) or -1 :] = [token, token]
        elif what == "other":
            seq.tokens += target.tokenizer(text, add_special_tokens=False)["input_ids"]
        elif len(batch.sequences) < 3:
            batch.sequences.append(fork_of(seq, proposer, [*seq.tokens, token], step + 1))
        for sequence in batch.sequences:
            sequence.step += 1
    for sequence in batch.sequences:
        proposer.close(sequence.state)
    assert not proposer.lm.cells.references.any()


GREEDY = [
    {"depth": 4},
    {"depth": 4, "drawn": "deterministic", "confidence": 0.1},
    {"depth": None, "tree": TREE, "drawn": "deterministic"},
    {"depth": None, "nodes": 9, "children": 3, "width": 3, "max_depth": 4, "rerank": True, "drawn": "deterministic"},
    {"depth": None, "nodes": 7, "drawn": "without_replacement", "temperature": 1.0},
]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("options", GREEDY, ids=str)
@pytest.mark.each_value
def test_greedy_drafting_emits_the_target_s_tokens(pairs, name, options):
    target, asked = pairs[name][0], wanted(PAIRS[name][0])
    truth = [plain_greedy(target.lm.model, request.tokens, 16) for request in asked]
    group, steps = decode(target, loaded(pairs[name], **options), asked, Match() if "rerank" in options else None)
    assert emitted(group) == truth
    assert sum(info.draft.shape.nodes for info in steps) > 30


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("way", "verifier"), [("tree without", Traversal()), ("tree iid", KSeq()), ("chain", Token())])
def test_a_batch_decodes_as_its_requests_alone(pairs, way, verifier):
    target, asked = pairs["bytes, bytes"][0], wanted(PROSE_BYTES, WARM, 12)
    together = emitted(decode(target, loaded(pairs["bytes, bytes"], **WAYS[way]), asked, verifier)[0])
    alone = [loaded(pairs["bytes, bytes"], **WAYS[way]) for _ in asked]
    each = [
        emitted(decode(target, proposer, [request], verifier)[0])[0]
        for proposer, request in zip(alone, asked, strict=True)
    ]
    assert together == each


def with_weights_of(target, rows):
    """The target's model with its embedding and unembedding at these rows; -1 for a new one."""
    model, rows = tiny_model(vocab_size=target.vocabulary), torch.tensor(rows)
    padded = tiny_model(vocab_size=len(rows))
    padded.load_state_dict({
        name: torch.where(rows[:, None] < 0, padded.state_dict()[name], weight[rows])
        if len(weight) == target.vocabulary else weight
        for name, weight in model.state_dict().items()
    })  # fmt: skip
    return padded.to(torch.float32)


SHIFTED = ["<s>", "</s>", "<a>", "<b>"]
ALIKE = {  # draft tokenizer, row of the target for each of the draft model's tokens
    "shifted ids": (byte_level(PROSE, 60, SHIFTED, begin=True), [0, 1, -1, -1, *range(2, len(PROSE_BYTES))]),
    "swapped special tokens": (byte_level(PROSE, 60, ("</s>", "<s>")), [1, 0, *range(2, len(PROSE_BYTES))]),
    "padded": (PROSE_BYTES, [*range(len(PROSE_BYTES)), -1, -1, -1]),
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("padding", [0, 5])
def test_a_draft_that_agrees_drafts_the_target_s_tokens_whatever_their_ids(tmp_path, name, padding):
    """The same model with its tokens at other ids: its drafts are the target's own greedy tokens."""
    (tokenizer, rows), target = ALIKE[name], target_of(PROSE_BYTES, len(PROSE_BYTES) + padding)
    model = target.lm.model
    with torch.no_grad():  # no padding is emitted
        model.lm_head.weight[len(PROSE_BYTES) :] = model.lm_head.weight[5] * 0.5
    with_weights_of(target, rows).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    proposer = DraftModel.load(target, str(tmp_path), depth=3, vocabularies="intersect")
    assert proposer.facts["shared_tokens"] == len(PROSE_BYTES)
    prompt = PROSE_BYTES(TEXTS[0])["input_ids"]
    drafted = proposer.propose(batch_of(target, requests(COLD, 8, [prompt]), proposer)).token.tolist()
    assert drafted == plain_greedy(model, prompt, 3)


# What is read --------------------------------------------------------------------------------------------------------


def tokens_of(draft, ends=None):
    """The tokens of a draft model, with its tokenizer's own end or others."""
    return Tokens(draft, len(draft), frozenset({draft.eos_token_id} - {None} if ends is None else ends), "draft")


def shares(target, draft, ends=None):
    """The tokens that two tokenizers share."""
    return intersect(target_of(target), tokens_of(draft, ends))


def names(tokenizer, pairs):
    """The special tokens among pairs of shared tokens, as the draft writes them."""
    return {str(added) for number, added in tokenizer.added_tokens_decoder.items() if number in pairs.values()}


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def common(text, other):
    """The length of the longest common prefix."""
    return next((n for n, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))


LONG = {"prose": " ".join([PROSE] * 15), "no spaces": "the漢字é" * 400, "spaces": "x" + " " * 3000, "lines": CODE * 10}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("text", LONG)
@pytest.mark.each_value
def test_a_long_text_is_read_in_pieces_that_later_tokens_never_change(name, text):
    target, draft = PAIRS[name]
    read, tokens, before = shares(target, draft).read, target(LONG[text])["input_ids"], []
    if text in ("prose", "lines"):
        assert read(tokens) == oracle.read(target, draft, tokens), "no token crosses the end of a piece"
    for end in range(1, len(tokens), 11):
        read_back = read(tokens[:end])
        assert len(before) - common(before, read_back) <= 1024
        before = read_back


def test_only_what_is_tokenized_otherwise_is_computed_again(pairs):
    proposer, lengths = loaded(pairs["bytes, bytes"], drawn="deterministic"), []
    forward, read = proposer.lm.forward, proposer.vocabularies.read

    def counted(sequences, pending, draft, **timed):
        lengths.append(len(pending[0]))
        return forward(sequences, pending, draft, **timed)

    proposer.lm.forward = counted
    first = PROSE_BYTES("It is the")["input_ids"]
    batch = batch_of(pairs["bytes, bytes"][0], requests(WARM, 30, [first]), proposer)
    sequence, texts = batch.sequences[0], [[]]
    for more in ("re is", " é", ""):
        texts.append(read(sequence.tokens))
        proposer.propose(batch)
        sequence.tokens += encode(PROSE_BYTES, more)
    merged_ = CODE_BYTES.convert_ids_to_tokens(texts[2])
    assert "Ġthere" in merged_ and "Ġthere" not in CODE_BYTES.convert_ids_to_tokens(texts[1])
    proposer.propose(batch)
    texts.append(texts[-1])
    assert lengths == [len(b) - min(common(a, b), len(b) - 1) for a, b in pairwise(texts)]


def test_accepted_nodes_are_found_again(pairs):
    """Where the text is tokenized as it was drafted, only the last level and the token after it are computed."""
    target, lengths = pairs["bytes, bytes"][0], []
    for text in (*TEXTS, "It", "the", "thing"):
        proposer = loaded(pairs["bytes, bytes"], drawn="deterministic")
        forward, nodes, read = proposer.lm.forward, proposer.vocabularies.nodes, proposer.vocabularies.read
        batch = batch_of(target, requests(WARM, 30, [PROSE_BYTES(text)["input_ids"]]), proposer)
        sequence, before = batch.sequences[0], read(batch.sequences[0].tokens)
        path = proposer.propose(batch).token.numpy()
        sequence.tokens += [*path.tolist(), 1]
        if read(sequence.tokens) == [*before, *nodes(path), *nodes(np.array([1]))]:
            proposer.lm.forward = lambda kvs, pending, *rest, forward=forward, **timed: (
                lengths.append(len(pending[0])), forward(kvs, pending, *rest, **timed),
            )[1]  # fmt: skip
            proposer.propose(batch)
    assert len(lengths) > 1 and set(lengths) == {2}


def test_an_unfinished_character_is_read_byte_by_byte_until_it_is_whole():
    read, tokens = shares(PROSE_BYTES, CODE_BYTES).read, encode(PROSE_BYTES, "x漢")
    byte = {data: token for token, data in enumerate(oracle.spelled(CODE_BYTES).bytes)}
    assert read(tokens[:-1]) == [byte[b"x"], byte[b"\xe6"], byte[b"\xbc"]]
    assert read(tokens) == encode(CODE_BYTES, "x漢")
    assert read(tokens[:-1] + encode(PROSE_BYTES, "a")) == [byte[b"x"], byte[b"\xe6"], byte[b"\xbc"], byte[b"a"]]
    plain = shares(PROSE_BYTES, PROSE_PIECES).read(tokens[:-1])
    assert PROSE_PIECES.convert_ids_to_tokens(plain) == ["<s>", "▁", "x", "<0xE6>", "<0xBC>"]


def test_text_that_spells_a_special_token_is_read_as_text():
    spelled = [token for character in "</s>" for token in encode(PROSE_BYTES, character)]
    read_back = shares(PROSE_BYTES, CODE_BYTES).read(spelled)
    assert CODE_BYTES.convert_ids_to_tokens(read_back) == ["<", "/", "s", ">"]


def test_special_tokens_are_shared_by_text_and_role_and_others_are_left_out():
    target = byte_level(PROSE, 60, ("<s>", "</s>", "<tool>", "<pad>"), pad_token="<pad>")
    draft = byte_level(CODE, 60, ("<pad>", "</s>", "<s>", "<tool>"), pad_token="<tool>")
    shared = shares(target, draft)
    assert names(draft, shared.pairs) == {"<s>", "</s>", "<tool>", "<pad>"}
    text = [0, *encode(target, "a"), 2, *encode(target, "b"), 3, 1]
    assert draft.convert_ids_to_tokens(shared.read(text)) == ["a", "<tool>", "b", "<pad>", "</s>"]
    roles = shares(target, draft, {2, 1})  # here <s> ends texts as well, as in GPT-2
    assert names(draft, roles.pairs) == {"</s>", "<tool>", "<pad>"}
    assert draft.convert_ids_to_tokens(roles.read([*text, 0, *encode(target, "c")])) == [
        "a", "<tool>", "b", "<pad>", "</s>", "c",
    ]  # fmt: skip


def test_of_two_tokens_with_the_same_bytes_the_one_that_its_tokenizer_writes_is_shared():
    a = PROSE_PIECES.get_vocab()["a"]
    assert shares(CODE_BYTES, PROSE_PIECES).pairs[CODE_BYTES.get_vocab()["a"]] == a
    pairs = shares(PROSE_PIECES, CODE_BYTES).pairs
    assert a in pairs and PROSE_PIECES.get_vocab()["<0x61>"] not in pairs
    assert PROSE_PIECES.get_vocab()["<0xC3>"] in pairs


# Numbers, options, refusals ------------------------------------------------------------------------------------------


def test_shared_tokens_are_recorded_and_logged_once(pairs, caplog):
    with caplog.at_level("INFO"):
        proposer = loaded(pairs["bytes, sentencepiece"])
    count = len(proposer.vocabularies.pairs)
    facts = {"vocabularies": "intersect", "shared_tokens": count, "shared_share": count / len(CODE_BYTES)}
    assert proposer.facts.items() >= facts.items()
    assert proposer.facts["tree"] == "0 0.0 0.0.0"
    logged = [record.getMessage() for record in caplog.records if "shares" in record.getMessage()]
    assert len(logged) == 1 and f"{count} of the {len(CODE_BYTES)} tokens" in logged[0]


def test_another_tokenizer_is_refused_unless_the_option_is_set(pairs):
    target, path = pairs["bytes, bytes"]
    for options in ({}, {"vocabularies": "same"}):
        with pytest.raises(ValueError, match=r"another tokenizer .*proposer\.vocabularies=intersect"):
            DraftModel.load(target, path, depth=2, **options)
    with pytest.raises(ValueError, match=r"vocabularies must be one of same, intersect, strings, not 'union'"):
        DraftModel.load(target, path, depth=2, vocabularies="union")


def test_a_tiny_intersection_is_refused_with_its_number():
    few = [*dict.fromkeys("ItĠis2024;f(x)=y.ĊEnd"), "</s>"]
    assert len(shares(PROSE_BYTES, letters(few)).pairs) == len(few)
    wide = letters([*few, *(f"zq{n}" for n in range(6000 - len(few)))])
    with pytest.raises(ValueError, match=f"shares {len(few) - 1} of the 6000 tokens .* at least 30"):
        shares(wide, byte_level(PROSE, 0))


def test_tokenizers_without_bytes_are_refused(pairs, tmp_path):
    target = pairs["bytes, bytes"][0]
    words = tokenizer_of(["<unk>", "def", "x"])
    with pytest.raises(ValueError, match=r"vocabularies=intersect cannot compare .* of draft"):
        intersect(target, tokens_of(words))
    with pytest.raises(ValueError, match=f"cannot compare the tokens of {target.name}"):
        intersect(replace(target, tokenizer=words), tokens_of(PROSE_BYTES))
    lower = byte_level(PROSE, 60)
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ValueError, match="they spell 'It is .* as b'it is"):
        intersect(target, tokens_of(lower))
    with pytest.raises(ValueError, match="requires the target's tokenizer"):
        intersect(replace(target, tokenizer=None), tokens_of(PROSE_BYTES))
