"""The sampling that a checkpoint recommends: ``generation_config.json``, with the meanings of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from spec_lab.core.files import read_json
from spec_lab.core.options import Share, Temperature, brief, check_fields
from spec_lab.core.probabilities import AddedPenalty, LogitBias, Penalty, Sampling, TokenLists, TopK, TopP

FILE = "generation_config.json"
NEUTRAL: Mapping[str, Any] = {
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None, "num_beams": 1, "num_beam_groups": 1,
    "penalty_alpha": None, "diversity_penalty": 0.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "force_words_ids": None, "min_length": 0,
    "min_new_tokens": None, "renormalize_logits": False, "constraints": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "exponential_decay_length_penalty": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "sequence_bias": None, "guidance_scale": None, "watermarking_config": None,
    "dola_layers": None, "stop_strings": None,
}  # fmt: skip
"""Fields that change what is generated and that ``Sampling`` does not have, with the values that change nothing."""


ALSO_GREEDY = ("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words_ids")
"""Fields that change greedy decoding as well."""


@dataclass(frozen=True)
class CheckpointSampling:
    """The sampling parameters of the target's checkpoint; each may be replaced.

    Args:
        temperature: 0: greedy; None: the checkpoint's (0 without do_sample).
        top_k: likeliest tokens kept; 0: all; None: the checkpoint's.
        top_p: mass of the likeliest tokens kept; 1: all; None: the checkpoint's.
        min_p: minimum probability, relative to the likeliest token's; 0: all; None: the checkpoint's.
        repetition_penalty: 1: none; None: the checkpoint's.
        presence_penalty: as in sampling=greedy; 0: none; None: the checkpoint's.
        frequency_penalty: as in sampling=greedy; 0: none; None: the checkpoint's.
        logit_bias: numbers added to the logits of tokens, by token id; None: none.
        bad_words_ids: lists of token ids that are not generated; []: none; None: the checkpoint's.

    Raises:
        ValueError: as in ``Sampling``.
    """

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: Share | None = None
    repetition_penalty: Penalty | None = None
    presence_penalty: AddedPenalty | None = None
    frequency_penalty: AddedPenalty | None = None
    logit_bias: LogitBias | None = None
    bad_words_ids: TokenLists | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def given(self) -> dict[str, Any]:
        """The parameters that replace the checkpoint's."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def resolved(self, folder: Path | None) -> Sampling:
        """Return the parameters for a checkpoint.

        What its file does not name has the default of ``Sampling``, which does nothing. Without ``do_sample: true`` the
        temperature is 0, as in transformers.

        Args:
            folder: of the checkpoint's files; None for a target without a checkpoint of transformers.

        Raises:
            ValueError: it has no generation_config.json; a field that spec_lab does not support, or an invalid value.
        """
        recommended = None if folder is None else read_json(folder / FILE)
        if recommended is None:
            raise ValueError(
                f"sampling=checkpoint requires a {FILE} in the target's checkpoint, and there is none"
                f"{'' if folder is None else f' in {folder}'}: set sampling=greedy, or sampling.temperature and others"
            )
        file = f"{folder}/{FILE}"
        for name, neutral in NEUTRAL.items():
            if recommended.get(name) not in (None, neutral, []):
                raise ValueError(
                    f"{file} sets {name}={brief(recommended[name])}, which sampling=checkpoint does not support: set "
                    "sampling=greedy, or other parameters of sampling"
                )
        names = [field.name for field in fields(Sampling) if field.name != "logit_bias"]  # not transformers' name
        named = {name: recommended[name] for name in names if recommended.get(name) is not None}
        stop = recommended.get("eos_token_id")
        if "bad_words_ids" in named and isinstance(named["bad_words_ids"], list):  # transformers bans no stop token
            stops = [[token] for token in (stop if isinstance(stop, list) else [stop])]
            named["bad_words_ids"] = [word for word in named["bad_words_ids"] if word not in stops]
        if recommended.get("do_sample") is not True:
            named = {name: value for name, value in named.items() if name in ALSO_GREEDY}
        elif "temperature" not in named:
            named["temperature"] = 1.0
        try:
            return Sampling(**{**named, **self.given})
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
