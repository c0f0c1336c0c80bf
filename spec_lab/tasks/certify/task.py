"""``+experiment=certify``: is what was composed lossless? A verdict table, ``certificate.json`` and a picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tqdm import tqdm

from spec_lab.constrain import ConstraintError
from spec_lab.core.draft import Drawn
from spec_lab.core.faults import attributed
from spec_lab.core.files import own_folder, replacing
from spec_lab.core.options import whole
from spec_lab.core.probabilities import Sampling
from spec_lab.engine.request import Request
from spec_lab.propose import Proposer, branches, draws_of
from spec_lab.results.manifest import write_json
from spec_lab.tasks.certify.certificate import Control, every, prove
from spec_lab.tasks.certify.constrained import own
from spec_lab.tasks.certify.enumerate import Reused
from spec_lab.tasks.certify.exact import LOOPS, PLAIN, Finding, Instance
from spec_lab.tasks.certify.masks import Walked, walk
from spec_lab.tasks.certify.pair import MORE, Check, Pair
from spec_lab.tasks.certify.picture import convergence
from spec_lab.tasks.certify.sampled import joint, scores
from spec_lab.tasks.certify.show import show
from spec_lab.tasks.certify.statistics import ALPHA, POWER, chi_square, holm
from spec_lab.tasks.lab import Lab, Settings
from spec_lab.tasks.shell import Done, Task
from spec_lab.verify import Verifier, check_pair, misfit

FAILED = 1
"""Exit code where a verifier that declares itself lossless is not, a lossy one misses the distribution that it is exact
against, or masks are wrong."""


SHOWN = 8
"""Tokens of a wrong mask that are shown as text."""

JOINT_LAW = "joint law of four tokens"


def _ignore(_: float) -> None: ...


def _scaled(tick: Callable[[float], object], size: int, count: int) -> None:
    tick(count / size)


def certify(
    lab: Lab,
    settings: Settings,
    config: Mapping[str, Any],
    samples: int = 10_000,
    tokens: int = 2_000,
    mask_rows: int = 20_000,
    console: Console | None = None,
) -> int:
    """Certify every pair of the lab's proposers and verifiers that fits; leave ``certificate.json`` and a picture.

    The run's own sampling counts where it is random, else temperature 1: at temperature 0 there is no law to test.

    Args:
        lab: the parts: the composed pair, and all others of ``arms`` and ``verifiers``.
        settings: the scalars; ``seed`` seeds every sample.
        config: the configuration, for the manifest.
        samples: texts of the toy world that each pair decodes.
        tokens: tokens that each lossless pair decodes with the real target; 0 for none.
        mask_rows: masks of random drafts, under the run's own constraint and vocabulary, that are compared with those
            of fresh states (``masks.walk``); 0 for none. Without a constraint there are none.
        console: where the table goes; default standard output.

    Returns:
        The exit code: 0; 1 where a verifier is not what it declares or a mask is wrong; 130 after Ctrl-C, which keeps
        finished pairs.

    Raises:
        ValueError: the composed pair does not fit; a verifier that cannot run on toys; a wrong option.
        OSError: a directory that cannot be written.
    """
    whole("task.samples", samples)
    whole("task.tokens", tokens, 0)
    whole("task.mask_rows", mask_rows, 0)
    chosen, left_out = _pairs(lab)
    work = _Work(lab, settings, samples, tokens, mask_rows, PLAIN if lab.sampling.temperature == 0 else lab.sampling)
    work.check()
    console = console or Console()
    pairs: list[Pair] = []
    broken: dict[str, str] = {}

    def done(facts: Mapping[str, Any]) -> Done:
        out = settings.output_dir
        total = len(chosen) * work.parts + work.mask_rows // 1000
        with tqdm(total=total, desc=settings.name, unit="part", disable=None) as bar:
            bar.set_postfix_str("masks" if work.mask_rows else "")
            walked = work.masks(bar.update)
            for proposer, verifier in chosen:
                bar.set_postfix_str(f"{proposer.name} + {verifier.name}")
                try:
                    pairs.append(work.examine(proposer, verifier, bar.update))
                except ValueError as error:
                    if not pairs:
                        raise
                    broken[f"{proposer.name} ({proposer.drawn}), {verifier.name}"] = str(error)
                    continue
                write_json(out / "certificate.json", _facts(pairs, broken, left_out, work, walked, facts))
                lab.tracker.group(len(pairs) - 1, {f"{pairs[-1].name}: TV of texts": pairs[-1].distance})
            work.confirm(pairs)
        control = joint("iid", Control(), samples, settings.seed, work.sampling)
        found = _histogram(*control, settings.seed)
        certificate = _facts(pairs, broken, left_out, work, walked, facts, found)
        masks = None if walked is None else certificate["constraint"]["masks"]
        return Done(
            certificate,
            lambda: _draw(pairs, control, out),
            lambda _: show(pairs, broken, left_out, found, samples, masks, console),
            code=FAILED if certificate["failed"] or found.p_value >= ALPHA else 0,
        )

    def left() -> tuple[int, str]:
        what = f"{len(pairs)} pairs of {len(chosen)}"
        return len(pairs), f"what is known of {what} is in {settings.output_dir}, unconfirmed"

    task = Task(
        lab, settings, config, ["certify"], done, left, summary="certificate.json", leaves="Certificate and figure"
    )
    return task.run(console)


def _draw(pairs: Sequence[Pair], control: tuple[np.ndarray, np.ndarray], out: Path) -> list[Path]:
    drawn = [(pair.verifier.name, pair.verifier.lossless, (pair.texts, pair.law)) for pair in pairs]
    figure = convergence(drawn, control)
    file = own_folder(out / "figures") / "convergence.png"
    with replacing(file) as stream:
        figure.savefig(stream, bbox_inches="tight", dpi=150)
    return [file]


def _pairs(lab: Lab) -> tuple[list[tuple[Proposer, Verifier]], list[str]]:
    """The composed pair, then every other that fits; and those that do not, in words.

    Raises:
        ValueError: the composed pair does not fit.
    """
    check_pair(lab.proposer.name, draws_of(lab.proposer), lab.verifier, branches(lab.proposer))
    proposers, verifiers = [lab.proposer, *lab.more_proposers.values()], [lab.verifier, *lab.verifiers.values()]
    verifiers = [one for number, one in enumerate(verifiers) if one not in verifiers[:number]]
    every = [(proposer, verifier) for proposer in proposers for verifier in verifiers]
    unfit = [misfit(proposer.name, draws_of(proposer), verifier, branches(proposer)) for proposer, verifier in every]
    fit = [pair for pair, why in zip(every, unfit, strict=True) if why is None]
    return fit, [f"{p.name} ({p.drawn}), {v.name}" for (p, v), why in zip(every, unfit, strict=True) if why]


@dataclass(frozen=True)
class _Work:
    """How pairs are examined."""

    lab: Lab
    settings: Settings
    samples: int
    tokens: int
    mask_rows: int
    sampling: Sampling

    def check(self) -> None:
        """Find what would be refused later, before anything is written.

        Raises:
            ValueError: prompts that do not fit; a constraint on the output that refuses all of them; a pair that fails
                at once on a toy.
        """
        for proposer in [self.lab.proposer, *self.lab.more_proposers.values()]:
            getattr(proposer, "check", lambda _: None)(self.sampling)
        binding = self.lab.binding
        if binding is not None and not self.requests and binding.on_target:
            raise ValueError(
                f"constraint '{binding.constraint.name}' refuses every prompt, so nothing can be decoded under it: "
                f"{self.refused[0]}"
            )

    @cached_property
    def _started(self) -> tuple[list[Request], list[str]]:
        fit, refused = [], []
        for request in self.lab.requests(self.settings):
            try:
                if self.lab.binding is not None:
                    self.lab.binding.constraint.start(request)
                fit.append(request)
            except ConstraintError as error:
                refused.append(str(error))
        return fit, refused

    @property
    def requests(self) -> list[Request]:
        """The prompts at which the constraint can start; all of them without one."""
        return self._started[0]

    @property
    def refused(self) -> list[str]:
        """The constraint's messages for the other prompts."""
        return self._started[1]

    def masks(self, tick: Callable[[float], object]) -> Walked | None:
        """Compare the masks of the run's own constraint with those of fresh states; None where there are none."""
        if self.lab.binding is None or not self.mask_rows:
            return None
        progress = partial(_scaled, tick, 1000)
        with attributed("constraint", self.lab.binding.constraint):
            return walk(self.lab.binding, self.requests, self.mask_rows, self.settings.seed, self.lab.pieces, progress)

    @property
    def has_actions(self) -> bool:
        """Whether a constraint forks or takes back, so that tokens have no law one by one; toys are enumerated."""
        return self.lab.binding is not None and self.lab.binding.constraint.has_actions

    @cached_property
    def own(self) -> tuple[Instance, ...]:
        """Toys under the run's own constraint."""
        return own(self.lab.binding)

    @property
    def parts(self) -> int:
        """How much work a pair is, as the progress bar counts it."""
        return len(every()) + len(self.own) + self.samples // 1000 + self.tokens // 100

    def examine(self, proposer: Proposer, verifier: Verifier, tick: Callable[[float], object]) -> Pair:
        """Every layer, for one pair."""
        start = time.perf_counter()
        proof = prove(proposer, verifier, tick=tick)
        if self.own and proof.findings:
            proof = proof.also(prove(proposer, verifier, instances=self.own, tick=tick))
        if self.sampling != PLAIN and proof.findings:
            warped = prove(proposer, verifier, (*LOOPS, *self.own), self.sampling)
            proof = proof.also(warped)
        drafts: Proposer | Drawn = proposer.drawn if proof.drafts == "reference" else proposer
        progress = partial(_scaled, tick, 1000)
        try:
            texts, law = self.texts(drafts, verifier, self.settings.seed, 1, progress)
        except Reused as error:
            again = Finding("sampled texts", 1.0, 1.0, f"noise is used twice: {error}", 0.0, 0.0, 0)
            proof = replace(proof, findings=(*proof.findings, again))
            texts, law = self.texts(drafts, verifier, self.settings.seed, 1, progress, watched=False)
        pair = Pair(proposer, verifier, proof, drafts, texts, law)
        pair.checks.append(_histogram(texts, law, self.settings.seed))
        if verifier.lossless and self.tokens and not self.has_actions:
            pair.checks += self.scored(pair, self.settings.seed, 1, partial(_scaled, tick, 100))
        pair.seconds = time.perf_counter() - start
        return pair

    def texts(
        self,
        drafts: Proposer | Drawn,
        verifier: Verifier,
        seed: int,
        times: int,
        tick: Callable[[int], object] = _ignore,
        watched: bool = True,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Texts of the toy world and their law."""
        return joint(drafts, verifier, times * self.samples, seed, self.sampling, tick=tick, watched=watched)

    def scored(self, pair: Pair, seed: int, times: int, tick: Callable[[int], object] = _ignore) -> list[Check]:
        """The score tests with the real target, on the lab's prompts, as often as the tokens need."""
        bound = self.lab.binding is not None and self.lab.binding.on_target
        prompts = self.requests if bound else self.lab.requests(self.settings)
        count = -(-times * self.tokens // self.settings.max_new_tokens)
        requests = [replace(prompts[n % len(prompts)], id=n, sampling=self.sampling) for n in range(count)]
        size, binding = self.settings.batch_size, self.lab.binding
        found = scores(self.lab.target, pair.proposer, pair.verifier, requests, seed, size, tick, binding)
        return [
            Check(name, one.tokens, one.z, one.bound, one.would_have_seen().tv, seed) for name, one in found.items()
        ]

    def confirm(self, pairs: Sequence[Pair]) -> None:
        """Holm's test over all checks of pairs that declare themselves lossless; what it rejects is tested once more.

        A rejection counts if it comes again with another seed and four times the samples. Where enumeration has found a
        fault nothing more is sampled, nor where the texts have confirmed one.
        """
        checks = [(pair, check) for pair in pairs if pair.verifier.lossless for check in pair.checks]
        suspicious = [one for one, no in zip(checks, holm([check.p_value for _, check in checks]), strict=True) if no]
        seed = self.settings.seed + 1
        for pair in pairs:
            names = {check.name for one, check in suspicious if one is pair}
            if pair.proof.failure is not None:
                continue
            if JOINT_LAW in names:
                texts = self.texts(pair.drafts, pair.verifier, seed, MORE, watched=False)
                pair.reject([_histogram(*texts, seed)])
            if names - {JOINT_LAW} and not pair.rejected:
                pair.reject([check for check in self.scored(pair, seed, MORE) if check.name in names])


def _histogram(texts: np.ndarray, law: np.ndarray, seed: int) -> Check:
    found = chi_square(np.bincount(texts, minlength=len(law)), law)
    return Check(JOINT_LAW, found.samples, found.statistic, found.p_value, found.detectable, seed)


def _facts(
    pairs: Sequence[Pair],
    broken: Mapping[str, str],
    left_out: Sequence[str],
    work: _Work,
    walked: Walked | None,
    facts: Mapping[str, Any],
    control: Check | None = None,
) -> dict[str, Any]:
    """The contents of ``certificate.json``; without the control it is not complete, and certifies nothing.

    Args:
        pairs: those that were examined; ``broken``: those that failed on a toy, each with the reason.
        left_out: those that do not fit.
        work: how they were examined.
        walked: what comparing masks found; None where none were compared.
        facts: the manifest's.
        control: the test of a broken verifier's texts.
    """
    lossless = [pair for pair in pairs if pair.verifier.lossless]
    tvs = [pair.proof.worst.tv for pair in lossless if pair.proof.worst]
    masks = None if walked is None else _mask_facts(walked, work.lab, work.refused)
    wrong = masks["failed"] if masks else None
    undecided = {} if control is not None and not wrong else {"certified": None}
    failed = [f"{pair.name}: {pair.failed}" for pair in pairs if pair.failed]
    failed += [f"{name}: {why}" for name, why in broken.items()] + ([wrong] if wrong else [])
    certified = None
    if control is not None and lossless:
        certified = control.p_value < ALPHA and all(pair.certified for pair in lossless) and not broken and not wrong
    enumerated = bool(work.own) and all(one.proof.findings for one in pairs)
    constraint = None
    if work.lab.binding is not None:
        constraint = work.lab.binding.facts | {"enumerated": enumerated, "masks": masks}
    return {
        "complete": control is not None,
        "certified": certified,
        "control": control and vars(control),
        "failed": failed,
        "worst_tv": max(tvs, default=None),
        "instances": [one.name for one in (*every(), *work.own)] if any(one.proof.findings for one in pairs) else [],
        "sampling": vars(work.sampling),
        "alpha": ALPHA,
        "power": POWER,
        "detectable": "with this power at level alpha, before Holm's correction over all tests",
        "left_out": list(left_out),
        **{name: facts[name] for name in ("seed", "commit", "versions", "machine", "threads", "weights_sha256")},
        "target": work.lab.target.name,
        "constraint": constraint,
        "pairs": [pair.facts() | undecided for pair in pairs],
    }


def _mask_facts(walked: Walked, lab: Lab, refused: Sequence[str]) -> dict[str, Any]:
    """What comparing masks found, with the first difference as tokens and as text.

    Args:
        walked: what ``walk`` found.
        lab: the run's.
        refused: the constraint's messages, one for each prompt that it refuses.
    """
    assert lab.binding is not None
    facts: dict[str, Any] = {
        "rows": walked.rows,
        "different": walked.different,
        "steps": walked.steps,
        "texts": walked.texts,
        "longest": walked.longest,
        "refused_prompts": len(refused),
        "refusal": refused[0] if refused else None,
        "first": None,
        "failed": None,
    }
    if walked.first is not None:
        one, decode = walked.first, lab.target.tokenizer.decode
        output = [*one.committed, *one.drafted]
        only = {"only_with_drafts": one.added, "only_without": one.missing}
        some = {name: [decode([token]) for token in tokens[:SHOWN]] for name, tokens in only.items()}
        facts["first"] = vars(one) | {"text": decode(output)} | some
        facts["failed"] = (
            f"constraint '{lab.binding.constraint.name}': {walked.different} of {walked.rows} masks differ from those "
            f"of a state that saw no draft; the first ({one.what}, asked by {one.asked}) after {decode(output)!r} of "
            f"request '{one.request}', {len(one.drafted)} tokens of it drafted: allowed only with drafts: "
            f"{_shown(some['only_with_drafts'], one.added)}; only without: {_shown(some['only_without'], one.missing)}"
        )
    return facts


def _shown(some: Sequence[str], tokens: Sequence[int]) -> str:
    """Some tokens as text, and how many more there are."""
    more = f" and {len(tokens) - len(some)} more" if len(tokens) > len(some) else ""
    return f"{list(some)}{more}" if some else "nothing"
