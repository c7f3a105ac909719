"""The documents' commands, flags, files and make targets exist, and their messages."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from sglang_afd import on_ray, trace
from sglang_afd.flags import add_flags, parse
from sglang_afd.plan import command as plan
from sglang_afd.validate import command as validate
from tools import cli_docs

ROOT = Path(__file__).resolve().parents[2]
# cli.md is what the parsers say, in lines that break flags in two
DOCUMENTS = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if path != cli_docs.DOCUMENT
]
TEXT = "\n".join(path.read_text() for path in DOCUMENTS)


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m (sglang_afd[\w.]*)", TEXT))))
def test_module_exists(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"--afd-[a-z-]*[a-z]", TEXT))))
def test_flag_exists(flag: str) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    on_ray.add_flags(parser)
    assert flag in parser._option_string_actions


@pytest.mark.parametrize(
    "target", sorted(set(re.findall(r"make (demo|test[\w-]*|setup|lint|soak)", TEXT)))
)
def test_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / link).exists(), link


def test_help_texts_are_current() -> None:
    assert cli_docs.DOCUMENT.read_text() == cli_docs.document(), "run: python -m tools.cli_docs"


@pytest.mark.parametrize("columns", ["40", "300"])
def test_help_texts_do_not_depend_on_the_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert cli_docs.document() == cli_docs.DOCUMENT.read_text()
    assert os.environ["COLUMNS"] == columns


def test_help_texts_hold_no_path_of_this_machine() -> None:
    assert str(ROOT) not in cli_docs.document()


NOT_FOR_USERS = {
    # how the embedded model was made: sglang_afd/embedded/PROVENANCE.md
    *(f"sglang_afd.embedded.{name}" for name in ("corpus", "evaluate", "train", "train_draft")),
    # what the validator runs in the reference's environment
    *(f"sglang_afd.validate.{name}" for name in ("environment", "hf_worker")),
}


def test_every_command_is_documented() -> None:
    """Each module of the package that can be run, and each subcommand of the benchmarks."""
    named = {section.command for section in cli_docs.SECTIONS}
    for file in sorted((ROOT / "sglang_afd").rglob("*.py")):
        if '\nif __name__ == "__main__"' in file.read_text():
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            module = module.removesuffix(".__main__")
            assert f"python -m {module}" in named or module in NOT_FOR_USERS, (
                f"tools/cli_docs.py lacks {module}"
            )
    (commands,) = (
        action.choices
        for action in benchmarks.parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    assert {f"python -m benchmarks {name}" for name in commands} <= named


PROGRAMS = [
    path
    for folder in ("sglang_afd", "benchmarks", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "add_argument(" in path.read_text()
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_every_option_is_explained(program: Path) -> None:
    """In --help; an option without a help text is a riddle there."""
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            assert any(keyword.arg == "help" for keyword in node.keywords), ast.unparse(node)


TUTORIAL = ROOT / "docs" / "tutorial.md"
COMMANDS = [
    command
    for document in (TUTORIAL, ROOT / "README.md")
    for block in re.findall(r"^```bash\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)
    for command in block.replace("\\\n", " ").splitlines()
    if command.strip() and not command.startswith("#")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_taken(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the parser of the program that they call; what is cheap is run."""
    words = shlex.split(command, comments=True)
    words = words[: words.index("#")] if "#" in words else words
    if words[0] != "python":
        assert words[0] in ("make", "source", "curl"), command
        return
    assert words[1] == "-m", command
    module, args = words[2], words[3:]
    if module in ("sglang_afd.launch_server", "sglang_afd.check"):
        assert parse(args, transport="gloo").config is not None
    elif module == "sglang_afd.plan":
        assert plan.main(args) == 0
        assert "AFD " in capsys.readouterr().out
    elif module == "sglang_afd.trace":
        trace._parser().parse_args(args)
    elif module == "sglang_afd.validate":
        _, deployment = validate.parser().parse_known_args(args)
        assert args[0] == "check" or parse(deployment, transport="gloo").config is not None
    elif module == "sglang.bench_serving":
        sglang = Path((importlib.util.find_spec("sglang") or pytest.fail()).origin or "").parent
        assert (sglang / "bench_serving.py").exists()
        client = (sglang / "benchmark" / "serving.py").read_text()
        assert all(f'"{word}"' in client for word in args if word.startswith("--"))
    else:
        pytest.fail(f"{module} is checked by nothing; add it here")


def test_tutorial_shows_what_the_planner_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = TUTORIAL.read_text()
    (asked,) = re.findall(r"^python -m sglang_afd.plan (.*)$", text, re.MULTILINE)
    (shown,) = re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert plan.main(asked.split()) == 0
    assert " ".join(shown.split()) in " ".join(capsys.readouterr().out.split())


def test_every_document_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for document in sorted((ROOT / "docs").glob("*.md")):
        assert f"](docs/{document.name})" in readme, document.name
    assert len(readme.splitlines()) <= 200
