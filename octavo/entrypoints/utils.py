"""Names that servers written for vLLM import from its module of this name."""


def cli_env_setup() -> None:
    """Do nothing. vLLM sets a variable for the start of its workers; Octavo's workers need none."""
