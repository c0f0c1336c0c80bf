"""The store on disk: built in buckets, searched as a naive search does, and refused when it is damaged or of others."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_lab.cli.commands import command
from spec_lab.core.files import file_hash
from spec_lab.propose import suffix_build
from spec_lab.propose.suffix import Suffix
from spec_lab.propose.suffix_build import build_tokens
from spec_lab.propose.suffix_store import FIRST, ORDER, STORE, TOKENS, TokenStore, vocabulary_hash
from spec_lab.tasks.certify.certificate import prove
from spec_lab.tasks.certify.instances import QUICK
from spec_lab.verify import Token
from tests.gguf_files import ZOO
from tests.propose.test_suffix import continued, found_by, naive_matches, naive_order


class Words:
    """A tokenizer that is known by its vocabulary."""

    def __init__(self, size):
        self.size = size

    def get_vocab(self):
        return {f"t{token}": token for token in range(self.size)}


def target_of(size, more=0):
    return SimpleNamespace(name="toy", tokenizer=Words(size), vocabulary=size + more)


def made(folder, documents, size):
    build_tokens(documents, size, vocabulary_hash(Words(size)), folder)
    return TokenStore.open(str(folder), target_of(size))


def starts_of(documents):
    """Where each document begins in ``tokens.npy``."""
    return np.cumsum([1, *(len(document) + 1 for document in documents)]).tolist()


@pytest.mark.nightly
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=6).filter(
        lambda documents: any(len(document) > 1 for document in documents)
    ),
    st.lists(st.lists(st.integers(0, 4), max_size=20), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 9),
    st.booleans(),
)
def test_matches_are_those_of_a_naive_search(tmp_path_factory, documents, contexts, least, most, large):
    """Tokens of a vocabulary above 65,535 included. The token 4 is not in the vocabulary of the store."""
    size, shift = (70_000, 69_996) if large else (4, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix_build, "BUCKET", 7)
        patch.setattr(suffix_build, "CHUNK", 5)
        folder = tmp_path_factory.mktemp("store") / "out"
        shifted = [[token + shift for token in document] for document in documents]
        store = made(folder, shifted, size)
    assert store.tokens.dtype == (np.uint32 if large else np.uint16)
    starts = starts_of(documents)
    assert store.order.tolist() == [starts[t] + p for t, p in naive_order(shifted, 16, end=size)]
    for context in [*contexts, *documents]:
        context = [token + shift for token in context]
        naive = naive_matches(shifted, context, 16, least, most, end=size)
        matches = found_by(store, context, least, most)
        assert matches == [(starts[t] + p, match) for (t, p), match in naive]
        if matches:
            assert continued(store, matches, 4) == [shifted[t][p : p + 4] for (t, p), _ in naive]


def test_documents_are_not_joined(tmp_path):
    store = made(tmp_path / "out", [[1, 2], [3, 1]], 4)
    assert found_by(store, [1, 2], 1, 9) == [] and found_by(store, [3], 1, 9) != []
    assert continued(store, found_by(store, [3], 1, 9), 9) == [[1]]


def header(shape):
    """The beginning of a NumPy file with this shape."""
    text = f"{{'descr': '<u4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def rewritten(folder, name, array):
    """Write another array, with its hash."""
    np.save(folder / name, array)
    written(folder, name, (folder / name).read_bytes())


def written(folder, name, contents):
    """Write other contents, with their hash."""
    (folder / name).write_bytes(contents)
    facts = json.loads((folder / STORE).read_text())
    facts["sha256"][name] = file_hash(folder / name)
    (folder / STORE).write_text(json.dumps(facts))


def flip(folder):
    data = bytearray((folder / ORDER).read_bytes())
    data[-1] ^= 1
    (folder / ORDER).write_bytes(data)


def facts_of(**changes):
    def change(folder):
        facts = json.loads((folder / STORE).read_text())
        (folder / STORE).write_text(json.dumps(facts | changes))

    return change


DAMAGES = {
    "a byte": (flip, ORDER),
    "a missing field": (lambda folder: (folder / STORE).write_text("{}"), "format is missing"),
    "another format": (facts_of(format=2), "format must be one of 1"),
    "other facts": (facts_of(tokens=3), "shape .3,."),
    "a position after the end": (lambda folder: rewritten(folder, ORDER, np.array([2, 99], np.uint32)), "outside"),
    "a position before the start": (lambda folder: rewritten(folder, ORDER, np.array([0, 1], np.uint32)), "outside"),
    "another type": (lambda folder: rewritten(folder, ORDER, np.array([2, 3], np.int16)), "int16"),
    "another shape": (lambda folder: rewritten(folder, ORDER, np.zeros((1, 2), np.uint32)), ORDER),
    "a pickle": (lambda folder: rewritten(folder, TOKENS, np.array([{}], object)), f"{TOKENS} is no array"),
    "a table that falls": (lambda folder: rewritten(folder, FIRST, np.array([0, 2, 1, 2, 2])), "must rise"),
    "no separator": (lambda folder: rewritten(folder, TOKENS, np.array([1, 1, 2, 3, 4], np.uint16)), "separator"),
    "an archive": (lambda folder: written(folder, ORDER, b"PK\x03\x04garbage"), "no array"),
    "a huge shape": (lambda folder: written(folder, ORDER, header(f"({10**30},)")), "no array"),
    "an open header": (lambda folder: written(folder, ORDER, header("(" * 3000)), "no array"),
    "a deep header": (lambda folder: written(folder, ORDER, header(f"({'-' * 9000}1,)")), "no array"),
    "a token beyond": (lambda folder: rewritten(folder, TOKENS, np.array([4, 1, 7, 3, 4], np.uint16)), "token 7"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_store_is_refused(tmp_path, name):
    made(tmp_path / "out", [[1, 2, 3]], 4)
    damage, message = DAMAGES[name]
    damage(tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        TokenStore.open(str(tmp_path / "out"), target_of(4))


def test_a_store_of_others_is_refused(tmp_path):
    made(tmp_path / "out", [[1, 2, 3]], 4)
    with pytest.raises(ValueError, match="another tokenizer than that of target 'toy'"):
        TokenStore.open(str(tmp_path / "out"), target_of(5))
    with pytest.raises(ValueError, match="token 3, but the target has 3 tokens"):
        TokenStore.open(str(tmp_path / "out"), target_of(4, more=-1))
    with pytest.raises(FileNotFoundError, match="spec-lab index"):
        TokenStore.open(str(tmp_path), target_of(4))
    with pytest.raises(ValueError, match="store"):
        Suffix.load(target_of(4), store=3)


def test_nothing_is_left_of_a_store_that_cannot_be_built(tmp_path):
    with pytest.raises(ValueError, match="two tokens"):
        build_tokens([[1], [2]], 4, "", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="no folder"):
        build_tokens([[1, 2]], 4, "", tmp_path / "none" / "out")
    assert list(tmp_path.iterdir()) == []
    with pytest.MonkeyPatch.context() as patch:
        (tmp_path / "empty").mkdir()
        patch.chdir(tmp_path / "empty")
        before = Path.cwd().stat().st_ino
        assert build_tokens([[1, 2]], 4, "", Path(".")).documents == 1
        assert (tmp_path / "empty").stat().st_ino == before, "it is still the shell's folder"
        assert {file.name for file in Path.cwd().iterdir()} == {FIRST, ORDER, STORE, TOKENS}
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(FileExistsError, match="not empty"):
        build_tokens([[1, 2]], 4, "", tmp_path / "full")


def test_rest_drafts_a_tree_and_is_lossless(tmp_path):
    made(tmp_path / "out", [[1, 2, 3, 3], [0, 1, 2, 3, 0], [1, 2, 0]], 4)
    options = {"min_match": 2, "children": 64, "factor": 0.0, "offset": 64, "nodes": 64, "min_share": 0.0, "own": False}
    rest = Suffix.load(target_of(4), store=str(tmp_path / "out"), name="rest", **options)
    sequence = SimpleNamespace(tokens=[1, 2], state=rest.init(None))
    draft = rest.propose(SimpleNamespace(sequences=[sequence], device="cpu", room=lambda: [99], recorded=False))
    assert draft.token.tolist() == [3, 0, 0, 3] and draft.shape.parent.tolist() == [0, 0, 1, 1]
    assert rest.sha256 and rest.facts["store"]["documents"] == 3
    proof = prove(rest, Token(), QUICK)
    assert proof.failure is None and not proof.missing and proof.drafts == "proposer"


def test_the_command_builds_a_store_for_a_target(tmp_path, capsys):
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "out"
    texts = ["def main():\n    return 1\n", "def main(argv):\n    return 2\n"]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert command(["index", str(corpus), str(out), "--tokenizer", str(ZOO)]) == 0
    assert "2 documents" in capsys.readouterr().out
    from spec_lab.models.loading import describe, read_texts

    tokenizer, _ = read_texts(str(ZOO), describe(str(ZOO)))
    target = SimpleNamespace(name="zoo", tokenizer=tokenizer, vocabulary=len(tokenizer))
    store = TokenStore.open(str(out), target)
    tokens = tokenizer(texts, add_special_tokens=False)["input_ids"]
    separator = len(store.first) - 1
    assert store.tokens.tolist() == [separator, *tokens[0], separator, *tokens[1], separator]
    assert command(["index", str(corpus), str(out), "--tokenizer", str(ZOO)]) == 1
    assert "not empty" in capsys.readouterr().err
    corpus.write_text('{"prompt": "x"}\n')
    assert command(["index", str(corpus), str(tmp_path / "more"), "--tokenizer", str(ZOO)]) == 1
    assert "corpus.jsonl:1: the field 'text' is missing" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "out"]
