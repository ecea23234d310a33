"""A GGUF file's metadata as config.json and generation_config.json, in Hugging Face's words.

The table of architectures, with the particulars of each, is in `gguf_architectures`.
"""

from typing import Any

from octavo.errors import LoadError
from octavo.loading.gguf_architectures import ARCHITECTURES
from octavo.loading.gguf_file import GGUFFile
from octavo.loading.gguf_layout import RANK, Architecture
from octavo.loading.gguf_settings import EXPERTS
from octavo.loading.gguf_values import Metadata
from octavo.loading.jinja_template import text_after_answer

# Texts of tokens that end a turn: many files name only the token that ends a document (llama.cpp, llama-vocab.cpp).
_TURN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>",
    "<|end|>", "<|return|>", "<|call|>", "[e~[",
)  # fmt: skip
# Harmony's messages end with <|end|>, and its turns with these tokens.
_HARMONY_ENDS = {"<|return|>", "<|call|>"}
# In a chat template: turns of several messages, each of which ends with <|eom|> (Muse Glimmer).
_MESSAGE_TO_SELF = "assistant to=self"
_MAX_LAYERS = 1 << 13
# llama.cpp's keys below general.sampling. whose meaning is that of generation_config.json's.
_SAMPLING_KEYS = {
    "temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip
_CONTROL = 3  # the token type of control tokens
_POOLING_TYPES = {0: None, 1: "MEAN", 2: "CLS", 3: "LAST"}


def architecture_of(file: GGUFFile) -> tuple[Metadata, Architecture]:
    """Return the file's metadata and its architecture. Raises `LoadError` for an architecture that is not built."""
    name = file.metadata.get("general.architecture")
    has_experts = bool(file.metadata.get(f"{name}.expert_count"))
    read = [known for known, one in ARCHITECTURES.items() if one.experts is not None or not has_experts]
    if not isinstance(name, str) or name not in read:
        raise LoadError(
            f"{file.path}: GGUF architecture {name!r}{' with experts' if has_experts else ''} is not built yet; these "
            f"are: {', '.join(read)}."
        )
    return Metadata(file, name), ARCHITECTURES[name]


def gguf_config(file: GGUFFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the file's config.json and generation_config.json. Raises `LoadError` if metadata are missing, damaged or
    ask for something that is not built."""
    metadata, architecture = architecture_of(file)
    tensors = file.tensors
    if "token_embd.weight" not in tensors:
        raise LoadError(f"{file.path} has no tensor token_embd.weight: it is not a whole model.")
    num_layers = metadata.number("block_count")
    if not 0 < num_layers <= _MAX_LAYERS:  # first of all, as settings make lists of so many entries
        raise LoadError(f"{file.path}: metadata key {metadata.architecture}.block_count is {num_layers}.")
    has_experts = metadata.number("expert_count", 0) > 0
    settings = {**({} if architecture.experts is None else EXPERTS), **architecture.settings}
    said = {key: setting(metadata) if callable(setting) else setting for key, setting in settings.items()}
    if has_experts:
        said["norm_topk_prob"] = bool(metadata.get("expert_weights_norm", architecture.experts))
    feed_forward = said.get("intermediate_size")
    if feed_forward is None:
        least = (0,) if has_experts else ()
        feed_forward = metadata.number("feed_forward_length", *least)
    variants = [name for name, fits in architecture.variants.items() if fits(metadata)]
    # A file has the epsilon of RMSNorm or of LayerNorm. If it has neither, the last call raises the error.
    rms_eps, eps = (metadata.real(f"attention.layer_norm_{kind}epsilon", None) for kind in ("rms_", ""))
    if rms_eps is None and eps is None:
        metadata.real("attention.layer_norm_rms_epsilon")
    config: dict[str, Any] = {
        "architectures": [*variants, architecture.class_name][:1],
        "model_type": metadata.architecture,
        "has_standard_names": True,  # names of settings are not those of the class's own configuration
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": metadata.number("embedding_length"),
        "intermediate_size": feed_forward,
        # The last layers may predict draft tokens (nextn_predict_layers) and are no part of the model.
        "num_hidden_layers": num_layers - metadata.number("nextn_predict_layers", 0),
        **({} if architecture.is_without_heads else _heads(metadata, said.get("num_key_value_heads"))),
        "max_position_embeddings": metadata.number("context_length"),
        **({"layer_norm_eps": eps} if rms_eps is None else {"rms_norm_eps": rms_eps}),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "float32" if all(t.type.name == "F32" for t in tensors.values()) else "bfloat16",
    }
    config |= {key: value for key, value in said.items() if value is not None}
    if "rope_parameters" not in config and not architecture.is_without_heads:
        config["rope_parameters"] = metadata.rope()
    kind = metadata.number("pooling_type", 0)
    config |= _reranker(metadata) if kind == RANK else _pooling(metadata, kind)
    ids = _token_ids(file)
    return config | ids, ids | _sampling_defaults(file)


def _pooling(metadata: Metadata, kind: int) -> dict[str, Any]:
    """Return the pooling settings of an embedding model, and the matrices after the pooling. `kind` is llama.cpp's
    pooling_type. Raises `LoadError` for a kind that is not built."""
    if kind not in _POOLING_TYPES:
        known = ", ".join(map(str, (*_POOLING_TYPES, RANK)))
        raise LoadError(f"{metadata.file.path}: pooling_type {kind} is not built; {known} are.")
    if (pooling := _POOLING_TYPES[kind]) is None:
        return {}
    dense = {name: metadata.tensors.get(f"{name}.weight") for name in ("dense_2", "dense_3")}
    return {
        "pooling_type": pooling,
        "pooled_dense": [(name, info.shape[0]) for name, info in dense.items() if info is not None],
    }


def _reranker(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of a reranker's head. Raises `LoadError` for a head that is not built."""
    path, output = metadata.file.path, metadata.tensors.get("cls.output.weight")
    labels = metadata.get("classifier.output_labels")
    if metadata.architecture == "qwen3" and output is not None:
        if not isinstance(labels, list) or sorted(labels) != ["no", "yes"] or output.shape[0] != len(labels):
            raise LoadError(f"{path}: a reranker by the labels {labels} is not built; one by yes and no is.")
        # The rows of the output matrix for these tokens.
        return {
            "classifier_from_token": [labels.index("no"), labels.index("yes")], "is_original_qwen3_reranker": True,
            "classifier_matrix": ("cls.output", len(labels)),
        }  # fmt: skip
    if metadata.architecture != "bert" or output is None or "cls.weight" not in metadata.tensors:
        raise LoadError(
            f"{path}: this head of a reranker (pooling_type {RANK}) is not built; those of bert with the tensors "
            "cls.weight and cls.output.weight and of qwen3 with cls.output.weight are."
        )
    named = isinstance(labels, list) and len(labels) == output.shape[0]
    return {"num_labels": output.shape[0]} | ({"id2label": dict(enumerate(labels))} if named else {})


def _heads(metadata: Metadata, num_kv_heads: int | None) -> dict[str, int]:
    path, num_heads = metadata.file.path, metadata.number("attention.head_count")
    if num_kv_heads is None:
        num_kv_heads = metadata.number("attention.head_count_kv", num_heads)
    if num_heads <= 0 or num_kv_heads <= 0:
        raise LoadError(f"{path} is damaged: it counts {num_heads} query and {num_kv_heads} key/value heads.")
    head_dim = metadata.head_dim
    value_dim = metadata.number("attention.value_length", head_dim)
    if value_dim != head_dim and metadata.get("attention.kv_lora_rank") is None:
        raise LoadError(f"{path}: heads with keys of {head_dim} and values of {value_dim} are not built.")
    return {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    read = {
        name: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom", "padding")
    }
    for name, value in read.items():
        if value is not None and type(value) is not int:
            raise LoadError(f"{file.path}: tokenizer.ggml.{name}_token_id is {str(value)[:60]}, no token id.")
    # A chat model ends its turn with eot or eom (Llama 3's <|eot_id|>, <|eom_id|>) where eos ends a document.
    kinds = ("eos", "eot") if _eom_ends_message(file) else ("eos", "eot", "eom")
    named = [read[name] for name in kinds if read[name] is not None]
    eos = list(dict.fromkeys([*named, *_turn_ends(file)]))
    ids = {
        "bos_token_id": read["bos"],
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": read["padding"],
    }
    return {key: value for key, value in ids.items() if value is not None}


def _eom_ends_message(file: GGUFFile) -> bool:
    """Return whether the mark <|eom|> ends a message and not the turn."""
    template = file.metadata.get("tokenizer.chat_template")
    return isinstance(template, str) and _MESSAGE_TO_SELF in template


def _sampling_defaults(file: GGUFFile) -> dict[str, float]:
    """Return the file's defaults of sampling, in the words of generation_config.json."""
    given = {name: file.metadata.get(f"general.sampling.{name}") for name in (*_SAMPLING_KEYS, "penalty_last_n")}
    if given.pop("penalty_last_n") not in (None, -1):
        del given["penalty_repeat"]  # Octavo's penalty is for all tokens, and this one for the last few
    # Files hold float32: 0.95 arrives as 0.949999988.
    return {
        _SAMPLING_KEYS[name]: value if isinstance(value, int) else float(f"{value:.7g}")
        for name, value in given.items()
        if type(value) in (int, float)
    }


def _turn_ends(file: GGUFFile) -> list[int]:
    """Return the ids of the tokens that end a turn: tokens with a known text, else the token that the chat template
    writes after an answer."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return []
    ids = {token: index for index, token in enumerate(tokens)}
    known = [text for text in _TURN_ENDS if text in ids]
    if ids.keys() >= _HARMONY_ENDS:
        known = [text for text in known if text != "<|end|>"]
    if _eom_ends_message(file):
        known = [text for text in known if text != "<|eom|>"]
    template = file.metadata.get("tokenizer.chat_template")
    if not known and isinstance(template, str):
        types = file.metadata.get("tokenizer.ggml.token_type")
        after = text_after_answer(template)
        # Only a single control token counts: a text that begins the next turn does not end this one.
        if after in ids and isinstance(types, list) and types[ids[after] : ids[after] + 1] == [_CONTROL]:
            known.append(after)
    return [ids[text] for text in known]


def architectures() -> set[str]:
    """Return config.json's names of the architectures whose GGUF files can be read."""
    return {name for one in ARCHITECTURES.values() for name in (one.class_name, *one.variants)}
