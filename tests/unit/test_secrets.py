"""What a user keeps secret is in no line of ours, nor in what the ranks compare."""

from __future__ import annotations

import pytest

from sglang_afd import check, start
from sglang_afd.gate import findings
from sglang_afd.machine import Machine

pytestmark = pytest.mark.unit

SECRET = "s3cret-of-the-user"
COUNTS = ("--afd-attention-ranks", "2", "--afd-ffn-ranks", "1")


@pytest.mark.parametrize(
    "secret",
    [
        ("--api-key", SECRET),
        (f"--api-key={SECRET}",),
        ("--admin-api-key", SECRET),
        ("--ssl-keyfile-password", SECRET),
        ("--api-key", SECRET, "--enable-lora"),  # refused, with a message
        ("--api-key", SECRET, "--tp-size", "3"),  # cannot be right
    ],
)
def test_a_secret_flag_is_not_printed(
    secret: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "this_machine", Machine)
    try:
        facts = start.read_facts([*COUNTS, *secret], program="check")
    except SystemExit:
        facts = None
    if facts is not None:
        assert SECRET in " ".join(facts.args), "SGLang gets it"
        found = findings(facts)
        check._print_lines(found)
        check._print_table(found)
        assert SECRET not in facts.config.to_json()
    printed = capsys.readouterr()
    assert printed.out + printed.err
    assert SECRET not in printed.out + printed.err
