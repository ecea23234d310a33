"""What models are built of. A layer owns packed weights and calls `Ops`; it knows nothing of requests or scheduling."""
