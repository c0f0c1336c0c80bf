"""The columns of a run's three tables, with their types and meanings. A step of the batch is one forward."""

from __future__ import annotations

import pyarrow as pa

_TEXT, _WHOLE, _REAL, _FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()

FORWARDS = {
    "id": (_TEXT, "group/arm/forward"),
    "group": (_WHOLE, "number of the group of prompts decoded together"),
    "arm": (_TEXT, "the name of the arm's proposer, 'baseline', or the name of another arm"),
    "forward": (_WHOLE, "number of the forward in its group and arm, from 0"),
    "prefill": (_FLAG, "whether this forward computed the prompts; decode time and tau start after it"),
    "live": (_WHOLE, "sequences of this forward"),
    "nodes": (_WHOLE, "draft nodes of all trees"),
    "cells": (_WHOLE, "attended KV positions of all sequences, in a layer with full attention"),
    "computed_only": (_WHOLE, "rows computed with the drafts that no verifier may accept, such as lookahead's window"),
    "prefill_chunks": (_WHOLE, "sequences that only computed a part of their prompt"),
    "copies_before": (_WHOLE, "copies from the device to the host before the target's forward, counted on the CPU too"),
    "copies_after": (_WHOLE, "the same after it"),
    "uploads": (_WHOLE, "copies from the host to the device; none on the CPU"),
    "captures": (_WHOLE, "forwards of new fixed shapes, which were captured as CUDA graphs (target.graphs)"),
    "capture": (_REAL, "seconds of capturing them, which no other column counts"),
    "start": (_REAL, "seconds from the start of the arm's step 0 to the start of this one"),
    "propose": (_REAL, "seconds of drafting"),
    "propose_forward": (_REAL, "of these, seconds inside module calls of a draft model or heads"),
    "mask_busy": (_REAL, "seconds of computing constraint masks, in any thread"),
    "mask_wait": (_REAL, "of these, seconds that the step waited for masks"),
    "target": (_REAL, "seconds of the target's forward, packing and KV bookkeeping included"),
    "target_forward": (_REAL, "of these, seconds inside its module calls"),
    "probabilities": (_REAL, "seconds of turning logits into target probabilities"),
    "verify": (_REAL, "seconds of verification and of sampling the outcome"),
    "commit": (_REAL, "seconds of the commit"),
    "whole": (_REAL, "seconds of the whole step"),
}
"""One row for each forward of a batch."""

STEPS = {
    "id": (_TEXT, "request/arm/sequence/forward"),
    "group": (_WHOLE, "as in forwards"),
    "arm": (_TEXT, "as in forwards"),
    "request": (_WHOLE, "number of the prompt in its run"),
    "sequence": (_WHOLE, "number of the sequence in its request; 0 is the first, its forks follow"),
    "parent_sequence": (_WHOLE, "number of the sequence it was forked from; -1 for none"),
    "forward": (_WHOLE, "as in forwards"),
    "prefill": (_FLAG, "as in forwards"),
    "pending": (_WHOLE, "committed tokens that were not computed yet when the step began"),
    "forced": (_WHOLE, "of the draft nodes, those whose token was the only allowed one"),
    "nodes": (_WHOLE, "draft nodes, forced ones included"),
    "computed_only": (_WHOLE, "as in forwards"),
    "legal": (_WHOLE, "of the draft nodes, those that the constraint allows; all without one"),
    "depth": (_WHOLE, "depth of the draft tree"),
    "path": (pa.list_(pa.int64()), "the accepted path as child ranks, before truncation"),
    "stop_had_children": (_FLAG, "whether the node where the path ended had children, all of them rejected"),
    "accepted": (_WHOLE, "accepted draft tokens, before truncation, forced ones included"),
    "emitted": (_WHOLE, "emitted tokens, before truncation: accepted, bonus or recovered, and appended forced tokens"),
    "accepted_kept": (_WHOLE, "accepted tokens left after truncation at stop tokens and limits"),
    "emitted_kept": (_WHOLE, "emitted tokens left after truncation at stop tokens and limits"),
    "forced_accepted": (_WHOLE, "of accepted, tokens that were forced"),
    "forced_accepted_kept": (_WHOLE, "of accepted_kept, tokens that were forced"),
    "forced_emitted": (_WHOLE, "of emitted, tokens that were forced"),
    "forced_emitted_kept": (_WHOLE, "of emitted_kept, tokens that were forced"),
    "taken_back": (_WHOLE, "tokens that the constraint removed after this step (backtracking)"),
    "forks": (_WHOLE, "sequences that the constraint forked off after this step"),
    "expected_accepted": (_REAL, "expected accepted tokens given the draft, before truncation, without forced ones"),
    "expected_emitted": (_REAL, "expected emitted tokens given the draft, likewise"),
    "expected_kind": (_TEXT, "'exact': given the draft; 'noise': given its noise as well; empty: a failed step"),
    "empty_residual": (_FLAG, "whether the residual was all zero by rounding, so that the token was drawn from p"),
    "finish": (_TEXT, "finish reason (engine.request.FINISHES) of a sequence that ended with this step; else empty"),
    "context": (_WHOLE, "tokens of the sequence when the step began, prompt included"),
}
"""One row for each sequence in each step."""

REQUESTS = {
    "id": (_TEXT, "request/arm/sequence"),
    "group": (_WHOLE, "as in forwards"),
    "arm": (_TEXT, "as in forwards"),
    "request": (_WHOLE, "number of the prompt in its run; keys its randomness"),
    "sequence": (_WHOLE, "as in steps"),
    "parent_sequence": (_WHOLE, "as in steps"),
    "name": (_TEXT, "the prompt's id"),
    "workload": (_TEXT, "the prompt's workload"),
    "source": (_TEXT, "the prompt's source"),
    "seed": (_WHOLE, "the run's seed"),
    "order": (_WHOLE, "the arm's place in its group's order, from 0"),
    "prompt": (_TEXT, "the prompt"),
    "prompt_tokens": (_WHOLE, "its length in tokens"),
    "text": (_TEXT, "the output as text, without special tokens"),
    "tokens": (pa.list_(pa.int64()), "the output's token ids, after truncation; of a fork, also those before the fork"),
    "ends": (pa.list_(pa.int64()), "for each token, number of characters of the text that no later token changes"),
    "prefill_tokens": (_WHOLE, "of them, those emitted by the prefill's forward"),
    "decode_tokens": (_WHOLE, "of them, the others; of a fork, those that it did not share"),
    "queue_seconds": (_REAL, "seconds from its arrival to its admission; 0 in a fixed group, which does not queue"),
    "prefill_seconds": (_REAL, "seconds from its admission to the end of the step that emitted its first token"),
    "prefill_compute_seconds": (
        _REAL,
        "seconds of the steps until its first token, each multiplied by the share of its computed tokens (pending and "
        "drafted) that belong to this sequence; 0 for forks. Over a fixed group they add up to the prefill's seconds",
    ),
    "decode_seconds": (_REAL, "seconds from the prefill's end to the end of the request's last step"),
    "finish": (_TEXT, "finish reason (engine.request.FINISHES)"),
    "kept": (_FLAG, "whether the constraint kept this sequence when the request had finished"),
    "violated": (_WHOLE, "tokens emitted before the first that an observing constraint does not allow; -1 for none"),
    "error": (_TEXT, "why the request failed; else empty"),
}
"""One row for each sequence of a request, in each arm: exactly one unless a constraint forked it."""

OPTIONAL = {
    "forwards": {
        "turn": (
            _WHOLE,
            "as in requests; forward goes on from turn to turn, and start begins at 0 in each",
        ),
        "experts": (
            pa.list_(pa.int64()),
            "of a mixture of experts, for each layer with experts, the different ones that the rows of the forward "
            "chose; null where that is not counted: in forwards that only compute prompts, or continue a draft of the "
            "target's own layers (early_exit)",
        ),
        "experts_accepted": (
            pa.list_(pa.int64()),
            "the same of pending tokens and accepted draft nodes, before truncation",
        ),
        "experts_rejected": (pa.list_(pa.int64()), "the same of all other draft nodes"),
    },
    "steps": {
        "draft_tokens": (pa.list_(pa.int32()), "the drafted tokens, in the order of the tree's nodes"),
        "draft_parents": (
            pa.list_(pa.int32()),
            "for each drafted token the place of its parent among them; -1 below the root. Siblings stand in the order "
            "drawn",
        ),
        "draft_p": (pa.list_(pa.float32()), "target probability of each drafted token, given the path above it"),
        "draft_q": (
            pa.list_(pa.float32()),
            "draft probability of each drafted token before any sibling was drawn; null where it was not sampled",
        ),
        "draft_greedy_q": (
            pa.list_(pa.float32()),
            "probability that the drafter gave each token that it chose as the likeliest instead of drawing it: of a "
            "model at temperature 1, of suffix the share of the occurrences of the tokens above it; null where the "
            "token was sampled, and of drafters that compute none",
        ),
        "draft_accept": (
            pa.list_(pa.float32()),
            "probability that each drafted token is accepted given that its parent is, from the verifier's exact "
            "distribution (expected_kind says whether given the noise too); null where the parent cannot be "
            "accepted, and where the step failed before it was verified",
        ),
        "draft_confidence": (
            pa.list_(pa.float32()),
            "the drafter's own prediction of draft_accept, by a confidence head (DSpark 2607.05147); null without one",
        ),
        "draft_legal": (
            pa.list_(pa.bool_()),
            "whether the constraint allows each drafted token and those above it; null without a constraint on the "
            "target",
        ),
        "draft_forced": (
            pa.list_(pa.bool_()),
            "whether each drafted token was the only allowed one; null without a constraint on the target",
        ),
        "emitted_tokens": (pa.list_(pa.int32()), "the emitted tokens, before truncation; emitted says how many"),
        "emitted_origins": (
            pa.list_(_TEXT),
            "where each comes from: accepted; bonus, after a path that was accepted to its leaf; recovered, after a "
            "rejection; forced: the only token that the constraint allowed",
        ),
        "emitted_p": (_REAL, "target probability of the token emitted after the accepted path; null if there is none"),
        "policy": (_TEXT, "what a policy decided for this step, as JSON (core.limit.Limit)"),
    },
    "requests": {
        "conversation": (_TEXT, "the id of the conversation that the request is a turn of"),
        "turn": (_WHOLE, "which of the model's answers in its conversation, from 1; recorded ones do not count"),
        "checker": (_TEXT, "the checker of this answer (text.checkers.CHECKERS); empty where it is not checked"),
        "correct": (_FLAG, "whether the checker finds the answer correct; null where it is not checked"),
        "cached_tokens": (_WHOLE, "of the prompt's tokens, those whose KV cache came from the prefix cache"),
        "other_cores": (
            _REAL,
            "cores that other processes used on average while the arm decoded the group (of conversations the turn); "
            "below 0 by rounding of short times; null where the system does not report it",
        ),
        "attempt": (_WHOLE, "how often its group had been decoded before and was discarded as disturbed"),
    },
}
"""Columns that some runs write in addition; a row may be null there. Readers accept tables with and without them."""

TURN_COLUMNS = ("conversation", "turn")
"""The optional columns of runs of conversations; ``forwards`` and ``requests`` have ``turn``."""

CHECK_COLUMNS = ("checker", "correct")
"""The optional columns of ``requests`` of runs whose prompts have a checker."""

TIMING_COLUMNS = ("other_cores", "attempt")
"""The optional columns of ``requests`` that every run writes; older ones lack them."""

DRAFT_COLUMNS = tuple(name for name in OPTIONAL["steps"] if name.startswith(("draft_", "emitted_")))
"""The optional columns of ``steps`` that the run options ``record=drafts`` and ``record=replay`` add."""

TOKENS = {
    "id": (_TEXT, "group/token"),
    "group": (_WHOLE, "as in forwards"),
    "token": (_WHOLE, "the token's id"),
    "text": (_TEXT, "its text, cut to 64 characters: bytes that are no UTF-8 as \\x.., special tokens by their names"),
}
"""The text of every token that the group's steps drafted or emitted. The run option ``record=drafts`` writes it."""

METRICS = {
    "id": (_TEXT, "arm/metric/request"),
    "arm": (_TEXT, "as in forwards"),
    "metric": (_TEXT, "name of the value, as in summary.json below metrics"),
    "request": (_WHOLE, "as in steps; -1: the value is one of the whole arm"),
    "value": (_REAL, "the value"),
}
"""One row for each value of the metrics that the run option ``metrics`` names, computed when the run ends."""

SCHEMAS = {"forwards": FORWARDS, "steps": STEPS, "requests": REQUESTS}

_BYTES = pa.binary()

REPLAY = {
    "id": (_TEXT, "request/arm/sequence/forward/row"),
    "group": (_WHOLE, "as in forwards"),
    "arm": (_TEXT, "as in forwards"),
    "request": (_WHOLE, "as in steps"),
    "sequence": (_WHOLE, "as in steps"),
    "forward": (_WHOLE, "as in forwards; of a verifier study the position"),
    "prefill": (_FLAG, "as in steps; false in a verifier study"),
    "position": (_WHOLE, "tokens of the sequence when the step began, prompt included: as context in steps"),
    "row": (_WHOLE, "number of the row in its tree: 0 is the root, the nodes follow in the draft's order"),
    "parent": (_WHOLE, "the row above; -1 of the root. Siblings stand in the order in which they were drawn"),
    "token": (_WHOLE, "the node's token; of the root the last committed one"),
    "way": (_TEXT, "how the token was drawn: iid, without_replacement, deterministic, gumbel; root: committed"),
    "features": (_TEXT, "hash of the hidden states that the proposer reads of this step; empty where it reads none"),
    "ids": (_BYTES, "recorded tokens, 3 bytes each, lowest first: those of largest max(p, q); empty: all, in order"),
    "p": (
        _BYTES,
        "their target probabilities below this row, float32: at temperature 1, after penalties, biases and "
        "banned words, before top-k, top-p and min-p",
    ),
    "q": (_BYTES, "their draft probabilities as they were drawn from, float32; empty where nothing was drawn from a q"),
    "p_rest": (pa.float32(), "target probability of all other tokens"),
    "q_rest": (pa.float32(), "draft probability of all other tokens"),
    "p_most": (pa.float32(), "largest target probability of another token"),
    "q_most": (pa.float32(), "largest draft probability of another token"),
    "vocabulary": (_WHOLE, "tokens of the target"),
    "sampling": (_TEXT, "the request's sampling parameters, as JSON"),
}
"""One row for each row of a recorded draft tree: the root, whose p and q are those of the first drafted token, and the
nodes. The run option ``record=replay`` writes it. The seconds of the step are in ``forwards``."""
