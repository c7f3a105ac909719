"""The command line: --afd-* flags, what they set in SGLang, --config files, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd import start
from sglang_afd.command_line import WHOLE_FLAGS, expand_config_file, int_value, last_value, values
from sglang_afd.config import AfdConfig, ConfigError
from sglang_afd.flags import FFN_PORT, OWNED, parse
from sglang_afd.machine import Machine
from sglang_afd.topology import Role, TopologyError

COUNTS = ("--afd-attention-ranks", "2", "--afd-ffn-ranks", "1")
TWO = ("--nnodes", "2", "--dist-init-addr", "10.0.0.1:5000")


def config_of(*argv: str, transport: str = "gloo") -> AfdConfig:
    config = parse([*COUNTS, *argv], transport=transport).config
    assert config is not None
    return config


def test_without_afd_flags_nothing_changes() -> None:
    argv = ["--model-path", "x", "--tp-size", "4", "--enable-lora"]
    assert parse(argv, transport="gloo") == (None, argv)


def test_one_world_of_both_roles() -> None:
    command = parse(["--model-path", "x", *COUNTS, "--afd-attention-tp", "2"], transport="gloo")
    assert command.config == AfdConfig(attention_ranks=2, ffn_ranks=1, attention_tp=2)
    args = command.sglang_args
    assert not any(arg.startswith("--afd-") for arg in args)
    expected = {
        "--model-path": "x",
        "--tp-size": "6",
        "--attn-dp-size": "3",
        "--moe-a2a-backend": "deepep",
        "--moe-dense-tp-size": "1",
    }
    assert {flag: last_value(args, flag) for flag in expected} == expected
    assert "--enable-dp-lm-head" in args


def test_experts_run_on_what_the_transport_delivers_unless_told() -> None:
    def runner(*argv: str, transport: str, on_cpu: bool = False) -> str | None:
        args = parse([*COUNTS, *argv], transport=transport, on_cpu=on_cpu).sglang_args
        return last_value(args, "--moe-runner-backend")

    assert runner(transport="deepep") == "deep_gemm"
    assert runner("--moe-runner-backend", "triton", transport="deepep") == "triton"
    assert runner(transport="nvlink") == runner(transport="gloo") == "triton"
    assert runner(transport="gloo", on_cpu=True) is None


def test_decode_graphs_are_on_where_the_transport_has_them_unless_told() -> None:
    def graphs(*argv: str, transport: str = "nvlink", on_cpu: bool = False) -> list[str | None]:
        args = parse([*COUNTS, *argv], transport=transport, on_cpu=on_cpu).sglang_args
        flags = ("--cuda-graph-backend-decode", "--cuda-graph-max-bs-decode")
        return [last_value(args, flag) for flag in flags]

    assert graphs() == [None, "128"]
    assert graphs("--afd-max-tokens-per-rank", "48") == [None, "48"]
    assert graphs("--afd-attention-tp", "2") == [None, "256"]  # 128 rows for each of its ranks
    assert graphs("--cuda-graph-max-bs-decode", "16") == [None, "16"]
    assert graphs("--cuda-graph-bs-decode", "1", "2") == [None, None]
    assert graphs("--cuda-graph-backend-decode", "disabled") == ["disabled", "128"]
    for transport in ("deepep", "gloo"):
        assert graphs(transport=transport) == ["disabled", None]
    assert graphs(on_cpu=True) == ["disabled", None]


def test_auto_is_what_the_machine_has() -> None:
    assert config_of(transport="deepep").transport == "deepep"
    assert config_of("--afd-transport", "auto", transport="deepep").transport == "deepep"
    assert config_of("--afd-transport", "gloo", transport="deepep").transport == "gloo"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("--afd-attention-ranks", "2"), "give both --afd-attention-ranks and --afd-ffn-ranks"),
        (("--afd-ffn-ranks", "2"), "give both --afd-attention-ranks and --afd-ffn-ranks"),
        (("--afd-role", "ffn"), "--afd-role needs a deployment: give --afd-attention-ranks and"),
        ((*COUNTS, "--afd-lane", "2"), "unknown flag --afd-lane; see --help"),
        ((*COUNTS, "--afd-lanes", "5"), "--afd-lanes is 5; it must be 1 to 4"),
        ((*COUNTS, "--afd-ffn-ranks", "two"), "--afd-ffn-ranks: invalid int value: 'two'; see"),
        ((*COUNTS, "--afd-ffn-ranks"), "--afd-ffn-ranks: expected one argument"),
        ((*COUNTS, "--afd-role", "both"), "invalid choice: 'both'"),
        ((*COUNTS, "--afd-ffn-ranks", "0"), "--afd-ffn-ranks is 0; it must be at least 1"),
        ((*COUNTS, "--afd-attention-ranks", "-1"), "--afd-attention-ranks is -1; it must be at"),
        ((*COUNTS, "--afd-attention-tp", "0"), "--afd-attention-tp is 0; it must be at least 1"),
        (
            (*COUNTS, "--afd-transport", "tcp"),
            "--afd-transport tcp is unknown; choose auto",
        ),
        ((*COUNTS, "--afd-max-tokens-per-rank", "0"), "it must be at least 1"),
        ((*COUNTS, "--afd-startup-timeout", "0"), "--afd-startup-timeout is 0.0; it must be a"),
        ((*COUNTS, "--afd-exchange-timeout", "nan"), "--afd-exchange-timeout is nan; it must be"),
        ((*COUNTS, "--nnodes", "2"), "--nnodes 2 needs --afd-role: one command for each role"),
        ((*COUNTS, "--node-rank", "1"), "--node-rank 1 needs --afd-role: without it this is the"),
        ((*COUNTS, "--node-rank", "x"), "--node-rank is 'x'; it must be an integer"),
        ((*COUNTS, "--afd-role", "ffn"), "--afd-role ffn needs --nnodes 2 --node-rank 1 --dist"),
        (
            (*COUNTS, "--afd-role", "attention", "--node-rank", "1", *TWO),
            "--afd-role attention needs --nnodes 2 --node-rank 0",
        ),
        ((*COUNTS, "--afd-role", "ffn", *TWO), "--afd-role ffn needs --nnodes 2 --node-rank 1"),
        (
            (*COUNTS, "--afd-role", "ffn", "--nnodes", "2", "--node-rank", "1"),
            "--dist-init-addr HOST:PORT (the attention command's address)",
        ),
        (
            (*COUNTS, "--afd-role", "ffn", "--nnodes", "3", "--node-rank", "1", *TWO[2:]),
            "--afd-role ffn needs --nnodes 2",
        ),
    ],
)
def test_refused(argv: tuple[str, ...], expected: str) -> None:
    with pytest.raises((ConfigError, TopologyError)) as error:
        parse(argv, transport="gloo")
    assert expected in str(error.value)


@pytest.mark.parametrize("spelling", [name for names, _ in OWNED for name in names])
def test_flags_that_afd_sets_are_refused(spelling: str) -> None:
    for given_as in ((spelling, "4"), (f"{spelling}=4",)):
        with pytest.raises(ConfigError, match=r"is set by the --afd-\* flags .*; leave it out"):
            parse([*COUNTS, *given_as], transport="gloo")


@pytest.mark.parametrize("abbreviation", ["--tp", "--dp", "--attn-dp", "--moe-a2a", "--moe-dense"])
def test_abbreviations_of_flags_that_afd_sets_are_refused(abbreviation: str) -> None:
    with pytest.raises(ConfigError, match="is set by"):
        parse([*COUNTS, abbreviation, "4"], transport="gloo")


def test_an_ffn_command_leaves_the_default_port_to_its_peer() -> None:
    def port(role: str, rank: str, *flags: str) -> str | None:
        argv = [*COUNTS, "--afd-role", role, "--node-rank", rank, *TWO, *flags]
        return last_value(parse(argv, transport="gloo").sglang_args, "--port")

    assert port("attention", "0") is None
    assert port("ffn", "1") == str(FFN_PORT) != "30000"
    assert port("ffn", "1", "--port", "30000") == "30000"
    assert port("ffn", "1", "--port=30000") == "30000"


def test_two_commands() -> None:
    attention = config_of("--afd-role", "attention", *TWO)
    ffn = config_of("--afd-role", "ffn", "--node-rank", "1", *TWO)
    assert (attention.command_role, ffn.command_role) == (Role.ATTENTION, Role.FFN)
    assert (list(attention.local_ranks()), list(ffn.local_ranks())) == ([0, 1], [2])
    assert attention.agreement() == ffn.agreement()
    config_of("--node-rank", "0", "--nnodes", "1")
    config_of("--afd-role", "ffn", "--node-rank", "01", "--nnodes", "02", *TWO[2:])
    by_alias = config_of("--afd-role", "attention", "--nnodes=2", "--nccl-init-addr=a:5")
    assert by_alias.command_role is Role.ATTENTION


counts = st.integers(-2, 70)


@given(attention=counts, ffn=counts, tp=counts, tokens=counts, experts=st.integers(1, 256))
def test_counts_are_refused_or_taken_exactly(
    attention: int, ffn: int, tp: int, tokens: int, experts: int
) -> None:
    argv = ["--afd-attention-ranks", str(attention), f"--afd-ffn-ranks={ffn}"]
    argv += ["--afd-attention-tp", str(tp), "--afd-max-tokens-per-rank", str(tokens)]
    if min(attention, ffn, tp, tokens) < 1:
        with pytest.raises((ConfigError, TopologyError), match="must be at least 1"):
            parse(argv, transport="gloo")
        return
    command = parse(argv, transport="gloo")
    config = command.config
    assert config is not None
    assert (config.attention_ranks, config.ffn_ranks) == (attention, ffn)
    assert (config.attention_tp, config.max_tokens_per_rank) == (tp, tokens)
    assert last_value(command.sglang_args, "--tp-size") == str((attention + ffn) * tp)
    assert AfdConfig.from_json(config.to_json()) == config
    topology = config.topology
    try:
        owned = [e for r in topology.ffn_world for e in topology.experts_of(r, experts)]
    except TopologyError:
        assert experts % (ffn * tp)
    else:
        assert owned == list(range(experts))


words = st.text("abcdefghij-=. ", max_size=8)


@given(st.lists(words), st.integers(0, 3))
def test_other_arguments_pass_through_in_order(rest: list[str], place: int) -> None:
    place = min(place, len(rest))
    given_args = [arg for arg in rest if not arg.startswith("-")]
    argv = [*given_args[:place], *COUNTS, *given_args[place:]]
    command = parse(argv, transport="gloo")
    assert command.sglang_args[: len(given_args)] == given_args


def test_values() -> None:
    args = ["--a-flag", "1", "--b", "--a-flag=2", "--a-flag", "--c", "-1", "--a-fl", "x=y"]
    assert values(args, "--a-flag") == ["1", "2", None, "x=y"]
    assert last_value(args, "--a-flag") == "x=y"
    assert values(args, "--c") == ["-1"]
    assert values(args, "--d") == []
    assert last_value(args, "--d") is None
    assert values(["--two", "1", "--other", "2"], "--two-names", "--other") == ["1", "2"]
    assert values(["model-path", "--"], "--model-path") == []


def test_whole_flags_abbreviate_nothing() -> None:
    assert "--model" in WHOLE_FLAGS
    assert values(["--model", "x"], "--model-impl") == []
    assert values(["--model-im", "x"], "--model-impl") == ["x"]


def test_int_value() -> None:
    assert int_value(["--port", "5"], "--port", default=1) == 5
    assert int_value([], "--port", default=1) == 1
    with pytest.raises(ConfigError, match="--port is 'x'; it must be an integer"):
        int_value(["--port", "x"], "--port", default=1)


def write_yaml(path: Path, options: object) -> str:
    path.write_text(yaml.safe_dump(options))
    return str(path)


def test_config_file_is_expanded(tmp_path: Path) -> None:
    options = {
        "model-path": "x",
        "afd-attention-ranks": 2,
        "afd_ffn_ranks": 1,
        "enable-metrics": True,
        "enable-lora": False,
        "cuda-graph-bs-decode": [1, 2],
        "extra-metric-labels": {"a": "b"},
    }
    file = write_yaml(tmp_path / "options.yaml", options)
    expected = ["--model-path", "x", "--afd-attention-ranks", "2", "--afd-ffn-ranks", "1"]
    expected += ["--cuda-graph-bs-decode", "1", "2", "--enable-metrics"]
    expected += ["--extra-metric-labels", '{"a": "b"}']
    for argv in (["--port", "1", "--config", file], [f"--config={file}", "--port", "1"]):
        expanded = expand_config_file(argv)
        assert expanded[-2:] == ["--port", "1"], "the command line comes last, so that it counts"
        assert sorted(expanded) == sorted([*expected, "--port", "1"])


def test_config_file_is_held_to_the_same_rules(tmp_path: Path) -> None:
    file = write_yaml(tmp_path / "options.yaml", {"tp_size": 4, "model-path": "x"})
    with pytest.raises(ConfigError, match="--tp-size is set by"):
        parse(expand_config_file([*COUNTS, "--config", file]), transport="gloo")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("[1, 2]", "must hold a mapping"), ("a: [", "is no YAML"), (None, "cannot be read: No such")],
)
def test_bad_config_files(tmp_path: Path, text: str | None, expected: str) -> None:
    file = tmp_path / "options.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        expand_config_file(["--config", str(file)])


def test_config_file_corners(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.touch()
    assert expand_config_file(["--config", str(empty), "--a"]) == ["--a"]
    with pytest.raises(ConfigError, match="--config is given twice"):
        expand_config_file(["--config", str(empty), "--config", str(empty)])
    with pytest.raises(ConfigError, match="cannot be read"):
        expand_config_file(["--config"])


def test_plain_sglang_keeps_its_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inert: without --afd-* flags, SGLang reads its own file, and no model is put in its place."""
    monkeypatch.setattr(start, "this_machine", lambda: Machine(other_accelerator=True))
    file = write_yaml(tmp_path / "options.yaml", {"model-path": "x"})
    argv = ["--config", file, "--tp-size", "2"]
    assert start.prepare(argv, program="launch_server") == (None, argv)
    assert capsys.readouterr().out == ""


def test_embedded_model_is_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "this_machine", Machine)
    facts = start.read_facts([*COUNTS], program="check")
    assert facts is not None and facts.on_cpu
    assert facts.checkpoint.moe_facts().num_experts > 0
    assert "no --model-path given, serving the embedded" in capsys.readouterr().out
