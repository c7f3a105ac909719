"""``python -m sglang_afd.check``: would this command line start?  Takes launch_server's flags.

Prints what every gate finds, with the mend of what fails; exits with 0 if all pass, with 1 if one
does not, with 2 if the command line describes no deployment.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sglang_afd import start
from sglang_afd.gate import Finding, findings

PROGRAM = "check"


def main(argv: Sequence[str] | None = None) -> int:
    """Check `argv` (default: the command line) and return the exit status."""
    facts = start.read_facts(sys.argv[1:] if argv is None else argv, program=PROGRAM)
    if facts is None:
        start.fail(
            PROGRAM,
            "no --afd-* flags, so there is nothing to check: plain SGLang would start; give "
            "--afd-attention-ranks and --afd-ffn-ranks",
        )
    found = [*findings(facts), start.sglang_finding(facts, program=PROGRAM)]
    if sys.stdout.isatty():
        _print_table(found)
    else:
        _print_lines(found)
    return 0 if all(finding.passed for finding in found) else 1


def _print_lines(found: Sequence[Finding]) -> None:
    width = max(len(finding.gate) for finding in found)
    for finding in found:
        verdict = "pass" if finding.passed else "FAIL"
        print(f"{finding.gate:<{width}}  {verdict}  {finding.message}")
        if finding.mend:
            print(f"{'':<{width}}        mend: {finding.mend}")


def _print_table(found: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("gate", "", "finding", "mend")
    for finding in found:
        verdict = "[green]pass[/]" if finding.passed else "[bold red]FAIL[/]"
        table.add_row(finding.gate, verdict, escape(finding.message), escape(finding.mend))
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
