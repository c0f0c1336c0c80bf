"""How close an arm's forwards of the target come to what this machine can do (``core.roofline``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from spec_lab.analysis.metrics.experts import per_layer
from spec_lab.analysis.metrics.intervals import Interval, cluster_interval, ratio
from spec_lab.analysis.metrics.phases import since_last_step
from spec_lab.core.roofline import Roofline
from spec_lab.results.writer import Tables


def roofline_figures(tables: Tables, arm: str, roofline: Roofline | None) -> dict[str, Any]:
    """Return the figures of one arm; NaN without its steps, and where no roofline was measured.

    Returns:
        ``roofline_share``: the least seconds of the target's forwards / the measured seconds inside its module calls,
            with its interval. 1 is the limit of this machine as measured. Shares above it show that the machine was
            busier when its limits were measured than during the run, or that the forwards use other products than the
            measured ones: llama.cpp multiplies quantised weights in int8 and bf16 weights in bf16, where the CPU has
            such instructions, while the measured product of a GGUF target is torch's in float32.
        ``roofline_share_end_to_end``: the same least seconds / all decode seconds. Drafting, verification and the
            engine's own work lower it.
        ``memory_bound_steps``: share of the steps that reading bounds; computing bounds the others.
    """
    if roofline is None:
        nothing = Interval(*[float("nan")] * 3)._asdict()
        return {"roofline_share": nothing, "roofline_share_end_to_end": nothing, "memory_bound_steps": float("nan")}
    steps = step_bounds(tables, arm, roofline)
    least = np.maximum(steps["memory"], steps["compute"])
    shares = {
        name: cluster_interval(least, steps[seconds], steps["group"])._asdict()
        for name, seconds in (("roofline_share", "forward"), ("roofline_share_end_to_end", "whole"))
    }
    return shares | {"memory_bound_steps": ratio((steps["memory"] >= steps["compute"]).sum(), len(steps))}


def step_bounds(tables: Tables, arm: str, roofline: Roofline) -> pd.DataFrame:
    """Return one row for each step of the batch that computed no part of a prompt.

    Columns: ``group``; ``memory``, ``compute``, the least seconds of reading and of computing; ``forward``, the seconds
    inside the target's module calls; ``whole``, the seconds since the end of the step before.
    """
    forwards = tables.forwards[tables.forwards["arm"] == arm].sort_values(["group", "forward"])
    forwards = forwards.assign(whole=since_last_step(forwards))
    forwards = forwards.assign(place=np.arange(len(forwards)))
    steps = tables.steps[tables.steps["arm"] == arm].merge(
        forwards[["group", "forward", "place"]], on=["group", "forward"]
    )
    prefill = forwards["prefill"].to_numpy(dtype=bool) | (forwards["prefill_chunks"] > 0).to_numpy()
    prefill[steps.loc[steps["prefill"], "place"]] = True
    steps = steps[~prefill[steps["place"]]]
    number = np.cumsum(~prefill) - 1
    kept = forwards[~prefill]
    rows = steps["context"], steps["pending"], steps["nodes"] + steps["computed_only"]
    memory, compute = roofline.seconds(number[steps["place"]], *rows, per_layer(kept))
    return pd.DataFrame(
        {
            "group": kept["group"].to_numpy(),
            "memory": memory,
            "compute": compute,
            "forward": kept["target_forward"].to_numpy(),
            "whole": kept["whole"].to_numpy(),
        }
    )
