"""Models that pool (embeddings, classes, scores, rankings): the routes, their bodies, and the methods of `LLM`."""
