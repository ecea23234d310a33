"""The `octavo` command. `main` knows the subcommands; each is a module that is imported when it is called."""
