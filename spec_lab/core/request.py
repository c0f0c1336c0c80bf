"""Requests: what a user asks for, and how their sequences end."""

from __future__ import annotations

from dataclasses import dataclass, field

from spec_lab.core.probabilities import Sampling

FINISHES = {
    "stop": "a stop token or stop string",
    "constraint": "its constraint ended it",
    "length": "max_new_tokens",
    "context": "the model's context is full",
    "runaway": "its constraint removed too many tokens again",
    "aborted": "the request was aborted",
    "nan": "logits that are NaN or infinite",
    "stuck": "its constraint allows no next token, or failed",
}
"""Why a sequence ends. The last two are errors."""

BROKEN = ("nan", "stuck")


@dataclass(frozen=True)
class Request:
    """A prompt that is to be continued, and how.

    Args:
        id: keys the request's randomness; unique in a run.
        name: as prompts and records call it.
        tokens: the prompt, at least one token.
        sampling: how to sample.
        max_new_tokens: maximum number of tokens to emit.
        stop: tokens that end the text; the one that stops it is kept.
        constraint: the request's own pattern, schema or grammar; empty: the constraint's.
        stop_strings: strings that end the text, which then ends before them; their tokens are kept.
        min_new_tokens: before that many no stop string ends the text. (For stop tokens the constraint ``MinNewTokens``
            does that.)
        banned_strings: those that a constraint removes; text that may become one is held back.
        healed: what token healing removed from the prompt's end, which the output begins with; no part of its text.
        logprobs: whether each token's log-probability is needed: under the model's own distribution, temperature 1,
            given what the constraint allows.

    Raises:
        ValueError: an empty prompt; no new tokens.
    """

    id: int
    name: str
    tokens: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 128
    stop: frozenset[int] = frozenset()
    constraint: str = ""
    stop_strings: tuple[str, ...] = ()
    min_new_tokens: int = 0
    banned_strings: tuple[str, ...] = ()
    healed: bytes = b""
    logprobs: bool = False

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError(f"prompt '{self.name}' is empty")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1 (got {self.max_new_tokens})")

    def check_fits(self, context: int, vocabulary: int) -> None:
        """Refuse a prompt that a target with this context and vocabulary cannot continue.

        Raises:
            ValueError: no room in the context; a token id that the target does not have, in the sampling parameters as
                well.
        """
        if len(self.tokens) >= context:
            raise ValueError(
                f"prompt '{self.name}' has {len(self.tokens)} tokens, but the context has room for {context}, one of "
                "them emitted: shorten the prompt"
            )
        if wrong := [token for token in self.tokens if not 0 <= token < vocabulary]:
            raise ValueError(
                f"prompt '{self.name}' holds the token id {wrong[0]}, but the target has {vocabulary} tokens, "
                "from 0: encode the prompt with the target's own tokenizer"
            )
        self.sampling.check_tokens(vocabulary)


def without_name(request: Request, why: str) -> str:
    """Return an error's text without the leading "request 'NAME':", for messages that begin with the name anyway."""
    return why.removeprefix(f"request '{request.name}'").removeprefix(":").lstrip()


@dataclass(frozen=True)
class Ended:
    """A finished sequence, for a constraint that keeps some sequences of a request and not others.

    Args:
        lineage, finish: as in ``sequence.SequenceState``.
        tokens: emitted.
        logprobs: of these tokens; empty where the request needs none.
    """

    lineage: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
