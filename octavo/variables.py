"""The environment variables that Octavo reads, and their meanings.

`octavo collect-env` shows those that are set, and the documentation lists all of them. Libraries (OpenTelemetry,
Hugging Face, CUDA) read further variables.
"""

VARIABLES = {
    "OCTAVO_API_KEY": "A key that clients of a server or gateway must send, beside those of `--api-key`. "
    "`octavo chat`, `complete` and `bench serve` send it.",
    "OCTAVO_ADMIN_KEY": "A key for the admin routes of `octavo gateway`, beside those of `--admin-key`.",
    "VLLM_API_KEY": "The same for servers, under vLLM's name.",
    "OPENAI_API_KEY": "The key that `octavo chat`, `complete` and `bench serve` send without `--api-key` and "
    "`OCTAVO_API_KEY`.",
    "OCTAVO_CACHE": "Folder of the default model. Without it a folder `octavo` in `XDG_CACHE_HOME`, or in `~/.cache`.",
    "XDG_CACHE_HOME": "Folder of caches, unless `OCTAVO_CACHE` is set.",
    "XDG_STATE_HOME": "Folder of the lines typed in `octavo chat` and `complete`; `~/.local/state` by default.",
    "NO_COLOR": "Anything but empty keeps colours and Markdown from the terminal.",
    "OCTAVO_KERNELS": "Archive of `octavo kernels`, whose compiled kernels a server on a GPU starts from.",
    "OCTAVO_CPU_ISA": "Instruction set of the native kernels, in the place of the best that this processor has.",
    "OCTAVO_CPU_THREADS": "Number of threads that compute, unless `--cpu-threads-bind` says which.",
    "OCTAVO_ALLOW_RUNTIME_LORA_UPDATING": "Anything but empty is `--enable-runtime-lora-updating`.",
    "OCTAVO_SERVER_DEV_MODE": "`1` is `--enable-server-dev-mode`.",
    "OCTAVO_NODES_TOKEN": "Secret that the hosts of `--nnodes` and of `-dp` show each other, the same on all of them.",
    "OCTAVO_KV_CACHE_PEER_KEY": "The API key of the servers of `--kv-cache-peers`, if it is not this server's own. "
    "For a network it must be none of this server's.",
    "RAY_ADDRESS": "Cluster of Ray, for stages and engines, host:port, if not the one that was started here.",
    "HF_HUB_OFFLINE": "`1` keeps `octavo doctor`, and the hub's library, from asking the hub.",
    "TRANSFORMERS_CACHE": "Folder of the hub's models, unless `--download-dir` says so; the former `HF_HUB_CACHE`.",
    "HF_HUB_CACHE": "The same under the hub's library's name.",
    "HF_HOME": "Folder of the hub's library. Models are in its folder `hub` unless `HF_HUB_CACHE` names another.",
    "HF_ENDPOINT": "Address of the hub, which `octavo doctor` asks.",
    "PIP_INDEX_URL": "Address of the package index, which `octavo doctor` asks and the default model comes from.",
    "UV_DEFAULT_INDEX": "The same for uv; in environments without pip it is where the default model comes from.",
    "UV_INDEX_URL": "The same under uv's older name.",
    "UV": "uv's program, set by uv itself: in an environment without pip it may fetch the default model.",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "How spans are sent: `grpc`, the default, or `http/protobuf`.",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "The same, unless the one for traces is set.",
    "OTEL_SERVICE_NAME": "Name of the service in spans; `octavo` by default.",
    "KUBERNETES_SERVICE_HOST": "Set by Kubernetes: the address of the API server, which `octavo gateway` asks for "
    "endpoints.",
    "KUBERNETES_SERVICE_PORT": "Its port, likewise.",
    "RUNTIME_DIRECTORY": "Set by systemd: the folder of the processes' sockets, in place of the temporary folder.",
    "PYTHONPATH": "Folders of modules, which the engine's processes search too. Relative ones are left out.",
}
# vLLM's variables that Octavo reads (`ServerArgs.api_keys`), or that turn off usage statistics, which Octavo never
# sends.
HARMLESS = {
    "VLLM_API_KEY", "VLLM_USAGE_STATS", "VLLM_USAGE_SOURCE", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK",
}  # fmt: skip
# Counterparts of other variables of vLLM.
COUNTERPARTS = {
    "VLLM_SERVER_DEV_MODE": "--enable-server-dev-mode or OCTAVO_SERVER_DEV_MODE=1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "OCTAVO_ALLOW_RUNTIME_LORA_UPDATING=1, with --enable-lora and --lora-root",
    "VLLM_CPU_KVCACHE_SPACE": "--cpu-memory-utilization",
    "VLLM_CPU_OMP_THREADS_BIND": "--cpu-threads-bind",
    "VLLM_ATTENTION_BACKEND": "--attention-backend",
    "VLLM_CACHE_ROOT": "OCTAVO_CACHE",
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": "--engine-step-timeout",
    "VLLM_ENGINE_READY_TIMEOUT_S": "--engine-ready-timeout",
    "VLLM_LOGGING_LEVEL": "--uvicorn-log-level",
}
