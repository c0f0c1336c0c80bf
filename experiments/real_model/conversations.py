"""Write conversations that SmolLM2 holds with itself: python -m experiments.real_model.conversations OUT.jsonl.

The model continues its chat template's header of a user's message, and so asks a question (Magpie, 2406.08464). Then it
answers, at temperature 0 and 1 in turn. ``task.answers_from=OUT.jsonl`` learns from the answers. Questions are asked in
blocks; a block is written whole, and the same command resumes after the last one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from spec_lab.core.files import replacing
from spec_lab.core.probabilities import Sampling
from spec_lab.core.progress import Progress
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import BROKEN, Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine, Limits
from spec_lab.models.smollm2 import load
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.text.chat_template import ChatTemplate, render
from spec_lab.verify import Token

SETTINGS = ("seed", "block", "question_tokens", "answer_tokens")
"""Options that the conversations follow from."""

QUESTION = Sampling(1.0, top_p=0.95)
SHORTEST = 15
"""Characters of the shortest question that is answered."""

Text = tuple[str, bool, int]
"""What a request emitted: the text, whether it ended by itself, and its tokens."""


def decoded(arm: Arm, requests: Sequence[Request], batch: int, tick: Callable[[int], object]) -> dict[int, Text]:
    """Return what each request emitted, by its id; ``batch`` of them are decoded together."""
    engine = Engine(arm, limits=Limits(max_batch_size=batch))
    for request in requests:
        engine.add(request)
    done = 0
    for _ in engine:
        finished = len(engine.sequences) - len(engine.live)
        tick(finished - done)
        done = finished
    texts = {}
    for sequence in engine.sequences:
        if sequence.finish in BROKEN:
            raise ValueError(engine.errors.get(sequence, f"{sequence.request.name} broke"))
        ended = sequence.finish == "stop"
        tokens = sequence.emitted[:-1] if ended else sequence.emitted
        texts[sequence.request.id] = (arm.target.tokenizer.decode(tokens).strip(), ended, len(sequence.emitted))
    return texts


def block_of(
    target: Target, block: int, settings: Mapping[str, int], batch: int, known: set[str], tick: Callable[[int], object]
) -> list[dict[str, Any]]:
    """Return the conversations of a block.

    ``known`` are the questions of earlier blocks, which are not asked again; those of this one are added. ``tick`` is
    called with the number of answers that are finished.
    """
    asked = [{"role": "user", "content": "QUESTION"}]
    text, templated = render(ChatTemplate(), asked, (), target.tokenizer, "a question")
    if not templated:
        raise ValueError(f"the tokenizer of {target.name} has no chat template, whose header would be continued")
    head, tail = text.split("QUESTION")
    arm = Arm(target, Null(), Token(), CounterDraws(settings["seed"]))

    def request(key: int, prompt: str, sampling: Sampling, new: int) -> Request:
        tokens = tuple(target.tokenizer.encode(prompt, add_special_tokens=False))
        return Request(key, f"text {key}", tokens, sampling, new, target.ends)

    first = block * settings["block"]
    numbers = range(first, first + settings["block"])
    asking = [request(2 * number, head, QUESTION, settings["question_tokens"]) for number in numbers]
    questions = dict[int, str]()
    for key, (question, ended, _) in decoded(arm, asking, batch, lambda done: None).items():
        if ended and len(question) >= SHORTEST and "<|" not in question and question not in known:
            known.add(question)
            questions[key // 2] = question
    answering = [
        request(2 * number + 1, head + question + tail, Sampling(float(number % 2)), settings["answer_tokens"])
        for number, question in questions.items()
    ]
    lines = []
    for key, (answer, ended, tokens) in sorted(decoded(arm, answering, batch, tick).items()):
        messages = [{"role": "user", "content": questions[key // 2]}, {"role": "assistant", "content": answer}]
        facts = {"complete": ended, "temperature": key // 2 % 2, "tokens": tokens, "in_block": block, **settings}
        if answer and "<|" not in answer:
            lines.append({"messages": messages, **facts})
    return lines


def earlier(file: Path, settings: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the conversations that the file holds.

    Raises:
        ValueError: a line is none of this script's, or was written with other settings.
    """
    lines = []
    for number, line in enumerate(file.read_text().splitlines() if file.exists() else (), 1):
        try:
            lines.append(json.loads(line))
            written = {name: lines[-1][name] for name in (*SETTINGS, "in_block", "messages", "tokens")}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}, line {number}, is no conversation of this script: name another file") from error
        if wrong := next((name for name in SETTINGS if written[name] != settings[name]), ""):
            option = f"--{wrong.replace('_', '-')}"
            raise ValueError(f"{file} was written with {option} {written[wrong]}: give the same, or another file")
    return lines


def write(file: Path, target: Target, count: int, settings: Mapping[str, int], batch: int) -> list[dict[str, Any]]:
    """Write blocks until the file holds ``count`` conversations, and return them all."""
    lines = earlier(file, settings)
    known = {line["messages"][0]["content"] for line in lines}
    with Progress(total=count, initial=len(lines), unit="conversation", desc="conversations") as bar:
        while len(lines) < count:
            block = max((line["in_block"] for line in lines), default=-1) + 1
            made = block_of(target, block, settings, batch, known, bar.update)
            if not made:
                raise ValueError(f"block {block} has no conversation: give a larger --block or --question-tokens")
            lines += made
            with replacing(file) as stream:
                stream.writelines(f"{json.dumps(line)}\n".encode() for line in lines)
            bar.update(len(lines) - bar.n)
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    def positive(text: str) -> int:
        if int(text) < 1:
            raise ValueError
        return int(text)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON lines of messages, which are added to")
    parser.add_argument("--count", type=positive, default=3800, help="conversations, at least (3800)")
    parser.add_argument("--seed", type=int, default=1, help="of all random choices (1)")
    parser.add_argument("--block", type=positive, default=256, help="questions of a block (256)")
    parser.add_argument("--question-tokens", type=positive, default=96, help="maximum of a question (96)")
    parser.add_argument("--answer-tokens", type=positive, default=384, help="maximum of an answer (384)")
    parser.add_argument("--batch", type=positive, default=64, help="sequences decoded together (64; on a GPU 1024)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (cpu)")
    chosen = parser.parse_args(arguments)
    settings = {name: getattr(chosen, name) for name in SETTINGS}
    if not chosen.file.parent.is_dir():
        parser.error(f"{chosen.file} cannot be written: {chosen.file.parent} is no folder")
    began = time.monotonic()
    try:
        before = sum(line["tokens"] for line in earlier(chosen.file, settings))  # refused before the model is loaded
        target = load(engine="transformers", device=chosen.device)
        lines = write(chosen.file, target, chosen.count, settings, chosen.batch)
    except ValueError as error:
        parser.error(str(error))
    tokens = sum(line["tokens"] for line in lines)
    rate = (tokens - before) / (time.monotonic() - began)
    print(
        f"{len(lines)} conversations, {tokens} tokens of answers, new ones at {rate:.0f} per second, questions included"
    )
    print(f"{sha256(chosen.file.read_bytes()).hexdigest()}  {chosen.file}")


if __name__ == "__main__":
    main()
