"""The table of architectures, in modules by kind: `dense`; `moe` (experts); `deepseek` (latent attention);
`mamba_hybrids` (Mamba); `linear_attention` (other layers with a state); `gemma_4`; `encoders`. `settings` has the
settings that several of them share.

`octavo.models.config_reader` reads config.json by this table, with defaults from `defaults.json`.
"""

from octavo.models.families import deepseek, dense, encoders, gemma_4, linear_attention, mamba_hybrids, moe

FAMILIES = (
    dense.FAMILIES
    | moe.FAMILIES
    | deepseek.FAMILIES
    | mamba_hybrids.FAMILIES
    | linear_attention.FAMILIES
    | gemma_4.FAMILIES
    | encoders.FAMILIES
)
