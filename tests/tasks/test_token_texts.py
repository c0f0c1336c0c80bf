"""The texts of tokens that a run keeps for its report."""

from types import SimpleNamespace

from spec_lab.tasks.token_texts import MAX_LETTERS, TokenTexts, token_rows

NAMES = {0: "<|end|>", 7: "seven"}
TOKENIZER = SimpleNamespace(decode=lambda tokens: NAMES.get(tokens[0], "\ud800"))


def test_a_token_s_text_is_that_of_its_bytes_or_its_name():
    texts = TokenTexts(TOKENIZER, [b"", b" a", "é".encode(), b"\xe2\x82", b"x" * 100])
    assert [texts.text(token) for token in (0, 1, 2, 3)] == ["<|end|>", " a", "é", r"\xe2\x82"]
    assert len(texts.text(4)) == MAX_LETTERS and texts.text(4).endswith("x…")
    assert texts.text(7) == "seven"  # beyond the known bytes
    assert texts.text(9).encode() == rb"\ud800"  # what no table could hold


def test_without_bytes_the_tokenizer_decodes():
    assert TokenTexts(TOKENIZER, None).text(7) == "seven"
    assert TokenTexts.of(SimpleNamespace(name="of words", tokenizer=TOKENIZER)).text(0) == "<|end|>"


def test_every_token_of_the_steps_has_one_row():
    steps = [{"draft_tokens": [7, 7], "emitted_tokens": [0]}, {"draft_tokens": [], "emitted_tokens": [7]}, {}]
    rows = token_rows(3, steps, TokenTexts(TOKENIZER, None))
    assert [(row["id"], row["group"], row["token"], row["text"]) for row in rows] == [
        ("3/0", 3, 0, "<|end|>"),
        ("3/7", 3, 7, "seven"),
    ]
