"""Which columns each unroll computes: those from which something is learned, with the same results as all columns."""

import torch

from spec_lab.runners.attention import AttentionKind
from spec_lab.runners.softmax import Softmax
from spec_lab.train.texts import Texts
from spec_lab.train.unroll import Unrolls, columns_of, packed
from tests.train.test_recipes import RECIPES, begun, target  # noqa: F401
from tests.train.texts import texts

FLOAT = torch.float64


def test_columns_are_those_where_this_unroll_or_a_later_one_is_learned():
    text = Texts(torch.zeros(2, 8, dtype=torch.long), torch.tensor([4, 5]), torch.tensor([8, 7]))
    columns = columns_of(text.counts(1), 3)
    # Unroll k in column j is learned if the text has token j + 2 + k and the target wrote it.
    assert [level.tolist() for level in columns[1:]] == [
        [[0, 1, 2, 3, 4], [1, 2, 3, -1, -1]],
        [[0, 1, 2, 3], [1, 2, -1, -1]],
    ]
    assert columns[0].tolist() == [[*range(7)]] * 2
    assert packed(torch.zeros(2, 0).bool()).shape == (2, 0)


def test_rows_of_a_narrowed_unroll_attend_as_all_rows_do():
    def random(*shape):
        return torch.randn(shape, dtype=FLOAT, generator=generator)

    generator = torch.Generator().manual_seed(0)
    keys = [random(2, 1, 6, 4) for _ in range(3)]
    query = random(2, 2, 6, 4)
    every, some = Unrolls(), Unrolls()
    for key in keys:
        reader, _ = every.update(key, key, 0)
    whole = reader.attend(query, Softmax())
    first, second = torch.tensor([[1, 2, 4, 5], [0, 3, -1, -1]]), torch.tensor([[2, 5], [3, -1]])
    some.update(keys[0], keys[0], 0)
    (narrow,) = some.narrowed(first, keys[1].transpose(1, 2))
    some.update(narrow.transpose(1, 2), narrow.transpose(1, 2), 0)
    some.narrowed(second)
    rows = second.clamp_min(0)[:, None, :, None].expand(-1, 1, -1, 4)
    reader, _ = some.update(keys[2].gather(2, rows), keys[2].gather(2, rows), 0)
    mixed = reader.attend(query.gather(2, rows.expand(-1, 2, -1, -1)), Softmax())
    for row, place in (second >= 0).nonzero().tolist():
        torch.testing.assert_close(mixed[row, place], whole[row, second[row, place]])


def test_windows_of_unrolls_end_at_their_columns():
    """Unroll k attends to W columns up to its own, and to all unrolls before it there."""
    unrolls, kind = Unrolls({0: AttentionKind(2, anchored=True)}), AttentionKind(2)
    for _ in range(3):
        reader, _ = unrolls.update(torch.zeros(1, 1, 5, 4, dtype=FLOAT), torch.zeros(1, 1, 5, 4, dtype=FLOAT), 0)
    band = [[int(0 <= query - key < 2) for key in range(5)] for query in range(5)]
    assert (reader.mask[0, 0] == 0).int().tolist() == band and reader.private_mask.tolist() == [[0, 0]]
    unrolls.kinds = {0: kind}  # windows that end at each row: unroll 3 is at position j + 3
    reader, _ = unrolls.update(torch.zeros(1, 1, 5, 4, dtype=FLOAT), torch.zeros(1, 1, 5, 4, dtype=FLOAT), 0)
    assert not bool((reader.mask == 0).any()) and reader.private_mask.tolist() == [[-torch.inf, 0, 0]]


def test_p_eagle_learns_later_levels_in_fewer_columns(target, tmp_path):  # noqa: F811
    started = begun(RECIPES["peagle"], target, tmp_path)
    text, drafts = texts(target, 2, 40, states=RECIPES["peagle"].states(target)), started.objective.drafts
    hidden = text.hidden.double()
    sampled, again = (list(drafts.states(text, hidden, hidden)) for _ in range(2))
    started.module.eval()
    every = list(drafts.states(text, hidden, hidden))
    kept = [
        int((columns >= 0).sum()) / int((all_columns >= 0).sum())
        for (_, columns), (_, all_columns) in zip(sampled, every, strict=True)
    ]
    assert kept[0] == 1 and 0.6 < kept[1] < 0.8 and 0.4 < kept[2] < 0.6
    for (states, columns), (same, _), (whole, all_columns) in zip(sampled, again, every, strict=True):
        assert torch.equal(states, same)
        for row, place in (columns >= 0).nonzero().tolist():
            there = all_columns[row].tolist().index(int(columns[row, place]))
            torch.testing.assert_close(states[row, place], whole[row, there])
