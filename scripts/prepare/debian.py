"""Files out of Debian packages. The system's own apt fetches them, and they are unpacked without
root. Nothing is installed.

fonts.py and catalogues.py use this module. It works on Debian and what descends from it (Ubuntu,
Mint), with apt's mirrors and settings. apt checks every package against the signed lists that
`apt-get update` leaves. Only the standard library is needed.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

BYTES_MAX = 2 << 30  # of all files that are kept
RECORD = "packages.txt"  # what was asked for: the folder is made anew when that changes


class Failed(Exception):
    """What went wrong, and the remedy."""


def fetch(packages, folder, keep, fewest=1):
    """Makes `folder` hold, for each package, PACKAGE/PATH of the regular files whose path `keep`
    says True to, and of its copyright file. `keep` is called with a PurePosixPath such as
    usr/share/fonts/truetype/lato/Lato-Bold.ttf.

    The folder is written aside and renamed, so that a half-made one is never taken for a whole one.
    A whole one of the same packages is left as it is. A package that this release does not have is
    skipped and named, unless fewer than `fewest` remain. Raises Failed.
    """
    packages, folder = sorted(set(packages)), Path(folder)
    wanted = "".join(package + "\n" for package in packages)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / (folder.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = folder / RECORD
        if record.is_file() and record.read_text() == wanted:
            return
        if folder.exists() and not record.is_file():
            raise Failed(f"{folder} was not made by this script: move it away first")
        aside = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
        try:
            new = aside / "new"
            new.mkdir()
            make(packages, aside / "packages", new, keep, fewest)
            (new / RECORD).write_text(wanted)
            if folder.exists():
                folder.rename(aside / "old")
            new.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def make(packages, downloads, folder, keep, fewest):
    for command in ("apt-get", "apt-cache", "dpkg-deb"):
        if not shutil.which(command):
            raise Failed(f"there is no {command} here: this needs Debian, Ubuntu or the like; "
                         "elsewhere install what these packages have by the system's own means: "
                         f"{', '.join(packages)}")
    found = available(packages)
    missing = [package for package in packages if package not in found]
    if not found:
        raise Failed("apt knows none of the packages: fetch its lists with `sudo apt-get update`, "
                     "then run this again")
    if len(found) < fewest:
        raise Failed(f"this release has {len(found)} of {len(packages)} packages and {fewest} are "
                     "needed; fetch newer lists with `sudo apt-get update`. Not there: "
                     f"{', '.join(missing)}")
    if missing:
        print(f"not in this release, skipped: {', '.join(missing)}", file=sys.stderr)
    print(f"fetching {len(found)} packages", file=sys.stderr, flush=True)
    downloads.mkdir()
    # As root, apt would otherwise complain that its own user cannot write here.
    run(["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", *found], cwd=downloads)
    left = BYTES_MAX
    for archive in sorted(downloads.glob("*.deb")):
        package = archive.name.split("_")[0]
        left -= unpack(archive, package, folder / package, keep, left)
        archive.unlink()
    if empty := [package for package in found if not (folder / package).is_dir()]:
        raise Failed(f"apt brought no files of {', '.join(empty)}: run this again, and report it "
                     "if it persists")


def available(packages):
    """Those of the packages that apt can download."""
    found, package = [], None
    for line in run(["apt-cache", "policy", *packages], stdout=subprocess.PIPE).stdout.splitlines():
        if not line.startswith(" "):
            package = line.rstrip(":")
        elif line.strip().startswith("Candidate:") and "(none)" not in line:
            found.append(package)
    return [package for package in packages if package in found]


def unpack(archive, package, folder, keep, bytes_max):
    """Writes the regular files that are kept, and returns their bytes. Links are never made, so
    none is followed."""
    copyright = PurePosixPath(f"usr/share/doc/{package}/copyright")
    written = 0
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(archive)],
                          stdout=subprocess.PIPE) as process:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as files:
                for file in files:
                    path = PurePosixPath(file.name)
                    if path.is_absolute() or ".." in path.parts:
                        raise Failed(f"{archive.name} has a file outside of its folder, "
                                     f"{file.name}: do not use it")
                    if not file.isreg() or not (path == copyright or keep(path)):
                        continue
                    written += file.size
                    if written > bytes_max:
                        raise Failed(f"the packages have more than {BYTES_MAX >> 20} MiB of files: "
                                     "name fewer")
                    target = folder / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with files.extractfile(file) as source, open(target, "wb") as out:
                        shutil.copyfileobj(source, out)
        except tarfile.TarError as error:
            raise Failed(f"{archive.name} is damaged ({error}): run this again") from error
        finally:
            process.stdout.close()
    if process.returncode:
        raise Failed(f"dpkg-deb cannot read {archive.name}: see its message above, and run this "
                     "again")
    return written


def run(command, **extra):
    try:
        return subprocess.run(command, check=True, text=True, env=dict(os.environ, LC_ALL="C"),
                              **extra)
    except subprocess.CalledProcessError as error:
        raise Failed(f"`{' '.join(command[:6])} ...` failed ({error.returncode}): see its message "
                     "above; try `sudo apt-get update`, and check the network") from None
