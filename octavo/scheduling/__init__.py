"""Which sequences run in the next step, with how many tokens. `scheduler` decides; `octavo.plan` is the decision."""
