"""Tests of setup.py without a network: a server on loopback stands for the index.

Run: python3 -m unittest discover -s scripts
"""

import hashlib
import http.server
import importlib.util
import os
import tempfile
import threading
import unittest
from pathlib import Path
from unittest import mock

SPEC = importlib.util.spec_from_file_location("setup_libtorch",
                                              Path(__file__).with_name("setup.py"))
setup = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(setup)

CONTENT = bytes(range(256)) * 20_000  # 5 MB


class Flaky(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT with ranges, and breaks the connection after `limit` bytes while `failures`
    lasts."""

    failures, limit, ranges = 0, 1_500_000, []

    def do_GET(self):
        start = int((self.headers.get("Range") or "bytes=0-").split("=")[1].split("-")[0])
        Flaky.ranges.append(start)
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        body = CONTENT[start:]
        if Flaky.failures:
            Flaky.failures -= 1
            body = body[: Flaky.limit]
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_):
        pass


class Resolving(unittest.TestCase):
    """The pip that resolves was installed and run without a look at what it is."""

    def resolver(self, home, outcome=None):
        commands = []

        def run(command, **_):
            wanted = Path(command[command.index("--requirement") + 1])
            commands.append((command, wanted.read_text()))
            if outcome:
                raise outcome

        with mock.patch.object(setup, "run", run):
            return setup.resolver(home), commands

    def test_regression_the_pip_that_is_run_is_checked_against_its_hash(self):
        with tempfile.TemporaryDirectory() as home:
            folder, [(command, wanted)] = self.resolver(Path(home))
            self.assertIn("--require-hashes", command)
            self.assertEqual(wanted, f"{setup.PIP} --hash=sha256:{setup.PIP_HASH}\n")
            self.assertEqual(os.listdir(home), [folder.name])
            # What was installed without a check has another name; what was checked is not installed
            # again.
            self.assertNotEqual(folder.name, "pip-25.3")
            self.assertEqual(self.resolver(Path(home)), (folder, []))

    def test_a_pip_that_is_another_leaves_nothing(self):
        with tempfile.TemporaryDirectory() as home:
            with self.assertRaises(SystemExit):
                self.resolver(Path(home), SystemExit("hashes do not match"))
            self.assertEqual(os.listdir(home), [])


class Downloads(unittest.TestCase):
    def setUp(self):
        Flaky.failures, Flaky.ranges = 0, []
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Flaky)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/torch.whl"
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "torch.whl"
        self.hash = hashlib.sha256(CONTENT).hexdigest()

    def tearDown(self):
        self.server.shutdown()
        self.server.server_close()
        self.folder.cleanup()

    def fetch(self, wanted):
        with mock.patch("time.sleep"):
            setup.download(self.url, self.path, wanted)

    def test_a_broken_connection_is_resumed_where_it_broke(self):
        Flaky.failures = 2
        self.fetch(self.hash)
        self.assertEqual(self.path.read_bytes(), CONTENT)
        self.assertEqual(Flaky.ranges, [0, 1_500_000, 3_000_000])

    def test_an_earlier_runs_part_is_continued(self):
        self.path.with_suffix(".part").write_bytes(CONTENT[:2_000_000])
        self.fetch(self.hash)
        self.assertEqual(self.path.read_bytes(), CONTENT)
        self.assertEqual(Flaky.ranges, [2_000_000])

    def test_a_complete_file_is_not_fetched_again(self):
        self.path.write_bytes(CONTENT)
        self.fetch(self.hash)
        self.assertEqual(Flaky.ranges, [])

    def test_a_wrong_hash_is_refused_and_nothing_is_left(self):
        with self.assertRaisesRegex(SystemExit, "pinned SHA-256"):
            self.fetch("0" * 64)
        self.assertEqual(list(Path(self.folder.name).iterdir()), [])

    def test_a_connection_that_never_holds_ends_with_the_remedy(self):
        Flaky.failures, Flaky.limit = 100, 10
        with self.assertRaisesRegex(SystemExit, "run the command again to resume"):
            self.fetch(self.hash)
        Flaky.limit = 1_500_000
        self.assertEqual(self.path.with_suffix(".part").stat().st_size, 10 * setup.ATTEMPTS)


class Existing(unittest.TestCase):
    def libtorch(self, folder, version):
        (Path(folder) / "lib").mkdir()
        (Path(folder) / "lib" / "libtorch_cpu.so").touch()
        if version:
            (Path(folder) / "build-version").write_text(version)

    def check(self, version):
        with tempfile.TemporaryDirectory() as folder:
            self.libtorch(folder, version)
            with mock.patch.dict(os.environ, {"LIBTORCH": folder}, clear=True):
                return setup.existing()

    def test_the_right_version_is_used(self):
        self.assertTrue(self.check(setup.VERSION + "+cpu\n"))

    def test_another_version_is_refused_with_the_remedy(self):
        with self.assertRaisesRegex(
                SystemExit, "version 2.4.0, gpipe is built on 2.11.0: install torch==2.11.0"):
            self.check("2.4.0+cu121")

    def test_an_unknown_version_is_refused_with_the_remedy(self):
        with self.assertRaisesRegex(SystemExit, "does not say its version"):
            self.check(None)

    def test_a_folder_that_is_no_libtorch_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            with mock.patch.dict(os.environ, {"LIBTORCH": folder}, clear=True):
                with self.assertRaisesRegex(SystemExit, "has no lib/libtorch_cpu.so"):
                    setup.existing()

    def test_without_variables_nothing_exists(self):
        with mock.patch.dict(os.environ, {}, clear=True):
            self.assertFalse(setup.existing())


class Chosen(unittest.TestCase):
    def run_main(self, root, **environment):
        with mock.patch.object(setup, "ROOT", root), \
                mock.patch.dict(os.environ, environment, clear=True), \
                mock.patch.object(setup, "install") as install, mock.patch("subprocess.run"):
            install.side_effect = lambda variant, home, destination: (
                destination / "torch").mkdir(parents=True)
            setup.main()
        return install.call_count

    def test_the_set_that_was_chosen_stays_chosen(self):
        with tempfile.TemporaryDirectory() as folder:
            root, home = Path(folder) / "clone", Path(folder) / "home"
            root.mkdir()
            environment = {"GPIPE_HOME": str(home)}
            self.assertEqual(self.run_main(root, GPIPE_LIBTORCH="cuda", **environment), 1)
            linked = os.readlink(root / ".libtorch")
            self.assertIn("-cuda", linked)
            (Path(linked) / "build-version").write_text(setup.VERSION)
            self.assertEqual(self.run_main(root, **environment), 0)
            self.assertEqual(os.readlink(root / ".libtorch"), linked)
            self.assertEqual(self.run_main(root, GPIPE_LIBTORCH="cpu", **environment), 1)
            self.assertIn("-cpu", os.readlink(root / ".libtorch"))

    def test_a_set_that_is_only_stored_leaves_the_clones_link(self):
        with tempfile.TemporaryDirectory() as folder:
            root, home = Path(folder) / "clone", Path(folder) / "home"
            root.mkdir()
            self.run_main(root, GPIPE_LIBTORCH="cpu", GPIPE_HOME=str(home))
            linked = os.readlink(root / ".libtorch")
            with mock.patch.dict(os.environ, {"GPIPE_HOME": str(home)}), \
                    mock.patch.object(setup, "ROOT", root), \
                    mock.patch.object(setup, "install") as install:
                torch = setup.stored("cuda")
            self.assertEqual(torch, home / f"libtorch-{setup.VERSION}-cuda" / "torch")
            self.assertEqual((install.call_count, os.readlink(root / ".libtorch")), (1, linked))

    def test_an_unknown_set_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(SystemExit, "use cpu or cuda"):
                self.run_main(Path(folder), GPIPE_LIBTORCH="rocm", GPIPE_HOME=folder)


class Selection(unittest.TestCase):
    def test_the_cpu_set_has_what_is_needed_and_no_more(self):
        wanted = ["torch/lib/libtorch_cpu.so", "torch/lib/libc10.so", "torch/lib/libgomp.so.1",
                  "torch/include/ATen/ATen.h", "nvidia/cu13/lib/libcudart.so.13"]
        unwanted = ["torch/lib/libtorch_cuda.so", "torch/lib/libc10_cuda.so",
                    "torch/lib/libtorch_python.so", "torch/nn/functional.py",
                    "nvidia/cu13/include/cuda.h", "torch/lib/libtorch_nvshmem.so"]
        self.assertEqual([n for n in wanted + unwanted if setup.wanted_on_cpu(n)], wanted)


if __name__ == "__main__":
    unittest.main()
