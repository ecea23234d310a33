"""Who runs in the next step, with how many tokens. `scheduler` decides, `plan` is what it decides."""
