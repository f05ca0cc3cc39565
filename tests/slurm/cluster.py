#!/usr/bin/env python3
"""Run a real Slurm cluster of several machines on this one, for tests.

    cluster.py up DIR [--nodes N] [--cpus C] [--gpus G] [--private PATH]...
    eval "$(cluster.py env DIR)"      # sbatch, srun, squeue ... now talk to it
    cluster.py status [DIR]
    cluster.py cut|restore [DIR] NODE         unplug / plug in a node's network
    cluster.py kill|boot [DIR] NODE|ctl       power off / on a node, or slurmctld
    cluster.py exec [DIR] [--node NODE] -- COMMAND...     run it on a machine
    cluster.py down DIR [--purge]

DIR may be left out where $SLURM_LAB_DIR is set (`env` sets it).

Every machine is a set of Linux namespaces held by one process:

    login   slurmctld, munged and the client commands; owns the bridge br0
    node1.. one slurmd each, with its own hostname, address (eth0), process
            table, /dev/shm and SysV IPC, so that killing the holder is a
            power failure and nothing of the node survives it

The file system is shared, as on a real cluster; --private PATH makes a path
local to each node. The network exists only inside these namespaces: it has no
way out, nothing is added to this machine's own network, and several clusters
can run side by side. All files live in DIR; /etc is not touched.

Needs root, and on Debian or Ubuntu:
    apt-get install -y --no-install-recommends \\
        slurmctld slurmd slurm-client munge iproute2 util-linux
"""

import argparse
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

PACKAGES = "slurmctld slurmd slurm-client munge iproute2 util-linux"
LOGIN = "login"
SUBNET = "10.99.0"  # private to the namespaces, so it can clash with nothing
CLIENTS = (
    "sacct",
    "salloc",
    "sattach",
    "sbatch",
    "sbcast",
    "scancel",
    "scontrol",
    "sdiag",
    "sinfo",
    "sprio",
    "squeue",
    "srun",
    "sstat",
    "strigger",
)
# What `up` makes in DIR. `down` removes VOLATILE and, with --purge, the rest.
VOLATILE = ("run", "state", "spool", "bin", "gpu", "local", "munge.key", "cluster.json")
LASTING = ("log", "slurm.conf", "gres.conf", "cgroup.conf", "mpi.conf", "hosts", ".slurm-cluster")

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000


class Failure(Exception):
    """Something the user should read; printed without a traceback."""


def run(*argv, check=True, timeout=30):
    """Run a command; return its output, or fail with what it said."""
    argv = [str(a) for a in argv]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
        )
    except FileNotFoundError:
        raise Failure(f"{argv[0]} is not installed; try: apt-get install -y {PACKAGES}") from None
    except subprocess.TimeoutExpired:
        raise Failure(f"no answer within {timeout} s from: {' '.join(argv)}") from None
    if check and done.returncode:
        raise Failure(f"{' '.join(argv)}\n  exited {done.returncode}: {done.stdout.strip()}")
    return done.stdout


# --- processes: named by pid and start time, so that a reused pid is never hit ---


def start_time(pid):
    """The kernel's start time of a live process, or None."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def alive(proc):
    return bool(proc) and start_time(proc["pid"]) == proc["start"]


def stop(proc, *signals, wait=5.0):
    """Send each signal in turn to one of our processes until it is gone."""
    for sig in signals:
        if not alive(proc):
            return
        os.kill(proc["pid"], sig)
        deadline = time.monotonic() + wait
        while alive(proc) and time.monotonic() < deadline:
            time.sleep(0.02)


# --- one machine: a process that holds its namespaces ---


def hold(directory, name, pipe):
    """Body of the holder (`cluster.py _hold`): set the machine up, then only reap."""
    lab = Lab(directory)
    is_node = name != LOGIN
    try:
        socket.sethostname(name)
        run("mount", "--make-rslave", "/")  # what we mount stays in here
        if is_node:
            run("mount", "-t", "proc", "proc", "/proc")
            run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
            for path in lab.load()["private"]:
                source = lab.dir / "local" / name / path.strip("/").replace("/", "_")
                source.mkdir(parents=True, exist_ok=True)
                source.chmod(0o1777)
                run("mount", "--bind", source, path)
        run("mount", "-t", "sysfs", "sysfs", "/sys")  # so that /sys/class/net is ours
        run("mount", "--bind", lab.dir / "hosts", "/etc/hosts")
        # In here the plain /usr/bin commands are right: hide the client wrappers.
        run("mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "tmpfs", lab.dir / "bin")
        for which in ("all", "default"):
            knob = Path(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6")
            if knob.exists():
                knob.write_text("1")
        run("ip", "link", "set", "lo", "up")
        if not is_node:
            run("ip", "link", "add", "br0", "type", "bridge")
            run("ip", "addr", "add", f"{SUBNET}.1/24", "dev", "br0")
            run("ip", "link", "set", "br0", "up")
    except (Failure, OSError) as error:
        os.write(pipe, f"error {error}\n".encode())
        sys.exit(1)
    os.write(pipe, b"ready\n")
    os.close(pipe)
    # On a node we are process 1: adopt and reap what daemons leave behind.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigwait({signal.SIGCHLD})


def start_machine(lab, name):
    """Start the holder of a machine's namespaces; return it as {pid, start}."""
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWNET
    if name != LOGIN:  # clients on login share this machine's process table
        flags |= CLONE_NEWPID | CLONE_NEWIPC
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    middle = os.fork()
    if middle == 0:  # unshare, then fork once more: a pid namespace starts with a child
        try:
            os.close(reader)
            os.setsid()
            os.chdir("/")
            null = os.open(os.devnull, os.O_RDWR)
            log = os.open(lab.dir / "log" / f"{name}.holder.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for fd, target in ((null, 0), (log, 1), (log, 2)):
                os.dup2(fd, target)
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.unshare(flags):
                raise OSError(ctypes.get_errno(), "unshare: " + os.strerror(ctypes.get_errno()))
            pid = os.fork()
            if pid == 0:
                os.execv(
                    sys.executable,
                    [sys.executable, os.path.abspath(__file__), "_hold", str(lab.dir), name, str(writer)],
                )
            os.write(writer, f"pid {pid}\n".encode())
        except OSError as error:
            os.write(writer, f"error {error}\n".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        said = dict(line.rstrip("\n").partition(" ")[::2] for line in lines)
    os.waitpid(middle, 0)
    if "ready" not in said or "pid" not in said:
        reason = said.get("error", f"see {lab.dir}/log/{name}.holder.log")
        raise Failure(
            f"could not make the namespaces of {name}: {reason}\n"
            "  (this needs root and a kernel that permits new namespaces)"
        )
    pid = int(said["pid"])
    return {"pid": pid, "start": start_time(pid)}


# --- the cluster ---


class Lab:
    """A cluster: its files in one directory, and the processes that are its own."""

    def __init__(self, directory):
        self.dir = Path(os.path.abspath(directory))
        self.conf = self.dir / "slurm.conf"

    # state: which processes are ours, written as soon as each one exists

    def load(self):
        try:
            return json.loads((self.dir / "cluster.json").read_text())
        except FileNotFoundError:
            raise Failure(f"no cluster in {self.dir}; start one with: cluster.py up {self.dir}") from None

    def save(self, state):
        temporary = self.dir / "cluster.json.new"
        temporary.write_text(json.dumps(state, indent=1))
        temporary.rename(self.dir / "cluster.json")

    def lock(self, create=False):
        """Keep two commands from changing one cluster at a time."""
        if not create and not (self.dir / ".slurm-cluster").exists():
            raise Failure(f"{self.dir} is not a cluster's directory")
        self._lock = open(self.dir / ".slurm-cluster", "a")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def nodes(self, state):
        return [f"node{i}" for i in range(1, state["nodes"] + 1)]

    def require(self, state, name, extra=()):
        if name not in (*self.nodes(state), *extra):
            raise Failure(f"{name} is none of {' '.join((*self.nodes(state), *extra))}")

    # running things on the machines

    def enter(self, state, name):
        """The command prefix that runs something on a machine."""
        holder = state["holders"].get(name)
        if not alive(holder):
            raise Failure(f"{name} is not running")
        spaces = ["--net", "--uts", "--mount"] + (["--pid", "--ipc"] if name != LOGIN else [])
        return ["nsenter", "--target", str(holder["pid"]), *spaces]

    def on(self, state, name, *argv, **options):
        return run(*self.enter(state, name), "env", f"SLURM_CONF={self.conf}", *argv, **options)

    # files

    def write_files(self, state):
        d, nodes = self.dir, self.nodes(state)
        for name in ("run", "state", "spool", "log", "bin", "gpu"):
            (d / name).mkdir(mode=0o755, exist_ok=True)
        for name in nodes:
            (d / "spool" / name).mkdir(exist_ok=True)
        # Unused, but the plugin is loaded: v1 is the one that needs nothing to be mounted.
        (d / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        # PMIx makes one directory per step; /dev/shm is the place that nodes do not share.
        (d / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")
        (d / "hosts").write_text(
            f"127.0.0.1 localhost\n{SUBNET}.1 {LOGIN}\n"
            + "".join(f"{SUBNET}.{10 + i} {n}\n" for i, n in enumerate(nodes, 1))
        )
        key = d / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        gres = ""
        if state["gpus"]:  # Slurm wants device files; copies of /dev/null stand in for GPUs
            for i in range(state["gpus"]):
                os.mknod(d / "gpu" / f"gpu{i}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            files = f"{d}/gpu/gpu[0-{state['gpus'] - 1}]" if state["gpus"] > 1 else f"{d}/gpu/gpu0"
            (d / "gres.conf").write_text(f"Name=gpu File={files}\n")
            gres = f" Gres=gpu:{state['gpus']}"
        node_lines = "".join(
            f"NodeName={n} NodeAddr={SUBNET}.{10 + i} CPUs={state['cpus']} Boards=1"
            f" SocketsPerBoard=1 CoresPerSocket={state['cpus']} ThreadsPerCore=1"
            f" RealMemory={state['memory']}{gres} State=UNKNOWN\n"
            for i, n in enumerate(nodes, 1)
        )
        self.conf.write_text(f"""\
# Written by tests/slurm/cluster.py; the next `up` overwrites it.
ClusterName=lab
SlurmctldHost={LOGIN}({SUBNET}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits (default 120 s).
AuthInfo=socket={d}/run/munge.socket,cred_expire=8

StateSaveLocation={d}/state
SlurmdSpoolDir={d}/spool/%n
SlurmctldPidFile={d}/run/slurmctld.pid
SlurmdPidFile={d}/run/slurmd.%n.pid
SlurmctldLogFile={d}/log/slurmctld.log
SlurmdLogFile={d}/log/slurmd.%n.log

# No cgroups and no systemd: /proc tracks the processes of a job.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
# Nodes may claim more CPUs and memory than this machine has.
SlurmdParameters=config_overrides

SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
{"GresTypes=gpu" if gres else ""}
# No database: finished jobs stay visible to scontrol for MinJobAge seconds,
# and go to jobcomp.txt for good.
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={d}/log/jobcomp.txt
MinJobAge=86400

# A dead node is noticed within about SlurmdTimeout, and comes back by itself.
SlurmdTimeout=10
SlurmctldTimeout=15
MessageTimeout=5
TCPTimeout=2
KillWait=5
InactiveLimit=0
ReturnToService=2
JobRequeue=1

{node_lines}PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
""")

    def write_wrappers(self, state):
        """DIR/bin/sbatch and so on: the real commands, run on the login machine."""
        pid = state["holders"][LOGIN]["pid"]
        wrapper = self.dir / "bin" / "client"
        wrapper.write_text(f"""\
#!/bin/sh
# Run the Slurm command that this file is named after on the login machine.
if ! grep -qzxF -- '{self.dir}' /proc/{pid}/cmdline 2>/dev/null; then
    echo "${{0##*/}}: the Slurm cluster of {self.dir} is not running" >&2
    exit 1
fi
SLURM_CONF='{self.conf}'; export SLURM_CONF
exec nsenter --target {pid} --net --uts --mount --wdns="$PWD" -- "/usr/bin/${{0##*/}}" "$@"
""")
        wrapper.chmod(0o755)
        for command in CLIENTS:
            if os.path.exists(f"/usr/bin/{command}"):
                link = self.dir / "bin" / command
                link.unlink(missing_ok=True)
                link.symlink_to("client")

    # starting

    def start_controller(self, state):
        """munged (once) and slurmctld, in the namespaces of login."""
        d = self.dir
        if not alive(state["daemons"].get("munged")):
            self.on(
                state,
                LOGIN,
                "munged",
                f"--key-file={d}/munge.key",
                "--num-threads=2",
                f"--socket={d}/run/munge.socket",
                f"--pid-file={d}/run/munged.pid",
                f"--log-file={d}/log/munged.log",
                f"--seed-file={d}/run/munged.seed",
            )
            self.record_daemon(state, "munged")
        self.on(state, LOGIN, "slurmctld", "-f", self.conf)
        self.record_daemon(state, "slurmctld")

    def record_daemon(self, state, name, timeout=10):
        pidfile = self.dir / "run" / f"{name}.pid"
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            text = pidfile.read_text().strip() if pidfile.exists() else ""
            if text and start_time(int(text)):
                state["daemons"][name] = {"pid": int(text), "start": start_time(int(text))}
                self.save(state)
                return
            time.sleep(0.05)
        raise Failure(f"{name} did not start; the end of its log:\n" + self.log_tail(name))

    def start_node(self, state, name):
        """A node's namespaces, its cable to the bridge, and its slurmd."""
        state["holders"][name] = holder = start_machine(self, name)
        self.save(state)
        port, number = f"v-{name}", int(name[4:])
        self.on(state, LOGIN, "ip", "link", "del", port, check=False)  # of an earlier life
        self.on(state, LOGIN, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", holder["pid"])
        self.on(state, LOGIN, "ip", "link", "set", port, "master", "br0", "up")
        self.on(state, name, "ip", "addr", "add", f"{SUBNET}.{10 + number}/24", "dev", "eth0")
        self.on(state, name, "ip", "link", "set", "eth0", "up")
        self.on(state, name, "slurmd", "-f", self.conf)

    def log_tail(self, name, lines=15):
        try:
            text = (self.dir / "log" / f"{name}.log").read_text(errors="replace")
        except OSError:
            return "  (no log)"
        return "\n".join("  " + line for line in text.splitlines()[-lines:])

    def wait_idle(self, state, names, timeout):
        """Wait until Slurm itself says that these nodes can take jobs."""
        deadline = time.monotonic() + timeout
        while True:
            out = self.on(state, LOGIN, "sinfo", "-hN", "-o", "%N %T", check=False)
            seen = dict(re.findall(r"^(node\d+) (\S+)$", out, re.M))
            late = [n for n in names if seen.get(n) not in ("idle", "mixed", "allocated")]
            if not late:
                return
            if time.monotonic() > deadline:
                raise Failure(
                    f"not ready after {timeout} s: "
                    + ", ".join(f"{n} ({seen.get(n, 'unknown')})" for n in late)
                    + f"\nslurmctld.log:\n{self.log_tail('slurmctld')}"
                    + f"\nslurmd.{late[0]}.log:\n{self.log_tail('slurmd.' + late[0])}"
                )
            time.sleep(0.1)

    def healthy(self, state):
        parts = [
            *(state["holders"].get(n) for n in (LOGIN, *self.nodes(state))),
            *(state["daemons"].get(n) for n in ("munged", "slurmctld")),
        ]
        return all(alive(p) for p in parts)

    # stopping

    def stop_all(self):
        """End every process that `up` started, and nothing else."""
        try:
            state = self.load()
        except Failure:
            return
        # Nodes first, by power-off: their slurmd, steps and jobs die with process 1.
        for name in sorted(state["holders"], key=lambda n: n == LOGIN):
            if name != LOGIN:
                stop(state["holders"][name], signal.SIGKILL)
        for name in ("slurmctld", "munged"):
            stop(state["daemons"].get(name), signal.SIGTERM, signal.SIGKILL)
        stop(state["holders"].get(LOGIN), signal.SIGKILL)
        left = [
            f"{kind} {name} (pid {p['pid']})"
            for kind in ("holders", "daemons")
            for name, p in state[kind].items()
            if alive(p)
        ]
        if left:
            raise Failure("still running: " + ", ".join(left))

    def remove(self, names):
        for name in names:
            path = self.dir / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


# --- commands ---


def check_machine():
    if os.geteuid() != 0:
        raise Failure("must run as root (it makes namespaces)")
    os.environ["PATH"] = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
    missing = [c for c in ("slurmctld", "slurmd", "munged", "ip", "nsenter", "mount") if not shutil.which(c)]
    missing += [c for c in ("sbatch", "srun", "sinfo", "scontrol") if not os.path.exists(f"/usr/bin/{c}")]
    if missing:
        raise Failure(
            f"missing {', '.join(missing)}; install them with\n  apt-get install -y --no-install-recommends {PACKAGES}"
        )


def cmd_up(lab, args):
    if not re.fullmatch(r"[A-Za-z0-9_./+-]{1,80}", str(lab.dir)):
        raise Failure(
            f"{lab.dir}: use a path of at most 80 plain characters without spaces "
            "(slurm.conf and Unix sockets need that)"
        )
    if not (1 <= args.nodes <= 64 and args.cpus >= 1 and args.gpus >= 0):
        raise Failure("--nodes must be 1 to 64, --cpus at least 1, --gpus at least 0")
    for path in args.private:
        if not os.path.isdir(path) or not os.path.isabs(path):
            raise Failure(f"--private {path}: not an absolute path of a directory")
        if f"{lab.dir}/".startswith(path.rstrip("/") + "/"):
            raise Failure(f"--private {path}: the cluster's own directory lies in there")
    if lab.dir.exists() and any(lab.dir.iterdir()) and not (lab.dir / ".slurm-cluster").exists():
        raise Failure(f"{lab.dir} has files that are not a cluster's; name an empty or new one")
    lab.dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    lab.lock(create=True)
    wanted = {"nodes": args.nodes, "cpus": args.cpus, "gpus": args.gpus, "memory": args.memory, "private": args.private}
    if (lab.dir / "cluster.json").exists():
        state = lab.load()
        if lab.healthy(state):
            if {k: state[k] for k in wanted} != wanted:
                raise Failure("already up with other settings; run `down` first")
            lab.wait_idle(state, lab.nodes(state), args.timeout)
            print(f"already up: {lab.dir}")
            return
        lab.stop_all()
    lab.remove((*VOLATILE, "log"))  # job numbers start at 1 again, so old records would mislead
    state = {**wanted, "holders": {}, "daemons": {}}
    began = time.monotonic()
    try:
        lab.write_files(state)
        lab.save(state)
        state["holders"][LOGIN] = start_machine(lab, LOGIN)
        lab.save(state)
        lab.write_wrappers(state)
        lab.start_controller(state)
        for name in lab.nodes(state):
            lab.start_node(state, name)
        lab.wait_idle(state, lab.nodes(state), args.timeout)
    except BaseException:
        lab.stop_all()
        lab.remove(["cluster.json"])
        raise
    print(
        f"up in {time.monotonic() - began:.1f} s: {args.nodes} nodes of {args.cpus} CPUs; "
        f'now: eval "$({sys.argv[0]} env {lab.dir})"'
    )


def cmd_down(lab, args):
    if not lab.dir.exists():
        return
    lab.lock()
    lab.stop_all()
    lab.remove(VOLATILE + (LASTING if args.purge else ()))
    if args.purge and not any(lab.dir.iterdir()):
        lab.dir.rmdir()


def cmd_status(lab, args):
    state = lab.load()
    down = []
    for kind in ("daemons", "holders"):
        for name, proc in state[kind].items():
            if not alive(proc):
                down.append(name)
            print(f"{name:10} pid {proc['pid']:<8} {'running' if alive(proc) else 'DOWN'}")
    if not {"slurmctld", LOGIN} & set(down):
        print(lab.on(state, LOGIN, "sinfo", check=False) + lab.on(state, LOGIN, "squeue", check=False), end="")
    sys.exit(1 if down else 0)


def cmd_env(lab, args):
    lab.load()
    print(f"export SLURM_LAB_DIR='{lab.dir}'")
    print(f"export SLURM_CONF='{lab.conf}'")
    print(f"export PATH='{lab.dir}/bin':\"$PATH\"")
    # Everything here runs as root, which Open MPI refuses unless told twice.
    print("export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")


def cmd_exec(lab, args):
    state = lab.load()
    if not args.command:
        raise Failure("give the command after --")
    if args.node != LOGIN:
        lab.require(state, args.node)
    os.environ["SLURM_CONF"] = str(lab.conf)
    argv = [*lab.enter(state, args.node), f"--wdns={os.getcwd()}", "--", *args.command]
    os.execvp(argv[0], argv)


def cmd_cut(lab, args):
    state = lab.load()
    lab.require(state, args.node)
    lab.on(state, LOGIN, "ip", "link", "set", f"v-{args.node}", "down")


def cmd_restore(lab, args):
    state = lab.load()
    lab.require(state, args.node)
    lab.on(state, LOGIN, "ip", "link", "set", f"v-{args.node}", "up")


def cmd_kill(lab, args):
    lab.lock()
    state = lab.load()
    lab.require(state, args.node, extra=("ctl",))
    stop(state["daemons"].get("slurmctld") if args.node == "ctl" else state["holders"].get(args.node), signal.SIGKILL)


def cmd_boot(lab, args):
    lab.lock()
    state = lab.load()
    lab.require(state, args.node, extra=("ctl",))
    if args.node == "ctl":
        if not alive(state["daemons"].get("slurmctld")):
            (lab.dir / "run" / "slurmctld.pid").unlink(missing_ok=True)
            lab.start_controller(state)
    else:
        if not alive(state["holders"].get(args.node)):
            lab.start_node(state, args.node)
        lab.wait_idle(state, [args.node], args.timeout)


def main(argv):
    if argv[:1] == ["_hold"]:
        return hold(argv[1], argv[2], int(argv[3]))
    argv, _, command = (
        (argv[: argv.index("--")], "--", argv[argv.index("--") + 1 :]) if "--" in argv else (argv, "", [])
    )
    parser = argparse.ArgumentParser(
        prog="cluster.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")

    def add(name, function, text, with_node=False):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("dir", nargs="?", default=os.environ.get("SLURM_LAB_DIR"), metavar="DIR")
        if with_node:
            sub.add_argument("node", metavar="NODE")
        sub.set_defaults(function=function)
        return sub

    up = add("up", cmd_up, "start a cluster (does nothing if it is up already)")
    up.add_argument("--nodes", type=int, default=2, help="how many nodes (2)")
    up.add_argument("--cpus", type=int, default=4, help="CPUs each node claims to have (4)")
    up.add_argument("--gpus", type=int, default=0, help="make-believe GPUs of each node (0)")
    up.add_argument("--memory", type=int, default=4096, help="MiB each node claims to have (4096)")
    up.add_argument(
        "--private",
        action="append",
        default=[],
        metavar="PATH",
        help="an existing directory that each node has for itself; may be repeated",
    )
    up.add_argument("--timeout", type=float, default=30, help="seconds to wait for the nodes (30)")
    down = add("down", cmd_down, "stop a cluster; its logs stay")
    down.add_argument("--purge", action="store_true", help="remove its logs and configuration too")
    add("status", cmd_status, "processes, nodes and jobs; exit status 1 if something is down")
    add("env", cmd_env, "print the exports that a shell needs")
    add("exec", cmd_exec, "run a command (after --) on a machine").add_argument(
        "--node", default=LOGIN, help="which machine (login)"
    )
    add("cut", cmd_cut, "unplug the network of a node", with_node=True)
    add("restore", cmd_restore, "plug the network of a node in again", with_node=True)
    add("kill", cmd_kill, "power off a node, or kill slurmctld (ctl)", with_node=True)
    add("boot", cmd_boot, "start a killed node, or slurmctld (ctl)", with_node=True).add_argument(
        "--timeout", type=float, default=30, help="seconds to wait for the node (30)"
    )

    args = parser.parse_args(argv)
    args.command = command
    try:
        if not args.dir:
            raise Failure("name the cluster's directory, or set SLURM_LAB_DIR")
        check_machine()
        args.function(Lab(args.dir), args)
    except Failure as failure:
        sys.exit(f"cluster.py: {failure}")


if __name__ == "__main__":
    main(sys.argv[1:])
