"""Small tokenizers of different kinds, trained on a few sentences."""

import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

PROSE = (
    "The theory of the thing is that this other thing is there. Then they thought: 'naïve café'? It is what it is. "
    "Nothing there was theirs, neither the north nor the other; in 2024 they met, and then it ended."
)
CODE = (
    "def f(x):\n    return [x for x in range(10) if x.there]\n\nclass Thing(Other):\n    def there(self):\n"
    "        return self.thing + 'é'\n    def other(self, thing):\n        return thing[0] if thing else None\n"
)


def byte_level(text, merges, special=("<s>", "</s>"), begin=False, **names):
    """Byte-level BPE with all bytes, and so many merges; special tokens come first."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator([text] * 3, trainers.BpeTrainer(
        vocab_size=len(special) + len(alphabet) + merges, initial_alphabet=alphabet, special_tokens=list(special),
        show_progress=False,
    ))  # fmt: skip
    return wrapped(inner, begin, **{"bos_token": "<s>", "eos_token": "</s>"} | names)


def sentencepiece(text, merges, begin=True, **names):
    """BPE in the manner of Llama 2: spaces are "▁", one is put before a text, missing characters are spelled by bytes.

    Only ASCII has characters of its own.
    """
    plain = "".join(character if character.isascii() else "" for character in text).replace("\n", "").replace(" ", "▁")
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator([plain] * 3, trainers.BpeTrainer(vocab_size=120 + merges, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    letters = ["▁", *map(chr, range(33, 127))]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    tokens += [token for token in model["vocab"] if token not in letters][:merges]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    kept = [tuple(pair) for pair in model["merges"] if "".join(pair) in vocabulary]
    inner = Tokenizer(models.BPE(vocabulary, kept, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return wrapped(inner, begin, **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | names)


def wrapped(inner, begin, **names):
    """The tokenizer as transformers'; with ``begin`` texts begin with <s>."""
    if begin:
        special = [("<s>", inner.token_to_id("<s>"))]
        inner.post_processor = processors.TemplateProcessing(single="<s>:0 $A:0", special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def letters(tokens, end="</s>"):
    """BPE over a few letters. Every token of two is a merge; longer ones occur in no text."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [(token[0], token[1]) for token in tokens if len(token) == 2]
    inner = Tokenizer(models.BPE(vocabulary, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([end])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=end)
