"""Compile processes: they end with the process that wants them, and work wherever folders lie."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
from torch._inductor.cpp_builder import BuildOptionsBase, CppBuilder

from steering.cpu.building import quote_library_folders
from steering.cpu.compiling import _kill, without_spaces
from tests.waiting import is_alive, wait_for


def test_grandchildren_are_killed_after_their_parent_has_ended() -> None:
    process = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!"], stdout=subprocess.PIPE, text=True, process_group=0)
    with process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # as nobody has asked yet what it ended with
        assert is_alive(grandchild)
        _kill(process)
    wait_for(lambda: not is_alive(grandchild))


def test_torchs_own_commands_compile_and_link_where_paths_have_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, room = tmp_path / "the libraries", tmp_path / "a room"
    for place in (folder, room):
        place.mkdir()
    source, archive = folder / "seven.c", folder / "libseven.a"
    source.write_text("int seven(void) { return 7; }")
    subprocess.run(["gcc", "-fPIC", "-c", source, "-o", folder / "seven.o"], check=True)
    subprocess.run(["ar", "rcs", archive, folder / "seven.o"], check=True)
    (room / "eight.cpp").write_text('extern "C" int seven(); extern "C" int eight() { return seven() + 1; }')
    monkeypatch.setattr(BuildOptionsBase, "get_libraries_dirs", BuildOptionsBase.get_libraries_dirs)  # put back later
    quote_library_folders()
    with without_spaces(room) as place:
        options = BuildOptionsBase(
            compiler="g++", cflags=["fPIC", "shared"], libraries_dirs=[str(folder)], libraries=["seven"]
        )
        CppBuilder("eight", str(place / "eight.cpp"), options, output_dir=str(place)).build()
    assert ctypes.CDLL(str(room / "eight.so")).eight() == 8


def test_a_plain_path_stays_as_it_is(tmp_path: Path) -> None:
    with without_spaces(tmp_path) as place:
        assert place == tmp_path
