"""Nothing lives here: see `octavo.v1`."""
