"""Ports that are drawn for servers."""

from __future__ import annotations

import random

import pytest

from sglang_afd import running

pytestmark = pytest.mark.unit


def test_servers_of_one_process_share_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although none of them listens yet, and the draws are close to one another."""
    monkeypatch.setattr(running, "port_problem", lambda host, port: None)
    monkeypatch.setattr(random, "sample", lambda ports, count: list(ports)[:count])
    monkeypatch.setattr(running, "_given", type(running._given)(maxlen=64))
    ports = [set(running.ports_of(running.free_port())) for _ in range(20)]
    assert len(set.union(*ports)) == sum(map(len, ports))


def test_a_taken_port_beside_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    last = max(running.ports_of(10000))
    monkeypatch.setattr(random, "sample", lambda ports, count: list(ports)[:count])
    monkeypatch.setattr(running, "port_problem", lambda host, port: "x" if port <= last else None)
    assert running.free_port() > last
