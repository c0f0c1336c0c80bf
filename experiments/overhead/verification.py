"""The time of verification: versus a rejection sampler in plain PyTorch, and as a share of the target's forward."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

import spec_lab
from spec_lab.core.clock import Clock
from spec_lab.core.draft import Draft
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws, Draws
from spec_lab.core.shape import Shape, chain, forest
from spec_lab.decode.arm import Arm
from spec_lab.decode.sequence import SequenceState
from spec_lab.decode.step import step
from spec_lab.decode.study import Capture
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.models.target import Target
from spec_lab.results.manifest import machine
from spec_lab.tasks.lab import requests_of
from spec_lab.text.prompts import jsonl
from spec_lab.verify import Choice, Verdict, Verifier, choose

ZOO = Path(spec_lab.__file__).parent / "zoo"
CONF = Path(__file__).parents[2] / "conf" / "verifier"


def verifiers(names: Sequence[str], drawn: str) -> list[Verifier]:
    """Return the named verifiers of ``conf/verifier``, with their options there, that support this way of drawing."""
    made: list[Verifier] = [instantiate(OmegaConf.load(CONF / f"{name}.yaml")) for name in names]
    return [verifier for verifier in made if drawn in verifier.accepts]


# 1. Chains, compared with a rejection sampler in plain PyTorch


class Chains:
    """Distributions and tokens of ``sequences`` chains; row numbers as in ``Draft``.

    The target's logits are normal; the draft's are the same with noise added.
    """

    def __init__(self, sequences: int, depth: int, vocabulary: int, noise: float, seed: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        shape = forest((chain(depth),) * sequences)
        expanded = np.unique(shape.parent)
        q_row = np.full(shape.rows, -1)
        q_row[expanded] = np.arange(len(expanded))
        logits = torch.randn(shape.rows, vocabulary, generator=generator, device=device).mul_(2.5)
        other = torch.randn(len(expanded), vocabulary, generator=generator, device=device).mul_(noise)
        q = torch.softmax(other.add_(logits[torch.from_numpy(expanded).to(device)]), -1)
        self.p = torch.softmax(logits, -1)
        token = torch.multinomial(q, 1, generator=generator)[torch.from_numpy(q_row[shape.parent]).to(device), 0]
        self.draft = Draft(shape, token, "iid", q, q_row)
        # for the sampler in plain PyTorch: the same distributions, and each chain's rows in them
        self.p_rows = torch.from_numpy(shape.grid).to(device)  # [B, K + 1]
        self.q_rows = torch.from_numpy(q_row[shape.grid[:, :-1]]).to(device)  # [B, K]
        self.tokens = token[self.p_rows[:, 1:] - sequences]  # [B, K]


class Plain:
    """Rejection sampling of chains written for speed: lazy residuals, no loop, reused memory.

    Source: 2211.17192, algorithm 1. All in float32.

    Args:
        like: chains of the size to be verified.
        sample: draws one index for each row of weights ``[B, V]``.
    """

    def __init__(self, like: Chains, sample: Callable[[Tensor], Tensor]) -> None:
        self.sample = sample
        size = len(like.tokens), like.p.shape[-1]
        self.residual, self.q = (torch.empty(size, device=like.p.device) for _ in range(2))

    def __call__(self, chains: Chains) -> tuple[Tensor, Tensor]:
        """Return the accepted tokens of each chain, and the bonus or recovered token: both ``[B]``."""
        p, q, tokens = chains.p, chains.draft.q, chains.tokens
        assert q is not None
        depth, width = tokens.shape[-1], p.shape[-1]
        p_token = p.take(chains.p_rows[:, :-1] * width + tokens)
        q_token = q.take(chains.q_rows * width + tokens)
        accepted = (torch.rand_like(p_token) * q_token < p_token).cumprod(-1).sum(-1)
        rejected = (accepted < depth).to(p.dtype)
        torch.index_select(p, 0, chains.p_rows.gather(1, accepted[:, None])[:, 0], out=self.residual)
        torch.index_select(q, 0, chains.q_rows.gather(1, accepted[:, None].clamp_max(depth - 1))[:, 0], out=self.q)
        weights = self.residual.addcmul_(self.q, rejected[:, None], value=-1).clamp_min_(0)
        return accepted, self.sample(weights)


def running_sum(weights: Tensor) -> Tensor:
    """Sample by inverse transform with one running sum."""
    total = weights.cumsum(-1)
    mass = torch.rand_like(total[:, :1]) * total[:, -1:]
    return torch.searchsorted(total, mass, right=True).clamp_max_(weights.shape[-1] - 1)[:, 0]


def block_sums(weights: Tensor, width: int = 64) -> Tensor:
    """Sample by inverse transform with sums over blocks, then within one block; the vocabulary is padded to blocks."""
    if short := -weights.shape[-1] % width:
        weights = torch.nn.functional.pad(weights, (0, short))
    blocks = weights.unflatten(-1, (-1, width))  # [B, N, W]
    total = blocks.sum(-1).cumsum(-1)
    mass = torch.rand_like(total[:, :1]) * total[:, -1:]
    block = torch.searchsorted(total, mass, right=True).clamp_max_(total.shape[-1] - 1)
    mass -= torch.where(block > 0, total.gather(1, (block - 1).clamp_min_(0)), 0.0)
    inside = blocks[torch.arange(len(blocks), device=weights.device), block[:, 0]].cumsum(-1)
    return block[:, 0] * width + torch.searchsorted(inside, mass, right=True).clamp_max_(width - 1)[:, 0]


@torch.inference_mode()
def time_chains(
    sequences: int, depth: int, vocabulary: int, noise: float, names: Sequence[str], repeats: int, device: str
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return seconds ``[repeats, contenders]`` of verifying all chains, and accepted tokens per chain.

    Every repeat runs all contenders in another order, since each starts with the memory of the one before. Several sets
    of chains alternate, so that none is verified twice in a row.
    """
    sets = [Chains(sequences, depth, vocabulary, noise, seed, device) for seed in range(3)]
    who, clock, draws = [(b, 0, 0) for b in range(sequences)], Clock(device), CounterDraws(0)

    def ours(verifier: Verifier) -> Callable[[Chains, int], float]:
        def run(chains: Chains, number: int) -> float:
            draft = chains.draft
            keys = [(request, branch, number) for request, branch, _ in who]
            row = choose(verifier(draft, chains.p), draft.shape, chains.p, draws, keys).row
            return float(draft.shape.depth[row].mean())

        return run

    def plain(sample: Callable[[Tensor], Tensor]) -> Callable[[Chains, int], float]:
        sampler = Plain(sets[0], sample)

        def run(chains: Chains, number: int) -> float:
            accepted, token = sampler(chains)
            token.cpu()
            return float(accepted.double().mean())

        return run

    contenders = {f"plain, {sample.__name__}": plain(sample) for sample in (running_sum, block_sums)}
    contenders |= {verifier.name: ours(verifier) for verifier in verifiers(names, "iid")}
    seconds, accepted, shuffle = [], [], np.random.default_rng(0)
    for number in tqdm(range(-3, repeats), unit="repeat"):
        time, depths = {}, {}
        for name in shuffle.permutation(list(contenders)).tolist():
            start = clock.mark()
            depths[name] = contenders[name](sets[number % len(sets)], number)
            end = clock.mark()
            clock.synchronise()
            time[name] = clock.seconds(start, end)
        if number >= 0:  # the first few warm up
            seconds.append(time)
            accepted.append(depths)
    order = list(contenders)
    return pd.DataFrame(seconds)[order], pd.DataFrame(accepted)[order]


# 2. One tree, as a share of the target's forward


class Timed:
    """Replaces a step's choice: runs another verifier on the step's draft and p, and times it with ``choose``.

    Args:
        capture: the step's verifier.
        clock: of the target's model.
    """

    def __init__(self, capture: Capture, clock: Clock) -> None:
        self.capture, self.clock = capture, clock
        self.verifier: Verifier = capture

    def __call__(
        self, verdict: Verdict, shape: Shape, p: Tensor, draws: Draws, keys: Sequence[tuple[int, int, int]]
    ) -> Choice:
        """As ``verify.choose``; ``verdict`` is the capture's."""
        assert self.capture.draft is not None
        self.start = self.clock.mark()
        choice = choose(self.verifier(self.capture.draft, p), shape, p, draws, keys)
        self.end = self.clock.mark()
        return choice


def time_tree(
    target: Target,
    draft: str,
    prompts: Path,
    tree: str,
    drawn: str,
    temperature: float,
    names: Sequence[str],
    context: int,
    steps: int,
) -> pd.DataFrame:
    """Return seconds of the phases of real steps ``[steps, ..]``; the verifiers that support such drafts alternate.

    One sequence at a time is decoded from ``context`` tokens on, ``steps`` steps in total for each verifier.
    """
    proposer = DraftModel.load(target, draft, tree=tree, drawn=drawn)
    candidates, lm, clock, draws = verifiers(names, drawn), target.lm, target.lm.clock, CounterDraws(0)
    capture = Capture()
    timed = Timed(capture, clock)
    parts = Arm(target, proposer, capture, draws, choose=timed)
    sampling = Sampling(temperature=temperature)
    long = [request for request in requests_of(target, jsonl(str(prompts)), sampling, 10**6) if len(request.tokens) > 8]
    each = 4 * len(candidates)  # steps for each prompt
    rows: list[dict[str, float | str]] = []
    number, wanted = 0, steps * len(candidates)
    progress = tqdm(total=wanted, unit="step", desc=f"{drawn}, temperature {temperature:g}")
    for request in long * (1 + wanted // (each * len(long))):
        tokens = list((request.tokens * (1 + context // len(request.tokens)))[:context])
        room = context + each * (1 + proposer.nodes)
        sequence = SequenceState(request, lm.open(room), tokens, step=1, state=proposer.init(request))
        step([], parts, [(sequence, context - 1)])
        for this in range(each + 1):
            verifier = timed.verifier = candidates[number % len(candidates)]
            info = step([sequence], parts)
            clock.synchronise()
            if this == 0:  # the first also computes the prompt in the draft model
                continue
            seconds = info.seconds()
            phases = {"forward": seconds["target"], "probabilities": seconds["probabilities"]}
            phases["verify"] = clock.seconds(timed.start, timed.end)
            row = {"verifier": verifier.name, "accepted": len(info.committed[0].path), "nodes": info.draft.shape.nodes}
            rows.append(row | phases)
            number += 1
            progress.update()
        proposer.close(sequence.state)
        sequence.kv.close()
        if number >= wanted:
            break
    progress.close()
    return pd.DataFrame(rows)


# Output


def quartiles(values: pd.Series, scale: float = 1.0) -> list[float]:
    """Return median, first and third quartile, and minimum."""
    return [float(scale * values.quantile(at)) for at in (0.5, 0.25, 0.75, 0.0)]


def shown(numbers: Sequence[float], form: str = ".2f") -> tuple[str, str]:
    """Return cells for a median with its quartiles, and for the minimum."""
    median, low, high, least = (format(value, form) for value in numbers)
    return f"{median} [{low}, {high}]", least


def table(title: str, *columns: str) -> Table:
    """An empty table whose columns but the first hold numbers."""
    empty_table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for number, column in enumerate(columns):
        empty_table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return empty_table


def chains_table(seconds: pd.DataFrame, accepted: pd.DataFrame, title: str) -> tuple[Table, dict]:
    """The first measurement as a table and as numbers."""
    plain = min((name for name in seconds if name.startswith("plain")), key=lambda name: seconds[name].median())
    view = table(title, "verifier", "ms [quartiles]", "least", f"over '{plain}'", "least", "accepted")
    numbers = {}
    for name in seconds:
        ms, ratio = quartiles(seconds[name], 1e3), quartiles(seconds[name] / seconds[plain])
        ratio[3] = ms[3] / (1e3 * float(seconds[plain].min()))
        mean = float(accepted[name].mean())
        view.add_row(name, *shown(ms), *shown(ratio), f"{mean:.2f}")
        numbers[name] = {"ms": ms, "ratio": ratio, "accepted": mean}
    return view, numbers


def forward_table(timed: pd.DataFrame, title: str) -> tuple[Table, dict]:
    """The second measurement as a table and as numbers."""
    view = table(title, "phase", "ms [quartiles]", "least", "over forward, %", "least", "accepted")
    forward, numbers = timed["forward"], {}
    parts = {"forward": (timed, "forward"), "probabilities": (timed, "probabilities")}
    parts |= {name: (some, "verify") for name, some in timed.groupby("verifier", sort=False)}
    for name, (some, phase) in parts.items():
        ms, share = quartiles(some[phase], 1e3), quartiles(100 * some[phase] / some["forward"])
        share[3] = 0.1 * ms[3] / float(forward.min())
        mean = float(some["accepted"].mean())
        view.add_row(str(name), *shown(ms, ".3f"), *shown(share, ".1f"), f"{mean:.2f}" if phase == "verify" else "")
        numbers[str(name)] = {"ms": ms, "percent": share, "accepted": mean}
    return view, numbers


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--depth", type=int, default=5, help="draft tokens of each sequence")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--noise", type=float, default=0.7, help="how far the draft's logits are off")
    parser.add_argument("--repeats", type=int, default=60, help="of the first measurement")
    parser.add_argument("--target", default=str(ZOO / "target"))
    parser.add_argument("--draft", default=str(ZOO / "draft"))
    parser.add_argument("--prompts", type=Path, default=ZOO / "prompts" / "code.jsonl")
    parser.add_argument("--tree", default="4x3x2x1", help="64 nodes")
    parser.add_argument("--context", type=int, default=200, help="tokens before the first tree")
    parser.add_argument("--steps", type=int, default=40, help="of the second measurement, for each verifier")
    parser.add_argument("--threads", type=int, default=2)
    names = sorted((file.stem for file in CONF.glob("*.yaml")), key=lambda name: (name != "token", name))
    parser.add_argument("--verifiers", nargs="+", default=names, choices=names)
    parser.add_argument("--only", choices=("chains", "forward"), help="one measurement instead of both")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    console = Console(width=120)
    facts: dict = {"machine": machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    result: dict = {"options": vars(arguments), **facts}
    size = (arguments.sequences, arguments.depth, arguments.vocabulary, arguments.noise)
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        if arguments.only != "forward":
            title = f"{size[0]} chains of {size[1]} tokens, V = {size[2]}, float32, {device}"
            seconds, accepted = time_chains(*size, arguments.verifiers, arguments.repeats, device)
            view, result[f"chains, {device}"] = chains_table(seconds, accepted, title)
            console.print(view)
        if arguments.only != "chains":
            target = Target.load(arguments.target, device=device)
            for drawn, temperature in (("deterministic", 0.0), ("iid", 1.0), ("without_replacement", 1.0)):
                timed = time_tree(
                    target, arguments.draft, arguments.prompts, arguments.tree, drawn, temperature,
                    arguments.verifiers, arguments.context, arguments.steps,
                )  # fmt: skip
                nodes = int(timed["nodes"].median())
                title = f"tree of {nodes} nodes drawn {drawn}, temperature {temperature:g}, V = {target.vocabulary}, "
                view, numbers = forward_table(timed, title + f"{str(target.lm.dtype).removeprefix('torch.')}, {device}")
                result[f"{drawn}, {temperature:g}, {device}"] = numbers
                console.print(view)
    console.print(f"{facts['threads']} threads, {facts['machine']['processor']}, {facts['machine']['cores']} cores")
    print(json.dumps(result, default=str))


if __name__ == "__main__":
    main()
