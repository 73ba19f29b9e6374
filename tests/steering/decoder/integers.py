"""Tests of products of integers need a processor that adds them exactly."""

import pytest
import torch

from steering.decoder.int8 import is_exact

NEEDS_VNNI = pytest.mark.skipif(not is_exact(torch.device("cpu")), reason="this CPU has no VNNI")
