"""Training of block drafters: the losses are those of plain forwards of blocks, at anchors that are drawn once."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy

from spec_lab.drafters.block.texts import draw_anchors
from spec_lab.drafters.block.train import BlockRecipe
from tests.oracles import block as oracle
from tests.tiny import VOCABULARY
from tests.train.test_recipes import RECIPES, SIZES, begun, embedding, lm_head, published, target  # noqa: F401
from tests.train.texts import texts

BLOCKS = {name: recipe for name, recipe in RECIPES.items() if name.startswith("block")}
WIDTH = 32


def level(recipe, w, target, ids, hidden, anchor, k):  # noqa: F811
    """Logits ``[W]`` of a level before and after the head's correction, and its row's normed output, by the oracle."""
    parts, taps = (embedding(target), lm_head(target)), hidden[:anchor, :-WIDTH]
    block = int(ids[anchor]), VOCABULARY - 1, recipe.block_size
    kinds = [(recipe.window, recipe.causal)] * recipe.layers
    normed, logits = oracle.rows(w, *parts, taps, *block, SIZES, 10000.0, kinds=kinds)
    path = ids[anchor : anchor + 1 + k].tolist()
    row = k if recipe.predicts_next else k + 1
    fields = parts[0], 1, recipe.candidates
    return logits[row], oracle.level(w, normed, logits, path, recipe.predicts_next, *fields), normed[row]


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_the_loss_of_every_level_is_that_of_plain_forwards(name, target, tmp_path):  # noqa: F811
    recipe = BLOCKS[name]
    started, text = begun(recipe, target, tmp_path), texts(target, states=recipe.states(target))
    started.module.eval()
    started.objective.advance(0.25)
    loss, measured = started.objective(text)
    w, total, drafted = published(recipe, started.module, target, tmp_path), 0.0, started.module.ids.tolist()
    drafted = drafted or [*range(VOCABULARY)]
    for k, achieved in enumerate(measured):
        rows = []
        for ids, hidden, first, length in zip(text.ids, text.hidden, text.first, text.length, strict=True):
            for anchor in range(max(1, int(first) - 1), int(length) - 1 - k):
                alone, corrected, normed = level(recipe, w, target, ids, hidden, anchor, k)
                every, written = (lm_head(target) @ hidden[anchor + k, -WIDTH:]).softmax(-1), int(ids[anchor + k + 1])
                best, p, known = every.argmax(), every[drafted], written in drafted
                token = drafted.index(written) if known else 0
                q, u = corrected.softmax(-1), alone.softmax(-1)
                alpha, more = torch.minimum(p, q).sum(), 0.0
                value = -(p / p.sum() * u.log()).sum() if recipe.loss == "kl" else -q[token].log()
                if recipe.kind == "domino":
                    value = 0.25 * value + 0.75 * -u[token].log()
                if recipe.l1:
                    value = (1 - recipe.l1) * value + recipe.l1 * (p - q).abs().sum()
                if recipe.kind == "dflash2":
                    more = known * selected(w, alone, normed, ids[anchor + k], token, recipe.candidates)
                if recipe.confidence:
                    more = binary_cross_entropy(oracle.confidence(w, normed, ids[anchor + k])[0], alpha)
                agreed = best == drafted[q.argmax()]
                learned = known if recipe.loss == "ce" else int(best) in drafted
                rows.append([value * learned, alpha, agreed, more, learned])
        sums = torch.tensor(rows, dtype=torch.float64).sum(0)
        expected = sums[:4] / torch.tensor([sums[4], *[len(rows)] * 3])
        torch.testing.assert_close(torch.stack([*achieved[:3]]), expected[:3], rtol=1e-6, atol=1e-8)
        assert achieved.rows == len(rows)
        total += recipe.decay**k * float(expected[0] + expected[3])
    assert float(loss) == pytest.approx(total, rel=1e-6)


def selected(w, logits, normed, above, token, candidates):
    """Cross-entropy of the text's token among the candidates, the last of which it replaces if it is none."""
    kept = logits.argsort(descending=True)[:candidates].tolist()
    kept = kept if token in kept else [*kept[:-1], int(token)]
    read = w["candidate_selector.hidden_projection.weight"] @ normed
    weights = w["candidate_selector.predecessor_codebook"][above] * read
    scores = torch.stack([logits[c] + w["candidate_selector.successor_codebook"][c] @ weights for c in kept])
    return -scores.log_softmax(-1)[kept.index(int(token))]


def test_anchors_are_drawn_once_for_each_text_among_learned_positions(target):  # noqa: F811
    text = texts(target, 3, 20)
    anchors = draw_anchors(text, 4, 0)
    assert anchors.shape == (3, 4) and torch.equal(anchors, draw_anchors(text, 4, 0))
    assert torch.equal(anchors[1:2], draw_anchors(text.rows(slice(1, 2)), 4, 0))
    for row, (first, length) in zip(anchors, zip(text.first, text.length, strict=True), strict=True):
        assert len({*row.tolist()}) == 4
        assert all(max(1, int(first) - 1) <= anchor < int(length) - 1 for anchor in row.tolist())


def test_blocks_learn_a_text_by_heart(target):  # noqa: F811
    """All levels: the text's tokens follow from the position, which the taps tell."""
    recipe = BlockRecipe(kind="dspark", block_size=3, predicts_next=True, layers=1, rank=8, confidence=1.0, taps=(1, 2))
    text = texts(target, 2, 10, first=(1,), states=recipe.states(target))
    training = recipe.begin(target, [], 0)
    optimiser = torch.optim.AdamW(training.module.parameters(), lr=1e-2)
    before = [float(achieved.agreed) for achieved in training.objective(text)[1]]
    for _ in range(30):
        loss, measured = training.objective(text)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(measured[0].loss.detach()) < 0.5 and max(before) < 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "dflash2", "rank": 0}, r"task\.recipe\.rank must be at least 1"),
        ({"confidence": 1.0}, r"task\.recipe\.confidence must be 0 for task\.recipe\.kind=dflash"),
        ({"kind": "dflash2", "draft_vocab_size": 9}, r"task\.recipe\.draft_vocab_size must be null"),
        ({"taps": (1, 1)}, r"task\.recipe\.taps"),
    ],
)
def test_options_that_do_not_suit_the_kind_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BlockRecipe(**options)
