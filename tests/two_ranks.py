"""Run by ``test_parallel`` on two ranks: the first one calls, the other follows, and ``answers.json`` holds the
results.

In the last call the second rank fails alone. Before each load of a model it notes what it still holds
of earlier ones, in ``held.json``.
"""

import json
import sys
import weakref
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from spec_lab.core.draft import Draft
from spec_lab.core.shape import Shape
from spec_lab.drafters.medusa.network import Heads
from spec_lab.models import loading, ranks, tensor_parallel
from spec_lab.models.loading import follow
from spec_lab.models.target import Target
from spec_lab.runners.causal_lm import CausalLM

HERE = Path(sys.argv[1])


def forests(target: Target) -> tuple[list[torch.Tensor], int]:
    """Logits of two forests over scattered cells, which outgrow their spans, and the heads of a layer's cells."""
    lm, logits = target.lm, []
    paths = [lm.open(reserve=8) for _ in range(2)]
    for tokens, tree in (([[5, 6, 7] * 90, [8, 9]], [0, 0, 3, 1, 5]), ([[3], [4, 5]], [0, 0, 2, 1, 1, 6])):
        draft = Draft(Shape(2, np.array(tree)), torch.arange(10, 10 + len(tree)))
        logits.append(lm.forward(paths, tokens, draft).logits)
        for path in paths:
            path.accept([1])
    return logits, lm.cells.views[0][0][0].shape[1]


@torch.inference_mode()
def compared(name: str, dtype: str = "float64") -> dict:
    """The difference between a model split over both ranks and the whole one."""
    how = dict(path=str(HERE / name), dtype=dtype)
    split, whole = Target.load(**how, tensor_parallel=True), loading.load_model(**how, device="cpu")[0]
    target = Target(CausalLM(whole), None, "whole", 512, "", 0.0)
    (ours, heads), (theirs, all_heads) = forests(split), forests(target)
    state, token = torch.randn(2, 32, dtype=whole.dtype), torch.tensor([1, 2])
    drafts = [Heads.random(each, 3, trunk=True)(state, token) for each in (split, target)]
    shard = split.lm.model.model.layers[0].self_attn.q_proj.weight
    shard = (
        shard.to_local() if hasattr(shard, "to_local") else shard
    )  # where it is no DTensor, it is the rank's part already
    return {
        "error": max(float((a - b).abs().max()) for a, b in zip([*ours, drafts[0]], [*theirs, drafts[1]], strict=True)),
        "self_check": split.self_check, "sha256": split.sha256, "vocabulary": split.vocabulary,
        "kv_heads": [heads, all_heads],
        "share_of_a_matrix": shard.numel() / whole.model.layers[0].self_attn.q_proj.weight.numel(),
    }  # fmt: skip


def failing_together(name: str) -> str:
    """The error of a call that fails on both ranks, and whether the next call succeeds."""
    target = Target.load(str(HERE / name), dtype="float64", tensor_parallel=True)
    try:
        target.lm.model(input_ids=torch.tensor([[1]]), logits_to_keep="all")
    except TypeError as error:
        target.lm.model(input_ids=torch.tensor([[1]]))
        return str(error)
    return ""


def watched(read):
    """``loading._read_weights``, which both ranks call before the last call, with a record of held models."""
    seen, held = [], []

    def shards(path: str, *more, **how):
        if path.endswith("unseen"):  # nothing slow remains
            tensor_parallel.join().failed = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
        if ranks.rank():
            held.append(
                {
                    "layers": sum(reference() is not None for reference in seen),
                    "things": len(tensor_parallel.join()._things),
                }
            )
            (HERE / "held.json").write_text(json.dumps(held))
            if path.endswith("unseen"):
                raise OSError("there is nothing on this machine")
        model = read(path, *more, **how)
        seen.append(weakref.ref(model.model.layers[0].self_attn.q_proj))
        return model

    return shards


if __name__ == "__main__":
    loading._read_weights = watched(loading._read_weights)
    if ranks.rank():
        follow()
    else:
        answers = {name: compared(name) for name in ("llama", "qwen3", "latent", "gemma2")}
        answers |= {name: compared(name, "float32") for name in ("mimo_v2_flash", "llama4_text")}
        answers["together"] = failing_together("llama")
        (HERE / "answers.json").write_text(json.dumps(answers))
        half = Target.load(str(HERE / "unseen"), dtype="float64", tensor_parallel=True)
        half.lm.model(input_ids=torch.tensor([[1]]))
        (HERE / "went_on").touch()
