"""Tensors that are kept have one form, whichever path made them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from steering.form import MixedForms, OneForm

FIRST = torch.zeros(4, 3, 2)


@pytest.mark.parametrize(
    "other",
    [
        lambda: [FIRST.double()],
        lambda: [torch.zeros(4, 3)],
        lambda: [torch.zeros(4, 3, 1)],
        lambda: [torch.zeros(3, 2, 4).permute(2, 0, 1)],
        lambda: [FIRST.to("meta")],
        lambda: [FIRST, FIRST],
        lambda: [],
    ],
)
def test_what_differs_from_the_first_is_refused(other: Callable[[], list[torch.Tensor]]) -> None:
    form = OneForm()
    form.check("rows", [FIRST])
    with pytest.raises(MixedForms, match="What is kept of rows"):
        form.check("rows", other())
    form.check("others", other())


def test_lengths_may_differ_and_sizes_behind_them_where_that_is_said() -> None:
    form = OneForm()
    for count in (4, 1, 0):
        form.check("rows", [torch.zeros(count, 3, 2)])
        form.check("positions", [torch.zeros(count, count)], varies=True)
    with pytest.raises(MixedForms):
        form.check("positions", [torch.zeros(4, 1, dtype=torch.int64)], varies=True)
