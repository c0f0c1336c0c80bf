"""``+experiment=certify``: is the composed pair lossless? A table of results, ``certificate.json`` and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from rich.console import Console

from spec_lab.analysis.console import standard_output
from spec_lab.analysis.results.certificate import result as certificate_result
from spec_lab.core.options import Count, Whole, checked
from spec_lab.core.progress import Progress
from spec_lab.propose import Proposer
from spec_lab.results.manifest import write_json
from spec_lab.tasks.certify.certificate import Control
from spec_lab.tasks.certify.convergence import convergence
from spec_lab.tasks.certify.exact import Counts
from spec_lab.tasks.certify.instances import PLAIN, every_instance
from spec_lab.tasks.certify.masks import MaskComparison
from spec_lab.tasks.certify.pair import Certifier, Check, Pair, histogram
from spec_lab.tasks.certify.sampled import joint
from spec_lab.tasks.certify.significance import ALPHA, POWER
from spec_lab.tasks.lab import Lab, Settings
from spec_lab.tasks.shell import Done, Task
from spec_lab.verify import Verifier, check_pair, misfit

FAILED = 1
"""Exit code where a verifier that is declared lossless is not, where a lossy one does not have the distribution against
which it declares to be exact, where a proposer drafted nothing, or where masks are wrong."""

SHOWN = 8
"""Number of tokens of a wrong mask that are shown as text."""


@checked
def certify(
    lab: Lab,
    settings: Settings,
    config: Mapping[str, Any],
    samples: Count = 10_000,
    tokens: Annotated[int, Whole(0)] = 2_000,
    mask_rows: Annotated[int, Whole(0)] = 20_000,
    console: Console | None = None,
) -> int:
    """Certify every pair of the lab's proposers and verifiers that fits; write ``certificate.json`` and a figure.

    The run's own sampling parameters are used, with temperature 1 in place of 0: at 0 there is no distribution to test.

    Args:
        lab: the parts: the composed pair, and all others of ``arms`` and ``verifiers``.
        settings: the scalars; ``seed`` seeds every sample.
        config: the configuration, for the manifest.
        samples: texts of a toy model that each pair decodes.
        tokens: tokens that each lossless pair decodes with the target itself; 0: none.
        mask_rows: token masks of random drafts compared with those of states that processed no draft; 0: none. Masks
            of random drafts, under the run's own constraint and vocabulary, that are compared with those of fresh
            states (``masks.compare_masks``); 0 for none. Without a constraint there are none.
        console: for the table; default standard output.

    Returns:
        The exit code: 0; 1 where a verifier is not what it declares or a mask is wrong; 130 after Ctrl-C, which keeps
        finished pairs.

    Raises:
        ValueError: the composed pair does not fit; a verifier that cannot run on toys; a wrong option.
        OSError: a directory that cannot be written.
    """
    chosen, left_out = _pairs(lab)
    sampling = PLAIN if lab.sampling.temperature == 0 else lab.sampling
    certifier = Certifier(lab, settings, samples, tokens, mask_rows, sampling)
    certifier.check()
    console = console or standard_output()
    pairs: list[Pair] = []
    broken: dict[str, str] = {}

    def done(facts: Mapping[str, Any]) -> Done:
        out = settings.output_dir
        total = len(chosen) * certifier.parts + mask_rows // 1000
        with Progress(total=total, desc=settings.name, unit="part") as bar:
            bar.set_postfix_str("masks" if mask_rows else "")
            compared = certifier.masks(bar.update)
            for proposer, verifier in chosen:
                bar.set_postfix_str(f"{proposer.name} + {verifier.name}")
                try:
                    pairs.append(certifier.examine(proposer, verifier, bar.update))
                except ValueError as error:
                    if not pairs:
                        raise
                    broken[f"{proposer.name} ({proposer.drawn}), {verifier.name}"] = str(error)
                    continue
                write_json(out / "certificate.json", _facts(pairs, broken, left_out, certifier, compared, facts))
                lab.tracker.group(len(pairs) - 1, {f"{pairs[-1].name}: TV of texts": pairs[-1].distance})
            certifier.confirm(pairs)
        counts = Counts()
        control = joint("iid", Control(), samples, settings.seed, sampling, counts=counts)
        control_test = histogram(*control, settings.seed, counts)
        certificate = _facts(pairs, broken, left_out, certifier, compared, facts, control_test)
        certificate["convergence"] = convergence(
            [(pair.verifier.name, pair.verifier.lossless, (pair.texts, pair.expected)) for pair in pairs], control
        )
        return Done(
            certificate, certificate_result,
            code=FAILED if certificate["failed"] or control_test.p_value >= ALPHA else 0,
        )  # fmt: skip

    def left() -> tuple[int, str]:
        what = f"{len(pairs)} of {len(chosen)} pairs"
        return len(pairs), f"the results of {what} are in {settings.output_dir}, unconfirmed"

    task = Task(
        lab, settings, config, ["certify"], done, left, summary="certificate.json", leaves="Certificate and figure"
    )
    return task.run(console)


def _pairs(lab: Lab) -> tuple[list[tuple[Proposer, Verifier]], list[str]]:
    """Return the composed pair and every other that fits; and the names of those that do not."""
    check_pair(lab.proposer.name, lab.proposer.draws, lab.verifier, lab.proposer.branches)
    proposers, verifiers = [lab.proposer, *lab.more_proposers.values()], [lab.verifier, *lab.verifiers.values()]
    verifiers = [verifier for number, verifier in enumerate(verifiers) if verifier not in verifiers[:number]]
    every = [(proposer, verifier) for proposer in proposers for verifier in verifiers]
    unfit = [misfit(proposer.name, proposer.draws, verifier, proposer.branches) for proposer, verifier in every]
    fit = [pair for pair, why in zip(every, unfit, strict=True) if why is None]
    return fit, [f"{p.name} ({p.drawn}), {v.name}" for (p, v), why in zip(every, unfit, strict=True) if why]


def _facts(
    pairs: Sequence[Pair],
    broken: Mapping[str, str],
    left_out: Sequence[str],
    certifier: Certifier,
    compared: MaskComparison | None,
    facts: Mapping[str, Any],
    control: Check | None = None,
) -> dict[str, Any]:
    """Return the contents of ``certificate.json``; without the control it is incomplete and certifies nothing.

    Args:
        pairs: those that were examined; ``broken``: those that failed on a toy, each with the reason.
        left_out: those that do not fit.
        compared: the comparison of masks; None where none were compared.
        control: the test of a wrong verifier's texts.
    """
    lab, more = certifier.lab, certifier.own
    lossless = [pair for pair in pairs if pair.verifier.lossless]
    tvs = [pair.proof.worst.tv for pair in lossless if pair.proof.worst]
    masks = None if compared is None else _mask_facts(compared, lab, certifier.refused)
    wrong = masks["failed"] if masks else None
    undecided = {} if control is not None and not wrong else {"certified": None}
    failed = [f"{pair.name}: {pair.failed}" for pair in pairs if pair.failed]
    failed += [f"{name}: {why}" for name, why in broken.items()] + ([wrong] if wrong else [])
    certified = None
    if control is not None and lossless:
        certified = control.p_value < ALPHA and all(pair.certified for pair in lossless) and not broken and not wrong
    constraint = None
    if lab.applied is not None:
        enumerated = bool(more) and all(pair.proof.findings for pair in pairs)
        constraint = lab.applied.facts | {"enumerated": enumerated, "masks": masks}
    instances = (*every_instance(), *more) if any(pair.proof.findings for pair in pairs) else ()
    return {
        "complete": control is not None,
        "certified": certified,
        "control": control and vars(control),
        "failed": failed,
        "worst_tv": max(tvs, default=None),
        "instances": [instance.name for instance in instances],
        "sampling": asdict(certifier.sampling),
        "alpha": ALPHA,
        "power": POWER,
        "detectable": "with this power at level alpha, before Holm's correction over all tests",
        "left_out": list(left_out),
        **{name: facts[name] for name in ("seed", "commit", "versions", "machine", "threads", "weights_sha256")},
        "target": lab.target.name,
        "constraint": constraint,
        "pairs": [pair.facts() | undecided for pair in pairs],
    }


def _mask_facts(compared: MaskComparison, lab: Lab, refused: Sequence[str]) -> dict[str, Any]:
    """Return the comparison of masks, with the first difference as tokens and as text.

    Args:
        refused: the constraint's messages, one for each prompt that it refuses.
    """
    assert lab.applied is not None
    facts: dict[str, Any] = {
        "rows": compared.rows,
        "different": compared.different,
        "steps": compared.steps,
        "texts": compared.texts,
        "longest": compared.longest,
        "refused_prompts": len(refused),
        "refusal": refused[0] if refused else None,
        "first": None,
        "failed": None,
    }
    if compared.first is not None:
        difference, decode = compared.first, lab.target.tokenizer.decode
        output = [*difference.committed, *difference.drafted]
        only = {"only_with_drafts": difference.added, "only_without": difference.missing}
        some = {name: [decode([token]) for token in tokens[:SHOWN]] for name, tokens in only.items()}
        facts["first"] = vars(difference) | {"text": decode(output)} | some
        facts["failed"] = (
            f"constraint '{lab.applied.constraint.name}': {compared.different} of {compared.rows} masks differ from "
            f"those of a state that processed no draft; the first ({difference.what}, {difference.asked} draft) after "
            f"{decode(output)!r} of request '{difference.request}', of which {len(difference.drafted)} tokens are "
            f"drafted: allowed only with drafts: {_shown(some['only_with_drafts'], difference.added)}; only without: "
            f"{_shown(some['only_without'], difference.missing)}"
        )
    return facts


def _shown(some: Sequence[str], tokens: Sequence[int]) -> str:
    """Return some tokens as text, and how many more there are."""
    more = f" and {len(tokens) - len(some)} more" if len(tokens) > len(some) else ""
    return f"{list(some)}{more}" if some else "nothing"
