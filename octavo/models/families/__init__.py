"""The architectures: a table of dense ones, one of those with experts, one of those with latent attention, one of
Mamba's, one of others with layers that keep a state, Gemma 4's, one of encoders. `settings` has what their entries
share, `octavo.models.readers` reads config.json by them and by `defaults.json`, what config.json may leave out.
"""

from octavo.models.families import dense, encoders, experts, gemma_4, latent, mamba, recurrent

FAMILIES = (
    dense.FAMILIES
    | experts.FAMILIES
    | latent.FAMILIES
    | mamba.FAMILIES
    | recurrent.FAMILIES
    | gemma_4.FAMILIES
    | encoders.FAMILIES
)
