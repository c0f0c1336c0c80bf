"""Compare drafts on small KV caches at long contexts: python -m experiments.long_context.measure.

Prompts of so many tokens are cut from long texts of the training corpus's kind (sources of the standard library), each
once for every length. All proposers are arms of one run beside autoregressive decoding. The same command resumes.

SmolLM2 has a context of 8,192 tokens, of which the output needs some: longer ones are refused, since its rotary
embedding was trained on no later position. ``--target`` names a checkpoint with a larger context, for 16k.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import runs
from scripts.zoo import corpus, prompts

ARMS: dict[str, runs.Arm] = {
    "streaming_llm": ("sparse_kv", {}),
    "snapkv": ("sparse_kv", {"selection": "snapkv"}),
    "triforce": ("triforce", {"inner.depth": 5}),
    "ngram": ("ngram", {"depth": 5}),
}
"""By name. The n-gram proposer drafts alone, and within TriForce; its depth is the same at all contexts."""

LENGTHS = (512, 2048, 4096, 7936)
"""Tokens of the prompts: the longest leaves 256 of SmolLM2's context."""

CHARACTERS = 6
"""Characters of a text per token that is wanted, more than a token has."""


def texts(file: Path, limit: int, longest: int) -> Path:
    """Write prompts that are longer than any length where there is no such file, and return the file.

    Raises:
        ValueError: the corpus has too few texts.
    """
    if not file.is_file():
        held_out = corpus.load_holdout(runs.ZOO / "holdout.json"), prompts.read(runs.ZOO / "prompts")
        made, text = list[str](), ""
        for document in corpus.training(*held_out, {"stdlib": 4 * limit * longest * CHARACTERS}, record_count=1):
            text += document.text + "\n"
            if len(text) > longest * CHARACTERS:
                made, text = [*made, text], ""
            if len(made) == limit:
                break
        if len(made) < limit:
            raise ValueError(
                f"the corpus has {len(made)} texts of {longest} tokens, not {limit}: choose a lower --limit"
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps({"prompt": text, "workload": "code"}) + "\n" for text in made))
    return file


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing.

    Raises:
        CalledProcessError: a command failed; its message is on the terminal.
    """
    parser = runs.parser(__doc__, "outputs/long_context", 4)
    parser.add_argument("--target", help="folder of a checkpoint, or a hub name (SmolLM2, computed by transformers)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help=f"tokens of the prompts {LENGTHS}")
    parser.add_argument("--batches", type=int, nargs="+", default=[1], help="sequences decoded together (1)")
    chosen = parser.parse_args(arguments)
    file = texts(chosen.out.with_name(f"{chosen.out.name}_texts") / "texts.jsonl", chosen.limit, max(chosen.lengths))
    target = ["target=smollm2", "target.engine=transformers"]
    if chosen.target:
        target = ["target=transformers", f"target.path={chosen.target}"]
    swept = (
        f"max_prompt_tokens={','.join(map(str, chosen.lengths))}",
        f"batch_size={','.join(map(str, chosen.batches))}",
    )
    runs.sweep(chosen, chosen.out, ARMS, *target, "prompts=jsonl", f"prompts.path={file}", *swept)


if __name__ == "__main__":
    main(sys.argv[1:])
