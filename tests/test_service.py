"""The command line, as far as no daemon is needed to see what it does."""

from __future__ import annotations

import os

from twisted.trial.unittest import SynchronousTestCase

from hivebash.service import Options, default_state_dir, unix_arguments


class OptionsTests(SynchronousTestCase):
    """What options mean."""

    def setUp(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "HIVE_AGENT_SOCKET"}
        self.patch(os, "environ", environment)

    def parse(self, *arguments: str) -> Options:
        options = Options()
        options.parseOptions(list(arguments))
        return options

    def test_defaults(self) -> None:
        """Without options everything is as documented."""
        options = self.parse()
        self.assertEqual(options.listen, ["tcp:8712:interface=127.0.0.1"])
        self.assertEqual(options["workdir"], os.getcwd())
        self.assertEqual((options["max-running"], options["kill-grace"]), (64, 5))
        self.assertEqual((options["keep"], options["keep-days"]), (1000, 7))

    def test_repeated(self) -> None:
        """Some options may be repeated, and keep their order."""
        options = self.parse(
            "--listen", "tcp:1", "--listen", "unix:/x", "--env", "A=1=2", "--env", "B=", "--allow-host", "A.example",
            "--allow-host", "::1", "--allow-host", "[fd00::1]",
        )  # fmt: skip
        self.assertEqual(options.listen, ["tcp:1", "unix:/x"])
        self.assertEqual(options.environment_changes, [("A", "1=2"), ("B", "")])
        self.assertEqual(options.allowed_hosts, {"a.example", "::1", "fd00::1"})

    def test_paths(self) -> None:
        """Paths are meant from where the daemon is started."""
        options = self.parse("--state-dir", "a", "--workdir", "..")
        self.assertEqual(options["state-dir"], os.path.abspath("a"))
        self.assertEqual(options["workdir"], os.path.dirname(os.getcwd()))

    def test_harness(self) -> None:
        """The agent's socket is an option or a variable; without either there is none."""
        self.assertIsNone(self.parse()["agent-socket"])
        self.patch(os, "environ", {**os.environ, "HIVE_AGENT_SOCKET": "/run/a.sock"})
        self.assertEqual(self.parse()["agent-socket"], "/run/a.sock")
        self.assertEqual(self.parse("--agent-socket", "b.sock")["agent-socket"], os.path.abspath("b.sock"))
        self.assertIn("--on-todo", self.assertRaises(SystemExit, self.parse, "--on-todo", "true").code)
        os.environ["HIVE_AGENT_SOCKET"] = ""
        self.assertIsNone(self.parse()["agent-socket"])
        self.assertEqual(self.parse("--on-todo", "true")["on-todo"], "true")

    def test_long_socket(self) -> None:
        """A path that no socket can have is a fault, also that of the built-in harness's."""
        path = f"/{'x' * 107}"
        for options in (("--agent-socket", path), ("--state-dir", path)):
            fault = self.assertRaises(SystemExit, self.parse, *options).code
            self.assertIn("107", fault)
            self.assertIn(path, fault)
        self.parse("--agent-socket", path[:107])
        self.parse("--state-dir", path, "--agent-socket", "/a")

    def test_faults(self) -> None:
        """A fault ends the program with one line that names the option."""
        fault = self.assertRaises(SystemExit, self.parse, "--max-running", "-3")
        self.assertEqual(fault.code, "hivebash: --max-running takes a whole number, 1 or more, not '-3'")
        for option, values in (
            ("--max-running", ("0", "many", "1.5", "", "9" * 5000)),
            ("--kill-grace", ("-1", "nan", "inf", "x", "")),
            ("--keep", ("1.5", "-1")),
            ("--keep-days", ("x", "-0.1")),
            ("--env", ("=x", "NAME", "")),
            ("--allow-host", ("a:1", "http://a", "a b", "a/b", "[::1", "")),
            ("--on-todo", ("", " ", "a\0b")),
            ("--no-such-option", ("x",)),
            ("extra", ("y",)),
        ):
            for value in values:
                fault = self.assertRaises(SystemExit, self.parse, option, value)
                self.assertIn(option.strip("-"), fault.code)
                self.assertTrue(fault.code.startswith("hivebash: "))
                self.assertNotIn("\n", fault.code)

    def test_unix_endpoint(self) -> None:
        """A unix endpoint is a path, for its owner unless a mode is given; a backslash escapes what means something."""
        here = os.getcwd()
        for text, meant in (
            ("unix:/a/b", ("/a/b", 0o600, 50)),
            ("unix:b", (f"{here}/b", 0o600, 50)),
            ("unix:address=/a:mode=660:backlog=7", ("/a", 0o660, 7)),
            ("unix:mode=0666:address=/a\\:b\\=c", ("/a:b=c", 0o666, 50)),
            (f"unix:/{'x' * 106}", (f"/{'x' * 106}", 0o600, 50)),
        ):
            self.assertEqual(unix_arguments(text), meant)
        for text, word in (
            ("unix:", "path"),
            ("unix:/a:/b", "takes"),
            ("unix:/a:mode=9", "mode"),
            ("unix:/a:mode=", "mode"),
            ("unix:/a:backlog=x", "backlog"),
            ("unix:/a:lockfile=0", "takes"),
            (f"unix:mode=600:address=/{'x' * 107}", "107"),
        ):
            self.assertIn(word, str(self.assertRaises(ValueError, unix_arguments, text)))

    def test_state_directory(self) -> None:
        """The first of the variables that is set says where things are kept."""
        every = {"HIVEBASH_STATE_DIR": "/a", "STATE_DIRECTORY": "/b:/c", "XDG_STATE_HOME": "/d"}
        self.assertEqual(default_state_dir(every), "/a")
        self.assertEqual(default_state_dir({**every, "HIVEBASH_STATE_DIR": ""}), "/b")
        self.assertEqual(default_state_dir({"XDG_STATE_HOME": "/d"}), "/d/hivebash")
        self.assertEqual(default_state_dir({}), os.path.expanduser("~/.local/state/hivebash"))
