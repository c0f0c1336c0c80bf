"""Change the workload in mid-stream, and see who follows: python -m experiments.online.measure.

First a stream of one workload and then of another is served by proposers that learn from requests, and by heads that do
not (``task=serve_trace``). Then the bundled heads serve the same stream in rounds, and learn after each from what was
served (``task=train_online``). The same command resumes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from experiments import runs

LEARNING: dict[str, runs.Arm] = {
    "suffix": ("suffix", {}),
    "recycling": ("recycling", {}),
    "medusa": ("medusa", {}),
    "budget": ("draft_chain", {"depth": 4, "confidence": 0, "policy@policy": "batch_budget"}),
    "fixed": ("draft_chain", {"depth": 4, "confidence": 0}),
}
"""Stores that all requests share, an online model of confidence, and drafters that do not learn."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing.

    Raises:
        CalledProcessError: a run failed; its message is on the terminal.
    """
    parser = runs.parser(__doc__, "outputs/online", 40)
    parser.add_argument("--first", default="code", help="prompts before the change (code)")
    parser.add_argument("--then", default="agentic", help="prompts after it (agentic)")
    parser.add_argument("--before", type=int, default=0, help="prompts that heads learn from before the stream (0)")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate (1e-3)")
    parser.add_argument("--requests", type=int, default=8, help="requests of a round (8)")
    chosen = parser.parse_args(arguments)
    short = [f"max_new_tokens={chosen.new}", f"threads={chosen.threads}"]
    texts = [f"prompts={chosen.first}", f"prompts.limit={chosen.limit}"]
    texts += [f"+prompts@task.drift={chosen.then}", f"task.drift.limit={chosen.limit}"]
    arms = [f"+proposer@arms.{name}={proposer}" for name, (proposer, _) in LEARNING.items()]
    arms += [runs.option(name, key, value) for name, (_, more) in LEARNING.items() for key, value in more.items()]
    served = ["task=serve_trace", "task.segment=8", "batch_size=4", "warmup=16", "proposer=none", *arms]
    _run(*served, *texts, *short, "name=online_served", f"output_dir={chosen.out / 'served'}")
    learned = ["+experiment=train_medusa", "task=train_online", f"task.before={chosen.before}", "batch_size=8"]
    learned += [f"task.start={runs.ZOO / 'medusa'}", "task.recipe.trunk=1536", f"task.learning_rate={chosen.rate}"]
    learned += [f"task.requests={chosen.requests}", f"task.rows={min(chosen.requests, 8)}"]
    _run(*learned, *texts, *short, "name=online_heads", f"output_dir={chosen.out / 'heads'}")


def _run(*options: str) -> None:
    subprocess.run([sys.executable, "-m", "spec_lab", *options], check=True)


if __name__ == "__main__":
    main()
