"""Windows of token streams on disk: one file ``<workload>.bin`` of uint16 ids for each workload."""

from pathlib import Path

import numpy as np


class Batches:
    """Windows of ``length + 1`` tokens, with the workloads mixed in fixed proportions.

    The workload of sequence ``i`` (counted over the whole training) follows a low-discrepancy sequence, and its window
    a permutation of that workload's windows in each epoch. So a batch depends only on the number of its first sequence,
    and resuming requires only that number.

    Args:
        folder: of the streams.
        mix: share of each workload.
        length: tokens of a window, less one.
        seed: of the permutations.
    """

    def __init__(self, folder: Path, mix: dict[str, float], length: int, seed: int):
        self.streams = {w: np.memmap(folder / f"{w}.bin", dtype=np.uint16, mode="r") for w in mix}
        self.mix, self.length, self.seed = mix, length, seed
        self.edges = np.cumsum([mix[w] for w in mix]) / sum(mix.values())
        self.counts = dict.fromkeys(mix, 0)
        self.next_sequence = 0
        self._epoch: dict[str, tuple[int, np.ndarray, int]] = {}

    def _window(self, workload: str, k: int) -> np.ndarray:
        stream, length = self.streams[workload], self.length
        per_epoch = (len(stream) - 1) // length - 1
        epoch, number = divmod(k, per_epoch)
        if self._epoch.get(workload, (-1,))[0] != epoch:
            rng = np.random.default_rng([self.seed, list(self.mix).index(workload), epoch])
            self._epoch[workload] = (epoch, rng.permutation(per_epoch), int(rng.integers(length)))
        _, order, offset = self._epoch[workload]
        start = int(order[number]) * length + offset
        return stream[start : start + length + 1]

    def at(self, first: int, count: int) -> np.ndarray:
        """Return the ids ``[count, length + 1]`` of the sequences from ``first`` on; ascending calls are fastest."""
        if first < self.next_sequence:
            self.counts, self.next_sequence = dict.fromkeys(self.mix, 0), 0
        rows = []
        names = list(self.mix)
        for i in range(self.next_sequence, first + count):
            workload = names[int(np.searchsorted(self.edges, (i * 0.6180339887498949) % 1.0, side="right"))]
            if i >= first:
                rows.append(self._window(workload, self.counts[workload]))
            self.counts[workload] += 1
        self.next_sequence = first + count
        return np.stack(rows).astype(np.int64)
