"""transformers' own generation as arms of a run: same weights, prompts, process and sampling; the arms alternate.

Time and tokens are split as in spec_lab's own arms: the tokens of the first forward over the prompt belong to the
prefill, the others to decoding. A streamer, which ``generate`` calls at every step, reads when the first forward ended.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from spec_lab.core.cache_argument import cache_argument
from spec_lab.core.options import DraftModelPath, Filled, Share, Whole, checked
from spec_lab.core.probabilities import Sampling
from spec_lab.core.request import Request
from spec_lab.drafters.draft_model.loading import check_same_tokens
from spec_lab.models import ranks
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.fused import unfuse
from spec_lab.models.loading import load_model
from spec_lab.models.packed import pack
from spec_lab.models.support import use_own_attention
from spec_lab.models.target import Target
from spec_lab.results.writer import Outcome
from spec_lab.tasks.lab import Decoded

DraftTokens = Annotated[int, Whole(1, 1024)]
LookedUp = Annotated[int, Whole(1, 64)]
"""Bounds of the peers' options."""


class Stopwatch(BaseStreamer):
    """Counts and times what ``generate`` emits."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first: float | None = None  # time of the first tokens
        self.first_count = 0
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Receive the prompt at the first call, then the tokens of each step."""
        if not self._prompt_seen:
            self._prompt_seen = True
        elif self.first is None:
            self.first, self.first_count = time.perf_counter(), value.numel()

    def end(self) -> None:
        """Do nothing: there is no text to flush."""


class Generate:
    """transformers' ``generate`` with the target's weights; built by ``plain``, ``assisted`` or ``lookup``.

    Args:
        target: the target whose model runs.
        sampling: the sampling parameters.
        seed: of torch's generator; the request's number is added.
        options: further fields of the generation config.
        assistant: a draft model with its own generation config; None for none.
        sha256: of the assistant's weights; empty for one from the hub. Without an assistant the attribute is None.

    Raises:
        ValueError: ``sampling`` sets penalties other than the repetition penalty, biases or banned words.
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
        if sampling.counts_tokens or sampling.biases:
            raise ValueError(
                "arms of transformers' generate support no presence_penalty, frequency_penalty, logit_bias or "
                "bad_words_ids: leave them out, or the arms"
            )
        self.target, self.sampling, self.seed = target, sampling, seed
        self.options, self.assistant = dict(options or {}), assistant
        self.sha256 = None if assistant is None else sha256
        self.model = as_transformers_runs_it(target)

    @staticmethod
    def plain(target: Target, sampling: Sampling, seed: int) -> Generate:
        """Return autoregressive generation. Arguments as in the class."""
        return Generate(target, sampling, seed)

    @staticmethod
    @checked
    def assisted(
        target: Target,
        sampling: Sampling,
        seed: int,
        path: DraftModelPath,
        revision: Filled | None = None,
        tokens: DraftTokens | None = None,
        confidence: Share = 0.0,
    ) -> Generate:
        """Return assisted generation with a draft model.

        Args:
            target, sampling, seed: as in the class.
            path: the draft model's folder or hub name.
            revision: branch, tag or commit of a hub name; None: main.
            tokens: maximum number of draft tokens per step, at most 1024. None uses transformers' defaults and ignores
                ``confidence``: up to 20 tokens, ended early by a threshold on the draft's confidence.
            confidence: a draft token with a lower probability ends the draft; 0 never ends it.

        Raises:
            ValueError: ``tokens`` is not a whole number in its range, ``confidence`` not a number from 0 to 1; the
                draft model cannot be loaded or has another vocabulary than the target.
            OSError: there is no checkpoint at ``path``.
        """
        config = GenerationConfig()
        if tokens is not None:
            config.num_assistant_tokens = tokens
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = confidence
        lm = target.lm
        dtype = str(lm.dtype).removeprefix("torch.")
        assistant, tokenizer, folder = load_model(path, str(lm.device), dtype, revision=revision)
        pack(assistant)
        check_same_tokens(target, int(assistant.get_output_embeddings().weight.shape[0]), tokenizer, path)
        assistant.generation_config = config
        return Generate(target, sampling, seed, assistant=assistant, sha256=weights_hash(folder))

    @staticmethod
    @checked
    def lookup(
        target: Target, sampling: Sampling, seed: int, tokens: DraftTokens = 10, max_ngram: LookedUp = 2
    ) -> Generate:
        """Return prompt lookup; the defaults are transformers' own.

        Args:
            target, sampling, seed: as in the class.
            tokens: maximum number of draft tokens per step, at most 1024.
            max_ngram: longest n-gram that is looked up, at most 64.

        Raises:
            ValueError: ``tokens`` or ``max_ngram`` is not a whole number in its range.
        """
        options = {
            "prompt_lookup_num_tokens": tokens,
            "max_matching_ngram_size": max_ngram,
        }
        return Generate(target, sampling, seed, options)

    def decode(self, requests: Sequence[Request]) -> Decoded:
        """One request after the other; see ``Arm``. Errors as in ``Request.check_fits``."""
        return one_by_one(requests, self.target, self._one)

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
    """A bare loop over the model with transformers' own KV cache: a lower bound of the cost of decoding.

    Args:
        target, sampling, seed: as in ``Generate``.

    Raises:
        ValueError: ``sampling`` sets more than a temperature.
    """

    def __init__(self, target: Target, sampling: Sampling, seed: int) -> None:
        if sampling.truncates or sampling.penalized:
            raise ValueError(
                "the bare loop supports sampling.temperature only, not top_k, top_p, min_p, penalties, logit_bias or "
                "bad_words_ids: leave it out with '~peers.bare'"
            )
        self.target, self.temperature, self.seed = target, sampling.temperature, seed
        self.model = as_transformers_runs_it(target)

    def decode(self, requests: Sequence[Request]) -> Decoded:
        """One request after the other; see ``Arm``. Errors as in ``Request.check_fits``."""
        return one_by_one(requests, self.target, self._one)

    @torch.inference_mode()
    def _one(self, request: Request) -> Outcome:
        torch.manual_seed(self.seed + request.id)
        new = room(request, self.target)
        start = time.perf_counter()
        cache = DynamicCache(config=self.model.config)
        read: dict[str, Any] = {cache_argument(self.model): cache}
        token = torch.tensor([request.tokens], device=self.target.lm.device)
        tokens: list[int] = []
        first = 0.0
        while len(tokens) < new and not (tokens and tokens[-1] in request.stop):
            token = self._pick(self.model(token, logits_to_keep=1, **read).logits[:, -1])
            tokens.append(int(token))
            first = first or time.perf_counter()
        prefill, decode = first - start, time.perf_counter() - first
        return Outcome(request, tokens, finish(tokens, request), 1, len(tokens) - 1, prefill, decode, prefill)

    def _pick(self, logits: Tensor) -> Tensor:  # [1, V] -> [1, 1]
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        return torch.softmax(logits.float() / self.temperature, -1).multinomial(1)


def as_transformers_runs_it(target: Target) -> Any:
    """Return a copy of the target's model with transformers' own attention and KV cache; the weights are shared.

    Raises:
        ValueError: the model is split over ranks, which can only repeat forwards with spec_lab's KV cells.
    """
    if ranks.size() > 1:
        raise ValueError("peers do not support target.tensor_parallel=true: remove the peers")
    model = target.model
    weights = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    model = copy.deepcopy(model, weights)
    unfuse(model)
    use_own_attention(model)
    model.generation_config = GenerationConfig()  # without the checkpoint's own sampling defaults
    return model


def one_by_one(requests: Sequence[Request], target: Target, decode: Callable[[Request], Outcome]) -> Decoded:
    """Decode each request alone. Errors as in ``Request.check_fits``, before the first one is decoded."""
    for request in requests:
        request.check_fits(target.context, target.vocabulary)
    return Decoded([], [decode(request) for request in requests])


def room(request: Request, target: Target) -> int:
    """Return the maximum number of tokens that the request's limit and the target's context allow."""
    return min(request.max_new_tokens, target.context - len(request.tokens))


def finish(tokens: Sequence[int], request: Request) -> str:
    """Return the finish reason of ``tokens``."""
    return "stop" if tokens[-1] in request.stop else "length"
