"""A process that imports SGLang once and forks servers: a world starts in seconds.

Starting SGLang costs 50 to 90 s on two cores, nearly all of it imports, once per process.  This
program imports everything first, before any thread exists, then reads one JSON request a line from
standard input, ``{"argv": [...], "env": {...}, "log": PATH}``, forks the launcher of that server
and answers ``{"pid": PID}``.  In the forked launcher, SGLang's processes are forked too, so none of
them imports again; the hooks that the launcher installs are inherited with it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys


def _import_everything() -> None:
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.data_parallel_controller
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.qwen3_moe  # noqa: F401


def _serve(request: dict) -> None:
    """The forked launcher: becomes the server; never returns."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.environ.update(request.get("env", {}))
    # SGLang asks for spawn; forked children keep the imported modules and the installed hooks.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    from sglang_afd import launch_server

    code = 1
    try:
        launch_server.main(request["argv"])
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


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["SGLANG_AFD_CPU"] = "1"
    from sglang_afd.platform.defaults import cpu_environment

    os.environ.update(cpu_environment(1))
    os.environ.pop("SGLANG_CPU_OMP_THREADS_BIND", None)  # every world sets its own
    _import_everything()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    print(json.dumps({"ready": True}), flush=True)
    children: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:  # has this launcher ended, and how
            pid = request["wait"]
            if pid not in children:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    children[pid] = os.waitstatus_to_exitcode(status)
            print(json.dumps({"code": children.get(pid)}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _serve(request)
        print(json.dumps({"pid": pid}), flush=True)


if __name__ == "__main__":
    main()
