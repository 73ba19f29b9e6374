"""The tests that `make check` chooses for a change."""

from __future__ import annotations

import pytest

from tests import concerned
from tests.concerned import changed_files, chosen, imports, ranks
from tests.durations import Cost, read_table, write_table


def test_the_nearest_tests_come_first() -> None:
    taken, _ = chosen(["steering/vectors/info.py"], 30)
    assert "tests/steering/vectors/test_info.py" in taken
    rank = ranks(["steering/vectors/info.py"])
    assert rank["tests/steering/vectors/test_info.py"] == 1
    assert rank["tests/server/api/test_chat.py"] > 1, "which reaches it by its server"


def test_a_changed_test_is_run_whatever_it_costs_and_others_that_fit() -> None:
    assert {*chosen(["tests/server/api/test_chat.py"], 0.0)[0]} == {
        "tests/server/api/test_chat.py",
        "tests/test_house.py",
    }
    assert len(chosen(["server/engine/served.py"], 20.0)[0]) < len(chosen(["server/engine/served.py"], 200.0)[0])


def test_files_that_are_no_modules_concern_those_that_name_them_or_mirror_their_folder() -> None:
    assert {"tests/server/test_toys.py", "tests/test_docs.py"} <= ranks(["docs/house.md"]).keys()
    assert "tests/server/web/test_page.py" in ranks(["server/web/anything.html"])
    assert ranks(["nowhere/noth" + "ing.txt"]) == {}


def test_a_conftest_concerns_its_folder() -> None:
    assert "tests/conftest.py" in imports("tests/steering/vectors/test_arithmetic.py")
    rank = ranks(["tests/server/journal/conftest.py"])
    assert rank["tests/server/journal/test_journal.py"] == 1
    assert rank.get("tests/steering/vectors/test_info.py", 9) > 1


def test_what_a_command_imports_by_its_name_is_followed() -> None:
    assert "probes/vsr/task.py" in imports("probes/vsr/command.py")
    assert "probes/mmsap/run.py" in imports("probes/mmsap/command.py")
    assert "tests/probes/image_qa/test_run.py" in ranks(["probes/vsr/task.py"]), "which runs the command"


def test_what_changed_is_what_git_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def git(*words: str) -> list[str]:
        asked.append(words)
        known = {"rev-parse": ["f00"], "merge-base": ["ba5e"], "diff": ["b", "a"], "ls-files": ["new", "a"]}
        return known[words[0]]

    monkeypatch.setattr(concerned, "_git", git)
    assert changed_files(None) == ["a", "b", "new"]
    assert ("diff", "--name-only", "ba5e") in asked
    assert changed_files("HEAD~3") == ["a", "b", "new"]
    assert ("diff", "--name-only", "HEAD~3") in asked


def test_the_table_of_costs_is_read_as_it_is_written() -> None:
    costs = {"tests/a/test_b.py": Cost(3, 12.3, 4.0), "tests": Cost(0, 2.0, 2.0), "tests/test_c.py": Cost(1, 0.5, 0.0)}
    written = write_table(costs)
    assert read_table(written) == costs
    assert "15 CPU seconds for 4 tests" in written
    assert written.index("test_b") < written.index("test_c"), "the dearest first"
