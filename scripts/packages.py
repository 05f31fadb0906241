"""Python packages in folders of their own, which pip fills once for all clones.

They are in $GPIPE_HOME/NAME (GPIPE_HOME defaults to ~/.cache/gpipe). A folder is written aside and
renamed, so that a half-made one is never taken for a whole one. Nothing of the system is changed.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# The transformers with which models are compared.
TRANSFORMERS = "5.24.0"
# The PEFT with which adapters are compared, and what it imports that transformers' folder lacks.
PEFT = "0.21.2"
PEFT_NEEDS = ("accelerate==1.15.0", "psutil==7.2.2")

PROGRAM = Path(sys.argv[0]).stem
# Packages have modules that are compiled for one version of Python.
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


def fail(message):
    """Ends the program with a message and exit code 1."""
    sys.exit(f"{PROGRAM}: {message}")


def home():
    """The folder of everything that the scripts fetch."""
    home = Path(os.environ.get("GPIPE_HOME") or Path.home() / ".cache" / "gpipe")
    return home.expanduser().absolute()


def version_in(path, module="torch"):
    """The version that this Python imports from the path, without its local part. None if it cannot
    import it."""
    found = subprocess.run([sys.executable, "-c",
                            f"import numpy, {module}; print({module}.__version__)"],
                           text=True, capture_output=True, env=dict(os.environ, PYTHONPATH=path))
    return None if found.returncode else found.stdout.strip().split("+")[0]


def install(destination, *packages):
    aside = Path(tempfile.mkdtemp(prefix=destination.name + ".", dir=destination.parent))
    try:
        print(f"{PROGRAM}: installing {packages[-1]} into {destination}", file=sys.stderr,
              flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(aside), *packages]
        environment = dict(os.environ, PIP_ROOT_USER_ACTION="ignore")
        if subprocess.run(pip, stdout=sys.stderr, env=environment).returncode:
            fail("pip failed: see its message above; it needs a reachable package index and disk "
                 "(about 8 GB for PyTorch)")
        aside.chmod(0o755)
        aside.rename(destination)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def once(name, *packages):
    """The folder of that name, with the packages installed into it if there was none. Also the
    folder's remedy."""
    home().mkdir(parents=True, exist_ok=True)
    folder = home() / name
    with open(home() / "pytorch.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            install(folder, *packages)
    return folder, f"remove that folder to have it installed for {sys.executable}"


def use(name, version):
    """Lets this process import the package of that name and version."""
    folder, _ = once(f"{name}-{version}-{PYTHON}", "--no-deps", f"{name}=={version}")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def transformers():
    """The folder with transformers."""
    return once(f"transformers-{TRANSFORMERS}-{PYTHON}", f"transformers=={TRANSFORMERS}")[0]


def peft():
    """The folder with PEFT. It has neither torch nor transformers."""
    return once(f"peft-{PEFT}-{PYTHON}", "--no-deps", *PEFT_NEEDS, f"peft=={PEFT}")[0]
