"""``launch_server --afd-nsys``: each role's command under NVIDIA's Nsight Systems, in a report of
its own.

SGLang ends its ranks by SIGKILL, so they are not wrapped one by one: a profiler that is a rank's
parent would be killed with it, and a rank asks its parent for help when it fails.  Each role is a
command (``--afd-role``) below a profiler that follows the command's processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from sglang_afd import flags, start
from sglang_afd.causes import INTERRUPTED
from sglang_afd.config import AfdConfig, ConfigError
from sglang_afd.running import asked_to_stop, end_with_parent, free_port
from sglang_afd.topology import Role

OPTIONS = (
    # Nothing is recorded until a profile with the activity CUDA_PROFILER begins: a start takes
    # minutes.  Each such profile is a report.
    *("--capture-range=cudaProfilerApi", "--capture-range-end=repeat"),
    *("--trace=cuda,nvtx,osrt", "--cuda-graph-trace=node", "--trace-fork-before-exec=true"),
    *("--sample=none", "--cpuctxsw=none", "--force-overwrite=true", "--wait=primary"),
)
_STOP_WITHIN = 60.0  # seconds: running requests are finished first
_REPORT_WITHIN = 600.0  # seconds that a profiler may take to write what it has
_POLL = 0.2  # seconds


def take(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split a command line, in which no --config is left, into the folder of the reports (None: no
    profiler is asked for) and the rest.

    Raises:
        ConfigError: the flag lacks its value.
    """
    known, rest = flags.take(flags.add_nsys_flag, argv)
    return (Path(known.afd_nsys), rest) if known.afd_nsys else (None, list(argv))


def run(folder: Path, args: Sequence[str], *, program: str) -> int:
    """Run the deployment that `args` describe under profilers until it ends; the exit status.

    Exits with status 2 where a gate refuses it.

    Raises:
        ConfigError: the flags cannot be right.
    """
    facts = start.read_facts([*args, flags.NSYS, str(folder)], program=program)
    if facts is None:
        raise ConfigError(f"{flags.NSYS} needs --afd-attention-ranks and --afd-ffn-ranks")
    try:
        start.pass_gates(facts, program)
        folder.mkdir(parents=True, exist_ok=True)
    except start.Refused as refused:
        start.fail(program, str(refused))
    except OSError as error:
        raise ConfigError(f"{flags.NSYS} {folder}: {error.strerror or error}") from error
    commands = {}
    for role, own in role_commands(facts.config, args).items():
        report = folder.absolute() / f"{role.value}"
        commands[role] = [flags.NSYS_PROGRAM, "profile", *OPTIONS, f"--output={report}", *own]
        print(f"{program}: Nsight Systems writes the {role.value} ranks' report to {report}.*")
    sys.stdout.flush()
    return supervise(commands, program)


def role_commands(config: AfdConfig, args: Sequence[str]) -> dict[Role, list[str]]:
    """The command of each role that this command starts, attention first."""
    whole = [sys.executable, "-m", "sglang_afd.launch_server", *args]
    if config.command_role is not None:
        return {config.command_role: whole}
    # Two commands alone would not choose nvlink: neither knows whether both are on one host.
    whole += ["--afd-transport", config.transport]
    whole += ["--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    own = ["--port", str(free_port())]  # --port is the attention command's
    return {
        Role.ATTENTION: [*whole, "--afd-role", Role.ATTENTION.value, "--node-rank", "0"],
        Role.FFN: [*whole, "--afd-role", Role.FFN.value, "--node-rank", "1", *own],
    }


class Profiled:
    """A command below its profiler."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._profiler = subprocess.Popen(
            self._command, start_new_session=True, preexec_fn=end_with_parent
        )
        self._below: psutil.Process | None = None

    def status(self) -> int | None:
        """The profiler's exit status, which is the command's; None while it runs."""
        self._look()
        return self._profiler.poll()

    def stop(self) -> None:
        """Ask the command to end, which its profiler then does by itself."""
        self._look()
        if self._below is not None and self._below.is_running():
            self._below.terminate()
        elif self._below is None and self._profiler.poll() is None:
            self._profiler.terminate()

    def ended_within(self, seconds: float, asked: Sequence[int]) -> bool:
        """Whether the command has ended and its report is written, after this time at the most;
        a command that has ended gives its profiler longer, a second signal in `asked` none."""
        deadline = time.monotonic() + seconds
        while self._profiler.poll() is None:
            writing = self._below is not None and not self._below.is_running()
            late = time.monotonic() > deadline + (_REPORT_WITHIN if writing else 0)
            if late or len(asked) > 1:
                return False
            time.sleep(_POLL)
        return self._below is None or not self._below.is_running()

    def kill(self) -> None:
        """End all that is left of it."""
        left = [self._below] if self._below is not None and self._below.is_running() else []
        for process in left:
            left = [*left, *process.children(recursive=True)]
        for process in left:
            process.kill()
        if self._profiler.poll() is None:
            os.killpg(self._profiler.pid, signal.SIGKILL)
        self._profiler.wait()

    def _look(self) -> None:
        """Find the command among the profiler's processes, before it gives itself a title."""
        if self._below is not None:
            return
        wanted = self._command[self._command.index(sys.executable) :]
        try:
            profiler = psutil.Process(self._profiler.pid)
            for process in (profiler, *profiler.children(recursive=True)):
                if process.cmdline() == wanted:
                    self._below = process
        except psutil.Error:
            return  # one has just ended


def supervise(commands: Mapping[Role, Sequence[str]], program: str) -> int:
    """Run the commands until the first one ends or a signal asks for it, then end the others."""
    running = {role: Profiled(command) for role, command in commands.items()}
    with asked_to_stop() as asked:
        try:
            status = _await_first(running, asked, program)
            for role in (Role.ATTENTION, Role.FFN):  # the FFN command ends with the attention's
                if role in running:
                    running[role].stop()
                if all(one.ended_within(_STOP_WITHIN, asked) for one in running.values()):
                    return status
            print(f"{program}: error: not ended in time; killed now", file=sys.stderr, flush=True)
            return status or 1
        finally:
            for one in running.values():
                one.kill()


def _await_first(running: Mapping[Role, Profiled], asked: list[int], program: str) -> int:
    """The exit status of the first command that ends, or of being asked to stop."""
    while not asked:
        for role, one in running.items():
            status = one.status()
            if status is not None:
                if status:
                    what = f"the {role.value} command ended with {status}, see above"
                    print(f"{program}: error: {what}", file=sys.stderr, flush=True)
                return status
        time.sleep(_POLL)
    return INTERRUPTED if asked[0] == signal.SIGINT else 0
