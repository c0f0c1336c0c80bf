"""Tokens a draft model with another tokenizer reads and may draft, written from the definitions: whole texts at once.

Tokens are spelled by hand: byte-level BPE writes every byte as one character, sentencepiece writes spaces as "▁" and
bytes without a token as <0xNN>.
"""

import re
from functools import cache

import torch


def alphabet():
    """The character of byte-level BPE for each byte (GPT-2's table), reversed."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(other)}


ALPHABET = alphabet()


class Spelled:
    """The bytes of a tokenizer's ordinary tokens; None for special ones.

    ``theirs`` holds the token of each bytes that the tokenizer prefers.
    """

    def __init__(self, tokenizer):
        names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self.spaced = "▁" in names
        special = set(tokenizer.all_special_ids)
        fallback = [self.spaced and re.fullmatch("<0x..>", name) is not None for name in names]
        self.bytes = [
            None if token in special
            else bytes([int(name[3:5], 16)]) if fallback[token]
            else name.replace("▁", " ").encode() if self.spaced
            else bytes(ALPHABET[character] for character in name)
            for token, name in enumerate(names)
        ]  # fmt: skip
        self.token = {}
        for token in sorted(range(len(names)), key=lambda number: (fallback[number], number)):
            if self.bytes[token]:
                self.token.setdefault(self.bytes[token], token)


spelled = cache(Spelled)


def shared(target, draft):
    """The pairs of ordinary tokens that both have, ``{target: draft}``."""
    mine, theirs = spelled(target).token, spelled(draft).token
    return {token: theirs[data] for data, token in mine.items() if data in theirs}


def characters(data):
    """A text's whole characters, and the bytes that belong to none."""
    at = 0
    while at < len(data):
        for size in (1, 2, 3, 4):
            try:
                yield data[at : at + size].decode()
                break
            except UnicodeDecodeError:
                continue
        else:
            yield data[at]
            size = 1
        at += size


def read(target, draft, tokens, special=()):
    """The draft model's tokens of a text given in the target's. ``special``: pairs that mean the same in both."""
    ids = draft("a")["input_ids"][: -len(draft("a", add_special_tokens=False)["input_ids"])]
    tokens = list(tokens)
    if tokens and tokens[0] == target.bos_token_id:
        tokens = tokens[1:]
    mine, theirs, runs = spelled(target), spelled(draft), [(b"", None)]
    for token in tokens:
        data = mine.bytes[token]
        runs[-1:] = [(runs[-1][0] + data, None)] if data is not None else [(runs[-1][0], token), (b"", None)]
    spaced = mine.spaced
    for data, end in runs:
        if data:
            data, spaced = data[1:] if spaced and data[:1] == b" " else data, False
        text = ""
        for character in [*characters(data), None]:
            if isinstance(character, str):
                text += character
                continue
            if text:
                piece = text[1:] if theirs.spaced and text[0] == " " else text
                ids += draft.backend_tokenizer.encode(piece, add_special_tokens=False).ids if piece else []
                text = ""
            if character is not None and bytes([character]) in theirs.token:
                ids.append(theirs.token[bytes([character])])
        if end in dict(special):
            ids.append(dict(special)[end])
    return ids


def logits(model, tokens, pairs, vocabulary):
    """The draft model's logits after its ``tokens``, as logits over the target's: a plain forward without a cache."""
    with torch.no_grad():
        draft_logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    values = torch.full((vocabulary,), -torch.inf, dtype=draft_logits.dtype)
    for mine, theirs in pairs.items():
        values[mine] = draft_logits[theirs]
    return values
