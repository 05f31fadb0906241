#!/usr/bin/env python3
"""Runs torchgpipe's own tests of its user's interface with gpipe.compat in torchgpipe's place.

Usage: env/bin/python torchgpipe_tests.py FOLDER

FOLDER is a checkout of torchgpipe 0.0.7 (its package on the index has no tests). The tests import
`torchgpipe`; a package of that name is made aside, whose modules are those of gpipe.compat. What
the tests import from torchgpipe's inside stands there as a name that does nothing, so that the
other tests of a file run. The docs' page "From torchgpipe" has the result.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = ["test_gpipe.py", "test_bugs.py", "test_inplace.py", "test_transparency.py",
         "skip/test_gpipe.py", "skip/test_verify_skippables.py", "skip/test_api.py"]

INSIDE = """
def __getattr__(name):
    return type(name, (), {'_backward_cls': type(name, (), {})})
"""
MODULES = {
    "__init__.py": "from gpipe.compat import *\nfrom gpipe.compat import GPipe\n",
    "balance.py": "from gpipe.compat.balance import *\n",
    "gpipe.py": "from gpipe.compat import GPipe\n" + INSIDE,
    "skip/__init__.py": "from gpipe.compat.skip import *\n",
    "skip/portal.py": INSIDE,
}

# pytest.warns(None), which the tests use, is gone since pytest 8.
PLUGIN = """
import warnings
import pytest

_warns = pytest.warns


def warns(expected=Warning, **settings):
    if expected is None:
        return warnings.catch_warnings(record=True)
    return _warns(expected, **settings)


pytest.warns = warns
"""


def main():
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "tests/test_gpipe.py").exists():
        sys.exit(f"usage: {sys.argv[0]} FOLDER, a checkout of torchgpipe 0.0.7")
    tests = Path(sys.argv[1]).resolve() / "tests"
    with tempfile.TemporaryDirectory() as folder:
        for name, text in MODULES.items():
            path = Path(folder) / "torchgpipe" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        # Aside: beside the checkout's own package, the tests would find that one.
        shutil.copytree(tests, Path(folder) / "tests")
        (Path(folder) / "old_pytest.py").write_text(PLUGIN)
        command = [sys.executable, "-m", "pytest", "-p", "old_pytest", "-p", "no:cacheprovider",
                   "-q", "--rootdir", str(Path(folder) / "tests"), *TESTS]
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = dict(os.environ, PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")
        sys.exit(subprocess.run(command, cwd=Path(folder) / "tests", env=environment).returncode)


if __name__ == "__main__":
    main()
