"""scripts/compile-once gives back the object of an earlier compilation wherever nothing that decides it has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).parents[1] / "scripts" / "compile-once"
# Notes in a file that it was asked, then passes the question on.
_COUNTING = """#!/bin/sh
case " $* " in *" -E "*|*" --version "*) ;; *) echo compiled >> "{count}" ;; esac
exec c++ "$@"
"""

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler is here")


class Checkout:
    """A folder with a source, a header and a build; compilations are counted over all of them."""

    def __init__(self, root: Path, name: str) -> None:
        self.count, self.compiler, self.folder = root / "count", root / "compiler", root / name
        self.folder.mkdir()
        self.compiler.write_text(_COUNTING.format(count=self.count))
        self.compiler.chmod(0o755)
        self.environment = {**os.environ, "OCTAVO_OBJECT_CACHE": str(root / "objects")}
        (self.folder / "a.h").write_text("inline int two() { return 2; }\n")
        (self.folder / "a.cpp").write_text('#include "a.h"\nint f(int x) { return x + two(); }\n')

    def compile(self, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.compiler), f"-I{self.folder}", *flags, "-MD", "-MT", "a.o", "-MF", "a.o.d", "-o", "a.o",
                   "-c", str(self.folder / "a.cpp")]  # fmt: skip
        return subprocess.run(
            [sys.executable, str(LAUNCHER), *command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )

    def num_compiled(self) -> int:
        return len(self.count.read_text().splitlines()) if self.count.exists() else 0


def test_another_checkout_takes_the_object_with_its_headers(tmp_path: Path) -> None:
    one, other = Checkout(tmp_path, "one"), Checkout(tmp_path, "other")
    assert one.compile("-O1").returncode == other.compile("-O1").returncode == 0
    assert one.num_compiled() == 1
    assert (one.folder / "a.o").read_bytes() == (other.folder / "a.o").read_bytes()
    listed = (other.folder / "a.o.d").read_text()
    assert listed.startswith("a.o:")
    assert str(other.folder / "a.h") in listed, "the build tool sees a change of its own header"


def test_a_change_of_header_or_flags_compiles_anew_and_back_takes_the_first(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, "one")
    checkout.compile("-O1")
    checkout.compile("-O2")
    assert checkout.num_compiled() == 2
    before = (checkout.folder / "a.h").read_text()
    (checkout.folder / "a.h").write_text("inline int two() { return 3; }\n")
    checkout.compile("-O1")
    assert checkout.num_compiled() == 3
    (checkout.folder / "a.h").write_text("// a comment, which changes nothing\n" + before)
    checkout.compile("-O1")
    assert checkout.num_compiled() == 3


def test_what_printed_a_warning_or_failed_is_not_kept(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, "one")
    (checkout.folder / "a.cpp").write_text("int f(int x) { int unused; return x; }\n")
    for expected in (1, 2):
        done = checkout.compile("-Wall")
        assert done.returncode == 0 and "unused" in done.stderr
        assert checkout.num_compiled() == expected
    assert checkout.compile("-Wall", "-Werror").returncode != 0
    (checkout.folder / "a.cpp").write_text("int f(int x) { return x; }\n")
    assert checkout.compile("-Wall").returncode == checkout.compile("-Wall", "-Werror").returncode == 0
    assert checkout.num_compiled() == 4, "a silent object serves where warnings are errors"
    (checkout.folder / "a.cpp").write_text("int f(int x) {\n")
    assert checkout.compile().returncode != 0


def test_a_disk_that_cannot_be_written_costs_no_build(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, "one")
    (tmp_path / "objects").write_text("a file in its place")
    done = checkout.compile()
    assert done.returncode == 0 and "is not kept" in done.stderr
    assert (checkout.folder / "a.o").exists()
