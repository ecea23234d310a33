"""The architectures: a table of dense ones, one of those with experts, one of those with latent attention, one of
Mamba's, one of others with layers that keep a state, Gemma 4's, one of encoders. `settings` has what their entries
share, `octavo.models.readers` reads config.json by them and by `defaults.json`, what config.json may leave out.
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
