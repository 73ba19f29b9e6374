"""A compiled library that fails says why, and ends no process."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from steering.cpu.packages.library import Library

FAILS = """
#include <stddef.h>
typedef void* handle;
int AOTInductorModelContainerCreateWithDevice(handle* made, size_t n, const char* device, const char* folder) { return 0; }
int AOTInductorModelContainerDelete(handle made) { return 0; }
int AOTInductorModelContainerGetNumOutputs(handle made, size_t* count) { *count = 1; return 0; }
int AOTInductorModelContainerGetNumConstants(handle made, size_t* count) { *count = 0; return 0; }
int AOTInductorModelContainerUpdateUserManagedConstantBufferPairs() { return 0; }
int AOTInductorModelContainerRun() { return 1; }
int AOTInductorGetLastError(const char** message) { *message = MESSAGE; return 0; }
"""
"""A model with torch's compiled interface, as declared in aoti_runtime/interface.h, that always fails."""


def failing(folder: Path, message: str) -> Library:
    (folder / "fails.c").write_text(FAILS)
    library = folder / "fails.so"
    command = ["gcc", "-shared", "-fPIC", f'-DMESSAGE="{message}"', "-o", str(library), str(folder / "fails.c")]
    subprocess.run(command, check=True, capture_output=True)
    return Library(library, {})


@pytest.mark.parametrize(
    ("message", "expected"), [("a matrix is too wide\\nmore", "a matrix is too wide"), ("", "gives no reason")]
)
def test_an_error_of_torch_is_raised_with_its_message(message: str, expected: str, tmp_path: Path) -> None:
    library = failing(tmp_path, message)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{expected}$"):
            library([torch.ones(4, 3)])


def test_torchs_interface_is_as_the_library_assumes() -> None:
    headers = [Path(folder) / "torch/csrc/inductor/aoti_runtime/interface.h" for folder in include_paths()]
    (header,) = [path for path in headers if path.exists()]
    assert "AOTInductorGetLastError(const char** error_msg);" in header.read_text()
