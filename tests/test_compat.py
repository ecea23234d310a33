"""The names that users of vLLM know: a flag is honoured or refused with a clear message, never taken and ignored."""

from __future__ import annotations

import base64
import dataclasses
import gc
import importlib
import io
import logging
import re
import runpy
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from PIL import Image

import octavo
from octavo import compat, envs, unknown_flags
from octavo.bench.offline import make_latency_parser, make_throughput_parser
from octavo.bench.serve import make_parser as make_serve_parser
from octavo.bench.startup import make_parser as make_startup_parser
from octavo.config import AsyncEngineArgs, EngineArgs, PoolerConfig
from octavo.config.checks import check as check_engine_args
from octavo.distributed import cleanup_dist_env_and_memory, destroy_distributed_environment, destroy_model_parallel
from octavo.entrypoints.cli.run_batch import make_parser as make_run_batch_parser
from octavo.entrypoints.cli.serve import make_parser, parse_args
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.pooling.pooling_protocol import EmbeddingRequest
from octavo.entrypoints.pooling.pooling_routes import _to_bytes
from octavo.entrypoints.pooling.utils import MetadataItem, build_metadata_items, decode_pooling_output
from octavo.errors import ConfigError, LoadError, RequestError
from octavo.flags import FlagParser
from octavo.hardware import why_not_cuda
from octavo.loading.tokenizer import read_tokenizer
from octavo.logger import init_logger
from octavo.multimodal.utils import encode_image_url, fetch_image
from octavo.platforms import current_platform
from octavo.sampling_params import SamplingParams
from octavo.transformers_utils.tokenizer import get_tokenizer
from octavo.unknown_flags import SYNONYMS, advice_on
from octavo.usage.usage_lib import UsageContext
from octavo.utils import FlexibleArgumentParser, get_open_port, random_uuid
from octavo.utils.network_utils import get_ip
from octavo.utils.print_utils import print_embeddings
from octavo.utils.serial_utils import EMBED_DTYPES, ENDIANNESS, tensor2base64
from octavo.v1.engine.async_llm import AsyncLLM
from octavo.v1.engine.llm_engine import LLMEngine
from tests import vllm_flags

# Flags that work, each with a value that a launch script would give it.
WORKING = [
    "--tensor-parallel-size 2", "--distributed-executor-backend mp", "--distributed-executor-backend ray",
    "--model some/model", "--tokenizer some/model", "--served-model-name a b", "--revision main", "--download-dir /tmp",
    "--load-format auto", "--load-format safetensors", "--load-format gguf", "--load-format pt", "--load-format dummy",
    "--dtype auto", "--dtype float32", "--dtype bfloat16", "--quantization gguf", "--quantization int8",
    "--quantization int4", "--quantization gptq", "--quantization awq", "--quantization fp8",
    "--kv-cache-dtype auto", "--kv-cache-dtype fp8", "--kv-cache-dtype fp8_e4m3", "--kv-cache-dtype fp8_e5m2",
    "--kv-cache-dtype int8", "--calculate-kv-scales",
    "--max-model-len 4096", "--gpu-memory-utilization 0.90", "--block-size 8",
    "--block-size 16", "--block-size 32", "--swap-space 4", "--max-num-seqs 256", "--max-num-batched-tokens 8192",
    "--enable-chunked-prefill", "--no-enable-chunked-prefill", "--enable-prefix-caching", "--no-enable-prefix-caching",
    "--preemption-mode recompute", "--preemption-mode swap", "--scheduling-policy fcfs",
    "--scheduling-policy priority", "--enforce-eager", "--seed 0", "--chat-template template.jinja",
    "--enable-server-load-tracking", "--enable-tokenizer-info-endpoint",
    "--disable-log-stats", "--max-log-len 100", "--device auto", "--device cpu", "--tensor-parallel-size 1",
    "--pipeline-parallel-size 2", "--enable-expert-parallel --tensor-parallel-size 2", "--data-parallel-size 1",
    "--data-parallel-size 2 --data-parallel-rank 1", "--data-parallel-size 2 --data-parallel-rank 1 "
    "--data-parallel-external-lb", "--data-parallel-size 4 --data-parallel-hybrid-lb --data-parallel-size-local 2 "
    "--data-parallel-start-rank 2",
    "--num-scheduler-steps 1",
    "--host 0.0.0.0", "--port 8000", "--api-key token-abc123", "--api-key one --api-key two", "--root-path /llm",
    '--allowed-origins ["*"]', "--allowed-origins http://a http://b", "--enable-prometheus",
    "--enable-prometheus --prometheus-port 9090", "--disable-log-requests", "--response-role assistant",
    "--max_model_len 4096", "--served_model_name=a", "--enable-auto-tool-choice --tool-call-parser hermes",
    "--tool-call-parser llama3_json", "--tool-call-parser mistral", "--tool-call-parser pythonic",
    "--tool-call-parser qwen3_xml", "--tool-call-parser deepseek_v31", "--tool-call-parser granite-20b-fc",
    "--tool-call-parser openai", "--tool-call-parser none", "--reasoning-parser openai_gptoss",
    "--reasoning-parser granite", "--reasoning-parser none",
    "--reasoning-parser deepseek_r1", "--reasoning-parser qwen3", "--speculative-model [ngram]",
    "--num-speculative-tokens 5 --speculative-model [ngram]", "--ngram-prompt-lookup-max 4 --speculative-model [ngram]",
    "--ngram-prompt-lookup-min 2 --speculative-model [ngram]", '--speculative-config {"method":"suffix"}',
    "--speculative-model some/draft", '--speculative-config {"method":"eagle3","model":"some/head"}',
    "--speculative-draft-tensor-parallel-size 1 --speculative-model some/draft",
    "--enable-lora", "--lora-modules a=/path b=/path", "--max-loras 4", "--max-lora-rank 64", "--max-cpu-loras 8",
    "--lora-dtype float32", "--lora-target-modules o_proj", "--disable-uvicorn-access-log",
    "--chat-template-content-format openai", "--enable-request-id-headers", "--no-enable-request-id-headers",
    "--allow-credentials", '--allowed-methods ["GET","POST"]', "--allowed-headers x-mine",
    "--kv-cache-memory-bytes 4G", "--no-async-scheduling", "--enable-prompt-tokens-details",
    "--no-enable-prompt-tokens-details", "--tokenizer-mode hf", '--limit-mm-per-prompt {"image":4}',
    "--language-model-only", "--max-logprobs -1", "--max-logprobs 100", "--enable-sleep-mode",
    "--logprobs-mode raw_logprobs", "--api-server-count 4",
]  # fmt: skip
# Flags that are not built, or not for this device, and what is said.
REFUSED = {
    "--dtype float16": "--dtype float16 is not built for CPUs",
    "--quantization hqq": "--quantization hqq is not built yet",
    "--device cuda": "--device cuda: no CUDA device was found",
    "--data-parallel-size 2 --data-parallel-hybrid-lb": "--data-parallel-hybrid-lb needs --data-parallel-size-local",
    "--data-parallel-size 2 --data-parallel-backend ray": "--data-parallel-size-local must say how many of the 2",
    "--distributed-executor-backend uni": "--distributed-executor-backend uni is not built; mp and ray are",
    '--speculative-config {"method":"mlp_speculator"}': "the speculative method mlp_speculator is not built yet",
    "--num-speculative-tokens 5": "no speculative method is given",
    "--speculative-draft-tensor-parallel-size 1": "no speculative method is given",
    "--fully-sharded-loras": "--fully-sharded-loras True is not built yet",
    "--api-server-count 4 --headless": "--api-server-count 4 and --headless exclude each other",
    "--api-server-count 2 --enable-prometheus --prometheus-port 9090": "and --prometheus-port exclude each other",
    "--num-scheduler-steps 8": "--num-scheduler-steps 8 is not built yet",
    "--async-scheduling": "--async-scheduling is not built",
    "--logprobs-mode processed_logprobs": "--logprobs-mode processed_logprobs is not built yet; leave it out.",
    "-O 3": "--optimization-level 3 is not built yet",
    '--compilation-config {"mode":3}': "--compilation-config .* is not built yet",
    "--tokenizer-mode slow": "--tokenizer-mode slow is not built; use auto",
    "--tokenizer-mode mistral": "--tokenizer-mode mistral is not built; use auto",
}
# Flags whose value needs more than a parser to be checked.
ELSEWHERE = {"--config", "--ssl-keyfile", "--ssl-certfile"}


def check(flags: str) -> tuple[AsyncEngineArgs, ServerArgs]:
    engine_args, server_args = parse_args(flags.split(), "octavo serve")
    check_engine_args(engine_args)
    server_args.check()
    return engine_args, server_args


@pytest.mark.parametrize("flags", WORKING)
def test_a_flag_that_works_reaches_its_field(flags: str) -> None:
    plain = check("")
    given = check(flags)
    changed = [
        field.name
        for before, after in zip(plain, given, strict=True)
        for field in dataclasses.fields(before)
        if getattr(before, field.name) != getattr(after, field.name)
    ]
    name = flags.split()[0].partition("=")[0].removeprefix("--no-").removeprefix("--").replace("-", "_")
    assert name in changed or getattr(given[name in {f.name for f in dataclasses.fields(ServerArgs)}], name) is not None


@pytest.mark.parametrize(("flags", "said"), REFUSED.items())
def test_a_flag_that_is_not_built_says_so(flags: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(flags)


def test_no_flag_of_vllms_that_we_promise_is_unknown() -> None:
    known = make_parser("octavo serve")._option_string_actions
    promised = {flags.split()[0].partition("=")[0].replace("_", "-") for flags in (*WORKING, *REFUSED)} | ELSEWHERE
    assert promised <= known.keys()


@pytest.mark.parametrize(
    ("parser", "names"),
    [
        (make_parser("octavo serve"), vllm_flags.SERVE),
        (make_serve_parser("octavo bench serve"), vllm_flags.BENCH_SERVE),
        (make_throughput_parser("octavo bench throughput"), vllm_flags.BENCH_THROUGHPUT),
        (make_latency_parser("octavo bench latency"), vllm_flags.BENCH_LATENCY),
        (make_startup_parser("octavo bench startup"), vllm_flags.BENCH_STARTUP),
        (make_run_batch_parser("octavo run-batch"), vllm_flags.RUN_BATCH),
    ],
    ids=lambda value: getattr(value, "prog", ""),
)
def test_every_flag_of_vllms_is_known_or_answered_with_advice(parser: FlagParser, names: str) -> None:
    known = parser._option_string_actions
    without = [
        name
        for name in names.split()
        if name not in known
        and SYNONYMS.get(name, "").partition(".")[0] not in known
        # --ubatch-size means llama.cpp's. No other flag is guessed from its spelling.
        and not advice_on([name.lstrip("-")], ["max-num-batched-tokens"])
    ]
    assert not without


def test_vllms_other_names_of_flags_mean_octavos() -> None:
    engine_args, server_args = check("-n=1 -ep -tp 2 --spec-method=ngram --spec-tokens 3 --sse-keep-alive-interval 2")
    assert engine_args.nnodes == 1 and engine_args.enable_expert_parallel
    assert engine_args.speculative_config == {"method": "ngram", "num_speculative_tokens": 3}
    assert server_args.stream_keep_alive == 2
    with pytest.raises(ConfigError, match=r"--compilation-config .* is not built yet"):
        check("-cc.mode 3")
    for name, meaning in SYNONYMS.items():
        assert meaning.partition(".")[0] in make_parser("octavo serve")._option_string_actions, name


def test_a_parser_with_a_flag_of_another_names_spelling_keeps_its_own() -> None:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--spec-method")
    parser.add_argument("-n", type=int)
    args = parser.parse_args(["--spec-method", "mine", "-n", "3"])
    assert (args.spec_method, args.n, args.nnodes, args.speculative_config) == ("mine", 3, 1, None)


def test_an_unknown_flag_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(["--no-such-flag"], "octavo serve")
    assert ended.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cpu-offload-gb=4"], "cpu-offload-gb: weights stay where the model runs; --quantization int8"),
        (["--guided_decoding_backend", "xgrammar"], "guided-decoding-backend: leave it out: structured outputs are"),
        (["--ctx-size", "4096"], "ctx-size: did you mean max-model-len?"),
        (["--mem_fraction_static", "0.9"], "mem-fraction-static: did you mean gpu-memory-utilization?"),
        (["--no-enable-dbo"], "no-enable-dbo: it is not built yet; leave it out."),
        (["--gpu-memory-utilisation", "0.5"], "did you mean gpu-memory-utilization?"),
        # Values with spaces, as manifests write them, are not taken for a model.
        (["--kv-transfer-config={'kv_connector': 'x'}"], "kv-transfer-config: it is not built yet"),
        (["--structured-outputs-config.backend=guidance"], "structured-outputs-config: leave it out"),
        (["--profiler-config.profiler", "torch"], "profiler-config: leave it out: /ui and /metrics show"),
        (["-dcp", "2"], "dcp: it is not built yet; leave it out."),
        (["-ac.backend", "FLASH_ATTN"], "ac: leave it out: kernels are chosen by device and model"),
    ],
)
def test_an_unknown_flag_of_vllms_says_what_to_do(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args(words, "octavo serve")
    error = capsys.readouterr().err
    assert "unrecognized arguments: -" in error
    assert said in error


def test_what_is_advised_exists_and_what_exists_needs_no_advice() -> None:
    known = {name.removeprefix("--") for name in make_parser("octavo serve")._option_string_actions}
    for field, advice in unknown_flags._ADVICE.items():
        assert field.replace("_", "-") not in known
        assert {flag.partition(".")[0] for flag in re.findall(r"--([a-z0-9.-]+)", advice)} <= known | {"runs"}, field


def test_keywords_and_keys_of_a_file_get_the_same_advice(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"LLM.. has no argument scheduler_delay_factor. scheduler_delay_factor: leave it out: prompts"
    ):
        octavo.LLM(scheduler_delay_factor=0.5, tokenizer_revision=None, cpu_offload_gb=0, skip_tokenizer_init=False)
    with pytest.raises(TypeError, match=r"no argument multi_step_stream_outputs\. multi_step"):
        octavo.LLM(multi_step_stream_outputs=False)
    with pytest.raises(TypeError, match=r"gpu_memory: did you mean gpu_memory_utilization\?"):
        octavo.LLM(gpu_memory=0.5)
    with pytest.raises(
        TypeError, match=r"^AsyncEngineArgs\(\) has no argument max_modal_len. max_modal_len: did you mean max_"
    ):
        AsyncEngineArgs(max_modal_len=5, engine_use_ray=False, worker_use_ray=None)
    assert AsyncEngineArgs(model="a", engine_use_ray=False, max_log_len=3) == AsyncEngineArgs(model="a", max_log_len=3)
    (tmp_path / "config.yaml").write_text("max-modal-len: 5")
    with pytest.raises(ConfigError, match=r"unknown key 'max-modal-len'.*did you mean max_model_len\?"):
        parse_args(["--config", str(tmp_path / "config.yaml")], "octavo serve")


def test_the_documented_yaml_file_is_the_command_line(tmp_path: Path) -> None:
    """As in vLLM's documentation of `vllm serve --config`."""
    config = tmp_path / "config.yaml"
    config.write_text(
        'model: meta-llama/Llama-3.1-8B-Instruct\nhost: "127.0.0.1"\nport: 6379\nuvicorn-log-level: "info"\n'
    )
    engine_args, server_args = parse_args(["--config", str(config)], "octavo serve")
    assert engine_args.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert (server_args.host, server_args.port, server_args.uvicorn_log_level) == ("127.0.0.1", 6379, "info")


def test_an_argument_parser_of_scripts_for_vllm_makes_an_engines_arguments() -> None:
    """As vLLM's examples begin."""
    parser = FlexibleArgumentParser(description="Demo on using the engine.")
    parser = AsyncEngineArgs.add_cli_args(parser)
    parser.set_defaults(model="some/model")
    assert AsyncEngineArgs.from_cli_args(parser.parse_args(["--max_model_len", "64"])).max_model_len == 64
    assert len(random_uuid()) == 32


@pytest.mark.parametrize("path", compat.MODULES)
def test_every_import_path_of_vllms_works(path: str) -> None:
    module, content = importlib.import_module(f"octavo.{path}"), compat.MODULES[path]
    parent = importlib.import_module(f"octavo.{path}".rpartition(".")[0])
    assert getattr(parent, path.rpartition(".")[2]) is module
    if isinstance(content, str):
        assert module is importlib.import_module(content)
        return
    for name, home in content.items():
        real, _, renamed = home.partition(":")
        assert getattr(module, name) is getattr(importlib.import_module(real), renamed or name)
    with pytest.raises(AttributeError, match=f"module 'octavo.{path}' has no attribute 'absent'"):
        _ = module.absent


def test_a_path_that_is_no_program_says_so() -> None:
    with pytest.raises(ImportError, match=r"octavo\.logprobs is no program"):
        runpy.run_module("octavo.logprobs")


def test_modules_have_vllms_other_names() -> None:
    assert AsyncLLM is octavo.AsyncLLMEngine
    assert LLMEngine is octavo.LLMEngine
    assert issubclass(AsyncLLM, importlib.import_module("octavo.engine.protocol").EngineClient)
    for module, name, home in [
        ("v1.engine.exceptions", "EngineDeadError", "errors"),
        ("utils.network_utils", "get_open_port", "utils"), ("config.pooler", "PoolerConfig", "config"),
        ("distributed.parallel_state", "destroy_model_parallel", "distributed"), ("config", "VllmConfig", "config"),
        ("logprobs", "Logprob", "outputs"), ("inputs", "PromptType", ""), ("version", "__version_tuple__", ""),
    ]:  # fmt: skip
        homes = [importlib.import_module(f"octavo.{place}".rstrip(".")) for place in (module, home)]
        assert getattr(homes[0], name) is getattr(homes[1], name)
    assert UsageContext.OPENAI_API_SERVER in UsageContext
    adapter = octavo.LoRARequest("sql", 3, "/path")
    assert (adapter.name, adapter.adapter_id, adapter.path) == ("sql", 3, "/path")
    assert octavo.LoRARequest("sql", 3, lora_local_path="/path") == adapter
    with pytest.raises(RequestError, match="is the former name of lora_path; give one"):
        octavo.LoRARequest("sql", 3, "/path", lora_local_path="/path")
    with pytest.raises(LoadError, match="there is no file or folder /none"):
        octavo.EngineArgs(model="/none").create_engine_config(UsageContext.LLM_CLASS)
    assert octavo.__version_tuple__[:2] == (0, 1)
    with pytest.raises(AttributeError, match="no attribute 'ModelRegistry': classes of vLLM's models"):
        _ = octavo.ModelRegistry


@pytest.mark.parametrize("path", compat.ABSENT)
def test_an_import_that_octavo_lacks_says_what_to_do(path: str) -> None:
    package, _, name = f"octavo.{path}".rpartition(".")
    said = re.escape(f"Octavo has no {path}: {compat.ABSENT[path]}.")
    for statement in (f"from {package} import {name}", f"import {package}.{name}.below"):
        with pytest.raises(ImportError, match=said):
            exec(statement)
    assert not hasattr(importlib.import_module(package), name)


def test_a_client_reads_the_vectors_of_an_answer_in_bytes() -> None:
    vector = torch.tensor([1.0, -2.0, 0.5])
    for dtype in EMBED_DTYPES:
        for order in ENDIANNESS:
            body = EmbeddingRequest(input="", encoding_format="bytes", embed_dtype=dtype, endianness=order)
            sent = _to_bytes(vector.numpy(), body) * 2
            items = build_metadata_items(dtype, order, (3,), 2)
            assert items == [
                MetadataItem(i, dtype, order, i * len(sent) // 2, len(sent) // (2 - i), (3,)) for i in (0, 1)
            ]
            for found in decode_pooling_output(items[::-1], sent):
                assert torch.equal(found.float(), vector)


def test_a_client_sends_embeddings_and_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    vectors = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(torch.load(io.BytesIO(base64.b64decode(tensor2base64(vectors)))), vectors)
    picture = Image.new("RGB", (2, 3), (1, 2, 3))
    url = encode_image_url(picture)
    assert url.startswith("data:image/png;base64,") and fetch_image(url).tobytes() == picture.tobytes()
    picture.save(tmp_path / "a.png")
    assert fetch_image((tmp_path / "a.png").as_uri()).tobytes() == picture.tobytes()
    print_embeddings([1.0] * 5)
    assert capsys.readouterr().out == "Embeddings: [1.0, 1.0, 1.0, 1.0, ...] (size=5)\n"


def test_the_platform_is_what_octavo_computes_on() -> None:
    assert current_platform.is_cpu() is (why_not_cuda() is not None) is not current_platform.is_cuda_alike()
    assert current_platform.device_type == ("cpu" if current_platform.is_cpu() else "cuda")
    assert not current_platform.is_rocm()
    assert socket.inet_aton(get_ip())


def test_what_scripts_call_when_they_have_deleted_an_engine_frees_it() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    gc.disable()
    try:
        for free in (destroy_model_parallel, destroy_distributed_environment, cleanup_dist_env_and_memory):
            engine = Cycle()
            gone = weakref.ref(engine)
            del engine
            assert gone() is not None
            free()
            assert gone() is None
    finally:
        gc.enable()


def test_a_pooler_configuration_is_its_fields() -> None:
    assert PoolerConfig(pooling_type="MEAN", normalize=False, dimensions=None) == {
        "pooling_type": "MEAN",
        "normalize": False,
    }
    assert 0 < get_open_port() < 2**16


def test_a_tokenizer_is_read_by_its_name(tiny_tokenizer: Path) -> None:
    assert get_tokenizer(tiny_tokenizer, trust_remote_code=True).encode("ab") == read_tokenizer(
        str(tiny_tokenizer)
    ).encode("ab")
    with pytest.raises(ConfigError, match="tokenizer_mode slow is not built; use auto"):
        get_tokenizer(tiny_tokenizer, tokenizer_mode="slow")
    with pytest.raises(LoadError, match="is not a folder"):
        get_tokenizer(tiny_tokenizer / "none")


def test_a_logger_of_vllms_examples_says_things_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = init_logger("a.plugin")
    assert logger is init_logger("a.plugin") is logging.getLogger("a.plugin")
    with caplog.at_level("INFO"):
        for _ in range(2):
            logger.info_once("begins with %d", 3)
            logger.warning("and goes on")
    assert caplog.messages == ["begins with 3", "and goes on", "and goes on"]


def test_variables_of_the_environment_are_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CPU_THREADS", "3")
    assert envs.OCTAVO_CPU_THREADS == "3" and envs.is_set("OCTAVO_CPU_THREADS") and envs.VLLM_NO_USAGE_STATS is None
    assert "OCTAVO_CPU_THREADS" in dir(envs)
    for name, said in {
        "VLLM_ATTENTION_BACKEND": "has no effect here; use --attention-backend",
        "VLLM_USE_V1": "is a variable of vLLM's and has no effect here.",
        "OCTAVO_SPEED": "has no attribute 'OCTAVO_SPEED'",
    }.items():
        with pytest.raises(AttributeError, match=said):
            getattr(envs, name)


def test_sampling_params_have_every_field() -> None:
    promised = (
        "n best_of presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop "
        "stop_token_ids bad_words include_stop_str_in_output ignore_eos max_tokens min_tokens logprobs prompt_logprobs "
        "detokenize skip_special_tokens spaces_between_special_tokens logit_bias allowed_token_ids structured_outputs "
        "logits_processors truncate_prompt_tokens"
    )
    assert set(promised.split()) <= set(SamplingParams.__struct_fields__)


def test_vllms_names_are_the_packages() -> None:
    promised = (
        "LLM LLMEngine AsyncLLMEngine EngineArgs AsyncEngineArgs SamplingParams PoolingParams BeamSearchParams "
        "TextPrompt TokensPrompt RequestOutput CompletionOutput PoolingOutput PoolingRequestOutput EmbeddingOutput "
        "EmbeddingRequestOutput ClassificationOutput ClassificationRequestOutput ScoringOutput ScoringRequestOutput"
    )
    assert set(promised.split()) <= set(octavo.__all__)
    assert all(getattr(octavo, name) is not None for name in octavo.__all__)


def test_folders_that_an_older_checkout_left_behind_hide_no_path(tmp_path: Path) -> None:
    """git deletes files and leaves `__pycache__`, which makes a folder a package of its own."""
    (tmp_path / "octavo" / "utils" / "__pycache__").mkdir(parents=True)
    code = f"import octavo; octavo.__path__.append({str(tmp_path / 'octavo')!r}); from octavo.utils import random_uuid"
    subprocess.run([sys.executable, "-c", code], check=True)
