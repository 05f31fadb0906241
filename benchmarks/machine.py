"""The machine that a run is of, and the name of its results folder.

A folder is of one processor by vendor, family and model. A marketing name is not enough: virtual
machines report the same name for processors whose matrix products differ in speed by two.
"""

import dataclasses
import os
import platform
import re
from pathlib import Path
from typing import Optional

CPUINFO = Path("/proc/cpuinfo")
VENDORS = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}
# ARM processors have no `vendor_id`. They report who implemented them, and which part it is.
IMPLEMENTERS = {
    "0x41": "arm",
    "0x4e": "nvidia",
    "0x51": "qualcomm",
    "0x61": "apple",
    "0xc0": "ampere",
}


def slug_of(text):
    """Lower-case letters, digits and single hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


@dataclasses.dataclass(frozen=True)
class Machine:
    """A processor and the number of its cores. None stands for what is not known."""

    # The marketing name, or the architecture where there is none.
    name: Optional[str] = None
    vendor: Optional[str] = None
    family: Optional[str] = None
    model: Optional[str] = None
    cores: Optional[int] = None
    gpu: Optional[str] = None

    def slug(self):
        """The name of the machine's results folder."""
        if self.vendor and self.model:
            family = f"-family-{self.family}" if self.family else ""
            processor = f"{self.vendor}{family}-model-{self.model}"
        elif self.name:
            processor = f"{self.name}-unknown-model"
        else:
            processor = "unknown-processor"
        cores = "unknown" if self.cores is None else self.cores
        return slug_of(f"{processor}-{cores}-cores-{self.gpu or ''}")

    def title(self):
        """The machine in words."""
        if self.vendor and self.model:
            family = f"family {self.family}, " if self.family else ""
            processor = f"{self.name} ({family}model {self.model})"
        elif self.name:
            processor = f"{self.name} (model not recorded)"
        else:
            processor = "Processor not recorded"
        cores = "an unknown number of" if self.cores is None else self.cores
        return f"{processor}, {cores} cores" + (f", {self.gpu}" if self.gpu else "")


def of_cpuinfo(text, cores, architecture):
    """The machine that the text of /proc/cpuinfo describes by its first processor."""
    lines = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    told = {key.strip(): value.strip() for key, value in lines}
    vendor, model = told.get("vendor_id"), told.get("model") or told.get("CPU part")
    if vendor:
        vendor = VENDORS.get(vendor, slug_of(vendor))
    elif implementer := told.get("CPU implementer"):
        vendor = IMPLEMENTERS.get(implementer, f"implementer-{implementer}")
    return Machine(
        name=told.get("model name") or architecture,
        vendor=vendor or None,
        family=told.get("cpu family"),
        model=model or None,
        cores=cores,
    )


def here():
    """The machine that this program runs on."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    return of_cpuinfo(text, os.cpu_count(), platform.machine())
