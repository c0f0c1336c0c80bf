"""Texts with a tiny target's own hidden states."""

import torch

from spec_lab.train.texts import Texts
from tests.tiny import VOCABULARY


def texts(target, count=2, length=9, seed=0, first=(2, 4), states=(-1,)):
    """Random tokens, with hidden states of these numbers; -1 is the state after the final norm."""
    ids = torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        every = target.model.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    firsts = torch.tensor([first[row % len(first)] for row in range(count)])
    return Texts(ids, firsts, length - torch.arange(count) % 3, torch.cat([every[state] for state in states], -1))


def files(target, folder, count=2, rows=4, states=(-1,)):
    """Files of ``rows`` texts each."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"part-{number:05d}.safetensors" for number in range(count)]
    for number, path in enumerate(paths):
        texts(target, rows, seed=number, states=states).write(path)
    return paths
