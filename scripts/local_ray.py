"""Run a Ray cluster of two nodes on this machine, to try and to test the launcher.

    eval "$(python scripts/local_ray.py start DIR)"        # sets RAY_ADDRESS and how to log in: ray.init() now connects
    python scripts/local_ray.py node-down DIR              # kill -9 the second node and its jobs
    python scripts/local_ray.py node-up DIR
    python scripts/local_ray.py stop DIR

Head and worker are separate raylets, at 127.0.0.2 and 127.0.0.3. All files are under DIR and the ports are chosen among
free ones, so several clusters can run at the same time. Only users who can read DIR/token can connect. To save memory
there is no dashboard, and the output of workers stays in DIR.
"""

import argparse
import contextlib
import importlib.util
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ADDRESSES = {"h": "127.0.0.2", "w": "127.0.0.3"}  # head and worker; each keeps its files in a folder of that name
STORE = 80_000_000  # bytes of shared memory for objects on each node; Ray requires 75 MB
SECONDS = 60  # for a node to start
# Sockets' paths are at most 107 long: DIR/h/session_2026-01-31_23-59-59_123456_4194304/sockets/plasma_store
LONGEST = 107 - len("/h/session_2026-01-31_23-59-59_123456_4194304/sockets/plasma_store")


class Refused(Exception):
    """An error to print without a traceback: one line, or a line and the end of a log."""


def start(directory: Path, cpus: int = 4) -> dict[str, str]:
    """Start a cluster; return the environment variables with which a driver connects to it.

    Args:
        directory: of all its files.
        cpus: that each node offers; they may be more than the machine has.

    Raises:
        Refused: Ray is missing, the directory cannot be used, or a node does not start.
    """
    if not importlib.util.find_spec("ray"):
        raise Refused(f"Ray is not installed for {sys.executable}: pip install 'spec-lab[ray]'")
    if len(str(directory)) > LONGEST or re.search(r"\s", str(directory)):
        raise Refused(
            f"{directory} must be a path of at most {LONGEST} characters without spaces, since it holds sockets"
        )
    if cpus < 1:
        raise Refused(f"--cpus must be at least 1 (got {cpus})")
    if processes(directory):
        raise Refused(f"{directory}: a cluster is running there; `stop` it first")
    directory.mkdir(parents=True, exist_ok=True)
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    (directory / "cpus").write_text(str(cpus))
    (directory / "port").write_text(str(free_port()))
    with contextlib.ExitStack() as undo:
        undo.callback(stop, directory)
        launch(directory, "h")
        launch(directory, "w")
        undo.pop_all()
    return login(directory)


def stop(directory: Path) -> None:
    """Kill every process of the cluster, jobs included. Logs stay."""
    for node in ("w", "h"):
        kill(directory, node)


def node_down(directory: Path) -> None:
    """Kill the second node and its jobs, as a power cut would."""
    kill(directory, "w")


def node_up(directory: Path) -> None:
    """Start the second node again.

    Raises:
        Refused: it is running, or does not start.
    """
    if processes(directory, "w"):
        raise Refused(f"{directory}: the second node is running")
    launch(directory, "w")


def login(directory: Path) -> dict[str, str]:
    return {
        "RAY_ADDRESS": f"{ADDRESSES['h']}:{(directory / 'port').read_text()}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": f"{directory}/token",
    }


def launch(directory: Path, node: str) -> None:
    """Start a node; `ray start` returns when it has registered with the head."""
    cluster = login(directory)
    address = cluster.pop("RAY_ADDRESS")
    where = ["--head", f"--port={address.rpartition(':')[2]}"] if node == "h" else [f"--address={address}"]
    options = {
        "node-ip-address": ADDRESSES[node],
        "num-cpus": (directory / "cpus").read_text(),
        "object-store-memory": STORE,
        "temp-dir": directory / node,
        "dashboard-agent-listen-port": free_port(),
        "min-worker-port": 0,  # any free ones: two nodes on one machine cannot share the default range
        "max-worker-port": 0,
        "include-log-monitor": False,
    }
    if node == "h":
        options["include-dashboard"] = False
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_health_check_period_ms": "1000",
    }  # a lost node is noticed in seconds
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *where]
    command += [f"--{name}={value}" for name, value in options.items()]
    log = directory / f"{node}.log"
    env, null = kept | settings | cluster, subprocess.DEVNULL
    with open(log, "w") as to:
        try:
            code = subprocess.run(command, env=env, timeout=SECONDS, stdin=null, stdout=to, stderr=to).returncode
        except subprocess.TimeoutExpired:
            code = None
    if code != 0:
        said = f"failed with exit code {code}" if code else f"took more than {SECONDS} seconds"
        raise Refused("\n".join([f"ray start {said}; {log}:", *log.read_text().splitlines()[-5:]]))


def processes(directory: Path, *nodes: str) -> list[int]:
    """Return the processes of these nodes (`h`, `w`), or of both, raylets first; drivers are not included.

    Daemons and workers are found by an argument that names the node's folder, workers with another title by the logs
    that they keep open. Both also work when a parent process has died.
    """
    raylets: list[int] = []
    others: list[int] = []
    for node in nodes or ADDRESSES:
        argument = re.compile(rb"\0--[\w-]+=" + re.escape(os.fsencode(directory / node)) + rb"[/\0]")
        for process in Path("/proc").glob("[0-9]*"):
            try:
                name = (process / "comm").read_text().strip()
                if name.startswith("ray::"):
                    files = {os.readlink(file) for file in (process / "fd").iterdir()}
                    belongs = any(file.startswith(f"{directory / node}/") for file in files)
                else:
                    belongs = argument.search((process / "cmdline").read_bytes()) is not None
                if belongs and not re.search(r"\) Z", (process / "stat").read_text()):
                    (raylets if name == "raylet" else others).append(int(process.name))
            except OSError:
                continue  # it has ended, or belongs to another user
    return raylets + others


def kill(directory: Path, node: str) -> None:
    while pids := processes(directory, node):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def free_port() -> int:
    """Return a free port below the range that the system uses for outgoing connections."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("start", "stop", "node-down", "node-up"):
        commands.add_parser(command).add_argument("directory", type=lambda path: Path(path).resolve(), metavar="DIR")
    commands.choices["start"].add_argument("--cpus", type=int, default=4, help="of each node")
    asked = parser.parse_args()
    try:
        if asked.command == "start":
            print("export", *(f"{name}={value}" for name, value in start(asked.directory, asked.cpus).items()))
        elif not (asked.directory / "port").exists():
            raise Refused(f"{asked.directory}: no cluster was started there")
        else:
            {"stop": stop, "node-down": node_down, "node-up": node_up}[asked.command](asked.directory)
    except Refused as refused:
        sys.exit(f"{Path(__file__).name}: {refused}")


if __name__ == "__main__":
    main()
