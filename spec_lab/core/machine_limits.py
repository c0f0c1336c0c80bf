"""Measure what bounds a forward on this machine: reading as many bytes as the weights, and multiplying matrices."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import linear

from spec_lab.core.clock import Clock
from spec_lab.core.machine import Usage, allowed_cores, other_load
from spec_lab.core.roofline import MachineLimits

SECONDS = 0.3
"""Maximum seconds of timed passes of reading, and again of products, unless a few passes take longer."""

MAX_PASSES = 40
"""Maximum number of passes of each way of reading, and of each product."""

MIN_READ = {"cpu": 2**20, "cuda": 2**24}
"""Minimum number of bytes that are read in a pass: below, calls take longer than reading."""

MAX_READ = {"cpu": 2**29, "cuda": 2**32}
"""Maximum number of bytes that are read in a pass; on the CPU twice the last-level cache, where that is more."""

SIZES = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
"""Sizes of the square factors, ascending. Larger ones follow while time is left."""

CACHES = Path("/sys/devices/system/cpu")


def measure(
    weight_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float = SECONDS,
    clock: Clock | None = None,
    threads: int | None = None,
) -> MachineLimits:
    """Return what bounds forwards here; it takes about a second, some seconds if the weights are large.

    Of all ways of reading, and of all products, the fastest pass counts: a bound must not include what slowed down the
    others. On the CPU one thread is tried as well as all, since several wait for the slowest, which another process may
    stop. Call it where nothing else is timed.

    Args:
        weight_bytes: of the weights that a forward reads.
        dtype: of the model.
        device: where it is computed.
        seconds: see ``SECONDS``.
        clock: of the device.
        threads: of the CPU that a forward uses; None for torch's.
    """
    threads = torch.get_num_threads() if threads is None else threads
    clock = clock or Clock(device)
    began, start = Usage.now(), time.perf_counter()
    size = _buffer_bytes(weight_bytes, device)
    ways, dtypes = reads(size, device), same_products(dtype)
    read, peaks = (0.0, 0.0), [((0.0, 0.0), dtype)]
    counts = {threads, 1} if device.type == "cpu" else {threads}
    with torch.inference_mode():
        for count in counts:
            with _threads(count):
                read = max(read, _fastest(ways, seconds / len(counts), clock))
                share = seconds / len(counts) / len(dtypes)
                peaks += [
                    (_fastest_product(factor_dtype, device, share, clock), factor_dtype) for factor_dtype in dtypes
                ]
    del ways
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the buffer may be as large as the weights
    peak, best = max(peaks, key=lambda entry: entry[0])
    cache, load = cache_bytes(device), other_load(began, Usage.now())
    return MachineLimits(
        bandwidth=size * read[0],
        bandwidth_median=size * read[1],
        read_bytes=size,
        peak=peak[0],
        peak_median=peak[1],
        peak_dtype=str(best).removeprefix("torch."),
        cache_bytes=cache,
        fits_cache=None if cache is None else weight_bytes <= cache,
        threads=threads,
        cores=len(allowed_cores()),
        other_load=None if load is None else max(load, 0.0),
        seconds=time.perf_counter() - start,
    )


def same_products(dtype: torch.dtype) -> list[torch.dtype]:
    """Return the dtypes whose products are as exact as the model's: 16 bits are sometimes emulated, by float32."""
    return [dtype, torch.float32] if dtype.itemsize < torch.float32.itemsize else [dtype]


def reads(size: int, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Return ways of reading a buffer of ``size`` bytes, a multiple of 4096, once.

    Several threads reduce rows faster; one thread reduces to one number faster.
    """
    rows = torch.ones(size // 4096, 1024, device=device)  # written, so that every page is one of its own
    words = rows.view(torch.int32)
    return {
        "largest": words.amax,
        "sum": rows.sum,
        "largest of rows": lambda: rows.amax(1),
        "sums": lambda: rows.sum(1),
    }


def cache_bytes(device: torch.device, caches: Path = CACHES) -> int | None:
    """Return the size of the last-level caches of the device; on the CPU those of the cores that may be used.

    Args:
        caches: what Linux reports of each core's caches.

    Returns:
        None if it is not known.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    by_cores: dict[str, tuple[int, int]] = {}  # level and bytes, by the cores that share it
    try:
        for core in allowed_cores():
            caches_of_core = [_cache(folder) for folder in sorted((caches / f"cpu{core}" / "cache").glob("index*"))]
            level, size, shared = max(cache for cache in caches_of_core if cache is not None)
            by_cores[shared] = level, size
    except (OSError, ValueError):
        return None
    return sum(size for _, size in by_cores.values()) or None


def _cache(folder: Path) -> tuple[int, int, str] | None:
    """Return level, bytes and sharing cores of a cache; None of one that holds instructions only."""
    if (folder / "type").read_text().strip() == "Instruction":
        return None
    size = re.fullmatch(r"(\d+)([KMG]?)", (folder / "size").read_text().strip())
    if size is None:
        raise ValueError(f"{folder} has no size")
    factor = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[size[2]]
    return int((folder / "level").read_text()), int(size[1]) * factor, (folder / "shared_cpu_list").read_text().strip()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with so many of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _buffer_bytes(weight_bytes: int, device: torch.device) -> int:
    """Return how many bytes are read: as many as the weights, but not more than is needed or than memory allows."""
    kind, max_bytes = "cpu", max(MAX_READ["cpu"], 2 * (cache_bytes(device) or 0))
    if device.type == "cuda":
        kind, max_bytes = "cuda", min(MAX_READ["cuda"], torch.cuda.mem_get_info(device)[0] // 2)
    return min(max(weight_bytes, MIN_READ[kind]), max_bytes) // 4096 * 4096


def _fastest_product(dtype: torch.dtype, device: torch.device, seconds: float, clock: Clock) -> tuple[float, float]:
    """Return the FLOP/s of the fastest product, best and median of its passes."""
    end, best = time.perf_counter() + seconds, (0.0, 0.0)
    for size in SIZES["cuda" if device.type == "cuda" else "cpu"]:
        flops = 2.0 * size**3
        left = end - time.perf_counter()
        if best[0] and 4 * flops / best[0] > left:  # two passes and what warms up take longer than what is left
            break
        a, b = (torch.full((size, size), 0.5, dtype=dtype, device=device) for _ in range(2))
        rate = _fastest({"product": lambda a=a, b=b: linear(a, b)}, left / 2, clock)  # type: ignore[misc]
        best = max(best, (flops * rate[0], flops * rate[1]))
    return best


def _fastest(ways: Mapping[str, Callable[[], Tensor]], seconds: float, clock: Clock) -> tuple[float, float]:
    """Return the passes per second of the fastest way, of its best pass and of its median pass.

    Every way is warmed up and timed twice at least; then they take turns until the time is over.
    """
    for run in ways.values():
        run()
    clock.synchronise()
    end = time.perf_counter() + seconds
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(MAX_PASSES):
        for name, run in ways.items():
            began = clock.mark()
            run()
            ended = clock.mark()
            clock.synchronise()
            took[name].append(clock.seconds(began, ended))
        if number and time.perf_counter() > end:
            break
    fastest = min(took.values(), key=min)
    return 1 / min(fastest), 1 / median(fastest)
