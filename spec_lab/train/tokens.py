"""Windows of token streams on disk: one ``<workload>.bin`` of uint16 ids per workload."""

from pathlib import Path

import numpy as np


class Batches:
    """Windows of ``length + 1`` tokens, workloads mixed in fixed proportion; a batch is a pure function of where it
    starts.

    Sequence ``i`` (counted over the whole training) takes its workload from a low-discrepancy sequence and its window
    from that workload's permutation of the epoch, so that resuming needs the number of sequences alone.
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
        epoch, place = divmod(k, per_epoch)
        if self._epoch.get(workload, (-1,))[0] != epoch:
            rng = np.random.default_rng([self.seed, list(self.mix).index(workload), epoch])
            self._epoch[workload] = (epoch, rng.permutation(per_epoch), int(rng.integers(length)))
        _, order, offset = self._epoch[workload]
        start = int(order[place]) * length + offset
        return stream[start : start + length + 1]

    def at(self, first: int, count: int) -> np.ndarray:
        """Ids ``[count, length + 1]`` of the sequences from ``first`` on, asked for in rising order (or anew)."""
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
