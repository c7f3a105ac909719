"""The two commands' first meeting: what must be equal, and where both listen for HTTP."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.addresses import Listener
from sglang_afd.config import AfdConfig, ConfigError
from sglang_afd.topology import Role
from sglang_afd.upstream import handshake

pytestmark = pytest.mark.unit

HERE, THERE = "boot-1 net-1", "boot-2 net-1"
LOCAL = "127.0.0.1"


def meet(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    attention: Listener,
    ffn: Listener,
    **differs: Any,
) -> list[Any]:
    """What both commands get out of the meeting: ports, or the error."""
    context = zmq.Context()
    endpoint = f"ipc://{folder}/meeting"
    configs = [
        AfdConfig(attention_ranks=1, ffn_ranks=1, command_role=Role.ATTENTION),
        AfdConfig(attention_ranks=1, ffn_ranks=1, command_role=Role.FFN, **differs),
    ]

    listener: ContextVar[Listener] = ContextVar("listener")  # one of each command's thread

    def socket(_: None, serves: bool) -> tuple[Any, str]:
        made = context.socket(zmq.REP if serves else zmq.REQ)
        (made.bind if serves else made.connect)(endpoint)
        return made, endpoint

    monkeypatch.setattr(handshake, "_socket", socket)
    monkeypatch.setattr(handshake, "_http", listener.get)

    def command(config: AfdConfig) -> Any:
        serves = config.command_role is Role.ATTENTION
        listener.set(attention if serves else ffn)
        ports = [5, 6] if serves else None
        try:
            return handshake.worker_ports(config, None, ports, time.monotonic() + 20)
        except ConfigError as error:
            return error

    with ThreadPoolExecutor() as pool:
        results = list(pool.map(command, configs))
    context.destroy(linger=0)
    return results


@pytest.mark.parametrize(
    ("attention", "ffn"),
    [
        ((LOCAL, 30000, HERE), (LOCAL, 30001, HERE)),
        (("0.0.0.0", 30000, HERE), ("0.0.0.0", 30000, THERE)),
        (("127.0.0.1", 30000, HERE), ("127.0.0.2", 30000, HERE)),
        (("0.0.0.0", 30000, ""), ("0.0.0.0", 30000, "")),
    ],
    ids=["ports", "hosts", "addresses", "untold"],
)
def test_ports_are_handed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attention: tuple, ffn: tuple
) -> None:
    met = meet(monkeypatch, tmp_path, Listener(*attention), Listener(*ffn))
    assert met == [[5, 6], [5, 6]]


@pytest.mark.parametrize("host", [LOCAL, "0.0.0.0", "::"])
def test_one_http_port_for_both_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str
) -> None:
    met = meet(monkeypatch, tmp_path, Listener(LOCAL, 30000, HERE), Listener(host, 30000, HERE))
    for error in met:
        assert isinstance(error, ConfigError)
        assert "listen for HTTP at port 30000 of this machine; give the FFN command" in str(error)


def test_differing_flags_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    same = Listener(LOCAL, 30000, HERE)
    for error in meet(monkeypatch, tmp_path, same, same, max_tokens_per_rank=7):
        assert isinstance(error, ConfigError)
        assert "configured differently: max_tokens_per_rank is" in str(error)


STRANGERS = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff\x00\x80",
    b"\x80\x04\x95.",  # a pickle
    b"[]",
    b"null",
    b'{"agreement": 1, "http": ["h", 1, "n"]}',
    b'{"agreement": {}, "http": ["h", 1]}',
    b'{"agreement": {}, "http": ["h", "1", "n"]}',
    b'{"agreement": {}}',
    b'{"body": "", "seal": ""}',
    b'{"body": "{}", "seal": 1}',
    b"[" * 5000,
    b"x" * 100_000,
)


@pytest.mark.parametrize("stranger", STRANGERS, ids=range(len(STRANGERS)))
def test_a_stranger_is_turned_away_and_the_wait_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stranger: bytes
) -> None:
    """It comes first, and neither ends the start nor gets the worker ports."""
    context = zmq.Context()
    asking = context.socket(zmq.REQ)
    asking.connect(f"ipc://{tmp_path}/meeting")
    asking.send(stranger)
    met = meet(monkeypatch, tmp_path, Listener(LOCAL, 1, HERE), Listener(LOCAL, 2, HERE))
    assert met == [[5, 6], [5, 6]]
    if asking.poll(1000):  # the command may have had its peer first
        assert asking.recv() == b"not a command of this deployment"
    context.destroy(linger=0)


def test_a_command_with_another_token_is_a_stranger(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its message is whole, and of the same flags."""
    config = AfdConfig(attention_ranks=1, ffn_ranks=1)
    message = handshake._Message(agreement=config.agreement(), http=(LOCAL, 2, HERE))
    for token in ("", "guessed"):
        monkeypatch.setenv(handshake.TOKEN_ENV, token)
        theirs = handshake._sealed(message)
        assert handshake._opened(theirs) == message
        monkeypatch.setenv(handshake.TOKEN_ENV, "secret")
        test_a_stranger_is_turned_away_and_the_wait_goes_on(monkeypatch, tmp_path, theirs)
        with pytest.raises(handshake._Stranger):
            handshake._opened(theirs)


def test_a_message_that_was_changed_is_a_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(handshake.TOKEN_ENV, "secret")
    raw = handshake._sealed(handshake._Message(agreement={"lanes": 1}, http=(LOCAL, 2, HERE)))
    assert b"secret" not in raw
    changed = raw.replace(b"lanes", b"lames")
    assert changed != raw
    with pytest.raises(handshake._Stranger):
        handshake._opened(changed)


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["agreement", "http", "ports", "x"]), inner, max_size=4
            )
        ),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode())
)
def test_a_wrong_answer_is_named(answer: bytes) -> None:
    """Of what listens at the address in the attention command's place."""

    class Socket:
        def poll(self, milliseconds: int) -> bool:
            return True

        def recv(self) -> bytes:
            return answer

    config = AfdConfig(attention_ranks=1, ffn_ranks=1, command_role=Role.FFN)
    try:
        handshake._receive(config, Socket(), "tcp://h:1", time.monotonic() + 5)
    except handshake.StartError as error:
        assert "what answers at tcp://h:1 is no attention command" in str(error)


def test_a_listener_of_this_process_collides_with_itself() -> None:
    here = Listener.here(LOCAL, 30000)
    assert here.collides(Listener.here(LOCAL, 30000)) is bool(here.network)
    assert not here.collides(Listener.here(LOCAL, 30001))
