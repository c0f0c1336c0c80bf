"""``task=train_online``: serve a stream of requests in rounds, with a drafter that learns from what was served.

Two arms serve every round: ``frozen``, the drafter as it was when the stream began, and ``online``, its latest version.
After each round the latest version learns from the texts that its arm has served, and is written as the next one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import torch
from rich.console import Console

from spec_lab.analysis.console import standard_output
from spec_lab.analysis.metrics import decode_steps
from spec_lab.analysis.metrics.acceptance import SUMMANDS
from spec_lab.analysis.metrics.intervals import cluster_interval
from spec_lab.analysis.metrics.ranges import in_ranges
from spec_lab.analysis.results import online
from spec_lab.core.options import Count, Filled, Share, Whole, WrongOption, checked
from spec_lab.core.progress import Progress
from spec_lab.core.request import BROKEN, Request
from spec_lab.decode.engine import fixed_group
from spec_lab.propose import Proposer
from spec_lab.results.schema import STEPS
from spec_lab.results.table_parts import Rows, TableParts
from spec_lab.results.writer import rows_of
from spec_lab.tasks.drift import WORKLOAD, RequestStream
from spec_lab.tasks.lab import Lab, Settings
from spec_lab.tasks.shell import Done, Task
from spec_lab.tasks.train import Positive, check_count, check_sampling
from spec_lab.tasks.training_answers import kept_answers
from spec_lab.text.answers import AnsweredText
from spec_lab.text.prompts import Prompt
from spec_lab.train.fit import FitPlan, fit
from spec_lab.train.recipe import Beginning, Recipe, settings_of
from spec_lab.train.record import answer, record
from spec_lab.train.trainer import Plan, Trainer
from spec_lab.verify import Token

ARMS = ("frozen", "online")

VERSION = {
    "stream_round": (pa.int64(), "the round of the stream, from 0"),
    "head_version": (pa.int64(), "the version of the drafter that drafted: the rounds that it has learned from"),
    "head_sha256": (pa.string(), "SHA-256 of its weights"),
    **WORKLOAD,
}
"""Columns of ``steps`` beside ``results.schema.STEPS``; the group is the first of the requests decoded together."""

FIGURES = ("tau_pooled", "draft_token_rate")


@checked
def train_online(
    lab: Lab,
    settings: Settings,
    config: Mapping[str, Any],
    console: Console | None = None,
    *,
    recipe: Recipe,
    start: Filled | None = None,
    before: Annotated[int, Whole(0)] = 16,
    requests: Count = 8,
    recent: Count = 3,
    drift: Sequence[Prompt] | None = None,
    passes: Positive = 4.0,
    rows: Count = 8,
    learning_rate: Positive = 4e-3,
    weight_decay: Share = 0.1,
    warmup_steps: Count = 4,
    decay: Share = 0.4,
) -> int:
    """Serve the prompts in rounds with a drafter that learns after each round; compare it with the one that does not.

    The stream is the prompts in order, each once, and then those of ``drift``. Tokens are the target's: only how many
    drafts are accepted changes. The same command resumes: rounds are served again, trainings are not repeated.

    Args:
        lab: the target and the prompts; the proposer is not used.
        settings: the scalars; ``batch_size`` requests are decoded together.
        config: the configuration, for the manifest.
        console: prints the result; default standard output.
        recipe: the kind of drafter: a _target_ and its options, as in conf/experiment/train_medusa.yaml.
        start: folder of a drafter of this kind and these sizes to begin with; None: a fresh one. Only Medusa heads can
            be begun with.
        before: prompts, from the first, whose answers the drafter learns from before the stream begins; they are not
            served.
        requests: of a round, after which the drafter learns.
        recent: rounds whose texts it learns from, the last ones.
        drift: prompts of another workload, to which the stream changes: +prompts@task.drift=NAME; None: no change.
        passes: how often each text is seen in a training.
        rows: texts of a training step.
        learning_rate: peak, of Muon for matrices; of AdamW, for everything else, half of it.
        weight_decay: of matrices, times the learning rate in each step.
        warmup_steps: steps in which the rates rise; at most half of those before they fall.
        decay: share of the steps in which they fall.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        ValueError: an invalid option, a constraint, too few prompts, a target or sampling that is not supported, an
            answer that broke, a loss that is NaN or infinite, or a directory that holds another run.
        OSError: the directory cannot be written.
    """
    console = console or standard_output()
    if lab.applied is not None:
        raise ValueError("task=train_online does not support constraints; set constraint=none")
    check_sampling(lab.sampling, "task=train_online")
    if settings.count_experts:
        raise ValueError(
            "task=train_online does not support count_experts=true: it writes no table of forwards; set "
            "count_experts=false, and count them with task=benchmark"
        )
    for name, count in (("before", before), ("requests", requests)):
        if count % rows:
            raise WrongOption(f"{name} must be a multiple of rows={rows}, the texts of a training step (got {count})")
    if len(lab.prompts) <= before:
        raise WrongOption(f"before={before} leaves no prompt of {len(lab.prompts)} to serve: set it to less")
    drafted = vars(recipe).get("draft_vocab_size")
    if not before and drafted is not None and drafted < lab.target.vocabulary:
        raise WrongOption(
            f"before=0 leaves no texts whose most frequent tokens a vocabulary of draft_vocab_size={drafted} could "
            "have, and it does not change later: set task.before=16 or task.recipe.draft_vocab_size=null"
        )
    rest = replace(lab, prompts=lab.prompts[before:])
    stream = RequestStream.of(rest, settings, None, drift, None, "task=train_online")
    for texts in [before] * bool(before) + [requests] * (len(stream.requests) > requests):
        check_count(texts, rows, passes)
    begun = recipe.begin(lab.target, [], settings.seed)  # refuses wrong options before the target answers
    start_sha256 = "" if start is None else recipe.resume(begun.module, lab.target, Path(start))
    plan = FitPlan(
        passes, rows, rows, warmup_steps, decay,
        plan=Plan(muon_rate=learning_rate, adamw_rate=learning_rate / 2, weight_decay=weight_decay, seed=settings.seed),
    )  # fmt: skip
    parts = TableParts(settings.output_dir, {"steps": STEPS}, optional={"steps": VERSION}, written=[*VERSION])
    learning = _Online(lab, settings, recipe, stream, plan, parts, before, requests, recent, start, start_sha256)
    more = {} if drift is None else {"drift": {"at": stream.change, "prompts_sha256": stream.prompts_sha256}}
    leaves = "Steps, versions of the drafter, summary and manifest"
    task = Task(lab, settings, config, ARMS, learning.work, learning.left, more=more, leaves=leaves, resumes=True)
    return task.run(console)


@dataclass(frozen=True)
class _Online:
    """The rounds of a stream. The arguments are those of ``train_online``, with the stream and the training's plan."""

    lab: Lab
    settings: Settings
    recipe: Recipe
    stream: RequestStream
    plan: FitPlan
    parts: TableParts
    before: int
    requests: int
    recent: int
    start: str | None
    start_sha256: str

    def work(self, facts: Mapping[str, Any]) -> Done:
        """Learn, then serve and learn in turns."""
        stream, size = self.stream.requests, self.requests
        rounds = [stream[at : at + size] for at in range(0, len(stream), size)]
        paths = self._answers()
        begun = self.recipe.begin(self.lab.target, paths, self.settings.seed)
        if self.start is not None:
            self.recipe.resume(begun.module, self.lab.target, Path(self.start))
        versions = [self._learned(begun, paths, [])]
        frozen = self._drafter(0)
        learned, rows = list[list[Path]](), list[dict[str, Any]]()
        with Progress(total=len(stream) * len(ARMS), desc=self.settings.name, unit="request") as bar:
            for number, served in enumerate(rounds):
                latest = frozen if number == 0 else self._drafter(number)
                for arm, drafter, version in (("frozen", frozen, versions[0]), ("online", latest, versions[-1])):
                    texts, steps = self._served(arm, drafter, served, number)
                    known = {
                        "stream_round": number,
                        "head_version": version["version"],
                        "head_sha256": version["sha256"],
                    }
                    rows += [step | known | self.stream.columns(step["request"]) for step in steps]
                    bar.update(len(served))
                if number + 1 < len(rounds):  # the last texts have no round after them
                    learned.append(self._recorded(texts, f"texts/{number}"))
                    newest = [path for of_round in learned[-self.recent :] for path in of_round]
                    versions.append(self._learned(begun, newest, versions))
        self.parts.write("0", {"steps": rows})
        return Done(self._summary(versions, len(rounds)), online.result)

    def left(self) -> tuple[int, str]:
        """Return the number of versions on disk, and a sentence that states it."""
        count = len([*self.settings.output_dir.glob("versions/*")])
        return count, f"{count} versions of the drafter are in {self.settings.output_dir}"

    def _answers(self) -> list[Path]:
        """Return the files of the answers that the drafter learns from before the stream begins."""
        lab, settings = self.lab, self.settings
        asked = replace(lab, prompts=lab.prompts[: self.before]).requests(settings) if self.before else []
        texts = answer(lab.target, asked, settings.batch_size, settings.seed, lab.pieces, kept_answers(settings))
        return self._recorded(texts, "texts/before")

    def _recorded(self, texts: Sequence[AnsweredText], name: str) -> list[Path]:
        """Return the files of texts with hidden states; texts that do not fill a training step are left out."""
        rows, folder = self.plan.rows, self.settings.output_dir / name
        whole = texts[: len(texts) - len(texts) % rows]
        target = self.lab.target
        return record(target, whole, self.recipe.states(target), folder, rows, self.settings.batch_size)

    def _learned(
        self, begun: Beginning, paths: Sequence[Path], versions: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Let the drafter learn from texts, if there are some, and write it; return the facts of the new version."""
        number, out, target = len(versions), self.settings.output_dir, self.lab.target
        began, steps = time.monotonic(), 0
        if paths:
            known = settings_of(self.recipe, target, begun) | {
                "after": versions[-1]["sha256"] if versions else self.start_sha256
            }
            trainer = Trainer(begun.module.train(), self.plan.plan, 1, torch.float32)
            fit(
                trainer, begun.objective, paths, out / "training" / str(number), self.plan, known,
                advance=begun.advance,
            )  # fmt: skip
            steps = trainer.step
        begun.module.eval()
        about = {"target_sha256": target.sha256, "seed": str(self.settings.seed), "method": self.recipe.name}
        sha256 = self.recipe.write(begun.module, target, out / "versions" / str(number), about)
        seconds = round(time.monotonic() - began, 1)
        return {
            "version": number, "sha256": sha256, "texts": len(paths) * self.plan.rows, "steps": steps,
            "seconds": seconds,
        }  # fmt: skip

    def _drafter(self, version: int) -> Proposer:
        """Return a written version as a proposer of chains."""
        folder = self.settings.output_dir / "versions" / str(version)
        return self.recipe.load(self.lab.target, folder, self.recipe.depth)

    def _served(
        self, arm: str, drafter: Proposer, requests: Sequence[Request], number: int
    ) -> tuple[list[AnsweredText], Rows]:
        """Serve the requests of a round; return the texts with their answers, and the rows of the steps."""
        size = self.settings.batch_size
        loop = self.lab.arm(replace(self.settings, record="none"), drafter, Token())
        texts, rows = list[AnsweredText](), list[dict[str, Any]]()
        for start in range(0, len(requests), size):
            engine = fixed_group(loop, requests[start : start + size])
            with torch.inference_mode():
                infos = [info.slim() for info in engine]
            self.lab.target.lm.clock.synchronise()
            rows += rows_of(infos, requests[start].id, arm)[1]
            for sequence in engine.sequences:
                request = sequence.request
                if sequence.finish in BROKEN:
                    raise ValueError(engine.errors.get(sequence, f"the answer to '{request.name}' broke"))
                whole = (*request.tokens, *sequence.emitted)
                texts.append(AnsweredText(request.name, whole, ((len(request.tokens), len(whole)),)))
        return texts, rows

    def _summary(self, versions: Sequence[Mapping[str, Any]], rounds: int) -> dict[str, Any]:
        """Return the contents of the summary."""
        steps = self.parts.gather()["steps"]
        arms = {}
        for arm in ARMS:
            of_arm = decode_steps(steps, arm)
            terms = {name: SUMMANDS[name](of_arm) for name in FIGURES}
            where = of_arm["stream_round"].to_numpy() + 1
            requests = of_arm["request"].to_numpy()
            pooled = {name: cluster_interval(*sums, requests)._asdict() for name, sums in terms.items()}
            arms[arm] = pooled | {"rounds": in_ranges(where, range(1, rounds + 1), terms, requests)}
        return {
            "experiment": self.settings.name, "target": self.lab.target.name, "drafter": self.recipe.name,
            "temperature": self.lab.sampling.temperature, "requests": len(self.stream.requests),
            "round": self.requests, "change": self.stream.change, "versions": list(versions), "arms": arms,
        }  # fmt: skip
