"""Compare a budget across the batch with other policies under load: python -m experiments.batch_budget.measure.

Every policy is an arm of one run, and all serve the same stream with continuous batching: first with all requests
waiting, at batches of 1 to 16 (a table by concurrency), then as they arrive (Poisson) at several rates. The same
command resumes.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments import runs

DEPTH = 4
"""Most tokens of a chain."""

POLICIES: dict[str, dict[str, object]] = {
    **{f"fixed_{depth}": {"policy@policy": "fixed", "policy.depth": depth} for depth in (1, 2, 4)},
    "by_batch_size": {"policy@policy": "fixed", "policy.depth": 4, "policy.per_batch_size": "{4:2,8:1}"},
    "goodput": {"policy@policy": "goodput"},
    "svip": {"policy@policy": "svip"},
    "budget": {"policy@policy": "batch_budget"},
    "budget_q": {"policy@policy": "batch_budget", "policy.confidence": "q"},
    "budget_each": {"policy@policy": "batch_budget", "policy.scope": "request"},
}
"""Fixed lengths, one that follows the batch size, rules of each sequence, and budgets across the batch."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing.

    Raises:
        CalledProcessError: a run failed; its message is on the terminal.
    """
    parser = runs.parser(__doc__, "outputs/batch_budget", 64)
    parser.add_argument(
        "--eagle3", help="folder of an EAGLE-3 head of SmolLM2, which is measured in place of the bundled model"
    )
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 8, 16])
    parser.add_argument("--rates", type=float, nargs="*", default=[1.0, 2.0, 4.0], help="requests per second")
    chosen = parser.parse_args(arguments)
    proposer, plain = "draft_chain", {"depth": DEPTH, "confidence": 0}
    options = ["prompts=bundled"]
    if chosen.eagle3:
        proposer, plain = runs.chain("eagle", chosen.eagle3, DEPTH)
        options = ["target=smollm2", "target.engine=transformers", "prompts=spec_bench", "prompts.template=checkpoint"]
        options += ["max_prompt_tokens=2000"]
    arms: dict[str, runs.Arm] = {name: (proposer, {**plain, **policy}) for name, policy in POLICIES.items()}
    served = [*options, "task=serve_trace", "task.segment=16"]
    if chosen.batches:
        sizes = ",".join(map(str, chosen.batches))
        runs.sweep(chosen, chosen.out / "concurrency", arms, *served, f"batch_size={sizes}")
    if chosen.rates:
        rates = ",".join(f"{rate:g}" for rate in chosen.rates)
        poisson = ["task.arrivals=poisson", f"task.rate={rates}", "batch_size=16"]
        runs.sweep(chosen, chosen.out / "arrivals", arms, *served, *poisson)


if __name__ == "__main__":
    main()
