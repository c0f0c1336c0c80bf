"""Every token has the bytes that the tokenizer decodes it to; the byte FF, with which llguidance marks tokens, too."""

import pytest
from transformers import AutoTokenizer

from spec_lab.cli.main import zoo
from spec_lab.constrain.vocabulary import Vocabulary, token_bytes
from spec_lab.text.detokenizer import Rules, plain
from tests.drafters.small_tokenizers import PROSE, byte_level, sentencepiece

BYTES = [bytes([byte]) for byte in range(256)]
BYTE_LEVEL = {"bundled": lambda: AutoTokenizer.from_pretrained(zoo("target")), "small": lambda: byte_level(PROSE, 40)}


@pytest.mark.parametrize("tokenizer", [*BYTE_LEVEL.values(), lambda: sentencepiece(PROSE, 40)])
def test_each_of_the_256_bytes_is_a_token(tokenizer):
    backend = tokenizer()
    assert {*BYTES} <= {*token_bytes(backend, len(backend), backend.all_special_ids)}


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_a_byte_between_the_halves_of_a_character_decodes_as_by_the_tokenizer(name):
    tokenizer = BYTE_LEVEL[name]()
    pieces = token_bytes(tokenizer, len(tokenizer), tokenizer.all_special_ids)
    first, last = pieces.index(b"\xc3"), pieces.index(b"\xa9")
    for byte in BYTES:
        tokens = [first, pieces.index(byte), last]
        assert plain(pieces, tokens, Rules()) == tokenizer.decode(tokens), byte
    assert tokenizer.decode([first, pieces.index(b"\xff"), last]) == "\ufffd" * 3


def test_tokens_that_begin_with_the_byte_ff_have_bytes_and_special_ones_none():
    tokens = [b"<end>", b"a", b"\xff", b"\xff\xfe"]
    assert Vocabulary.plain(tokens, 0).bytes == [b"", *tokens[1:]]
    tokenizer = byte_level(PROSE, 0)
    tokenizer.add_tokens(["ÿ?"])
    data = token_bytes(tokenizer, len(tokenizer), ())
    assert data[0] == b"" and data[-1] == b"\xff?"
    assert tokenizer.decode([len(tokenizer) - 1]) == "\ufffd?", "added tokens are spelled as others are"
