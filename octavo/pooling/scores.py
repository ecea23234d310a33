"""How well two texts go together, from their vectors."""

import numpy as np
from numpy.typing import NDArray

from octavo.pooling.vectors import activated


def similarity(query: NDArray[np.float32], document: NDArray[np.float32]) -> float:
    """Return the cosine of two embeddings [size]. For embeddings of tokens [tokens, size], return the sum, over the
    query's tokens, of the best product with a token of the document (late interaction, Khattab & Zaharia 2020)."""
    if query.ndim == 2:
        return float((query @ document.T).max(1).sum())
    one, other = (activated(x[None], "normalize")[0] for x in (query, document))
    return min(1.0, max(-1.0, float(one @ other)))  # rounding may leave the range
