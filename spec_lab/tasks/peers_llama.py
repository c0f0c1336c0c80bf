"""Other decoding on llama.cpp as arms of a run on a GGUF file: same weights, prompts, process and sampling.

``LlamaGenerate`` is llama-cpp-python's generation, alone, with its prompt lookup, or with a draft model. ``LlamaLoop``
calls llama_decode and llama.cpp's own sampler in turn, as a program in C does. Time and tokens are split as in
``peers``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from spec_lab.core.options import checked
from spec_lab.core.probabilities import Sampling
from spec_lab.core.request import Request
from spec_lab.drafters.draft_model.loading import check_same_tokens
from spec_lab.models.gguf import llama_of, require_llama_cpp
from spec_lab.models.gguf_file import read_gguf
from spec_lab.models.gguf_tokenizer import read_gguf_tokenizer
from spec_lab.models.target import Target
from spec_lab.results.writer import Outcome
from spec_lab.tasks.lab import Decoded
from spec_lab.tasks.peers import DraftTokens, LookedUp, finish, one_by_one, room

GRAIN = 256
"""KV caches are allocated in multiples of it, as llama.cpp pads its context."""


def timed(request: Request, tokens: Iterator[int], start: float) -> Outcome:
    """Return the outcome of a stream of tokens; the first one ends the prefill.

    Args:
        tokens: the generated tokens, no more than there is room for; iteration ends at a stop token.
        start: when the prefill began, on ``time.perf_counter``.
    """
    output: list[int] = []
    first = start
    for token in tokens:
        output.append(token)
        if len(output) == 1:
            first = time.perf_counter()
        if token in request.stop:
            break
    prefill, decode = first - start, time.perf_counter() - first
    return Outcome(request, output, finish(output, request), 1, len(output) - 1, prefill, decode, prefill)


class GrowingLlama:
    """A ``Llama`` that is made when its first requests are known, and again where longer ones follow.

    llama.cpp allocates a KV cache at once; one of a model's whole context may be larger than the memory.

    Args:
        make: returns a ``Llama``, for the number of tokens of its KV cache.
        more: tokens beyond those of a request, for drafts.
    """

    def __init__(self, target: Target, make: Callable[[int], Any], more: int = 0) -> None:
        self.target, self.make, self.more = target, make, more
        self.size = 0
        self.made: Any = None

    def for_requests(self, requests: Sequence[Request]) -> Any:
        """Return one with room for each of the requests, which fit the target, and for all that it may emit."""
        required = self.more + max(len(request.tokens) + room(request, self.target) for request in requests)
        if required > self.size:
            size = -(-max(required, 2 * self.size) // GRAIN) * GRAIN
            self.size, self.made = 0, None  # frees the one before
            self.size, self.made = size, self.make(size)
        return self.made


class LlamaGenerate:
    """llama-cpp-python's ``Llama.generate``; built by ``plain``, ``lookup`` or ``assisted``.

    Args:
        target: of a GGUF file.
        sampling: the sampling parameters.
        seed: of the library's sampler; the request's number is added.
        drafts: returns what drafts, for the number of tokens of its KV cache; None for no drafts.
        tokens: most drafted tokens of a step.
        sha256: of the draft model's file; None without one.

    Raises:
        ValueError: the target is no GGUF file, or ``sampling`` sets what the library does otherwise.
    """

    def __init__(
        self,
        target: Target,
        sampling: Sampling,
        seed: int,
        drafts: Callable[[int], Any] | None = None,
        tokens: int = 0,
        sha256: str | None = None,
    ) -> None:
        if sampling.penalized:
            raise ValueError(
                "llama.cpp penalises the last 64 tokens only, and its arms read no logit_bias or bad_words_ids: set "
                "sampling.repetition_penalty=1 and leave out the other penalties and biases, or leave its arms out"
            )
        if sampling.truncates and sampling.temperature not in (0, 1):
            raise ValueError(
                "llama-cpp-python truncates before it divides by the temperature, spec_lab and transformers after it: "
                "with sampling.top_k, top_p or min_p set sampling.temperature to 0 or 1 (got "
                f"{sampling.temperature:g}), or leave its arms out"
            )
        require_llama_cpp(target)
        self.target, self.sampling, self.seed, self.sha256 = target, sampling, seed, sha256

        def make(size: int) -> Any:
            if drafts is None:
                return llama_of(target, size)
            # With a draft model the library keeps all logits, but has room for those of one batch only if not told to.
            return llama_of(target, size, draft_model=drafts(size), logits_all=True)

        self.llama = GrowingLlama(target, make, tokens + 1)

    @staticmethod
    def plain(target: Target, sampling: Sampling, seed: int) -> LlamaGenerate:
        """Return generation without drafts. Arguments as in the class."""
        return LlamaGenerate(target, sampling, seed)

    @staticmethod
    @checked
    def lookup(
        target: Target, sampling: Sampling, seed: int, tokens: DraftTokens = 10, max_ngram: LookedUp = 2
    ) -> LlamaGenerate:
        """Return prompt lookup; the defaults are llama-cpp-python's own.

        Args:
            target, sampling, seed: as in the class.
            tokens: maximum number of draft tokens per step, at most 1024.
            max_ngram: longest n-gram that is looked up, at most 64.

        Raises:
            ValueError: an option is not a whole number in its range; and as in the class.
        """
        require_llama_cpp(target)
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        return LlamaGenerate(target, sampling, seed, lambda _: LlamaPromptLookupDecoding(max_ngram, tokens), tokens)

    @staticmethod
    @checked
    def assisted(target: Target, sampling: Sampling, seed: int, path: str, tokens: DraftTokens = 8) -> LlamaGenerate:
        """Return generation with a draft model that drafts greedily.

        Args:
            target, sampling, seed: as in the class.
            path: the draft model's GGUF file.
            tokens: number of draft tokens per step, at most 1024.

        Raises:
            OSError: there is no such file.
            ValueError: ``tokens`` is not a whole number in its range; the draft model has other tokens than the target;
                and as in the class.
        """
        file = read_gguf(Path(path))
        check_same_tokens(target, file.vocabulary, read_gguf_tokenizer(file), path)

        def drafts(size: int) -> GreedyDraft:
            return GreedyDraft(llama_of(target, size, path), tokens)

        return LlamaGenerate(target, sampling, seed, drafts, tokens, file.source_sha256)

    def decode(self, requests: Sequence[Request]) -> Decoded:
        """One request after the other; see ``Arm``. Errors as in ``Request.check_fits``."""
        return one_by_one(requests, self.target, lambda request: self._one(self.llama.for_requests(requests), request))

    def _one(self, llama: Any, request: Request) -> Outcome:
        sampling = self.sampling
        llama.reset()
        llama.set_seed((self.seed + request.id) % 2**32)
        start = time.perf_counter()
        if isinstance(llama.draft_model, GreedyDraft):
            llama.draft_model.begin(request.tokens)
        with closing(
            llama.generate(
                request.tokens, temp=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
                min_p=sampling.min_p, repeat_penalty=1.0,
            )
        ) as tokens:  # fmt: skip
            return timed(request, islice(tokens, room(request, self.target)), start)


class GreedyDraft:
    """A draft model in the interface of ``llama_cpp.llama_speculative.LlamaDraftModel``.

    Args:
        tokens: how many it drafts.
    """

    def __init__(self, llama: Any, tokens: int) -> None:
        self.llama, self.tokens = llama, tokens

    def begin(self, prompt: Sequence[int]) -> None:
        """Compute the prompt, which belongs to the prefill: ``Llama.generate`` drafts after its first token only."""
        self.llama.reset()
        self.llama.eval(prompt)

    def __call__(self, input_ids: Any, **_: Any) -> Any:
        """Return the draft after ``input_ids``: ``[n] -> [tokens]``; shorter where the context ends."""
        count = min(self.tokens, self.llama.n_ctx() - len(input_ids) - 1)
        if count <= 0:
            return np.empty(0, dtype=np.intc)
        with closing(self.llama.generate(input_ids.tolist(), temp=0.0)) as drafted:
            return np.fromiter(islice(drafted, count), dtype=np.intc)


class LlamaLoop:
    """A loop over llama_decode with llama.cpp's own sampler: the bound of what decoding costs on this engine.

    Args:
        target, sampling, seed: as in ``LlamaGenerate``.

    Raises:
        ValueError: ``sampling`` sets more than a temperature; and as in ``LlamaGenerate``.
    """

    def __init__(self, target: Target, sampling: Sampling, seed: int) -> None:
        if sampling.truncates or sampling.penalized:
            raise ValueError(
                "llama.cpp's bare loop supports sampling.temperature only, not top_k, top_p, min_p, "
                "repetition_penalty, presence_penalty, frequency_penalty, logit_bias, bad_words_ids: leave its arm out"
            )
        self.target, self.temperature, self.seed = target, sampling.temperature, seed
        require_llama_cpp(target)
        self.llama = GrowingLlama(target, lambda size: llama_of(target, size))

    def decode(self, requests: Sequence[Request]) -> Decoded:
        """One request after the other; see ``Arm``. Errors as in ``Request.check_fits``."""
        return one_by_one(requests, self.target, lambda request: self._one(self.llama.for_requests(requests), request))

    def _one(self, llama: Any, request: Request) -> Outcome:
        from llama_cpp import llama_cpp as lib

        lib.llama_memory_clear(lib.llama_get_memory(llama.ctx), True)
        sampler = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if self.temperature > 0:
            lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_temp(self.temperature))
            lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_dist((self.seed + request.id) % 2**32))
        else:
            lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_greedy())
        try:
            start = time.perf_counter()
            return timed(request, self._tokens(lib, llama, sampler, request), start)
        finally:
            lib.llama_sampler_free(sampler)

    def _tokens(self, lib: Any, llama: Any, sampler: Any, request: Request) -> Iterator[int]:
        context, most = llama.ctx, int(llama.n_batch)
        tokens = (lib.llama_token * len(request.tokens))(*request.tokens)
        for start in range(0, len(tokens), most):
            part = (lib.llama_token * min(most, len(tokens) - start))(*tokens[start : start + most])
            self._decode(lib, context, part)
        buffer = (lib.llama_token * 1)()
        for number in range(room(request, self.target)):
            if number:
                self._decode(lib, context, buffer)
            buffer[0] = lib.llama_sampler_sample(sampler, context, -1)
            yield buffer[0]

    def _decode(self, lib: Any, context: Any, tokens: Any) -> None:
        if code := lib.llama_decode(context, lib.llama_batch_get_one(tokens, len(tokens))):
            raise RuntimeError(f"llama_decode failed with code {code}")
