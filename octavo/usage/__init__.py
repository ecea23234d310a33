"""Nothing lives here: no statistics of use are kept or sent. See `octavo.usage.usage_lib`."""
