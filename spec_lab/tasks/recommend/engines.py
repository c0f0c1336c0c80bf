"""The flags of other engines for a mode, where they have it. Facts: docs/reference/options_of_other_engines.md."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from spec_lab.tasks.recommend.modes import SpeculativeMode

VLLM: Mapping[str, Mapping[str, str]] = {
    "ngram": {"method": "ngram", "prompt_lookup_max": "=max_ngram", "prompt_lookup_min": "=min_ngram"},
    "suffix": {"method": "suffix", "suffix_decoding_max_tree_depth": "=max_match",
               "suffix_decoding_max_spec_factor": "=factor", "suffix_decoding_min_token_prob": "=min_share"},
    "draft_chain": {"method": "draft_model", "model": "=path"},
    "pard": {"method": "draft_model", "model": "=path", "parallel_drafting": "=true"},
    "eagle": {"method": "=name", "model": "=path"},
    "peagle": {"method": "eagle3", "model": "=path", "parallel_drafting": "=true"},
    "medusa": {"method": "medusa", "model": "=path"},
    "mtp": {"method": "mtp"},
    "block": {"method": "dflash", "model": "=path"},
}  # fmt: skip
"""Keys of vLLM's ``--speculative-config`` beside ``num_speculative_tokens``, all of chains; a value after "=" is that
of an option, or of a fact of the proposer (``name`` is eagle or eagle3)."""

TREE = "--speculative-num-steps {depth} --speculative-eagle-topk {children} --speculative-num-draft-tokens {rows}"

OTHERS: Mapping[str, Mapping[str, str]] = {
    "SGLang": {
        "ngram_tree": "--speculative-algorithm NGRAM --speculative-num-draft-tokens {rows}",
        "eagle": f"--speculative-algorithm {{algorithm}} --speculative-draft-model-path {{path}} {TREE}",
        "draft_chain": f"--speculative-algorithm STANDALONE --speculative-draft-model-path {{path}} {TREE}",
        "mtp": f"--speculative-algorithm NEXTN {TREE}",
        "block": "--speculative-algorithm DFLASH --speculative-draft-model-path {path} "
                 "--speculative-dflash-block-size {rows}",
    },
    "llama.cpp": {
        "ngram": "--spec-type ngram-simple --spec-ngram-simple-size-n {max_ngram} --spec-ngram-simple-size-m {depth}",
        "draft_chain": "--model-draft {path} --draft-max {depth} --draft-p-min {confidence}",
    },
}  # fmt: skip
"""Flags of a server by engine and proposer."""


def flags(mode: SpeculativeMode, depth: int, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the flags by engine, without those that do not have the mode.

    None has a policy of depths, or block drafters with a head on their rows (DSpark, Domino, DFlash2).

    Args:
        mode: a mode.
        depth: levels of its drafts.
        facts: of its proposer, for options that the mode does not give.
    """
    if mode.policy not in ("none", "fixed") or (mode.proposer == "block" and facts.get("head")):
        return {}
    chain = re.fullmatch("1(x1)*", str(facts.get("tree", mode.options.get("tree", "1")))) is not None
    options = {"path": "DRAFTER", "children": 1, "nodes": None, "confidence": 0, "true": True, **facts, **mode.options}
    options["depth"] = mode.policy_options.get("depth", depth)
    nodes = None if "tree" in facts and chain else options["nodes"]  # a policy may shorten a chain
    options["rows"] = 1 + (nodes or options["depth"])
    options["algorithm"] = str(options.get("name", "")).upper()
    given: dict[str, str] = {}
    if mode.proposer in VLLM and chain:
        keys = {key: options[text[1:]] if text[0] == "=" else text for key, text in VLLM[mode.proposer].items()}
        config = {**keys, "num_speculative_tokens": options["depth"]}
        given["vLLM"] = f"--speculative-config '{json.dumps(config)}'"
    for engine, known in OTHERS.items():
        if mode.proposer in known:
            given[engine] = known[mode.proposer].format(**options)
    return given
