"""Keep what was predicted under each reading in the run's directory, so that a run that was ended resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from spec_lab.core.reading import Reading
from spec_lab.core.tensors import read_tensors, save_tensors
from spec_lab.tasks.check_drafter.acceptance import conversations
from spec_lab.tasks.check_drafter.along_text import FIGURES, Predicted
from spec_lab.text.prompts import Prompt, digest

NAMES = (*FIGURES, "predicted")


class KeptTexts:
    """Files of texts along which was drafted.

    Args:
        folder: of the files; it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return len(list(self.folder.glob("*.safetensors")))

    def of(
        self, reading: Reading, prompts: Sequence[Prompt] | None, measure: Callable[[], list[Predicted]]
    ) -> list[Predicted]:
        """Return the texts of a reading, measured unless they are there.

        Args:
            prompts: sent otherwise than those of the run; None: those.

        Raises:
            OSError: a damaged file; names it.
        """
        key = json.dumps([reading.values, "" if prompts is None else digest(prompts)], sort_keys=True)
        file = self.folder / f"{sha256(key.encode()).hexdigest()[:32]}.safetensors"
        if file.exists():
            try:
                return _read(file)
            except (KeyError, RuntimeError) as error:  # RuntimeError: lengths that do not add up
                raise OSError(f"{file} is damaged ({error}): remove it, so that it is measured again") from error
        texts = measure()
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(texts, file)
        return texts


def _write(texts: Sequence[Predicted], file: Path) -> None:
    whole = {name: np.concatenate([getattr(text, name) for text in texts]) for name in NAMES}
    numbers = {
        "prompts": [text.prompt for text in texts],
        "conversations": conversations(texts),
        "lengths": [len(text.accepted) for text in texts],
    }
    tensors = {name: torch.from_numpy(values) for name, values in whole.items()}
    save_tensors(tensors | {name: torch.tensor(values) for name, values in numbers.items()}, file)


def _read(file: Path) -> list[Predicted]:
    held, _ = read_tensors(file)
    lengths = held["lengths"].tolist()
    figures = {name: [part.numpy() for part in held[name].split(lengths)] for name in NAMES}
    numbers = zip(held["prompts"].tolist(), held["conversations"].tolist(), strict=True)
    return [
        Predicted(prompt, conversation=conversation, **{name: figures[name][number] for name in NAMES})
        for number, (prompt, conversation) in enumerate(numbers)
    ]
