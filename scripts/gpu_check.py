"""Check the GPU paths in one command of at most seven minutes, on a machine with a CUDA GPU and without a network.

    scripts/gpu_wheels.sh                                         # before, where there is a network: fills wheels/
    pip install --no-index --no-deps --target /tmp/site wheels/*.whl && export PYTHONPATH=/tmp/site
    python scripts/gpu_check.py                                   # writes experiments/gpu/gpu_check.json
    python scripts/gpu_check.py --parts 3,5 --output out          # some parts only
    python scripts/gpu_check.py --device cpu --output out         # tries the script on tiny shapes; captures nothing

It needs Python 3.11 or newer, torch, transformers, numpy, pandas, pyarrow, scipy, safetensors and the wheels. All
weights are random and made on the GPU. Of the repository it does not need files above 8 MB, which can be left behind:

    spec_lab/zoo/eagle3/model.safetensors
    spec_lab/zoo/target/model.safetensors

The parts, the most telling first, run in processes of their own, each within its own seconds: an error, a crash or a
hang of one leaves the others. ``gpu_check.json`` has an entry for each part (status, seconds, results, error) and one
for the machine; it is written again after every measurement, so that a run that is cut short still tells. What the
parts print goes to ``gpu_check.log`` beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "gpu"
TOTAL = 415
"""Most seconds of all parts."""


class Part(NamedTuple):
    """One part.

    Args:
        name: its entry in ``gpu_check.json``, and its module in ``experiments.gpu.check``.
        title: what it tells.
        seconds: after which its process is ended.
    """

    name: str
    title: str
    seconds: int


PARTS = (
    Part("cuda_tests", "Tests that require a GPU", 60),
    Part("blocking_calls", "Calls of a step that wait for the GPU", 55),
    Part("decoding", "Autoregressive decoding", 75),
    Part("kv_growth", "Graphs while the KV cache grows", 40),
    Part("rows", "Time of a forward by rows, t(n)", 75),
    Part("drafters", "EAGLE-3 level and draft chains", 50),
    Part("kernels", "Kernels of a step", 60),
)

ON_A_CPU = 300.0
"""Seconds of each part on a CPU, where nothing is about time, and other processes may use the machine."""

BEFORE_THE_END = 3.0
"""Seconds before its process is ended, in which a part should come to an end itself."""


class Check:
    """The results so far, and the file that has them.

    Args:
        file: ``gpu_check.json``.
        device: as given.
    """

    def __init__(self, file: Path, device: str) -> None:
        self.file, self.device, self.began = file, device, time.monotonic()
        self.entries: dict[str, dict[str, Any]] = {
            "machine": {"status": "not run", "seconds": 0.0, "device": device, "results": {}, "error": ""},
        }
        for number, part in enumerate(PARTS, start=1):
            self.entries[part.name] = {
                "number": number, "title": part.title, "status": "not run", "seconds": 0.0, "limit": part.seconds,
                "results": {}, "lines": [], "error": "",
            }  # fmt: skip
        self.write()

    def write(self) -> None:
        """Replace the file."""
        self.entries["machine"]["seconds"] = round(time.monotonic() - self.began, 1)
        other = self.file.with_suffix(".tmp")
        other.write_text(json.dumps(self.entries, indent=1))
        os.replace(other, self.file)

    def take(self, part: Part, message: Mapping[str, Any]) -> None:
        """Take in what a part sent."""
        entry = self.entries[part.name]
        if "result" in message:
            entry["results"][message["result"]] = message["value"]
        elif "line" in message:
            entry["lines"].append(message["line"])
        elif "error" in message:
            entry["error"] = "\n".join(filter(None, (entry["error"], message["error"])))
        elif "unavailable" in message:
            entry["status"], self.entries["machine"] = "failed", {**self.entries["machine"], "status": "failed"}
            entry["error"] = self.entries["machine"]["error"] = message["unavailable"]
        elif "machine" in message:
            self.entries["machine"] |= {"status": "done", "results": message["machine"]}
        elif "ended" in message:
            entry["status"] = message["ended"]
        self.write()

    def run(self, part: Part, log: Path) -> None:
        """Run one part until it ends, or its time is over."""
        entry, began = self.entries[part.name], time.monotonic()
        limit = min(part.seconds, TOTAL - (began - self.began)) if self.device.startswith("cuda") else ON_A_CPU
        if limit < 2 * BEFORE_THE_END:
            entry["error"] = "no time was left"
            return
        entry["status"] = "running"  # stays where this process is killed
        self.write()
        read, write = os.pipe()
        until = time.time() + limit - BEFORE_THE_END
        arguments = ["--device", self.device, "--until", str(until), "--channel", str(write)]
        with log.open("ab") as output, os.fdopen(read, "rb", buffering=0) as channel:
            output.write(f"\n=== {part.name}\n".encode())
            output.flush()
            process = subprocess.Popen(
                [*command(part), *arguments], cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, pass_fds=(write,),
            )  # fmt: skip
            os.close(write)
            try:
                over = self._listen(part, channel, began + limit)
            finally:
                code = ended(process)
        entry["seconds"] = round(time.monotonic() - began, 1)
        if entry["status"] == "running":
            entry["status"] = "timed out" if over else "failed"
            why = f"not done after {limit:.0f} seconds" if over else f"the process ended with code {code}"
            entry["error"] = "\n".join(filter(None, (entry["error"], f"{why}; the log ends with: {tail(log)}")))
        self.write()

    def _listen(self, part: Part, channel: Any, end: float) -> bool:
        """Take in what a part sends until it has ended; whether its time was over before.

        It has ended when it says so: a process that it has started may keep its end of the channel open.
        """
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(channel, selectors.EVENT_READ)
            while (left := end - time.monotonic()) > 0:
                if not selector.select(left):
                    continue
                data = channel.read(2**16)
                *lines, rest = (rest + data).split(b"\n")
                messages = [json.loads(line) for line in lines]
                for message in messages:
                    self.take(part, message)
                if not data or any("ended" in message for message in messages):
                    return False
        return True


def command(part: Part) -> list[str]:
    """Return the command that starts a part; its arguments follow."""
    return [sys.executable, "-X", "faulthandler", "-m", f"experiments.gpu.check.{part.name}"]


def ended(process: subprocess.Popen[bytes]) -> int | None:
    """End the process; its exit code, None of one that waits for the GPU and cannot be ended."""
    try:
        return process.wait(1)  # of one that has sent everything
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        return process.wait(10)
    except subprocess.TimeoutExpired:
        return None


def environment() -> dict[str, str]:
    """The environment of a part: the repository comes first, no network is looked for, and no plugins of pytest."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    more = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return {**os.environ, **more, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def tail(log: Path) -> str:
    """The last lines of the log in one."""
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-4:])[-600:]


def show(entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Print what the parts say, 80 columns wide."""
    from rich.console import Console
    from rich.table import Table

    known = entries["machine"]["results"]
    names = [str(known[name]) for name in ("gpu", "processor") if known.get(name)][:1]
    versions = [f"{name} {known[name]}" for name in ("torch", "transformers", "cuda", "driver") if known.get(name)]
    table = Table("part", "status", "what it tells", title=", ".join(names + versions), show_lines=True)
    for entry in entries.values():
        if "number" not in entry or (entry["status"] == "not run" and not entry["error"]):
            continue
        lines = [*entry["lines"], *filter(None, entry["error"].splitlines())]
        what = "\n".join((f"{entry['title']}:", *lines)).replace("[", r"\[")
        table.add_row(str(entry["number"]), f"{entry['status']}\n{entry['seconds']:.0f} s", what)
    Console(width=80).print(table)


def chosen(text: str) -> list[Part]:
    """The parts with these numbers, in their order.

    Raises:
        ValueError: no such numbers.
    """
    numbers = {int(number) for number in text.split(",")}
    if not numbers <= set(range(1, len(PARTS) + 1)):
        raise ValueError(text)
    return [part for number, part in enumerate(PARTS, start=1) if number in numbers]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 0 if all of them are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the script (cuda)")
    parser.add_argument("--output", type=Path, help="folder of the results (experiments/gpu)")
    parser.add_argument("--parts", default="", help="numbers of the parts to run, such as 3,5 (all)")
    given = parser.parse_args(arguments)
    try:
        parts = chosen(given.parts) if given.parts else list(PARTS)
    except ValueError:
        parser.error(f"--parts must be numbers from 1 to {len(PARTS)}, such as 3,5 (got {given.parts!r})")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", given.device):
        parser.error(f"--device must be cpu, cuda or cuda:N (got {given.device!r})")
    if given.output is None and not given.device.startswith("cuda"):
        parser.error(f"--device {given.device} requires --output: {RESULTS.relative_to(ROOT)} is for results of GPUs")
    output = (given.output or RESULTS).resolve()
    log = output / "gpu_check.log"
    try:
        output.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        check = Check(output / "gpu_check.json", given.device)
    except OSError as error:
        parser.error(f"--output must be a folder that can be written (got {output}: {error.strerror})")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the part that runs as well
    for part in parts:
        print(f"{part.title} ...", flush=True)
        check.run(part, log)
        if check.entries["machine"]["error"]:
            break  # the others would say the same
    show(check.entries)
    print(f"Written to {check.file}")
    if output != RESULTS:
        print(f"Results of a GPU go to {RESULTS.relative_to(ROOT)}: copy gpu_check.json there.")
    return 0 if all(check.entries[part.name]["status"] == "done" for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
