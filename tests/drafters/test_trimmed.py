"""Trimmed vocabularies: every family drafts from q over the chosen tokens, by their rows of the LM head alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from spec_lab.core.options import WrongOption
from spec_lab.drafters.block.propose import BlockDrafter
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.drafters.eagle import propose as eagle
from spec_lab.drafters.hydra.propose import Hydra
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.drafters.mtp import propose as mtp
from spec_lab.drafters.pard.propose import Pard
from spec_lab.drafters.peagle.propose import PEagleDrafter
from spec_lab.drafters.trimmed import chosen_tokens
from spec_lab.propose.suffix_build import build
from tests.drafters.block_drafters import dflash2, domino, dspark
from tests.drafters.eagle_heads import eagle1, eagle3, written
from tests.drafters.hydra_heads import hydra
from tests.drafters.medusa_heads import authors, vllm
from tests.drafters.mtp_modules import modules
from tests.drafters.small_tokenizers import PROSE, byte_level
from tests.drafters.test_peagle import peagle
from tests.propose.lab import WARM, decode, emitted, expanded, plain_greedy, requests, steps_after_texts
from tests.tiny import VOCABULARY, tiny_model, tiny_target

H, LAYERS = 32, 4
KEPT = [1, 3, 5, 8, 14, 26, 31, 34, 41, 50, 55]
IDS = [3, 5, 6, 8, 13, 14, 15, 21, 26, 31, 34, 41, 50, 55, 57, 60]
HEADS = {
    "EAGLE-1": (eagle.load, eagle1(H, VOCABULARY)),
    "EAGLE-3 with a table": (eagle.load, eagle3(H, VOCABULARY, IDS)),
    "EAGLE-3 of all tokens": (eagle.load, eagle3(H, VOCABULARY)),
    "P-EAGLE": (PEagleDrafter.load, peagle()),
    "MTP": (mtp.load, modules(H, VOCABULARY, "deepseek", LAYERS, 2)),
    "MTP with LM heads": (mtp.load, modules(H, VOCABULARY, "deepseek", LAYERS, 2, head=True)),
    "Hydra": (Hydra.load, hydra(H, VOCABULARY)),
    "Hydra with the target's LM head": (Hydra.load, hydra(H, VOCABULARY, shared=True)),
    "DSpark": (BlockDrafter.load, dspark(H, VOCABULARY, mask=60)),
    "Domino": (BlockDrafter.load, domino(H, VOCABULARY)),
}


@pytest.fixture(scope="module")
def target():
    return replace(tiny_target(num_hidden_layers=LAYERS), stops=frozenset({1}))


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """A file of the tokens without the end-of-text token, which is kept all the same."""
    file = tmp_path_factory.mktemp("tokens") / "tokens.txt"
    file.write_text("\n".join(map(str, KEPT[:0:-1])) + "\n")
    return str(file)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: written(tmp_path_factory.mktemp("head"), *head) for name, (_, head) in HEADS.items()}


def stated(target, proposer):
    """The distributions of all drafts, by the text above them."""
    q = {}
    for info, before in steps_after_texts(target, proposer, requests(WARM, new=4)):
        for row, _, text, _ in expanded(info.draft, before):
            q[tuple(text)] = info.draft.q[info.draft.q_row[row]]
    return q


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.one_in(5)
def test_q_is_that_of_all_tokens_over_those_that_are_kept(target, folders, listed, name):
    load, _ = HEADS[name]
    whole = load(target, folders[name], tree="1x1", drawn="iid")
    cut = load(target, folders[name], tree="1x1", drawn="iid", tokens=listed)
    compared = 0
    known = stated(target, whole)
    for text, q in stated(target, cut).items():
        assert set(q.nonzero()[:, 0].tolist()) <= set(KEPT)
        if (whole_q := known.get(text)) is not None:
            expected = torch.zeros_like(whole_q).index_copy(0, torch.tensor(KEPT), whole_q[KEPT])
            torch.testing.assert_close(q, expected / expected.sum(), rtol=0, atol=1e-9)
            compared += 1
    assert compared >= 3
    drafted = IDS if "table" in name or name == "P-EAGLE" else range(VOCABULARY)
    assert cut.network.ids.tolist() == [token for token in drafted if token in KEPT]
    assert cut.facts["drafted_share"] == len(cut.network.ids) / VOCABULARY and "drafted_tokens" not in whole.facts
    assert cut.sha256 != whole.sha256


def test_candidates_are_chosen_among_the_kept_tokens(target, tmp_path, listed):
    folder = written(tmp_path, *dflash2(H, VOCABULARY, candidates=5))
    cut = BlockDrafter.load(target, folder, tree="1x1", drawn="iid", tokens=listed)
    for q in stated(target, cut).values():
        assert len(q.nonzero()) == 5 and set(q.nonzero()[:, 0].tolist()) <= set(KEPT)


@pytest.mark.parametrize("head", [authors(H, VOCABULARY), vllm(H, VOCABULARY, tokens=IDS)], ids=["all", "map"])
def test_medusa_heads_draft_the_likeliest_kept_tokens(target, tmp_path, listed, head):
    folder = written(tmp_path, *head)
    cut, whole = (Medusa.load(target, folder, tree="2x1", **more).heads for more in ({"tokens": listed}, {}))
    hidden = torch.randn(3, H, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits, every = cut(hidden, torch.tensor([1, 2, 3])), whole(hidden, torch.tensor([1, 2, 3]))
    kept = [token for token in KEPT if cut.tokens == len(KEPT) or token in IDS]
    torch.testing.assert_close(logits[..., kept], every[..., kept])
    assert int((logits > -torch.inf).sum(-1).max()) == len(kept) == cut.tokens


def draft_folder(path, **changes):
    tiny_model(seed=1, num_hidden_layers=1, **changes).save_pretrained(path)
    byte_level(PROSE, 20).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def texts():
    tokenizer = byte_level(PROSE, 20)
    return replace(tiny_target(vocab_size=len(tokenizer)), tokenizer=tokenizer)


@pytest.mark.parametrize("kind", ["chain", "tree", "PARD"])
def test_a_draft_model_computes_the_kept_rows_only(texts, tmp_path, kind):
    folder, tokens = draft_folder(tmp_path, vocab_size=texts.vocabulary), f"{tmp_path / 'counts.txt'}:40"
    (tmp_path / "counts.txt").write_text("".join(f"{token} {token % 97}\n" for token in range(texts.vocabulary)))
    load = DraftModel.load
    options = {"tree": "2x1", "drawn": "without_replacement", "temperature": 1.0} if kind == "tree" else {"depth": 3}
    if kind == "PARD":
        load, options = Pard.load, {"depth": 3, "mask_token": 7}
    cut, whole = load(texts, folder, tokens=tokens, **options), load(texts, folder, **options)
    wanted = requests(new=12)
    group, steps = decode(texts, cut, wanted)
    assert emitted(group) == [plain_greedy(texts.lm.model, request.tokens, 12) for request in wanted]
    kept = set(chosen_tokens(tokens, texts).tolist()) - ({7} if kind == "PARD" else set())
    drafted = {int(token) for info in steps for token in info.draft.token}
    assert drafted and drafted <= kept and len(kept) in (40, 41)
    assert cut.lm.work.logits_flops == 2 * H * len(kept)
    assert whole.lm.work.weight_bytes - cut.lm.work.weight_bytes == (texts.vocabulary - len(kept)) * H * 8
    assert cut.facts["drafted_tokens"] == len(kept)


# Which tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count", "kept"),
    [("5\n2\n9\n", "", [1, 2, 5, 9]), ("5\n2\n9\n", ":2", [1, 2, 5]), ("5 3\n2, 10\n9\t4\n7 0\n", "", [1, 2, 5, 9]),
     ("5 3\n2 10\n9 4\n", ":2", [1, 2, 9])],
)  # fmt: skip
def test_files_list_tokens_in_order_or_with_counts(target, tmp_path, text, count, kept):
    (tmp_path / "tokens").write_text(text)
    assert chosen_tokens(f"{tmp_path / 'tokens'}{count}", target).tolist() == kept


def test_a_number_means_the_first_tokens_and_stop_tokens(target):
    assert chosen_tokens(3, replace(target, stops=frozenset({60}))).tolist() == [0, 1, 2, 60]


def test_a_store_of_texts_is_counted(texts, tmp_path):
    build(iter([PROSE, PROSE[:50]]), texts.tokenizer, tmp_path / "store")
    ids = [
        token for text in (PROSE, PROSE[:50]) for token in texts.tokenizer(text, add_special_tokens=False)["input_ids"]
    ]
    counts = np.bincount(ids, minlength=texts.vocabulary)
    best = set(np.argsort(-counts, kind="stable")[:10].tolist())
    assert set(chosen_tokens(f"{tmp_path / 'store'}:10", texts).tolist()) == best | texts.ends
    assert len(chosen_tokens(str(tmp_path / "store"), texts)) == len({*ids} | texts.ends)


@pytest.mark.parametrize(
    ("text", "count", "message"),
    [
        ("5\nx\n", "", "line 2 is 'x'"),
        ("5\n5\n", "", "different tokens"),
        ("500\n", "", "numbers from 0 to 60"),
        ("5 3\n2\n", "", "or of none"),
        ("", "", "different tokens"),
        ("5\n", ":2", "asks for 2 tokens, but there are only 1"),
        ("5\n", ":0", "names no token"),
    ],
)
def test_wrong_files_are_refused(target, tmp_path, text, count, message):
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(WrongOption, match=message):
        chosen_tokens(f"{tmp_path / 'tokens'}{count}", target)


def test_a_head_that_drafts_none_of_the_tokens_is_refused(target, folders, tmp_path):
    (tmp_path / "tokens").write_text("2\n")
    with pytest.raises(WrongOption, match="tokens names none of the 16 tokens"):
        eagle.load(target, folders["EAGLE-3 with a table"], depth=2, tokens=str(tmp_path / "tokens"))


def test_a_tree_wider_than_what_is_left_is_refused(target, folders, tmp_path):
    (tmp_path / "tokens").write_text("3\n5\n")
    with pytest.raises(WrongOption, match="vocabulary of 2"):
        eagle.load(
            target, folders["EAGLE-3 with a table"], tree="3x1", drawn="deterministic", tokens=str(tmp_path / "tokens")
        )
