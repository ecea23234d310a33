"""Each mistake of a catalogue is named with its key."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from octavo.entrypoints.cli.gateway import local_entries, main
from octavo.errors import ConfigError
from octavo.gateway.catalogue import ModelEntry, check_memory, named_models, read_catalogue
from octavo.gateway.server import address_of
from octavo.loading.default_model import DEFAULT_MODEL_NAME
from octavo.loading.local_models import LocalModel
from octavo.processes import bind


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no key models with entries by name"),
        ("[a]", "has no key models with entries by name"),
        ("models: {a: }", "models.a must be an object with keys such as model; {} has the defaults."),
        ("models: {7: {}}", "models.7: a name is a text, and YAML reads this one otherwise; quote it."),
        ("models: {}", "no models"),
        ("models: [a]", "models"),
        (
            "models: {a: {colour: red}}",
            "models.a: Object contains unknown field `colour`; known are model, adapter_of, ",
        ),
        ("modles: {a: {}}", "unknown field `modles`; known are models."),
        ("models: {a: {replicas: 0}}", "replicas"),
        ("models: {a: {replicas: two}}", "replicas"),
        ("models: {a: {keep_alive: -1}}", "keep_alive"),
        ("models: {a: {memory_gib: 0}}", "memory_gib"),
        ("models: {a: {aliases: [b]}, b: {}}", "b names two models"),
        ("models: {a: {aliases: [x]}, b: {aliases: [x]}}", "x names two models"),
        ("models: {a: {fallbacks: [a]}}", "fallbacks"),
        ("models: {a: {fallbacks: [c]}}", "c is not another model"),
        ("models: {a: {flags: {port: 1}}}", "--port"),
        ("models: {a: {flags: {api_key: x}}}", "--api-key: the gateway sets it"),
        ("models: {a: {flags: {root_path: /x}}}", "--root-path: it is not for servers that the gateway starts"),
        ("models: {a: {flags: {lora-modules: x=y}}}", "give each adapter an entry with adapter_of"),
        ("models: {a: {flags: {dtype: null}}}", "flags.dtype"),
        ("models: {a: {model: ./nowhere}}", "models.a: there is no file or folder ./nowhere"),
        ("models: {nowhere.gguf: {}}", "models.nowhere.gguf: there is no file or folder nowhere.gguf"),
        ("models: {a: {served_model_name: x}}", "served_model_name"),
        ("models: {a: {health: /v1/models}}", "health"),
        ("models: {a: {addresses: [localhost]}}", "HTTP address"),
        ("models: {a: {addresses: ['http://h/v1']}}", "leave /v1 out"),
        ("models: {a: {addresses: ['http://h', 'http://h']}}", "twice"),
        ("models: {a: {addresses: ['http://me:secret@h']}}", "leave the user and password out of the address of h"),
        ("models: {a: {addresses: ['http://h'], replicas: 2}}", "replicas"),
        ("models: {a: {addresses: ['http://h'], preload: true}}", "preload"),
        ("models: {a: {addresses: ['http://h'], health: x}}", "path"),
        ("models: {a: {addresses: ['http://h'], keep_alive: 5}}", "keep_alive"),
        ("models: {a: {addresses: ['http://h'], api_key_env: NOT_SET_ANYWHERE}}", "NOT_SET_ANYWHERE"),
        ("models: {a: {addresses: ['http://h:99999']}}", "no HTTP address"),
        ("models: {a: {addresses: ['http://[::1']}}", "no HTTP address"),
        ("models: {a: {discover: 'dns+http://[::1'}}", "is neither"),
        ("models: {a: {discover: 'dns+http://h'}}", "discover: dns+http://h is neither"),
        ("models: {a: {discover: 'dns+https://h:1'}}", "https is not built"),
        ("models: {a: {discover: 'kubernetes://ns/service'}}", "kubernetes://NAMESPACE/SERVICE:PORT"),
        ("models: {a: {discover: 'dns+http://h:1', addresses: ['http://h']}}", "leave one out"),
        ("models: {a: {discover: 'dns+http://h:1', replicas: 2}}", "replicas"),
        ("models: {a: {canaries: {b: 5}}}", "canaries: b is not"),
        ("models: {a: {canaries: {a: 5}}}", "canaries: a is not"),
        ("models: {a: {canaries: {b: -1}}, b: {}}", "canaries"),
        ("models: {'': {}}", "models.: '' is no name"),
        ("models: {--help: {}}", "'--help' is no name"),
        ('models: {"a\\nb": {}}', r"'a\nb' is no name"),
        ('models: {"a\\ud800": {}}', r"'a\ud800' is no name"),
        ("models: {a: {aliases: ['x ']}}", "models.a: 'x ' is no name"),
        ("models: {a: {model: -x}}", "models.a: '-x' is no name"),
        ("models: {a: {addresses: ['http://h'], served_model_name: ''}}", "models.a: '' is no name"),
        ("models: {a: {addresses: ['http://h:0']}}", "no server listens at port 0"),
        ("models: {a: {addresses: ['http://h/a b']}}", "other than printable ASCII as %XX"),
        ('models: {a: {addresses: ["http://h\\n:80"]}}', r"'http://h\n:80' other than"),
        ("models: {a: {addresses: ['http://h/é']}}", r"'http://h/\xe9' other than"),
        ("models: {a: {addresses: ['http://h'], health: '/a b'}}", "'/a b' other than"),
        ("models: {a: {canaries: {b: 60, c: 50}}, b: {}, c: {}}", "110 together"),
        ("models: {a: {canaries: {b: 60.1, c: 40}}, b: {}, c: {}}", "100.1 together"),
        ("models: {a: {addresses: ['http://h'], api_key_env: BLANK_KEY}}", "printable ASCII"),
        ("a: b: c", "YAML"),
        ("models: {a: {}, b: {}, a: {model: c}}", "a is there twice"),
        ("models: {a: {keep_alive: 1, keep_alive: 2}}", "keep_alive is there twice"),
        ("models: {a: {}}\nmodels: {b: {}}", "models is there twice"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLANK_KEY", " \n")
    file = tmp_path / "models.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--catalogue") as caught:
        read_catalogue(str(file))
    assert says in str(caught.value)


def test_the_catalogues_of_the_page_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UPSTREAM_KEY", "OCTAVO_API_KEY"):
        monkeypatch.setenv(name, "x")
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
    examples = re.findall(r"^```yaml\n(models:.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(examples) == 5
    for text in examples:
        (tmp_path / "models.yaml").write_text(text)
        assert len(read_catalogue(str(tmp_path / "models.yaml")).models) == 2


def test_percentages_that_are_a_hundred_together_are_taken(tmp_path: Path) -> None:
    parts = {"b": 0.2, "c": 83.9, "d": 15.9, "e": 0}
    assert sum(parts.values()) > 100, "as decimals are not exact"
    entries = {"a": {"canaries": parts}, "b": {}, "c": {}, "d": {}, "e": {}}
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps({"models": entries}))
    assert read_catalogue(str(file)).models["a"].canaries == parts


def test_names_and_aliases_are_found(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {a: {model: org/a, aliases: [x], keep_alive: null}, b: {addresses: ['http://h:1']}}")
    models = read_catalogue(str(file)).models
    assert models["a"] == ModelEntry(model="org/a", aliases=["x"], keep_alive=None)
    assert models["a"].is_local and not models["b"].is_local


def test_flags_are_words_as_octavo_serve_reads_them() -> None:
    flags = {"max_model_len": 64, "enable-prefix-caching": False, "enforce_eager": True, "speculative-config": {"a": 1},
             "allowed-origins": ["x", "y"]}  # fmt: skip
    assert ModelEntry(flags=flags).flag_words() == [
        "--max-model-len=64", "--no-enable-prefix-caching", "--enforce-eager", '--speculative-config={"a": 1}',
        "--allowed-origins=x", "--allowed-origins=y",
    ]  # fmt: skip


def test_a_budget_wants_to_know_what_each_model_takes() -> None:
    with pytest.raises(ConfigError, match="a has none"):
        check_memory(named_models(["a"]), 4)
    catalogue = named_models(["a"])
    catalogue.models["a"] = ModelEntry(memory_gib=3, replicas=2)
    with pytest.raises(ConfigError, match="needs 6 GiB"):
        check_memory(catalogue, 4)
    check_memory(catalogue, 6)
    check_memory(catalogue, None)
    with pytest.raises(ConfigError, match="named twice"):
        named_models(["a", "a"])


def test_the_models_on_this_machine_are_a_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [
        LocalModel(DEFAULT_MODEL_NAME, DEFAULT_MODEL_NAME, ()), LocalModel("org/m:Q4_0", "/m.gguf", (), ("org/m",)),
        LocalModel("n:Q4_0", "/n.gguf", (), ("n",)), LocalModel("n", "/n", ()),
    ]  # fmt: skip
    monkeypatch.setattr("octavo.entrypoints.cli.gateway.local_models", lambda folders: here)
    found = local_entries([])
    assert {name: (entry.model, entry.aliases) for name, entry in found.items()} == {
        DEFAULT_MODEL_NAME: (None, []), "org/m:Q4_0": ("/m.gguf", ["org/m"]), "n:Q4_0": ("/n.gguf", []),
        "n": ("/n", []),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["./nowhere.gguf"], "there is no file or folder ./nowhere.gguf"),
        (["/nowhere/model"], "there is no file or folder /nowhere/model"),
        (["nowhere.gguf"], "there is no file or folder nowhere.gguf"),
        (["models/nowhere/m.gguf"], "there is no file or folder models/nowhere/m.gguf"),
        (["--memory-gib", "4"], "memory_gib"),
        (["m", "--models-dir", "d"], "--models-dir"),
        (["m", "--catalogue", "f"], "either models"),
        (["m", "--memory-gib", "4"], "memory_gib"),
        (["m", "--memory-gib", "0"], "greater than 0"),
        (["m", "--stream-keep-alive", "-1"], "0 or more"),
        (["--catalogue", "/nowhere.yaml"], "--catalogue /nowhere.yaml cannot be read: No such file or directory."),
        (["m", "--on-keys-lost", "admit"], "--on-keys-lost needs --keys."),
        (["m", "--keys", "k", "--admin-host", "::1"], "--admin-host needs --admin-port."),
        (["m", "--keys", "k", "--admin-key", "x"], "--admin-key needs --admin-port."),
        (["m", "--admin-port", "0", "--admin-key", "x"], "--admin-port needs --keys."),
        (["m", "--keys", "k", "--admin-port", "0"], "--admin-port needs --admin-key or OCTAVO_ADMIN_KEY."),
        (["m", "--keys", "/nowhere/k", "--admin-port", "0", "--admin-key", ""], "--admin-key must not be empty"),
        (["m", "--api-key", "x", ""], "--api-key must not be empty"),
    ],
)
def test_a_gateway_that_cannot_be_honoured_does_not_start(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--port", "0"]) == 1
    assert says in capsys.readouterr().err


def test_an_address_that_is_taken_is_refused_with_the_flags_that_say_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert address_of(taken) == f"http://127.0.0.1:{port}"
        assert main(["m", "--host", "127.0.0.1", "--port", port]) == 1
        assert "Choose another --port or --host." in capsys.readouterr().err
        keys = ["--keys", str(tmp_path / "keys"), "--admin-key", "k", "--admin-port", port]
        assert main(["m", "--port", "0", *keys]) == 1
        assert "Choose another --admin-port or --admin-host." in capsys.readouterr().err
