"""Make .venv for this checkout: `python3 tools/setup_env.py` or `make setup`. Needs only Python.

Two virtual environments, so that a second checkout costs seconds instead of a second installation:

* the *dependencies*, several GB, under ${SGLANG_AFD_CACHE:-~/.cache/sglang_afd}, named after the
  profile, the Python version and a hash of the requirement files, shared by all checkouts;
* `.venv`, a light one of this checkout alone: a .pth file adds the dependencies' site-packages, the
  commands are repeated with this environment's interpreter, and the checkout is installed in it in
  editable mode. What is installed later with `.venv/bin/python -m pip` stays in this checkout.

A virtual environment cannot be moved, so each is built where it stays, under a lock, and counts
only once its `.complete` file is written: an interrupted build is started afresh.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
MARKER = ".complete"
# pip's arguments and the requirement files of each profile; the files' hash names the environment.
PROFILES = {
    "cpu": (["--no-deps"], ["cpu.txt", "dev.txt"]),
    "gpu": ([], ["gpu.txt", "dev.txt"]),
}
PYTHONS = ("3.11", "3.12")
PROGRESS_SECONDS = 5.0


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


def fail(text: str) -> NoReturn:
    """End with exit code 1 and the message."""
    sys.exit(f"[setup] error: {text}")


def find_python() -> tuple[str, str]:
    """Path and version of a Python 3.11 or 3.12: this one, else the first found on PATH."""
    probe = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
    for name in (sys.executable, *(f"python{version}" for version in PYTHONS)):
        try:
            out = subprocess.run([name, "-c", probe], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue  # absent, or a version manager's shim for a version that is not active
        version, path = out.stdout.strip().split(maxsplit=1)
        if version in PYTHONS:
            return path, version
    fail(
        f"needs Python {' or '.join(PYTHONS)}, and found only {sys.version.split()[0]} "
        f"({sys.executable}). Install one, or name one: make setup PYTHON=/path/to/python3.11"
    )


def detect_profile() -> str:
    """`gpu` if nvidia-smi lists a device, else `cpu`."""
    try:
        out = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "gpu" if out.returncode == 0 and out.stdout.startswith("GPU ") else "cpu"


def digest(paths: list[Path]) -> str:
    """Short hash of the files' names and contents."""
    hasher = hashlib.sha256()
    for path in paths:
        hasher.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()[:12]


def cache_root() -> Path:
    default = Path.home() / ".cache" / "sglang_afd"
    return Path(os.environ.get("SGLANG_AFD_CACHE") or default).expanduser().resolve()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder (created if absent); released when this process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another set-up at work in {folder}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def site_packages(venv: Path, version: str) -> Path:
    return venv / "lib" / f"python{version}" / "site-packages"


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A command with its output in one pipe. If the body raises, its whole process group is ended:
    what went on writing after an interrupt would spoil the next set-up's work.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    ) as process:
        try:
            yield process
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise


def create_venv(python: str, venv: Path, *, pip: bool) -> None:
    """Make an empty virtual environment in a folder, whatever the folder holds."""
    command = [python, "-m", "venv", "--clear", *([] if pip else ["--without-pip"]), str(venv)]
    with running(command) as process:
        output, _ = process.communicate()
    if process.returncode:
        fail(
            f"`{' '.join(command)}` failed (on Debian and Ubuntu the package python3.x-venv brings "
            f"the module):\n{output}"
        )


class Progress:
    """Condenses pip's output to a line every few seconds: packages fetched, then installed.

    `total` is the number of packages, or 0 where pip finds it out.
    """

    def __init__(self, site: Path, total: int) -> None:
        self.site = site
        self.total = total
        self.start = time.monotonic()
        self.fetched = 0
        self.current = ""
        self.names: list[str] = []  # in the order of installation, once pip has told it
        self.before = self._installed()

    def _installed(self) -> int:
        return sum(1 for _ in self.site.glob("*.dist-info/INSTALLER"))  # pip writes it last

    def read(self, line: str) -> None:
        """Take one line of pip's output."""
        match = re.match(r"(?:Collecting|Processing) (\S+)", line)
        if match:
            self.fetched += 1
            self.current = match[1].rsplit("/", 1)[-1].split("-")[0]  # of a wheel, its name
        elif line.startswith("Installing collected packages: "):
            self.names = line.strip().partition(": ")[2].split(", ")

    def report(self, stop: threading.Event) -> None:
        """Print the state until told to stop."""
        while not stop.wait(PROGRESS_SECONDS):
            if self.names:
                done = min(self._installed() - self.before, len(self.names) - 1)
                state = f"installing package {done + 1}/{len(self.names)}: {self.names[done]}"
            else:
                state = f"fetching package {self.fetched}/{self.total or '?'}: {self.current}"
            say(f"{time.monotonic() - self.start:4.0f} s: {state}")


def pip_install(python: Path, arguments: list[str], log: Path, progress: Progress | None) -> None:
    """Run `pip install`, keeping its output in a log file; fail with the log's end if it fails."""
    command = [str(python), "-m", "pip", "install", "--no-input", "--progress-bar=off"]
    command += ["--disable-pip-version-check", *arguments]
    stop = threading.Event()
    reporter = threading.Thread(target=progress.report, args=(stop,)) if progress else None
    with log.open("w") as out, running(command) as process:
        assert process.stdout is not None
        if reporter:
            reporter.start()
        try:
            for line in process.stdout:
                out.write(line)
                if progress:
                    progress.read(line)
        finally:
            stop.set()
    if reporter:
        reporter.join()
    if process.returncode:
        tail = "".join(log.read_text().splitlines(keepends=True)[-15:])
        fail(f"pip failed with exit code {process.returncode}; the end of {log}:\n{tail}")


def ensure_dependencies(python: str, version: str, profile: str) -> Path:
    """The folder of the shared environment with the dependencies, built unless it is there."""
    arguments, names = PROFILES[profile]
    files = [REQUIREMENTS / name for name in names]
    venv = cache_root() / f"venv-{profile}-{version}-{digest(files)}"

    def usable() -> bool:
        return (venv / MARKER).exists() and (venv / "bin" / "python").exists()

    if usable():
        return venv
    with locked(venv):
        if usable():
            return venv  # built by another set-up while this one waited
        say(f"installing the {profile} profile for Python {version} into {venv}")
        say("once per machine: several GB, some minutes")
        create_venv(python, venv, pip=True)
        for file in files:
            arguments = [*arguments, "-r", str(file)]
        pinned = sum("==" in line for file in files for line in file.read_text().splitlines())
        total = pinned if "--no-deps" in arguments else 0
        progress = Progress(site_packages(venv, version), total)
        pip_install(venv / "bin" / "python", arguments, venv / "pip.log", progress)
        (venv / MARKER).touch()
        say(f"dependencies installed in {time.monotonic() - progress.start:.0f} s")
    return venv


def repeat_commands(source: Path, target: Path) -> None:
    """Give an environment the commands of another: scripts with its own interpreter, else links."""
    old, new = f"{source}/python".encode(), f"{target}/python".encode()
    for command in source.iterdir():
        own = target / command.name
        if own.exists():
            continue  # the interpreter and the activation scripts
        content = command.read_bytes()
        if content.startswith(b"#!"):
            own.write_bytes(content.replace(old, new))
            own.chmod(0o755)
        else:
            own.symlink_to(command)


def ensure_checkout(python: str, version: str, dependencies: Path) -> None:
    """This checkout's .venv, chained to the dependencies, with the checkout installed in it."""
    venv = ROOT / ".venv"
    wanted = {
        "environment": f"{dependencies} for {venv}, made by {digest([Path(__file__)])}",
        "package": digest([ROOT / "pyproject.toml", ROOT / "setup.py"]),
    }

    def current() -> dict[str, str]:
        try:
            return json.loads((venv / MARKER).read_text())
        except (OSError, ValueError):
            return {}

    def usable() -> bool:
        return current() == wanted and (venv / "bin" / "python").exists()

    if usable():
        return
    with locked(ROOT):
        if usable():
            return
        start = time.monotonic()
        interpreter = venv / "bin" / "python"
        if current().get("environment") != wanted["environment"] or not interpreter.exists():
            if venv.is_symlink():
                venv.unlink()
            create_venv(python, venv, pip=False)
            site = site_packages(dependencies, version)
            # A plain path would do for imports; addsitedir also obeys the .pth files there, and
            # PREFIXES (site.getsitepackages) is where libraries look for the CUDA packages.
            (site_packages(venv, version) / "_dependencies.pth").write_text(
                f"import site; site.PREFIXES.append({str(dependencies)!r}); "
                f"site.addsitedir({str(site)!r})\n"
            )
            repeat_commands(dependencies / "bin", venv / "bin")
        (venv / MARKER).unlink(missing_ok=True)
        editable = ["--no-deps", "--no-build-isolation", "-e", str(ROOT)]
        pip_install(interpreter, editable, venv / "pip.log", None)
        # What the build leaves here would shadow the installed metadata for whoever runs in ROOT.
        shutil.rmtree(ROOT / "sglang_afd.egg-info", ignore_errors=True)
        (venv / MARKER).write_text(json.dumps(wanted))
        say(f"made {venv} in {time.monotonic() - start:.1f} s")
        say("for `python -m sglang_afd...` in this shell: source .venv/bin/activate")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make .venv for this checkout.")
    parser.add_argument("--profile", choices=sorted(PROFILES), help="default: gpu if there is one")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # end by an exception, which ends pip too
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    python, version = find_python()
    dependencies = ensure_dependencies(python, version, options.profile or detect_profile())
    ensure_checkout(python, version, dependencies)


if __name__ == "__main__":
    main()
