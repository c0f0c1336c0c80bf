"""Compare all bundled proposers by workload: python -m experiments.proposers.workloads.

Workloads are retrieval, edits of code, agents' loops in JSON, dialogues of three turns, and the edits and records of
prompts=repetitive. All proposers are arms of one run, and alternate; a sweep over workloads and sampling. The same
command resumes; ``workloads_figure.py`` reads the runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments import runs

WORKLOADS = ("retrieval", "editing", "agentic", "dialogue", "repetitive")

ARMS: dict[str, runs.Arm] = {
    name: (name, {})
    for name in (
        "ngram", "ngram_tree", "pld_plus", "suffix", "sam", "recycling", "lookahead", "jacobi", "early_exit", "skip",
        "cascade", "draft_chain", "draft_tree", "draft_best_first", "medusa", "hydra", "eagle", "union", "best_of",
    )
}  # fmt: skip
"""Every proposer that needs no more than the bundled models, with its default options, by name."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing.

    Raises:
        CalledProcessError: a run failed; its message is on the terminal.
    """
    parser = runs.parser(__doc__, "outputs/workloads", 12)
    parser.add_argument("--texts", nargs="+", default=WORKLOADS, help="prompts")
    parser.add_argument("--sampling", nargs="+", default=["greedy", "temperature_1"])
    parser.add_argument("--arms", nargs="+", default=[*ARMS], choices=[*ARMS], help="proposers")
    chosen = parser.parse_args(arguments)
    swept = f"prompts={','.join(chosen.texts)}", f"sampling={','.join(chosen.sampling)}"
    runs.sweep(chosen, chosen.out, {name: ARMS[name] for name in chosen.arms}, *swept)


if __name__ == "__main__":
    main()
