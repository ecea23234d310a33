"""`octavo bench`: what the engine costs and yields, measured from outside as a user would. One module a subcommand."""
