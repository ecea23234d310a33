"""The architectures: a table of dense ones, one of those with experts, one of those with layers that keep a state.
`settings` has what their entries share, `octavo.models.readers` reads config.json by them.
"""

from octavo.models.families import dense, experts, recurrent

FAMILIES = dense.FAMILIES | experts.FAMILIES | recurrent.FAMILIES
