"""The networks: `decoder_config` reads a configuration (no torch), `decoder` is the Llama family."""
