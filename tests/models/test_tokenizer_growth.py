"""A tokenizer.json that makes texts too long is refused before it is loaded: the library would not return."""

import base64
import json
import shutil

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from spec_lab.cli.bundled import zoo
from spec_lab.models import gguf_tokenizer
from spec_lab.models.gguf_tokenizer import HF_JSON, read_gguf_tokenizer
from spec_lab.models.tokenizer import read_tokenizer
from spec_lab.models.tokenizer_growth import CONSUMING, TooLong, check_growth, growth


def described(**parts) -> dict:
    made = Tokenizer(models.BPE())
    for name, part in parts.items():
        setattr(made, name, part)
    return json.loads(made.to_str())


TWICE = normalizers.Replace("a", "aa")
HOSTILE = {
    "normalizer": {"normalizer": normalizers.Sequence([TWICE] * 60)},
    "nested": {"normalizer": normalizers.Sequence([normalizers.Sequence([TWICE] * 8)] * 8)},
    "one": {"normalizer": normalizers.Replace("a", "b" * 10_000)},
    "regex": {"normalizer": normalizers.Sequence([normalizers.Replace(Regex("(?=a)"), "a")] * 60)},
    "bytes": {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 60)},
    "both": {
        "normalizer": normalizers.Sequence([TWICE] * 7),
        "pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 6),
    },
    "decoder": {"decoder": decoders.Sequence([decoders.Replace("a", "aa")] * 60)},
    "suffix": {"decoder": decoders.Sequence([decoders.BPEDecoder("")] * 60)},
    "tokens": {
        "post_processor": processors.Sequence(
            [processors.TemplateProcessing(single="$A $A", pair="$A $B", special_tokens=[])] * 60
        )
    },
}


UNTYPED = {"pattern": {"String": "a"}, "content": "aa"}  # the library reads it by its fields
PRECOMPILED = {"type": "Precompiled", "precompiled_charsmap": "x"}
UNKNOWN = {
    "untyped": {"type": "Sequence", "normalizers": [UNTYPED] * 60},
    "untyped sequence": {"normalizers": [{"type": "Replace", **UNTYPED}] * 60},
    "fields in a list": {"type": "Sequence", "normalizers": [[{"String": "a"}, "aa"]] * 60},
    "sequence in a list": [[{"type": "Replace", **UNTYPED}] * 60],
    "number": 3,
    "undecodable": PRECOMPILED,
    "undecodable and long": {"type": "Sequence", "normalizers": [{"type": "Replace", **UNTYPED}] * 60 + [PRECOMPILED]},
}


@pytest.mark.parametrize("how", UNKNOWN)
def test_a_part_whose_factor_is_not_known_is_refused(how):
    with pytest.raises(TooLong, match="here is refused: how much longer its normalizer makes a text is not known"):
        check_growth(json.dumps({"decoder": None, "normalizer": UNKNOWN[how]}), "here")


@pytest.mark.parametrize("how", HOSTILE)
def test_a_tokenizer_that_makes_texts_too_long_is_refused_by_its_part(tmp_path, how):
    folder = shutil.copytree(zoo("target"), tmp_path / "target")
    held = json.loads((folder / "tokenizer.json").read_text())
    parts = {name: described(**HOSTILE[how])[name] for name in HOSTILE[how]}
    (folder / "tokenizer.json").write_text(json.dumps(held | parts))
    named = {"normalizer": "normalizer and pre_tokenizer", "pre_tokenizer": "normalizer and pre_tokenizer"}
    part = next(iter(parts))
    with pytest.raises(TooLong, match=rf"target/tokenizer\.json is refused: its {named.get(part, part)} can"):
        read_tokenizer(str(folder), folder, None)


def test_it_is_refused_in_a_gguf_file(tmp_path, monkeypatch):
    class File:
        path, metadata = tmp_path / "a.gguf", {HF_JSON: json.dumps(described(**HOSTILE["normalizer"]))}

    monkeypatch.setattr(gguf_tokenizer, "Tokenizer", None)  # is not called
    with pytest.raises(TooLong, match=r"a\.gguf: tokenizer\.huggingface\.json is refused"):
        read_gguf_tokenizer(File())


def test_published_normalizers_are_allowed():
    """Those of ALBERT, T5, Llama 2, CLIP and a byte-level BPE, as transformers converts them."""
    forms = base64.b64encode((4).to_bytes(4, "little") + b"trie" + b"x\0" + b"y" * 33 + b"\0").decode()
    precompiled = {"type": "Precompiled", "precompiled_charsmap": forms}
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    meta = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    albert = [{"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, precompiled]
    for sequence, most in ((albert, 1452), ([precompiled, spaces], 99 * 4)):
        text = {"normalizer": {"type": "Sequence", "normalizers": sequence}, "pre_tokenizer": meta}
        assert growth(text["normalizer"]) * growth(meta) == most
        check_growth(json.dumps(text), "here")
    llama = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    check_growth(json.dumps(described(normalizer=llama, decoder=decoders.Sequence(parts))), "here")
    clip = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    assert growth(described(normalizer=normalizers.Sequence(clip * 5))["normalizer"]) == 4**5
    bert = processors.TemplateProcessing(single="[C] $A [C]", pair="$A [C] $B", special_tokens=[("[C]", 1)])
    assert growth(described(post_processor=bert)["post_processor"]) == 1


@pytest.mark.parametrize("part", [normalizers.Replace("a", "bbb"), normalizers.Replace("aa", "bbb"),
                                  normalizers.Replace(Regex("a*"), "bb"), normalizers.Replace(Regex(r"(?=\w)"), "é"),
                                  normalizers.Replace(Regex(r"\w{1,2}"), "bbb"), normalizers.Replace("", "xy"),
                                  normalizers.NFKD(), normalizers.NFD(), normalizers.ByteLevel()])  # fmt: skip
def test_no_text_grows_by_more_than_the_factor(part):
    factor = growth(described(normalizer=part)["normalizer"])
    for text in ("a" * 99, "ab" * 50, "\ufdfa" * 50, "ǟé" * 50, "𝄞 " * 50):
        size = len(text.encode())
        assert len(part.normalize_str(text).encode()) <= factor * (size + 1)  # +1: a match at the end


@pytest.mark.parametrize("pattern", ["", "a|", "a*", "a?", "(?=a)", r"\b", "^", "$", "a{0,1}", "()", r"\A▁", "[]"])
def test_a_pattern_that_can_match_nothing_is_known(pattern):
    assert not CONSUMING.fullmatch(pattern)
