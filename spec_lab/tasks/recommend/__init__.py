"""Which speculative mode is fastest for a target, its prompts and this machine: costs, replay, and paired runs."""

from spec_lab.tasks.recommend.task import recommend

__all__ = ["recommend"]
