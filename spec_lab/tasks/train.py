"""``task=train``: the target answers the prompts, a drafter learns from the answers, and is measured on the rest.

The answers may exist already (``text.answers``), or be written by llama.cpp from a GGUF file of the target.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from rich.console import Console
from torch import Tensor

from spec_lab.analysis.console import standard_output
from spec_lab.analysis.drafter_card import card
from spec_lab.analysis.results import training
from spec_lab.core.device_memory import available
from spec_lab.core.files import write_text
from spec_lab.core.options import Count, Filled, Number, Share, WrongOption, checked
from spec_lab.core.probabilities import Sampling
from spec_lab.core.progress import Progress
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.models.placement import multiplies_bfloat16
from spec_lab.tasks.lab import Lab, Settings
from spec_lab.tasks.shell import Done, Task
from spec_lab.tasks.train_forecast import bounded, forecast, paying_sentence, training_sentence
from spec_lab.tasks.training_answers import Answers, Conversation, answers_of
from spec_lab.train.estimate import estimate, trial_text
from spec_lab.train.fit import FitPlan, Objective, fit, order_of, saved_part, saved_steps
from spec_lab.train.objectives import expected_length
from spec_lab.train.recipe import Beginning, Recipe, settings_of
from spec_lab.train.record import record
from spec_lab.train.texts import Texts
from spec_lab.train.trainer import Plan, Trainer, matrix_products
from spec_lab.verify import Token

log = logging.getLogger(__name__)


Positive = Annotated[float, Number(0, above=True)]

FEW_STEPS = 30
"""Training steps below which a drafter has hardly learned anything."""


@checked
def train(
    lab: Lab,
    settings: Settings,
    config: Mapping[str, Any],
    console: Console | None = None,
    *,
    recipe: Recipe,
    answers: Count = 1,
    answers_from: Filled | None = None,
    generate: Filled | None = None,
    passes: Positive = 1.0,
    rows: Count = 16,
    held_out: Share = 0.1,
    learning_rate: Positive = 4e-3,
    weight_decay: Share = 0.1,
    warmup_steps: Count = 30,
    decay: Share = 0.4,
    save_seconds: Positive = 120,
    precision: Literal["float32", "bfloat16"] | None = None,
) -> int:
    """Train a drafter for the target on its own answers to the prompts.

    The answers are sampled as the run samples, each turn of a conversation after the answer to the one before. They are
    kept in the user's cache (``$SPEC_LAB_CACHE``), so that another drafter of the same target, prompts and sampling
    learns from the same ones; the hidden states that the drafter reads along them are kept in ``output_dir``. The same
    command with the same ``output_dir`` resumes at the last checkpoint, to the same weights. At the end the drafter is
    in ``output_dir/drafter``, calibrated on held-out answers if its trees need that. On held-out prompts the accepted
    length of a chain is estimated from the acceptance at each position, without decoding, and measured by decoding.

    Args:
        lab: the target and the prompts; the proposer is not used.
        settings: the scalars; ``batch_size`` prompts are answered together.
        config: the configuration, for the manifest.
        console: prints the result; default standard output.
        recipe: the kind of drafter: a _target_ and its options, as in conf/experiment/train_eagle3.yaml.
        answers: answers of the target to each prompt; 1 at temperature 0.
        answers_from: folder of an earlier run, or JSON lines of messages, whose answers are learned from; None: new
            ones. Of messages, those of the role assistant are the answers (``text.answers``); the prompts' template
            writes them, by default the checkpoint's. Only the answers' tokens are learned, ``max_new_tokens`` of each
            text at most. The prompts are not used.
        generate: what writes the answers: a GGUF file of the target, by llama.cpp; gguf: that of target.path; None: the
            target.
        passes: how often each answer is seen.
        rows: texts of a training step.
        held_out: share of the prompts that are only measured on.
        learning_rate: peak, of Muon for matrices; of AdamW, for everything else, half of it.
        weight_decay: of matrices, times the learning rate in each step. At 0 the queries and keys of a drafter may grow
            until each position attends to one other only.
        warmup_steps: steps in which the rates rise; at most half of those before they fall.
        decay: share of the steps in which they fall.
        save_seconds: seconds between two checkpoints.
        precision: of the drafter's matrix products; its weights and losses are float32. None: bfloat16 (by autocast)
            on a GPU and on a CPU with instructions for it, else float32.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        ValueError: an invalid option, a constraint, too few prompts, a target or sampling that is not supported, a
            loss that is NaN or infinite, or a directory that holds another run.
        OSError: the directory cannot be written.
    """
    console = console or standard_output()
    if lab.applied is not None:
        raise ValueError("task=train does not support constraints; set constraint=none")
    check_sampling(lab.sampling)
    if answers > 1 and lab.sampling.temperature == 0:
        raise WrongOption(
            f"answers must be 1 at sampling.temperature=0, not {answers}: all answers to a prompt are the same"
        )
    source = answers_of(lab, settings, config, answers, answers_from, generate, held_out)
    count = source.count(source.learned)
    check_count(count, rows, passes)
    recipe.begin(lab.target, [], settings.seed)  # refuses wrong options before the target answers
    for note in _notes(count, rows, passes):
        console.print(note, highlight=False)
    plan = FitPlan(
        passes, rows, rows, warmup_steps, decay, save_seconds=save_seconds,
        plan=Plan(muon_rate=learning_rate, adamw_rate=learning_rate / 2, weight_decay=weight_decay, seed=settings.seed),
    )  # fmt: skip
    low = multiplies_bfloat16(lab.target.lm.device) if precision is None else precision == "bfloat16"
    fitting = _Training(lab, settings, recipe, plan, source, torch.bfloat16 if low else None, console)
    leaves = "Drafter, texts, learning curves, summary and manifest"
    parts = lab, settings, config, [recipe.name], fitting.work, fitting.left
    code = Task(*parts, more=source.facts(), leaves=leaves, resumes=True).run(console)
    if code == 0:
        write_text(settings.output_dir / "drafter" / "README.md", card(settings.output_dir, settings.given))
    return code


def check_count(answers: int, rows: int, passes: float) -> None:
    """Refuse too few answers for a training step of ``rows`` texts, and ``passes`` that make no step of them.

    Raises:
        WrongOption: names the option.
    """
    if answers < rows:
        raise WrongOption(
            f"rows={rows} texts make a training step, but there are {answers} answers to learn from: give "
            "more prompts, set answers to more than one, or rows to less"
        )
    if not order_of(answers // rows, rows, rows, passes):
        raise WrongOption(
            f"passes={passes} of {answers} answers makes no training step of rows={rows} texts: set passes to more"
        )


def _notes(answers: int, rows: int, passes: float) -> Iterator[str]:
    """Yield how many answers are left out, and that there are few training steps."""
    if left_out := answers % rows:
        yield (
            f"{answers} answers to learn from: the last {left_out} are left out, since each training step has "
            f"task.rows={rows} texts."
        )
    if (steps := len(order_of(answers // rows, rows, rows, passes))) < FEW_STEPS:
        yield (
            f"Few training steps ({steps}) teach little: lower task.rows={rows}, give more prompts, or raise "
            f"task.passes={passes:g}."
        )


@dataclass(frozen=True)
class _Training:
    """A drafter's training and measurement in the output directory.

    Args:
        autocast: see ``Trainer``.
    """

    lab: Lab
    settings: Settings
    recipe: Recipe
    plan: FitPlan
    source: Answers
    autocast: torch.dtype | None
    console: Console

    def work(self, facts: Mapping[str, Any]) -> Done:
        """Answer, train, and measure on what was held out."""
        lab, recipe, out = self.lab, self.recipe, self.settings.output_dir
        if not saved_steps(out / "training"):
            self._forecast()
        paths = self._recorded(self.source.learned, "texts")
        others = self._recorded(self.source.rest, "held_out", rest=True)
        begun = recipe.begin(lab.target, paths, self.settings.seed)
        longest = max((Texts.read(path, hidden=False).ids.shape[1] for path in paths), default=2)
        plan, threads = self._planned(begun, longest, len(paths) * self.plan.rows)
        steps = self._fit(begun, paths, others, plan, threads)
        begun.module.eval()
        source = {"target_sha256": lab.target.sha256, "seed": str(self.settings.seed), "method": recipe.name}
        sha256 = recipe.write(begun.module, lab.target, out / "drafter", source)
        if begun.calibrate is not None:
            begun.calibrate(out / "drafter", others, lab.sampling.temperature)
        accepted, agreed = _held_out(begun.objective, others, plan.part, self.lab.target.lm.device)
        curve = [json.loads(line) for line in (out / "training" / "learning.jsonl").read_text().splitlines()]
        summary = {
            "experiment": self.settings.name, "target": lab.target.name, "temperature": lab.sampling.temperature,
            "drafter": recipe.name, "sha256": sha256, "texts": len(paths) * plan.rows, "steps": steps, **begun.facts,
            "parameters": sum(parameter.numel() for parameter in begun.module.parameters()),
            "accepted": accepted, "agreed": agreed,
            "estimated_length": expected_length(agreed if lab.sampling.temperature == 0 else accepted),
            "measured_length": self._measured(out / "drafter"), "learning": curve,
        }  # fmt: skip
        return Done(summary, training.result)

    def left(self) -> tuple[int, str]:
        """Return the number of training steps on disk, and a sentence that states what is there."""
        out = self.settings.output_dir
        done = saved_steps(out / "training")
        what = f"the checkpoint after {done} training steps is" if done else "the answers that are written are"
        return done, f"{what} in {out}"

    def _recorded(self, conversations: Sequence[Conversation], name: str, rest: bool = False) -> list[Path]:
        """Return the files of the answers of conversations, with hidden states."""
        rows, batch, count = self.plan.rows, self.settings.batch_size, self.source.count(conversations)
        with Progress(total=count, desc=name, unit="answer") as bar:
            texts = self.source.texts(conversations, bar.tick)
        texts = texts if rest else texts[: count - count % rows]
        with Progress(total=len(texts), desc=f"{name}: hidden states", unit="text") as bar:
            states, folder = self.recipe.states(self.lab.target), self.settings.output_dir / name
            return record(self.lab.target, texts, states, folder, rows, batch, rest, bar.tick)

    def _forecast(self) -> None:
        """Print what answers and training will take, and which tau the drafter must reach to pay."""
        lab, settings, source = self.lab, self.settings, self.source
        known = source.known is not None
        texts = bounded(source.lengths(), settings.max_new_tokens, lab.target.context, known)
        for line in forecast(
            texts, source.writer, settings.batch_size, lab.sampling, 2 * self._width, settings.output_dir / "texts"
        ):
            self.console.print(line, highlight=False)
        begun = self.recipe.begin(lab.target, [], settings.seed)
        self._planned(begun, texts.longest, source.count(source.learned))
        pays = paying_sentence(self.recipe, begun.module, lab.target, lab.sampling)
        self.console.print(pays, highlight=False)

    @property
    def _width(self) -> int:
        """Numbers of the hidden states of a token."""
        return len(self.recipe.states(self.lab.target)) * self.lab.target.services.hidden_size

    def _planned(self, begun: Beginning, longest: int, answers: int) -> tuple[FitPlan, int]:
        """Print what the training needs; return the plan with as many texts of a part as fit, and the threads.

        Args:
            longest: tokens of the longest text.
        """
        rows, lm, out = self.plan.rows, self.lab.target.lm, self.settings.output_dir / "training"
        others = [*self.lab.target.model.parameters(), *self.lab.target.model.buffers()]

        def loss_of(text: Texts) -> Tensor:
            with matrix_products(lm.device, self.autocast):
                return begun.objective(text)[0]

        needed = estimate(loss_of, begun.module.parameters(), others, trial_text(longest, self._width, lm.device))
        pieces = 2 if rows % 2 == 0 and lm.device.type == "cpu" else 1
        threads = min(torch.get_num_threads(), pieces)
        part = saved_part(out) or needed.part(rows, available(lm.device), threads)
        texts = int(self.plan.passes * (answers // rows) * rows) - rows * saved_steps(out)
        self.console.print(training_sentence(needed, texts, threads, part, rows), highlight=False)
        return replace(self.plan, part=part), threads

    def _fit(self, begun: Beginning, paths: Sequence[Path], others: Sequence[Path], plan: FitPlan, threads: int) -> int:
        """Train; return the number of steps."""
        settings = settings_of(self.recipe, self.lab.target, begun)
        if self.autocast is not None:
            settings["autocast"] = str(self.autocast)

        def measure() -> dict[str, Any]:
            begun.module.eval()
            with matrix_products(self.lab.target.lm.device, self.autocast):
                accepted, agreed = _held_out(begun.objective, others, plan.part, self.lab.target.lm.device)
            begun.module.train()
            lengths = {"accepted_length": expected_length(accepted), "agreed_length": expected_length(agreed)}
            return {"accepted": accepted, "agreed": agreed} | {key: round(length, 4) for key, length in lengths.items()}

        with _shared_threads(threads), Progress(desc=self.recipe.name, unit="step") as bar:
            trainer = Trainer(begun.module, plan.plan, threads, torch.float32, self.autocast)
            fit(
                trainer, begun.objective, paths, self.settings.output_dir / "training", plan, settings,
                tick=partial(_at, bar), wrote=self.lab.tracker.training, measure=measure, advance=begun.advance,
            )  # fmt: skip
        return trainer.step

    def _measured(self, folder: Path) -> float:
        """Mean accepted tokens of a chain of ``recipe.depth`` tokens, of steps in which a whole chain was drafted."""
        lab, settings, depth = self.lab, self.settings, self.recipe.depth
        proposer = self.recipe.load(lab.target, folder, depth)
        accepted, requests = list[int](), self.source.first_requests(self.source.rest)
        for start in range(0, len(requests), settings.batch_size):
            some = requests[start : start + settings.batch_size]
            draws = CounterDraws(settings.seed)
            for info in fixed_group(Arm(lab.target, proposer, Token(), draws, pieces=lab.pieces), some):
                for tree, done in enumerate(info.committed):
                    if len(info.draft.shape.trees[tree]) == depth + 1:
                        accepted.append(len(done.path))
        return sum(accepted) / max(1, len(accepted))


def _at(bar: Progress, done: int, total: int) -> None:
    bar.total = total
    bar.tick(done - bar.n, kept=not bar.n)  # the first call counts the steps of earlier runs, too


def check_sampling(sampling: Sampling, task: str = "task=train") -> None:
    """Refuse sampling for which the acceptance in training is not that of decoding.

    Args:
        task: what refuses it.

    Raises:
        ValueError: names the options.
    """
    allowed = Sampling(temperature=1.0 if sampling.temperature == 1 else 0.0)
    names = [field.name for field in fields(Sampling)]
    if wrong := [name for name in names if getattr(sampling, name) != getattr(allowed, name)]:
        given = ", ".join(f"sampling.{name}={getattr(sampling, name)}" for name in wrong)
        raise ValueError(
            f"{task} does not support {given}: losses and estimated_length are those of temperature 1 or of greedy "
            "decoding. Set sampling.temperature to 1 or 0, and the other options of sampling to their defaults"
        )


@contextmanager
def _shared_threads(threads: int) -> Iterator[None]:
    """Divide torch's threads among Python threads."""
    every = torch.get_num_threads()
    torch.set_num_threads(every // threads)
    try:
        yield
    finally:
        torch.set_num_threads(every)


@torch.no_grad()
def _held_out(
    objective: Objective, paths: Sequence[Path], part: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """Acceptance of sampled tokens and agreement of the likeliest at each draft position, ``part`` texts at once."""
    sums = torch.zeros(())
    for path in paths:
        texts = Texts.read(path)
        for start in range(0, len(texts), part):
            counts = objective(texts.rows(slice(start, start + part)).to(device))[1]
            shares = torch.tensor([[1, *map(float, count[1:3])] for count in counts], dtype=torch.float64)
            sums = sums + shares * torch.tensor([[count.rows] for count in counts])
    accepted, agreed = (sums[:, 1:] / sums[:, :1].clamp_min(1)).T.tolist()
    return [round(share, 4) for share in accepted], [round(share, 4) for share in agreed]
