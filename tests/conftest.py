"""Fixtures of all tests: one zygote a session, one shared world at a time, references on disk.

Integration tests name the world they run on with `tests.support.layouts.on`.  They are reordered so
that tests of one layout run in a row on one world; it is stopped, and its clean end is checked, at
the end of the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.support.layouts import Layout
from tests.support.world import World, Worlds, Zygote

# How long an example takes says more of the machine's load than of the code.
settings.register_profile("any load", deadline=None)
settings.load_profile("any load")
# Tests run beside each other, and beside servers: two threads that waited for one another's turn
# on a core took 20 times the CPU time of one.
torch.set_num_threads(1)

_WORLDS = pytest.StashKey[Worlds]()
_FAILED = pytest.StashKey[bool]()
_STARTS = pytest.StashKey[int]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring tests of one layout together, in order of first appearance; others keep theirs.

    With ``--dist loadgroup`` one process runs all tests of a layout, or of a file's others; those
    that wait longest come first, beside the others.
    """
    first: dict[Layout | None, int] = {}
    for index, item in enumerate(items):
        layout = _layout(item)
        if layout is not None:
            first.setdefault(layout, index)
    places = {id(item): first.get(_layout(item), index) for index, item in enumerate(items)}
    items.sort(key=lambda item: (item.get_closest_marker("cold") is None, places[id(item)]))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(str(_layout(item) or item.path.stem)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Only servers started from here on belong to this test's report."""
    if worlds := item.config.stash.get(_WORLDS, None):
        worlds.forget_ended()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    """Attach the servers' logs to what failed, and to each report how long they took to start."""
    if worlds := item.config.stash.get(_WORLDS, None):
        starts = worlds.starts()
        for start in starts[item.config.stash.get(_STARTS, 0) :]:
            item.user_properties.append(("world start", f"{start.seconds:.1f} {start.others:.2f}"))
        item.config.stash[_STARTS] = len(starts)
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
        for world in worlds.recent if worlds else ():
            report.sections.append((f"log of {world.log_path.name}", world.tail()))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, Any, Any]:
    """Stop the shared world after the last test that uses it: an unclean end fails that test."""
    worlds = item.config.stash.get(_WORLDS, None)
    try:
        result = yield
    except BaseException:
        item.stash[_FAILED] = True
        raise
    finally:
        if worlds is not None and item.stash.get(_FAILED, False):
            worlds.discard()  # it may be wedged; the next test gets a fresh one
    if worlds is not None and (nextitem is None or _layout(nextitem) != _layout(item)):
        worlds.release()
    return result


def _layout(item: pytest.Item) -> Layout | None:
    callspec = getattr(item, "callspec", None)
    layout = callspec.params.get("world") if callspec else None
    return layout if isinstance(layout, Layout) else None


@pytest.fixture(scope="session")
def cache_folder(pytestconfig: pytest.Config) -> Path:
    """A folder that outlives the session."""
    return pytestconfig.cache.mkdir("sglang_afd")


@pytest.fixture(scope="session")
def checkpoints(cache_folder: Path) -> Callable[[str], Path]:
    """The directory of a checkpoint of `tests.support.layouts.CHECKPOINTS`."""
    from tests.support.named_checkpoints import directory

    return lambda name: directory(name, cache_folder)


@pytest.fixture(scope="session")
def references(cache_folder: Path) -> Any:
    """What HF transformers answers; see `tests.support.reference`."""
    from tests.support.reference import References

    folder = cache_folder / "references"
    folder.mkdir(exist_ok=True)
    return References(folder)


@pytest.fixture(scope="session")
def worlds(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Worlds]:
    """The session's servers, all forked from one zygote."""
    folder = tmp_path_factory.mktemp("worlds")
    zygote = Zygote(folder / "zygote.log")
    worlds = pytestconfig.stash[_WORLDS] = Worlds(zygote, folder)
    yield worlds
    del pytestconfig.stash[_WORLDS]
    worlds.discard()
    zygote.stop()


@pytest.fixture
def world(
    request: pytest.FixtureRequest, worlds: Worlds, checkpoints: Callable[[str], Path]
) -> Iterator[World]:
    """The healthy shared world of the test's layout; it must survive the test."""
    layout: Layout = request.param
    world = worlds.shared(layout.argv(str(checkpoints(layout.checkpoint))))
    yield world
    assert world.exit_code is None, f"the server ended in this test, with {world.exit_code}"


@pytest.fixture
def start(worlds: Worlds) -> Iterator[Callable[..., World]]:
    """Start servers of the test's own: ``start(argv, port=…, env=…)``; killed after the test."""
    started: list[World] = []

    def run(argv: Any, **kwargs: Any) -> World:
        started.append(worlds.start(argv, **kwargs))
        return started[-1]

    yield run
    for world in started:
        world.kill()
