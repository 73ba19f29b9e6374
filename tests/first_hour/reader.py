"""Somebody who follows the pages command by command, on a small copy of everything that is large."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from demo.world.faithfulness import existence_samples
from probes.harness import bootstrap
from probes.harness.options import Defaults, ModelOptions
from probes.reporting import report
from server import cli, serving
from steering import Engine
from tests.first_hour.pages import ROOT, Block, blocks, called, commands, is_helmsight
from tests.server.fakes import checkpoint

_SVG = report._svg
NUMBER = re.compile(r"-?\d+\.\d+")
SMALL = {
    "probe": ("--samples", "6", "--calibration-samples", "2", "--strengths", "0.5", "--states", "0", "--layers", "3"),
    "eval mc2": ("--limit", "1", "--severity", "0.5"),
    "eval sage": ("--limit", "1", "--pairs", "1", "--conditions", "+ See"),
    "eval stme": ("--limit", "3", "--shuffles", "1"),
    "eval spd-faith": ("--limit", "1", "--several", "1", "--conditions", "SAGE"),
    "eval mm-sap": ("--limit", "3", "--runs", "1"),
    "eval faithfulness": ("--limit", "2"),
    "eval alarm": ("--limit", "56", "--noise", "150"),
    "eval guard": ("--limit", "12"),
    "eval pope": ("--limit", "2", "--conditions", "SAGE"),
    "eval mme": ("--limit", "1", "--conditions", "SAGE"),
    "eval chair": ("--limit", "1", "--conditions", "SAGE"),
    "vectors build": ("--calibration-samples", "2", "--strengths", "0.5", "--layers", "3"),
}
"""Options that make a command small; the last of two counts."""
SHORTER = ((r"--ablate( [a-z]+)+", "--ablate latency"), (r"--severity( [\d.]+)+", ""))
"""Lists of which one word is enough."""
SWITCHES = ("--quiet", "--force", "--replace")
"""Switches that are added to commands.

No direction is reliable from so few samples, and README and docs build the same vector.
"""
NOT_HERE = {
    "make serve": "the fixture `server` stands for it; `make test-long` runs it",
    "make test": "it is what runs; `make test-long` runs it",
    ". .venv/bin/activate": "the suite's environment is active; `make test-long` uses that of `make serve`",
    "python3 -m venv /opt/helmsight": "it installs, as `make test-long` does",
    "/opt/helmsight/bin/pip": "it installs, as `make test-long` does",
    "helmsight eval spd-faith --data": "its data are not here, nor the judge; tests/probes/spd has both, scripted",
    "helmsight demo train": "it takes a quarter of an hour; tests/demo/test_organisms.py trains some steps",
    "helmsight demo organisms": "it measures what was trained; tests/demo/test_organisms_measured.py",
    "OPENAI_API_KEY=none python -m lmms_eval": "lmms-eval is not installed; tests/server/requests asks as it does",
}
"""Beginnings of commands that are not run, and why."""
NO_PROGRAMS = {
    ("README.md", "js"): "a test of its own, which is skipped without Node",
    ("docs/study.md", "json"): "the lines of `manners.jsonl`, and a row of MC2's file",
    ("docs/operate.md", "yaml"): "what Prometheus is to be told",
    ("docs/operate.md", "toml"): "a settings file, which tests/server/requests reads",
}


class Reader:
    """A reader with a home and a working folder of their own, beside a running server.

    The folder holds the files that the pages take for granted. `python` is the interpreter of the environment in which
    Helmsight is installed.
    """

    def __init__(self, home: Path, folder: Path, url: str, python: Path = Path(sys.executable)):
        self.folder, self.url, self.python = folder, url, python
        self.left_out: set[str] = set()
        self.engines: dict[ModelOptions, Engine] = {}
        self._plots: dict[tuple[tuple[str, ...], ...], bytes] = {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.environ = {
            "HOME": str(home), "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
            "NO_COLOR": "1", "HELMSIGHT_PORT": str(port), "HELMSIGHT_JOURNAL": str(home / ".helmsight" / "journal.db"),
        }  # fmt: skip
        (home / ".curlrc").write_text("fail-with-body\n")  # a refusal is to end a block

    def follow(self, name: str) -> int:
        """Run a page's blocks in order, compare with the outputs that it shows behind some; how many were compared."""
        printed, compared = "", 0
        for block in blocks(ROOT / name):
            if block.language in ("text", ""):
                assert alike(printed, block.text), f"{name} shows\n{block.text}and what is printed is\n{printed}"
                compared += 1
            elif block.language == "sh":
                printed = "".join(map(self.command, commands(block.text)))
            elif block.language == "python":
                printed = self.program(block)
            else:
                assert (name, block.language) in NO_PROGRAMS
        return compared

    def command(self, text: str) -> str:
        """Return the output of a shell command, whose options are made small."""
        if found := [one for one in NOT_HERE if text.startswith(one)]:
            self.left_out.update(found)
            return ""
        words = shlex.split(text, comments=True)
        if not is_helmsight(words):
            return self.program(Block("sh", text))
        path, command, own = called(words[1:])
        command.make_context(text, list(own))  # also what is made small below is allowed as it stands
        for long, short in SHORTER:
            text = re.sub(long, short, text)
        words = shlex.split(self._here(text), comments=True)[1:]
        switches = [name for one in command.params for name in one.opts if name in SWITCHES]
        return self.helmsight([*words, *SMALL.get(" ".join(path), ()), *switches])

    def helmsight(self, words: Sequence[str]) -> str:
        """Return the output of `helmsight`, run in this process, which has loaded torch already.

        `helmsight reproduce` runs its parts in the same way: a model that the last command loaded is not loaded again,
        except where it was calibrated. `serve` runs up to the point where it listens.
        """
        served: list[Any] = []
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            patch.chdir(self.folder)
            for name, value in self.environ.items():
                patch.setenv(name, value)
            patch.setattr(serving, "serve", served.append)
            patch.setattr(cli, "Defaults", partial(Defaults, engines=self.engines))
            patch.setattr(bootstrap, "RESAMPLES", 50)
            patch.setattr(Figure, "draw_without_rendering", lambda self: None)  # which lays out: tests/probes/reporting
            patch.setattr(report, "_svg", self._drawn_once)
            status = cli.main(words)
        if any(word.startswith("--calibrate-") for word in words):
            self.engines.clear()
        assert status == 0, f"helmsight {shlex.join(words)}\n{out.getvalue()}{err.getvalue()}"
        assert len(served) == (words[0] == "serve")
        return out.getvalue()

    def _drawn_once(self, figure: Figure) -> bytes:
        """Return a figure as SVG. One with the same words as an earlier one, as each run of a benchmark has, is that one."""
        words = tuple((axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes)
        if words not in self._plots:
            self._plots[words] = _SVG(figure)
        return self._plots[words]

    def program(self, block: Block) -> str:
        """Return the output of a block, run by its language's program."""
        programs = {
            "python": [str(self.python), "-c"],
            "sh": ["bash", "-euo", "pipefail", "-c"],
            "js": ["node", "--input-type=module", "-e"],
        }
        done = subprocess.run(
            [*programs[block.language], self._here(block.text)],
            cwd=self.folder,
            env=os.environ | self.environ,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{block.text}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _here(self, text: str) -> str:
        """Return a text with this server's address and this folder's models."""
        text = re.sub(r"(127\.0\.0\.1|localhost):8000", self.url.removeprefix("http://"), text)
        return re.sub(r"(?<!\w)/models/", f"{self.folder}/models/", text)  # once, however often it is asked


def alike(printed: str, shown: str) -> bool:
    """Return whether texts are the same but for the last digits of their numbers."""
    if NUMBER.sub("#", printed) != NUMBER.sub("#", shown):
        return False
    ours, theirs = ([float(number) for number in NUMBER.findall(text)] for text in (printed, shown))
    return ours == pytest.approx(theirs, abs=2e-3)


def furnish(reader: Reader) -> None:
    """Put the files there that the pages take for granted, as the demo world draws them: models, data, keys, pairs."""
    folder = reader.folder
    names = {
        found for page in sorted(ROOT.glob("**/*.md")) for found in re.findall(r"/models/([\w.-]+)", page.read_text())
    }
    for name in names:
        fresh = shutil.ignore_patterns("calibration.json", "vectors")
        shutil.copytree(checkpoint(), folder / "models" / name, ignore=fresh)
    (folder / "keys").write_text("a-key-of-a-reader\n")

    reader.helmsight(["demo", "conflicts", "--count", "24", "--folder", str(folder / "drawn")])
    (folder / "drawn" / "conflicts.json").rename(folder / "evaluate_final.json")
    (folder / "drawn" / "images").rename(folder / "coco")

    pictures = folder / "coco" / "val2014"
    pictures.mkdir()
    questions = []
    for number, sample in enumerate(existence_samples(4, seed=3)):
        sample.image.save(pictures / f"{number}.png")
        label = "yes" if sample.present else "no"
        questions.append({"image": f"{number}.png", "text": sample.question, "label": label})
    (folder / "coco_pope_popular.json").write_text("".join(json.dumps(one) + "\n" for one in questions))

    rows = [block.text for block in blocks(ROOT / "docs" / "study.md") if block.language == "json"]
    (line,) = [row for row in rows if '"toward"' in row]
    for number in range(16):
        shutil.copy(pictures / f"{number % 4}.png", folder / f"{number}.png")
    numbered = (line.replace("1.png", f"{n}.png").replace("What is it?", f"What is it, {n}?") for n in range(16))
    (folder / "manners.jsonl").write_text("".join(numbered))
