"""`octavo bench`: measures the engine's speed and memory from outside, as a user would. Each subcommand has a
module."""
