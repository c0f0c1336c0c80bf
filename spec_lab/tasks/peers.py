"""transformers' own generation as arms of a run: same weights, prompts, process and sampling, measured in turn.

Time and tokens are split as in the project's own arms: what the first forward over the prompt emits is the prefill's,
the rest is decoding. A streamer, to which ``generate`` hands tokens round by round, tells when the first forward ended.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from spec_lab.core.options import share, whole
from spec_lab.core.probabilities import Sampling
from spec_lab.engine.request import Request
from spec_lab.models import ranks
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.loading import load_model
from spec_lab.models.target import Target
from spec_lab.propose.draft_model import check_same_tokens
from spec_lab.results.writer import Outcome
from spec_lab.tasks.lab import Decoded

MOST_TOKENS, MOST_NGRAM = 1024, 64
"""Bounds of a peer's options."""


class Stopwatch(BaseStreamer):
    """Counts and times what ``generate`` emits."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first: float | None = None  # when the first tokens came
        self.first_count = 0
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """The prompt first, then the tokens of each round."""
        if not self._prompt_seen:
            self._prompt_seen = True
        elif self.first is None:
            self.first, self.first_count = time.perf_counter(), value.numel()

    def end(self) -> None:
        """Nothing to flush."""


class Generate:
    """``generate`` of transformers over the target's weights; made by ``plain``, ``assisted`` or ``lookup``.

    Args:
        target: whose model to run.
        sampling: how to sample.
        seed: of torch's generator, with the request's number added, where something is sampled.
        options: what the generation config says beyond greedy decoding or sampling.
        assistant: a draft model, whose own generation config says how it drafts; None: there is none.
        sha256: of the assistant's weights; empty for one from the hub. Without an assistant it is None.
    """

    def __init__(
        self,
        target: Target,
        sampling: Sampling,
        seed: int,
        options: Mapping[str, Any] | None = None,
        assistant: Any = None,
        sha256: str = "",
    ) -> None:
        self.target, self.sampling, self.seed = target, sampling, seed
        self.options, self.assistant = dict(options or {}), assistant
        self.sha256 = None if assistant is None else sha256
        self.model = as_transformers_runs_it(target)

    @staticmethod
    def plain(target: Target, sampling: Sampling, seed: int) -> Generate:
        """Token by token. Arguments as in the class."""
        return Generate(target, sampling, seed)

    @staticmethod
    def assisted(
        target: Target, sampling: Sampling, seed: int, path: str, tokens: int | None = None, confidence: float = 0.0
    ) -> Generate:
        """Assisted generation with a draft model.

        Args:
            target: as in the class, as are ``sampling`` and ``seed``.
            path: the draft's folder or hub name.
            tokens: most tokens drafted each step, at most 1024; None leaves transformers' defaults, whatever
                ``confidence``: up to 20, ended early by a threshold on the draft's confidence.
            confidence: a drafted token with less probability ends the draft; 0 never ends it.

        Raises:
            ValueError: ``tokens`` is no count, ``confidence`` no share; a draft that cannot be loaded, or that does not
                speak the target's tokens.
            OSError: no checkpoint there.
        """
        config = GenerationConfig()
        if tokens is not None:
            config.num_assistant_tokens = whole("tokens", tokens, most=MOST_TOKENS)
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = share("confidence", confidence)
        lm = target.lm
        assistant, tokenizer = load_model(path, str(lm.device), str(lm.dtype).removeprefix("torch."))
        check_same_tokens(target, assistant, tokenizer, path)
        assistant.generation_config = config
        return Generate(target, sampling, seed, assistant=assistant, sha256=weights_hash(path))

    @staticmethod
    def lookup(target: Target, sampling: Sampling, seed: int, tokens: int = 10, max_ngram: int = 2) -> Generate:
        """Prompt lookup; the defaults are transformers' own.

        Args:
            target: as in the class, as are ``sampling`` and ``seed``.
            tokens: most tokens drafted each step, at most 1024.
            max_ngram: longest n-gram looked up, at most 64.

        Raises:
            ValueError: ``tokens`` or ``max_ngram`` is no count.
        """
        options = {
            "prompt_lookup_num_tokens": whole("tokens", tokens, most=MOST_TOKENS),
            "max_matching_ngram_size": whole("max_ngram", max_ngram, most=MOST_NGRAM),
        }
        return Generate(target, sampling, seed, options)

    def decode(self, requests: Sequence[Request]) -> Decoded:
        """One request after the other; see ``Arm``. Errors as of ``Request.check_fits``."""
        for request in requests:
            request.check_fits(self.target.context, self.target.vocabulary)
        return Decoded([], [self._one(request) for request in requests])

    def _one(self, request: Request) -> Outcome:
        if self.sampling.temperature > 0:
            torch.manual_seed(self.seed + request.id)
        prompt = torch.tensor([request.tokens], device=self.target.lm.device)
        watch = Stopwatch()
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=self._config(request),
            streamer=watch,
            assistant_model=self.assistant,
        )
        end = time.perf_counter()
        tokens = output[0, len(request.tokens) :].tolist()
        first = watch.first or end
        return Outcome(
            request,
            tokens,
            finish(tokens, request),
            min(watch.first_count, len(tokens)),
            max(len(tokens) - watch.first_count, 0),
            first - watch.start,
            end - first,
            first - watch.start,
        )

    def _config(self, request: Request) -> GenerationConfig:
        sampling = self.sampling
        warped = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
        return GenerationConfig(
            max_new_tokens=room(request, self.target),
            do_sample=sampling.temperature > 0,
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=sorted(request.stop) or None,
            pad_token_id=min(request.stop, default=0),
            use_cache=True,
            **(warped if sampling.temperature > 0 else {}),
            **self.options,
        )


class Bare:
    """A bare loop over the model with transformers' own cache and nothing around it: what decoding costs at least.

    Args:
        target: as in ``Generate``, as are ``sampling`` and ``seed``.

    Raises:
        ValueError: sampling beyond a temperature.
    """

    def __init__(self, target: Target, sampling: Sampling, seed: int) -> None:
        if sampling.truncates or sampling.repetition_penalty != 1:
            raise ValueError("the bare loop knows a temperature only: leave it out with '~peers.bare'")
        self.target, self.temperature, self.seed = target, sampling.temperature, seed
        self.model = as_transformers_runs_it(target)

    def decode(self, requests: Sequence[Request]) -> Decoded:
        """One request after the other; see ``Arm``. Errors as of ``Request.check_fits``."""
        for request in requests:
            request.check_fits(self.target.context, self.target.vocabulary)
        return Decoded([], [self._one(request) for request in requests])

    @torch.inference_mode()
    def _one(self, request: Request) -> Outcome:
        torch.manual_seed(self.seed + request.id)
        new = room(request, self.target)
        start = time.perf_counter()
        cache = DynamicCache(config=self.model.config)
        token = torch.tensor([request.tokens], device=self.target.lm.device)
        tokens: list[int] = []
        first = 0.0
        while len(tokens) < new and not (tokens and tokens[-1] in request.stop):
            token = self._pick(self.model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1])
            tokens.append(int(token))
            first = first or time.perf_counter()
        prefill, decode = first - start, time.perf_counter() - first
        return Outcome(request, tokens, finish(tokens, request), 1, len(tokens) - 1, prefill, decode, prefill)

    def _pick(self, logits: Tensor) -> Tensor:  # [1, V] -> [1, 1]
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        return torch.softmax(logits.float() / self.temperature, -1).multinomial(1)


def as_transformers_runs_it(target: Target) -> Any:
    """The target's model with transformers' own attention and cache: modules and settings copied, weights shared.

    Raises:
        ValueError: the model is split over ranks, which repeat forwards over the project's cells only.
    """
    if ranks.size() > 1:
        raise ValueError("peers run in one process: leave them out with target.tensor_parallel=true")
    model = target.lm.model
    weights = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    model = copy.deepcopy(model, weights)
    model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig()  # the checkpoint's own defaults would be mixed in
    return model


def room(request: Request, target: Target) -> int:
    """Most tokens that the request and the target's context let emit."""
    return min(request.max_new_tokens, target.context - len(request.tokens))


def finish(tokens: Sequence[int], request: Request) -> str:
    """Why ``tokens`` end."""
    return "stop" if tokens[-1] in request.stop else "length"
