"""`benchmarks/claims.py`: how figures are read, and what is said about the machine and about commands that fail."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from benchmarks import claims
from benchmarks.claims import CLAIMS, Claim, main, measure
from octavo.errors import OctavoError

README = Path(__file__).parents[2] / "README.md"


def test_figures_are_read_from_what_the_commands_print_and_write() -> None:
    edit = (
        "      edit          off    51.3 tok/s  ratio 1.000  steps 330  guessed 0  accepted 0  first 50.0 tok/s\n"
        "      edit   prediction   246.2 tok/s  ratio 4.803  steps 60  guessed 310  accepted 301  first 240.0 tok/s\n"
    )
    embeddings = "octavo float32                     50.1 texts/s\noctavo bfloat16                   106.4 texts/s\n"
    assert CLAIMS["edit"].read(edit, None) == "4.8 times the tokens/s"
    assert CLAIMS["embeddings"].read(embeddings + "octavo bfloat16 int8  130 texts/s\n", None) == "106 texts/s"
    assert CLAIMS["start"].read("", {"median": {"ready_s": 0.4789}}) == "0.48 s"
    assert CLAIMS["streams"].read("", [{"p99_itl_ms": 106.7}]) == "107 ms"
    assert CLAIMS["survival"].read("", {"lost": 0, "not_equal": 0}) == "0 and 0"


def test_each_row_of_readme_is_a_claim() -> None:
    table = README.read_text().partition("## Measured")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \| .* \| `.*`, \d{4}-\d\d-\d\d \|$", table, re.MULTILINE)
    assert rows == [claim.what for claim in CLAIMS.values()]


def test_commands_are_files_of_the_checkout() -> None:
    for claim in CLAIMS.values():
        program, first, *_ = claim.command.split()
        assert program == "octavo" or (claims.CHECKOUT / first).is_file()


def script(tmp_path: Path, text: str) -> str:
    (tmp_path / "figure.py").write_text(text)
    return "python figure.py"


@pytest.mark.long
def test_the_table_names_the_machine_and_says_if_it_was_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = script(tmp_path, "import sys, json\nprint('7')\njson.dump({'a': 8}, open(sys.argv[2], 'w'))\n")
    both = Claim("both", command, lambda text, data: f"{text.strip()} and {data['a']}", writes_json=True)
    needs = Claim("needs", "python figure.py FOLDER", lambda text, _: text)
    monkeypatch.setattr(claims, "CLAIMS", {"both": both, "needs": needs})
    monkeypatch.setattr(claims, "CHECKOUT", tmp_path)
    for load, is_busy in ((0.0, False), (100.0 * (os.cpu_count() or 1), True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert main([]) == 0
        out, err = capsys.readouterr()
        assert re.search(r"^\| both \| 7 and 8 \| `python figure.py`, \d{4}-\d\d-\d\d \|$", out, re.MULTILINE)
        assert "processors of " in out and out.startswith("**The machine was busy**") == is_busy
        assert "| needs |" not in out and "needs --embedding-model FOLDER" in err


def test_what_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(claims, "CHECKOUT", tmp_path)
    assert main(["nothing"]) == 1
    assert "there is no claim nothing: take some of start, streams" in capsys.readouterr().err
    command = script(tmp_path, "import sys\nprint('why not', file=sys.stderr)\nsys.exit(3)\n")
    with pytest.raises(OctavoError, match=r"figure.py ended with status 3: why not"):
        measure(Claim("", command, lambda text, _: text))
    command = script(tmp_path, "print('no figure')\n")
    with pytest.raises(OctavoError, match="cannot be read: its output has no"):
        measure(Claim("", command, CLAIMS["edit"].read))
