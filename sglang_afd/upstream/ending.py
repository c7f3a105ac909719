"""How a command ends: no process left, its cause as the last line, and a status that means it.

SGLang ends a command whose child failed by killing itself, which a shell reports as 137, "Killed";
and it leaves the first Ctrl-C to whichever processes share the terminal.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any, NoReturn

from sglang_afd import causes
from sglang_afd.addresses import port_problem
from sglang_afd.causes import INTERRUPTED
from sglang_afd.context import current
from sglang_afd.dispatch.transport import ExchangeError
from sglang_afd.upstream import leftovers
from sglang_afd.upstream.handshake import StartError
from sglang_afd.upstream.hooks import Hook, Kind

logger = logging.getLogger(__name__)

_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CONTROLLER = "sglang.srt.managers.data_parallel_controller.DataParallelController"
_DETOKENIZER = "sglang.srt.managers.detokenizer_manager.DetokenizerManager"
_GLOO = "gloo/"  # in its errors: a peer has ended, or hangs
_NO_MEMORY = (
    "give the rank less to hold (a lower --mem-fraction-static, --max-running-requests or "
    "--afd-max-tokens-per-rank; more --afd-ffn-ranks) or a larger machine"
)
_MENDS = {
    # what an error says, in small letters -> what to do
    "address already in use": "another process took this port while the command started: choose "
    "another --port (or, with two commands, another port in --dist-init-addr)",
    "nan detected": "a layer or an expert gave what is no number, by damaged weights or an "
    "overflow of --dtype: `python -m sglang_afd.validate` names the layer",
    "can't allocate memory": _NO_MEMORY,
    "out of memory": _NO_MEMORY,
}
_served: dict[int, str] = {}  # the process that serves, once it does: its program
_interrupts: list[int] = []


def serves() -> bool:
    """Whether this process is a command that serves HTTP; an offline engine's is its program."""
    return os.getpid() in _served


@contextmanager
def ending(program: str) -> Iterator[None]:
    """Run a server in the block, and end with it: children, cause, status.

    Raises:
        SystemExit: with 1 and the cause told if the block raises; with `INTERRUPTED` on Ctrl-C.
    """
    causes.collect()  # before: they are told after all else is removed
    leftovers.begin()
    _served[os.getpid()] = program
    status: int | str | None = 0
    try:
        yield
        status = INTERRUPTED if _interrupts else 0
    except KeyboardInterrupt:
        status = INTERRUPTED
    except SystemExit as end:
        status = end.code
    except Exception as error:
        traceback.print_exc()
        causes.note(f"{type(error).__name__}: {error}{_mend(error)}", consequence=True)
        status = 1
    _end_children()
    cause = causes.told()
    if status not in (0, None, INTERRUPTED) and cause:
        _say(f"{program}: error: {cause}")
    if status:
        raise SystemExit(status)


def _end_children() -> None:
    from sglang.srt.utils import kill_process_tree

    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # watchdogs send it when children end
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    kill_process_tree(os.getpid(), include_parent=False)
    leftovers.remove()


def _say(text: str) -> None:
    """Write a line of standard error; may be called where a signal has interrupted a print."""
    os.write(2, f"{text}\n".encode(errors="replace"))


def _leave(status: int) -> NoReturn:
    """End this process now, after its children, whatever its threads do."""
    try:
        _end_children()
    finally:
        program = _served.get(os.getpid())
        cause = causes.told() if program else None
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        if cause and status != INTERRUPTED:
            _say(f"{program}: error: {cause}")
        os._exit(status)


def _end_with_a_status(
    original: Callable[..., None],
    parent_pid: int | None,
    include_parent: bool = True,
    *args: Any,
    **kwargs: Any,
) -> None:
    if parent_pid == os.getpid() and include_parent:
        _leave(1)
    original(parent_pid, include_parent, *args, **kwargs)


def _note_cause(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return original(*args, **kwargs)
    except Exception as error:
        lost = isinstance(error, ExchangeError | StartError) or _GLOO in str(error)
        text = (str(error) or type(error).__name__) + _mend(error)
        name = _name()
        causes.note(text if text.startswith(name) else f"{name}: {text}", consequence=lost)
        raise


def _mend(error: Exception) -> str:
    """What to do about `error`, where it does not say so itself, or an empty text."""
    text = str(error).lower()
    return next((f"; {mend}" for sign, mend in _MENDS.items() if sign in text), "")


def _name() -> str:
    try:
        return current().name
    except RuntimeError:
        return ""  # the DP controller, or a rank that does not know its number yet


def _without_interrupts(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    resource_tracker.ensure_running()  # its start, within a process's, would lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return original(*args, **kwargs)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop_on_interrupt(_: None, manager: Any) -> None:
    if not serves() or manager.event_loop is None:
        return  # Ctrl-C is the program's

    def interrupt() -> None:
        _interrupts.append(signal.SIGINT)
        if len(_interrupts) > 1:
            _leave(INTERRUPTED)
        manager.gracefully_exit = True
        logger.info("Ctrl-C: ending once running requests are done; again: at once")

    with suppress(ValueError, RuntimeError):  # not in the main thread
        manager.event_loop.add_signal_handler(signal.SIGINT, interrupt)


def _check_http_port(*args: Any, **kwargs: Any) -> None:
    from sglang.srt.runtime_context import get_serving

    problem = port_problem(get_serving().host, get_serving().port)
    if problem:
        causes.note(f"HTTP server: {problem}; stop that process, or choose another --port")
        raise SystemExit(1)


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.utils.common.kill_process_tree",
        Kind.AROUND,
        _end_with_a_status,
        "a command whose child failed kills itself: 137, with the cause far above",
    ),
    *(
        Hook(target, Kind.AROUND, _note_cause, "the command's last line names the cause")
        for target in (
            f"{_SCHEDULER}.__init__",
            f"{_SCHEDULER}.run_event_loop",
            f"{_CONTROLLER}.__init__",
            f"{_DETOKENIZER}.__init__",
        )
    ),
    *(
        Hook(target, Kind.AROUND, _without_interrupts, "Ctrl-C is the command's, not its ranks'")
        for target in (
            f"{_ENGINE}._launch_scheduler_processes",
            f"{_ENGINE}._launch_detokenizer_subprocesses",
        )
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.auto_create_handle_loop",
        Kind.AFTER,
        _stop_on_interrupt,
        "Ctrl-C ends the server as SIGTERM does: the ranks, of an FFN command too, end in peace",
    ),
    Hook(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        Kind.BEFORE,
        _check_http_port,
        "if the port is taken by now SGLang hangs: it warms up whoever answers there",
    ),
)
