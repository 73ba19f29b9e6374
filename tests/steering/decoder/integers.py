"""What tests of products of integers need."""

import pytest
import torch

from steering.decoder.int8 import is_exact

NEEDS_VNNI = pytest.mark.skipif(not is_exact(torch.device("cpu")), reason="this CPU has no VNNI")
