"""Settings out of range."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from steering import RequestError


def check_refused(make: Callable[[], object], param: str) -> None:
    """Check that invalid settings name the field that is out of range."""
    with pytest.raises(RequestError) as refused:
        make()
    assert refused.value.param == param
