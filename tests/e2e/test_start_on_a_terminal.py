"""What `octavo serve` shows on a terminal while it starts. The command that it shows works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request

import pytest

from tests.terminal import TIMEOUT_S, terminal


@pytest.mark.long
def test_a_start_shows_the_loading_then_the_page_and_a_command_that_answers() -> None:
    flags = ("--port", "0", "--max-model-len", "256", "--num-gpu-blocks-override", "64", "--device", "cpu")
    with terminal("serve", *flags, TERM="xterm", COLUMNS="200") as serve:
        serve.expect("Loading SmolLM2-135M-Instruct [")
        serve.expect("Preparing SmolLM2-135M-Instruct")
        serve.expect("\x1b[1mOctavo ")
        shown = serve.expect('"Hello!"}]}\' ') + serve.expect("/v1/chat/completions\n")
        page = re.search(r"page +(http\S+/ui)\n", shown)
        assert page is not None
        assert b"<title>" in urllib.request.urlopen(page[1]).read()
        command = shown.partition("  try ")[2].strip()
        if shutil.which("curl") is None:
            pytest.skip("there is no curl to run the shown command with")
        answer = json.loads(subprocess.run(command, shell=True, capture_output=True, check=True).stdout)
        assert answer["choices"][0]["message"]["content"]
        serve.type("\x03")
        assert serve.process.wait(TIMEOUT_S) == 0
