"""The base of the parts of ``scripts/gpu_check.py``: each runs in a process of its own, and reports as it goes on.

A failed CUDA call can make every later one of its process fail, so no part depends on another's process. A part sends
each result to the parent when it has it; what it has sent stays if the process is ended or crashes later.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from spec_lab.results.manifest import machine


@dataclass
class Part:
    """A part that runs.

    Args:
        device: that is checked.
        until: when it should be done, in seconds of ``time.time``; the parent ends the process a little later.
        send: sends a message to the parent.
        errors: what failed so far.
    """

    device: torch.device
    until: float
    send: Callable[[dict[str, Any]], None]
    errors: list[str] = field(default_factory=list)

    @property
    def tiny(self) -> bool:
        """True where there is no GPU: the part then only shows that it runs, on tiny models."""
        return self.device.type != "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The data type of models whose speed is measured."""
        return torch.float32 if self.tiny else torch.bfloat16

    @property
    def captures(self) -> str:
        """The name of what is counted as captures."""
        return "shapes, not captured" if self.tiny else "captures"

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.until - time.time()

    def keep(self, name: str, value: Any) -> None:
        """Report a result, in place of an earlier one of this name."""
        self.send({"result": name, "value": value})

    def say(self, line: str) -> None:
        """Report a line of the table that is printed at the end."""
        self.send({"line": line})

    def fail(self, why: str) -> None:
        """Report an error."""
        self.errors.append(why)
        self.send({"error": why})

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Report an error, and go on; free the GPU's memory at the end."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.fail(f"{what}: {describe(error)}")
            if not self.tiny:  # a capture that fails when it begins leaves its own stream behind
                torch.cuda.set_stream(torch.cuda.default_stream(self.device))
        finally:
            gc.collect()
            if not self.tiny:
                torch.cuda.empty_cache()  # raises where an earlier call has spoilt the process: nothing is left to do


def describe(error: BaseException) -> str:
    """The error with the line of the project that led to it, in one line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/site-packages/" not in frame.filename]
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}{where}"


def facts(device: torch.device) -> dict[str, Any]:
    """The machine, the GPU and the versions that matter."""
    known: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__, **machine()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        known |= {
            "gpu": properties.name, "capability": list(torch.cuda.get_device_capability(device)),
            "multiprocessors": properties.multi_processor_count, "gpu_memory_gib": round(total / 2**30, 1),
            "gpu_memory_free_gib": round(free / 2**30, 1), "cuda": torch.version.cuda, "driver": driver(),
        }  # fmt: skip
    return known


def driver() -> str | None:
    """The version of the GPU's driver; None where nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def run(measure: Callable[[Part], None]) -> None:
    """Run a part as the parent's command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--until", type=float, required=True)
    parser.add_argument("--channel", type=int, required=True)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    gc.collect()
    gc.freeze()  # what is imported stays: it need not be looked at whenever memory is freed
    with os.fdopen(given.channel, "w") as channel:

        def send(message: dict[str, Any]) -> None:
            channel.write(json.dumps(message, default=str) + "\n")
            channel.flush()

        part = Part(torch.device(given.device), given.until, send)
        number, gpus = part.device.index or 0, torch.cuda.device_count() if torch.cuda.is_available() else 0
        if part.device.type == "cuda" and number >= gpus:
            seen = f"torch {torch.__version__} sees {gpus} GPUs"
            send({"unavailable": f"--device {part.device}: {seen}; --device cpu tries the script without one"})
            return
        try:
            if part.device.type == "cuda":
                torch.cuda.set_device(number)
            send({"machine": facts(part.device)})
            measure(part)
        except Exception as error:
            traceback.print_exc()
            part.fail(describe(error))
        send({"ended": "failed" if part.errors else "done"})
        channel.flush()
    if part.errors:
        os._exit(1)  # a spoilt process may hang when it frees what it holds on the GPU
