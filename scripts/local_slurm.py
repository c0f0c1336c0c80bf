"""Run a real Slurm of two nodes on this machine, to try and to test the launcher.

    python scripts/local_slurm.py install                  # Debian's packages; requires root
    eval "$(python scripts/local_slurm.py start DIR)"      # sets SLURM_CONF: sbatch, squeue, sacct ... now work
    python scripts/local_slurm.py node-down DIR n2         # kill -9 a node and its jobs
    python scripts/local_slurm.py node-up DIR n2
    python scripts/local_slurm.py stop DIR

munged, MariaDB, slurmdbd, slurmctld and two slurmd run as the user who starts them; systemd and the system's own
services and settings are not changed. They write only under DIR, so several clusters can run at the same time.
Both nodes are in the partitions `batch` (the default), `short` (five minutes at most) and `urgent`, whose jobs preempt
and requeue those of the others.
"""

import argparse
import contextlib
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PACKAGES = "slurm-wlm slurmdbd slurm-client munge mariadb-server".split()
PROGRAMS = "munged mariadb-install-db mariadbd slurmdbd slurmctld slurmd sbatch sacct sacctmgr".split()
DAEMONS = "munged mariadbd slurmdbd slurmctld slurmscriptd slurmd slurmstepd".split()
NODES = ("n1", "n2")
CPUS, MEMORY = 4, 16384  # of a node; in MB. Two jobs of 2 CPUs and 8 GB fit, as conf/hydra/launcher/slurm.yaml asks for
SECONDS = 60  # for a daemon to answer
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # folders of the daemons

SLURM_CONF = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/run/slurmctld.pid
SlurmdPidFile={directory}/run/%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/%n.log
MailProg=/bin/true

# cred_expire is also how long a requeued job waits (120 seconds by default).
AuthType=auth/munge
AuthInfo=socket={directory}/run/munge.socket,cred_expire=10
CredType=cred/munge
MpiDefault=none
SwitchType=switch/none

# No cgroups: containers rarely have them.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={ports[1]}
AccountingStoragePass={directory}/run/munge.socket

# A node offers the CPUs and memory configured here, not those of the machine.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU={memory_per_cpu}

SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,default_queue_depth=1000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1

# A lost node is noticed soon; a returned one is used at once.
SlurmdTimeout=8
MessageTimeout=5
ReturnToService=2
MinJobAge=300
KillWait=2
InactiveLimit=0

NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} RealMemory={memory}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs={cpus} RealMemory={memory}
PartitionName=batch Nodes=n1,n2 Default=YES MaxTime=INFINITE PriorityTier=1
PartitionName=short Nodes=n1,n2 MaxTime=5 PriorityTier=1
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE PriorityTier=10
"""

SLURMDBD_CONF = """\
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={ports[1]}
SlurmUser={user}
PidFile={directory}/run/slurmdbd.pid
LogFile={directory}/log/slurmdbd.log
AuthType=auth/munge
AuthInfo=socket={directory}/run/munge.socket
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user}
StorageLoc=slurm
"""

# Reached by its socket only, and fast rather than safe: the data are those of a test cluster.
MARIADB = """\
--datadir={directory}/mariadb --socket={directory}/run/mariadb.sock --pid-file={directory}/run/mariadb.pid --user={user}
--skip-networking --skip-log-bin --performance-schema=OFF --innodb-flush-log-at-trx-commit=0
--innodb-buffer-pool-size=32M --innodb-log-file-size=16M --innodb-lock-wait-timeout=900
"""


class Refused(Exception):
    """An error to print without a traceback: one line, or a line and the end of a log."""


def install() -> None:
    """Install Debian's packages without starting their services.

    Raises:
        Refused: the user is not root, there is no apt-get, or apt-get fails.
    """
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Refused(f"install requires root and apt-get; without them install {' '.join(PACKAGES)} yourself")
    policy = Path("/usr/sbin/policy-rc.d")  # exit code 101: no service may start
    with contextlib.ExitStack() as undo:
        if not policy.exists():
            undo.callback(policy.unlink)
            policy.write_text("#!/bin/sh\nexit 101\n")
            policy.chmod(0o755)
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for step in (["update", "-qq"], ["install", "-qq", "-y", "--no-install-recommends", *PACKAGES]):
            if code := subprocess.run(["apt-get", *step], env=quiet, stdout=sys.stderr).returncode:
                raise Refused(f"apt-get {step[0]} failed with exit code {code}: see its output")


def start(directory: Path, cpus: int = CPUS, memory: int = MEMORY) -> Path:
    """Start a cluster; return the value of SLURM_CONF when both nodes are idle and sacct answers.

    Args:
        directory: a new one, or that of a stopped cluster, which then continues with its queue and accounts.
        cpus: that each node offers; they may be more than the machine has.
        memory: that each node offers, in MB; likewise.

    Raises:
        Refused: a program is missing, the directory cannot be used, or a daemon does not start.
    """
    if missing := [name for name in PROGRAMS if not shutil.which(name, path=PATH)]:
        raise Refused(f"{', '.join(missing)} missing: run `{sys.executable} {__file__} install`, on Debian and as root")
    if len(str(directory)) > 70 or re.search(r"\s", str(directory)):
        raise Refused(f"{directory} must be a path of at most 70 characters without spaces, since it holds sockets")
    if cpus < 1 or memory < cpus:
        raise Refused(f"a node must have at least one CPU and one MB per CPU (got {cpus} CPUs and {memory} MB)")
    if processes(directory):
        raise Refused(f"{directory}: a cluster is running there; `stop` it first")
    for name in ("run", "log", "state", "spool/n1", "spool/n2"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    settings = {
        "directory": directory,
        "user": pwd.getpwuid(os.geteuid()).pw_name,
        "host": socket.gethostname().partition(".")[0],
        "ports": free_ports(4),
        "cpus": cpus,
        "memory": memory,
        "memory_per_cpu": memory // cpus,
    }
    (directory / "slurm.conf").write_text(SLURM_CONF.format(**settings))
    write_private(directory / "slurmdbd.conf", SLURMDBD_CONF.format(**settings).encode())
    write_private(directory / "munge.key", os.urandom(128))
    with contextlib.ExitStack() as undo:
        undo.callback(stop, directory)
        start_accounts(directory, settings)
        launch(directory, "slurmctld", "slurmctld")
        wait_until(directory, "slurmctld", lambda: ask(directory, "scontrol ping") is not None)
        for node in NODES:
            node_up(directory, node)
        wait_until(directory, "slurmdbd", lambda: ask(directory, "sacct -n") is not None)
        undo.pop_all()
    return directory / "slurm.conf"


def start_accounts(directory: Path, settings: dict[str, object]) -> None:
    """Start the daemons that sacct requires, munge and MariaDB included, and add the user's account."""
    run, log, user = directory / "run", directory / "log", settings["user"]
    key = f"--key-file={directory}/munge.key --seed-file={directory}/munge.seed"
    munge = f"--socket={run}/munge.socket --pid-file={run}/munged.pid --log-file={log}/munged.log"
    launch(directory, "munged", f"munged --force {key} {munge}")
    mariadb = MARIADB.format(**settings)
    if not (directory / "mariadb").exists():
        account = f"--auth-root-authentication-method=socket --auth-root-socket-user={user}"
        launch(directory, "mariadbd", f"mariadb-install-db --no-defaults --skip-test-db {account} {mariadb}")
    (run / "mariadb.pid").unlink(missing_ok=True)  # of a server that was killed
    launch(directory, "mariadbd", f"setsid --fork mariadbd --no-defaults {mariadb}")
    wait_until(directory, "mariadbd", (run / "mariadb.pid").exists)
    launch(directory, "slurmdbd", "slurmdbd")
    wait_until(directory, "slurmdbd", lambda: ask(directory, "sacctmgr -n list cluster") is not None)
    for what in ("cluster local", "account lab", f"user {user} account=lab"):
        ask(directory, f"sacctmgr -i add {what}")  # fails without harm if the cluster ran before


def stop(directory: Path) -> None:
    """End every process of the cluster: daemons, steps and jobs. Logs, accounts and state stay."""
    if processes(directory, "slurmctld"):  # so that it requeues the jobs
        ask(directory, f"scontrol update NodeName={','.join(NODES)} State=DOWN Reason=stopped")
    for node in NODES:
        end(directory, node, signal.SIGKILL)
    for name in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
        end(directory, name, signal.SIGTERM)


def node_down(directory: Path, node: str) -> None:
    """Kill a node's daemon, its steps and its jobs, as a power cut would."""
    end(directory, node, signal.SIGKILL)


def node_up(directory: Path, node: str) -> None:
    """Start a node's daemon, and wait until the node accepts jobs; its earlier jobs have failed.

    Raises:
        Refused: it is running, or does not start.
    """
    if processes(directory, node):
        raise Refused(f"{directory}: {node} is running")
    # The jobs that ran there are lost, even if Slurm has not noticed yet that the node was down.
    ask(directory, f"scontrol update NodeName={node} State=DOWN Reason=restarted")
    launch(directory, node, f"slurmd -N {node}")
    state = f"sinfo -h -N -p batch -n {node} -o %t"
    wait_until(directory, node, lambda: ask(directory, state) in ("idle", "mix", "alloc"))


def processes(directory: Path, *names: str) -> list[int]:
    """Return the processes of the daemons with these names (a node's: its slurmd, steps and jobs), or of all.

    Daemons come first. A daemon is found by the log that it keeps open, a job's process by its environment; both also
    work when a parent process has died.
    """
    daemons, jobs = [], []
    logs = {str(log) for log in (directory / "log").glob("*.log") if not names or log.stem in names}
    conf = f"SLURM_CONF={directory}/slurm.conf".encode()
    nodes = {f"SLURMD_NODENAME={node}".encode() for node in NODES if not names or node in names}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text().strip() in DAEMONS:
                if logs & {os.readlink(file) for file in (process / "fd").iterdir()}:
                    daemons.append(int(process.name))
            elif conf in (environment := (process / "environ").read_bytes().split(b"\0")) and nodes & {*environment}:
                jobs.append(int(process.name))
        except OSError:
            continue  # it has ended, or belongs to another user
    return daemons + jobs


def end(directory: Path, name: str, number: signal.Signals) -> None:
    """Send a signal to a daemon and its processes until they have ended; after ten seconds SIGKILL."""
    deadline = time.monotonic() + 10
    while pids := processes(directory, name):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number if time.monotonic() < deadline else signal.SIGKILL)
        time.sleep(0.05)


def environment(directory: Path) -> dict[str, str]:
    """Return this process's environment without variables of another Slurm, and with the cluster's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SACCT", "MYSQL"))}
    settings = {
        "SLURM_CONF": f"{directory}/slurm.conf",
        "MYSQL_UNIX_PORT": f"{directory}/run/mariadb.sock",
        "PATH": PATH,
    }
    return kept | settings


def launch(directory: Path, name: str, command: str) -> None:
    """Run a command that starts a daemon and returns."""
    null, env = subprocess.DEVNULL, environment(directory)
    with open(directory / "log" / f"{name}.log", "a") as log:
        code = subprocess.run(command.split(), env=env, cwd=directory, stdin=null, stdout=log, stderr=log).returncode
    if code:
        raise Refused(f"{command.split()[0]} failed with exit code {code}; {tail(directory, name)}")


def wait_until(directory: Path, name: str, ready: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not ready():
        waited = time.monotonic() - begun
        if waited > SECONDS or (waited > 1 and not processes(directory, name)):
            raise Refused(f"{name} did not start; {tail(directory, name)}")
        time.sleep(0.1)


def tail(directory: Path, name: str) -> str:
    log = directory / "log" / f"{name}.log"
    return "\n".join([f"{log}:", *log.read_text(errors="replace").splitlines()[-5:]])


def ask(directory: Path, command: str) -> str | None:
    """Return the output of a Slurm command; None if it fails."""
    done = subprocess.run(command.split(), env=environment(directory), capture_output=True, text=True, timeout=SECONDS)
    return done.stdout.strip() if done.returncode == 0 else None


def free_ports(count: int) -> list[int]:
    """Return free ports below the range that the system uses for outgoing connections."""
    ports: set[int] = set()
    while len(ports) < count:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            ports.add(port)
    return list(ports)


def write_private(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install")
    for command in ("start", "stop", "node-down", "node-up"):
        commands.add_parser(command).add_argument("directory", type=lambda path: Path(path).resolve(), metavar="DIR")
    commands.choices["start"].add_argument("--cpus", type=int, default=CPUS, help=f"of each node ({CPUS})")
    commands.choices["start"].add_argument("--memory", type=int, default=MEMORY, help=f"of each node, in MB ({MEMORY})")
    for command in ("node-down", "node-up"):
        commands.choices[command].add_argument("node", choices=NODES)
    asked = parser.parse_args()
    try:
        if asked.command == "install":
            install()
        elif asked.command == "start":
            print(f"export SLURM_CONF={start(asked.directory, asked.cpus, asked.memory)}")
        elif not (asked.directory / "slurm.conf").exists():
            raise Refused(f"{asked.directory}: no cluster was started there")
        elif asked.command == "stop":
            stop(asked.directory)
        elif asked.command == "node-down":
            node_down(asked.directory, asked.node)
        else:
            node_up(asked.directory, asked.node)
    except Refused as refused:
        sys.exit(f"{Path(__file__).name}: {refused}")


if __name__ == "__main__":
    main()
