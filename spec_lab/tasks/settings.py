"""A run's scalars, validated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import torch

from spec_lab.core.options import Count, Folder, Number, Texts, Whole, WrongOption, check_fields
from spec_lab.decode.prefix_cache import BLOCK, MAX_TOKENS, PrefixCache
from spec_lab.decode.recording import Recording
from spec_lab.text.strings import check_strings

SMALL_RUN = 2**15
"""Most tokens, answers times arms times ``max_new_tokens``, of a benchmark that records drafts by itself."""


@dataclass(frozen=True)
class Settings:
    """A run's scalars.

    Args:
        output_dir: the run's directory; of a sweep, the sweep's.
        name: an experiment sets it.
        batch_size: prompts decoded together: a group, the unit of pairing.
        max_new_tokens: maximum tokens of an output.
        warmup: tokens each arm decodes before anything is measured; 0: none.
        seed: seed of all random choices.
        threads: threads of torch on the CPU; None: torch's own choice.
        baseline: decode every group autoregressively as well.
        stop_strings: strings that end a text; at most 256, of 4096 bytes each and 65536 in all.
        banned_strings: strings removed as soon as they are complete (backtracking); the same limits.
        min_new_tokens: minimum tokens before a text may end.
        token_healing: remove the prompt's last token and generate its bytes again.
        max_prompt_tokens: the middle of longer prompts is left out.
        prefix_cache: tokens whose KV cache each arm keeps for later prompts that begin equally; None: none.
        record: drafts: steps keep the draft trees; replay: these, and rows for spec-lab replay; none; auto: drafts in
            small runs, of at most 32768 tokens. "drafts": the table ``steps`` keeps every drafted token with its
            probabilities (``DRAFT_COLUMNS``), for the report's token view; "replay": these, and the table ``replay``
            keeps the distributions of every row of the draft trees, for ``spec-lab replay``; "auto": "drafts" in a
            benchmark of at most ``SMALL_RUN`` tokens, else nothing; "none" or None: nothing.
        record_top: tokens that replay keeps of each row's distributions; all of a vocabulary that is no larger.
        record_share: the share of steps that replay keeps.
        count_experts: of a mixture of experts: count the experts that each forward reads, from its routers.
        verbose: -v: print every column of the tables; terminals of 130 columns and more show them anyway.
        overrides: of a job of a sweep, the options that differ between its jobs; None of a single run. A job of a
            sweep prints no table and draws no figures.
        overwrite: remove the run that output_dir holds, and begin anew.
        retried: of a job of a sweep, whether it failed before. What is left of it is removed if its code, or anything
            else, was another one.
        given: words of the command line that repeats the run in another folder, without secrets.
        config_sha256: SHA-256 of the resolved configuration without secrets: the configuration itself is written with
            the names of environment variables, not with their values.
    """

    output_dir: Path
    name: Annotated[str, Folder()]
    batch_size: Annotated[int, Whole(1, 1024)]
    max_new_tokens: Annotated[int, Whole(1, 2**20)]
    warmup: Annotated[int, Whole(0, 2**20)]
    seed: Annotated[int, Whole(0, 2**63 - 1)]
    threads: Count | None
    baseline: bool
    stop_strings: Texts = ()
    banned_strings: Texts = ()
    min_new_tokens: Annotated[int, Whole(0)] = 0
    token_healing: bool = False
    max_prompt_tokens: Annotated[int, Whole(1, 2**31 - 1)] | None = None
    prefix_cache: Annotated[int, Whole(BLOCK, MAX_TOKENS)] | None = None
    record: Literal["auto", "drafts", "replay", "none"] | None = None
    record_top: Annotated[int, Whole(1, 2**24)] = 128
    record_share: Annotated[float, Number(0, 1, above=True)] = 1.0
    count_experts: bool = False
    verbose: bool = False
    overrides: Sequence[str] | None = None
    overwrite: bool = False
    retried: bool = False
    given: Sequence[str] = ()
    config_sha256: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        most = 4 * (os.cpu_count() or 1)
        if self.threads is not None and self.threads > most:
            raise WrongOption(f"threads must be at most {most}, four for each core of this machine, not {self.threads}")
        check_strings("stop_strings", tuple(self.stop_strings))
        check_strings("banned_strings", tuple(self.banned_strings))
        if self.min_new_tokens > self.max_new_tokens:
            raise WrongOption(
                f"min_new_tokens is {self.min_new_tokens}, larger than max_new_tokens, which is {self.max_new_tokens}"
            )

    @property
    def anew(self) -> Literal["never", "if another", "always"]:
        """Whether a run that the directory holds is removed, for ``manifest.claim``."""
        return "always" if self.overwrite else "if another" if self.retried else "never"

    @property
    def recording(self) -> Recording:
        """Records of each step."""
        top = self.record_top if self.record == "replay" else 0
        return Recording(self.records_drafts, top, float(self.record_share), self.count_experts)

    @property
    def records_drafts(self) -> bool:
        """Whether the table ``steps`` keeps every drafted token with its probabilities."""
        return self.record in ("drafts", "replay")

    def with_record(self, max_tokens: int) -> Settings:
        """Return the settings with ``record="auto"`` decided by what is known before the run.

        Args:
            max_tokens: most tokens that all arms of the run emit.
        """
        if self.record != "auto":
            return self
        return replace(self, record="drafts" if max_tokens <= SMALL_RUN else "none")

    def use_threads(self) -> None:
        """Set torch's threads, unless ``threads`` is None. Call it before the parts are built: some measure the machine
        while they load.
        """
        if self.threads is not None:
            torch.set_num_threads(self.threads)

    def new_prefix_cache(self) -> PrefixCache | None:
        """An empty prefix cache for one arm; None where none is kept."""
        return None if self.prefix_cache is None else PrefixCache(self.prefix_cache)

    @staticmethod
    def names() -> list[str]:
        """The names of the scalars that a config gives."""
        others = ("output_dir", "overrides", "retried", "given", "config_sha256")
        return [field.name for field in fields(Settings) if field.name not in others]
