"""`AfdConfig`: validated once, carried unchanged to child processes, hashed alike everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.config import ENV, AfdConfig, ConfigError, differences, fingerprint
from sglang_afd.topology import COMMANDS, Role, TopologyError

pytestmark = pytest.mark.unit

seconds = st.floats(0.1, 1e6)
configs = st.builds(
    AfdConfig,
    attention_ranks=st.integers(1, 64),
    ffn_ranks=st.integers(1, 64),
    attention_tp=st.integers(1, 8),
    transport=st.sampled_from(["gloo", "deepep"]),
    max_tokens_per_rank=st.integers(1, 4096),
    lanes=st.integers(1, 4),
    startup_timeout=seconds,
    exchange_timeout=seconds,
    command_role=st.sampled_from([None, *Role]),
)
ONE_OF_EACH = AfdConfig(attention_ranks=1, ffn_ranks=1)


@given(configs)
def test_json_keeps_every_field(config: AfdConfig) -> None:
    assert AfdConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transport": "tcp"}, "--afd-transport tcp is unknown; choose auto, nvlink, deepep, gloo"),
        ({"max_tokens_per_rank": 0}, "--afd-max-tokens-per-rank is 0"),
        ({"lanes": 0}, "--afd-lanes is 0; it must be 1 to 4"),
        ({"lanes": 5}, "--afd-lanes is 5; it must be 1 to 4"),
        ({"startup_timeout": 0.0}, "--afd-startup-timeout is 0.0"),
        ({"exchange_timeout": -1.0}, "--afd-exchange-timeout is -1.0"),
        ({"exchange_timeout": float("nan")}, "--afd-exchange-timeout is nan"),
        ({"exchange_timeout": float("inf")}, "--afd-exchange-timeout is inf"),
        ({"startup_timeout": float("inf")}, "--afd-startup-timeout is inf"),
        ({"startup_timeout": 1e-9}, "is 1e-09; it must be a number of seconds, 0.1 to 1000000"),
        ({"exchange_timeout": 1e10}, "--afd-exchange-timeout is 10000000000.0; it must be a"),
        ({"max_tokens_per_rank": 10**23}, "--afd-max-tokens-per-rank is 1" + "0" * 23),
        ({"prefill_block": 1_000_001}, "--afd-prefill-block is 1000001; it must be at most 1000"),
    ],
)
def test_bad_values_are_refused_by_flag(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AfdConfig(attention_ranks=1, ffn_ranks=1, **changes)


def test_bad_counts_are_refused_when_the_config_is_built() -> None:
    with pytest.raises(TopologyError, match="--afd-ffn-ranks is 0"):
        AfdConfig(attention_ranks=1, ffn_ranks=0)
    for count in (4097, 10**23):
        with pytest.raises(TopologyError, match=f"--afd-ffn-ranks is {count}; it must be at most"):
            AfdConfig(attention_ranks=1, ffn_ranks=count)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_ranks": "two"},
        {"attention_ranks": 0},
        {"transport": "tcp"},
        {"attention_rank": 1},
        {"command_role": "expert"},
    ],
)
def test_a_broken_description_is_refused_by_the_variable_that_holds_it(
    change: dict[str, Any],
) -> None:
    text = json.dumps({**json.loads(ONE_OF_EACH.to_json()), **change})
    with pytest.raises(ConfigError, match=f"{ENV} does not hold a deployment description"):
        AfdConfig.from_json(text)


def test_child_processes_inherit_the_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV, raising=False)
    config = AfdConfig(attention_ranks=2, ffn_ranks=1, command_role=Role.FFN)
    show = "from sglang_afd.config import AfdConfig as C; print(C.from_environment().to_json())"
    assert AfdConfig.from_environment() is None
    monkeypatch.setenv(ENV, config.to_json())
    child = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert AfdConfig.from_json(child.stdout) == config


def test_a_command_starts_the_ranks_of_its_role() -> None:
    def ranks(role: Role | None) -> list[int]:
        config = AfdConfig(attention_ranks=3, ffn_ranks=1, attention_tp=2, command_role=role)
        return list(config.local_ranks())

    assert ranks(None) == list(range(8))
    assert ranks(Role.ATTENTION) == [0, 1, 2, 3, 4, 5]
    assert ranks(Role.FFN) == [6, 7]


@given(configs, configs)
def test_two_commands_agree_exactly_when_all_but_their_role_is_equal(
    one: AfdConfig, other: AfdConfig
) -> None:
    fields = set(AfdConfig.__struct_fields__) - {"command_role"}
    equal = all(getattr(one, field) == getattr(other, field) for field in fields)
    assert (fingerprint(one.agreement()) == fingerprint(other.agreement())) == equal
    assert (differences(one.agreement(), other.agreement()) == []) == equal


@given(configs)
def test_the_commands_of_a_deployment_agree(config: AfdConfig) -> None:
    attention, ffn = (msgspec.structs.replace(config, command_role=role) for role in COMMANDS)
    assert attention != ffn
    assert attention.agreement() == ffn.agreement()


def test_differences_name_the_field_and_both_values() -> None:
    found = differences({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 4, "d": 5})
    assert found == [
        "b is 2 here and 4 there",
        "c is 3 here and None there",
        "d is None here and 5 there",
    ]


facts = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=6)


@given(facts, st.randoms())
def test_a_fingerprint_fits_int64_and_ignores_the_order_of_facts(
    described: dict[str, Any], order: Any
) -> None:
    shuffled = list(described.items())
    order.shuffle(shuffled)
    assert fingerprint(dict(shuffled)) == fingerprint(described)
    assert 0 <= fingerprint(described) < 2**62


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    described = {"model": "m", "layers": (1, 2), "set": {"b": 1, "a": 2.5}}
    show = f"from sglang_afd.config import fingerprint; print(fingerprint({described!r}))"
    for hash_seed in ("1", "2"):
        child = subprocess.run(
            [sys.executable, "-c", show],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        assert int(child.stdout) == fingerprint(described)


def test_what_must_be_equal_on_all_ranks_travels_as_plain_values() -> None:
    """The two commands tell it each other, and take nothing but these types."""
    config = AfdConfig(attention_ranks=1, ffn_ranks=1, spec_aux_layers=(1, 3, 4))
    agreed = config.agreement()
    assert all(isinstance(value, int | float | str | None) for value in agreed.values()), agreed
    assert agreed["spec_aux_layers"] == "1,3,4"
    assert agreed != AfdConfig(attention_ranks=1, ffn_ranks=1).agreement()
