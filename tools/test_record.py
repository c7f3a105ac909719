"""Turn pytest's JUnit report into a dated record: `test_record.py reports/full.xml tests/records`.

The record is a Markdown table with one row per test: outcome, seconds, and the message of what did
not pass. Of the report's fields it leaves out the host's name.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from datetime import date
from pathlib import Path

OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}


def row(case: ElementTree.Element) -> tuple[str, str]:
    """Outcome and table row of one `testcase` element."""
    outcome, note = "passed", ""
    for child in case:
        if child.tag in OUTCOMES:
            outcome = OUTCOMES[child.tag]
            first_line = (child.get("message") or "").partition("\n")[0]
            note = first_line[:120].replace("|", "\\|")
    name = f"{case.get('classname')}::{case.get('name')}".replace("|", "\\|")
    return outcome, f"| {name} | {outcome} | {float(case.get('time', 0)):.1f} | {note} |"


def record(report: Path, day: date) -> str:
    """The record's text."""
    rows = [row(case) for case in ElementTree.parse(report).getroot().iter("testcase")]
    counts = Counter(outcome for outcome, _ in rows)
    summary = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
    head = [f"# Full test run, {day.isoformat()}", "", f"{summary}.", ""]
    table = ["| test | outcome | seconds | note |", "|---|---|---|---|"]
    return "\n".join([*head, *table, *(text for _, text in rows), ""])


def main() -> None:
    report, folder = Path(sys.argv[1]), Path(sys.argv[2])
    day = date.today()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{day.isoformat()}.md"
    target.write_text(record(report, day))
    print(f"record: {target}")


if __name__ == "__main__":
    main()
