"""No flag of SGLang's looks like a misspelt one of the validator's."""

from __future__ import annotations

import argparse

import pytest

from sglang_afd.flags import add_flags
from sglang_afd.upstream.server import add_sglang_flags
from sglang_afd.validate.command import Impossible, _check_spelling, parser

pytestmark = pytest.mark.upstream


def test_the_validator_lets_every_flag_of_the_deployment_pass() -> None:
    theirs = argparse.ArgumentParser(add_help=False)
    add_sglang_flags(theirs)
    add_flags(theirs)
    _check_spelling(list(theirs._option_string_actions))
    assert len(theirs._option_string_actions) > 400


def test_the_validators_flags_are_not_sglangs() -> None:
    theirs = argparse.ArgumentParser()
    add_sglang_flags(theirs)
    ours = {flag for action in parser()._actions for flag in action.option_strings}
    assert ours & set(theirs._option_string_actions) == {"-h", "--help"}


def test_a_misspelt_flag_is_noticed() -> None:
    with pytest.raises(Impossible, match="--reference is meant"):
        _check_spelling(["--refrence=hf"])
