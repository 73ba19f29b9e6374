"""A hook is taken apart into its tensors and all else, and put together again, here or in another process."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
import torch

from steering.accel.tensors import (
    Bound,
    Foreign,
    Leaf,
    TreeSpec,
    as_json,
    fixed_sizes,
    kinds_of,
    of_json,
    put_together,
    taken_apart,
)


class Tables(NamedTuple):
    one: torch.Tensor
    two: torch.Tensor


class Held:
    def __init__(self, rows: int, depth: int = 2):
        shared = torch.zeros(rows, 3)
        self.depth, self.nothing, self.device = depth, None, torch.device("cpu")
        self.tables = {torch.device("cpu"): Tables(shared, torch.ones(rows))}
        self.again, self.kept = shared, [torch.arange(rows)]


def tree_spec_of(value: Any, other: Any = None) -> TreeSpec:
    """Return the spec of a value, with variable tensor sizes where those of the other value differ."""
    shape, tensors = taken_apart(value)
    return TreeSpec(shape, fixed_sizes(tensors, tensors if other is None else taken_apart(other)[1]))


def test_a_value_is_rebuilt_from_its_parts() -> None:
    value = Held(4)
    shape, tensors = taken_apart([value])
    assert len(tensors) == 3  # one of them is held twice
    (rebuilt,) = put_together(shape.tree, tensors)
    assert type(rebuilt) is Held
    assert rebuilt.again is value.again is rebuilt.tables[torch.device("cpu")].one
    assert (rebuilt.depth, rebuilt.nothing, rebuilt.device, rebuilt.kept) == (2, None, torch.device("cpu"), value.kept)
    assert rebuilt.kept is not value.kept


@pytest.mark.parametrize(
    ("other", "alike"),
    [(Held(7), True), (Held(4, depth=3), False), (torch.zeros(4), False)],
)
def test_patterns_ignore_the_contents_of_tensors(other: Any, alike: bool) -> None:
    first, two = taken_apart(Held(4))[0], taken_apart(other)[0]
    assert (first == two) is alike
    assert (first.text() == two.text()) is alike


def test_patterns_differ_by_dtype_and_number_of_axes() -> None:
    assert taken_apart([torch.zeros(2)])[0] != taken_apart([torch.zeros(2).half()])[0]
    assert taken_apart([torch.zeros(2)])[0] != taken_apart([torch.zeros(2, 1)])[0]


def test_a_tree_is_read_from_json_if_its_classes_are_known() -> None:
    tree = taken_apart([Held(4), {"a": (1, 0.5, torch.float16)}])[0].tree
    words = json.loads(json.dumps(as_json(tree)))
    assert of_json(words, kinds_of(tree)) == tree
    with pytest.raises(KeyError):
        of_json(words, [Tables])


def test_values_other_than_tensors_and_constants_are_refused() -> None:
    with pytest.raises(Foreign):
        taken_apart([open])
    assert put_together(Leaf(0), [3]) == 3  # type: ignore[list-item]


def test_a_tree_spec_reads_only_values_of_its_pattern() -> None:
    _, tensors = taken_apart([Held(4)])
    tree_spec, fresh = tree_spec_of([Held(4)], [Held(5)]), [Held(7)]
    read_tensors, expected = tree_spec.tensors(fresh), taken_apart(fresh)[1]
    assert read_tensors is not None
    assert [tensor.data_ptr() for tensor in read_tensors] == [tensor.data_ptr() for tensor in expected]
    assert len(read_tensors) == len(tensors)
    twice = Held(4)
    twice.again = torch.zeros(4, 3)  # no longer the tensor that it was
    more = Held(4)
    more.more = 1  # type: ignore[attr-defined]
    half = Held(4)
    half.kept = [torch.arange(4).half()]
    for unlike in ([Held(4, depth=3)], [Held(4), Held(4)], [twice], [more], [half], [torch.zeros(4)], Held(4)):
        assert tree_spec.tensors(unlike) is None


def test_a_tree_spec_refuses_tensors_of_other_sizes() -> None:
    """Compiled code would read what lies behind them."""
    tree_spec, wide = tree_spec_of([Held(4)], [Held(5)]), Held(4)
    wide.again = torch.zeros(4, 5)
    wide.tables = {torch.device("cpu"): Tables(wide.again, torch.ones(4))}
    assert taken_apart([wide])[0] == taken_apart([Held(4)])[0]
    assert tree_spec.tensors([wide]) is None
    assert tree_spec_of([Held(4)]).tensors([Held(7)]) is None
    assert tree_spec_of([Held(4)], [wide]).tensors([wide]) is not None


def test_a_tree_spec_knows_which_parts_changed() -> None:
    values = [Held(4)]
    shape, tensors = taken_apart(values)
    values[0].kept, values[0].depth = [], 2
    values[0].made = torch.ones(1)  # type: ignore[attr-defined]
    pattern_after, _ = taken_apart(values)
    changes = TreeSpec(shape, fixed_sizes(tensors, tensors)).changes(pattern_after.tree)
    assert [(number, name) for number, name, _ in changes] == [(0, "kept"), (0, "made")]
    assert put_together(changes[0][2], tensors) == []


def test_reset_restores_changed_objects() -> None:
    values = [Held(4)]
    _, tensors = taken_apart(values)
    bound, tree_spec = Bound(values), tree_spec_of(values)
    assert bound.tensors(tree_spec) == tensors
    tree_spec.change(values, [(0, "made", Leaf(0)), (0, "depth", 7)], tensors)
    assert (bound.tensors(tree_spec), values[0].depth) == (tensors, 7)
    assert tree_spec.tensors(values) is None
    assert bound.tensors(tree_spec_of([Held(4)])) == tensors
    assert bound.tensors(tree_spec_of([1])) is None
