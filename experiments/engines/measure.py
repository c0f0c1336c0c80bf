"""Measure the same weights, prompts and proposers on several engines: python -m experiments.engines.measure.

Converts the bundled target and draft model to GGUF, then runs spec_lab's command line on every engine, in two parts:
all proposers on every text, and seconds of a step by nodes. Everything goes under ``--out``; the same command resumes.
``figure.py`` reads it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import spec_lab
from spec_lab.models.gguf_export import convert

ZOO = Path(spec_lab.__file__).parent / "zoo"
LLAMA = "llama.cpp-"

ENGINES = (
    "transformers-bfloat16",
    "transformers-float32",
    f"{LLAMA}bf16",
    f"{LLAMA}q8_0",
    f"{LLAMA}q4_0",
)
"""Engine and data type of the weights."""

PARTS = ("proposers", "cost")

PEERS = "spec_lab.tasks.peers"

SIZES: dict[str, tuple[str, dict[str, str | int]]] = {
    "medusa_6": ("medusa", {"tree": "likeliest", "max_nodes": 6}),
    "medusa_24": ("medusa", {"tree": "likeliest", "max_nodes": 24}),
    "draft_chain_2": ("draft_chain", {"depth": 2}),
    "draft_chain_sure": ("draft_chain", {"confidence": 0.9}),
    "ngram_chain_3": ("ngram", {"depth": 3}),
    "ngram_chain_sure": ("ngram", {"min_ngram": 4, "max_ngram": 8}),
}
"""Arms with drafts of other sizes than the default, or only where they are likelier: proposer and its options."""

DRAFTING = ("draft_chain", "draft_tree", "draft_chain_2", "draft_chain_sure")
"""The arms with a draft model."""

OWN: dict[str, tuple[str, int]] = {
    "lookup": ("lookup", 10),
    "lookup_3": ("lookup", 3),
    "assisted": ("assisted", 6),
    "assisted_2": ("assisted", 2),
}
"""llama-cpp-python's speculative decoding: arms, their kind and the most tokens that a step drafts."""


def files(engine: str, folder: Path) -> dict[str, Path]:
    """Return where the GGUF files of target and draft model are; empty of an engine that reads none."""
    name, _, dtype = engine.rpartition("-")
    return {model: folder / f"{model}-{dtype}.gguf" for model in ("target", "draft")} if f"{name}-" == LLAMA else {}


def target(engine: str, folder: Path) -> list[str]:
    """Return the options of the target; ``folder`` holds the GGUF files."""
    paths = files(engine, folder)
    return ["target=gguf", f"target.path={paths['target']}"] if paths else [f"target.dtype={engine.rpartition('-')[2]}"]


def arms(engine: str, folder: Path) -> list[str]:
    """Return the options of the arms beside those of the experiment: other sizes, and the engine's own decoding."""
    paths = files(engine, folder)
    paths_of = {f"arms.{arm}.path": paths["draft"] for arm in DRAFTING if paths}
    sizes = [f"+proposer@arms.{arm}={proposer}" for arm, (proposer, _) in SIZES.items()]
    paths_of |= {f"arms.{arm}.{name}": value for arm, (_, more) in SIZES.items() for name, value in more.items()}
    if not paths:
        paths_of["+peers.loop._target_"] = f"{PEERS}.Bare"
        return [*sizes, *(f"{name}={value}" for name, value in paths_of.items())]
    paths_of["+peers.loop._target_"] = f"{PEERS}_llama.LlamaLoop"
    paths_of["+peers.generate._target_"] = f"{PEERS}_llama.LlamaGenerate.plain"
    for arm, (kind, tokens) in OWN.items():
        paths_of |= {f"+peers.{arm}._target_": f"{PEERS}_llama.LlamaGenerate.{kind}", f"+peers.{arm}.tokens": tokens}
        if kind == "assisted":
            paths_of[f"+peers.{arm}.path"] = paths["draft"]
    return [*sizes, *(f"{name}={value}" for name, value in paths_of.items())]


def options(part: str, engine: str, chosen: argparse.Namespace) -> list[str]:
    """Return the options of the command line for a part of the study on an engine.

    Args:
        part: one of ``PARTS``.
        engine: one of ``ENGINES``.
        chosen: the study's own options.
    """
    folder = chosen.out / "files"
    usual = [*target(engine, folder), f"threads={chosen.threads}", f"output_dir={chosen.out / engine / part}"]
    if part == "proposers":
        short = [f"prompts.limit={chosen.limit}", f"max_new_tokens={chosen.new}", f"warmup={min(16, chosen.new)}"]
        texts = ["sampling=greedy", f"prompts={','.join(chosen.texts)}"]
        return ["+experiment=proposers_by_workload", *texts, *short, *usual, *arms(engine, folder)]
    nodes, batches = (f"[{','.join(map(str, each))}]" for each in (chosen.nodes, chosen.batches))
    grid = [f"task.nodes={nodes}", f"task.batches={batches}", f"task.contexts=[{chosen.context}]"]
    return ["task=cost", "name=cost", "proposer=none", "prompts=prose", *grid, f"task.repeats={chosen.repeats}", *usual]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the GGUF files that are missing, and measure what is missing.

    Raises:
        CalledProcessError: a run failed; its message is on the terminal.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/engines"), help="where files and runs go")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--texts", nargs="+", default=["code", "json", "prose"], help="prompts that are decoded")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each text (8)")
    parser.add_argument("--new", type=int, default=48, help="tokens emitted for each (48)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--nodes",
        type=int,
        nargs="+",
        default=[0, 1, 2, 4, 8, 16, 32, 62],
        help="draft nodes of a sequence; a binary tree of 62 has the 32 leaves that llama.cpp supports at batch 8",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--context", type=int, default=128, help="tokens before the steps that are timed by nodes (128)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of the steps that are timed by nodes (3)")
    chosen = parser.parse_args(arguments)
    chosen.out = chosen.out.absolute()
    (chosen.out / "files").mkdir(parents=True, exist_ok=True)
    for engine in chosen.engines:
        for model, file in files(engine, chosen.out / "files").items():
            if not file.is_file():
                convert(str(ZOO / model), file, engine.removeprefix(LLAMA))
    for part in chosen.parts:
        for engine in chosen.engines:
            command = [sys.executable, "-m", "spec_lab", *options(part, engine, chosen)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
