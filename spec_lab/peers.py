"""transformers' own generation as arms of a run: same weights, prompts, process and sampling, measured in turn.

Time and tokens are split as in the project's own arms: what the first forward over the prompt emits is the prefill's,
the rest is decoding. A streamer, to which ``generate`` hands tokens round by round, tells when the first forward ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from spec_lab.batch import Request
from spec_lab.lab import Decoded
from spec_lab.law import Sampling
from spec_lab.record import Outcome
from spec_lab.target import Target, load_model


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
    """``generate`` of transformers, on a copy of the target's weights with transformers' own attention.

    Args:
        target: whose weights, dtype and device to use.
        sampling: how to sample.
        seed: of torch's generator, with the request's number added, where something is sampled.
    """

    def __init__(self, target: Target, sampling: Sampling, seed: int) -> None:
        self.target, self.sampling, self.seed = target, sampling, seed
        self.model = self._copy(target.name)
        self.model.generation_config = GenerationConfig()  # the checkpoint's own defaults would be mixed in

    def decode(self, requests: Sequence[Request]) -> Decoded:
        """One request after the other; see ``Arm``."""
        return Decoded([], [self._one(request) for request in requests])

    def options(self) -> dict[str, Any]:
        """What the generation config says beyond greedy decoding or sampling."""
        return {}

    def helpers(self) -> dict[str, Any]:
        """What ``generate`` is given beside its config."""
        return {}

    def _one(self, request: Request) -> Outcome:
        if self.sampling.temperature > 0:
            torch.manual_seed(self.seed + request.id)
        prompt = torch.tensor([request.tokens], device=self.target.lm.device)
        room = self.target.context - len(request.tokens)
        watch = Stopwatch()
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=self._config(min(request.max_new_tokens, room), request.stop),
            streamer=watch,
            **self.helpers(),
        )
        end = time.perf_counter()
        tokens = output[0, len(request.tokens) :].tolist()
        finish = "stop" if tokens[-1] in request.stop else "length"
        first = watch.first or end
        return Outcome(request, tokens, finish, min(watch.first_count, len(tokens)), first - watch.start, end - first)

    def _config(self, new: int, stop: frozenset[int]) -> GenerationConfig:
        sampling = self.sampling
        warped = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
        return GenerationConfig(
            max_new_tokens=new,
            do_sample=sampling.temperature > 0,
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=sorted(stop) or None,
            pad_token_id=min(stop, default=0),
            use_cache=True,
            **(warped if sampling.temperature > 0 else {}),
            **self.options(),
        )

    def _copy(self, path: str) -> Any:
        lm = self.target.lm
        return load_model(path, str(lm.device), str(lm.dtype).removeprefix("torch."))[0]


class Bare(Generate):
    """A bare loop over the model with transformers' own cache and nothing around it: what decoding costs at least.

    Args:
        target: as in ``Generate``, as are ``sampling`` and ``seed``.

    Raises:
        ValueError: sampling beyond a temperature.
    """

    def __init__(self, target: Target, sampling: Sampling, seed: int) -> None:
        if sampling.truncates or sampling.repetition_penalty != 1:
            raise ValueError("the bare loop knows a temperature only: leave it out with '~peers.bare'")
        super().__init__(target, sampling, seed)

    @torch.inference_mode()
    def _one(self, request: Request) -> Outcome:
        torch.manual_seed(self.seed + request.id)
        new = min(request.max_new_tokens, self.target.context - len(request.tokens))
        start = time.perf_counter()
        cache = DynamicCache(config=self.model.config)
        token = torch.tensor([request.tokens], device=self.target.lm.device)
        tokens: list[int] = []
        first = 0.0
        while len(tokens) < new and not (tokens and tokens[-1] in request.stop):
            token = self._pick(self.model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1])
            tokens.append(int(token))
            first = first or time.perf_counter()
        finish = "stop" if tokens[-1] in request.stop else "length"
        return Outcome(request, tokens, finish, 1, first - start, time.perf_counter() - first)

    def _pick(self, logits: Tensor) -> Tensor:  # [1, V] -> [1, 1]
        if self.sampling.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        return torch.softmax(logits.float() / self.sampling.temperature, -1).multinomial(1)


class Assisted(Generate):
    """Assisted generation with a draft model.

    Args:
        target: as in ``Generate``, as are ``sampling`` and ``seed``.
        path: the draft's folder or hub name.
        tokens: tokens drafted each round; None leaves transformers' own number and stopping rule.
    """

    def __init__(self, target: Target, sampling: Sampling, seed: int, path: str, tokens: int | None = None) -> None:
        super().__init__(target, sampling, seed)
        self.assistant = self._copy(path)
        self.assistant.generation_config = GenerationConfig()
        if tokens is not None:
            self.assistant.generation_config.num_assistant_tokens = tokens
            self.assistant.generation_config.num_assistant_tokens_schedule = "constant"
            self.assistant.generation_config.assistant_confidence_threshold = 0.0

    def helpers(self) -> dict[str, Any]:
        """See ``Generate``."""
        return {"assistant_model": self.assistant}


class PromptLookup(Generate):
    """Prompt lookup.

    Args:
        target: as in ``Generate``, as are ``sampling`` and ``seed``.
        tokens: tokens drafted each round.
        max_ngram: longest n-gram looked up.
    """

    def __init__(self, target: Target, sampling: Sampling, seed: int, tokens: int = 10, max_ngram: int = 2) -> None:
        super().__init__(target, sampling, seed)
        self.tokens, self.max_ngram = tokens, max_ngram

    def options(self) -> dict[str, Any]:
        """See ``Generate``."""
        return {"prompt_lookup_num_tokens": self.tokens, "max_matching_ngram_size": self.max_ngram}
