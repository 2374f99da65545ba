"""The house rules that no type checker knows."""

from __future__ import annotations

import ast
import pathlib

from twisted.trial.unittest import SynchronousTestCase

import hivebash

PACKAGE = pathlib.Path(hivebash.__file__).parent
RANKS = {
    "__init__": 0,
    "task": 0,
    "limits": 0,
    "tail": 0,
    "lifecycle": 1,
    "requests": 1,
    "wording": 1,
    "retention": 1,
    "interfaces": 2,
    "database": 2,
    "ending": 2,
    "notices": 2,
    "toolbox": 2,
    "turns": 2,
    "runner": 2,
    "process": 3,
    "reach": 3,
    "spool": 3,
    "store": 3,
    "harness": 3,
    "ledger": 3,
    "loose_ends": 3,
    "tools": 3,
    "asgi": 4,
    "access": 4,
    "web": 4,
    "todos": 4,
    "service": 5,
}
SAME_RANK = {
    (0, "limits"),
    (0, "task"),
    (2, "interfaces"),
    (2, "ending"),
    (2, "notices"),
    (4, "asgi"),
    (4, "access"),
    (4, "web"),
}
"""What files of a rank may import of their own rank."""


def imports(path: pathlib.Path) -> set[str]:
    """Every module that a file imports, anywhere in it; ``from package import name`` counts as ``package.name`` too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


class LayeringTests(SynchronousTestCase):
    """A file imports only what is below it."""

    def test_ranks(self) -> None:
        """Every file has a rank, and imports only lower ones, or what its own rank shares."""
        self.assertEqual({path.stem for path in PACKAGE.glob("*.py")}, set(RANKS))
        for name, rank in RANKS.items():
            for module in imports(PACKAGE / f"{name}.py"):
                other = module.removeprefix("hivebash.")
                if module != other and other in RANKS:
                    allowed = RANKS[other] < rank or (rank, other) in SAME_RANK
                    self.assertTrue(allowed, f"{name} (rank {rank}) imports {other} (rank {RANKS[other]})")

    def test_pure_core(self) -> None:
        """Ranks 0 and 1 do without Twisted and without I/O."""
        forbidden = ("twisted", "zope", "asyncio", "os", "socket", "sqlite3", "mcp", "klein")
        for name in (name for name, rank in RANKS.items() if rank <= 1):
            for module in imports(PACKAGE / f"{name}.py"):
                self.assertNotIn(module.split(".")[0], forbidden, f"{name} imports {module}")

    def test_reactor(self) -> None:
        """Only the assembly names the reactor, and nothing uses inlineCallbacks."""
        for name in RANKS:
            found = imports(PACKAGE / f"{name}.py")
            self.assertNotIn("twisted.internet.defer.inlineCallbacks", found)
            if name != "service":
                self.assertNotIn("twisted.internet.reactor", found, name)

    def test_asyncio(self) -> None:
        """Only those that meet the SDK's side know of asyncio."""
        users = {name for name in RANKS if "asyncio" in imports(PACKAGE / f"{name}.py")}
        self.assertEqual(users, {"asgi", "tools", "web"})
