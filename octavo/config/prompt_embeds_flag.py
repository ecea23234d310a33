"""Checks --enable-prompt-embeds and makes the `PromptEmbedsConfig`."""

from octavo.config.engine_args import EngineArgs
from octavo.config.engine_config import PromptEmbedsConfig
from octavo.config.speculation_flags import speculative_config
from octavo.errors import ConfigError
from octavo.loading.checkpoint import Checkpoint
from octavo.models.description import ModelDescription
from octavo.speculative_config import HEAD_METHODS

# Models that scale embeddings: whether the output of transformers' embedding is already scaled.
_MULTIPLIES_ITSELF = {
    "GemmaForCausalLM": True, "Gemma2ForCausalLM": True, "Gemma3ForCausalLM": True, "GraniteForCausalLM": False,
    "GraniteMoeForCausalLM": False,
}  # fmt: skip


def prompt_embeds_config(
    args: EngineArgs, checkpoint: Checkpoint, description: ModelDescription, max_model_len: int, *, pools: bool
) -> PromptEmbedsConfig | None:
    """Return the configuration of prompts given as embeddings, or None without the flag. Raises `ConfigError` for
    models that cannot take them."""
    if not args.enable_prompt_embeds:
        return None
    speculative, multiplier = speculative_config(args), description.embedding_multiplier
    for what, is_so in {
        "models that pool": pools,
        "models that see or hear": description.takes_media or description.num_cross_tokens > 0,
        "models that transformers computes": description.impl != "octavo",
        "inputs of tokens to every layer": description.per_layer_embeddings is not None,
        "embeddings of another size than the hidden states": description.embedding_size is not None,
        f"the multiplied embeddings of {description.architecture}": multiplier != 1.0
        and description.architecture not in _MULTIPLIES_ITSELF,
        "a draft head": speculative is not None and speculative.method in HEAD_METHODS,
    }.items():
        if is_so:
            raise ConfigError(
                f"--enable-prompt-embeds is not built yet for {what}; leave it out for {checkpoint.name}."
            )
    is_multiplied = _MULTIPLIES_ITSELF.get(description.architecture, True)
    return PromptEmbedsConfig(
        hidden_size=description.hidden_size,
        max_rows=max_model_len,
        multiplier=1.0 if is_multiplied else multiplier,
        cache_tokens=max(args.media_cache_tokens, max_model_len),
    )
