"""Triton's kernels run in its interpreter here, which has to be said before torch imports it."""

import os

os.environ["TRITON_INTERPRET"] = "1"
