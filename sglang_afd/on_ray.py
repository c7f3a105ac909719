"""``launch_server --afd-ray``: both commands of a deployment on the nodes of a Ray cluster.

Each role's command runs on one node, below an actor that holds the role's GPUs, so that Ray gives
them to nobody else.  What the commands print comes to this process, and their ends are one end: the
first that fails ends the other.  Ray starts and stops the commands; a step never goes through it.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from sglang_afd import flags
from sglang_afd.causes import INTERRUPTED
from sglang_afd.command_line import last_value, values
from sglang_afd.config import AfdConfig, ConfigError
from sglang_afd.running import asked_to_stop, end_with_parent, free_port
from sglang_afd.topology import COMMANDS, Mode, Role
from sglang_afd.upstream.handshake import TOKEN_ENV

_STOP_WITHIN = 60.0  # seconds: running requests are finished first
_CARRIED = ("SGLANG_", "HF_", "NCCL_", "NVSHMEM_", "GLOO_", "TORCH_", "OMP_", "MKL_")
"""Beginnings of the environment variables that commands get from here: Ray's nodes have theirs."""
_OURS = ("--afd-role", "--nnodes", "--node-rank", "--dist-init-addr")


class OnRay(NamedTuple):
    """Where in a Ray cluster the roles run."""

    address: str
    attention_node: str | None
    ffn_node: str | None


class Node(NamedTuple):
    """A node of the cluster."""

    id: str
    host: str
    gpus: int

    def is_called(self, name: str) -> bool:
        """Whether `name` is its address or the beginning of its id."""
        return name == self.host or (len(name) >= 6 and self.id.startswith(name))


def add_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the flags that this module reads."""
    parser.add_argument(
        "--afd-ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="run both roles' commands on the nodes of the Ray cluster at ADDRESS (default: the "
        "one that this machine belongs to), FFN ranks on its last node; the package and the model "
        "are at the same paths on all nodes",
    )
    for role, name in (("attention", "attention"), ("ffn", "FFN")):
        parser.add_argument(
            f"--afd-ray-{role}-node",
            metavar="NODE",
            help=f"with --afd-ray: the node of the {name} ranks, by its address or its Ray id",
        )


def take(argv: Sequence[str]) -> tuple[OnRay | None, list[str]]:
    """Split a command line, in which no --config is left, into what Ray is asked for (None:
    nothing) and the rest.

    Raises:
        ConfigError: a flag lacks its value, or a node is named but no cluster is.
    """
    known, rest = flags.take(add_flags, argv)
    if known.afd_ray is None:
        for role in ("attention", "ffn"):
            if getattr(known, f"afd_ray_{role}_node") is not None:
                raise ConfigError(f"--afd-ray-{role}-node needs --afd-ray")
        return None, list(argv)
    return OnRay(known.afd_ray, known.afd_ray_attention_node, known.afd_ray_ffn_node), rest


def place(nodes: Sequence[Node], wanted: OnRay, gpus: dict[Role, int]) -> dict[Role, Node]:
    """Choose a node for each role.

    FFN ranks take the last node that has their GPUs, attention ranks the first; both may share one
    that has enough for both.

    Args:
        nodes: in order of their addresses.
        gpus: how many each role needs; 0 on the CPU.

    Raises:
        ConfigError: a named node does not exist, or no node has enough GPUs.
    """
    left = {node.id: node.gpus for node in nodes}
    chosen: dict[Role, Node] = {}
    for role, name in ((Role.FFN, wanted.ffn_node), (Role.ATTENTION, wanted.attention_node)):
        candidates = [node for node in nodes if name is None or node.is_called(name)]
        if not candidates:
            raise ConfigError(
                f"--afd-ray-{role.value}-node {name}: the cluster has no such node; it has "
                f"{', '.join(f'{node.host} ({node.id[:12]})' for node in nodes)}"
            )
        fitting = [node for node in candidates if left[node.id] >= gpus[role]]
        if not fitting:
            free = ", ".join(f"{node.host}: {left[node.id]}" for node in candidates)
            raise ConfigError(
                f"the {role.value} ranks need {gpus[role]} GPUs on one node of the Ray cluster, "
                f"free are {free}; add nodes, or lower the number of ranks"
            )
        chosen[role] = fitting[-1 if role is Role.FFN else 0]
        left[chosen[role].id] -= gpus[role]
    return chosen


def run(wanted: OnRay, args: Sequence[str], *, program: str) -> int:
    """Run the deployment that `args` describe until it ends; returns the exit status.

    Raises:
        ConfigError: the flags cannot be right, Ray is not installed, there is no such cluster, or
            it has no room.
    """
    for flag in _OURS:
        if values(args, flag):
            raise ConfigError(f"{flag} is set by --afd-ray; leave it out")
    config = flags.parse(
        args, transport="gloo"
    ).config  # the commands choose their transport themselves
    if config is None:
        raise ConfigError("--afd-ray needs --afd-attention-ranks and --afd-ffn-ranks")
    if config.mode is Mode.CAD:
        raise ConfigError(
            "--afd-ray does not go with --afd-mode cad, whose roles start from one command so far; "
            "leave it out"
        )
    with _cluster(wanted.address) as nodes:
        on_cpu = last_value(args, "--device") == "cpu" or not any(node.gpus for node in nodes)
        gpus = {role: 0 if on_cpu else len(_world(config, role)) for role in COMMANDS}
        places = place(nodes, wanted, gpus)
        for role, node in places.items():
            print(f"{program}: {role.value} ranks on {node.host} ({node.id[:12]})", flush=True)
        return _supervise(places, gpus, args, program)


def _world(config: AfdConfig, role: Role) -> Sequence[int]:
    topology = config.topology
    return topology.attention_world if role is Role.ATTENTION else topology.ffn_world


@contextmanager
def _cluster(address: str) -> Iterator[list[Node]]:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--afd-ray needs Ray; pip install 'sglang_afd[ray]'") from error
    carried = [name for name in os.environ if name.startswith(_CARRIED) and name != TOKEN_ENV]
    environment = {name: os.environ[name] for name in carried}
    try:
        ray.init(address=address, runtime_env={"env_vars": environment}, log_to_driver=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--afd-ray {address}: no Ray cluster answers ({error}); start one with ray start"
        ) from error
    try:
        alive = [node for node in ray.nodes() if node["Alive"]]
        alive.sort(key=lambda node: (node["NodeManagerAddress"], node["NodeManagerPort"]))
        yield [
            Node(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"].get("GPU", 0)))
            for node in alive
        ]
    finally:
        ray.shutdown()


class Command:
    """One role's command on its node; a Ray actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._started = threading.Event()
        self._ended = threading.Event()

    def free_address(self) -> tuple[str, int]:
        """This node's address, and a port that is free there with those next to it."""
        import ray

        return ray.util.get_node_ip_address(), free_port()

    def start(self, args: list[str], token: str) -> None:
        """Start the command, which meets the other by `token`; returns at once."""
        threading.Thread(target=self._run, args=(args, token), daemon=True).start()
        self._started.wait()

    def wait(self) -> int:
        """The command's exit status, once it has ended."""
        self._ended.wait()
        assert self._process is not None
        return self._process.wait()

    def stop(self) -> None:
        """Ask the command to end; running requests are finished first."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def _run(self, args: list[str], token: str) -> None:
        """Start it and pass on what it prints.

        It dies with this thread, which the kernel takes for its parent: so with the node's Ray.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sglang_afd.launch_server", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, TOKEN_ENV: token},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        self._started.set()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(line, end="", flush=True)
        self._ended.set()


def _supervise(
    places: dict[Role, Node], gpus: dict[Role, int], args: Sequence[str], program: str
) -> int:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actors: dict[Role, Any] = {}
    for role, node in places.items():
        actors[role] = (
            ray.remote(Command)
            .options(
                name=f"sglang_afd {role.value} {os.getpid()}",
                num_cpus=0,
                num_gpus=gpus[role],
                max_concurrency=4,  # it is asked to stop while it waits
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            )
            .remote()
        )
    host, port = ray.get(actors[Role.ATTENTION].free_address.remote(), timeout=_STOP_WITHIN)
    _, health_port = ray.get(actors[Role.FFN].free_address.remote(), timeout=_STOP_WITHIN)
    token = os.environ.get(TOKEN_ENV) or secrets.token_hex()
    for rank, role in enumerate(COMMANDS):
        own = ["--afd-role", role.value, "--nnodes", "2", "--node-rank", str(rank)]
        own += ["--dist-init-addr", f"{host}:{port}"]
        if role is Role.FFN:  # the nodes may be one machine, where --port is the other command's
            own += ["--port", str(health_port)]
        ray.get(actors[role].start.remote([*args, *own], token))
    ends = {actors[role].wait.remote(): role for role in places}
    with asked_to_stop() as asked:
        status = _await_first(ends, asked, program)
    left = list(ends)
    for role in COMMANDS:  # the FFN command ends with the attention command
        actors[role].stop.remote()
        _, left = ray.wait(left, num_returns=len(left), timeout=_STOP_WITHIN)
        if not left:
            break
    for reference in left:
        _complain(
            program, f"the {ends[reference].value} command has not ended; its node ends it now"
        )
    return status


def _await_first(ends: dict[Any, Role], asked: list[int], program: str) -> int:
    """The exit status of the first command that ends, or of being asked to stop."""
    import ray

    while not asked:
        done, _ = ray.wait(list(ends), timeout=0.5)
        for reference in done:
            role = ends[reference]
            try:
                status = ray.get(reference)
            except ray.exceptions.RayError as error:
                first = str(error).splitlines()[0]
                _complain(program, f"the node of the {role.value} ranks is lost: {first}")
                return 1
            if status:
                _complain(program, f"the {role.value} command ended with {status}, see above")
            return int(status)
    return INTERRUPTED if asked[0] == signal.SIGINT else 0


def _complain(program: str, what: str) -> None:
    print(f"{program}: error: {what}", file=sys.stderr, flush=True)
