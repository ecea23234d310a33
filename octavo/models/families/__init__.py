"""The architectures: a table of dense ones, one of those with experts, one of those with latent attention, one of those
with layers that keep a state, one of encoders. `settings` has what their entries share, `octavo.models.readers` reads
config.json by them.
"""

from octavo.models.families import dense, encoders, experts, latent, recurrent

FAMILIES = dense.FAMILIES | experts.FAMILIES | latent.FAMILIES | recurrent.FAMILIES | encoders.FAMILIES
