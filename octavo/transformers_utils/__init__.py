"""Nothing lives here: see `octavo.transformers_utils.tokenizer`."""
