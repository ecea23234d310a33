"""Which sequences run in the next step, with how many tokens: `scheduler` decides, in an `octavo.step_plan`."""
