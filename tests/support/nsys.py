"""A stand-in for Nsight Systems' ``nsys``, which no test machine has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

_PROGRAM = """#!{python}
import json, os, signal, subprocess, sys
verb, *rest = sys.argv[1:]
split = next(i for i, arg in enumerate(rest) if not arg.startswith("--"))
options, command = rest[:split], rest[split:]
[output] = [o.partition("=")[2] for o in options if o.startswith("--output=")]
with open(output + ".json", "w") as file:
    json.dump(dict(verb=verb, options=options, command=command), file)
if {execs}:
    os.execv(command[0], command)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with what it profiles
status = subprocess.run(command).returncode
open(output + ".nsys-rep", "w").close()
sys.exit(status)
"""


def install(folder: Path, *, execs: bool = True) -> Path:
    """Write the stand-in into `folder`, a directory for the PATH; returns it.

    Args:
        execs: it becomes the command; else it is its parent, as the real one is, and writes its
            report in the end.
    """
    folder.mkdir()
    program = folder / "nsys"
    program.write_text(_PROGRAM.format(python=sys.executable, execs=execs))
    program.chmod(0o755)
    return folder


def recorded(report: Path) -> dict[str, list[str]]:
    """What the stand-in was called with, by its ``--output``."""
    return json.loads(report.with_suffix(".json").read_text())
