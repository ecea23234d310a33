"""Many models and replicas behind one address: `octavo gateway`.

A request names a model (`request_body`); the `catalogue` says where the model runs, or how `discovery` finds it; its
`deployment` starts it if it has to, within the `memory_budget`; the `replica_router` chooses a replica; the `proxy`
passes bytes both ways. Nothing of the engine is imported: replicas are servers that speak HTTP. Beside it:
`ollama_routes` for Ollama's clients, `stream_progress` for streams that outlive their replica, `key_store`,
`usage_counter` and `admin` for clients' keys, and the `page` at /ui.
"""
