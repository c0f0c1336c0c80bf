"""The task: the distance for every prompt, as a table, ``summary.json`` and a figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from rich.console import Console

from spec_lab.analysis.console import standard_output
from spec_lab.analysis.results import distance
from spec_lab.constrain.potential import TooManyPrefixes
from spec_lab.constrain.potential_bounds import SAMPLERS
from spec_lab.constrain.protocol import ConstraintError
from spec_lab.core.options import Count, OneOf, Whole, checked
from spec_lab.core.progress import Progress
from spec_lab.core.request import Request
from spec_lab.decode.global_constraint import Conditional
from spec_lab.tasks.constraint_distance import tables
from spec_lab.tasks.constraint_distance.distance import Sampler, estimate, exact
from spec_lab.tasks.lab import Lab, Settings
from spec_lab.tasks.shell import Done, Task
from spec_lab.text.prompts import check_one_turn

METHODS = ("auto", "exact", "sampled")


@checked
def measure(
    lab: Lab,
    settings: Settings,
    config: Mapping[str, Any],
    console: Console | None = None,
    *,
    method: Annotated[str, OneOf(METHODS)] = "auto",
    sampler: Annotated[str, OneOf(SAMPLERS)] = "rejection",
    samples: Annotated[int, Whole(2)] = 200,
    attempts: Count = 2000,
) -> int:
    """Measure, for every prompt, the distance between the masked distribution and that of valid outputs.

    Each prompt's result is written when it is finished; the same command with the same directory resumes a stopped run.

    Args:
        lab: the parts; its constraint applies to the target. Its proposer and verifier decode the samples.
        settings: the scalars.
        config: the configuration, for the manifest.
        console: for the table; default standard output.
        method: exact (enumeration), sampled, or auto: exact where constraint.max_prefixes suffices.
        sampler: of valid outputs: rejection (exact), or expected_futures (converges only).
        samples: outputs of each distribution, for each prompt.
        attempts: limit of attempts at valid outputs, for each prompt.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        ValueError: no constraint, or one that has no such distribution; an invalid option; with method "exact" a prompt
            with too many valid outputs.
        OSError: a directory that cannot be written.
    """
    console = console or standard_output()
    check_one_turn(lab.prompts, "task=constraint_distance")
    _check(lab)
    requests = lab.requests(settings)
    written = tables.parts(settings.output_dir)

    def work(_: Mapping[str, Any]) -> Done:
        measured = tables.entries(written)
        todo = [request for request in requests if request.id not in measured]
        for number, entry in measured.items():  # a resumed upload begins anew
            lab.tracker.group(number, _tracked(entry))
        for request in Progress(todo, desc=settings.name, unit="prompt"):
            entry = {"prompt": request.name, **_distance(lab, settings, request, method, sampler, samples, attempts)}
            written.write(f"{request.id:06d}", {"distances": tables.row(request.id, entry)})
            measured[request.id] = entry
            lab.tracker.group(request.id, _tracked(entry))
        written.gather()
        rows = [measured[request.id] for request in requests]
        summary = {
            "experiment": settings.name,
            "target": lab.target.name,
            "constraint": lab.applied.facts if lab.applied else None,
            "temperature": lab.sampling.temperature,
            "max_new_tokens": settings.max_new_tokens,
            "guarantee": tables.GUARANTEES,
            "prompts": rows,
        }
        return Done(summary, distance.result)

    def left() -> tuple[int, str]:
        done = len(tables.entries(written))
        return done, f"the distances of {done} of {len(requests)} prompts are in {settings.output_dir}"

    leaves = "Rows, summary, manifest and figure"
    return Task(lab, settings, config, ["constraint_distance"], work, left, written, leaves=leaves).run(console)


def _check(lab: Lab) -> None:
    """Refuse a constraint without a distribution of valid outputs."""
    applied = lab.applied
    wrong = ""
    if applied is None:
        wrong = "there is no constraint: choose one, such as constraint=regex"
    elif not applied.on_target:
        wrong = f"constraint.placement={applied.placement} does not constrain the output: set it to target or both"
    elif applied.constraint.has_actions:
        wrong = f"'{applied.constraint.name}' backtracks, forks or ends the output itself: choose a grammar"
    elif not lab.verifier.lossless:
        wrong = f"verifier '{lab.verifier.name}' is lossy: choose another"
    if wrong:
        raise ValueError(f"task=constraint_distance: {wrong}")


def _distance(
    lab: Lab, settings: Settings, request: Request, method: str, sampler: str, samples: int, attempts: int
) -> dict[str, Any]:
    """Return the entry of one prompt."""
    assert lab.applied is not None
    conditional = Conditional(lab.applied, lab.target)
    conditional.check_request(request)
    try:
        if method != "sampled":
            facts = exact(lab.target, request, conditional.prefixes(request)).facts()
            texts = [
                output | {"text": lab.target.tokenizer.decode(output["tokens"])} for output in facts["probabilities"]
            ]
            return facts | {"probabilities": texts}
    except TooManyPrefixes as error:
        if method == "exact":
            raise conditional.refusal(request, error) from error
    except ConstraintError as error:
        return {"method": "none", "error": str(error)}
    draws = Sampler(
        lab.target, lab.proposer, lab.verifier, lab.applied, request, sampler, settings.seed, settings.batch_size
    )
    return estimate(draws, samples, attempts)


def _tracked(row: Mapping[str, Any]) -> dict[str, float]:
    tv = row.get("tv")
    return {} if tv is None else {"tv": float(tv["mean"] if isinstance(tv, Mapping) else tv)}
