"""Look at the processes of a server: who is left, and what they consume."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil


def session_members(leader: int) -> list[psutil.Process]:
    """Living processes of the session that process `leader` leads; zombies do not count."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def title(process: psutil.Process) -> str:
    """What a process calls itself."""
    return " ".join(process.cmdline())


def scheduler(leader: int, tp_rank: int) -> psutil.Process:
    """The process of world rank `tp_rank` in the session that `leader` leads."""
    for process in session_members(leader):
        if re.match(rf"sglang::scheduler.*_TP{tp_rank}(_|\s|$)", title(process)):
            return process
    raise LookupError(f"session {leader} has no scheduler of rank {tp_rank}")


def shared_files(processes: list[psutil.Process]) -> set[Path]:
    """Files in shared memory that `processes` have mapped, and that are still there."""
    found: set[Path] = set()
    for process in processes:
        with suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            found |= {Path(name) for name in re.findall(r"(/dev/shm/\S+)$", maps, re.M)}
    return {path for path in found if path.exists()}


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """CPU time that `processes` have used so far, user and system."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def children_seconds() -> float:
    """CPU time of all children of this process that have ended, their own children included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def busy_seconds() -> float:
    """CPU time that all processes have used so far of the cores that this one may use."""
    cores = psutil.cpu_times(percpu=True)
    return sum(
        sum(cores[core]) - cores[core].idle - cores[core].iowait for core in os.sched_getaffinity(0)
    )


def wait_until(condition: Callable[[], bool], within: float, *, step: float = 0.1) -> bool:
    """Poll `condition` until it holds or `within` seconds have passed; whether it held."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(step)
    return True


def end_session(leader: int) -> None:
    """Kill what is left of the session that `leader` leads."""
    for process in session_members(leader):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
