"""`octavo doctor`, `octavo collect-env` and the completion of shells."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.entrypoints.cli.main import BENCHMARKS, COMMANDS, main
from octavo.planning import environment, machine_check
from octavo.planning.machine_check import Finding, port_finding
from tests.ports import held_port


def of_limits(open_files: int | None, processors: float | None = None) -> object:
    return lambda: {"open_files_at_most": open_files, "address_space_bytes": 1 << 30, "processors": processors}


_WORDS = ["--offline", "--no-measure", "--port", "0"]


def test_a_machine_that_runs_the_tests_can_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--offline", "--port", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["can_serve"]
    found = {finding["about"]: finding["verdict"] for finding in report["findings"]}
    assert set(found) >= {
        "packages", "kernels", "processors", "memory bandwidth", "GPUs", "memory", "open files",
        "default model", "port",
    }  # fmt: skip
    assert "no" not in found.values()


def test_a_port_that_is_taken_means_that_a_server_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", *_WORDS[:2], "--port", str(port)]) == 1
    out = capsys.readouterr().out
    assert f"[ no ] port: 127.0.0.1:{port} cannot be listened on" in out and "A server cannot run here" in out
    assert port_finding("127.0.0.1", 0).verdict == "ok"
    assert port_finding("no.such.host.invalid", 80).verdict == "no"


@pytest.mark.parametrize(
    ("name", "value", "about", "verdict"),
    [
        ("available_memory_bytes", lambda: 100 << 20, "memory", "no"),
        ("available_memory_bytes", lambda: 1 << 30, "memory", "note"),
        ("_MODULES", ("no_such_module",), "packages", "no"),
        ("limits", of_limits(20), "open files", "no"),
        ("limits", of_limits(256), "open files", "note"),
        ("limits", of_limits(None), "address space", "note"),
        ("limits", of_limits(None, 0.5), "processors", "slow"),
    ],
)  # fmt: skip
def test_what_stands_in_the_way_is_found(
    name: str, value: object, about: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_check, name, value)
    findings = machine_check.examine(0, "127.0.0.1", measures=False, asks_network=False)
    [finding] = [finding for finding in findings if finding.about == about]
    assert finding.verdict == verdict, finding


def test_an_index_that_does_not_answer_is_said_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PIP_INDEX_URL", "HF_ENDPOINT"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{held_port()}")  # connections are refused
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    found: list[Finding] = list(machine_check._network())
    assert [finding.verdict for finding in found] == ["note", "note"]
    assert all("refused" in finding.text for finding in found)


def test_the_environment_has_no_secrets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY", "HF_TOKEN", "PIP_PASSWORD"):
        monkeypatch.setenv(name, "hush-hush")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:hush-hush@proxy:3128")
    monkeypatch.setenv("VLLM_USAGE_STATS", "0")
    monkeypatch.setenv("OTHER_SETTING", "hush-hush")
    assert main(["collect-env"]) == 0
    text = capsys.readouterr().out
    assert "hush-hush" not in text and "OTHER_SETTING" not in text
    assert "VLLM_USAGE_STATS: 0" in text and "HTTPS_PROXY: http://***@proxy:3128" in text and "HF_TOKEN: (set" in text
    assert main(["collect-env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [
        "octavo", "python", "platform", "processor", "memory", "limits", "gpus", "packages", "variables",
    ]  # fmt: skip
    assert found["packages"]["numpy"] and found["processor"]["kernels"]


def test_a_quota_of_processors_is_the_least_of_those_above(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / "groups" / "a" / "b"
    own.mkdir(parents=True)
    (own / "cpu.max").write_text("max 100000\n")
    (own.parent / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "cgroup").write_text("0::/a/b\n")
    monkeypatch.setattr("octavo.loading.memory._PROC_CGROUP", tmp_path / "cgroup")
    assert environment.processor_quota(tmp_path / "groups") == 1.5
    (own.parent / "cpu.max").unlink()
    assert environment.processor_quota(tmp_path / "groups") is None


def completed(script: str, words: list[str]) -> set[str]:
    """What bash offers for the last of `words`, with the script sourced."""
    ask = (
        f"{script}\nCOMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}\n"
        f"_shtab_octavo octavo '{words[-1]}' '{words[-2]}'\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "--norc", "-c", ask], capture_output=True, text=True, check=True)
    assert not done.stderr, done.stderr
    return set(done.stdout.split())


def test_bash_completes_commands_flags_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert "complete" in script and "_shtab_octavo octavo" in script
    assert completed(script, ["octavo", "''"]) >= set(COMMANDS)
    assert completed(script, ["octavo", "bench", "''"]) >= set(BENCHMARKS)
    assert completed(script, ["octavo", "serve", "--max-model"]) == {"--max-model-len"}
    assert completed(script, ["octavo", "bench", "latency", "--num-iters-w"]) == {"--num-iters-warmup"}
    assert completed(script, ["octavo", "plan", "--gpu", "h"]) == {"h100", "h200"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_that_they_can_read(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "max-model-len" in script and "collect-env" in script
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True)


def test_commands_are_named_without_importing_them() -> None:
    """So that `octavo --help` is quick."""
    code = "import sys; import octavo.entrypoints.cli.main; sys.exit('numpy' in sys.modules or 'shtab' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
