"""Memory of many decoding threads returns to the system, and the user's allocator settings stay."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from server.startup.allocator import ARENAS, KEPT, MAPPED, parameters

ROOT = Path(__file__).parents[3]
ARENA_MAX, MMAP_THRESHOLD, TRIM_THRESHOLD = -8, -3, -1
"""Parameter numbers of malloc.h."""

BEGINS = {
    "command": """
import contextlib
import server.cli
with contextlib.suppress(SystemExit):
    server.cli.main(["serve", "--help"])
def load(data):  # as the server does, without what it imports
    return Image.open(io.BytesIO(data)).convert("RGB")
""",
    "worker": """
import base64
import server.engine.runtime, server.serving
from server.images.load import ImageLoader
from server.settings import Settings
server.engine.runtime.Runtime.start = lambda self: None
server.serving.worker_app(Settings(journal="off"))
def load(data):
    return ImageLoader(Settings()).load("data:image/png;base64," + base64.b64encode(data).decode(), "image")
""",
}

DECODING = """
import io, resource, threading
from pathlib import Path
from PIL import Image

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 2**20

def decode():
    kept.append(load(file.getvalue()).resize((84, 84)))

kept = []
file = io.BytesIO()
Image.new("RGB", (3500, 3500)).save(file, "PNG", compress_level=1)
before = resident()
threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(resident() - before)
"""
LIMIT = 150
"""MB; measured are 20 or less, and 500 where nothing is set."""


def grown(begin: str, **environ: str) -> int:
    """MB that a process has more when 16 threads have each decoded a picture of 12 megapixels."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    code = f"{BEGINS[begin]}{DECODING}"
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean | environ, capture_output=True, text=True, check=True
    )
    return int(said.stdout.splitlines()[-1])


gnu = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not GNU's")


@gnu
@pytest.mark.slow
@pytest.mark.parametrize("begin", BEGINS)
def test_what_pictures_took_in_many_threads_is_given_back(begin: str) -> None:
    assert grown(begin) < LIMIT


@gnu
@pytest.mark.slow
def test_a_user_who_wants_arenas_gets_them() -> None:
    assert grown("command", MALLOC_ARENA_MAX="64", MALLOC_MMAP_THRESHOLD_=str(32 * 2**20)) > LIMIT


@pytest.mark.parametrize(
    ("environ", "left"),
    [
        ({}, {ARENA_MAX: ARENAS, MMAP_THRESHOLD: MAPPED, TRIM_THRESHOLD: KEPT}),
        ({"MALLOC_TOP_PAD_": "1"}, {ARENA_MAX: ARENAS, MMAP_THRESHOLD: MAPPED, TRIM_THRESHOLD: KEPT}),
        ({"MALLOC_ARENA_MAX": "8"}, {MMAP_THRESHOLD: MAPPED, TRIM_THRESHOLD: KEPT}),
        ({"MALLOC_MMAP_THRESHOLD_": "131072"}, {ARENA_MAX: ARENAS, TRIM_THRESHOLD: KEPT}),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.arena_max=8:glibc.rtld.nns=2"},
            {MMAP_THRESHOLD: MAPPED, TRIM_THRESHOLD: KEPT},
        ),
        ({"MALLOC_TRIM_THRESHOLD_": "1"}, {ARENA_MAX: ARENAS, MMAP_THRESHOLD: MAPPED}),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1", "MALLOC_ARENA_TEST": "2"}, {TRIM_THRESHOLD: KEPT}),
    ],
)
def test_a_variable_of_the_user_wins(environ: dict[str, str], left: dict[int, int]) -> None:
    assert parameters(environ) == left
