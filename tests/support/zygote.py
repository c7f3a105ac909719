"""A process that imports SGLang once and forks servers: a world starts in seconds.

Starting SGLang costs 50 to 90 s on two cores, nearly all of it imports, once per process.  This
program imports everything first, before any thread exists, then serves one JSON request a line from
standard input:

* ``{"argv": [...], "env": {...}, "log": PATH}`` forks the launcher of that server and answers
  ``{"pid": PID}``; the launcher leads a session of its own, which all its processes belong to.
  A fault that the environment names (see `tests.support.faults`) is planted first.  With
  ``"program": PATH`` that Python program runs in the launcher's place.
* ``{"wait": PID}`` answers ``{"code": N}``, or ``{"code": null}`` while the launcher runs.

In the forked launcher, SGLang's processes are forked too, so none of them imports again; the hooks
that the launcher installs are inherited with it.  When standard input ends, so does this process,
and the kernel ends the launchers that are left.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def _import_everything() -> None:
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.data_parallel_controller
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.models.registry import ModelRegistry

    import sglang_afd.launch_server
    import sglang_afd.platform.hooks  # noqa: F401
    from sglang_afd.config import AfdConfig
    from sglang_afd.upstream import all_hooks

    all_hooks(AfdConfig(attention_ranks=1, ffn_ranks=1))  # imports their modules
    ModelRegistry.get_supported_archs()  # imports every model class, as each rank would


def _serve(request: dict) -> None:
    """The forked launcher: becomes the server; never returns."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.environ.update(request.get("env", {}))
    tempfile.tempdir = None  # it follows from the environment, too
    # SGLang asks for spawn; forked children keep the imported modules and the installed hooks.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    import faults  # beside this file, which runs as a program
    from sglang.srt.environ import envs
    from sglang.srt.managers.scheduler_components import metrics_reporter

    from sglang_afd.front import worlds

    # Read when SGLang was imported, which was before this server's environment was known.
    metrics_reporter.LOG_FORWARD_ITERS = envs.SGLANG_LOG_FORWARD_ITERS.get()

    worlds.start = _fork_world

    def run() -> None:
        faults.plant()
        if program := request.get("program"):
            sys.argv = [program, *request["argv"]]
            runpy.run_path(program, run_name="__main__")
        else:
            _launch(request["argv"])

    _end_with(run)


def _launch(argv: list[str]) -> None:
    from sglang_afd import launch_server

    launch_server.main(argv)


def _end_with(run: Callable[[], None]) -> NoReturn:
    """Run it, and end this process with its status."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


async def _fork_world(argv: Sequence[str]) -> _Forked:
    """In the place of `sglang_afd.front.worlds.start`: the world behind a front is forked too."""
    pid = os.fork()
    if pid:
        return _Forked(pid)
    asyncio.events._set_running_loop(None)
    asyncio.set_event_loop(None)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.closerange(3, 1024)  # the front's sockets
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _end_with(lambda: _launch(list(argv)))


class _Forked:
    """A forked world, as the front sees a process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    async def wait(self) -> int:
        while True:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            await asyncio.sleep(0.05)

    def send_signal(self, sign: int) -> None:
        os.kill(self._pid, sign)


def _refuse_threads() -> None:
    """A fork copies only the forking thread: locks that others hold stay locked in the child."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise SystemExit(f"importing SGLang started {threads - 1} threads; forked servers may hang")


def main() -> None:
    os.environ["SGLANG_AFD_CPU"] = "1"
    from sglang_afd.platform.defaults import cpu_environment

    os.environ.update(cpu_environment(1))
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    _import_everything()
    _refuse_threads()
    # Every world binds its own ranks; that each computes on one thread stays, for what tests start
    # shares the cores with the test.
    del os.environ["SGLANG_CPU_OMP_THREADS_BIND"]
    gc.collect()
    gc.freeze()  # or each child's first collection copies every page that holds an object
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    print(json.dumps({"ready": True}), flush=True)
    codes: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            pid = request["wait"]
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            print(json.dumps({"code": codes.get(pid)}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _serve(request)
        print(json.dumps({"pid": pid}), flush=True)


if __name__ == "__main__":
    main()
