#!/usr/bin/env python3
"""Puts the pinned libtorch where every clone of gpipe finds it, and links this clone to it.

Only the standard library and pip are needed. What it does, in order:

1. LIBTORCH or LIBTORCH_USE_PYTORCH set: check that version and use it; nothing is downloaded.
2. Otherwise the PyTorch wheels below, whose C++ part *is* libtorch, are downloaded through pip's
   own index (a mirror in pip's configuration is honoured), resumed where an earlier run stopped,
   checked against the SHA-256 pinned here, and unpacked into

       $GPIPE_HOME/libtorch-2.11.0-cpu        (GPIPE_HOME defaults to ~/.cache/gpipe)

   written aside and renamed, so that a half-made folder is never taken for a whole one.
3. `.libtorch` in this clone becomes a link to it; `.cargo/config.toml` points the build there.

GPIPE_LIBTORCH=cuda asks for the CUDA set instead (about 2.6 GB; building needs no GPU).
"""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

VERSION = "2.11.0"
PIP = "pip==25.3"  # can answer "which file would you install?" without downloading it
PIP_HASH = "9655943313a94722b7774661c21049070f6bbb0a1516bf02f7c8d5d9201514cd"
# One interpreter's wheel serves every host: only its C++ part is used. pip takes the platforms
# literally, so each glibc that a wheel may name (the CUDA libraries differ) is listed.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)] + [
    "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "any"]
TARGET = ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "none",
          "--only-binary=:all:", *(part for name in PLATFORMS for part in ("--platform", name))]
WHEELS = {
    "torch==2.11.0": "7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a",
    "nvidia-cuda-runtime==13.0.96":
        "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
    "nvidia-cuda-cupti==13.0.85":
        "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
}
# Headers that only the compilation of CUDA statistics and streams wants.
CUDA_HEADERS = ["nvidia-cuda-crt==13.0.88", "nvidia-cuda-cccl==13.0.85"]
ATTEMPTS = 8  # connections to one file before giving up
STALL_S = 60  # silence on a connection before it is dropped and resumed
ROOT = Path(__file__).resolve().parent.parent


def fail(message):
    sys.exit(f"setup: {message}")


def version_of(folder):
    """The version a libtorch folder says it has, without its local part ("+cu130")."""
    for name in ("build-version", "version.py"):
        path = folder / name
        if path.is_file():
            text = path.read_text()
            if name == "version.py":
                text = next((line.split("'")[1] for line in text.splitlines()
                             if line.startswith("__version__")), "unknown")
            return text.strip().split("+")[0]
    return None


def existing():
    """Uses the libtorch that the environment names; True when there is one."""
    if os.environ.get("LIBTORCH_USE_PYTORCH"):
        python = "python" if os.environ.get("VIRTUAL_ENV") else "python3"
        answer = subprocess.run([python, "-c", "import torch; print(torch.__version__)"],
                                capture_output=True, text=True)
        if answer.returncode:
            fail(f"LIBTORCH_USE_PYTORCH is set, but '{python} -c \"import torch\"' fails: install "
                 f"torch=={VERSION} there, or unset LIBTORCH_USE_PYTORCH to let this script fetch "
                 "it")
        found, where = answer.stdout.strip().split("+")[0], f"the PyTorch of {python}"
    elif os.environ.get("LIBTORCH"):
        folder = Path(os.environ["LIBTORCH"])
        if not (folder / "lib" / "libtorch_cpu.so").exists():
            fail(f"LIBTORCH={folder} has no lib/libtorch_cpu.so: point it at the folder that holds "
                 "'lib' and 'include', or unset it to let this script fetch libtorch")
        found, where = version_of(folder), f"LIBTORCH={folder}"
        if found is None:
            fail(f"{where} does not say its version (no build-version or version.py): write "
                 f"'{VERSION}' to {folder}/build-version if you know that it is libtorch {VERSION}")
    else:
        return False
    if found != VERSION:
        fail(f"{where} is version {found}, gpipe is built on {VERSION}: install torch=={VERSION} "
             "there, or unset the variable to let this script fetch it")
    print(f"setup: using {where} ({found})")
    return True


def resolver(home):
    """A private pip, new enough to resolve a wheel to its address without downloading it.

    Its code runs before anything else is checked, so the host's pip is told which file it must be.
    """
    folder = home / f"{PIP.replace('==', '-')}-{PIP_HASH[:12]}"
    if not folder.exists():
        aside = Path(tempfile.mkdtemp(dir=home))
        try:
            wanted = aside.with_suffix(".txt")
            wanted.write_text(f"{PIP} --hash=sha256:{PIP_HASH}\n")
            run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps",
                 "--only-binary=:all:", "--require-hashes", "--target", str(aside),
                 "--requirement", str(wanted)])
            aside.chmod(0o755)
            aside.rename(folder)
        finally:
            wanted.unlink(missing_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def run(command, **extra):
    environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_ROOT_USER_ACTION="ignore")
    environment.update(extra.pop("env", {}))
    try:
        return subprocess.run(command, check=True, text=True, env=environment, **extra)
    except FileNotFoundError:
        fail(f"cannot run {command[0]}: install Python 3 with pip "
             "(Debian: apt install python3-pip)")
    except subprocess.CalledProcessError as error:
        fail(f"'{' '.join(map(str, command[:6]))} ...' failed ({error.returncode}): see its "
             "message above; it needs pip and a reachable package index")


def resolve(pip, requirements):
    """(file name, address) of each requirement, from pip's index."""
    report = run([sys.executable, "-m", "pip", "install", "--quiet", "--dry-run",
                  "--ignore-installed", "--no-deps", "--target", str(pip / "never"), *TARGET,
                  "--report", "-", *requirements],
                 stdout=subprocess.PIPE, env={"PYTHONPATH": str(pip)}).stdout
    urls = [item["download_info"]["url"] for item in json.loads(report)["install"]]
    return [(url.split("#")[0].rsplit("/", 1)[1], url) for url in urls]


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def download(url, path, wanted):
    """Fetches one file, continuing a partial one, and checks its hash."""
    if path.exists() and sha256(path) == wanted:
        return
    part = path.with_suffix(".part")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            fetch_rest(url, part)
            break
        except (urllib.error.URLError, OSError, ConnectionError) as error:
            if attempt == ATTEMPTS:
                fail(f"{path.name}: {error}; what has arrived is kept, run the command again to "
                     "resume")
            print(f"\nsetup: {path.name}: {error}; attempt {attempt} of {ATTEMPTS}, resuming",
                  flush=True)
            time.sleep(attempt)
    if sha256(part) != wanted:
        part.unlink()
        fail(f"{path.name} does not have the pinned SHA-256 {wanted}: it was removed, run the "
             "command again; if it fails again, the index serves another file than the one gpipe "
             "was tested with")
    part.rename(path)


def fetch_rest(url, part):
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=STALL_S)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is left to fetch
            return
        raise
    with response, open(part, "ab" if response.status == 206 else "wb") as file:
        done = start if response.status == 206 else 0
        total = done + int(response.headers.get("Content-Length", 0))
        shown = 0.0
        while block := response.read(1 << 20):
            file.write(block)
            done += len(block)
            if sys.stderr.isatty() and time.monotonic() - shown > 0.5:
                shown = time.monotonic()
                print(f"\r{part.stem}: {done >> 20} of {total >> 20} MiB", end="", file=sys.stderr)
    if done < total:
        raise ConnectionError(f"the connection ended after {done >> 20} of {total >> 20} MiB")


def install(variant, home, destination):
    """Downloads, unpacks aside, and renames into place."""
    downloads = home / "downloads"
    downloads.mkdir(exist_ok=True)
    pip = resolver(home)
    pinned = {name.split("==")[0].replace("-", "_"): hash for name, hash in WHEELS.items()}
    files = []
    for name, url in resolve(pip, list(WHEELS)):
        print(f"setup: fetching {name}", flush=True)
        download(url, downloads / name, pinned[name.split("-")[0]])
        files.append(downloads / name)
    print(f"setup: unpacking into {destination}", flush=True)
    aside = Path(tempfile.mkdtemp(prefix=destination.name + ".", dir=home))
    try:
        if variant == "cuda":
            # torch's metadata pins every one of its CUDA dependencies to one version.
            run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(aside), *TARGET,
                 *map(str, files), *CUDA_HEADERS], env={"PYTHONPATH": str(pip)})
        else:
            for file in files:
                with zipfile.ZipFile(file) as wheel:
                    wheel.extractall(aside, [n for n in wheel.namelist() if wanted_on_cpu(n)])
        (aside / "torch" / "build-version").write_text(VERSION + "\n")
        aside.chmod(0o755)
        aside.rename(destination)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(downloads, ignore_errors=True)


def wanted_on_cpu(name):
    """libtorch without its CUDA libraries and without the Python package around it."""
    if name.startswith("nvidia/"):
        return ".so" in name
    if name.startswith("torch/include/"):
        return True
    library = name.startswith("torch/lib/") and ".so" in name
    return library and "cuda" not in name and "nvshmem" not in name and "python" not in name


def stored(variant):
    """The folder of the pinned set "cpu" or "cuda", fetched if need be. No clone's link changes."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        fail(f"no libtorch is pinned for {platform.system()} {platform.machine()}: install "
             f"libtorch {VERSION} yourself and set LIBTORCH to its folder")
    home = Path(os.environ.get("GPIPE_HOME") or Path.home() / ".cache" / "gpipe")
    home = home.expanduser().absolute()
    home.mkdir(parents=True, exist_ok=True)
    destination = home / f"libtorch-{VERSION}-{variant}"
    with open(home / "setup.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: another set-up is running, waiting for it to finish", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not destination.exists():
            install(variant, home, destination)
    return destination / "torch"


def main():
    if existing():
        return
    link = ROOT / ".libtorch"
    variant = os.environ.get("GPIPE_LIBTORCH")
    if variant is None and link.is_symlink() and version_of(link) == VERSION:
        return  # whichever set was chosen before stays
    variant = variant or "cpu"
    if variant not in ("cpu", "cuda"):
        fail(f"GPIPE_LIBTORCH={variant}: use cpu or cuda")
    torch = stored(variant)
    if not link.is_symlink() or Path(os.readlink(link)) != torch:
        replaced = link.is_symlink()
        link.unlink(missing_ok=True)
        link.symlink_to(torch)
        if replaced:  # cargo does not see that the same name now means another folder
            for profile in ([], ["--release"]):
                subprocess.run(["cargo", "clean", *profile, "-p", "torch-sys",
                                "-p", "gpipe-bridge"], cwd=ROOT)
        print(f"setup: .libtorch -> {torch}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted; what has arrived is kept, run the command again to resume")
