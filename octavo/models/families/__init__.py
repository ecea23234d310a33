"""The architectures: a table of dense ones, one of those with experts, one of those with latent attention, one of those
with layers that keep a state, Gemma 4's, Zamba's, one of encoders. `settings` has what their entries share,
`octavo.models.readers` reads config.json by them and by
`defaults.json`, which has what config.json may leave out.
"""

from octavo.models.families import dense, encoders, experts, gemma_4, latent, recurrent, zamba

FAMILIES = (
    dense.FAMILIES
    | experts.FAMILIES
    | latent.FAMILIES
    | recurrent.FAMILIES
    | gemma_4.FAMILIES
    | zamba.FAMILIES
    | encoders.FAMILIES
)
