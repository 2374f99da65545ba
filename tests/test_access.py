"""Who may come in, by Host and Origin."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from hivebash.access import Access, host_name

LOOPBACK = [
    "localhost",
    "localhost:8712",
    "LocalHost",
    "127.0.0.1",
    "127.0.0.1:1",
    "127.1.2.3:80",
    "[::1]",
    "[::1]:8712",
]
FOREIGN = [
    "evil.example",
    "evil.example:8712",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "10.0.0.1",
    "0.0.0.0",
    "[::2]",
    "localhost@evil.example",
    "user@localhost",
    "localhost/x",
    "localhost:port",
    "localhost:99999",
    "",
    " ",
    "[::1",
    "2130706433",
]


class AccessTests(SynchronousTestCase):
    """Loopback names are let in, others only by --allow-host."""

    def code(self, access: Access, hosts: list[str], origins: list[str] | None = None) -> int | None:
        denial = access.check(hosts, origins or [])
        return None if denial is None else denial.code

    def test_host(self) -> None:
        """Host must be a loopback name, at any port; anything else is a 421."""
        for host in LOOPBACK:
            self.assertIsNone(self.code(Access(), [host]), host)
        for host in FOREIGN:
            self.assertEqual(self.code(Access(), [host]), 421, host)

    def test_host_once(self) -> None:
        """Exactly one Host."""
        self.assertEqual(self.code(Access(), []), 421)
        self.assertEqual(self.code(Access(), ["localhost", "localhost"]), 421)

    def test_origin(self) -> None:
        """An Origin must be of a host that is let in; anything else is a 403."""
        for scheme in ("http", "https"):
            for host in LOOPBACK:
                self.assertIsNone(self.code(Access(), ["localhost"], [f"{scheme}://{host}"]), host)
            for host in FOREIGN:
                self.assertEqual(self.code(Access(), ["localhost"], [f"{scheme}://{host}"]), 403, host)
        for origin in ("null", "file://", "localhost", "ftp://localhost", "chrome-extension://localhost"):
            self.assertEqual(self.code(Access(), ["localhost"], [origin]), 403, origin)
        self.assertEqual(self.code(Access(), ["localhost"], ["http://localhost", "http://evil.example"]), 403)

    def test_allowed(self) -> None:
        """A host that was allowed is let in, in Host and in Origin, and no other."""
        access = Access({"agent.example", "fd00::1"})
        for host in ("agent.example", "AGENT.example:80", "[fd00::1]:8712", "localhost"):
            self.assertIsNone(self.code(access, [host], [f"https://{host}"]), host)
        for host in ("evil.agent.example", "agent.example.evil", "[fd00::2]"):
            self.assertEqual(self.code(access, [host]), 421, host)

    def test_sentence(self) -> None:
        """A refusal names the option that would let it in."""
        for denial in (Access().check(["a.example"], []), Access().check(["localhost"], ["http://a.example"])):
            assert denial is not None
            self.assertIn("a.example", denial.sentence)
            self.assertIn("--allow-host", denial.sentence)

    @settings(deadline=None, derandomize=True, database=None, max_examples=300)
    @given(st.text(), st.text())
    def test_anything(self, host: str, origin: str) -> None:
        """No header raises, and what is let in is a loopback name."""
        if Access().check([host], [origin]) is None:
            for url in (f"//{host}", origin):
                name = host_name(url)
                self.assertTrue(name in {"localhost", "::1"} or (name or "").startswith("127."), url)
